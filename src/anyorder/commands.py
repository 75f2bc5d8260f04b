"""The commands: their arguments, and what each calls."""

import dataclasses
import itertools
import json
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import tyro
from tyro.conf import Positional, arg

from anyorder import checkpoint, orders
from anyorder.config import preset
from anyorder.data.batches import generator_for
from anyorder.data.corpora import open_corpus
from anyorder.data.prepare import prepare as prepare_data
from anyorder.data.shards import Dataset, open_dataset
from anyorder.data.tokenizer import Tokenizer, load_tokenizer
from anyorder.display import (
    console,
    counting_progress,
    preparation_progress,
    show_filled,
    show_likelihood,
    show_training,
)
from anyorder.errors import InputError
from anyorder.evaluation.report import evaluate as evaluate_model
from anyorder.files import write_text
from anyorder.integrations.published import read_published
from anyorder.loading import load, tokenizer_for
from anyorder.models.decoder import Decoder
from anyorder.options import Overrides
from anyorder.precision import Precision
from anyorder.sampling.fill import Filled
from anyorder.sampling.fill import fill as fill_blanks
from anyorder.sampling.held_out import held_out_templates
from anyorder.sampling.template import Template, allowed_tokens, parse_template, pieces_of, writing_order
from anyorder.training.loop import train as train_events

Run = Annotated[Positional[Path], arg(metavar="RUN")]


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
    overrides: tyro.conf.OmitArgPrefixes[Overrides] = Overrides(),  # noqa: B008 - it is frozen
) -> None:
    """Train a model; go on by itself where OUT is a run that was stopped, Ctrl-C included.

    Args:
        preset_name: tiny or demo (minutes on a CPU), small or medium (the published AO-GPT).
        data: A folder that anyorder prepare wrote.
        out: The run's folder: config.json, tokenizer.json, metrics.jsonl, checkpoints.
    """
    dataset = open_dataset(data)
    chosen = overrides.apply(preset(preset_name, dataset.tokenizer.vocabulary))
    config = checkpoint.RunConfig(
        preset_name, chosen.model, chosen.training, dataset.tokenizer_sha256, dataset.content_sha256
    )
    with _stop_on_signal() as stopped:
        show_training(train_events(out, config, dataset, lambda: bool(stopped)), str(out))


def evaluate(
    run: Run,
    /,
    data: Path,
    orders: int = 1,
    seed: int = 0,
    batch_size: int = 32,
    limit: int | None = None,
    weights: checkpoint.Weights = "ema",
    precision: Precision = "fp32",
    xz: bool = False,
    json_file: Annotated[Path | None, arg(name="json")] = None,
) -> None:
    """Score held-out text left to right (exact) and in random orders, with standard errors over sequences.

    Args:
        run: A run, or a published .pt file.
        data: A folder that anyorder prepare wrote; its validation split is scored, in chunks of the model's length.
        orders: Random orders for each sequence.
        seed: Which random orders; the same seed gives the same figures, whatever the batch size.
        batch_size: Sequences scored at once.
        limit: Score this many sequences, evenly spread, instead of all.
        weights: The averaged weights, or those the optimizer moved.
        precision: Number type of products.
        xz: Also state what `xz -9e` makes of the same text.
        json_file: Write the figures there too.
    """
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise InputError(f"--json {json_file} cannot be written; accepted: a file in a folder that exists")
    dataset = open_dataset(data)
    model, _ = _load_for(run, dataset, weights)
    with counting_progress() as report:
        figures = evaluate_model(model, dataset, orders, seed, batch_size, limit, precision, xz, report)
    left_over = f", {figures['left_over']} left over" if limit is None else ""
    show_likelihood(
        figures,
        f"{run} on {figures['tokens']:,} held-out tokens ({figures['sequences']:,} sequences{left_over}), "
        f"{figures['precision']}",
    )
    if json_file is not None:
        write_text(json_file, json.dumps({"run": str(run), "weights": weights, **figures}, indent=1) + "\n")


def _load_for(run: Path, dataset: Dataset, weights: checkpoint.Weights) -> tuple[Decoder, Tokenizer]:
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


def fill(
    run: Run,
    template: Annotated[Positional[str], arg(metavar="TEMPLATE")] = "",
    /,
    order: str = "left_to_right",
    temperature: float = 1.0,
    samples: int = 1,
    seed: int = 0,
    held_out: Path | None = None,
    weights: checkpoint.Weights = "ema",
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Fill the blanks of a text, and show the order they were written in.

    `anyorder fill RUN "The {4} of the {2}."` writes four tokens and two. The known text on both sides is read first.

    Args:
        run: A run, or a published .pt file.
        template: Text with blanks such as {4}; {{ and }} stand for plain braces.
        order: The order in which blanks are written: left_to_right, random, right_to_left, ...
        temperature: 1 samples from the model's law, less is surer, 0 takes the likeliest token.
        samples: How many fillings; with --held-out, how many passages.
        seed: Which fillings.
        held_out: Instead of a template: blank out words in passages of this data folder's validation split.
        weights: The averaged weights, or those the optimizer moved.
        as_json: Print one JSON object a line instead of text.
    """
    if samples < 1:
        raise InputError(f"samples is {samples}; accepted: 1 or more")
    if bool(template) == (held_out is not None):
        raise InputError('give either a template such as "The {4} of the {2}." or --held-out DATA')
    orders.parse(order)  # before the work of loading
    generator = generator_for(seed, "fill")
    if held_out is not None:
        dataset = open_dataset(held_out)
        model, tokenizer = _load_for(run, dataset, weights)
        cases: Iterable[tuple[Template, torch.Tensor | None]] = held_out_templates(
            dataset, model.config.positions, samples, seed
        )
    else:
        model, found = load(run, weights)
        if found is None:
            raise InputError(f"{run} has no tokenizer; accepted: a run with one (anyorder import --tokenizer adds it)")
        tokenizer = found
        cases = itertools.repeat((parse_template(template, tokenizer), None), samples)
    for case, truth in cases:
        out = fill_blanks(
            model,
            case.tokens[None],
            case.blanks[None],
            order,
            temperature,
            allowed_tokens(case, tokenizer, model.config.vocabulary)[None],
            generator,
        )
        if as_json:
            print(json.dumps(_filled_json(out, case, tokenizer), ensure_ascii=False))
        else:
            show_filled(out.tokens[0], case.blanks, out.order[0], tokenizer, truth)


def _filled_json(out: Filled, case: Template, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = out.tokens[0]
    return {
        "text": tokenizer.decode(tokens.tolist()),
        "pieces": [dataclasses.asdict(piece) for piece in pieces_of(tokens, case.blanks, tokenizer)],
        "written": [
            {
                "position": position,
                "token": tokenizer.decode([int(tokens[position])]),
                "logprob": float(out.logprobs[0, position]),
            }
            for position in writing_order(out.order[0], case.blanks)
        ],
        "forward_passes": out.forward_passes,
        "token_forwards": out.token_forwards,
    }


def import_(
    source: Annotated[Positional[Path], arg(metavar="CHECKPOINT.pt")], /, out: Path, tokenizer: Path | None = None
) -> None:
    """Turn a published AO-GPT or sigma-GPT checkpoint into a run that the other commands read.

    Args:
        source: The published training checkpoint.
        out: The run's folder, which must not exist.
        tokenizer: A tokenizer.json to go with it; without one, GPT-2's where vocabulary and installation allow.
    """
    published = read_published(source)
    given = load_tokenizer(tokenizer) if tokenizer is not None else tokenizer_for(published)
    if given is not None and given.vocabulary > published.config.vocabulary:
        raise InputError(
            f"the tokenizer has {given.vocabulary} entries and the model {published.config.vocabulary}; "
            "accepted: a tokenizer that fits"
        )
    if checkpoint.is_run(out):
        raise InputError(f"{out} is a run already; accepted: a name that is free")
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
