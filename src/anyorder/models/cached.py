"""The decoder's context: keys and values of every final slot, and questions asked behind them.

A slot's keys and values depend on its target, so the newest slot is computed lazily, together with the next question.
To ask for K positions at once the newest slot is replicated, once per target: each replica sees the cache and itself.
Replicas lie in the free part of the cache; when one's target is revealed next, it stays there as the slot itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.errors import InputError
from anyorder.models.blocks import Attend
from anyorder.models.context import Asked, Context, count_all, new_cache, store
from anyorder.models.decoder import ONE_ORDER, Decoder
from anyorder.models.reading import Sight


@dataclass(frozen=True)
class _Slots:
    """The slots of one pass, row by row and padded: which rows compute which slots of the cache."""

    counts: Tensor  # (R,) how many
    valid: Tensor  # (R, Q) the rest is padding
    index: Tensor  # (R, Q) where in the cache
    content: Tensor  # (R, Q) token
    own: Tensor  # (R, Q) own position, 0 for the start slot
    target: Tensor  # (R, Q)


class CachedContext(Context):
    """Positions revealed in each of R rows, in their order, and the decoder's cache of them."""

    model: Decoder

    @torch.no_grad()
    def __init__(self, model: Decoder, rows: int, length: int | None = None):
        super().__init__(model, rows, length)
        self.final = torch.zeros_like(self.lengths)  # slots whose keys and values are stored
        self.asked = self.positions.new_full((rows, 0), -1)  # targets of the stored replicas
        self.keys, self.values = (new_cache(model, rows, self.length) for _ in range(2))

    def reveal(self, positions: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        at = self.lengths
        super().reveal(positions, tokens, counts)
        self._commit(positions, count_all(at, positions, counts), at)

    def rollback(self, lengths: Tensor) -> None:
        changed = lengths < self.lengths
        self.asked = self.asked.masked_fill(changed[:, None], -1)
        # a stored slot behind the last one that stays asked for the position that came next: it still answers for that
        stored = changed & (lengths < self.final)
        if bool(stored.any()):
            if not self.asked.shape[1]:
                self.asked = self.asked.new_full((len(lengths), 1), -1)
            next_position = self.positions.gather(1, lengths.clamp(max=self.length - 1)[:, None])[:, 0]
            self.asked[:, 0] = torch.where(stored, next_position, self.asked[:, 0])
        super().rollback(lengths)
        self.final = torch.minimum(self.final, self.lengths)

    def _ask_each(self, positions: Tensor, counts: Tensor) -> Asked:
        if not self.model.any_order:  # its newest slot knows one question: what comes next
            asked = torch.arange(positions.shape[1], device=counts.device) < counts[:, None]
            if bool((asked & (positions != self.lengths[:, None])).any()):
                raise InputError(ONE_ORDER)
        return self._ask(positions, counts, self.lengths)

    def _ask_run(
        self, before: Tensor, positions: Tensor, counts: Tensor, ahead: Tensor, ahead_counts: Tensor
    ) -> tuple[Asked, Asked]:
        asked = self._ask(ahead, ahead_counts, torch.maximum(before, self.final))
        of_run = asked.column < 0
        return asked.part(of_run, (self.lengths - before)[asked.row]), asked.part(~of_run)

    @torch.no_grad()
    def _ask(self, positions: Tensor, counts: Tensor, since: Tensor) -> Asked:
        """Run all slots not yet computed and one replica for each question.

        Return what the head reads of the slots from `since` (R,) on; those before the questions have negative columns.
        """
        slots = self._slots(positions, counts)
        if not self.model.any_order and bool((slots.valid & (slots.target != slots.index)).any()):
            raise InputError(ONE_ORDER)
        row, column = slots.valid.nonzero(as_tuple=True)
        index = slots.index[row, column]
        wanted = index >= since[row]
        if not bool(wanted.any()):
            row, column = row[:0], column[:0]
            nothing = self.model.token_embedding.weight.new_zeros(0, self.model.config.width)
            return Asked(nothing, row, column, self.model)
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
        return Asked(hidden, row[wanted], (index - self.lengths[row])[wanted], self.model)

    def _slots(self, positions: Tensor, counts: Tensor) -> _Slots:
        """Lay out the slots of a pass: those still to be computed, then the replicas."""
        questions = positions.shape[1]
        wanted = self.lengths - self.final + counts  # (R,)
        offset = torch.arange(int(wanted.max()), device=positions.device)
        valid = offset < wanted[:, None]  # (R, Q)
        index = (self.final[:, None] + offset).clamp(max=self.length - 1)
        newest = self.lengths[:, None]
        held = torch.minimum(index, newest)  # a replica holds what the newest slot holds
        before = (held - 1).clamp(min=0)
        content = self.tokens.gather(1, before)
        own = torch.where(held == 0, 0, self.positions.gather(1, before) + 1)
        question = positions.gather(1, (index - newest).clamp(0, max(0, questions - 1))) if questions else index
        target = torch.where(valid & (index >= newest), question, self.positions.gather(1, index))
        return _Slots(wanted, valid, index, content, own, target)

    def _attention(self, slots: _Slots, row: Tensor, since: Tensor) -> Callable[[int], Attend]:
        """Say how the packed slots of a pass attend: store their keys and values, then read the cache."""
        place = slots.index[slots.valid]  # (P,) in the cache
        # a slot sees those before it, a replica the final ones, and each itself
        sight = Sight(slots.counts, torch.minimum(slots.index, self.lengths[:, None]), slots.index, self.length)
        of_all = sight.reader(self.keys[0].dtype)
        left_out = (since - self.final).clamp(min=0)  # slots that only leave their keys and values
        of_wanted = sight.last((slots.counts - left_out).clamp(min=0)).reader(self.keys[0].dtype)

        def attend(layer: int) -> Attend:
            keys, values = self.keys[layer], self.values[layer]
            read = of_wanted if layer + 1 == len(self.keys) else of_all

            def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # each (1, H, P, d)
                store(keys, key[0], row, place)
                store(values, value[0], row, place)
                return read(query[0].to(keys.dtype), keys, values)[None]

            return mix

        return attend

    def _commit(self, positions: Tensor, counts: Tensor, at: Tensor) -> None:
        """Keep the replica whose target is revealed next as the slot that it is; `at` (R,) is where it belongs."""
        if not self.asked.shape[1] or not positions.shape[1]:
            return
        match = (self.asked == positions[:, :1]) & (counts > 0)[:, None]  # (R, K)
        row, replica = match.nonzero(as_tuple=True)
        source, target = at[row] + replica, at[row]
        moved = replica > 0
        if bool(moved.any()):
            for stored in (*self.keys, *self.values):
                stored[row[moved], :, target[moved]] = stored[row[moved], :, source[moved]]
        self.final[row] = at[row] + 1
        self.asked = torch.full_like(self.asked, -1)
