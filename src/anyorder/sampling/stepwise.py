"""Blanks written step by step: some at a time along a given order, or wherever the model is surest."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.errors import InputError
from anyorder.sampling.schedules import ancestral, revealed
from anyorder.sampling.writing import Measure, Reveal, Writing


def plan(totals: Tensor, steps: int | None, schedule: str, generator: torch.Generator | None = None) -> Tensor:
    """Say how many blanks each row writes at each step: totals (B,) -> (S, B); a row with fewer is done early."""
    most = int(totals.max()) if len(totals) else 0
    if schedule == "ancestral":
        rows = [ancestral(total, most if steps is None else steps, generator) for total in totals.tolist()]
        return torch.stack(rows, 1).to(totals.device) if rows else totals.new_zeros(0, 0)
    if steps is not None and not 1 <= steps <= max(1, most):
        raise InputError(f"steps is {steps}; accepted: 1 to {most}, the number of tokens to write")
    each: dict[int, list[int]] = {}
    for total in set(totals.tolist()):
        after = revealed(schedule, total, min(total, steps or total)) if total else []
        each[total] = [b - a for a, b in zip([0, *after], after, strict=False)]
    longest = max((len(row) for row in each.values()), default=0)
    padded = [each[total] + [0] * (longest - len(each[total])) for total in totals.tolist()]
    return torch.tensor(padded, dtype=torch.long, device=totals.device).view(len(totals), longest).T


def progress_of(step: int, counts: Tensor) -> Tensor:
    """Say how far each row's text is at a step of plan (S, B), from 0 at its first to 1 at its last: (B,)."""
    last = ((counts > 0) * torch.arange(len(counts), device=counts.device)[:, None]).amax(0)
    return (step / last.clamp(min=1)).clamp(max=1.0)


def along_order(writing: Writing, order: Tensor, counts: Tensor) -> Iterator[Reveal]:
    """Write blanks in the order given, order (B, T) with what is known first, counts (S, B) of them at each step."""
    for step, count in enumerate(counts):
        if not bool(count.any()):
            continue  # nothing changes, so there is nothing to ask
        positions = writing.next(order, int(count.max()))  # (B, K)
        progress = progress_of(step, counts)[:, None].expand(positions.shape)
        drawn = writing.draw(writing.context.ask(positions, count), positions, progress)
        writing.context.reveal(positions, drawn.tokens, count)
        yield writing.record(Reveal(positions, drawn.tokens, drawn.logprobs, drawn.model_logprobs, count))


def _margin(logprobs: Tensor) -> Tensor:
    two = logprobs.topk(min(2, logprobs.shape[-1]), -1).values.exp()
    return two[:, 0] - two[:, -1]


def _entropy(logprobs: Tensor) -> Tensor:
    return (logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


MEASURES: dict[str, Measure] = {
    "probability": lambda logprobs: logprobs.amax(-1),
    "margin": _margin,
    "entropy": _entropy,
}


@dataclass(frozen=True)
class Surest:
    """Write where the model is surest, by one of MEASURES, among the first `window` blanks (0: all of them)."""

    measure: str
    window: int = 0


def parse_surest(text: str) -> Surest | None:
    """Read `margin` or `margin(8)`; None if it is not of this form."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d{1,9})\s*\))?\s*", text)
    if match is None or match[1] not in MEASURES:
        return None
    if match[2] is not None and not int(match[2]):
        raise InputError(f"order {text!r} has a window of 0; accepted: 1 or more blanks, or none for all")
    return Surest(match[1], int(match[2] or 0))


def surest_first(writing: Writing, surest: Surest, counts: Tensor) -> Iterator[Reveal]:
    """Write, at each step, where the model is surest: counts (S, B) blanks at once, the surest first."""
    for step, count in enumerate(counts):
        open_count = writing.remaining()
        if surest.window:
            open_count = torch.minimum(open_count, torch.maximum(count, torch.full_like(count, surest.window)))
        open_count = torch.where(count > 0, open_count, 0)
        positions = writing.open_first()[:, : int(open_count.max())]  # (B, W)
        progress = progress_of(step, counts)[:, None].expand(positions.shape)
        asked = writing.context.ask(positions, open_count)
        drawn = writing.draw(asked, positions, progress, MEASURES[surest.measure])
        chosen = drawn.sure.argsort(dim=1, descending=True, stable=True)[:, : int(count.max())]  # (B, K)
        parts = (positions, drawn.tokens, drawn.logprobs, drawn.model_logprobs)
        places, tokens, logprobs, own = (part.gather(1, chosen) for part in parts)
        reveal = Reveal(places, tokens, logprobs, own, count)
        writing.context.reveal(reveal.positions, reveal.tokens, count)
        yield writing.record(reveal)
