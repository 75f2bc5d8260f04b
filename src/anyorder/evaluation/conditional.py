"""The probability of any part of a text given any other part."""

import torch
from torch import Tensor
from torch.nn import functional

from anyorder import orders
from anyorder.errors import InputError
from anyorder.models.decoder import Decoder


@torch.no_grad()
def logprob(
    model: Decoder,
    tokens: Tensor,
    query: Tensor,
    given: Tensor,
    order: str | Tensor = "left_to_right",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Score the query of tokens (B, T) given another part: (B, T) log-probabilities, 0 outside the query.

    log p(x[query] | x[given]) is a row's sum; entry p of it is log p(x[p] | x[given], x[query before p in `order`]).
    `query` and `given` are disjoint bool masks (B, T), of another pattern in each row if need be; positions in neither
    are not read. The given part is read left to right, then the query in `order`, all in one pass.
    """
    whole = query_order(tokens, query, given, order, generator)
    logits, asked = conditional_logits(model, tokens, query, given, whole)
    found = -functional.cross_entropy(
        logits.float().transpose(1, 2), tokens.gather(1, asked), reduction="none"
    )  # (B, n), of which the query's count
    scores = torch.zeros(tokens.shape, device=tokens.device).scatter(1, asked, found)
    return scores.masked_fill(~query, 0.0)


def query_order(
    tokens: Tensor,
    query: Tensor,
    given: Tensor,
    order: str | Tensor = "left_to_right",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Check the masks and arrange the positions: the given left to right, the query by `order`, the rest: (B, T)."""
    for name, mask in (("query", query), ("given", given)):
        if tokens.dim() != 2 or mask.shape != tokens.shape or mask.dtype != torch.bool:
            raise InputError(
                f"{name} {tuple(mask.shape)} of {mask.dtype} does not match tokens {tuple(tokens.shape)}; "
                "accepted: a bool mask (B, T) for tokens (B, T)"
            )
    both = (query & given).nonzero()
    if len(both):
        row, position = both[0].tolist()
        raise InputError(
            f"position {position} of row {row} is both in the query and given; accepted: two disjoint parts"
        )
    empty = (~query.any(1)).nonzero()
    if len(empty):
        raise InputError(f"the query of row {int(empty[0, 0])} is empty; accepted: at least one position in each row")
    batch, length = tokens.shape
    drawn = orders.draw(order, batch, length, generator).to(tokens.device)
    natural = torch.arange(length, device=tokens.device)
    group = torch.where(given, 0, torch.where(query, 1, 2))
    return orders.grouped(group, torch.where(query, orders.ranks(drawn), natural))


def conditional_logits(
    model: Decoder, tokens: Tensor, query: Tensor, given: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor]:
    """Predict the query in one pass: logits (B, n, V) and the positions they are for (B, n), row by row.

    Rows with a shorter query than others are filled up with positions that do not count.
    """
    first, count = given.sum(1), query.sum(1)  # (B,)
    width = int(count.max())
    slot = (first[:, None] + torch.arange(width, device=tokens.device)).clamp(max=tokens.shape[1] - 1)  # (B, n)
    # a slot beyond a row's own query belongs to its last one again: no other prediction than those asked for is made
    slot = torch.minimum(slot, (first + count - 1)[:, None])
    hidden = model.hidden(tokens, whole[:, : int((first + count).max())])
    picked = hidden.gather(1, slot[..., None].expand(-1, -1, hidden.shape[-1]))
    return model.head(picked), whole.gather(1, slot)
