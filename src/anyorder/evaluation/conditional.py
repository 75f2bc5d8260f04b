"""The probability of any part of a text given any other part."""

import torch
from torch import Tensor

from anyorder import orders
from anyorder.errors import InputError
from anyorder.models.context import Asked, Context
from anyorder.models.families import open_context
from anyorder.models.model import LanguageModel


@torch.no_grad()
def logprob(
    model: LanguageModel,
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
    asked, positions, context = read_conditional(model, tokens, query, given, order, generator)
    found = context.log_probabilities(asked, tokens.gather(1, positions))
    return torch.zeros(tokens.shape, device=tokens.device).scatter_add(1, positions, found)


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


def read_conditional(
    model: LanguageModel,
    tokens: Tensor,
    query: Tensor,
    given: Tensor,
    order: str | Tensor = "left_to_right",
    generator: torch.Generator | None = None,
    lengths: Tensor | None = None,
) -> tuple[Asked, Tensor, Context]:
    """Read the given part, then the query as a chain: its predictions, and the positions (B, n) they are for.

    Of row r the first query[r].sum() count; the positions behind them are repetitions, with no prediction. `lengths`
    (B,) says how long each text is, where they differ.
    """
    whole = query_order(tokens, query, given, order, generator)
    model.check_text(tokens)
    first, count = given.sum(1), query.sum(1)  # (B,)
    batch, length = tokens.shape
    context = open_context(model, batch, length, lengths)
    before = whole[:, : int(first.max())]
    context.reveal(before, tokens.gather(1, before), first)
    column = first[:, None] + torch.arange(int(count.max()), device=tokens.device)
    positions = whole.gather(1, torch.minimum(column, (first + count - 1)[:, None]))
    asked, _ = context.chain(positions, tokens.gather(1, positions), count)
    return asked, positions, context
