"""What all families share: embeddings, blocks, final norm and head, and how weights are drawn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from anyorder import orders
from anyorder.config import ModelConfig
from anyorder.errors import InputError
from anyorder.models.blocks import Attend, Block, make_norm, modulate, pick
from anyorder.models.injection import Injection

OWN = ("start_embedding", "mask_embedding", "query_embedding")  # vectors that are drawn as matrices are


class LanguageModel(nn.Module, ABC):
    """A model of texts: position p has index p + 1 in the table of positions, index 0 is a start slot's."""

    any_order = True  # or left to right alone

    def __init__(self, config: ModelConfig, injection: Injection):
        super().__init__()
        c = config
        self.config = config
        self.token_embedding = nn.Embedding(c.vocabulary, c.width)
        self.position_embedding = nn.Embedding(c.positions + 1, c.width)
        self.blocks = nn.ModuleList(
            Block(c.width, c.heads, c.norm, c.bias, c.qk_norm, c.activation) for _ in range(c.layers)
        )
        self.final_norm = make_norm(c.norm, c.width, c.bias)
        # A tied head has no bias: the published tied model has none, and GPT-2 neither.
        self.head: nn.Module = nn.Linear(c.width, c.vocabulary, bias=c.bias and not c.tied_head)
        if c.tied_head:
            self.head.weight = self.token_embedding.weight
        self.injection = injection

    @abstractmethod
    def along(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Predict along an order: tokens (B, T), order (B, n) -> logits (B, n, V), row i given tokens order[:, :i]."""

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> Self:
        """Draw all weights: truncated normal of 0.02, residual projections smaller by sqrt(2 layers), biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 and name not in OWN:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std, generator=generator)
        self.injection.finish_init()
        return self

    def run_blocks(
        self,
        x: Tensor,
        own: Tensor,
        target: Tensor,
        attend: Callable[[int], Attend],
        wanted: Tensor | None = None,
        injection: Injection | None = None,
    ) -> Tensor:  # (B, n, C), (B, n), (B, n) -> (B, n, C), or (B, w, C) of the wanted slots (w,)
        """Send embedded slots through the blocks: `own` the index of each slot's position, `target` what it predicts.

        `attend` gives the attention of each layer: which slots see which. Where only some slots are wanted, the last
        layer makes keys and values of the others, and no more.
        """
        injection = self.injection if injection is None else injection
        x = injection.enter(x, target)
        rotation = injection.rotation(own, target, compute_dtype(x))
        for layer, block in enumerate(self.blocks):
            x, modulation = injection.at_block(layer, x, target)
            x = block(x, rotation, modulation, attend(layer), wanted if layer + 1 == len(self.blocks) else None)
        x = self.final_norm(x)
        last = injection.at_end(pick(target, wanted))
        return x if last is None else modulate(x, *last)

    def check_text(self, tokens: Tensor) -> None:
        """Refuse tokens (B, T) that the model cannot read."""
        if tokens.dim() != 2 or not tokens.numel():
            raise InputError(f"tokens {tuple(tokens.shape)}; accepted: (B, T) with at least one token")
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

    def check_order(self, tokens: Tensor, order: Tensor) -> None:
        """Refuse what the model cannot read in this order."""
        orders.check(order, tokens)
        if not order.numel():
            raise InputError(f"order {tuple(order.shape)}; accepted: at least one position")
        self.check_text(tokens)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Name the type that products run in: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
