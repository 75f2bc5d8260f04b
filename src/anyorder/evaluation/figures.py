"""The figures of a likelihood report: each scores whole sequences, with randomness of each sequence's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from anyorder import orders
from anyorder.data.batches import generator_for
from anyorder.errors import InputError
from anyorder.evaluation.ensemble import (
    context_members,
    draw_contexts,
    draw_places,
    mean_probability,
    powers,
    prefix_members,
)
from anyorder.models.encoder import Encoder
from anyorder.models.model import LanguageModel
from anyorder.objectives import draw_hidden, order_nll, score_entropy, stratified

Mode = Literal["fast", "paper"]
SHARE = 0.7  # of how hard a token was in another context, which goes with it to the next
NEEDS_ANY_ORDER = (
    "this model reads left to right only, and other orders, an ensemble or the masked-diffusion bound were asked for; "
    "accepted: a model that reads in any order"
)


class Figure(Protocol):
    """One computation, of which one or several columns are reported."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def slots(self, length: int) -> int:
        """Say about how many slots the model computes for a sequence, to foresee the time."""
        ...

    def nats(self, model: LanguageModel, tokens: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Score tokens (B, T), one generator a row: nats of whole sequences (B, columns), in float64."""
        ...


def score(
    figure: Figure,
    model: LanguageModel,
    batches: Iterator[tuple[list[int], Tensor]],
    seed: int,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[tuple[list[int], Tensor]]:
    """Score batches of numbered sequences (b, T): the numbers again, and nats (b, columns).

    All that is random belongs to (seed, figure, number of the sequence), whatever the batch or the process.
    """
    for numbers, tokens in batches:
        generators = [generator_for(seed, figure.name, number) for number in numbers]
        with torch.no_grad(), autocast():  # closed before the yield, or the caller would run in it
            nats = figure.nats(model, tokens, generators)
        yield numbers, nats.cpu()


@dataclass(frozen=True)
class AlongOrders:
    """The chain rule along orders, averaged; with several of them also their mixture, log 1/N sum_n p(x, order_n)."""

    name: str
    distribution: orders.OrderDistribution
    repeats: int = 1
    rereads: bool = False  # an encoder reads the text again for every step

    @property
    def columns(self) -> tuple[str, ...]:
        if self.repeats == 1:
            return (self.name,)
        return f"{self.name}, {self.repeats} orders", f"{self.name}, mixture of {self.repeats}"

    def slots(self, length: int) -> int:
        return self.repeats * length * (length if self.rereads else 1)

    def nats(self, model: LanguageModel, tokens: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        found = []
        for _ in range(self.repeats):
            drawn = [self.distribution.sample(1, tokens.shape[1], generator, 1.0) for generator in generators]
            found.append(order_nll(model, tokens, torch.cat(drawn).to(tokens.device)).double().sum(1))  # (B,)
        nats = torch.stack(found)  # (N, B)
        mean = nats.mean(0)
        if self.repeats == 1:
            return mean[:, None]
        return torch.stack((mean, -mean_probability(-nats, (self.repeats,), 0)[0]), 1)


@dataclass(frozen=True)
class Ensemble:
    """The order ensemble of 1, 2, 4, ... members from stratified contexts; one member is the masked-diffusion bound.

    Which tokens a context leaves to be scored is chance. With `baseline` every token is scored once more, along one
    random order, and that says how hard those tokens were: SHARE of it is taken off them and put back for the whole
    text, which changes no expectation and takes chance out.
    """

    members: int
    contexts: int
    name: str = "ensemble"
    baseline: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"{self.name} of {size}" for size in powers(self.members)) if self.members > 1 else (self.name,)

    def slots(self, length: int) -> int:
        return (self.members * min(self.contexts, length) + self.baseline) * length

    def nats(self, model: LanguageModel, tokens: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        length = tokens.shape[1]
        drawn = [draw_contexts(min(self.contexts, length), self.members, length, generator) for generator in generators]
        sizes, its_orders = (torch.stack(part).to(tokens.device) for part in zip(*drawn, strict=True))
        logprobs = context_members(_any_order(model), tokens, sizes, its_orders)  # (B, K, M, T), 0 where nothing is
        nats = -mean_probability(logprobs, powers(self.members), 2)  # (E, B, K, T)
        put_back = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        if self.baseline:
            order = torch.cat([orders.Random().sample(1, length, generator) for generator in generators])
            hard = SHARE * order_nll(model, tokens, order.to(tokens.device)).double()  # (B, T) by step
            hard = torch.zeros_like(hard).scatter(1, order.to(tokens.device), hard)  # by position
            put_back = hard.mean(1)
            column = (sizes[..., None] + torch.arange(length, device=tokens.device)).clamp(max=length - 1)
            outside = its_orders[:, :, 0].gather(2, column)  # (B, K, T), of which the first T - sizes count
            taken_off = hard[:, None].expand(outside.shape).gather(2, outside)
            nats = nats - taken_off * (torch.arange(length, device=tokens.device) < (length - sizes)[..., None])
        return ((nats.sum(-1) / (length - sizes)).mean(-1) + put_back).T * length


@dataclass(frozen=True)
class PaperEnsemble:
    """The order ensemble of 1, 2, 4, ... members along one random order: the first is that order itself."""

    members: int
    name: str = "ensemble (paper)"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"ensemble of {size} (paper)" for size in powers(self.members))

    def slots(self, length: int) -> int:
        return length + (self.members - 1) * length * (length + 4) // 4

    def nats(self, model: LanguageModel, tokens: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        reader, length = _any_order(model), tokens.shape[1]
        order = torch.cat([orders.Random().sample(1, length, generator) for generator in generators]).to(tokens.device)
        places = torch.stack([draw_places(self.members - 1, length, generator) for generator in generators])
        first = -order_nll(model, tokens, order)[:, None]  # (B, 1, T)
        others = prefix_members(reader, tokens, order, places.to(tokens.device))  # (B, M - 1, T)
        return -mean_probability(torch.cat((first, others), 1), powers(self.members), 1).sum(-1).T


def masked_bound(contexts: int, rereads: bool = False) -> Ensemble:
    """Build the bound of masked diffusion: reveal a random set of stratified size, score all that is hidden."""
    return Ensemble(1, contexts, "masked-diffusion bound", baseline=not rereads)


@dataclass(frozen=True)
class ScoreEntropy:
    """SEDD's own bound, at stratified times."""

    times: int
    name: str = "score-entropy bound"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)

    def slots(self, length: int) -> int:
        return self.times * length

    def nats(self, model: LanguageModel, tokens: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        assert isinstance(model, Encoder)
        drawn = [stratified(self.times, generator) for generator in generators]
        masks = [
            draw_hidden(times, tokens.shape[1], generator) for times, generator in zip(drawn, generators, strict=True)
        ]
        found = [
            score_entropy(model, tokens, time.float().to(tokens.device), hidden.to(tokens.device)).double().sum(1)
            for time, hidden in zip(torch.stack(drawn, 1), torch.stack(masks, 1), strict=True)
        ]
        return torch.stack(found).mean(0)[:, None]


def _any_order(model: LanguageModel) -> LanguageModel:
    if not model.any_order:
        raise InputError(NEEDS_ANY_ORDER)
    return model
