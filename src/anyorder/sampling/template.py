"""Texts with blanks: `The {4} of the {2}.` to tokens, and filled tokens back to something to read."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.data.tokenizer import SPACE, Tokenizer
from anyorder.errors import InputError

ACCEPTED = "accepted: text with blanks such as {4}, the number of tokens to write there; {{ and }} for plain braces"


@dataclass(frozen=True)
class Template:
    """A text with blanks as tokens, in natural positions."""

    tokens: Tensor  # (T,), 0 at blanks
    blanks: Tensor  # (T,) bool
    after_space: tuple[int, ...]  # blank positions whose token must begin with the space that the text has there


def parse_template(text: str, tokenizer: Tokenizer) -> Template:
    """Read a template. A space before a blank goes into the blank's first token, as the vocabulary has it."""
    tokens: list[int] = []
    blanks: list[bool] = []
    after_space: list[int] = []
    known = ""
    for piece in re.findall(r"\{\{|\}\}|\{[^{}]*\}|[^{}]+|.", text, flags=re.DOTALL):
        if piece in ("{{", "}}"):
            known += piece[0]
        elif piece.startswith("{"):
            count = _blank_length(piece)
            space = known.endswith(" ") and tokenizer.byte_level()
            _append(tokens, blanks, tokenizer.encode(known[:-1] if space else known))
            if space:
                after_space.append(len(tokens))
            tokens += [0] * count
            blanks += [True] * count
            known = ""
        elif piece == "}":
            raise InputError(f"the template closes a brace that it never opened; {ACCEPTED}")
        else:
            known += piece
    _append(tokens, blanks, tokenizer.encode(known))
    if not any(blanks):
        raise InputError(f"the template has no blank; {ACCEPTED}")
    return Template(torch.tensor(tokens), torch.tensor(blanks), tuple(after_space))


def _append(tokens: list[int], blanks: list[bool], known: list[int]) -> None:
    tokens += known
    blanks += [False] * len(known)


def _blank_length(piece: str) -> int:
    inside = piece[1:-1]
    if not inside.isdecimal() or not 1 <= int(inside) <= 2**16:
        raise InputError(f"the template has a blank {piece}; {ACCEPTED}")
    return int(inside)


def allowed_tokens(template: Template, tokenizer: Tokenizer, vocabulary: int) -> Tensor:
    """Forbid padded entries and the end of text everywhere, and tokens without their space: (T, V) bool."""
    pieces = tokenizer.pieces()
    plain = torch.zeros(vocabulary, dtype=torch.bool)
    plain[: len(pieces)] = torch.tensor([bool(piece) for piece in pieces])
    plain[tokenizer.end_of_text] = False
    spaced = plain.clone()
    # a word, not a space alone or two of them
    spaced[: len(pieces)] &= torch.tensor([len(p) > 1 and p[0] == SPACE and p[1] != SPACE for p in pieces])
    allowed = plain.repeat(len(template.tokens), 1)
    for position in template.after_space:
        allowed[position] = spaced
    return allowed


@dataclass(frozen=True)
class Piece:
    """A stretch of text that was either known or written."""

    text: str
    written: bool


def pieces_of(tokens: Tensor, blanks: Tensor, tokenizer: Tokenizer) -> list[Piece]:
    """Cut a filled text into known and written stretches: (T,), (T,) -> pieces in reading order."""
    result: list[Piece] = []
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or blanks[end] != blanks[start]:
            result.append(Piece(tokenizer.decode(tokens[start:end].tolist()), bool(blanks[start])))
            start = end
    return result


def writing_order(order: Tensor, blanks: Tensor) -> list[int]:
    """List the blank positions as they were written: order (T,), blanks (T,)."""
    return [position for position in order.tolist() if blanks[position]]
