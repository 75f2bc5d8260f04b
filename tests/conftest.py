"""What the tests share: small text, small data, small models."""

import os

# The models here are too small for two threads, which only wait for each other: set before torch counts the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anyorder.cli import main
from anyorder.config import ModelConfig
from anyorder.data.batches import generator_for
from anyorder.data.corpora import open_corpus
from anyorder.data.prepare import prepare
from anyorder.data.shards import Dataset, open_dataset
from anyorder.data.tokenizer import Tokenizer
from anyorder.models.families import make_model
from anyorder.models.model import LanguageModel

GOLDEN = Path(__file__).parent / "golden"
INJECTIONS = ("add", "layer", "adaln", "rotary", "add+rotary", "layer+rotary", "adaln+rotary")

MODELS: tuple[dict[str, Any], ...] = (  # one of each family, with and without a rotation
    *({"injection": injection} for injection in INJECTIONS),
    *({"family": family, "injection": i} for family in ("two_stream", "encoder", "sedd") for i in ("none", "rotary")),
)

PLAIN = (
    "the of and to in we our people government congress nation year world peace war law great public "
    "must shall every country states power time work right free union naïve “quoted” 1845 café"
)
WORDS = PLAIN.split()


def text(words: int, seed: int) -> str:
    """Write prose of a kind: words, sentences, paragraphs."""
    draw = random.Random(seed)
    made = []
    for number in range(1, words + 1):
        made.append(draw.choice(WORDS) + (".\n\n" if number % 60 == 0 else ". " if number % 12 == 0 else " "))
    return "".join(made).strip() + "\n"


def write_texts(folder: Path, documents: int = 40, words: int = 300) -> list[str]:
    """Write some .txt documents; return the glob that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:03d}.txt").write_text(text(words, number), encoding="utf-8")
    return [str(folder / "*.txt")]


def flip(path: Path, where: float = 0.5) -> None:
    """Change one bit of a byte, `where` of the way through a file."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail as a user's error; return its sentence."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("anyorder: warning: ")]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("anyorder: error: ")
    return lines[0]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A small prepared data set."""
    folder = tmp_path_factory.mktemp("data")
    prepare(open_corpus(write_texts(folder / "texts")), folder / "prepared", "bpe:300", validation=0.2)
    return open_dataset(folder / "prepared")


@pytest.fixture(scope="session")
def tokenizer(data: Dataset) -> Tokenizer:
    return data.tokenizer


SMALL = ModelConfig(layers=2, heads=2, width=32, positions=16, vocabulary=64)


def small_model(seed: int = 0, scale: float = 5.0, **changes: object) -> LanguageModel:
    """Make an untrained model whose weights are large enough that its predictions differ from slot to slot."""
    config = dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]
    model = make_model(config).initialise(generator_for(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("noise.") and name.endswith("weight"):  # of which some start at 0
                nn.init.normal_(parameter, std=0.1, generator=generator_for(seed, name))
            elif parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()
