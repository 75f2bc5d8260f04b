"""SEDD's samplers: undo the noise step by step, each blank filled by the chance that the model's scores give it."""

import math
from collections.abc import Iterator

import torch

from anyorder.errors import InputError
from anyorder.models.encoder import LEAST, EncoderContext, log_ratio, noise
from anyorder.sampling.filters import uniform
from anyorder.sampling.writing import Reveal, Writing


def by_scores(writing: Writing, steps: int | None, schedule: str) -> Iterator[Reveal]:
    """Go from all noise to none in equal steps of time; what is blank at the last step is filled by it.

    With scores s_y at noise sigma, a blank takes token y with probability c s_y: `tweedie` (analytic) takes
    c = e^(sigma - sigma') - 1 for the next noise sigma', `euler` c = dsigma/dt times the step.
    """
    context = writing.context
    if not isinstance(context, EncoderContext) or context.model.noise is None:
        raise InputError(
            f"schedule {schedule!r} follows the scores of SEDD, and the model is of family "
            f"{context.model.config.family}; accepted: linear, cosine or ancestral"
        )
    if steps is None or steps < 1:
        raise InputError(f"schedule {schedule!r} was given with steps {steps}; accepted: --steps of 1 or more")
    if writing.constraint.of_several():
        raise InputError("choices of several tokens were given with a sampler that cannot see them; accepted: linear")
    for step in range(steps):
        left = writing.remaining()
        if not bool(left.any()):
            return
        time, after = 1 - step / steps, 1 - (step + 1) / steps
        context.time = time
        positions = writing.open_first()[:, : int(left.max())]  # (B, W)
        progress = torch.full(positions.shape, step / max(1, steps - 1), device=positions.device)
        asked = context.ask(positions, left)
        drawn = writing.draw(asked, positions, progress)
        sigma, next_sigma = (noise(torch.tensor(t, dtype=torch.float64)) for t in (time, after))
        rate = (1 - LEAST) / (1 - (1 - LEAST) * time)
        factor = torch.expm1(sigma - next_sigma) if schedule == "tweedie" else torch.tensor(rate / steps)
        chance = torch.zeros(positions.shape, dtype=torch.float64, device=positions.device)
        for logits, part in asked.parts():
            total = logits.double().logsumexp(-1) - math.log(context.model.config.vocabulary)
            chance[asked.row[part], asked.column[part]] = (total - log_ratio(sigma) + factor.log()).exp()
        drawn_chance = uniform(positions.shape, writing.generator, positions.device)
        there = torch.arange(positions.shape[1], device=left.device) < left[:, None]
        filled = there & ((drawn_chance < chance) | (step + 1 == steps))
        count = filled.sum(1)
        if not bool(count.any()):
            continue
        chosen = (~filled).long().argsort(dim=1, stable=True)[:, : int(count.max())]
        parts = (positions, drawn.tokens, drawn.logprobs, drawn.model_logprobs)
        places, tokens, logprobs, own = (part.gather(1, chosen) for part in parts)
        reveal = Reveal(places, tokens, logprobs, own, count)
        context.reveal(places, tokens, count)
        yield writing.record(reveal)
