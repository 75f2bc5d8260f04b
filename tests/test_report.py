"""The report: the same figures for any batch size and number of processes, after an interruption too."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.evaluation.blocks import Blocks, contiguous, wrapped
from anyorder.evaluation.partial import Partial, key_of
from anyorder.evaluation.report import choose_figures, evaluate
from tests.conftest import small_model


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, count).astype(np.uint32)


def texts() -> dict[str, Blocks]:
    """Two texts whose last blocks are shorter."""
    return {"one": contiguous([tokens(100), tokens(90, 1)], 16), "two": contiguous([tokens(37, 2)], 16)}


FIGURES = choose_figures(small_model(), random_orders=2, along=("right_to_left",), ensemble=4, contexts=3, bound=True)


def scored(**changes: Any) -> list[dict[str, Any]]:
    return list(evaluate(small_model(), texts(), FIGURES, np.full(64, 3), **changes))


def close(one: Any, other: Any) -> None:
    """Compare two reports: figures to 1e-6, everything else exactly."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if key.startswith("perplexity"):
                assert math.isclose(one[key], other[key], rel_tol=1e-6)
            else:
                close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            close(a, b)
    elif isinstance(one, float):
        assert abs(one - other) <= 1e-6
    else:
        assert one == other


def test_all_that_is_asked_for_is_reported() -> None:
    one, two = scored()
    assert (one["tokens"], one["sequences"], two["tokens"], two["sequences"]) == (190, 12, 37, 3)
    assert one["tokens_sha256"] != two["tokens_sha256"]
    names = [result["name"] for result in one["results"]]
    assert names == [
        *("left to right", "right_to_left", "any order, 2 orders", "any order, mixture of 2"),
        *("masked-diffusion bound", "ensemble of 1", "ensemble of 2", "ensemble of 4"),
    ]
    for result in one["results"]:
        assert result["nats_error"] > 0
        assert result["perplexity"] == pytest.approx(math.exp(result["nats_per_token"]))
        assert result["bits_per_byte"] == pytest.approx(result["nats_per_token"] / math.log(2) / 3)


@pytest.mark.parametrize("mode", ["fast", "paper"])
def test_the_batch_size_changes_nothing(mode: Any) -> None:
    figures = choose_figures(small_model(), 2, ("fixed(3)",), 4, mode, 3, True)
    reports = [list(evaluate(small_model(), texts(), figures, None, 0, size)) for size in (1, 3, 8)]
    for other in reports[1:]:
        close(reports[0], other)


def test_two_processes_report_what_one_does(tmp_path: Path) -> None:
    """As torchrun starts them; each writes what it reports."""
    script = tmp_path / "work.py"
    script.write_text(
        "import json, sys\n"
        "from tests.test_report import scored\n"
        "from anyorder.processes import rank_and_count\n"
        "report = scored()\n"
        "open(f'{sys.argv[1]}/{rank_and_count()[0]}.json', 'w').write(json.dumps(report))\n"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path)],
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    alone = scored()
    for rank in range(2):
        close(json.loads((tmp_path / f"{rank}.json").read_text()), alone)


class Interrupted(Exception):
    pass


def test_an_interrupted_evaluation_goes_on(tmp_path: Path) -> None:
    """What was scored is not scored again, and the figures are the same to the last bit."""
    model, calls, told = small_model(), [0], [0]
    for name in ("forward", "slots"):
        method = getattr(model, name)

        def counted(*arguments: Any, method: Any = method) -> Any:
            calls[0] += 1
            return method(*arguments)

        setattr(model, name, counted)

    def go(stop_after: int | None) -> list[dict[str, Any]]:
        calls[0] = told[0] = 0

        def report(what: str, done: int, of: int) -> None:
            told[0] += 1
            assert 0 <= done <= of
            if told[0] == stop_after:
                raise Interrupted

        return list(evaluate(model, texts(), FIGURES, None, 0, 2, partial_folder=tmp_path / "kept", report=report))

    whole = go(None)
    all_calls = calls[0]
    assert not (tmp_path / "kept").exists()
    with pytest.raises(Interrupted):
        go(20)
    before = calls[0]
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(file.read_text() + '["cut sho')  # as a kill leaves it
    assert go(None) == whole
    assert 0 < calls[0] <= all_calls - before
    assert not (tmp_path / "kept").exists()


def test_what_other_weights_scored_is_not_used(tmp_path: Path) -> None:
    one, other = small_model(0), small_model(1)
    assert key_of(one, 0) != key_of(other, 0)
    assert key_of(one, 0) != key_of(one, 1)
    partial = Partial(tmp_path, key_of(one, 0))
    partial.add("figure", {3: [1.0, 2.0]})
    assert Partial(tmp_path, key_of(one, 0)).found == {"figure": {3: [1.0, 2.0]}}
    assert not Partial(tmp_path, key_of(other, 0)).found


def test_limits_spread_over_the_text() -> None:
    (one, _) = scored(limit=4)
    assert (one["sequences"], one["tokens"], one["tokens_in_all"]) == (4, 64, 190)
    assert texts()["one"].spread(4) == [0, 3, 6, 9]


def test_bad_values() -> None:
    for arguments, said in (
        ({"random_orders": 0}, "accepted: 1 or more"),
        ({"contexts": 0}, "accepted: 1 or more"),
        ({"ensemble": 65}, "accepted: 2 to 64"),
        ({"ensemble": 1}, "accepted: 2 to 64"),
        ({"along": ("sideways",)}, "accepted: left_to_right"),
    ):
        with pytest.raises(ao.InputError, match=said):
            choose_figures(small_model(), **arguments)
    with pytest.raises(ao.InputError, match="reads in any order"):
        choose_figures(small_model(injection="none"), ensemble=4)
    assert [figure.name for figure in choose_figures(small_model(injection="none"))] == ["left to right"]
    with pytest.raises(ao.InputError, match="batch size is 0"):
        scored(batch_size=0)


def test_blocks_hold_every_token() -> None:
    documents = [tokens(10), tokens(3, 1), tokens(14, 2)]
    every = np.concatenate(documents)
    plain = contiguous(documents, 8)
    assert [plain.size(n) for n in range(len(plain))] == [8, 8, 8, 3]
    assert torch.equal(torch.cat([plain.rows([n])[0] for n in range(4)]), torch.from_numpy(every.astype(np.int64)))
    marked = wrapped(documents, 8, mark=99)
    assert [marked.size(n) for n in range(len(marked))] == [8, 8, 8, 8, 5]
    rows = [marked.rows([n])[0] for n in range(5)]
    assert all(row[0] == row[-1] == 99 for row in rows)
    assert torch.equal(torch.cat([row[1:-1] for row in rows]), torch.from_numpy(every.astype(np.int64)))
    assert plain.sha256 != marked.sha256
    assert plain.sha256 == contiguous([every], 4).sha256  # of the tokens, not of how they are cut
