"""Benchmarks: what is computed is what is counted; each runs on a small shape and refuses what it cannot measure."""

import json
from pathlib import Path

import pytest

from anyorder.bench.families import bench_families
from anyorder.bench.measure import in_turn, measure_ceilings, median_ratio
from anyorder.cli import main
from anyorder.data.shards import Dataset
from tests.conftest import refused


def test_what_the_families_cost_is_computed_as_it_is_counted() -> None:
    for row in bench_families(lambda what, done, of: None, "tiny"):
        assert row["training_operations_a_token"] == pytest.approx(row["counted_training_operations_a_token"], rel=1e-6)
        assert row["passes_to_score_an_order"] == row["counted_passes_to_score"]
        assert row["slots_to_score_an_order"] == row["counted_slots_to_score"]
        assert row["passes_to_generate"] == row["counted_passes_to_generate"]
        assert row["slots_to_generate"] == row["counted_slots_to_generate"]
        share = row["counted_share_of_tokens_with_gradient"]
        assert share == pytest.approx(row["share_of_tokens_with_gradient"], abs=0.05)


def test_ways_are_timed_in_turn() -> None:
    called = []
    taken = in_turn({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, 3, lambda *said: None)
    assert called == ["a", "b"] * 3
    assert all(len(seconds) == 3 for seconds in taken.values())
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == 3.0
    ceilings = measure_ceilings(64, 1)
    assert min(ceilings.fp32_gflops, ceilings.bf16_gflops, ceilings.bandwidth_gb) > 0


def test_bench_commands(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shape = "--layers 1 --width 32 --heads 2 --positions 32 --batch-size 4 --steps 2"
    assert main(["train", "tiny", "--data", str(data.folder), "--out", str(run), *shape.split()]) == 0
    for what, rows in (("speculation", 28), ("infilling", 12)):
        file = tmp_path / f"{what}.json"
        bench = ["bench", what, "--run", str(run), "--data", str(data.folder), "--texts", "3", "--json", str(file)]
        assert main(bench) == 0
        assert len(json.loads(file.read_text())["rows"]) == rows
    file = tmp_path / "sampling.json"
    assert main(["bench", "sampling", "--preset", "tiny", "--repeats", "1", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["times_faster_than_encoder"] > 0
    assert "accepted: --run RUN --data DATA" in refused(capsys, "bench", "speculation")
    assert "accepted: tiny, demo, small, medium" in refused(capsys, "bench", "families", "--preset", "huge")
    assert "repeats is 0" in refused(capsys, "bench", "sampling", "--repeats", 0)
    assert "--json" in refused(capsys, "bench", "sampling", "--json", tmp_path / "no" / "file")
