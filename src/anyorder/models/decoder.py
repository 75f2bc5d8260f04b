"""The decoder: a GPT over shuffled slots, each told which position it predicts."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from anyorder import orders
from anyorder.config import ModelConfig
from anyorder.errors import InputError
from anyorder.models.blocks import Attend, Block, causal, make_norm, modulate, pick
from anyorder.models.injection import Injection, Shape, make_injection

ONE_ORDER = (
    "this model was built with injection none and reads left to right only, and another order was given; "
    "accepted: left_to_right, and blanks at the end of the text"
)


class Decoder(nn.Module):
    """Score tokens in the order given: model(tokens (B, T), order (B, n)) -> logits (B, n, V), row i for order[:, i].

    Slot 0 holds the start embedding, slot j >= 1 the token at order[:, j - 1]; attention is causal over slots.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.config = config
        self.token_embedding = nn.Embedding(c.vocabulary, c.width)
        self.position_embedding = nn.Embedding(c.positions + 1, c.width)  # the start slot's, then position p at p + 1
        self.start_embedding = nn.Parameter(torch.zeros(c.width))
        self.blocks = nn.ModuleList(Block(c.width, c.heads, c.norm, c.bias, c.qk_norm) for _ in range(c.layers))
        self.final_norm = make_norm(c.norm, c.width, c.bias)
        # A tied head has no bias: the published tied model has none, and GPT-2 neither.
        self.head = nn.Linear(c.width, c.vocabulary, bias=c.bias and not c.tied_head)
        if c.tied_head:
            self.head.weight = self.token_embedding.weight
        shape = Shape(c.layers, c.heads, c.width, c.positions, c.gate_start, c.rotary_base)
        injection = make_injection(c.injection, shape)
        self.any_order = injection is not None
        self.injection = injection or Injection()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> "Decoder":
        """Draw all weights: truncated normal of 0.02, residual projections smaller by sqrt(2 layers), biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 and name != "start_embedding":
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std, generator=generator)
        self.injection.finish_init()
        return self

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
        """Compute slots from their token, own position (0 for the start slot, p + 1 for position p) and target.

        `attend` gives the attention of each layer: which slots see which. Where only some slots are wanted, the last
        layer makes keys and values of the others, and no more.
        """
        embedded = torch.where((own == 0).unsqueeze(-1), self.start_embedding, self.token_embedding(content))
        x = self.injection.enter(embedded + self.position_embedding(own), target)
        rotation = self.injection.rotation(own, target, compute_dtype(x))
        for layer, block in enumerate(self.blocks):
            x, modulation = self.injection.at_block(layer, x, target)
            x = block(x, rotation, modulation, attend(layer), wanted if layer + 1 == len(self.blocks) else None)
        x = self.final_norm(x)
        last = self.injection.at_end(pick(target, wanted))
        return x if last is None else modulate(x, *last)

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:  # (B, T), (B, n) -> (B, n, V)
        return self.head(self.hidden(tokens, order))

    def _check(self, tokens: Tensor, order: Tensor) -> None:
        orders.check(order, tokens)
        if not tokens.numel() or not order.numel():
            raise InputError(
                f"tokens {tuple(tokens.shape)} and order {tuple(order.shape)}; accepted: at least one token"
            )
        if tokens.dtype != torch.long or not 0 <= tokens.min() <= tokens.max() < self.config.vocabulary:
            raise InputError(
                f"tokens of {tokens.dtype} from {tokens.min()} to {tokens.max()} were given; "
                f"accepted: torch.long from 0 to {self.config.vocabulary - 1}"
            )
        if tokens.shape[1] > self.config.positions:
            raise InputError(
                f"the text has {tokens.shape[1]} tokens; "
                f"accepted: at most {self.config.positions}, the model's positions"
            )
        if not self.any_order and not torch.equal(
            order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        ):
            raise InputError(ONE_ORDER)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Name the type that products run in: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
