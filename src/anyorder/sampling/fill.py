"""Texts written: blanks filled in a text, or a text from nothing; in any order, in as few steps as asked for."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from anyorder import orders
from anyorder.errors import InputError
from anyorder.models.encoder import EncoderContext
from anyorder.models.model import LanguageModel
from anyorder.sampling.constraints import Choice, from_mask
from anyorder.sampling.filters import Filters
from anyorder.sampling.noising import by_scores
from anyorder.sampling.schedules import NOISY, Schedule
from anyorder.sampling.speculative import burst, speculative
from anyorder.sampling.stepwise import MEASURES, along_order, parse_surest, plan, surest_first
from anyorder.sampling.writing import Reveal, Writing

Temperature = float | tuple[float, float]  # constant, or from the first token to the last


@dataclass(frozen=True)
class Written:
    """What was written: everything in natural positions, except `order`."""

    tokens: Tensor  # (B, T) with the blanks filled
    order: Tensor  # (B, T) known positions first, then the blanks as they were written, then what is beyond the text
    logprobs: Tensor  # (B, T) of each written token under the law it was drawn from, 0 elsewhere
    model_logprobs: Tensor  # (B, T) under the model's conditional without temperature, filters and constraints
    steps: Tensor  # (B, T) the step each was written in, -1 elsewhere
    forward_passes: int
    token_forwards: int

    def row(self, number: int, length: int | None = None) -> "Written":
        """Take one text, of which `length` tokens count: the same with (T,) in place of (B, T)."""
        parts = (self.tokens, self.order, self.logprobs, self.model_logprobs, self.steps)
        tokens, order, logprobs, own, steps = (part[number, :length] for part in parts)
        return Written(tokens, order, logprobs, own, steps, self.forward_passes, self.token_forwards)


@dataclass(frozen=True)
class Manner:
    """In which order blanks are written, and how many at a time."""

    order: str | Tensor = "left_to_right"  # a distribution, (B, T), or one of MEASURES: where the model is surest
    steps: int | None = None  # passes for all blanks; None: one for each
    schedule: str = "linear"
    exact: bool = False  # several a pass, and the model's own law along the order
    draft: int = 0  # drafts of an exact pass; 0: their number adapts
    burst: int = 0  # several a pass by the best of so many random orders; approximate

    def __post_init__(self) -> None:
        if self.draft < 0 or self.burst < 0:
            raise InputError(f"draft is {self.draft} and burst {self.burst}; accepted: 1 or more, or 0 for neither")
        if self.draft and not self.exact:
            raise InputError("draft was given; accepted: it together with exact")
        if self.schedule not in get_args(Schedule):
            raise InputError(f"unknown schedule {self.schedule!r}; accepted: {', '.join(get_args(Schedule))}")
        if self.schedule != "linear" and self.steps is None:
            raise InputError(f"schedule {self.schedule!r} was given without steps; accepted: the two together")
        if self.exact + bool(self.burst) + (self.steps is not None) > 1:
            raise InputError(
                "steps, exact and burst each say how many tokens are written at a time; accepted: one of them"
            )
        if isinstance(self.order, str) and parse_surest(self.order) is None:
            try:
                orders.parse(self.order)
            except InputError as error:
                raise InputError(
                    f"{error}; or where the model is surest: {', '.join(MEASURES)}, with a window margin(8)"
                ) from None
        elif isinstance(self.order, str) and (self.exact or self.burst):
            raise InputError(
                f"order {self.order!r} depends on what is written; accepted: an order such as random, which does not"
            )
        if self.schedule in ("ancestral", *NOISY) and self.order != "random":
            raise InputError(
                f"schedule {self.schedule!r} writes at random positions, and order is {self.order}; accepted: random"
            )
        if self.burst and not (isinstance(self.order, str) and self.order == "random"):
            raise InputError(f"burst tries random orders, and order is {self.order}; accepted: random")


@torch.inference_mode()
def write(writing: Writing, manner: Manner) -> Iterator[Reveal]:
    """Write the blanks, yielding each step as it is done."""
    surest = parse_surest(manner.order) if isinstance(manner.order, str) else None
    if (manner.exact or manner.burst) and isinstance(writing.context, EncoderContext):
        raise InputError(
            "exact and burst verify drafts in one causal pass, and an encoder needs one for each; "
            "accepted: a model of family decoder or two_stream"
        )
    if manner.burst:
        return (yield from burst(writing, manner.burst))
    if surest is None:
        order = writing.along(manner.order)
        if manner.exact:
            return (yield from speculative(writing, order, manner.draft))
    if manner.schedule in NOISY:
        return (yield from by_scores(writing, manner.steps, manner.schedule))
    counts = plan(writing.total, manner.steps, manner.schedule, writing.generator)
    if writing.constraint.of_several() and bool((counts > 1).any()):
        raise InputError(
            "choices of several tokens were given with several tokens a step, which cannot see each other; "
            "accepted: one token a step, or exact"
        )
    yield from along_order(writing, order, counts) if surest is None else surest_first(writing, surest, counts)


def written(writing: Writing, reveals: Iterable[Reveal]) -> Written:
    """Go through all steps and gather what they wrote."""
    order = writing.known_first.clone()
    at = writing.context.lengths.clone()  # how much of each row is known or written
    steps = torch.full_like(order, -1)
    logprobs, own = torch.zeros(2, *order.shape, device=order.device)
    for step, reveal in enumerate(reveals):
        row, column = (torch.arange(reveal.positions.shape[1]).to(at) < reveal.counts[:, None]).nonzero(as_tuple=True)
        place = reveal.positions[row, column]
        order[row, at[row] + column] = place
        steps[row, place] = step
        logprobs[row, place], own[row, place] = reveal.logprobs[row, column], reveal.model_logprobs[row, column]
        at += reveal.counts
    # what is beyond a row's text was never read, and is given back as 0
    tokens = writing.tokens.clamp(min=0)
    context = writing.context
    return Written(tokens, order, logprobs, own, steps, context.passes, context.tokens_forwarded)


def fill(
    model: LanguageModel,
    tokens: Tensor,
    blanks: Tensor,
    order: str | Tensor = "left_to_right",
    *,
    steps: int | None = None,
    schedule: str = "linear",
    temperature: Temperature = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    exact: bool = False,
    draft: int = 0,
    burst: int = 0,
    allowed: Tensor | None = None,
    choices: Sequence[Choice] = (),
    lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Written:
    """Fill tokens (B, T) where blanks (B, T) is true; the known ones are read first, in one pass.

    order: the text form of a distribution, (B, T) orders, of which the blanks' part counts, or `probability`, `margin`
        or `entropy`: at each step where the model is surest, `margin(8)` among the first 8 blanks.
    steps, schedule: write all blanks in so many passes, `linear` or `cosine`; without steps, one token a pass (of an
        encoder in random order, first-hitting). `ancestral` undoes a linear noise: every position its own step; SEDD
        has `euler` and `tweedie`, by its own scores.
    exact: as many tokens a pass as hold when verified; the law is that of one token a pass. `draft` fixes how many.
    burst: as many as hold along the best of so many random orders; approximate.
    temperature: 1 is the model's law, 0 greedy, (1.0, 0.7) goes from one to the other; top_k, top_p, min_p cut it.
    allowed: a bool mask that broadcasts to (B, T, V); choices: options for several positions together.
    lengths: (B,) where the rows are texts of different lengths; what is beyond is not read.
    """
    manner = Manner(order, steps, schedule, exact, draft, burst)
    first, last = temperature if isinstance(temperature, tuple) else (temperature, None)
    filters = Filters(first, last, top_k, top_p, min_p)
    constraint = None
    if tokens.dim() == 2:  # otherwise refused below
        constraint = from_mask(allowed, choices, (*tokens.shape, model.config.vocabulary))
    writing = Writing(model, tokens, blanks, lengths, filters, constraint, generator)
    return written(writing, write(writing, manner))


def generate(
    model: LanguageModel, batch: int = 1, length: int | None = None, order: str | Tensor = "random", **ways: Any
) -> Written:
    """Write `batch` texts of `length` tokens from nothing: `fill` with everything blank, and its other arguments."""
    length = model.config.positions if length is None else length
    if batch < 1 or length < 1:
        raise InputError(f"batch is {batch} and length {length}; accepted: 1 or more")
    tokens = torch.zeros(batch, length, dtype=torch.long, device=model.token_embedding.weight.device)
    return fill(model, tokens, torch.ones_like(tokens, dtype=torch.bool), order, **ways)
