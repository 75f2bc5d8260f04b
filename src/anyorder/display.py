"""What the command line shows: progress, tables, filled texts."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from anyorder.data.tokenizer import Tokenizer
from anyorder.sampling.fill import Written
from anyorder.sampling.template import pieces_of, writing_order
from anyorder.sampling.texts import FilledText
from anyorder.sampling.writing import Reveal, Writing
from anyorder.training.events import Ended, Event, Saved, Started, Stepped, Validated

console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
PLAIN_SECONDS = 15.0  # without a terminal: one line of progress in so many seconds


@contextmanager
def _progress(what: str, total: int | None, start: int = 0) -> Iterator[tuple[Progress, TaskID]]:
    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=16),  # with the rest, a line of 80 columns
        TextColumn("{task.fields[note]}", markup=False),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress, progress.add_task(what, total=total, completed=start, note="")


def show_training(events: Iterator[Event], run: str) -> None:
    """Show a run as it goes: a live line in a terminal, one line every few seconds elsewhere."""
    started = next(events)
    assert isinstance(started, Started)
    if started.step == started.steps:
        console.print(f"{run} has all its {started.steps} steps already")
        return
    begin = "starts" if started.step == 0 else f"goes on from step {started.step}"
    console.print(
        f"{run} {begin}, of {started.steps} steps: {started.parameters:,} parameters on {started.device} in "
        f"{started.precision}; {started.chunks:,} chunks an epoch, {started.left_over} tokens left over"
    )
    speed, last_line, begun = 0.0, time.monotonic(), time.monotonic()
    with _progress("training", started.steps, started.step) as (progress, task):
        for event in events:
            match event:
                case Stepped():
                    # smoothed, so that the number can be read
                    speed = event.tokens_per_second if speed == 0 else 0.95 * speed + 0.05 * event.tokens_per_second
                    note = f"step {event.step}/{started.steps}  loss {event.loss:.3f}  {speed:,.0f} tokens/s"
                    progress.update(task, completed=event.step, note=note)
                    if not console.is_terminal and time.monotonic() - last_line > PLAIN_SECONDS:
                        last_line = time.monotonic()
                        done = event.step - started.step
                        left = (last_line - begun) / done * (started.steps - event.step)
                        console.print(f"{note}  {left:.0f} s left")
                case Validated():
                    figures = "  ".join(f"{name} {nats:.4f}" for name, nats in event.nats.items())
                    console.print(f"step {event.step}  held-out nats per token: {figures}")
                case Saved():
                    console.print(f"step {event.step}  saved {event.folder}")
                case Ended():
                    if event.finished:
                        console.print(f"{run} has all its {event.step} steps")
                    else:
                        console.print(f"stopped at step {event.step}; the same command goes on from there")


class PreparationProgress:
    """Show how much text has passed in each phase of preparation."""

    def __init__(self, progress: Progress, task: TaskID):
        self.progress, self.task, self.last = progress, task, time.monotonic()

    def __call__(self, phase: str, size: int) -> None:
        if time.monotonic() - self.last < 0.1:
            return
        self.last = time.monotonic()
        self.progress.update(self.task, description=phase, note=f"{size / 1e6:,.1f} MB")


@contextmanager
def preparation_progress() -> Iterator[PreparationProgress]:
    with _progress("preparing", None) as (progress, task):
        yield PreparationProgress(progress, task)


@contextmanager
def counting_progress(shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show what is being done and the time left: a bar in a terminal, a line every few seconds elsewhere."""
    begun = last = time.monotonic()
    first: int | None = None  # what was done already when this began

    def plain(what: str, done: int, of: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = done if first is None else first
        if now - last > PLAIN_SECONDS and done > first:
            last = now
            console.print(f"{what}  {done / of:.0%}  {(now - begun) / (done - first) * (of - done):.0f} s left")

    if not shown:
        yield lambda what, done, of: None
    elif not console.is_terminal:
        yield plain
    else:
        with _progress("", None) as (progress, task):
            yield lambda what, done, of: progress.update(task, description=what, completed=done, total=of)


def show_likelihood(scored: dict[str, Any], run: str) -> None:
    """Print a table of one text's estimates; a missing figure is a dash."""
    columns = ("order", "nats per token", "perplexity", "bits per byte")
    part = "" if scored["tokens"] == scored["tokens_in_all"] else f" of {scored['tokens_in_all']:,}"
    console.print(
        f"{run} on {scored['text']}: {scored['tokens']:,} tokens{part} in {scored['sequences']:,} sequences of "
        f"{scored['length']}, {scored['precision']}; tokens {scored['tokens_sha256'][:16]}"
    )
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column == "order" else "right", no_wrap=True)
    for row in scored["results"]:
        table.add_row(
            row["name"],
            _with_error(row.get("nats_per_token"), row.get("nats_error"), 4),
            _with_error(row.get("perplexity"), row.get("perplexity_error"), 2),
            _with_error(row.get("bits_per_byte"), row.get("bits_error"), 4),
        )
    console.print(table)


def show_score(result: dict[str, Any]) -> None:
    """Print the log-probability of each scored token in its place, and the sum."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("token")
    table.add_column("log-probability", justify="right")
    for token in result["tokens"]:
        value = token["logprob"]
        shown = f"{value:.4f}" if value is not None else token["part"]
        table.add_row(Text(_visible(token["token"])), shown, style=None if value is not None else "dim")
    console.print(table)
    bits = result["bits_per_byte"]
    console.print(
        f"log-probability {result['logprob']:.4f} of {result['tokens_scored']} tokens given {result['tokens_given']}: "
        f"{result['nats_per_token']:.4f} nats per token, perplexity {result['perplexity']:.2f}"
        + (f", {bits:.4f} bits per byte" if bits is not None else "")
    )


def show_quality(found: dict[str, dict[str, Any]]) -> None:
    """Print a column of figures for the generated texts, and one for the reference."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("figure")
    for name in found:
        table.add_column(name, justify="right", no_wrap=True)
    every = list(found.values())
    table.add_row("texts", *(f"{one['texts']:,}" for one in every))
    table.add_row("tokens scored", *(f"{one['tokens']:,}" for one in every))
    judge = every[0]["judge"]
    for name, key, error, digits in (
        (f"nats per token, {judge}", "nats_per_token", "nats_error", 4),
        (f"perplexity, {judge}", "perplexity", "perplexity_error", 2),
        ("unigram entropy, nats", "unigram_entropy", "unigram_entropy_error", 4),
        ("MAUVE", "mauve", "", 4),
    ):
        table.add_row(name, *(_with_error(one.get(key), one.get(error), digits) for one in every))
    for n in every[0]["distinct"]:
        table.add_row(f"distinct {n}-grams", *(_with_error(one["distinct"][n], None, 4) for one in every))
    console.print(table)


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print rows of one kind as a table, a figure and its error together."""
    table = Table(box=SIMPLE_HEAD)
    names = [name for name in rows[0] if not name.endswith("_error")]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name), row.get(f"{name}_error")) for name in names))
    console.print(table)


def _cell(value: object, error: object) -> str:
    if isinstance(value, float):
        return _with_error(value, error, 3 if abs(value) < 100 else 0)
    return "-" if value is None else str(value)


def _visible(text: str) -> str:
    return _printable(text).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\N{OPEN BOX}")


def _with_error(value: object, error: object, digits: int) -> str:
    if not isinstance(value, float):
        return "-"
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if isinstance(error, float) else "")


SHOWN_CANDIDATES = 8


def show_filled(found: FilledText, tokenizer: Tokenizer, truth: Tensor | None) -> None:
    """Print a filled text with what was written in brackets, and the order it was written in."""
    tokens, blanks, candidates = found.out.tokens, found.template.blanks, found.candidates
    text = Text()
    for piece in pieces_of(tokens, blanks, tokenizer):
        if piece.written:
            text.append(" " if piece.text.startswith(" ") else "")
            text.append(f"[{_printable(piece.text.strip(' '))}]", style="bold green")
        else:
            text.append(_printable(piece.text))
    console.print(text)
    written = Text("  written in this order: ", style="dim")
    for number, position in enumerate(writing_order(found.out.order, blanks), 1):
        written.append(f"{number}:", style="dim").append(
            _printable(tokenizer.decode([int(tokens[position])]).strip()), "green"
        )
        written.append(" ")
    console.print(written)
    if len(candidates) > 1:
        ranked = sorted(candidates, key=lambda candidate: -candidate.score)
        tried = Text("  log-probability by the tokens of each blank (mean; of a choice the sum): ", style="dim")
        for number, candidate in enumerate(ranked[:SHOWN_CANDIDATES]):
            shown = f"{'+'.join(map(str, candidate.lengths))}: {candidate.score:.2f}  "
            tried.append(shown, style="bold green" if number == 0 else "dim")
        if len(ranked) > SHOWN_CANDIDATES:
            tried.append(f"and {len(ranked) - SHOWN_CANDIDATES} more", style="dim")
        console.print(tried)
    if truth is not None:
        original = (piece.text.strip() for piece in pieces_of(truth, blanks, tokenizer) if piece.written)
        console.print(Text(f"  the original has: {' … '.join(original)}", style="dim"))
    console.print()


RAMP = ("color(27)", "color(33)", "color(44)", "color(77)", "color(148)", "color(220)")  # early to late


def show_sample(out: Written, blanks: Tensor, tokenizer: Tokenizer, batch: int) -> None:
    """Print a text, its colours from early to late as it was written, and the order of its positions."""
    tokens, steps = out.tokens, out.steps
    shades = (steps * len(RAMP)).div(steps.max() + 1, rounding_mode="floor")  # (T,), negative where known
    text = Text()
    for start, end in _runs(shades.tolist()):
        style = RAMP[int(shades[start])] if shades[start] >= 0 else "bold"
        text.append(_printable(tokenizer.decode(tokens[start:end].tolist())), style)
    console.print(text)
    positions = writing_order(out.order, blanks)
    console.print(Text(f"  written in this order: {' '.join(map(str, positions))}", style="dim"))
    nats = -float(out.model_logprobs[blanks].double().mean())
    console.print(
        Text(
            f"  {len(positions)} tokens in {int(steps.max()) + 1} steps, {nats:.3f} nats per token by the model's own "
            f"account; {out.forward_passes} passes and {out.token_forwards} slots for {batch} "
            f"text{'s' if batch > 1 else ''}",
            style="dim",
        )
    )
    console.print()


def _runs(values: list[int]) -> Iterator[tuple[int, int]]:
    """Cut a list into runs of one value: their bounds."""
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            yield start, end
            start = end


class Watch:
    """Show a text while it appears: in a terminal in place, elsewhere a line for each step."""

    def __init__(self, tokenizer: Tokenizer, delay: float):
        self.tokenizer, self.delay = tokenizer, delay

    def __call__(self, writing: Writing, reveals: Iterable[Reveal]) -> Iterator[Reveal]:
        with Live(self._text(writing, []), console=console, auto_refresh=False, transient=True) as live:
            if not console.is_terminal:
                live.stop()
            for step, reveal in enumerate(reveals, 1):
                newest = reveal.positions[0, : int(reveal.counts[0])].tolist()
                if console.is_terminal:
                    live.update(self._text(writing, newest), refresh=True)
                    time.sleep(self.delay)
                else:
                    shown = (f"{p}:{_visible(self.tokenizer.decode([int(writing.tokens[0, p])]))}" for p in newest)
                    console.print(f"step {step}  {'  '.join(shown)}")
                yield reveal

    def _text(self, writing: Writing, newest: list[int]) -> Text:
        """Lay out the only text: known bold, written plain, the newest green, a dot for what is blank."""
        tokens = writing.tokens[0].tolist()
        look = ["dim" if t < 0 else "bold reverse green" if p in newest else "" for p, t in enumerate(tokens)]
        text = Text()
        for start, end in _runs([(*sorted(set(look)),).index(style) for style in look]):
            blank = tokens[start] < 0
            shown = " ·" * (end - start) if blank else _printable(self.tokenizer.decode(tokens[start:end]))
            text.append(shown, look[start])
        return text


def _printable(text: str) -> str:
    """Replace what would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
