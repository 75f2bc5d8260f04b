"""A run that was killed, stopped or damaged ends as one that was left alone: bit for bit."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from anyorder.checkpoint import folder_of, load_optimizer, load_run, read_run, steps_of
from anyorder.data.shards import Dataset
from anyorder.training.optimizers import make_optimizers, make_state, optimizer_tensors
from tests.conftest import flip

STEPS, KILLS, KILLS_AT_START = 600, 10, 4


def command(data: Dataset, run: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "anyorder.cli", "train", "tiny", "--data", str(data.folder), "--out", str(run)),
        *("--layers", "2", "--width", "32", "--heads", "2", "--positions", "16", "--batch-size", "8"),
        *("--steps", str(STEPS), "--checkpoint-every", "7", "--validate-every", "150"),
    ]


def end_state(run: Path) -> dict[str, Tensor]:
    """Everything that training ends with: weights, averages and the optimizers' tensors."""
    folder = folder_of(run, STEPS)
    state = {
        f"{kind}/{name}": tensor
        for kind in ("model", "ema")
        for name, tensor in load_file(folder / f"{kind}.safetensors").items()
    }
    config = read_run(run)
    assert config.training is not None
    model, _ = load_run(run)
    optimizers = make_optimizers(model, config.training)
    make_state(optimizers)
    optimizer = {name: torch.full_like(tensor, -7.0) for name, tensor in optimizer_tensors(model, optimizers).items()}
    load_optimizer(folder, optimizer)
    return state | {f"optimizer/{name}": tensor for name, tensor in optimizer.items()}


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def uninterrupted(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("resume") / "uninterrupted"
    subprocess.run(command(data, run), check=True, capture_output=True)
    return run


def assert_same_end(run: Path, uninterrupted: Path) -> None:
    expected, found = end_state(uninterrupted), end_state(run)
    assert expected.keys() == found.keys()
    assert {name.partition("/")[0] for name in expected} == {"model", "ema", "optimizer"}
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert losses(run) == losses(uninterrupted)
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))


def start(data: Dataset, run: Path) -> subprocess.Popen[str]:
    """Start training and return once the process has opened its metrics, which it does just before its first step."""
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    process = subprocess.Popen(command(data, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not metrics.exists() or metrics.stat().st_mtime_ns == before:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    return process


def test_kills_at_random_moments_change_nothing(data: Dataset, tmp_path: Path, uninterrupted: Path) -> None:
    """Ten kills while it trains or saves, and four anywhere from the first import to the first steps."""
    run = tmp_path / "run"
    draw = random.Random()
    reached = []
    for number in range(KILLS + KILLS_AT_START):
        if number % 4 == 3:
            process = subprocess.Popen(command(data, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            time.sleep(draw.uniform(0.5, 3.0))
        else:
            process = start(data, run)
            time.sleep(draw.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL  # it was still at work
        reached.append(steps_of(run)[-1] if steps_of(run) else 0)
    print("checkpoints after each kill:", reached)
    assert reached[-1] < STEPS
    output = subprocess.run(command(data, run), check=True, capture_output=True, text=True).stdout
    if reached[-1]:
        assert f"goes on from step {reached[-1]}" in output
    assert_same_end(run, uninterrupted)


def test_a_kill_while_the_run_is_made_does_not_block_it(data: Dataset, tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "tokenizer.json").write_text("{")
    (run / ".config.json.partial").write_text("{")
    subprocess.run(command(data, run), check=True, capture_output=True)
    assert_same_end(run, uninterrupted)


def test_stopping_politely_and_a_flipped_byte_change_nothing(
    data: Dataset, tmp_path: Path, uninterrupted: Path
) -> None:
    run = tmp_path / "run"
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(data, run)
        time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert "the same command goes on from there" in output
        stopped_at = steps_of(run)[-1]
        assert 0 < stopped_at < STEPS
        assert f"stopped at step {stopped_at}" in output
    flip(folder_of(run, stopped_at) / "optimizer" / "__0_0.distcp")
    last = subprocess.run(command(data, run), check=True, capture_output=True, text=True)
    assert f"step-{stopped_at} is corrupt" in last.stderr
    assert "goes on from step" in last.stdout
    assert_same_end(run, uninterrupted)
