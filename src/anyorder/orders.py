"""Order distributions: who decides in which order positions are revealed. Nothing else in the package does.

An order is a (B, T) long tensor: order[b, i] is the position revealed at step i. Each distribution is a frozen
dataclass with `sample(batch, length, generator, progress)` and a text form that `parse` reads back.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anyorder.errors import InputError


class OrderDistribution(Protocol):
    """Draws orders; `progress` runs from 0 to 1 over training, for distributions that change."""

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor: ...


@dataclass(frozen=True)
class LeftToRight:
    """Positions 0, 1, 2, ..."""

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        return torch.arange(length).repeat(batch, 1)  # (B, T)

    def __str__(self) -> str:
        return "left_to_right"


@dataclass(frozen=True)
class RightToLeft:
    """Positions T-1, T-2, ..., 0."""

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        return torch.arange(length - 1, -1, -1).repeat(batch, 1)  # (B, T)

    def __str__(self) -> str:
        return "right_to_left"


@dataclass(frozen=True)
class Random:
    """Every permutation equally likely, each row its own."""

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        # float64 keys: in float32 two of 1024 keys coincide in one row of thirty, and a tie is not a fair coin
        return torch.rand(batch, length, generator=generator, dtype=torch.float64).argsort(-1)  # (B, T)

    def __str__(self) -> str:
        return "random"


def _shuffle(length: int, seed: int) -> Tensor:
    """Draw the one permutation that belongs to (length, seed)."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))  # (length,)


@dataclass(frozen=True)
class Fixed:
    """One permutation, the same in every row: the one that belongs to (seed, length)."""

    seed: int = 0

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        return _shuffle(length, self.seed).repeat(batch, 1)  # (B, T)

    def __str__(self) -> str:
        return f"fixed({self.seed})"


@dataclass(frozen=True)
class WithinBlocks:
    """Blocks of `size` positions left to right, each with a fixed shuffle of its own inside."""

    size: int
    seed: int = 0

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        block = torch.arange(length) // self.size  # (T,)
        key = block * length + _shuffle(length, self.seed)  # sorts by block first, by the shuffle inside
        return key.argsort().repeat(batch, 1)  # (B, T)

    def __str__(self) -> str:
        return f"within_blocks({self.size}, {self.seed})"


@dataclass(frozen=True)
class AcrossBlocks:
    """Blocks of `size` positions in one fixed shuffle, left to right inside each."""

    size: int
    seed: int = 0

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        position = torch.arange(length)
        rank = _shuffle(-(-length // self.size), self.seed)  # (blocks,)
        key = rank[position // self.size] * length + position
        return key.argsort().repeat(batch, 1)  # (B, T)

    def __str__(self) -> str:
        return f"across_blocks({self.size}, {self.seed})"


def _choose(which: Tensor, drawn: list[Tensor]) -> Tensor:
    """Take row b from drawn[which[b]]: which (B,), each drawn (B, T) -> (B, T)."""
    return torch.stack(drawn)[which, torch.arange(len(which))]


@dataclass(frozen=True)
class Mix:
    """Each row from one of the parts, chosen with the given weights."""

    weights: tuple[float, ...]
    parts: tuple[OrderDistribution, ...]

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        cumulative = torch.tensor(self.weights, dtype=torch.float64).cumsum(0)
        uniform = torch.rand(batch, generator=generator, dtype=torch.float64) * cumulative[-1]
        which = torch.searchsorted(cumulative, uniform, right=True).clamp(max=len(self.parts) - 1)  # (B,)
        return _choose(which, [part.sample(batch, length, generator, progress) for part in self.parts])

    def __str__(self) -> str:
        return "mix(" + ", ".join(f"{w!r}*{p}" for w, p in zip(self.weights, self.parts, strict=True)) + ")"


@dataclass(frozen=True)
class Anneal:
    """Rows from `first` until progress reaches `start`, from `last` after `end`, a linear mixture between."""

    first: OrderDistribution
    last: OrderDistribution
    start: float = 0.0
    end: float = 1.0

    def sample(
        self, batch: int, length: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> Tensor:
        share = min(1.0, max(0.0, (progress - self.start) / (self.end - self.start)))
        which = (torch.rand(batch, generator=generator, dtype=torch.float64) < share).long()  # (B,)
        drawn = [part.sample(batch, length, generator, progress) for part in (self.first, self.last)]
        return _choose(which, drawn)

    def __str__(self) -> str:
        return f"anneal({self.first}, {self.last}, {self.start!r}, {self.end!r})"


FORMS = (
    "left_to_right, right_to_left, random, fixed(SEED), within_blocks(SIZE, SEED), across_blocks(SIZE, SEED), "
    "mix(WEIGHT*ORDER, ...), anneal(ORDER, ORDER[, START, END])"
)


def parse(text: str) -> OrderDistribution:
    """Read an order distribution from its text form, e.g. `mix(0.9*random, 0.1*left_to_right)`."""
    try:
        if text.count("(") > 32:
            raise InputError("more than 32 distributions are nested or listed")
        return _read(text.strip())
    except InputError as error:
        raise InputError(f"order {text!r}: {error}; accepted: {FORMS}") from None


def _read(text: str) -> OrderDistribution:
    match = re.fullmatch(r"(\w+)\s*(?:\((.*)\))?", text, flags=re.DOTALL)
    if match is None:
        raise InputError(f"{text!r} is not an order")
    name, inside = match.groups()
    arguments = _split(inside) if inside is not None else []
    makers: dict[str, Callable[[list[str]], OrderDistribution]] = {
        "left_to_right": lambda a: LeftToRight(*_numbers(name, a, 0, 0)),
        "right_to_left": lambda a: RightToLeft(*_numbers(name, a, 0, 0)),
        "random": lambda a: Random(*_numbers(name, a, 0, 0)),
        "fixed": lambda a: Fixed(*_numbers(name, a, 0, 1)),
        "within_blocks": lambda a: WithinBlocks(*_block(name, a)),
        "across_blocks": lambda a: AcrossBlocks(*_block(name, a)),
        "mix": _mix,
        "anneal": _anneal,
    }
    if name not in makers:
        raise InputError(f"{name!r} is not an order")
    return makers[name](arguments)


def _split(inside: str) -> list[str]:
    """Split at the commas that stand outside parentheses."""
    parts, depth, current = [], 0, ""
    for character in inside:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            raise InputError("a parenthesis closes that was never opened")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if depth:
        raise InputError("a parenthesis is not closed")
    return [*parts, current.strip()] if parts or current.strip() else []


def _numbers(name: str, arguments: list[str], least: int, most: int) -> list[int]:
    if not least <= len(arguments) <= most or not all(a.isdecimal() for a in arguments):
        count = f"{least} to {most}" if most > least else f"{most}" if most else "no"
        raise InputError(f"{name} takes {count} whole numbers in parentheses, not ({', '.join(arguments)})")
    if any(len(a) > 18 for a in arguments):
        raise InputError(f"{name} takes numbers below 10**18, not ({', '.join(arguments)})")
    return [int(a) for a in arguments]


def _block(name: str, arguments: list[str]) -> list[int]:
    numbers = _numbers(name, arguments, 1, 2)
    if numbers[0] < 1:
        raise InputError(f"{name} takes blocks of at least one position, not {numbers[0]}")
    return numbers


def _mix(arguments: list[str]) -> Mix:
    weights, parts = [], []
    for argument in arguments:
        weight, star, part = argument.partition("*")
        if not star:
            raise InputError(f"a part of mix is WEIGHT*ORDER, not {argument!r}")
        weights.append(_real(weight))
        parts.append(_read(part.strip()))
    if not parts or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise InputError("mix takes at least one part, with finite weights, not negative and not all zero")
    return Mix(tuple(weights), tuple(parts))


def _anneal(arguments: list[str]) -> Anneal:
    if len(arguments) not in (2, 4):
        raise InputError(f"anneal takes two orders, or two orders and two numbers, not {len(arguments)} arguments")
    start, end = [_real(a) for a in arguments[2:]] or [0.0, 1.0]
    if not 0 <= start < end <= 1:
        raise InputError(f"anneal runs from START to END with 0 <= START < END <= 1, not from {start:g} to {end:g}")
    return Anneal(_read(arguments[0]), _read(arguments[1]), start, end)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{text.strip()!r} is not a number") from None
    if not abs(value) < float("inf"):  # NaN fails this too
        raise InputError(f"{text.strip()!r} is not a finite number")
    return value


def is_uniform(distribution: OrderDistribution) -> bool:
    """Tell whether every permutation is equally likely, whatever the progress of training."""
    match distribution:
        case Random():
            return True
        case Mix():
            used = [part for weight, part in zip(distribution.weights, distribution.parts, strict=True) if weight > 0]
            return all(is_uniform(part) for part in used)
        case Anneal():
            return is_uniform(distribution.first) and is_uniform(distribution.last)
    return False


def ranks(order: Tensor) -> Tensor:
    """Say when each position is revealed: (B, T) -> (B, T), the inverse permutation."""
    return order.argsort(1)


def grouped(group: Tensor, rank: Tensor) -> Tensor:
    """Order positions by group (B, T) first, by rank (B, T) inside: whole orders (B, T)."""
    return (group.long() * rank.shape[1] + rank).argsort(1)


def draw(order: str | Tensor, batch: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Turn the text form of a distribution, or orders that are given, into checked orders (B, T)."""
    drawn = parse(order).sample(batch, length, generator) if isinstance(order, str) else order
    check(drawn, torch.empty(batch, length, device="meta"))
    if drawn.shape != (batch, length):
        raise InputError(f"order {tuple(drawn.shape)} does not name all of {length} positions")
    return drawn


def check(order: Tensor, tokens: Tensor) -> None:
    """Refuse an order that does not fit the tokens: order (B, n) with n <= T, each row of distinct positions."""
    if order.dim() != 2 or tokens.dim() != 2 or len(order) != len(tokens) or order.shape[1] > tokens.shape[1]:
        raise InputError(
            f"order {tuple(order.shape)} does not match tokens {tuple(tokens.shape)}; "
            "accepted: order (B, n) for tokens (B, T) with n <= T"
        )
    if order.dtype != torch.long:
        raise InputError(f"order has dtype {order.dtype}; accepted: torch.long")
    if order.numel() == 0:
        return
    length = tokens.shape[1]
    if order.min() < 0 or order.max() >= length:
        raise InputError(
            f"order names positions {int(order.min())} to {int(order.max())}; "
            f"accepted: 0 to {length - 1} for {length} tokens"
        )
    counts = torch.zeros(len(order), length, dtype=torch.long, device=order.device)
    counts.scatter_add_(1, order, torch.ones_like(order))
    if counts.max() > 1:
        row, position = (int(i) for i in (counts > 1).nonzero()[0])
        raise InputError(f"order repeats position {position} in row {row}; accepted: each position at most once")
