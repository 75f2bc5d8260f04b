"""Texts with blanks: `The {4} of the {2}.` to tokens, and filled tokens back to something to read."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.data.tokenizer import SPACE, Tokenizer
from anyorder.errors import InputError
from anyorder.sampling.constraints import Choice, Constraint

ACCEPTED = (
    "accepted: text with blanks such as {4}, the number of tokens to write there, {} for any number, {4:0-9.,} or "
    "{:a-z} of these characters alone, {red|green} for one of these; {{ and }} for plain braces"
)
MOST_CANDIDATES = 256  # ways of giving lengths to the blanks of a template


@dataclass(frozen=True)
class Blank:
    """What may stand in a blank."""

    lengths: Sequence[int]  # how many tokens, any of these
    after_space: bool = False  # it begins with the space that the text has there
    characters: frozenset[str] | None = None  # made of these alone
    options: tuple[tuple[int, ...], ...] = ()  # one of these, if there are any


@dataclass(frozen=True)
class Template:
    """A text as tokens, in natural positions, with blanks of known lengths."""

    tokens: Tensor  # (T,), 0 at blanks
    blanks: Tensor  # (T,) bool
    spans: tuple[tuple[int, int, Blank], ...]  # start, length, and what may stand there


@dataclass(frozen=True)
class Pattern:
    """A text as tokens between blanks."""

    pieces: tuple[tuple[int, ...] | Blank, ...]

    @property
    def blanks(self) -> tuple[Blank, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Blank))

    def templates(self, positions: int) -> list[Template]:
        """List the texts of at most `positions` tokens that it may become, one for each choice of lengths."""
        count = math.prod(len(blank.lengths) for blank in self.blanks)
        if count > MOST_CANDIDATES:
            raise InputError(
                f"the blanks may have {count:,} combinations of lengths; accepted: at most {MOST_CANDIDATES}, which "
                "fewer blanks of unknown length give, or a smaller --longest"
            )
        known = sum(len(piece) for piece in self.pieces if isinstance(piece, tuple))
        shortest = known + sum(min(blank.lengths) for blank in self.blanks)
        if shortest > positions:  # before anything of that size is made
            raise InputError(
                f"the template has {shortest} tokens or more; accepted: at most {positions}, the model's positions"
            )
        found = [self._template(lengths) for lengths in itertools.product(*(blank.lengths for blank in self.blanks))]
        return [template for template in found if len(template.tokens) <= positions]

    def _template(self, lengths: Sequence[int]) -> Template:
        tokens: list[int] = []
        spans: list[tuple[int, int, Blank]] = []
        left = iter(lengths)
        for piece in self.pieces:
            if isinstance(piece, Blank):
                spans.append((len(tokens), next(left), piece))
                tokens += [0] * spans[-1][1]
            else:
                tokens += piece
        blanks = torch.zeros(len(tokens), dtype=torch.bool)
        for start, length, _ in spans:
            blanks[start : start + length] = True
        return Template(torch.tensor(tokens), blanks, tuple(spans))


def parse_template(text: str, tokenizer: Tokenizer, longest: int = 8) -> Pattern:
    """Read a template; a blank of unknown length has 1 to `longest` tokens.

    A space before a blank goes into the blank's first token, where the vocabulary has such.
    """
    if longest < 1:
        raise InputError(f"longest is {longest}; accepted: 1 or more tokens")
    pieces: list[tuple[int, ...] | Blank] = []
    known, all_known = "", ""
    spaces_belong = bool(_begins_with_space(tokenizer).any())
    for piece in re.findall(r"\{\{|\}\}|\{[^{}]*\}|[^{}]+|.", text, flags=re.DOTALL):
        if piece in ("{{", "}}"):
            known += piece[0]
        elif piece == "{":
            raise InputError(f"the template opens a brace that it never closes; {ACCEPTED}")
        elif piece.startswith("{"):
            after_space = known.endswith(" ") and spaces_belong
            if after_space:
                known = known[:-1]
            pieces += [tuple(tokenizer.encode(known)), _read_blank(piece, after_space, tokenizer, longest)]
            known, all_known = "", all_known + known
        elif piece == "}":
            raise InputError(f"the template closes a brace that it never opened; {ACCEPTED}")
        else:
            known += piece
    pieces.append(tuple(tokenizer.encode(known)))
    if len(pieces) == 1:
        raise InputError(f"the template has no blank; {ACCEPTED}")
    read = tokenizer.decode([token for piece in pieces if isinstance(piece, tuple) for token in piece])
    if read != all_known + known:
        raise InputError(
            f"the run's tokenizer makes {read!r:.60} of the known parts {all_known + known!r:.60}; "
            "accepted: a tokenizer that keeps a text as it is, such as bpe:N or gpt2"
        )
    return Pattern(tuple(pieces))


def _read_blank(piece: str, after_space: bool, tokenizer: Tokenizer, longest: int) -> Blank:
    inside = piece[1:-1]
    if "|" in inside and not re.match(r"\d*:", inside):
        return _read_options(piece, after_space, tokenizer)
    size, colon, characters = inside.partition(":")
    if (size and (not size.isdecimal() or len(size) > 9 or int(size) < 1)) or (colon and not characters):
        raise InputError(f"the template has a blank {piece:.20}; {ACCEPTED}")
    lengths = (int(size),) if size else range(1, longest + 1)
    return Blank(lengths, after_space, _read_characters(characters) if colon else None)


def _read_options(piece: str, after_space: bool, tokenizer: Tokenizer) -> Blank:
    texts = piece[1:-1].split("|")
    if not all(texts):
        raise InputError(f"the template has an empty choice in {piece:.40}; {ACCEPTED}")
    options = {tuple(tokenizer.encode((" " if after_space else "") + text)): None for text in texts}
    return Blank(tuple(sorted({len(option) for option in options})), after_space, None, tuple(options))


def _read_characters(text: str) -> frozenset[str]:
    """Read single characters and ranges such as a-z; a dash at either end stands for itself."""
    found: set[str] = set()
    for first, last, single in re.findall(r"(.)-(.)|(.)", text, flags=re.DOTALL):
        if single:
            found.add(single)
        elif first > last:
            raise InputError(f"the characters {first}-{last} are no range; accepted: from the lower to the higher")
        else:
            found |= {chr(code) for code in range(ord(first), ord(last) + 1)}
    return frozenset(found)


def constrain(templates: Sequence[Template], tokenizer: Tokenizer, entries: int) -> Constraint:
    """Say what may stand in the blanks of templates, a row each: a text's tokens, with the spaces and characters asked.

    The end of text and entries without a text never do.
    """
    words = torch.zeros(entries, dtype=torch.bool)
    pieces = tokenizer.pieces()[:entries]
    words[: len(pieces)] = torch.tensor([bool(piece) for piece in pieces])
    words[tokenizer.end_of_text] = False
    spaced = words.clone()
    spaced[: len(pieces)] &= _begins_with_space(tokenizer)[:entries]
    numbers: dict[tuple[frozenset[str] | None, bool], int] = {(None, False): 0}
    table = [words]
    kind = torch.zeros(len(templates), max(len(template.tokens) for template in templates), dtype=torch.long)
    choices = []
    for row, template in enumerate(templates):
        for start, length, blank in template.spans:
            if blank.options:
                options = [option for option in blank.options if len(option) == length]
                choices.append(Choice(row, tuple(range(start, start + length)), torch.tensor(options)))
                continue
            for first in (True, False):
                its = (blank.characters, first and blank.after_space)
                if its not in numbers:
                    numbers[its] = len(table)
                    table.append(_made_of(its[0], spaced if its[1] else words, its[1], tokenizer))
                kind[row, start if first else slice(start + 1, start + length)] = numbers[its]
    return Constraint(torch.stack(table), kind, tuple(choices))


def _made_of(characters: frozenset[str] | None, words: Tensor, spaced: bool, tokenizer: Tokenizer) -> Tensor:
    """Keep the tokens that are made of some characters, behind the space if there is to be one: (E,) bool."""
    if characters is None:
        return words
    found = words.clone()
    for token in words.nonzero()[:, 0].tolist():
        text = tokenizer.decode([token])
        found[token] = characters >= set(text[1:] if spaced else text)
    if not found.any():
        shown = "".join(sorted(characters))
        raise InputError(
            f"no token of the run's tokenizer is made of {shown!r:.40} alone{' behind a space' if spaced else ''}; "
            "accepted: characters that it has"
        )
    return found


def _begins_with_space(tokenizer: Tokenizer) -> Tensor:
    """Tell which tokens are a word with the space before it, not a space alone or two of them: (V,) bool."""
    found = [len(p) > 1 and p[0] == SPACE and p[1] != SPACE for p in tokenizer.pieces()]
    return torch.tensor(found) & tokenizer.byte_level()


@dataclass(frozen=True)
class Piece:
    """A stretch of text that was either known or written."""

    text: str
    written: bool


def pieces_of(tokens: Tensor, blanks: Tensor, tokenizer: Tokenizer, starts: Sequence[int] = ()) -> list[Piece]:
    """Cut a filled text into known and written stretches: (T,), (T,) -> pieces in reading order.

    `starts` says where blanks begin, to keep those apart that touch.
    """
    result: list[Piece] = []
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or blanks[end] != blanks[start] or end in starts:
            result.append(Piece(tokenizer.decode(tokens[start:end].tolist()), bool(blanks[start])))
            start = end
    return result


def writing_order(order: Tensor, blanks: Tensor) -> list[int]:
    """List the blank positions as they were written: order (T,), blanks (T,)."""
    return [position for position in order.tolist() if blanks[position]]
