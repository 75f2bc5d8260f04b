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


def parse_template(text: str, tokenizer: Tokenizer, positions: int) -> Template:
    """Read a template. A space before a blank goes into the blank's first token, where the vocabulary has such."""
    tokens: list[int] = []
    blanks: list[bool] = []
    after_space: list[int] = []
    known, all_known = "", ""
    spaces_belong = bool(_begins_with_space(tokenizer).any())
    for piece in re.findall(r"\{\{|\}\}|\{[^{}]*\}|[^{}]+|.", text, flags=re.DOTALL):
        if piece in ("{{", "}}"):
            known += piece[0]
        elif piece.startswith("{"):
            count = _blank_length(piece)
            if space := known.endswith(" ") and spaces_belong:
                known = known[:-1]
            _append(tokens, blanks, tokenizer.encode(known))
            if space:
                after_space.append(len(tokens))
            if len(tokens) + count > positions:
                raise InputError(
                    f"the template has {len(tokens) + count} tokens or more; "
                    f"accepted: at most {positions}, the model's positions"
                )
            tokens += [0] * count
            blanks += [True] * count
            known, all_known = "", all_known + known
        elif piece == "}":
            raise InputError(f"the template closes a brace that it never opened; {ACCEPTED}")
        else:
            known += piece
    _append(tokens, blanks, tokenizer.encode(known))
    if not any(blanks):
        raise InputError(f"the template has no blank; {ACCEPTED}")
    read = tokenizer.decode([token for token, blank in zip(tokens, blanks, strict=True) if not blank])
    if read != all_known + known:
        raise InputError(
            f"the run's tokenizer makes {read!r:.60} of the known parts {all_known + known!r:.60}; "
            "accepted: a tokenizer that keeps a text as it is, such as bpe:N or gpt2"
        )
    return Template(torch.tensor(tokens), torch.tensor(blanks), tuple(after_space))


def _append(tokens: list[int], blanks: list[bool], known: list[int]) -> None:
    tokens += known
    blanks += [False] * len(known)


def _blank_length(piece: str) -> int:
    inside = piece[1:-1]
    if not inside.isdecimal() or len(inside) > 9 or int(inside) < 1:
        raise InputError(f"the template has a blank {piece:.20}; {ACCEPTED}")
    return int(inside)


def allowed_tokens(template: Template, tokenizer: Tokenizer, vocabulary: int) -> Tensor:
    """Forbid padded entries and the end of text everywhere, and tokens without their space: (T, V) bool."""
    pieces = tokenizer.pieces()
    plain = torch.zeros(vocabulary, dtype=torch.bool)
    plain[: len(pieces)] = torch.tensor([bool(piece) for piece in pieces])
    plain[tokenizer.end_of_text] = False
    spaced = plain.clone()
    spaced[: len(pieces)] &= _begins_with_space(tokenizer)
    allowed = plain.repeat(len(template.tokens), 1)
    for position in template.after_space:
        allowed[position] = spaced
    return allowed


def _begins_with_space(tokenizer: Tokenizer) -> Tensor:
    """Tell which tokens are a word with the space before it, not a space alone or two of them: (V,) bool."""
    found = [len(p) > 1 and p[0] == SPACE and p[1] != SPACE for p in tokenizer.pieces()]
    return torch.tensor(found) & tokenizer.byte_level()


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
