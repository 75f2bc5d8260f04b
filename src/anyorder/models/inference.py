"""A model made ready to write: weights in the number type of products, packed for few rows, tables instead of maps."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyorder.config import Precision
from anyorder.models.blocks import MLP, RMSNorm
from anyorder.models.model import LanguageModel
from anyorder.precision import pick_device, pick_precision

ROWS = 4  # that a step of generation multiplies, about: what weights are laid out for
PACK = "_reorder_linear_weight"  # what torch's own compiler packs with; not public, so it may be missing
SMALL = 2**15  # numbers; in more of them the work counts, not the number of kernels

Model = TypeVar("Model", bound=LanguageModel)


class PackedLinear(nn.Module):
    """A linear map whose weight lies in memory as oneDNN reads it fastest: two to three times a plain one's rate.

    With a `gelu` (none or tanh) what comes out goes through that.
    """

    def __init__(self, linear: nn.Linear, gelu: str | None = None):
        super().__init__()
        self.after = ("none", "") if gelu is None else ("gelu", gelu)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: Tensor = getattr(torch.ops.mkldnn, PACK)(linear.weight.detach().contiguous(), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, self.after[0], [], self.after[1])


class PackedMLP(nn.Module):
    """The two maps, the first with its GELU."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.up, self.down = PackedLinear(mlp.up, mlp.approximate), PackedLinear(mlp.down)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, C) -> (B, n, C)
        return self.down(self.up(x))


class MirroredNorm(nn.Module):
    """RMSNorm by a LayerNorm of (x, -x), whose mean is 0: one fused kernel, where torch strings eight together."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.cat((norm.weight, norm.weight)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., C) -> (..., C)
        if x.numel() > SMALL:
            return self.norm(x)
        return functional.layer_norm(torch.cat((x, -x), -1), self.weight.shape, self.weight, None, 1e-5)[
            ..., : x.shape[-1]
        ]


@torch.no_grad()
def prepare_for_inference(model: Model, precision: Precision) -> Model:
    """Put a model on the device, cast it, and on a CPU pack its linear maps; it cannot be trained or saved after."""
    device = pick_device()
    model.injection.freeze()
    model.to(device=device, dtype=torch.bfloat16 if pick_precision(precision, device) == "bf16" else torch.float32)
    if device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, PACK):
        for block in model.blocks:
            _pack(block)
        model.head = PackedLinear(model.head) if isinstance(model.head, nn.Linear) else model.head
    return model.eval()


def _pack(module: nn.Module) -> None:
    for name, child in module.named_children():
        match child:
            case nn.Linear():
                setattr(module, name, PackedLinear(child))
            case MLP():
                setattr(module, name, PackedMLP(child))
            case RMSNorm():
                setattr(module, name, MirroredNorm(child))
            case _:
                _pack(child)


def weights_of_a_step(model: LanguageModel) -> int:
    """Count the bytes of weights that every step of generation reads: those of the blocks' linear maps and the head."""
    maps = [m for part in (model.blocks, model.head) for m in part.modules() if isinstance(m, nn.Linear | PackedLinear)]
    return sum(m.in_features * m.out_features for m in maps) * model.token_embedding.weight.element_size()
