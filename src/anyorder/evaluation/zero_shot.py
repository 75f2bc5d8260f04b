"""The zero-shot suite: other people's texts, brought into one form, under two named conventions.

`published`: an end-of-text token after every row, contiguous blocks, the splits of the AO-GPT and SEDD code.
`mdlm`: the same stream in blocks wrapped as begin + text + end, mostly validation splits.
Unlike the originals, no tail of a worker's share is dropped and the last, shorter block is scored.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from anyorder.data.corpora import HuggingFace, rows_of
from anyorder.data.tokenizer import Tokenizer
from anyorder.errors import InputError
from anyorder.evaluation.blocks import Blocks, contiguous, wrapped

Convention = Literal["published", "mdlm"]
SUITES = ("zero-shot",)
PARQUET = "refs/convert/parquet"  # where the hub keeps data sets whose loader was a script
ROWS = 1000  # tokenised at a time

Change = tuple[str, str] | tuple[re.Pattern[str], str]

# What turns tokenised text back into text, in this order. The second entry of WikiText looks odd and does nothing to
# ordinary text: its slashes are part of the pattern. It stands in every published copy, and stays for equal tokens.
WIKITEXT: tuple[Change, ...] = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    *((re.compile(pattern), result) for pattern, result in (
        (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
    )),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)  # fmt: skip
PTB: tuple[Change, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    *([(" N ", " 1 ")] * 10),  # each pass misses the second of two numbers that share a space
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)
LM1B: tuple[Change, ...] = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" \!$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    (re.compile(r'" ([^"]+) "'), r'"\1"'),
    (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^\(\)]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
)


def changed(text: str, changes: tuple[Change, ...]) -> str:
    """Apply replacements in their order."""
    for old, new in changes:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def _lambada(text: str) -> str:
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


@dataclass(frozen=True)
class TextSet:
    """Where the rows of a set come from, and what makes them plain text."""

    source: str  # NAME:CONFIG:SPLIT on the hub
    column: str = "text"
    detokenize: Callable[[str], str] = str
    revision: str | None = None
    url: str | None = None

    def rows(self, file: Path | None) -> Iterator[str]:
        found = (
            HuggingFace(f"hf:{self.source}", self.column, self.revision, self.url).documents()
            if file is None
            else rows_of(file, self.column)
        )
        return map(self.detokenize, found)


def _wikitext(text: str) -> str:
    return changed(text, WIKITEXT)


def _ptb(text: str) -> str:
    return changed(text, PTB)


def _lm1b(text: str) -> str:
    return changed(text, LM1B)


def _paper(text: str) -> str:
    return _lm1b(_wikitext(text))


def _sets(wikitext2: str, usual: str) -> dict[str, TextSet]:
    """List the sets with the splits that differ between the conventions: WikiText-2's, and that of most."""
    lambada = "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"
    papers = "armanc/scientific_papers"
    return {
        "wikitext2": TextSet(f"Salesforce/wikitext:wikitext-2-raw-v1:{wikitext2}", detokenize=_wikitext),
        "wikitext103": TextSet(f"Salesforce/wikitext:wikitext-103-raw-v1:{usual}", detokenize=_wikitext),
        "ptb": TextSet(f"ptb-text-only/ptb_text_only::{usual}", "sentence", _ptb, PARQUET),
        "lambada": TextSet("json::train", detokenize=_lambada, url=lambada),
        "lm1b": TextSet("dvruette/lm1b::test", detokenize=_lm1b),
        "ag_news": TextSet("fancyzhx/ag_news::test"),
        "arxiv": TextSet(f"{papers}:arxiv:{usual}", "article", _paper, PARQUET),
        "pubmed": TextSet(f"{papers}:pubmed:{usual}", "article", _paper, PARQUET),
    }


CONVENTIONS: dict[Convention, dict[str, TextSet]] = {
    "published": _sets(wikitext2="train", usual="test"),
    "mdlm": _sets(wikitext2="validation", usual="validation"),
}
NAMES = tuple(CONVENTIONS["published"])


def choose(suite: str, sets: list[str], files: list[str]) -> tuple[tuple[str, ...], dict[str, Path]]:
    """Read which sets are asked for and which local files stand in for the hub, NAME=PATH each."""
    if suite not in SUITES:
        raise InputError(f"unknown suite {suite!r}; accepted: {', '.join(SUITES)}")
    paths = {}
    for given in files:
        name, equals, path = given.partition("=")
        if not equals or name not in NAMES or not path:
            raise InputError(f"--file {given!r}; accepted: NAME=PATH with a NAME of {', '.join(NAMES)}")
        paths[name] = Path(path)
    for name in sets:
        if name not in NAMES:
            raise InputError(f"unknown set {name!r}; accepted: {', '.join(NAMES)}")
    for name in paths:
        if sets and name not in sets:
            raise InputError(f"--file gives {name}, which --sets does not name; accepted: files of the sets asked for")
    # files alone mean those sets: where no hub can be reached, the rest could not be read
    chosen = tuple(sets) or tuple(name for name in NAMES if name in paths) or NAMES
    return chosen, paths


def read_set(name: str, convention: Convention, tokenizer: Tokenizer, length: int, file: Path | None = None) -> Blocks:
    """Tokenise a set, an end-of-text token after every row, and cut it as the convention says."""
    if length < 3:
        raise InputError(f"the model has {length} positions; accepted: 3 or more for the {convention} convention")
    documents = _tokenised(CONVENTIONS[convention][name].rows(file), tokenizer)
    cut = wrapped(documents, length, tokenizer.end_of_text) if convention == "mdlm" else contiguous(documents, length)
    if not cut.total:
        raise InputError(f"{name} has no text ({file or 'hub'}); accepted: at least one row")
    return cut


def _tokenised(rows: Iterator[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    while window := list(islice(rows, ROWS)):
        yield from tokenizer.encode_documents(window)
