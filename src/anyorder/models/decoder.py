"""The decoder: a GPT over shuffled slots, each told which position it predicts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from anyorder.config import ModelConfig
from anyorder.errors import InputError
from anyorder.models.blocks import Attend, causal
from anyorder.models.injection import Injection, Shape, make_injection
from anyorder.models.model import LanguageModel

ONE_ORDER = (
    "this model was built with injection none and reads left to right only, and another order was given; "
    "accepted: left_to_right, and blanks at the end of the text"
)


class Decoder(LanguageModel):
    """Score tokens in the order given: model(tokens (B, T), order (B, n)) -> logits (B, n, V), row i for order[:, i].

    Slot 0 holds the start embedding, slot j >= 1 the token at order[:, j - 1]; attention is causal over slots.
    """

    def __init__(self, config: ModelConfig):
        injection = make_injection(config.injection, Shape.of(config))
        super().__init__(config, injection or Injection())
        self.any_order = injection is not None
        self.start_embedding = nn.Parameter(torch.zeros(config.width))

    def hidden(self, tokens: Tensor, order: Tensor) -> Tensor:  # (B, T), (B, n) -> (B, n, C)
        """Compute what the head reads: slot i knows tokens at order[:, :i] and its target order[:, i]."""
        self._check(tokens, order)
        before = order[:, :-1]  # the last position's token is predicted and never read
        content = nn.functional.pad(tokens.gather(1, before), (1, 0))  # (B, n), of slot 0 it is not read
        own = nn.functional.pad(before + 1, (1, 0))  # (B, n)
        return self.slots(content, own, order, lambda layer: causal)

    def slots(
        self,
        content: Tensor,
        own: Tensor,
        target: Tensor,
        attend: Callable[[int], Attend],
        wanted: Tensor | None = None,
    ) -> Tensor:  # each (B, n) -> (B, n, C), or (B, w, C) of the wanted slots (w,)
        """Compute slots from their token, own position (0 for the start slot, p + 1 for position p) and target."""
        embedded = torch.where((own == 0).unsqueeze(-1), self.start_embedding, self.token_embedding(content))
        return self.run_blocks(embedded + self.position_embedding(own), own, target, attend, wanted)

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:  # (B, T), (B, n) -> (B, n, V)
        return self.head(self.hidden(tokens, order))

    along = forward

    def _check(self, tokens: Tensor, order: Tensor) -> None:
        self.check_order(tokens, order)
        if not self.any_order and not torch.equal(
            order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        ):
            raise InputError(ONE_ORDER)
