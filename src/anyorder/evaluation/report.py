"""The report of `anyorder evaluate`: held-out text, left to right and in random orders."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from anyorder.data.batches import spread_chunks
from anyorder.data.shards import Dataset
from anyorder.errors import InputError
from anyorder.evaluation.likelihood import estimate, sequence_nats, xz_bits_per_byte
from anyorder.models.decoder import Decoder
from anyorder.orders import LeftToRight, OrderDistribution, Random
from anyorder.precision import Precision, autocast, pick_device, pick_precision

Report = Callable[[str, int, int], None]  # what is scored, how many sequences are done, of how many


def evaluate(
    model: Decoder,
    data: Dataset,
    orders: int = 1,
    seed: int = 0,
    batch_size: int = 32,
    limit: int | None = None,
    precision: Precision = "fp32",
    xz: bool = False,
    report: Report = lambda name, done, of: None,
) -> dict[str, Any]:
    """Score the validation split with `orders` random orders a sequence; return figures ready for JSON."""
    if orders < 1 or batch_size < 1 or (limit is not None and limit < 1):
        raise InputError(f"orders, batch size and limit are {orders}, {batch_size} and {limit}; accepted: 1 or more")
    length = model.config.positions
    stream = data.split("validation", length)
    rows = spread_chunks(stream, length, limit)  # (N, T)
    device = pick_device()
    number_type = pick_precision(precision, device)
    model.to(device)
    asked: list[tuple[str, OrderDistribution, int]] = [("left to right", LeftToRight(), 1)]
    if model.any_order:
        asked.append(("any order", Random(), orders))
    results: list[dict[str, Any]] = []
    for name, distribution, repeats in asked:
        nats: list[torch.Tensor] = []
        for part in sequence_nats(
            model, rows.to(device), distribution, seed, repeats, batch_size, autocast(number_type, device)
        ):
            nats.append(part)
            report(name, sum(map(len, nats)), len(rows))
        found = estimate(torch.cat(nats), rows, data.tokenizer.byte_lengths(), repeats)
        results.append({"name": name, **dataclasses.asdict(found), "perplexity": found.perplexity})
    if xz:
        text = data.tokenizer.decode_bytes(rows.flatten().tolist())
        results.append({"name": "xz -9e", "bits_per_byte": xz_bits_per_byte(text)})
    return {
        "data": data.content_sha256,
        "sequences": len(rows),
        "tokens": rows.numel(),
        "left_over": len(stream) % length,
        "precision": number_type,
        "seed": seed,
        "results": results,
    }
