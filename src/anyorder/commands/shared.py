"""What several commands share: the argument that names a run, and how it is loaded."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from anyorder.checkpoint import Weights
from anyorder.data.shards import Dataset
from anyorder.data.tokenizer import Tokenizer
from anyorder.errors import InputError
from anyorder.loading import load
from anyorder.models.model import LanguageModel

Run = Annotated[Positional[Path], arg(metavar="RUN")]


def load_with_tokenizer(run: Path, weights: Weights) -> tuple[LanguageModel, Tokenizer]:
    model, tokenizer = load(run, weights)
    if tokenizer is None:
        raise InputError(f"{run} has no tokenizer; accepted: a run with one (anyorder import --tokenizer adds it)")
    return model, tokenizer


def load_for(run: Path, dataset: Dataset, weights: Weights) -> tuple[LanguageModel, Tokenizer]:
    """Load a model and make sure that the data speak its language."""
    model, tokenizer = load(run, weights)
    if tokenizer is not None and tokenizer.sha256 != dataset.tokenizer_sha256:
        raise InputError(
            f"{dataset.folder} was prepared with another tokenizer than {run} was trained with; "
            f"accepted: data prepared with --tokenizer {run}/tokenizer.json"
        )
    if dataset.tokenizer.vocabulary > model.config.vocabulary:
        raise InputError(
            f"{dataset.folder} has a vocabulary of {dataset.tokenizer.vocabulary} and {run} one of "
            f"{model.config.vocabulary}; accepted: data prepared with the model's tokenizer"
        )
    return model, dataset.tokenizer


def check_written(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written when all is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InputError(f"--{option} {path} cannot be written; accepted: a file in a folder that exists")
