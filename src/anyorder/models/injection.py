"""How a slot of the decoder learns its target position: one small class each, chosen once, combined with `+`.

An injection has four places to act, and by default does nothing at any of them:
`enter` the input, `at_block` what enters block i and how it is modulated, `rotation` queries and keys of every
attention, `at_end` the final norm. A new injection is a subclass here and a line in `KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyorder.config import ModelConfig
from anyorder.errors import InputError
from anyorder.models.blocks import Modulation, Rotation


@dataclass(frozen=True)
class Shape:
    """What an injection needs to know of its model."""

    layers: int
    heads: int
    width: int
    positions: int
    gate_start: float
    rotary_base: float

    @staticmethod
    def of(c: ModelConfig) -> "Shape":
        return Shape(c.layers, c.heads, c.width, c.positions, c.gate_start, c.rotary_base)


class Injection(nn.Module):
    """Tell the slots nothing: a plain GPT, which knows one order only."""

    def enter(self, x: Tensor, target: Tensor) -> Tensor:  # (B, n, C), (B, n) -> (B, n, C)
        return x

    def at_block(
        self, layer: int, x: Tensor, target: Tensor
    ) -> tuple[Tensor, tuple[Modulation, Modulation] | None]:  # (B, n, C), (B, n) -> (B, n, C), modulation
        return x, None

    def rotation(self, own: Tensor, target: Tensor, dtype: torch.dtype) -> Rotation | None:  # (B, n), (B, n)
        return None

    def at_end(self, target: Tensor) -> tuple[Tensor, Tensor] | None:  # (B, n) -> shift, scale (B, n, C)
        return None

    def finish_init(self) -> None:
        """Set what the model's common initialisation leaves to the injection."""

    def freeze(self) -> None:
        """Compute what depends on weights alone, once; they do not change after."""

    def become_identity(self) -> None:
        """Set the weights such that the model computes what it would without this injection."""


class Add(Injection):
    """Add a target-position embedding at the input: sigma-GPT."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.target_position_embedding = nn.Embedding(shape.positions, shape.width)

    def enter(self, x: Tensor, target: Tensor) -> Tensor:
        return x + self.target_position_embedding(target)

    def become_identity(self) -> None:
        nn.init.zeros_(self.target_position_embedding.weight)


class Layer(Injection):
    """Add a target-position embedding of each block's own at its input."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.target_position_embeddings = nn.ModuleList(
            nn.Embedding(shape.positions, shape.width) for _ in range(shape.layers)
        )

    def at_block(self, layer: int, x: Tensor, target: Tensor) -> tuple[Tensor, tuple[Modulation, Modulation] | None]:
        return x + self.target_position_embeddings[layer](target), None

    def become_identity(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class AdaLN(Injection):
    """Shift, scale and gate every block by the target position: AO-GPT.

    The modulation depends on the position alone, so it is computed once per position and gathered, or, where fewer
    slots than positions want it, for those.
    """

    def __init__(self, shape: Shape, condition: int = 128):
        super().__init__()
        self.gate_start = shape.gate_start
        self.target_position_embedding = nn.Embedding(shape.positions, condition)
        self.block_maps = nn.ModuleList(nn.Linear(condition, 6 * shape.width) for _ in range(shape.layers))
        self.final_map = nn.Linear(condition, 2 * shape.width)
        self.tables = nn.ParameterList()  # of every block and the final norm, once frozen

    @torch.no_grad()
    def freeze(self) -> None:
        signal = functional.silu(self.target_position_embedding.weight)
        tables = [linear(signal) for linear in (*self.block_maps, self.final_map)]
        self.tables = nn.ParameterList(nn.Parameter(table, requires_grad=False) for table in tables)

    def _gather(self, layer: int, target: Tensor, parts: int) -> tuple[Tensor, ...]:
        if len(self.tables):
            return functional.embedding(target, self.tables[layer]).chunk(parts, -1)  # each (B, n, C)
        linear = self.block_maps[layer] if layer >= 0 else self.final_map
        if target.numel() < self.target_position_embedding.num_embeddings:
            return linear(functional.silu(self.target_position_embedding(target))).chunk(parts, -1)  # each (B, n, C)
        table = linear(functional.silu(self.target_position_embedding.weight))  # (T, parts * C)
        return functional.embedding(target, table).chunk(parts, -1)

    def at_block(self, layer: int, x: Tensor, target: Tensor) -> tuple[Tensor, tuple[Modulation, Modulation] | None]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._gather(layer, target, 6)
        return x, ((shift, scale, gate), (mlp_shift, mlp_scale, mlp_gate))

    def at_end(self, target: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self._gather(-1, target, 2)
        return shift, scale

    def finish_init(self) -> None:
        for linear in self.block_maps:
            assert isinstance(linear, nn.Linear)
            with torch.no_grad():
                gates = linear.bias.view(6, -1)[[2, 5]]
                linear.bias.view(6, -1)[[2, 5]] = torch.full_like(gates, self.gate_start)

    def become_identity(self) -> None:
        """Shift by 0, scale by 1, let all through; the maps' weights at 0 still get a gradient from the embedding."""
        for linear in [*self.block_maps, self.final_map]:
            assert isinstance(linear, nn.Linear)
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.gate_start = 1.0
        self.finish_init()


class Rotary(Injection):
    """Rotate queries by the target's position and keys by the slot's own, so that attention sees their distance."""

    def __init__(self, shape: Shape):
        super().__init__()
        half = shape.width // shape.heads // 2
        frequency = shape.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(shape.positions + 1, dtype=torch.float64), frequency)  # (T + 1, d/2)
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def _angles(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.cosine[index].unsqueeze(1).to(dtype), self.sine[index].unsqueeze(1).to(dtype)  # (B, 1, n, d/2)

    def rotation(self, own: Tensor, target: Tensor, dtype: torch.dtype) -> Rotation:
        return self._angles(target + 1, dtype), self._angles(own, dtype)  # position p stands at p + 1

    def become_identity(self) -> None:
        raise InputError(
            "a rotation changes what every attention of the weights to start from sees; "
            "accepted: an injection of add, layer and adaln"
        )


class Together(Injection):
    """Several injections, one after the other."""

    def __init__(self, parts: list[Injection]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def _parts(self) -> list[Injection]:
        return [part for part in self.parts if isinstance(part, Injection)]

    def enter(self, x: Tensor, target: Tensor) -> Tensor:
        for part in self._parts():
            x = part.enter(x, target)
        return x

    def at_block(self, layer: int, x: Tensor, target: Tensor) -> tuple[Tensor, tuple[Modulation, Modulation] | None]:
        found = None
        for part in self._parts():
            x, modulation = part.at_block(layer, x, target)
            found = found or modulation
        return x, found

    def rotation(self, own: Tensor, target: Tensor, dtype: torch.dtype) -> Rotation | None:
        found = (part.rotation(own, target, dtype) for part in self._parts())
        return next((rotation for rotation in found if rotation is not None), None)

    def at_end(self, target: Tensor) -> tuple[Tensor, Tensor] | None:
        found = (part.at_end(target) for part in self._parts())
        return next((modulation for modulation in found if modulation is not None), None)

    def finish_init(self) -> None:
        for part in self._parts():
            part.finish_init()

    def freeze(self) -> None:
        for part in self._parts():
            part.freeze()

    def become_identity(self) -> None:
        for part in self._parts():
            part.become_identity()


KINDS: dict[str, Callable[[Shape], Injection]] = {"add": Add, "layer": Layer, "adaln": AdaLN, "rotary": Rotary}


def make_injection(text: str, shape: Shape) -> Injection | None:
    """Build the injection of a text such as `adaln+rotary`; `none` gives None, a model of one order."""
    if text == "none":
        return None
    names = text.split("+")
    if len(set(names)) < len(names) or not set(names) <= set(KINDS):
        raise InputError(
            f"unknown injection {text!r}; accepted: none, {', '.join(KINDS)}, "
            "or several different ones joined by +, such as adaln+rotary"
        )
    parts = [KINDS[name](shape) for name in names]
    return parts[0] if len(parts) == 1 else Together(parts)
