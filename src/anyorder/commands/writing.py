"""fill: text written where blanks are."""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import Positional, arg

from anyorder import checkpoint
from anyorder.commands.shared import Run, load_for, load_with_tokenizer
from anyorder.data.batches import generator_for
from anyorder.data.shards import open_dataset
from anyorder.data.tokenizer import Tokenizer
from anyorder.display import show_filled
from anyorder.errors import InputError
from anyorder.orders import parse as parse_order
from anyorder.sampling.fill import Filled
from anyorder.sampling.fill import fill as fill_blanks
from anyorder.sampling.held_out import held_out_templates
from anyorder.sampling.template import Template, allowed_tokens, parse_template, pieces_of, writing_order


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
        model, tokenizer = load_for(run, dataset, weights)
        cases: Iterable[tuple[Template, torch.Tensor | None]] = held_out_templates(
            dataset, model.config.positions, samples, seed
        )
    else:
        model, tokenizer = load_with_tokenizer(run, weights)
        cases = itertools.repeat((parse_template(template, tokenizer, model.config.positions), None), samples)
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
