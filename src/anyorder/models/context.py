"""What a model has read so far of each row of a batch, and questions asked of it: the same for every family."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from anyorder.errors import InputError
from anyorder.models.model import LanguageModel, compute_dtype

LOGITS = 2**25  # entries of a table of logits that is held at once


@dataclass(frozen=True)
class Asked:
    """What the head reads of some questions, packed: which row asked, and in which column of its questions."""

    hidden: Tensor  # (P, C)
    row: Tensor  # (P,)
    column: Tensor  # (P,)
    model: LanguageModel

    def parts(self) -> Iterator[tuple[Tensor, slice]]:
        """Yield the logits of some of them (p, V), and which: no more at once than LOGITS entries."""
        step = max(1, LOGITS // self.model.config.vocabulary)
        for start in range(0, len(self.row), step):
            part = slice(start, start + step)
            logits = self.model.head(self.hidden[part])
            yield logits, part

    def part(self, which: Tensor, shift: Tensor | int = 0) -> "Asked":
        """Take some questions, which (P,) bool, in columns further on by `shift` (P,)."""
        return Asked(self.hidden[which], self.row[which], (self.column + shift)[which], self.model)

    def table(self, shape: torch.Size) -> Tensor:
        """Put all logits in their places: (R, K) -> (R, K, V), 0 where nothing was asked."""
        logits = self.model.head(self.hidden)
        if len(logits) == shape.numel():
            return logits.view(*shape, -1)
        return logits.new_zeros(*shape, logits.shape[-1]).index_put((self.row, self.column), logits)


class Context(ABC):
    """Positions revealed in each of R rows, in their order, and what the model keeps of them.

    `passes` counts the runs through the model, `tokens_forwarded` the slots computed in them.
    """

    model: LanguageModel

    @torch.no_grad()
    def __init__(self, model: LanguageModel, rows: int, length: int | None = None):
        positions = model.config.positions
        length = positions if length is None else length
        if not 1 <= length <= positions:
            raise InputError(f"the text has {length} positions; accepted: 1 to {positions}, the model's")
        device = model.token_embedding.weight.device
        self.model = model
        self.length = length
        self.positions = torch.zeros(rows, length, dtype=torch.long, device=device)  # as revealed
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # how many are revealed
        self.passes = self.tokens_forwarded = 0

    def ask(self, positions: Tensor, counts: Tensor | None = None) -> Asked:
        """Predict positions (R, K) from what is revealed, each on its own; of row r the first counts[r]."""
        counts = count_all(self.lengths, positions, counts)
        self._demand_room(counts)
        return self._ask_each(positions, counts)

    def chain(
        self,
        positions: Tensor,
        tokens: Tensor,
        counts: Tensor | None = None,
        ahead: Tensor | None = None,
        ahead_counts: Tensor | None = None,
    ) -> tuple[Asked, Asked]:
        """Reveal a run of tokens (R, n), predicting each from those before it.

        The same pass predicts the positions `ahead` (R, K), each on its own, from the whole run. A first position that
        was asked for just before need not be computed again, and then has no prediction here.
        """
        before, counts = self.lengths, count_all(self.lengths, positions, counts)
        self.reveal(positions, tokens, counts)
        ahead = positions[:, :0] if ahead is None else ahead
        ahead_counts = count_all(before, ahead, ahead_counts)
        self._demand_room(ahead_counts)
        return self._ask_run(before, positions, counts, ahead, ahead_counts)

    @abstractmethod
    def _ask_each(self, positions: Tensor, counts: Tensor) -> Asked:
        """Do what `ask` says."""

    @abstractmethod
    def _ask_run(
        self, before: Tensor, positions: Tensor, counts: Tensor, ahead: Tensor, ahead_counts: Tensor
    ) -> tuple[Asked, Asked]:
        """Do what `chain` says of a run that is revealed; before it, before (R,) positions were."""

    def reveal(self, positions: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """Append positions (R, n) with tokens (R, n), the first counts (R,) of each row; nothing is computed yet."""
        counts = count_all(self.lengths, positions, counts)
        if int((self.lengths + counts).max()) > self.length:
            raise InputError(f"more than the {self.length} positions of the text were revealed")
        column = torch.arange(positions.shape[1], device=positions.device)
        row, column = (column < counts[:, None]).nonzero(as_tuple=True)
        place = self.lengths[row] + column
        self.positions[row, place] = positions[row, column]
        self.tokens[row, place] = tokens[row, column]
        self.lengths = self.lengths + counts

    def rollback(self, lengths: Tensor) -> None:
        """Forget all but the first lengths (R,) revealed positions of each row."""
        self.lengths = torch.minimum(self.lengths, lengths)

    def fork(self, rows: Tensor) -> Self:
        """Copy some rows (N,), any number of times each, into a context of their own."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(other, name, value.index_select(0, rows))
            elif isinstance(value, list):
                setattr(other, name, [stored.index_select(0, rows) for stored in value])
        return other

    def marginals(self, positions: Tensor, counts: Tensor | None = None) -> Tensor:
        """Give the logits of what is asked: (R, K, V), 0 where nothing was."""
        return self.ask(positions, counts).table(positions.shape)

    def score(self, positions: Tensor, tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        """Log-probability of tokens (R, K) at positions (R, K), each on its own: (R, K), 0 beyond counts (R,)."""
        return self.log_probabilities(self.ask(positions, counts), tokens)

    def score_chain(self, positions: Tensor, tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        """Log-probability of a run of tokens (R, n), each after those before it: (R, n), 0 beyond counts (R,)."""
        return self.log_probabilities(self.chain(positions, tokens, counts)[0], tokens)

    @torch.no_grad()
    def log_probabilities(self, asked: Asked, tokens: Tensor) -> Tensor:
        """Score tokens (R, K) by the answers to questions: (R, K), 0 where nothing was asked."""
        wanted = tokens[asked.row, asked.column]
        scores = torch.zeros(tokens.shape, device=tokens.device)
        for logits, part in asked.parts():
            nats = functional.cross_entropy(logits.float(), wanted[part], reduction="none")
            scores[asked.row[part], asked.column[part]] = -nats
        return scores

    def _demand_room(self, counts: Tensor) -> None:
        """Refuse more questions than there are positions left."""
        if int((self.lengths + counts).max()) > self.length:
            raise InputError(f"more positions are asked for than the text's {self.length} leave open")


def count_all(like: Tensor, positions: Tensor, counts: Tensor | None) -> Tensor:
    """Give counts, or as many as there are columns: (R,)."""
    return torch.full_like(like, positions.shape[1]) if counts is None else counts


def store(cache: Tensor, new: Tensor, row: Tensor, column: Tensor) -> None:
    """Write packed keys or values (H, P, d) to their rows (P,) and columns (P,) of a layer's cache."""
    if len(cache) == 1:
        cache[0].index_copy_(1, column, new.to(cache.dtype))
    else:
        cache[row, :, column] = new.transpose(0, 1).to(cache.dtype)


def new_cache(model: LanguageModel, rows: int, columns: int) -> list[Tensor]:
    """Set aside keys, or values, of all layers: (R, H, S, d) each."""
    config, weight = model.config, model.token_embedding.weight
    shape = (rows, config.heads, columns, config.width // config.heads)
    return [torch.zeros(shape, device=weight.device, dtype=compute_dtype(weight)) for _ in range(config.layers)]
