"""How many positions are revealed at each step."""

import math

from anyorder.errors import InputError

SCHEDULES = ("linear", "cosine")


def revealed(schedule: str, count: int, steps: int) -> list[int]:
    """Say how many of `count` positions are revealed after each step, in exact integers: at least one more each time.

    linear: floor(count * s / steps); cosine: floor(count * (1 - cos(pi s / (2 steps)))), few at first.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"unknown schedule {schedule!r}; accepted: {', '.join(SCHEDULES)}")
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
