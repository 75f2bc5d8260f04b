"""How packed slots of ragged rows read a cache: every slot sees the columns below a bound of its own, and one more."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 1.5  # how many times its work attention may grow by padding rows to one shape

FEW = 8  # queries of a row
WIDTHS = 64  # the cache is read in multiples of so many columns

Reader = Callable[[Tensor, Tensor, Tensor], Tensor]  # query (H, P, d), keys and values (R, H, S, d) -> (H, P, d)


@dataclass(frozen=True)
class Sight:
    """What the slots of a pass see of the cache, row by row: columns below `below`, and the column `itself`."""

    counts: Tensor  # (R,) slots of each row
    below: Tensor  # (R, Q) of which the first counts[r] count
    itself: Tensor  # (R, Q), -1 for none
    columns: int  # of the cache

    def last(self, counts: Tensor) -> "Sight":
        """Keep the last counts (R,) slots of each row."""
        offset = torch.arange(int(counts.max()) if len(counts) else 0, device=counts.device)
        column = ((self.counts - counts)[:, None] + offset).clamp(0, max(0, self.below.shape[1] - 1))  # (R, K)
        return Sight(counts, self.below.gather(1, column), self.itself.gather(1, column), self.columns)

    def reader(self, number_type: torch.dtype) -> Reader:
        """Choose how to attend: rows that compute about as many slots are read together, padded to one shape."""
        if self._is_fresh():
            rows, width = self.below.shape
            return lambda query, keys, values: _flat(
                _attend(_rows(query, rows), keys[:, :, :width], values[:, :, :width], None)
            )
        parts = [self._part(rows, number_type) for rows in self._groups()]
        if len(parts) == 1 and bool((self.counts == self.below.shape[1]).all()):  # nothing to pad
            rows, width = self.below.shape[0], parts[0][3].shape[3]
            return lambda query, keys, values: _flat(
                _attend(_rows(query, rows), keys[:, :, :width], values[:, :, :width], parts[0][3])
            )

        def read(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            query = query.transpose(0, 1)  # (P, H, d)
            mixed = torch.empty_like(query)
            for rows, packed, place, mask in parts:
                padded = query.new_zeros(len(rows) * mask.shape[2], *query.shape[1:])  # (r * q, H, d)
                padded.index_copy_(0, place, query.index_select(0, packed))
                its_keys, its_values = (stored[:, :, : mask.shape[3]] for stored in (keys, values))
                if len(rows) < len(keys):
                    its_keys, its_values = its_keys.index_select(0, rows), its_values.index_select(0, rows)
                asked = padded.view(len(rows), -1, *query.shape[1:]).transpose(1, 2)  # (r, H, q, d)
                found = _attend(asked, its_keys, its_values, mask).transpose(1, 2)
                mixed.index_copy_(0, packed, found.flatten(0, 1).index_select(0, place))
            return mixed.transpose(0, 1)

        return read

    def _is_fresh(self) -> bool:
        """Tell whether every row begins at slot 0 and each slot sees those before it: plain causal attention."""
        natural = torch.arange(self.below.shape[1], device=self.below.device).expand_as(self.below)
        whole = bool((self.counts == self.below.shape[1]).all())
        return whole and torch.equal(self.below, natural) and torch.equal(self.itself, natural)

    def _part(self, rows: Tensor, number_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lay out some rows: which, where their slots are packed and where in the padded table, what each sees."""
        counts = self.counts[rows]
        start = (self.counts.cumsum(0) - self.counts)[rows]
        offset = torch.arange(int(counts.max()), device=rows.device)
        valid = offset < counts[:, None]  # (r, q)
        below, itself = (part[rows, : len(offset), None] for part in (self.below, self.itself))  # (r, q, 1)
        ends = torch.maximum(below, itself + 1)[..., 0][valid]
        # rounded up: a product of a width that it has not met before is prepared anew
        width = min(self.columns, -(-int(ends.max()) // WIDTHS) * WIDTHS)
        column = torch.arange(width, device=rows.device)
        mask = (column < below) | (column == itself)  # (r, q, s)
        mask |= ~valid[:, :, None]  # padding sees anything: a slot that sees nothing would be NaN
        hidden = torch.zeros(mask.shape, dtype=number_type, device=mask.device).masked_fill_(~mask, -torch.inf)
        return rows, (start[:, None] + offset)[valid], valid.flatten().nonzero()[:, 0], hidden[:, None]

    def _groups(self) -> list[Tensor]:
        """Put rows together as long as padding makes attention no more than PADDING times its work."""
        offset = torch.arange(self.below.shape[1], device=self.below.device)
        ends = torch.maximum(self.below, self.itself + 1).masked_fill(offset >= self.counts[:, None], 0)
        if not ends.numel():
            return []
        shapes = torch.stack((self.counts, ends.amax(1)), 1).tolist()
        groups: list[list[int]] = []
        exact = most = longest = 0
        for row in sorted((r for r, (count, _) in enumerate(shapes) if count), key=lambda r: shapes[r], reverse=True):
            count, end = shapes[row]
            exact, longest = exact + count * end, max(longest, end)
            if not groups or (len(groups[-1]) + 1) * most * longest > PADDING * exact:
                groups.append([])
                exact, most, longest = count * end, count, end
            groups[-1].append(row)
        return [torch.tensor(sorted(group), device=self.below.device) for group in groups]


def _rows(query: Tensor, rows: int) -> Tensor:
    """Unpack slots of rows that have as many each: (H, R * Q, d) -> (R, H, Q, d)."""
    return query.view(query.shape[0], rows, -1, query.shape[2]).transpose(0, 1)


def _flat(mixed: Tensor) -> Tensor:
    """Pack them again: (R, H, Q, d) -> (H, R * Q, d)."""
    return mixed.transpose(0, 1).flatten(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from (R, H, Q, d) to (R, H, S, d); the mask is added, without one causally: (R, H, Q, d)."""
    if mask is None or query.shape[2] > FEW:
        return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
    return _attend_few(query, key, value, mask)


def _attend_few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend with few queries, where the fused kernel spends its time on preparing keys that it uses once."""
    heads, scale = query.shape[1], query.shape[-1] ** -0.5
    hidden = mask if len(mask) == 1 else mask.expand(-1, heads, -1, -1)
    hidden, query, key, value = (x.flatten(0, 1) for x in (hidden, query, key, value))  # (R * H, ...)
    if key.dtype == torch.bfloat16:  # whose products are fastest with the long factor first
        scores = torch.baddbmm(hidden.transpose(1, 2), key, query.transpose(1, 2), alpha=scale).transpose(1, 2)
    else:
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), value).unflatten(0, (-1, heads))
