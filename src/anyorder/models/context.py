"""What a decoder has read so far, row by row: keys and values of every final slot, and questions asked behind them.

A slot's keys and values depend on its target, so the newest slot is computed lazily, together with the next question.
To ask for K positions at once the newest slot is replicated, once per target: each replica sees the cache and itself.
Replicas lie in the free part of the cache; when one's target is revealed next, it stays there as the slot itself.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyorder.errors import InputError
from anyorder.models.blocks import Attend
from anyorder.models.decoder import ONE_ORDER, Decoder, compute_dtype

PADDING = 1.5  # how many times its work attention may grow by padding rows to one shape
LOGITS = 2**25  # entries of a table of logits that is held at once


@dataclass(frozen=True)
class Asked:
    """What the head reads of some questions, packed: which row asked, and in which column of its questions."""

    hidden: Tensor  # (P, C)
    row: Tensor  # (P,)
    column: Tensor  # (P,)
    head: nn.Linear

    def parts(self) -> Iterator[tuple[Tensor, slice]]:
        """Yield the logits of some of them (p, V), and which: no more at once than LOGITS entries."""
        step = max(1, LOGITS // self.head.out_features)
        for start in range(0, len(self.row), step):
            part = slice(start, start + step)
            logits = self.head(self.hidden[part])
            yield logits, part

    def table(self, shape: torch.Size) -> Tensor:
        """Put all logits in their places: (R, K) -> (R, K, V), 0 where nothing was asked."""
        logits = self.head(self.hidden)
        if len(logits) == shape.numel():
            return logits.view(*shape, -1)
        return logits.new_zeros(*shape, logits.shape[-1]).index_put((self.row, self.column), logits)


@dataclass(frozen=True)
class _Slots:
    """The slots of one pass, row by row and padded: which rows compute which slots of the cache."""

    first: Tensor  # (R,) the first slot each row computes
    counts: Tensor  # (R,) how many
    valid: Tensor  # (R, Q) the rest is padding
    index: Tensor  # (R, Q) where in the cache
    content: Tensor  # (R, Q) token
    own: Tensor  # (R, Q) own position, 0 for the start slot
    target: Tensor  # (R, Q)
    asking: Tensor  # (R, Q) replicas of the newest slot

    def since(self, first: Tensor) -> "_Slots":
        """Take the slots of each row from `first` (R,) on."""
        counts = (self.first + self.counts - first).clamp(min=0)
        offset = torch.arange(int(counts.max()), device=counts.device)
        column = ((first - self.first)[:, None] + offset).clamp(0, max(0, self.valid.shape[1] - 1))  # (R, K)
        valid = offset < counts[:, None]
        index, content, own, target, asking = (
            part.gather(1, column) for part in (self.index, self.content, self.own, self.target, self.asking)
        )
        return _Slots(first, counts, valid, index, content, own, target, asking & valid)


class Context:
    """Positions revealed in each of R rows, in their order, and the model's cache of them.

    `tokens_forwarded` counts the slots computed, `passes` the runs through the model.
    """

    @torch.no_grad()
    def __init__(self, model: Decoder, rows: int, length: int | None = None):
        config = model.config
        length = config.positions if length is None else length
        if not 1 <= length <= config.positions:
            raise InputError(f"the text has {length} positions; accepted: 1 to {config.positions}, the model's")
        device = model.token_embedding.weight.device
        self.model = model
        self.length = length
        self.positions = torch.zeros(rows, length, dtype=torch.long, device=device)  # as revealed
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # how many are revealed
        self.final = torch.zeros(rows, dtype=torch.long, device=device)  # slots whose keys and values are stored
        self.asked = torch.full((rows, 0), -1, dtype=torch.long, device=device)  # targets of the stored replicas
        shape = (rows, length, config.heads, config.width // config.heads)
        dtype = compute_dtype(model.token_embedding.weight)
        self.keys, self.values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)] for _ in range(2)
        )
        self.passes = self.tokens_forwarded = 0

    def reveal(self, positions: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """Append positions (R, n) with tokens (R, n), the first counts (R,) of each row; nothing is computed yet."""
        width = positions.shape[1]
        counts = torch.full_like(self.lengths, width) if counts is None else counts
        if int((self.lengths + counts).max()) > self.length:
            raise InputError(f"more than the {self.length} positions of the text were revealed")
        self._commit(positions, counts)
        column = torch.arange(width, device=positions.device)
        row, column = (column < counts[:, None]).nonzero(as_tuple=True)
        place = self.lengths[row] + column
        self.positions[row, place] = positions[row, column]
        self.tokens[row, place] = tokens[row, column]
        self.lengths = self.lengths + counts

    def rollback(self, lengths: Tensor) -> None:
        """Forget all but the first lengths (R,) revealed positions of each row."""
        changed = lengths < self.lengths
        self.asked = self.asked.masked_fill(changed[:, None], -1)
        # a stored slot behind the last one that stays asked for the position that came next: it still answers for that
        stored = changed & (lengths < self.final)
        if bool(stored.any()):
            if not self.asked.shape[1]:
                self.asked = self.asked.new_full((len(lengths), 1), -1)
            next_position = self.positions.gather(1, lengths.clamp(max=self.length - 1)[:, None])[:, 0]
            self.asked[:, 0] = torch.where(stored, next_position, self.asked[:, 0])
        self.lengths = torch.minimum(self.lengths, lengths)
        self.final = torch.minimum(self.final, self.lengths)

    def fork(self, rows: Tensor) -> "Context":
        """Copy some rows (N,), any number of times each, into a context of their own."""
        other = copy.copy(self)
        for name in ("positions", "tokens", "lengths", "final", "asked"):
            setattr(other, name, getattr(self, name).index_select(0, rows))
        other.keys, other.values = (
            [stored.index_select(0, rows) for stored in layers] for layers in (self.keys, self.values)
        )
        return other

    def ask(self, positions: Tensor, counts: Tensor | None = None) -> Asked:
        """Predict positions (R, K) from what is revealed, each on its own; of row r the first counts[r]."""
        return self._ask(positions, counts, self.lengths)

    def marginals(self, positions: Tensor, counts: Tensor | None = None) -> Tensor:
        """Give the logits of what is asked: (R, K, V), 0 where nothing was."""
        return self.ask(positions, counts).table(positions.shape)

    def chain(
        self,
        positions: Tensor,
        tokens: Tensor,
        counts: Tensor | None = None,
        ahead: Tensor | None = None,
        ahead_counts: Tensor | None = None,
    ) -> tuple[Asked, Asked]:
        """Reveal a run of tokens (R, n), predicting each from those before it.

        The same pass predicts the positions `ahead` (R, K), each on its own, from the whole run. A first position that
        was asked for just before is not computed again, and has no prediction here.
        """
        before = self.lengths
        self.reveal(positions, tokens, counts)
        ahead = positions[:, :0] if ahead is None else ahead
        asked = self._ask(ahead, ahead_counts, torch.maximum(before, self.final))
        of_run = asked.column < 0
        column = asked.column + (self.lengths - before)[asked.row]
        return (
            Asked(asked.hidden[of_run], asked.row[of_run], column[of_run], asked.head),
            Asked(asked.hidden[~of_run], asked.row[~of_run], asked.column[~of_run], asked.head),
        )

    def score(self, positions: Tensor, tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        """Log-probability of tokens (R, K) at positions (R, K), each on its own: (R, K), 0 beyond counts (R,)."""
        asked = self.ask(positions, counts)
        wanted = tokens[asked.row, asked.column]
        scores = torch.zeros(positions.shape, device=positions.device)
        for logits, part in asked.parts():
            nats = functional.cross_entropy(logits.float(), wanted[part], reduction="none")
            scores[asked.row[part], asked.column[part]] = -nats
        return scores

    @torch.no_grad()
    def _ask(self, positions: Tensor, counts: Tensor | None, since: Tensor) -> Asked:
        """Run all slots not yet computed and one replica for each question.

        Return what the head reads of the slots from `since` (R,) on; those before the questions have negative columns.
        """
        counts = torch.full_like(self.lengths, positions.shape[1]) if counts is None else counts
        slots = self._slots(positions, counts)
        if not self.model.any_order and bool((slots.valid & (slots.target != slots.index)).any()):
            raise InputError(ONE_ORDER)
        row, column = slots.valid.nonzero(as_tuple=True)
        index = slots.index[row, column]
        wanted = index >= since[row]
        if not len(row):
            nothing = self.model.token_embedding.weight.new_zeros(0, self.model.config.width)
            return Asked(nothing, row, column, self.model.head)
        hidden = self.model.slots(
            slots.content[row, column][None],
            slots.own[row, column][None],
            slots.target[row, column][None],
            self._attention(slots, row, since),
            wanted.nonzero()[:, 0],
        )[0]  # (P, C), of those wanted
        self.passes += 1
        self.tokens_forwarded += len(row)
        self.final = self.lengths.clone()
        self.asked = positions.masked_fill(torch.arange(positions.shape[1]).to(counts) >= counts[:, None], -1)
        return Asked(hidden, row[wanted], (index - self.lengths[row])[wanted], self.model.head)

    def _slots(self, positions: Tensor, counts: Tensor) -> _Slots:
        """Lay out the slots of a pass: those still to be computed, then the replicas."""
        questions = positions.shape[1]
        wanted = self.lengths - self.final + counts  # (R,)
        if int((self.lengths + counts).max()) > self.length:
            raise InputError(f"more positions are asked for than the text's {self.length} leave open")
        offset = torch.arange(int(wanted.max()), device=positions.device)
        valid = offset < wanted[:, None]  # (R, Q)
        index = (self.final[:, None] + offset).clamp(max=self.length - 1)
        newest = self.lengths[:, None]
        asking = valid & (index >= newest)
        held = torch.minimum(index, newest)  # a replica holds what the newest slot holds
        before = (held - 1).clamp(min=0)
        content = self.tokens.gather(1, before)
        own = torch.where(held == 0, 0, self.positions.gather(1, before) + 1)
        question = positions.gather(1, (index - newest).clamp(0, max(0, questions - 1))) if questions else index
        target = torch.where(asking, question, self.positions.gather(1, index))
        return _Slots(self.final, wanted, valid, index, content, own, target, asking)

    def _attention(self, slots: _Slots, row: Tensor, since: Tensor) -> Callable[[int], Attend]:
        """Say how the packed slots of a pass attend: store their keys and values, then read the cache."""
        place = row * self.length + slots.index[slots.valid]  # (P,) in the cache, its rows one after the other
        of_all = _choose_reader(slots, self.lengths)
        of_wanted = _choose_reader(slots.since(torch.maximum(since, slots.first)), self.lengths)

        def attend(layer: int) -> Attend:
            keys, values = self.keys[layer], self.values[layer]
            read = of_wanted if layer + 1 == len(self.keys) else of_all

            def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # each (1, H, P, d)
                for stored, new in ((keys, key), (values, value)):
                    stored.flatten(0, 1).index_copy_(0, place, new[0].transpose(0, 1).to(stored.dtype))
                return read(query[0].transpose(0, 1).to(keys.dtype), keys, values).transpose(0, 1)[None]

            return mix

        return attend

    def _commit(self, positions: Tensor, counts: Tensor) -> None:
        """Keep the replica whose target is revealed next as the slot that it is."""
        if not self.asked.shape[1] or not positions.shape[1]:
            return
        match = (self.asked == positions[:, :1]) & (counts > 0)[:, None]  # (R, K)
        row, replica = match.nonzero(as_tuple=True)
        source, target = self.lengths[row] + replica, self.lengths[row]
        moved = replica > 0
        for stored in (*self.keys, *self.values):
            stored[row[moved], target[moved]] = stored[row[moved], source[moved]]
        self.final[row] = self.lengths[row] + 1
        self.asked = torch.full_like(self.asked, -1)


Reader = Callable[[Tensor, Tensor, Tensor], Tensor]  # query (P, H, d), keys and values (R, S, H, d) -> (P, H, d)


def _choose_reader(slots: _Slots, lengths: Tensor) -> Reader:
    """Say how the slots of a pass read the cache: a slot those before it, a replica the final ones and itself.

    Rows that compute about as many slots are read together, padded to one shape.
    """
    several = bool((slots.asking.sum(1) > 1).any())
    if not several and bool(slots.valid.all()) and not bool(slots.first.any()):
        width = slots.valid.shape[1]
        return lambda query, keys, values: _read(
            query.view(*slots.valid.shape, *query.shape[1:]), keys[:, :width], values[:, :width], None
        ).flatten(0, 1)
    parts = [_part(slots, lengths, rows, several) for rows in _groups(slots)]

    def read(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = torch.empty_like(query)
        for rows, packed, place, mask in parts:
            padded = query.new_zeros(len(rows) * mask.shape[2], *query.shape[1:])  # (r * q, H, d)
            padded.index_copy_(0, place, query.index_select(0, packed))
            its_keys, its_values = (stored[:, : mask.shape[3]] for stored in (keys, values))
            if len(rows) < len(keys):
                its_keys, its_values = its_keys.index_select(0, rows), its_values.index_select(0, rows)
            found = _read(padded.view(len(rows), -1, *query.shape[1:]), its_keys, its_values, mask)  # (r, q, H, d)
            mixed.index_copy_(0, packed, found.flatten(0, 1).index_select(0, place))
        return mixed

    return read


def _part(slots: _Slots, lengths: Tensor, rows: Tensor, several: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay out some rows: which, where their slots are packed and where in the padded table, and what each sees."""
    counts = slots.counts[rows]
    start = (slots.counts.cumsum(0) - slots.counts)[rows]
    offset = torch.arange(int(counts.max()), device=rows.device)
    column = torch.arange(int((slots.first + slots.counts)[rows].max()), device=rows.device)
    valid = offset < counts[:, None]  # (r, q)
    index = slots.index[rows, : len(offset), None]
    mask = column <= index  # (r, q, s)
    if several:
        mask &= (column < lengths[rows, None, None]) | (column == index)
    mask |= ~valid[:, :, None]  # padding sees anything: a slot that sees nothing would be NaN
    return rows, (start[:, None] + offset)[valid], valid.flatten().nonzero()[:, 0], mask[:, None]


def _groups(slots: _Slots) -> list[Tensor]:
    """Put rows together as long as padding makes attention no more than PADDING times its work."""
    shapes = torch.stack((slots.counts, slots.first + slots.counts), 1).tolist()
    groups: list[list[int]] = []
    exact = most = longest = 0
    for row in sorted((r for r, (count, _) in enumerate(shapes) if count), key=lambda r: shapes[r], reverse=True):
        count, end = shapes[row]
        exact, longest = exact + count * end, max(longest, end)
        if not groups or (len(groups[-1]) + 1) * most * longest > PADDING * exact:
            groups.append([])
            exact, most, longest = count * end, count, end
        groups[-1].append(row)
    return [torch.tensor(sorted(group), device=slots.first.device) for group in groups]


def _read(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from (R, Q, H, d) to (R, S, H, d); without a mask, causally: (R, Q, H, d)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
    return mixed.transpose(1, 2)
