"""fill and sample: text written where blanks are, or from nothing."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from tyro.conf import OmitArgPrefixes, Positional, arg

from anyorder import checkpoint
from anyorder.commands.shared import Run, load_for, load_with_tokenizer
from anyorder.data.batches import generator_for
from anyorder.data.shards import open_dataset
from anyorder.data.tokenizer import Tokenizer
from anyorder.display import Watch, counting_progress, show_filled, show_sample
from anyorder.errors import InputError
from anyorder.models.inference import prepare_for_inference
from anyorder.models.model import LanguageModel
from anyorder.options import Ways
from anyorder.precision import Precision
from anyorder.sampling.constraints import from_mask
from anyorder.sampling.fill import Manner, Written, write, written
from anyorder.sampling.held_out import held_out_templates
from anyorder.sampling.schedules import COUNTED
from anyorder.sampling.template import Template, parse_template, pieces_of, writing_order
from anyorder.sampling.texts import Candidate, fill_templates, in_batches
from anyorder.sampling.writing import Writing


def fill(
    run: Run,
    template: Annotated[Positional[str], arg(metavar="TEMPLATE")] = "",
    /,
    order: str = "left_to_right",
    ways: OmitArgPrefixes[Ways] = Ways(),  # noqa: B008 - it is frozen
    samples: int = 1,
    longest: int = 8,
    seed: int = 0,
    held_out: Path | None = None,
    batch_size: int = 16,
    weights: checkpoint.Weights = "ema",
    precision: Precision = "fp32",
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Fill the blanks of a text, and show the order they were written in.

    `anyorder fill RUN "The {4} of the {2}."` writes four tokens and two. The known text on both sides is read first.
    Blanks: {4} four tokens; {} 1 to --longest tokens, tried all at once, of which the best mean log-probability wins;
    {3:0-9.,} and {:a-z} of these characters alone; {red|green|light blue} one of these, the likeliest length of them.

    Args:
        run: A run, or a published .pt file.
        template: Text with blanks; {{ and }} stand for plain braces.
        order: left_to_right, random, right_to_left, ... or, wherever the model is surest: probability, margin,
            entropy, among the first 8 blanks with margin(8).
        samples: How many fillings; with --held-out, how many passages.
        longest: The most tokens that a blank of unknown length may have.
        seed: Which fillings.
        held_out: Instead of a template: blank out words in passages of this data folder's validation split.
        batch_size: Texts written at once, candidates of unknown lengths included.
        weights: The averaged weights, or those the optimizer moved.
        precision: Number type of weights and products.
        as_json: Print one JSON object a line instead of text.
    """
    manner, filters = ways.manner(order), ways.filters()  # before the work of loading
    _check_counts(samples=samples, batch_size=batch_size)
    if bool(template) == (held_out is not None):
        raise InputError('give either a template such as "The {4} of the {2}." or --held-out DATA')
    truths: Iterable[Tensor | None] = itertools.repeat(None)
    if held_out is not None:
        dataset = open_dataset(held_out)
        model, tokenizer = load_for(run, dataset, weights)
        passages = held_out_templates(dataset, model.config.positions, samples, seed)
        cases = [[case] for case, _ in passages]
        truths = [truth for _, truth in passages]
    else:
        model, tokenizer = load_with_tokenizer(run, weights)
        cases = [parse_template(template, tokenizer, longest).templates(model.config.positions)] * samples
    most = max(int(template.blanks.sum()) for case in cases for template in case)
    if manner.steps is not None and manner.schedule in COUNTED and manner.steps > most:
        raise InputError(f"steps is {manner.steps}; accepted: 1 to {most}, the number of tokens to write")
    model = prepare_for_inference(model, precision)
    generator = generator_for(seed, "fill")
    filled = (
        found
        for batch in in_batches(cases, batch_size)
        for found in fill_templates(model, tokenizer, batch, _at_most(manner, batch), filters, generator)
    )
    for found, truth in zip(filled, truths, strict=False):
        if as_json:
            starts = [start for start, _, _ in found.template.spans]
            shown = _written_json(found.out, found.template.blanks, tokenizer, starts, found.candidates)
            print(json.dumps(shown, ensure_ascii=False), flush=True)
        else:
            show_filled(found, tokenizer, truth)


def sample(
    run: Run,
    /,
    samples: int = 1,
    length: int | None = None,
    prefix: str = "",
    suffix: str = "",
    order: str = "random",
    ways: OmitArgPrefixes[Ways] = Ways(),  # noqa: B008 - it is frozen
    seed: int = 0,
    batch_size: int = 16,
    watch: bool = False,
    delay: float = 0.05,
    weights: checkpoint.Weights = "ema",
    precision: Precision = "fp32",
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Write texts from nothing, or behind a prefix and before a suffix, in any order and any number of steps.

    `anyorder sample RUN --steps 64 --order random --watch` shows a text appear; `--json > texts.jsonl` is what
    `anyorder quality texts.jsonl` reads.

    Args:
        run: A run, or a published .pt file.
        samples: How many texts.
        length: Tokens of a text, prefix and suffix included; without it, as many as the model has positions.
        prefix: What the text begins with.
        suffix: What it ends with.
        order: random, left_to_right, ... or, wherever the model is surest: probability, margin, entropy, among the
            first 8 blanks with margin(8).
        seed: Which texts.
        batch_size: Texts written at once.
        watch: Show each text as it appears, one at a time.
        delay: With --watch, the least number of seconds that a step is shown.
        weights: The averaged weights, or those the optimizer moved.
        precision: Number type of weights and products.
        as_json: Print one JSON object a line instead of text.
    """
    manner, filters = ways.manner(order), ways.filters()
    _check_counts(samples=samples, batch_size=batch_size)
    if watch and as_json:
        raise InputError("--watch was given with --json; accepted: one of them")
    if delay != 0.05 and not watch:
        raise InputError("--delay was given without --watch; accepted: the two together")
    if not 0 <= delay <= 60:
        raise InputError(f"delay is {delay}; accepted: 0 to 60 seconds")
    model, tokenizer = load_with_tokenizer(run, weights)
    tokens, blanks = _between(model, tokenizer, prefix, suffix, length)
    model = prepare_for_inference(model, precision)
    allowed = torch.arange(model.config.vocabulary) < tokenizer.vocabulary
    generator = generator_for(seed, "sample")
    rows = 1 if watch else min(batch_size, samples)
    with counting_progress(not watch and not as_json and samples > rows) as report:
        for start in range(0, samples, rows):
            count = min(rows, samples - start)
            report("writing", start, samples)
            constraint = from_mask(allowed, (), (count, len(tokens), len(allowed)))
            text, its = tokens.repeat(count, 1), blanks.repeat(count, 1)
            writing = Writing(model, text, its, None, filters, constraint, generator)
            reveals = write(writing, manner)
            out = written(writing, Watch(tokenizer, delay)(writing, reveals) if watch else reveals)
            for row in range(count):
                if as_json:
                    print(json.dumps(_written_json(out.row(row), blanks, tokenizer), ensure_ascii=False), flush=True)
                else:
                    show_sample(out.row(row), blanks, tokenizer, count)


def _at_most(manner: Manner, batch: Sequence[Sequence[Template]]) -> Manner:
    """Take no more steps than the batch has blanks in a text."""
    if manner.steps is None or manner.schedule not in COUNTED:
        return manner
    most = max(int(template.blanks.sum()) for case in batch for template in case)
    return dataclasses.replace(manner, steps=min(manner.steps, most))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} is {count}; accepted: 1 or more")


def _between(
    model: LanguageModel, tokenizer: Tokenizer, prefix: str, suffix: str, length: int | None
) -> tuple[Tensor, Tensor]:
    """Lay out a text that is blank between prefix and suffix: tokens and blanks, each (T,)."""
    before, after = tokenizer.encode(prefix), tokenizer.encode(suffix)
    positions = model.config.positions
    length = positions if length is None else length
    known = len(before) + len(after)
    if not known < length <= positions:
        raise InputError(
            f"length is {length}, with {known} tokens of prefix and suffix; "
            f"accepted: more than those, at most {positions}, the model's positions"
        )
    tokens = torch.tensor([*before, *[0] * (length - known), *after])
    place = torch.arange(length)
    return tokens, (place >= len(before)) & (place < length - len(after))


def _written_json(
    out: Written,
    blanks: Tensor,
    tokenizer: Tokenizer,
    starts: Sequence[int] = (),
    candidates: tuple[Candidate, ...] = (),
) -> dict[str, Any]:
    """Say all of one text, (T,) in place of (B, T)."""
    shown: dict[str, Any] = {
        "text": tokenizer.decode(out.tokens.tolist()),
        "pieces": [dataclasses.asdict(piece) for piece in pieces_of(out.tokens, blanks, tokenizer, starts)],
        "written": [
            {
                "position": position,
                "id": int(out.tokens[position]),
                "token": tokenizer.decode([int(out.tokens[position])]),
                "step": int(out.steps[position]),
                "logprob": float(out.logprobs[position]),
                "model_logprob": float(out.model_logprobs[position]),
            }
            for position in writing_order(out.order, blanks)
        ],
        "forward_passes": out.forward_passes,
        "token_forwards": out.token_forwards,
    }
    if len(candidates) > 1:
        shown["candidates"] = [dataclasses.asdict(candidate) for candidate in candidates]
    return shown
