"""How many positions are revealed at each step."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from anyorder.errors import InputError

Schedule = Literal["linear", "cosine", "ancestral", "euler", "tweedie"]
COUNTED = ("linear", "cosine")  # how many are revealed is known beforehand
NOISY = ("euler", "tweedie")  # the model's own scores say how many


def ancestral(count: int, steps: int, generator: torch.Generator | None) -> Tensor:
    """Draw how many positions each step reveals, as undoing a linear noise does: every position its own time: (S,)."""
    if steps < 1:
        raise InputError(f"steps is {steps}; accepted: 1 or more")
    drawn = torch.randint(steps, (count,), generator=generator)
    return torch.bincount(drawn, minlength=steps)


def revealed(schedule: str, count: int, steps: int) -> list[int]:
    """Say how many of `count` positions are revealed after each step, in exact integers: at least one more each time.

    linear: floor(count * s / steps); cosine: floor(count * (1 - cos(pi s / (2 steps)))), few at first.
    """
    if schedule not in COUNTED:
        raise InputError(f"unknown schedule {schedule!r}; accepted: {', '.join(get_args(Schedule))}")
    if not 1 <= steps <= count:
        raise InputError(f"steps is {steps}; accepted: 1 to {count}, the number of tokens to write")
    found: list[int] = []
    for step in range(1, steps + 1):
        share = count * step // steps if schedule == "linear" else _cosine(count, step, steps)
        found.append(min(count, max(share, (found[-1] if found else 0) + 1)))
    return found


def _cosine(count: int, step: int, steps: int) -> int:
    # of rational angles only these two have a rational cosine above 0 (Niven): elsewhere no rounding meets an integer
    if step == steps:
        return count
    if 3 * step == 2 * steps:
        return count // 2
    return math.floor(count * (1 - math.cos(math.pi * step / (2 * steps))))
