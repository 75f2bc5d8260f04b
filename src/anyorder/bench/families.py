"""What each family costs and models: computed from its shape, beside what was counted while it ran."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from anyorder.bench.measure import Report
from anyorder.config import preset
from anyorder.data.batches import generator_for
from anyorder.models.encoder import Encoder
from anyorder.models.families import make_model, open_context
from anyorder.models.model import LanguageModel
from anyorder.orders import LeftToRight, Random
from anyorder.sampling.fill import generate
from anyorder.training.loop import draw_step, nats_of

MODELS = (
    ("GPT", {"injection": "none"}),
    ("sigma-GPT's injection", {"injection": "add"}),
    ("AO-GPT's injection", {"injection": "adaln"}),
    ("rotary", {"injection": "rotary"}),
    ("XLNet", {"family": "two_stream", "injection": "rotary"}),
    ("MDLM/RADD", {"family": "encoder", "injection": "rotary"}),
    ("SEDD", {"family": "sedd", "injection": "rotary"}),
)
BATCH = 8


def bench_families(report: Report, shape: str = "tiny") -> list[dict[str, Any]]:
    """Go through the families in one shape."""
    base = preset(shape, 4096).model
    found = []
    for number, (name, changes) in enumerate(MODELS):
        report(name, number, len(MODELS))
        config = replace(base, **changes)  # type: ignore[arg-type]
        model = make_model(config).initialise(generator_for(0))
        found.append({"model": name, "family": config.family} | computed(model) | counted(model))
    return found


def computed(model: LanguageModel) -> dict[str, Any]:
    """Say what follows from the shape alone."""
    c, n = model.config, model.config.positions
    reads_all = isinstance(model, Encoder)
    slots = 2 if c.family == "two_stream" else 1  # of a token in training
    last = slots - 1  # content slots in the last layer, which stop at keys and values
    matrices = slots * 12 * c.layers * c.width**2 - last * 10 * c.width**2 + c.width * c.vocabulary
    attention = (slots * c.layers - last) * c.width * n  # of every slot to all, as kernels compute it
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        # forward and twice backward, two operations a weight and slot
        "training_operations_a_token": 6 * matrices + 12 * attention + modulation(model),
        "share_of_tokens_with_gradient": (n + 1) / (2 * n) if reads_all else 1.0,
        "passes_to_score_an_order": n if reads_all else 1,
        "slots_to_score_an_order": n * n if reads_all else slots * n + last,
        "passes_to_generate": n,
        "slots_to_generate": n * n if reads_all else slots * n,
        "conditionals_of_4_positions": conditionals(model, 4),
    }


def modulation(model: LanguageModel) -> float:
    """Count the operations a token that telling the target (once a position) or the noise (once a text) takes."""
    c = model.config
    maps = 128 * (6 * c.layers + 2) * c.width
    if isinstance(model, Encoder) and model.noise is not None:
        return (6 * (maps + 128 * 128) + 4 * 256 * 128) / c.positions
    return 6 * maps / BATCH if "adaln" in c.injection else 0.0


def conditionals(model: LanguageModel, n: int) -> int:
    """Count the distributions over one position given others that a model of n positions holds."""
    if isinstance(model, Encoder):
        return n * 2 ** (n - 1)  # a set and a target outside it
    if not model.any_order:
        return n
    return sum(math.perm(n, k + 1) for k in range(n))  # an ordered context and a target


def counted(model: LanguageModel) -> dict[str, Any]:
    """Count operations, gradients, passes and slots of a step of training, of scoring and of generating."""
    n = model.config.positions
    generator = generator_for(0)
    tokens = torch.randint(model.config.entries, (BATCH, n), generator=generator)
    distribution = Random() if model.any_order else LeftToRight()
    drawn = draw_step(model, distribution, BATCH, n, generator, 0.0)
    # the counter does not know the fused attention of a CPU, and does know what it is made of
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        nats = nats_of(model, distribution, tokens, *drawn)
        nats.mean().backward()
    order = distribution.sample(1, n, generator)
    context = open_context(model, 1, n)
    context.score_chain(order, tokens[:1].gather(1, order))
    out = generate(model.eval(), 1, n, order, generator=generator)
    return {
        "counted_training_operations_a_token": flops.get_total_flops() / tokens.numel(),
        "counted_share_of_tokens_with_gradient": float((nats != 0).float().mean()),
        "counted_passes_to_score": context.passes,
        "counted_slots_to_score": context.tokens_forwarded,
        "counted_passes_to_generate": out.forward_passes,
        "counted_slots_to_generate": out.token_forwards,
    }
