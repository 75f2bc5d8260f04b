"""Optimizers, the learning-rate schedule, and the exponential moving average of the weights."""

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from anyorder.config import TrainingConfig

Model = TypeVar("Model", bound=nn.Module)


def make_optimizers(model: nn.Module, config: TrainingConfig) -> list[Optimizer]:
    """Build AdamW for everything, or Muon for the blocks' matrices with AdamW for the rest.

    Weight decay applies to matrices only: vectors are scales, shifts and biases, which have no business at zero.
    """
    named = dict(model.named_parameters())
    muon = [p for name, p in named.items() if config.optimizer == "muon" and _is_block_matrix(name, p)]
    taken = {id(p) for p in muon}
    rest = [p for p in named.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
    optimizers: list[Optimizer] = [adamw]
    if muon:
        optimizers.append(
            Muon(
                muon,
                lr=config.muon_learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _is_block_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks.") and parameter.dim() == 2


def learning_rate_share(step: int, config: TrainingConfig) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then a cosine down to `final_learning_rate`."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.final_learning_rate
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizers: list[Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share


def optimizer_tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Name every tensor of the optimizers' state `parameter/key`; empty before the first step."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def make_state(optimizers: list[Optimizer]) -> None:
    """Let each optimizer make its state, as it would at its first step, without moving a weight."""
    for optimizer in optimizers:
        rates = [group["lr"] for group in optimizer.param_groups]
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate, decay in zip(optimizer.param_groups, rates, decays, strict=True):
            group["lr"], group["weight_decay"] = rate, decay


class EMA(Generic[Model]):
    """Keep a moving average of a model's parameters: average += (1 - d) * (weight - average).

    d = min(decay, (1 + n) / (10 + n)) at the n-th update, so that the random start is soon forgotten.
    """

    def __init__(self, model: Model, decay: float):
        self.decay = decay
        self.live = dict(model.named_parameters())
        self.model = copy.deepcopy(model).requires_grad_(False)  # the averages, as a model that can be asked
        self.average: dict[str, Tensor] = {name: p.detach() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Take in the weights; `number` counts the updates, this one included."""
        decay = min(self.decay, (1 + number) / (10 + number))
        live: list[Tensor] = [p.detach() for p in self.live.values()]
        torch._foreach_lerp_(list(self.average.values()), live, 1 - decay)
