"""Checkpoints: whole or not there, verified, readable by anybody, and gone on from when the disk is full."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

import anyorder as ao
from anyorder import checkpoint
from anyorder.checkpoint import CorruptCheckpoint, folder_of, newest_whole, steps_of
from anyorder.data.shards import Dataset
from anyorder.data.tokenizer import make_tokenizer
from anyorder.training.events import Saved
from anyorder.training.loop import train
from tests.conftest import flip
from tests.test_training import run_config


@pytest.fixture
def run(data: Dataset, tmp_path: Path) -> Path:
    """A finished run with two checkpoints, at steps 10 and 12."""
    list(train(tmp_path / "run", run_config(data), data))
    return tmp_path / "run"


def test_only_the_newest_are_kept_and_anybody_can_read_them(run: Path) -> None:
    assert steps_of(run) == [10, 12]
    assert [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
    model, tokenizer = ao.load(run)
    assert tokenizer is not None
    stored = load_file(folder_of(run, 12) / "ema.safetensors")
    assert {name for name, _ in model.named_parameters()} == set(stored)
    assert all(torch.equal(stored[name], parameter) for name, parameter in model.named_parameters())


NAMES = ["model.safetensors", "ema.safetensors", "optimizer/__0_0.distcp", "optimizer/.metadata", "about.json"]


@pytest.mark.parametrize("name", [*NAMES, "checkpoint.json"])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.99])
def test_one_flipped_byte_is_reported_and_the_previous_checkpoint_used(run: Path, name: str, where: float) -> None:
    previous = load_file(folder_of(run, 10) / "ema.safetensors")
    flip(folder_of(run, 12) / name, where)
    with pytest.warns(CorruptCheckpoint, match="step-12 is corrupt"):
        model, _ = ao.load(run)
    assert torch.equal(model.token_embedding.weight, previous["token_embedding.weight"])


def test_training_goes_on_from_the_previous_one_and_arrives_at_the_same_weights(run: Path, data: Dataset) -> None:
    finished = load((folder_of(run, 12) / "model.safetensors").read_bytes())
    flip(folder_of(run, 12) / "model.safetensors")
    with pytest.warns(CorruptCheckpoint, match="step-12 is corrupt"):
        list(train(run, run_config(data), data))
    again = load_file(folder_of(run, 12) / "model.safetensors")
    assert all(torch.equal(finished[name], again[name]) for name in finished)
    assert (run / "checkpoints" / "corrupt-step-12").is_dir()  # evidence is kept, out of the way


def test_truncated_and_missing_files_are_reported(run: Path) -> None:
    shard = folder_of(run, 12) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.warns(CorruptCheckpoint, match=r"model\.safetensors is not as it was written"):
        assert newest_whole(run) == 10
    (folder_of(run, 10) / "ema.safetensors").unlink()
    with (
        pytest.warns(CorruptCheckpoint) as warned,
        pytest.raises(ao.InputError, match="no whole checkpoint"),
    ):
        newest_whole(run)
    assert "ema.safetensors is missing" in str(warned[1].message)


def test_a_torn_save_is_not_seen(run: Path) -> None:
    torn = run / "checkpoints" / ".step-15.abc.partial"
    shutil.copytree(folder_of(run, 12), torn)
    assert newest_whole(run) == 12


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_a_full_disk_keeps_the_previous_checkpoint(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = tmp_path / "run"
    events = train(run, run_config(data), data)
    next(event for event in events if isinstance(event, Saved))
    if where == "weights":
        monkeypatch.setattr(checkpoint, "save_file", no_space)
    else:
        monkeypatch.setattr(checkpoint.distributed_checkpoint, "save", no_space)
    with pytest.raises(ao.InputError, match=r"no space left .*step-10; the previous checkpoint .*step-5 is untouched"):
        list(events)
    assert steps_of(run) == [5]
    assert newest_whole(run) == 5
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-5"]
    monkeypatch.undo()
    list(train(run, run_config(data), data))
    assert newest_whole(run) == 12


@pytest.mark.parametrize("size", ["3m", "5m", "6m"])  # so that different files are the ones that do not fit
def test_a_disk_that_really_is_full(data: Dataset, tmp_path: Path, size: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system; the two tests above imitate one")
    try:
        config = run_config(data, keep=1000, checkpoint_every=1)
        with pytest.raises(ao.InputError, match=r"no space left .* the previous checkpoint .* is untouched"):
            list(train(disk / "run", config, data))
        newest = newest_whole(disk / "run")
        assert newest is not None
        assert newest == steps_of(disk / "run")[-1] >= 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_weights_of_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    config = (run / "config.json").read_text().replace('"layers": 2', '"layers": 3')
    (run / "config.json").write_text(config)
    with pytest.raises(ao.InputError, match=r"config\.json describes another model than .*step-12"):
        ao.load(run)


def test_a_runs_tokenizer_is_its_own(run: Path, data: Dataset) -> None:
    path = run / "tokenizer.json"
    whole = path.read_text(encoding="utf-8")
    path.write_text(make_tokenizer("bpe:290", iter(["the law of the people"])).to_json(), encoding="utf-8")
    with pytest.raises(ao.InputError, match="is not the tokenizer"):
        ao.load(run)
    path.unlink()
    with pytest.raises(ao.InputError, match="no tokenizer file"):
        ao.load(run)
    path.write_text(whole, encoding="utf-8")
    ao.load(run)
