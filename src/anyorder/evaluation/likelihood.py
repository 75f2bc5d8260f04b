"""Figures from nats: per token, perplexity and bits per byte, each with its standard error over sequences."""

import lzma
import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """Nats per token over sequences; bits per byte where the tokenizer says how long a token is.

    Errors are None where one sequence says nothing of the spread.
    """

    nats_per_token: float
    nats_error: float | None
    perplexity: float
    perplexity_error: float | None
    bits_per_byte: float | None
    bits_error: float | None
    sequences: int
    tokens: int


def estimate(nats: Tensor, tokens: Tensor, sizes: Tensor | None) -> Estimate:
    """Summarise nats (N,) of sequences with so many tokens (N,), and bytes (N,) where known."""
    per_token, error = _ratio(nats, tokens)
    perplexity = math.exp(per_token) if per_token < 700 else math.inf
    bits, bits_error = (None, None) if sizes is None else _ratio(nats / math.log(2), sizes)
    return Estimate(
        nats_per_token=per_token,
        nats_error=error,
        perplexity=perplexity,
        perplexity_error=None if error is None else perplexity * error,
        bits_per_byte=bits,
        bits_error=bits_error,
        sequences=len(nats),
        tokens=int(tokens.sum()),
    )


def _ratio(above: Tensor, below: Tensor) -> tuple[float, float | None]:
    """Divide one sum by another; the error is that of above - ratio * below, to first order."""
    above, below = above.double(), below.double()
    if not below.sum():
        return math.nan, None
    ratio = float(above.sum() / below.sum())
    if len(above) < 2:
        return ratio, None
    spread = (above - ratio * below).std() / math.sqrt(len(above))
    return ratio, float(spread / below.mean())


def xz_bits_per_byte(text: bytes) -> float:
    """Compress as `xz -9e` does: what a program without a model makes of the same text."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
