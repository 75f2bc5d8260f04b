"""Held-out likelihood along orders: nats per token and bits per byte, each with its standard error over sequences."""

import lzma
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyorder.data.batches import generator_for
from anyorder.objectives import Model, order_nll
from anyorder.orders import OrderDistribution

DRAW = 64  # orders are drawn for this many sequences at a time, so that no figure depends on the batch size


@dataclass(frozen=True)
class Estimate:
    """Mean nats per token over sequences; bits per byte where the tokenizer says how long a token is."""

    nats_per_token: float
    nats_error: float | None  # None where one sequence says nothing of the spread
    bits_per_byte: float | None
    bits_error: float | None
    sequences: int
    tokens: int
    orders: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)


def sequence_nats(
    model: Model,
    rows: Tensor,
    orders: OrderDistribution,
    seed: int,
    repeats: int = 1,
    batch_size: int = 32,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Tensor]:
    """Score rows (N, T) along `repeats` orders each; yield (b,) nats of whole sequences, averaged over the orders."""
    count, length = rows.shape
    drawn = [
        torch.cat(
            [
                orders.sample(min(DRAW, count - start), length, generator_for(seed, "evaluate", repeat, start), 1.0)
                for start in range(0, count, DRAW)
            ]
        )
        for repeat in range(repeats)
    ]  # each (N, T)
    for start in range(0, count, batch_size):
        here = rows[start : start + batch_size]
        with torch.no_grad(), autocast():  # closed before the yield, or the caller would run in it
            nats = [
                order_nll(model, here, order[start : start + batch_size].to(here.device)).double().sum(1)
                for order in drawn
            ]  # each (b,)
        yield torch.stack(nats).mean(0).cpu()


def estimate(nats: Tensor, rows: Tensor, byte_lengths: np.ndarray | None, orders: int = 1) -> Estimate:
    """Summarise nats (N,) of rows (N, T)."""
    count, length = rows.shape
    tokens, bits, bits_error = count * length, None, None
    if byte_lengths is not None:
        sizes = torch.from_numpy(byte_lengths)[rows].sum(1).double()  # (N,)
        bits = float(nats.sum() / sizes.sum()) / math.log(2)
        # a ratio of sums: its error is that of nats - ratio * bytes, to first order
        spread = _standard_error(nats / math.log(2) - bits * sizes)
        bits_error = None if spread is None else spread / float(sizes.mean())
    per_token = nats / length
    return Estimate(float(per_token.mean()), _standard_error(per_token), bits, bits_error, count, tokens, orders)


def _standard_error(values: Tensor) -> float | None:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None


def xz_bits_per_byte(text: bytes) -> float:
    """Compress as `xz -9e` does: what a program without a model makes of the same text."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
