"""Templates filled, many at once; where a blank's length is open, the likeliest length wins."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.data.tokenizer import Tokenizer
from anyorder.models.model import LanguageModel
from anyorder.sampling.fill import Manner, Written, write, written
from anyorder.sampling.filters import Filters
from anyorder.sampling.template import Template, constrain
from anyorder.sampling.writing import Reveal, Writing

Shown = Callable[[Writing, Iterable[Reveal]], Iterable[Reveal]]  # passes reveals on, and shows them on the way


@dataclass(frozen=True)
class Candidate:
    """One way of giving lengths to the blanks, and how it did."""

    lengths: tuple[int, ...]
    score: float  # mean log-probability of the written tokens, under the model; of a choice the sum instead


@dataclass(frozen=True)
class FilledText:
    """A template filled."""

    template: Template
    out: Written  # of this one text, (T,) in place of (B, T); passes are those of the batch it was written in
    candidates: tuple[Candidate, ...]  # of which the best was taken


def fill_templates(
    model: LanguageModel,
    tokenizer: Tokenizer,
    cases: Sequence[Sequence[Template]],
    manner: Manner,
    filters: Filters,
    generator: torch.Generator | None = None,
    shown: Shown = lambda writing, reveals: reveals,
) -> list[FilledText]:
    """Fill texts in one batch; the templates of a case are candidates, of which the likeliest wins."""
    rows = [template for case in cases for template in case]
    tokens = _stack([template.tokens for template in rows])
    blanks = _stack([template.blanks for template in rows])
    lengths = torch.tensor([len(template.tokens) for template in rows])
    constraint = constrain(rows, tokenizer, model.config.entries or model.config.vocabulary)
    writing = Writing(model, tokens, blanks, lengths, filters, constraint, generator)
    out = written(writing, shown(writing, write(writing, manner)))
    found, start = [], 0
    for case in cases:
        numbers = range(start, start + len(case))
        candidates = tuple(
            Candidate(tuple(length for _, length, _ in rows[n].spans), score_of(rows[n], out.model_logprobs[n]))
            for n in numbers
        )
        best = max(numbers, key=lambda n: candidates[n - start].score)
        found.append(FilledText(rows[best], out.row(best, int(lengths[best])), candidates))
        start += len(case)
    return found


def score_of(template: Template, logprobs: Tensor) -> float:
    """Compare ways of giving lengths: by the mean over open blanks, and by all of a choice, which is one event."""
    parts = [logprobs[start : start + length].double() for start, length, blank in template.spans if blank.options]
    chosen = sum(float(part.sum()) for part in parts)
    written = [logprobs[start : start + length] for start, length, blank in template.spans if not blank.options]
    return chosen + (float(torch.cat(written).double().mean()) if written else 0.0)


def in_batches(cases: Iterable[Sequence[Template]], rows: int) -> Iterator[list[Sequence[Template]]]:
    """Put cases together until a batch has as many rows as asked; a case of more stays whole."""
    batch: list[Sequence[Template]] = []
    for case in cases:
        if batch and sum(map(len, batch)) + len(case) > rows:
            yield batch
            batch = []
        batch.append(case)
    if batch:
        yield batch


def _stack(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
