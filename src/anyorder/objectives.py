"""Training objectives: pure functions from a model and tokens to unreduced nats. Evaluation repeats the same ones."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Model = Callable[[Tensor, Tensor], Tensor]  # tokens (B, T), order (B, n) -> logits (B, n, V)


def order_nll(model: Model, tokens: Tensor, order: Tensor) -> Tensor:
    """Score tokens (B, T) along order (B, n) -> nats (B, n): -log p(x[order_i] | x[order_<i]), column i is step i."""
    logits = model(tokens, order).float()  # (B, n, V)
    targets = tokens.gather(1, order)  # (B, n)
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)
