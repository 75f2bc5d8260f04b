"""The order ensemble: p(x[t] | S) as the mean over shuffles of S, in two exact ways.

Both estimate the same figure: the mean, over the steps i of a random order, of
-log 1/M sum_m p(x[order_i] | perm_m(order_<i)).
`prefix_members` follows one order through all its steps, as published. `context_members` takes a few contexts of
stratified sizes and scores every position outside them at once: far less work for the same error.
"""

import math

import torch
from torch import Tensor

from anyorder.models.families import open_context
from anyorder.models.model import LanguageModel

SLOTS = 2**14  # slots that one pass may hold
CACHE = 2**29  # bytes that a cache may hold


def powers(members: int) -> tuple[int, ...]:
    """List the ensemble sizes that are reported: 1, 2, 4, ... and `members`."""
    return (*(2**p for p in range(members.bit_length()) if 2**p < members), members)


def mean_probability(logprobs: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    """Log of the mean probability of the first 1, 2, 4, ... members along `dim`, stacked in front."""
    return torch.stack(
        [logprobs.narrow(dim, 0, size).double().logsumexp(dim) - math.log(size) for size in sizes]
    )  # (len(sizes), ...)


def draw_places(members: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw where each member puts the token of step i among the i before it: (members, T), uniform on 0..i.

    Insertion at uniform places keeps every prefix's permutation exactly uniform, whatever the order.
    """
    uniform = torch.rand(members, length, generator=generator, dtype=torch.float64)
    return (uniform * torch.arange(1, length + 1)).long()


def insert(permutation: Tensor, place: Tensor, item: Tensor) -> Tensor:
    """Put item (R,) at place (R,) of permutation (R, i): (R, i + 1)."""
    column = torch.arange(permutation.shape[1] + 1, device=permutation.device)
    shifted = torch.nn.functional.pad(permutation, (1, 0))
    kept = torch.nn.functional.pad(permutation, (0, 1))
    place, item = place[:, None], item[:, None]
    return torch.where(column < place, kept, torch.where(column == place, item, shifted))


@torch.no_grad()
def prefix_members(model: LanguageModel, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Log-probability of each step of order (B, T) under shuffled prefixes: places (B, M, T) -> (B, M, T).

    A member's next context is its last one with the new token put in at `places`: what stands before that is cached.
    """
    batch, members, length = places.shape
    row = torch.arange(batch).repeat_interleave(members)  # (B * M,)
    cached = 2 * model.config.layers * model.config.width * length * 4  # bytes a row
    parts = row.split(max(1, min(CACHE // cached, 2 * SLOTS // length)))
    flat = places.flatten(0, 1).split([len(part) for part in parts])
    found = [_follow(model, tokens[part], order[part], its) for part, its in zip(parts, flat, strict=True)]
    return torch.cat(found).view(batch, members, length)


def _follow(model: LanguageModel, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Score every step of order (R, T), one shuffled prefix a row: (R, T)."""
    length = order.shape[1]
    context = open_context(model, len(order), length)
    found = []
    for step in range(length):
        target = order[:, step : step + 1]
        found.append(context.score(target, tokens.gather(1, target)))
        if step + 1 < length:
            place = places[:, step]
            changed = insert(context.positions[:, :step], place, order[:, step])  # (R, step + 1)
            context.rollback(place)
            tail = (place[:, None] + torch.arange(step + 1, device=place.device)).clamp(max=step)
            positions = changed.gather(1, tail)
            context.reveal(positions, tokens.gather(1, positions), step + 1 - place)
    return torch.cat(found, 1)


def draw_contexts(contexts: int, members: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw context sizes (K,), one in each of K equal parts of 0..T-1, and orders (K, M, T).

    The first sizes[k] positions of orders[k] are one random set, shuffled anew for each member; the rest is outside.
    """
    uniform = torch.rand(contexts, generator=generator, dtype=torch.float64)
    sizes = ((torch.arange(contexts) + uniform) / contexts * length).long().clamp(max=length - 1)
    whole = torch.rand(contexts, 1, length, generator=generator, dtype=torch.float64).argsort(-1)
    key = torch.rand(contexts, members, length, generator=generator, dtype=torch.float64)
    column = torch.arange(length)
    shuffle = torch.where(column < sizes[:, None, None], key, 1.0 + column).argsort(-1)  # of the first sizes[k] only
    return sizes, whole.expand(-1, members, -1).gather(2, shuffle)


@torch.no_grad()
def context_members(model: LanguageModel, tokens: Tensor, sizes: Tensor, orders: Tensor) -> Tensor:
    """Score all that is outside each context: tokens (B, T), sizes (B, K), orders (B, K, M, T) -> (B, K, M, T).

    Entry j belongs to position orders[..., sizes + j]; beyond T - sizes entries are 0.
    """
    batch, contexts, members, length = orders.shape
    row = torch.arange(batch).repeat_interleave(contexts * members)
    flat, size = orders.flatten(0, 2), sizes.flatten().repeat_interleave(members)
    step = max(1, SLOTS // length)
    found = []
    for start in range(0, len(row), step):
        order, revealed, its = flat[start : start + step], size[start : start + step], tokens[row[start : start + step]]
        context = open_context(model, len(order), length)
        context.reveal(order, its.gather(1, order), revealed)
        outside = (revealed[:, None] + torch.arange(length, device=order.device)).clamp(max=length - 1)
        targets = order.gather(1, outside)  # (R, T), of which the first T - revealed count
        found.append(context.score(targets, its.gather(1, targets), length - revealed))
    return torch.cat(found).view(batch, contexts, members, length)
