"""A text continued left to right, one token after the other."""

from collections.abc import Iterator

import torch
from torch import Tensor

from anyorder.models.context import Context
from anyorder.models.decoder import Decoder
from anyorder.sampling.fill import draw_token


def continuation(
    model: Decoder,
    tokens: Tensor,
    most: int,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield up to `most` tokens behind tokens (n,), each from the model's conditional; temperature 0 is greedy.

    `allowed` (V,) says which tokens may be written.
    """
    context = Context(model, 1)
    known = len(tokens)
    if known:
        context.reveal(torch.arange(known, device=tokens.device)[None], tokens[None])
    mask = None if allowed is None else allowed[None]
    for position in range(known, min(known + most, context.length)):
        place = torch.tensor([[position]], device=tokens.device)
        drawn, _ = draw_token(context.marginals(place)[:, 0].float(), mask, temperature, generator)  # (1,)
        context.reveal(place, drawn[:, None])
        yield int(drawn)
