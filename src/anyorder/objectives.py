"""Training objectives: pure functions from a model and tokens to unreduced nats. Evaluation repeats the same ones."""

import torch
from torch import Tensor
from torch.nn import functional

from anyorder import orders
from anyorder.models.encoder import LEAST, Encoder, log_ratio, noise
from anyorder.models.model import LanguageModel


def order_nll(model: LanguageModel, tokens: Tensor, order: Tensor) -> Tensor:
    """Score tokens (B, T) along order (B, n) -> nats (B, n): -log p(x[order_i] | x[order_<i]), column i is step i.

    One pass of a decoder; an encoder reads the text again for every step, and without gradients.
    """
    logits = model.along(tokens, order).float()  # (B, n, V)
    targets = tokens.gather(1, order)  # (B, n)
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)


def masked_nll(model: Encoder, tokens: Tensor, order: Tensor, known: Tensor, all_hidden: bool) -> Tensor:
    """Reveal the first known (B,) positions of order (B, T), score what is hidden: weighted nats (B, T).

    Its mean over positions and known = 0..T-1 is the mean nats along the order. With `all_hidden` every hidden position
    is scored with weight T / (T - known), which has that expectation for uniformly random orders only; without it the
    next position of the order alone, with weight T.
    """
    length = tokens.shape[1]
    rank = orders.ranks(order)
    logits = model(tokens, rank < known[:, None])  # (B, T, V)
    nats = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
    if all_hidden:
        return nats * (rank >= known[:, None]) * (length / (length - known))[:, None]
    return nats * (rank == known[:, None]) * length


def score_entropy(model: Encoder, tokens: Tensor, time: Tensor, hidden: Tensor) -> Tensor:
    """SEDD's bound at time (B,) in 0..1, where hidden (B, T) was hidden: weighted nats (B, T).

    dsigma/dt (sum_y s_y - r log s_x + r (log r - 1)) at hidden positions, with r = 1 / (e^sigma - 1), the true score of
    the true token. Its mean over time, with each position hidden with probability 1 - e^-sigma, is the bound.
    """
    sigma = noise(time)
    log_scores = model.log_scores(tokens, ~hidden, time)  # (B, T, V)
    log_r = -log_ratio(sigma)[:, None]  # (B, 1)
    true = log_scores.gather(2, tokens[..., None])[..., 0]  # (B, T)
    entropy = log_scores.exp().sum(-1) - log_r.exp() * true + log_r.exp() * (log_r - 1)
    rate = (1 - LEAST) / (1 - (1 - LEAST) * time)  # dsigma/dt
    return entropy * hidden * rate[:, None]


def stratified(batch: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw one number in each of `batch` equal parts of 0..1: (B,), float64."""
    uniform = torch.rand(batch, generator=generator, dtype=torch.float64)
    return (torch.arange(batch) + uniform) / batch


def draw_hidden(time: Tensor, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Hide each position with probability 1 - e^-sigma(time (B,)): (B, T) bool."""
    chance = (1 - LEAST) * time
    return torch.rand(len(time), length, generator=generator, dtype=torch.float64) < chance[:, None]
