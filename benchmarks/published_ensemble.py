"""The published ensemble loop, written straightforwardly: what the ensembles of this package are measured against.

For every position of the order and every further member, a whole forward pass over a shuffled prefix, of which one
number is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import anyorder as ao
from anyorder.models.model import LanguageModel

Shuffle = Callable[[int, int], Tensor]  # step i, member j -> the prefix of i positions in another order, (B, i)


def random_shuffles(order: Tensor, generator: torch.Generator) -> Shuffle:
    """Draw each prefix's permutation anew, as published."""

    def shuffle(step: int, member: int) -> Tensor:
        places = torch.stack([torch.randperm(step, generator=generator) for _ in range(len(order))])
        return order[:, :step].gather(1, places)

    return shuffle


@torch.no_grad()
def ensemble_logprobs(model: LanguageModel, tokens: Tensor, order: Tensor, members: int, shuffle: Shuffle) -> Tensor:
    """Log-probability of every step of order (B, T) under each member: (B, M, T), the first member the order itself."""
    length = order.shape[1]
    first = -ao.order_nll(model, tokens, order)  # (B, T)
    found = first[:, None].repeat(1, members, 1)
    for step in range(length):
        for member in range(1, members):
            shuffled = torch.cat((shuffle(step, member), order[:, step:]), 1)
            found[:, member, step] = -ao.order_nll(model, tokens, shuffled)[:, step]
    return found
