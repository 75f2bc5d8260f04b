"""Texts with marked parts, scored: `The people of the {United States}`."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyorder.data.tokenizer import Tokenizer
from anyorder.errors import InputError
from anyorder.evaluation.conditional import logprob
from anyorder.models.model import LanguageModel

ACCEPTED = "accepted: text with parts in braces, such as {these words}; {{ and }} for plain braces"
Span = tuple[int, int]  # first character, and the one behind the last


@dataclass(frozen=True)
class Marked:
    """A text as tokens, and which of them are scored and which are given."""

    text: str
    tokens: Tensor  # (T,)
    query: Tensor  # (T,) bool
    given: Tensor  # (T,) bool


def read_marks(text: str, given: str | None, tokenizer: Tokenizer) -> Marked:
    """Read what is scored from the braces of `text`, what is given from those of `given`; without it, all the rest.

    The text is tokenised as a whole, as training texts are. A token belongs to a part if any of its characters does,
    the space that it begins with aside.
    """
    plain, parts = _parts(text)
    tokens, query = _tokens(plain, parts, tokenizer)
    if not parts:
        query = torch.ones_like(query)
    if given is None:
        return Marked(plain, tokens, query, ~query)
    same, given_parts = _parts(given)
    if same != plain:
        raise InputError(
            f"--given {given[:60]!r} is not the text {text[:60]!r}; accepted: the same text, with other parts in braces"
        )
    _, its = _tokens(plain, given_parts, tokenizer)
    both = (query & its).nonzero()
    if len(both):
        word = tokenizer.decode([int(tokens[both[0, 0]])])
        raise InputError(f"the token {word!r} is both scored and given; accepted: two disjoint parts of the text")
    return Marked(plain, tokens, query, its)


def whole_text(text: str, tokenizer: Tokenizer) -> Marked:
    """Mark all of a text as scored."""
    tokens, nothing = _tokens(text, [], tokenizer)
    return Marked(text, tokens, ~nothing, nothing)


def mark_after(context: str, continuation: str, tokenizer: Tokenizer) -> Marked:
    """Mark what comes after a context as scored, the context as given."""
    text = context + continuation
    tokens, query = _tokens(text, [(len(context), len(text))], tokenizer)
    return Marked(text, tokens, query, ~query)


def read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); accepted: a file in UTF-8") from None
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"there is no file {path}; accepted: a text file in UTF-8") from None


def _parts(text: str) -> tuple[str, list[Span]]:
    """Take the braces out; return the plain text and where the parts are in it."""
    plain, parts, start = "", [], None
    for piece in re.findall(r"\{\{|\}\}|[{}]|[^{}]+", text):
        if piece == "{" and start is None:
            start = len(plain)
        elif piece == "}" and start is not None:
            if start == len(plain):
                raise InputError(f"a part of the text is empty; {ACCEPTED}")
            parts.append((start, len(plain)))
            start = None
        elif piece in ("{", "}"):
            raise InputError(f"the braces of {text[:60]!r} do not match; {ACCEPTED}")
        else:
            plain += piece[0] if piece in ("{{", "}}") else piece
    if start is not None:
        raise InputError(f"the braces of {text[:60]!r} do not match; {ACCEPTED}")
    return plain, parts


def _tokens(text: str, parts: list[Span], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Tokenise; mark the tokens that touch a part, a word with more than white space: (T,), (T,)."""
    tokens, spans = tokenizer.encode_with_spans(text)
    if not tokens:
        raise InputError("the text is empty; accepted: at least one token")
    inside = [any(_touches(text, (max(a, start), min(b, end)), (a, b)) for start, end in parts) for a, b in spans]
    return torch.tensor(tokens), torch.tensor(inside, dtype=torch.bool)


def _touches(text: str, shared: Span, token: Span) -> bool:
    """Tell whether what a token shares with a part is more than the space before a word."""
    return shared[0] < shared[1] and bool(text[slice(*shared)].strip() or not text[slice(*token)].strip())


def score_marked(model: LanguageModel, marked: Marked, order: str, generator: torch.Generator) -> Tensor:
    """Log-probability of each scored token: (T,), 0 elsewhere. A whole text longer than the model goes in windows."""
    most = model.config.positions
    found = []
    parts = windows(len(marked.tokens), most) if bool(marked.query.all()) else [(0, 0, len(marked.tokens))]
    device = next(model.parameters()).device
    for first, new, end in parts:
        inside = torch.arange(first, end)
        query, given = (marked.query[first:end] & (inside >= new)), marked.given[first:end] | (inside < new)
        tokens, query, given = (part[None].to(device) for part in (marked.tokens[first:end], query, given))
        found.append(logprob(model, tokens, query, given, order, generator)[0, new - first :].cpu())
    return torch.cat(found)


def windows(count: int, size: int) -> list[tuple[int, int, int]]:
    """Cut `count` tokens into windows (first token read, first token scored, end): each token is scored once.

    All are disjoint but the last, which reads as much of what stands before as fits.
    """
    cut = [(start, start, min(start + size, count)) for start in range(0, count, size)]
    _, new, end = cut[-1]
    return [*cut[:-1], (max(0, end - size), new, end)]


def scored_json(marked: Marked, scores: Tensor, tokenizer: Tokenizer) -> dict[str, Any]:
    """Gather what `anyorder score` states, in natural logarithms."""
    nats = -float(scores.double().sum())
    count = int(marked.query.sum())
    size = len(tokenizer.decode_bytes(marked.tokens[marked.query].tolist()))
    return {
        "logprob": -nats,
        "tokens_scored": count,
        "tokens_given": int(marked.given.sum()),
        "nats_per_token": nats / count,
        "perplexity": math.exp(nats / count),
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "tokens": [
            {
                "token": tokenizer.decode([int(token)]),
                "part": "scored" if scored else "given" if given else "hidden",
                "logprob": float(value) if scored else None,
            }
            for token, scored, given, value in zip(marked.tokens, marked.query, marked.given, scores, strict=True)
        ],
    }
