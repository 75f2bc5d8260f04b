"""Generation with the cache against an encoder that reads the whole text again for every token."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from anyorder.bench.measure import Report, in_turn, measure_ceilings, median_ratio
from anyorder.config import Precision, preset
from anyorder.models.families import make_model
from anyorder.models.inference import prepare_for_inference, weights_of_a_step
from anyorder.models.model import LanguageModel
from anyorder.orders import Random
from anyorder.precision import pick_device, pick_precision
from anyorder.sampling.fill import Manner, write
from anyorder.sampling.filters import draw
from anyorder.sampling.writing import Writing


def bench_sampling(
    report: Report, shape: str = "small", precision: Precision = "auto", repeats: int = 3, encoder_passes: int = 4
) -> dict[str, Any]:
    """Write one text of all positions in as many steps, and time some of an encoder's passes in the same run.

    The encoder has as many blocks of the same width; its time is that of one pass, times the steps. Published samplers
    predict the whole text in each of them; beside that stands one which predicts only the position that it writes.
    """
    config = preset(shape, 4096).model
    if config.vocabulary > 50257:  # the published shapes, with the vocabulary they were made for
        config = preset(shape, 50257).model
    generator = torch.Generator().manual_seed(0)
    model = prepare_for_inference(make_model(config).initialise(generator), precision)
    length = config.positions
    order = Random().sample(1, length, generator)
    halves: list[float] = []

    def cached() -> None:
        stamps = [time.perf_counter()]
        for _ in write(_blank(model, generator), Manner(order)):
            stamps.append(time.perf_counter())
        middle = len(stamps) // 2
        halves.append((stamps[-1] - stamps[middle]) / (stamps[middle] - stamps[0]))

    def fewer_steps() -> None:
        for _ in write(_blank(model, generator), Manner(order, steps=max(1, length // 4))):
            pass

    rereading = replace(config, family="encoder", injection="none")
    other = prepare_for_inference(make_model(rereading).initialise(generator), precision)

    def lean_encoder() -> None:
        for _, _ in zip(range(encoder_passes), write(_blank(other, generator), Manner(order)), strict=False):
            pass

    @torch.inference_mode()
    def encoder() -> None:
        tokens = torch.zeros(1, length, dtype=torch.long, device=pick_device())
        visible = torch.zeros_like(tokens, dtype=torch.bool)
        for step in range(encoder_passes):
            position = int(order[0, step])
            logits = other(tokens, visible)[0, position, : config.entries or None]  # of (1, T, V)
            tokens[0, position] = draw(logits.float().log_softmax(-1)[None], generator)[0]
            visible[0, position] = True

    ceilings = measure_ceilings()
    encoder()  # warm
    ways: dict[str, Callable[[], object]] = {
        "cached": cached,
        "a quarter of the steps": fewer_steps,
        "encoder": encoder,
        "encoder, one position": lean_encoder,
    }
    taken = in_turn(ways, repeats, report)
    whole, lean = (
        [seconds / encoder_passes * length for seconds in taken[name]] for name in ("encoder", "encoder, one position")
    )
    step = statistics.median(taken["a quarter of the steps"]) / max(1, length // 4)
    weights = weights_of_a_step(model)
    return {
        "shape": shape,
        "precision": pick_precision(precision, pick_device()),
        "positions": length,
        **asdict(ceilings),
        "seconds_cached": statistics.median(taken["cached"]),
        "milliseconds_a_step": 1e3 * statistics.median(taken["cached"]) / length,
        "seconds_of_an_encoder_pass": statistics.median(whole) / length,
        "seconds_of_a_lean_encoder_pass": statistics.median(lean) / length,
        "encoder_passes_timed": encoder_passes * repeats,
        "seconds_encoder_extrapolated": statistics.median(whole),
        "times_faster_than_encoder": median_ratio(whole, taken["cached"]),
        "times_faster_than_lean_encoder": median_ratio(lean, taken["cached"]),
        "second_half_over_first": statistics.median(halves),
        f"milliseconds_a_step_at_{length // 4}_steps": 1e3 * step,
        "megabytes_of_weights_a_step": weights / 1e6,
        f"share_of_bandwidth_at_{length // 4}_steps": weights / step / 1e9 / ceilings.bandwidth_gb,
    }


def _blank(model: LanguageModel, generator: torch.Generator) -> Writing:
    tokens = torch.zeros(1, model.config.positions, dtype=torch.long, device=pick_device())
    return Writing(model, tokens, torch.ones_like(tokens, dtype=torch.bool), generator=generator)
