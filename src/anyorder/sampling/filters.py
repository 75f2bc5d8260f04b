"""From logits to the law that tokens are drawn from: temperature, top-k, top-p, min-p, masks; one for all samplers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.errors import InputError

COLDEST = 1e-30  # in float32, differences of logits over this are still numbers or minus infinity, never NaN


@dataclass(frozen=True)
class Filters:
    """What is done to a conditional before a token is drawn from it; the defaults leave it as it is.

    `temperature` may end at another value, `last_temperature`, which it reaches linearly over the text.
    """

    temperature: float = 1.0
    last_temperature: float | None = None
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # the smallest set of likeliest tokens that holds so much, the one that crosses included
    min_p: float = 0.0  # what is less likely than this share of the likeliest goes

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("the last temperature", self.last_temperature)):
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{name} is {value}; accepted: 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; accepted: 1 or more, or 0 for all")
        if not 0 <= self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise InputError(f"top_p is {self.top_p} and min_p {self.min_p}; accepted: 0 to 1")

    def law(self, logprobs: Tensor, allowed: Tensor | None = None, progress: Tensor | float = 0.0) -> Tensor:
        """Turn logits or log-probabilities (..., V) into those of the law, minus infinity for what cannot be drawn.

        `allowed` (..., V) is a mask; `progress` (...) says how far the text is, from 0 to 1.
        """
        if self == Filters() and allowed is None:
            return logprobs.log_softmax(-1)
        if allowed is not None:
            if not allowed.any(-1).all():
                raise InputError("a blank has no allowed token; accepted: at least one for each position")
            logprobs = logprobs.masked_fill(~allowed, -math.inf)
        # from the likeliest down, so that a temperature near 0 makes no infinity above
        logprobs = logprobs - logprobs.amax(-1, keepdim=True)
        temperature = self._temperature(progress, logprobs)
        if not bool((temperature > 0).all()):
            best = torch.full_like(logprobs, -math.inf).scatter(-1, logprobs.argmax(-1, keepdim=True), 0.0)
            logprobs = torch.where(temperature > 0, logprobs, best)
            temperature = torch.where(temperature > 0, temperature, 1.0)
        logprobs = (logprobs / temperature.clamp(min=COLDEST)).log_softmax(-1)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = _keep(logprobs, _largest(logprobs, self.top_k))
        if self.top_p < 1:
            logprobs = _keep(logprobs, _nucleus(logprobs, self.top_p))
        if self.min_p > 0:
            logprobs = _keep(logprobs, logprobs >= logprobs.amax(-1, keepdim=True) + math.log(self.min_p))
        return logprobs

    def _temperature(self, progress: Tensor | float, like: Tensor) -> Tensor:
        end = self.temperature if self.last_temperature is None else self.last_temperature
        now = self.temperature + (end - self.temperature) * torch.as_tensor(progress, dtype=torch.float64)
        return now.to(like)[..., None]  # (..., 1)


def parse_temperature(text: str) -> tuple[float, float | None]:
    """Read `0.8`, or `1.0..0.7` for a temperature that goes from one to the other."""
    first, dots, last = text.partition("..")
    try:
        return float(first), float(last) if dots else None
    except ValueError:
        raise InputError(f"temperature is {text!r}; accepted: a number, or two such as 1.0..0.7") from None


def _keep(logprobs: Tensor, kept: Tensor) -> Tensor:
    return logprobs.masked_fill(~kept, -math.inf).log_softmax(-1)


def _largest(logprobs: Tensor, count: int) -> Tensor:
    """Mark exactly `count` of the likeliest tokens, the first where several are as likely."""
    return torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, logprobs.topk(count, -1).indices, True)


def _nucleus(logprobs: Tensor, mass: float) -> Tensor:
    ordered, index = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()  # what the likelier ones hold already
    kept = before < mass
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, index, kept)


def uniform(shape: tuple[int, ...] | torch.Size, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw numbers in 0..1 in float64, where the generator is, and bring them to `device`."""
    its_device = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=its_device).to(device)


def draw(logprobs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a token from each law: (P, V) -> (P,), one uniform number each.

    Where all but one token are ruled out, that one comes; what has probability 0 never does.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)  # (P, V)
    whole = cumulative[:, -1:]
    # below the whole, and past every token whose own share is 0
    drawn = uniform((len(logprobs), 1), generator, logprobs.device)
    point = torch.minimum(drawn * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def gather(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Take the log-probability of each token: (P, V), (P,) -> (P,)."""
    return logprobs.gather(-1, tokens[..., None])[..., 0]
