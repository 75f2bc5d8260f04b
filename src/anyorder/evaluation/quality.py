"""What generated texts are worth: perplexity under a judge, entropy of their words, distinct n-grams, MAUVE."""

import dataclasses
import hashlib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anyorder.errors import InputError, first_line
from anyorder.evaluation.likelihood import estimate
from anyorder.evaluation.partial import Partial, Scores
from anyorder.models.context import LOGITS

NGRAMS = (1, 2, 3)
Tokens = Sequence[int]
Report = Callable[[str, int, int], None]


class Judge(Protocol):
    """A left-to-right model of its own vocabulary."""

    name: str
    vocabulary: int
    positions: int

    def encode(self, text: str) -> list[int]: ...

    def nats(self, rows: Sequence[Tokens]) -> list[float]:
        """-log p of each row of tokens, the first of each given: nothing stands before it."""
        ...

    def features(self, rows: Sequence[Tokens]) -> Tensor:
        """The last layer's state at the last token of each row: (N, C)."""
        ...


def unigram_entropy(tokens: Tokens) -> float:
    """Entropy in nats of the frequencies of a text's tokens: 0 where one is repeated, log n where all n differ."""
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in Counter(tokens).values())


def distinct(texts: Sequence[Tokens], n: int) -> float | None:
    """Share of different n-grams among all n-grams of all texts."""
    found = [tuple(text[start : start + n]) for text in texts for start in range(len(text) - n + 1)]
    return len(set(found)) / len(found) if found else None


def assess(
    judge: Judge,
    texts: list[str],
    length: int = 1024,
    batch_size: int | None = None,
    partial_folder: Path | None = None,
    report: Report = lambda what, done, of: None,
) -> dict[str, Any]:
    """Judge the first `length` tokens of each text; all counts are of the judge's tokens.

    The first token of a text is not scored, as usual for this figure.
    """
    if length < 2 or (batch_size is not None and batch_size < 1):
        raise InputError(f"length is {length} and batch size {batch_size}; accepted: length 2 or more, batch 1 or more")
    whole = [judge.encode(text) for text in texts]
    rows = [row[: min(length, judge.positions)] for row in whole]
    scored = [number for number, row in enumerate(rows) if len(row) > 1]
    if not scored:
        raise InputError(f"none of {len(texts)} texts has two tokens; accepted: texts to judge")
    partial = Partial(partial_folder, hashlib.sha256(repr((judge.name, rows)).encode()).hexdigest()[:16])
    total = sum(len(rows[number]) for number in scored)
    done = 0

    def work(left: list[int]) -> Iterator[Scores]:
        for numbers in _alike(left, rows, batch_size, judge.vocabulary):
            nats = judge.nats([rows[number] for number in numbers])
            yield {number: [value] for number, value in zip(numbers, nats, strict=True)}

    def advance(numbers: list[int], times: int) -> None:
        nonlocal done
        done = min(total, done + times * sum(len(rows[number]) for number in numbers))
        report(f"judging by {judge.name}", done, total)

    found = partial.complete("nats", scored, work, advance)
    partial.remove()
    nats = torch.tensor([value for (value,) in found.values()], dtype=torch.float64)
    tokens = torch.tensor([len(rows[number]) - 1 for number in scored])
    entropies = torch.tensor([unigram_entropy(rows[number]) for number in scored], dtype=torch.float64)
    error = float(entropies.std() / math.sqrt(len(entropies))) if len(entropies) > 1 else None
    return {
        "judge": judge.name,
        "texts": len(texts),
        "texts_too_short": len(texts) - len(scored),
        "tokens_beyond_length": sum(map(len, whole)) - sum(map(len, rows)),
        **dataclasses.asdict(estimate(nats, tokens, None)),
        "unigram_entropy": float(entropies.mean()),
        "unigram_entropy_error": error,
        "distinct": {str(n): distinct(rows, n) for n in NGRAMS},
    }


def mauve(
    judge: Judge, texts: list[str], reference: list[str], length: int = 1024, batch_size: int = 1
) -> float | None:
    """MAUVE between two sets of texts, from the judge's features; None where mauve-text is not installed."""
    if importlib.util.find_spec("mauve") is None:
        return None
    from mauve import compute_mauve

    both = []
    for some in (texts, reference):
        rows = [row for row in (judge.encode(text)[: min(length, judge.positions)] for text in some) if row]
        parts = [judge.features(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
        both.append(torch.cat(parts).numpy())
    try:
        return float(compute_mauve(p_features=both[0], q_features=both[1], verbose=False).mauve)
    except ValueError as error:  # fewer texts than its clusters need
        raise InputError(
            f"MAUVE cannot be computed ({first_line(error)}); accepted: more texts on both sides"
        ) from None


def _alike(numbers: list[int], rows: list[list[int]], size: int | None, vocabulary: int) -> Iterator[list[int]]:
    """Put rows of about one length together, at most so many that their table of logits stays small."""
    batch: list[int] = []
    for number in sorted(numbers, key=lambda n: (-len(rows[n]), n)):
        longest = len(rows[batch[0] if batch else number])
        if batch and len(batch) >= (size or max(1, LOGITS // (longest * vocabulary))):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
