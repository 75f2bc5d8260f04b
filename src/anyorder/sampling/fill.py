"""Infilling: write the blank positions of a text one by one, in any order, each from the model's conditional."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder import orders
from anyorder.errors import InputError
from anyorder.models.decoder import Decoder


@dataclass(frozen=True)
class Filled:
    """What was written: everything in natural positions, except `order`."""

    tokens: Tensor  # (B, T) with the blanks filled
    order: Tensor  # (B, T) known positions first, then the blanks in the order they were written in
    logprobs: Tensor  # (B, T) of each written token under the distribution it was drawn from, 0 where known
    forward_passes: int
    token_forwards: int


@torch.no_grad()
def fill(
    model: Decoder,
    tokens: Tensor,
    blanks: Tensor,
    order: str | Tensor = "left_to_right",
    temperature: float = 1.0,
    allowed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Filled:
    """Fill tokens (B, T) where blanks (B, T) is true, reading the known ones first.

    `order` names an order distribution or is a (B, T) tensor; the blanks are written in the order it puts them in.
    `allowed` is a mask that broadcasts to (B, T, V): which tokens each position may take. Temperature 0 is greedy.
    """
    if tokens.dim() != 2:
        raise InputError(f"tokens have the shape {tuple(tokens.shape)}; accepted: (B, T)")
    batch, length = tokens.shape
    if blanks.shape != tokens.shape or blanks.dtype != torch.bool:
        raise InputError(
            f"blanks {tuple(blanks.shape)} of {blanks.dtype} do not match tokens {tuple(tokens.shape)}; "
            "accepted: a bool mask of the same shape"
        )
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; accepted: 0 (greedy) or more")
    if allowed is not None:
        try:
            allowed = allowed.expand(batch, length, model.config.vocabulary)
        except RuntimeError:
            raise InputError(
                f"allowed {tuple(allowed.shape)} does not broadcast to {(batch, length, model.config.vocabulary)}"
            ) from None
    whole = _known_first(blanks, orders.draw(order, batch, length, generator).to(tokens.device))  # (B, T)
    written = tokens.masked_fill(blanks, 0)
    logprobs = torch.zeros(batch, length, device=tokens.device)
    known = (~blanks).sum(1)  # (B,)
    rows = torch.arange(batch, device=tokens.device)
    passes = forwards = 0
    for step in range(int(blanks.sum(1).max()) if batch else 0):
        active = known + step < length  # (B,) rows with fewer blanks are done
        until = int((known + step)[active].max()) + 1
        slot = (known + step).clamp(max=until - 1)  # (B,) the slot whose target is written now
        # what stands beyond a row's own slot is not written yet; causality keeps it from being seen
        hidden = model.hidden(written, whole[:, :until])[rows, slot]  # (B, C)
        position = whole[rows, slot]  # (B,)
        mask = None if allowed is None else allowed[rows, position]  # (B, V)
        drawn, its_logprob = draw_token(model.head(hidden).float(), mask, temperature, generator)
        written[rows[active], position[active]] = drawn[active]
        logprobs[rows[active], position[active]] = its_logprob[active]
        passes += 1
        forwards += batch * until
    return Filled(written, whole, logprobs, passes, forwards)


def _known_first(blanks: Tensor, order: Tensor) -> Tensor:
    """Put the known positions first, left to right, and the blanks after them as `order` has them: (B, T) -> (B, T)."""
    natural = torch.arange(order.shape[1], device=order.device)
    return orders.grouped(blanks, torch.where(blanks, orders.ranks(order), natural))


def draw_token(
    logits: Tensor, allowed: Tensor | None, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: logits (B, V) -> tokens (B,), log-probabilities (B,)."""
    if allowed is not None:
        if not allowed.any(-1).all():
            raise InputError("a blank has no allowed token; accepted: at least one for each position")
        logits = logits.masked_fill(~allowed, float("-inf"))
    if temperature > 0:
        # from the largest down, and in float64: a temperature near 0 makes no infinity, and 1e-50 is not 0
        logits = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    logprobs = logits.log_softmax(-1).float()
    if temperature > 0:
        drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)  # (B, 1)
    else:
        drawn = logprobs.argmax(-1, keepdim=True)
    return drawn[:, 0], logprobs.gather(1, drawn)[:, 0]
