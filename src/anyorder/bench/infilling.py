"""What both sides of a blank are worth: held-out text filled in, against writing it left to right from the prefix."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anyorder.bench.measure import Report
from anyorder.data.batches import generator_for, spread_chunks
from anyorder.data.shards import Dataset
from anyorder.evaluation.conditional import logprob
from anyorder.models.families import open_context
from anyorder.models.model import LanguageModel
from anyorder.sampling.fill import fill

ORDERS = ("left_to_right", "random", "margin")


def patterns(tokens: Tensor) -> dict[str, Tensor]:
    """Blank out 95 % and 50 % of each text at random, and one stretch of 20 tokens: (N, T) bool each."""
    count, length = tokens.shape
    chance = torch.rand(tokens.shape, generator=generator_for(0, "blanks"))
    chance = chance.scatter(1, chance.argmin(1, keepdim=True), 0.0)  # one blank at least
    stretch = min(20, length)
    start = (torch.rand(count, 1, generator=generator_for(0, "start")) * (length - stretch + 1)).long()
    place = torch.arange(length)
    return {
        "95 % blank": chance < 0.95,
        "50 % blank": chance < 0.5,
        f"one blank of {stretch}": (place >= start) & (place < start + stretch),
    }


def bench_infilling(model: LanguageModel, data: Dataset, report: Report, texts: int = 128) -> list[dict[str, Any]]:
    """Fill greedily and score the true tokens, pattern by pattern and way by way."""
    length = model.config.positions
    tokens = spread_chunks(data.split("validation", length), length, texts)
    found: list[dict[str, Any]] = []
    for pattern, blanks in patterns(tokens).items():
        for way, written, scores in _ways(model, tokens, blanks):
            report(f"{pattern}, {way}", len(found), 3 * (len(ORDERS) + 1))
            right = ((written == tokens) & blanks).sum(1) / blanks.sum(1)
            row = {
                "pattern": pattern,
                "way": way,
                "exact_match": float(right.mean()),
                "exact_match_error": _error(right),
            }
            if scores is not None:
                nats = scores.sum(1) / blanks.sum(1)
                row |= {"logprob_per_token": float(nats.mean()), "logprob_error": _error(nats)}
            found.append(row)
    return found


def _ways(model: LanguageModel, tokens: Tensor, blanks: Tensor) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield each way, what it writes greedily, and its log-probabilities of the truth where its order is fixed."""
    everything = torch.ones_like(blanks)
    scores = logprob(model, tokens, everything, ~everything)
    yield "from the left alone", _from_the_left(model, tokens, blanks), scores * blanks
    for order in ORDERS:
        out = fill(model, tokens, blanks, order, temperature=0.0, generator=generator_for(0, order))
        its = None
        if order != "margin":
            its = logprob(model, tokens, blanks, ~blanks, order, generator_for(0, order))
        yield f"filled, {order}", out.tokens, its


@torch.no_grad()
def _from_the_left(model: LanguageModel, tokens: Tensor, blanks: Tensor) -> Tensor:
    """Write blanks greedily left to right; what is known is read when it is reached, not before."""
    context = open_context(model, *tokens.shape)
    written = tokens.clone()
    for position in range(tokens.shape[1]):
        place = torch.full((len(tokens), 1), position)
        best = context.marginals(place)[:, 0, : model.config.entries or None].argmax(-1)
        written[:, position] = torch.where(blanks[:, position], best, tokens[:, position])
        context.reveal(place, written[:, position : position + 1])
    return written


def _error(values: Tensor) -> float | None:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
