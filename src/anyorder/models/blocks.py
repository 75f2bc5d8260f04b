"""The transformer block that every model here is built from, and the norms."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Modulation = tuple[Tensor, Tensor, Tensor]  # shift, scale, gate: each (B, n, C)
Rotation = tuple[
    tuple[Tensor, Tensor], tuple[Tensor, Tensor]
]  # (cosine, sine) for queries, and for keys: (B, 1, n, d/2)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value, each (B, H, n, d) -> (B, H, n, d)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in the type of x: sums are kept in float32 inside."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # (..., width)
        # one type for input and weight, or torch falls back to a chain of separate operations
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-5)


def make_norm(kind: Literal["rms", "layer"], width: int, bias: bool) -> nn.Module:
    """Build RMSNorm (weight only) or LayerNorm."""
    return RMSNorm(width) if kind == "rms" else nn.LayerNorm(width, eps=1e-5, bias=bias)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]): x (B, H, n, d), cosine and sine (B, 1, n, d/2)."""
    cosine, sine = angles
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let each slot see itself and those before it."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def pick(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Take some slots of x (B, n, ...), all without a choice."""
    return x if wanted is None else x[:, wanted]


class Attention(nn.Module):
    """Multi-head self-attention with optional norms and rotation; `attend` says which slots see which."""

    def __init__(self, width: int, heads: int, bias: bool, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv: nn.Module = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.query_norm = RMSNorm(width // heads) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(width // heads) if qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotation: Rotation | None, attend: Attend, wanted: Tensor | None
    ) -> Tensor:  # (B, n, C) -> (B, n, C), or (B, w, C) of the wanted slots
        if wanted is None or not isinstance(self.qkv, nn.Linear):  # a packed map is not cut in parts
            query, key, value = self._heads(self.qkv(x), 3)  # each (B, H, n, d)
            query = query if wanted is None else query[:, :, wanted]
        else:  # the others' keys and values alone
            width, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            of_query, of_rest = (None, None) if bias is None else (bias[:width], bias[width:])
            (query,) = self._heads(functional.linear(x[:, wanted], weight[:width], of_query), 1)
            key, value = self._heads(functional.linear(x, weight[width:], of_rest), 2)
        query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            turn = rotation[0] if wanted is None else (rotation[0][0][:, :, wanted], rotation[0][1][:, :, wanted])
            query, key = rotate(query, turn), rotate(key, rotation[1])
        return self.out(attend(query, key, value).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, count: int) -> Tensor:  # (B, n, count * C) -> (count, B, H, n, d)
        return x.view(*x.shape[:2], count, self.heads, -1).permute(2, 0, 3, 1, 4)


class MLP(nn.Module):
    """Two linear maps with a GELU between, four times as wide inside; GPT-2's GELU goes by a tanh."""

    def __init__(self, width: int, bias: bool, activation: Literal["gelu", "gelu_tanh"]):
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, C) -> (B, n, C)
        return self.down(functional.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """x + gate * f(norm(x) * (1 + scale) + shift), for f attention and then MLP; without modulation x + f(norm(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        norm: Literal["rms", "layer"],
        bias: bool,
        qk_norm: bool,
        activation: Literal["gelu", "gelu_tanh"],
    ):
        super().__init__()
        self.attention_norm = make_norm(norm, width, bias)
        self.attention = Attention(width, heads, bias, qk_norm)
        self.mlp_norm = make_norm(norm, width, bias)
        self.mlp = MLP(width, bias, activation)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        modulation: tuple[Modulation, Modulation] | None,
        attend: Attend,
        wanted: Tensor | None = None,
    ) -> Tensor:  # (B, n, C) -> (B, n, C), or (B, w, C) of the wanted slots (w,)
        if modulation is None:
            x = pick(x, wanted) + self.attention(self.attention_norm(x), rotation, attend, wanted)
            return x + self.mlp(self.mlp_norm(x))
        (shift, scale, gate), after = modulation
        mixed = self.attention(modulate(self.attention_norm(x), shift, scale), rotation, attend, wanted)
        x = torch.addcmul(pick(x, wanted), pick(gate, wanted), mixed)
        mlp_shift, mlp_scale, mlp_gate = (pick(part, wanted) for part in after)
        return torch.addcmul(x, mlp_gate, self.mlp(modulate(self.mlp_norm(x), mlp_shift, mlp_scale)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x * (1 + scale) + shift."""
    return torch.addcmul(shift, x, 1 + scale)
