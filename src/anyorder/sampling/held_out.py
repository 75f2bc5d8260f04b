"""Sentences that a model has not seen, with words blanked out, to look at how it fills them."""

import re

import torch
from torch import Tensor

from anyorder.data.batches import generator_for, spread_chunks
from anyorder.data.shards import Dataset
from anyorder.data.tokenizer import END_OF_TEXT, Tokenizer
from anyorder.errors import InputError
from anyorder.sampling.template import SPACE, Template

BLANKS, WORDS = 2, 3  # blanks in a text, words in a blank
TRIES = 40  # stretches of text looked at for each passage


def held_out_templates(data: Dataset, length: int, count: int, seed: int) -> list[tuple[Template, Tensor]]:
    """Cut `count` passages of whole sentences from the validation split; return templates and the true tokens (T,)."""
    tokenizer = data.tokenizer
    if not tokenizer.byte_level():
        raise InputError(
            "held-out sentences are cut at words, which needs a byte-level tokenizer such as bpe:N or gpt2"
        )
    found = []
    for number, chunk in enumerate(spread_chunks(data.split("validation", length), length, TRIES * count)):
        tokens = torch.tensor(tokenizer.encode(_whole_sentences(tokenizer.decode(chunk.tolist()))), dtype=torch.long)
        starts = _word_starts(tokens.tolist(), tokenizer)
        if len(tokens) > length or len(starts) < BLANKS * (WORDS + 2):
            continue
        found.append((_blank_words(tokens, starts, generator_for(seed, "held out", number)), tokens))
        if len(found) == count:
            break
    if not found:
        raise InputError(f"{data.folder} holds no passage of whole sentences within {length} tokens")
    return found


def _whole_sentences(text: str) -> str:
    """Keep what lies between the first and the last sentence end of the longest stretch that is of one document."""
    text = max(text.split(END_OF_TEXT), key=len)
    ends = [match.end() for match in re.finditer(r"[a-z]{3}[.!?](?=\s)", text)]
    return re.sub(r"\s+", " ", text[ends[0] : ends[-1]]).strip() if len(ends) > 1 else ""


def _word_starts(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """List where a new word starts, behind a space."""
    pieces = [tokenizer.backend.id_to_token(token) or "" for token in tokens]
    return [i for i, piece in enumerate(pieces) if len(piece) > 1 and piece.startswith(SPACE)]


def _blank_words(tokens: Tensor, starts: list[int], generator: torch.Generator) -> Template:
    """Blank out BLANKS stretches of WORDS whole words, one in each equal part of the passage."""
    blanks = torch.zeros(len(tokens), dtype=torch.bool)
    part = len(starts) // BLANKS
    firsts = []
    for number in range(BLANKS):
        word = number * part + int(torch.randint(part - WORDS, (1,), generator=generator))
        firsts.append(starts[word])
        blanks[starts[word] : starts[word + WORDS]] = True
    return Template(tokens.masked_fill(blanks, 0), blanks, tuple(firsts))
