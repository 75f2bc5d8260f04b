"""The order ensemble against the published loop: 16 members at 256 positions, one model, one run, interleaved.

python -m benchmarks.ensembles          # trains its model first, if runs/demo256 is not there
"""

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import anyorder as ao
from anyorder.data.batches import spread_chunks
from anyorder.data.shards import open_dataset
from anyorder.evaluation.ensemble import draw_places, insert, prefix_members
from anyorder.evaluation.figures import Ensemble, PaperEnsemble, score
from anyorder.models.model import LanguageModel
from anyorder.orders import Random
from benchmarks.published_ensemble import Shuffle, ensemble_logprobs, random_shuffles
from benchmarks.record import check, record

DATA, RUN = Path("data/sotu"), Path("runs/demo256")
MEMBERS, LENGTH, CONTEXTS = 16, 256, 2
TIMED, REPEATS = 1, 3  # sequences in each timed call, and how often each is timed
SCORED = 40  # sequences that paper mode scores, for its figure and error
MOST = 100  # sequences that fast mode may score, until its error is no larger
LIMITS = {
    "paper_times_faster": (">=", 4.0),
    "fast_times_faster_at_that_error": (">=", 40.0),
    "largest_difference_in_logprob": ("<=", 1e-4),
    "fast_error_over_paper_error": ("<=", 1.0),
    "difference_in_standard_errors": ("<=", 4.0),
}


def main() -> int:
    model, rows = prepare()
    figures: dict[str, float] = {"largest_difference_in_logprob": same_numbers(model, rows[:1])}
    print(f"the same numbers to {figures['largest_difference_in_logprob']:.1e}", flush=True)
    figures |= timed(model, rows[:TIMED])
    figures |= errors(model, rows)
    share = figures["fast_sequences"] / figures["paper_sequences"]
    figures["fast_times_faster_at_that_error"] = figures["fast_times_faster"] / share
    record("ensembles", figures)
    return 1 if check(figures, LIMITS) else 0


def prepare() -> tuple[LanguageModel, Tensor]:
    """Load the model and SCORED held-out sequences, making what is not there."""
    train = f"train demo --data {DATA} --out {RUN} --positions {LENGTH} --batch-size 16 --steps 500"
    for arguments in (f"prepare sotu --out {DATA} --tokenizer bpe:4096", train):
        subprocess.run([sys.executable, "-m", "anyorder.cli", *arguments.split()], check=True)
    model, _ = ao.load(RUN)
    return model, spread_chunks(open_dataset(DATA).split("validation", LENGTH), LENGTH, MOST)


def same_numbers(model: LanguageModel, rows: Tensor, members: int = 4) -> float:
    """Hand both the same permutations; return the largest difference of any log-probability."""
    generator = torch.Generator().manual_seed(0)
    order = Random().sample(len(rows), LENGTH, generator)
    places = torch.stack([draw_places(members - 1, LENGTH, generator) for _ in rows])  # (B, M - 1, T)
    theirs = ensemble_logprobs(model, rows, order, members, inserted(order, places))
    return float((theirs[:, 1:] - prefix_members(model, rows, order, places)).abs().max())


def inserted(order: Tensor, places: Tensor) -> Shuffle:
    """Build the permutations that insertion at `places` makes."""

    def shuffle(step: int, member: int) -> Tensor:
        made = order[:, :0]
        for i in range(step):
            made = insert(made, places[:, member - 1, i], order[:, i])
        return made

    return shuffle


def timed(model: LanguageModel, rows: Tensor) -> dict[str, float]:
    """Time the published loop and both modes in turn."""
    generator = torch.Generator().manual_seed(0)
    order = Random().sample(len(rows), LENGTH, generator)
    ways: dict[str, Callable[[], object]] = {
        "published": lambda: ensemble_logprobs(model, rows, order, MEMBERS, random_shuffles(order, generator)),
        "paper": lambda: nats_of(PaperEnsemble(MEMBERS), model, rows),
        "fast": lambda: nats_of(Ensemble(MEMBERS, CONTEXTS), model, rows),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    nats_of(Ensemble(2, 1), model, rows)  # warm
    for repeat in range(REPEATS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
            print(
                f"repeat {repeat + 1} of {REPEATS}: {name} {taken[name][-1]:.1f} s for {len(rows)} sequences",
                flush=True,
            )
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    ratios = {
        f"{name}_times_faster": statistics.median(a / b for a, b in zip(taken["published"], taken[name], strict=True))
        for name in ("paper", "fast")
    }
    return {**{f"{name}_seconds": value for name, value in seconds.items()}, **ratios}


def errors(model: LanguageModel, rows: Tensor) -> dict[str, float]:
    """Score SCORED sequences in paper mode, and as many in fast mode as give no larger a standard error."""
    paper = nats_of(PaperEnsemble(MEMBERS), model, rows[::2][:SCORED], report=True)[:, -1] / LENGTH  # (N,), all members
    fast = nats_of(Ensemble(MEMBERS, CONTEXTS), model, torch.cat((rows[::2], rows[1::2])), report=True)[:, -1] / LENGTH
    enough = next((n for n in range(SCORED, MOST) if error_of(fast[:n]) <= error_of(paper)), MOST)
    apart = paper - fast[:SCORED]  # the same sequences in both
    return {
        "members": MEMBERS,
        "positions": LENGTH,
        "contexts": CONTEXTS,
        "paper_sequences": SCORED,
        "fast_sequences": enough,
        "paper_nats_per_token": float(paper.mean()),
        "fast_nats_per_token": float(fast[:SCORED].mean()),
        "paper_error": error_of(paper),
        "fast_error": error_of(fast[:enough]),
        "fast_error_over_paper_error_at_as_many_sequences": error_of(fast[:SCORED]) / error_of(paper),
        "fast_error_over_paper_error": error_of(fast[:enough]) / error_of(paper),
        "difference_in_standard_errors": float(apart.mean().abs()) / error_of(apart),
    }


def error_of(nats: Tensor) -> float:
    return float(nats.std() / math.sqrt(len(nats)))


def nats_of(figure: PaperEnsemble | Ensemble, model: LanguageModel, rows: Tensor, report: bool = False) -> Tensor:
    batches = [([*range(start, start + len(part))], part) for start, part in numbered(rows)]
    parts = []
    for numbers, nats in score(figure, model, iter(batches), seed=0):
        parts.append(nats)
        if report:
            print(f"{figure.name}: {numbers[-1] + 1} of {len(rows)} sequences", flush=True)
    return torch.cat(parts)


def numbered(rows: Tensor, size: int = 4) -> list[tuple[int, Tensor]]:
    return [(start, rows[start : start + size]) for start in range(0, len(rows), size)]


if __name__ == "__main__":
    sys.exit(main())
