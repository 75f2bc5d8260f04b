"""Tokens a pass of exact parallel sampling, over orders and numbers of drafts, in held-out text with blanks."""

from typing import Any

import torch
from torch import Tensor

from anyorder.bench.measure import Report
from anyorder.data.batches import generator_for, spread_chunks
from anyorder.data.shards import Dataset
from anyorder.models.model import LanguageModel
from anyorder.sampling.fill import Written, fill

ORDERS = ("left_to_right", "right_to_left", "random", "across_blocks(8)")
DRAFTS = (1, 2, 3, 4, 6, 8, 0)  # 0: their number adapts


def bench_speculation(
    model: LanguageModel, data: Dataset, report: Report, texts: int = 64, share: float = 0.5
) -> list[dict[str, Any]]:
    """Blank a random share of held-out chunks, and fill them by each order and number of drafts."""
    length = model.config.positions
    tokens = spread_chunks(data.split("validation", length), length, texts)
    blanks = torch.rand(tokens.shape, generator=generator_for(0, "blanks")) < share
    found = []
    ways = [(order, draft) for order in ORDERS for draft in DRAFTS]
    for number, (order, draft) in enumerate(ways):
        report(f"{order}, {draft or 'adaptive'}", number, len(ways))
        out = fill(model, tokens, blanks, order, exact=True, draft=draft, generator=generator_for(0, order, draft))
        passes = own_passes(out)
        assert bool((passes <= blanks.sum(1).clamp(min=1)).all()), "a pass writes a token at least"
        found.append(
            {
                "order": order,
                "draft": draft or "adaptive",
                "tokens_a_pass": float(blanks.sum() / passes.sum()),
                "slots_a_token": out.token_forwards / float(blanks.sum()),
            }
        )
    return found


def own_passes(out: Written) -> Tensor:
    """Count the passes that each row took part in: (B,)."""
    return out.steps.amax(1) + 1
