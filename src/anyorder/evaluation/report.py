"""The report of `anyorder evaluate`: every figure of every text, interruptible, over any number of processes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyorder import orders
from anyorder.errors import InputError
from anyorder.evaluation.blocks import Blocks
from anyorder.evaluation.figures import (
    NEEDS_ANY_ORDER,
    AlongOrders,
    Ensemble,
    Figure,
    Mode,
    PaperEnsemble,
    ScoreEntropy,
    masked_bound,
    score,
)
from anyorder.evaluation.likelihood import estimate
from anyorder.evaluation.partial import Partial, Scores, key_of
from anyorder.models.context import LOGITS
from anyorder.models.encoder import Encoder
from anyorder.models.model import LanguageModel
from anyorder.precision import Precision, autocast, pick_device, pick_precision

Report = Callable[[str, int, int], None]  # what is scored, how many slots are done, of how many
MOST_MEMBERS = 64


def choose_figures(
    model: LanguageModel,
    random_orders: int = 1,
    along: tuple[str, ...] = (),
    ensemble: int = 0,
    mode: Mode = "fast",
    contexts: int = 8,
    bound: bool = False,
) -> list[Figure]:
    """List the figures that are asked for; a model of one order has left to right alone unless more is demanded."""
    if random_orders < 1 or contexts < 1:
        raise InputError(f"orders and contexts are {random_orders} and {contexts}; accepted: 1 or more")
    if ensemble and not 2 <= ensemble <= MOST_MEMBERS:
        raise InputError(f"the ensemble has {ensemble} members; accepted: 2 to {MOST_MEMBERS}, or 0 for none")
    rereads = isinstance(model, Encoder)
    figures: list[Figure] = [AlongOrders("left to right", orders.LeftToRight(), rereads=rereads)]
    figures += [AlongOrders(text, orders.parse(text), rereads=rereads) for text in along]
    if not model.any_order:
        if ensemble or bound or random_orders > 1:
            raise InputError(NEEDS_ANY_ORDER)
        return figures
    figures.append(AlongOrders("any order", orders.Random(), random_orders, rereads))
    if bound:
        figures.append(masked_bound(contexts, rereads))
    if model.config.family == "sedd":
        figures.append(ScoreEntropy(contexts))
    if ensemble and rereads:
        raise InputError(
            f"an ensemble of context orders was asked for, which make no difference to a model of family "
            f"{model.config.family}; accepted: one of a decoder or two_stream"
        )
    if ensemble:
        figures.append(Ensemble(ensemble, contexts) if mode == "fast" else PaperEnsemble(ensemble))
    return figures


def evaluate(
    model: LanguageModel,
    texts: dict[str, Blocks],
    figures: list[Figure],
    byte_lengths: np.ndarray | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    limit: int | None = None,
    precision: Precision = "fp32",
    partial_folder: Path | None = None,
    report: Report = lambda what, done, of: None,
) -> Iterator[dict[str, Any]]:
    """Score each text by each figure; yield, text by text, what is ready for JSON.

    What is scored is kept in `partial_folder` until all is done, so that the same call goes on after an interruption.
    """
    for name, value in (("batch size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; accepted: 1 or more")
    device = pick_device()
    number_type = pick_precision(precision, device)
    model.to(device)
    partial = Partial(partial_folder, key_of(model, number_type, seed))
    numbers = {name: blocks.spread(limit) for name, blocks in texts.items()}
    slots = [
        figure.slots(blocks.size(number))
        for name, blocks in texts.items()
        for figure in figures
        for number in numbers[name]
    ]
    done, total = 0, sum(slots)
    for name, blocks in texts.items():
        rows = batch_size or max(1, LOGITS // (blocks.length * model.config.vocabulary))
        sizes = torch.tensor([blocks.size(number) for number in numbers[name]])
        bytes_of = None if byte_lengths is None else _bytes(blocks, numbers[name], byte_lengths)
        results = []
        for figure in figures:
            work = functools.partial(_scores, model, figure, blocks, rows, seed, number_type)

            def advance(scored: list[int], times: int, name: str = name, its: Figure = figure) -> None:
                nonlocal done
                done = min(total, done + times * sum(its.slots(texts[name].size(number)) for number in scored))
                report(its.name if len(texts) == 1 else f"{name}, {its.name}", done, total)

            found = partial.complete(f"{blocks.sha256[:16]} {blocks.length} {figure!r}", numbers[name], work, advance)
            nats = torch.tensor(list(found.values()), dtype=torch.float64)  # (N, columns)
            for column, values in zip(figure.columns, nats.T, strict=True):
                results.append({"name": column, **dataclasses.asdict(estimate(values, sizes, bytes_of))})
        yield {
            "text": name,
            "tokens_sha256": blocks.sha256,
            "sequences": len(sizes),
            "tokens": int(sizes.sum()),
            "tokens_in_all": blocks.total,
            "length": blocks.length,
            "precision": number_type,
            "seed": seed,
            "results": results,
        }
    partial.remove()


def _scores(
    model: LanguageModel,
    figure: Figure,
    blocks: Blocks,
    rows: int,
    seed: int,
    number_type: Literal["bf16", "fp32"],
    left: list[int],
) -> Iterator[Scores]:
    """Score the numbered blocks in batches of `rows`."""
    device = model.token_embedding.weight.device
    batches = ((part, blocks.rows(part).to(device)) for part in _batches(left, blocks, rows))
    for numbers, nats in score(figure, model, batches, seed, autocast(number_type, device)):
        yield dict(zip(numbers, nats.tolist(), strict=True))


def _batches(numbers: list[int], blocks: Blocks, size: int) -> Iterator[list[int]]:
    """Put blocks of one length together."""
    for length in sorted({blocks.size(number) for number in numbers}, reverse=True):
        same = [number for number in numbers if blocks.size(number) == length]
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _bytes(blocks: Blocks, numbers: list[int], byte_lengths: np.ndarray) -> Tensor:
    return torch.tensor([int(byte_lengths[blocks.rows([number])].sum()) for number in numbers])
