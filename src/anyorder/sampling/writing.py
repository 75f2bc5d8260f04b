"""Texts on their way: what is known of each row, what is left to write, and the law each token is drawn from."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder import orders
from anyorder.errors import InputError
from anyorder.models.context import Asked
from anyorder.models.families import open_context
from anyorder.models.model import LanguageModel
from anyorder.sampling.constraints import Constraint
from anyorder.sampling.filters import Filters, draw, gather


@dataclass(frozen=True)
class Reveal:
    """One step: row r wrote tokens[r, :counts[r]] at positions[r, :counts[r]], in this order."""

    positions: Tensor  # (B, K)
    tokens: Tensor  # (B, K)
    logprobs: Tensor  # (B, K) under the law each was drawn from
    model_logprobs: Tensor  # (B, K) under the model's conditional itself: no temperature, filter or constraint
    counts: Tensor  # (B,)


Measure = Callable[[Tensor], Tensor]  # log-probabilities (P, E) -> how sure they are (P,)


@dataclass(frozen=True)
class Laws:
    """The laws of some questions, packed."""

    law: Tensor  # (P, E) log-probabilities to draw from
    own: Tensor  # (P, V) log-probabilities of the model's conditional
    mask: Tensor | None  # (P, E) what is allowed
    row: Tensor  # (P,) whose question it is
    column: Tensor  # (P,) and which


@dataclass(frozen=True)
class Drawn:
    """Tokens drawn for questions, each (B, K); `sure` only where a measure was given."""

    tokens: Tensor
    logprobs: Tensor
    model_logprobs: Tensor
    sure: Tensor


class Writing:
    """A batch of texts (B, T) whose blanks are being written, on the model's cache of what is known so far."""

    def __init__(
        self,
        model: LanguageModel,
        tokens: Tensor,
        blanks: Tensor,
        lengths: Tensor | None = None,
        filters: Filters | None = None,
        constraint: Constraint | None = None,
        generator: torch.Generator | None = None,
    ):
        """Row r is tokens[r, :lengths[r]]; positions beyond are neither read nor written."""
        _check(tokens, blanks, lengths, model.config.vocabulary)
        device = model.token_embedding.weight.device
        tokens, blanks = tokens.to(device), blanks.to(device)
        lengths = None if lengths is None else lengths.to(device)
        batch, length = tokens.shape
        self.blanks = blanks
        self.filters = Filters() if filters is None else filters
        self.generator = generator
        self.vocabulary = model.config.vocabulary
        self.entries = model.config.entries or self.vocabulary
        self.constraint = Constraint() if constraint is None else constraint.to(device)
        self.lengths = torch.full((batch,), length, device=tokens.device) if lengths is None else lengths
        self.group = blanks.long().masked_fill(torch.arange(length, device=tokens.device) >= self.lengths[:, None], 2)
        self.left = self.group == 1  # (B, T) still to be written
        self.total = self.left.sum(1)  # (B,) blanks of each row
        self.tokens = tokens.masked_fill(self.group != 0, -1)
        self.constraint = self.constraint.checked(self.tokens, self.lengths, self.vocabulary)
        self.known_first = orders.grouped(self.group, torch.arange(length, device=tokens.device).expand(batch, -1))
        known = (self.group == 0).sum(1)
        self.origin = torch.arange(batch, device=tokens.device)  # rows of the constraint, which a fork shares
        self.context = open_context(model, batch, length, lengths)
        first = self.known_first[:, : int(known.max())]
        self.context.reveal(first, self.tokens.gather(1, first).clamp(min=0), known)

    def along(self, order: str | Tensor) -> Tensor:
        """Put the known positions first, then the blanks as `order` has them, then what is beyond the text: (B, T)."""
        batch, length = self.tokens.shape
        if isinstance(order, str):  # of each text's own length, whatever it is batched with
            drawn = torch.arange(length).repeat(batch, 1)
            for its in self.lengths.unique().tolist():
                rows = (self.lengths == its).nonzero()[:, 0].cpu()
                drawn[rows, :its] = orders.draw(order, len(rows), its, self.generator)
            order = drawn
        order = orders.draw(order, batch, length).to(self.tokens.device)
        return orders.grouped(
            self.group, torch.where(self.group == 1, orders.ranks(order), orders.ranks(self.known_first))
        )

    def next(self, order: Tensor, count: int, after: Tensor | int = 0) -> Tensor:
        """List the positions that come next along order (B, T), `after` (B,) more of them: (B, count)."""
        start = self.context.lengths + after
        column = start[:, None] + torch.arange(count, device=order.device)
        return order.gather(1, column.clamp(max=order.shape[1] - 1))

    def open_first(self) -> Tensor:
        """List each row's positions with the blanks still to be written in front, left to right: (B, T)."""
        natural = torch.arange(self.left.shape[1], device=self.left.device)
        return orders.grouped(~self.left, natural.expand(self.left.shape))

    def fork(self, rows: Tensor) -> "Writing":
        """Copy rows (N,), any number of times each, to try something on them."""
        other = copy.copy(self)
        other.context = self.context.fork(rows)
        for name in ("tokens", "left", "total", "origin"):
            setattr(other, name, getattr(self, name).index_select(0, rows))
        return other

    def remaining(self) -> Tensor:
        """Count the blanks still to be written: (B,)."""
        return self.left.sum(1)

    def laws(
        self, asked: Asked, positions: Tensor, progress: Tensor, run: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Iterator[Laws]:
        """Give the laws of questions at positions (B, K), at progress (B, K) of the text, a part at a time.

        `run` is what is not yet in the text: positions (B, n), tokens (B, n), and how many of them each question
        knows (B, K).
        """
        place, how_far = positions[asked.row, asked.column], progress[asked.row, asked.column]
        for logits, part in asked.parts():
            row, column = asked.row[part], asked.column[part]
            known = self._known(row, column, run) if self.constraint.choices else None
            mask = self.constraint.mask(self.origin[row], place[part], known, self.entries)
            own = logits.float().log_softmax(-1)
            yield Laws(self.filters.law(own[:, : self.entries], mask, how_far[part]), own, mask, row, column)

    def _known(self, row: Tensor, column: Tensor, run: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        known = self.tokens[row]  # (P, T)
        if run is None:
            return known
        positions, tokens = run[0][row], run[1][row]  # (P, n)
        question, place = (torch.arange(positions.shape[1]).to(row) < run[2][row, column][:, None]).nonzero(
            as_tuple=True
        )
        known[question, positions[question, place]] = tokens[question, place]
        return known

    def record(self, reveal: Reveal) -> Reveal:
        """Take a step that the context knows of into the text."""
        row, column = (torch.arange(reveal.positions.shape[1]).to(reveal.counts) < reveal.counts[:, None]).nonzero(
            as_tuple=True
        )
        place = reveal.positions[row, column]
        self.tokens[row, place] = reveal.tokens[row, column]
        self.left[row, place] = False
        return reveal

    def draw(self, asked: Asked, positions: Tensor, progress: Tensor, measure: Measure | None = None) -> Drawn:
        """Draw a token for each question at positions (B, K)."""
        shape, device = positions.shape, positions.device
        found = torch.zeros(shape, dtype=torch.long, device=device)
        logprobs, own, sure = torch.full((3, *shape), -torch.inf, device=device)
        for laws in self.laws(asked, positions, progress):
            where = laws.row, laws.column
            drawn = draw(laws.law, self.generator)
            found[where], logprobs[where], own[where] = drawn, gather(laws.law, drawn), gather(laws.own, drawn)
            if measure is not None:
                open_law = laws.own[:, : self.entries]
                if laws.mask is not None:
                    open_law = open_law.masked_fill(~laws.mask, -torch.inf).log_softmax(-1)
                sure[where] = measure(open_law)
        return Drawn(found, logprobs, own, sure)


def _check(tokens: Tensor, blanks: Tensor, lengths: Tensor | None, vocabulary: int) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.long:
        raise InputError(f"tokens are {tuple(tokens.shape)} of {tokens.dtype}; accepted: (B, T) of torch.long")
    if blanks.shape != tokens.shape or blanks.dtype != torch.bool:
        raise InputError(
            f"blanks {tuple(blanks.shape)} of {blanks.dtype} do not match tokens {tuple(tokens.shape)}; "
            "accepted: a bool mask of the same shape"
        )
    if not tokens.numel():
        raise InputError(f"tokens are {tuple(tokens.shape)}; accepted: at least one text of one token")
    known = tokens.masked_fill(blanks, 0)
    if not 0 <= known.min() <= known.max() < vocabulary:
        raise InputError(
            f"known tokens go from {int(known.min())} to {int(known.max())}; accepted: 0 to {vocabulary - 1}"
        )
    if lengths is None:
        return
    if lengths.shape != tokens.shape[:1] or bool((lengths < 1).any() or (lengths > tokens.shape[1]).any()):
        raise InputError(f"lengths {lengths.tolist()}; accepted: one for each row, 1 to {tokens.shape[1]}")
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    if bool((beyond & blanks).any()):
        row, position = (beyond & blanks).nonzero()[0].tolist()
        raise InputError(
            f"a blank at position {position} of row {row}, a text of {int(lengths[row])} tokens; "
            "accepted: blanks within the text"
        )
