"""Sentences that a model has not seen, with words blanked out, to look at how it fills them."""

import re

import torch
from torch import Tensor

from anyorder.data.batches import generator_for, spread_chunks
from anyorder.data.shards import Dataset
from anyorder.data.tokenizer import END_OF_TEXT, SPACE, Tokenizer
from anyorder.errors import InputError
from anyorder.sampling.template import Blank, Template

BLANKS, WORDS = 2, 3  # blanks in a text, words in a blank
TRIES = 40  # stretches of text looked at for each passage


def held_out_templates(data: Dataset, length: int, count: int, seed: int) -> list[tuple[Template, Tensor]]:
    """Cut `count` passages of whole sentences from the validation split; return templates and the true tokens (T,)."""
    tokenizer = data.tokenizer
    if not tokenizer.byte_level():
        raise InputError(
            "held-out sentences are cut at words, which needs a byte-level tokenizer such as bpe:N or gpt2"
        )
    chunks = spread_chunks(data.split("validation", length), length, TRIES * count)
    found = []
    for number in torch.randperm(len(chunks), generator=generator_for(seed, "passages")).tolist():
        text = _whole_sentences(tokenizer.decode(chunks[number].tolist()))
        tokens = torch.tensor(tokenizer.encode(text), dtype=torch.long)
        starts = _word_starts(tokens.tolist(), tokenizer)
        if len(tokens) <= length and len(starts) >= BLANKS * (WORDS + 2):
            found.append((_blank_words(tokens, starts, generator_for(seed, "held out", number)), tokens))
        if len(found) == count:
            return found
    raise InputError(
        f"{data.folder} holds {len(found)} passages of whole sentences within {length} tokens, of {count} asked for; "
        "accepted: as many as there are"
    )


def _whole_sentences(text: str) -> str:
    """Keep what lies between the first and the last sentence end of the longest stretch that is of one document."""
    text = max(text.split(END_OF_TEXT), key=len)
    ends = [match.end() for match in re.finditer(r"[a-z]{3}[.!?](?=\s)", text)]
    return re.sub(r"\s+", " ", text[ends[0] : ends[-1]]).strip() if len(ends) > 1 else ""


def _word_starts(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """List where a new word starts, behind a space."""
    spellings = tokenizer.pieces()
    return [i for i, token in enumerate(tokens) if len(spellings[token]) > 1 and spellings[token].startswith(SPACE)]


def _blank_words(tokens: Tensor, starts: list[int], generator: torch.Generator) -> Template:
    """Blank out BLANKS stretches of WORDS whole words, one in each equal part of the passage."""
    blanks = torch.zeros(len(tokens), dtype=torch.bool)
    part = len(starts) // BLANKS
    spans = []
    for number in range(BLANKS):
        word = number * part + int(torch.randint(part - WORDS, (1,), generator=generator))
        start, end = starts[word], starts[word + WORDS]
        blanks[start:end] = True
        spans.append((start, end - start, Blank((end - start,), after_space=True)))
    return Template(tokens.masked_fill(blanks, 0), blanks, tuple(spans))
