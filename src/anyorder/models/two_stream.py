"""XLNet's two streams: content slots that know no target, and query slots that ask each for one position."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from anyorder.config import ModelConfig
from anyorder.models.blocks import Attend, causal
from anyorder.models.context import Asked, Context, new_cache, store
from anyorder.models.injection import Injection, Shape, make_injection
from anyorder.models.model import LanguageModel
from anyorder.models.reading import Sight


class TwoStream(LanguageModel):
    """Score tokens in the order given: model(tokens (B, T), order (B, n)) -> logits (B, n, V), row i for order[:, i].

    Content slot 0 holds the start embedding, slot j the token at order[:, j - 1]; it sees the content up to itself.
    Query slot i holds one learnt vector and the position order[:, i]; it sees the content slots up to i.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config, make_injection(config.injection, Shape.of(config)) or Injection())
        self.start_embedding = nn.Parameter(torch.zeros(config.width))
        self.query_embedding = nn.Parameter(torch.zeros(config.width))

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:  # (B, T), (B, n) -> (B, n, V)
        self.check_order(tokens, order)
        count = order.shape[1]
        before = order[:, :-1]
        content = nn.functional.pad(tokens.gather(1, before), (1, count))  # (B, 2n), of query slots it is not read
        own = torch.cat((nn.functional.pad(before + 1, (1, 0)), order + 1), 1)
        asking = torch.arange(2 * count, device=order.device) >= count

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = key[:, :, :count], value[:, :, :count]  # of the content alone
            streams = [causal(part, key, value) for part in query.split(count, 2)]
            return torch.cat(streams, 2)

        wanted = torch.arange(count, 2 * count, device=order.device)
        return self.head(self.slots(content, own, asking.expand_as(own), lambda layer: attend, wanted))

    along = forward

    def slots(
        self, content: Tensor, own: Tensor, asking: Tensor, attend: Callable[[int], Attend], wanted: Tensor
    ) -> Tensor:  # each (B, n), wanted (w,) -> (B, w, C)
        """Compute slots from their token, position (0 for the start slot, p + 1 for p) and which stream they are of."""
        embedded = torch.where((own == 0)[..., None], self.start_embedding, self.token_embedding(content))
        embedded = torch.where(asking[..., None], self.query_embedding, embedded)
        # a content slot looks for what belongs to its own position: it has no other
        return self.run_blocks(embedded + self.position_embedding(own), own, own - 1, attend, wanted)


class TwoStreamContext(Context):
    """Positions revealed in each of R rows, in their order, and a cache of the content stream.

    Column 0 of the cache is the start slot's, column j that of the j-th revealed position. A question leaves nothing.
    """

    model: TwoStream

    @torch.no_grad()
    def __init__(self, model: TwoStream, rows: int, length: int | None = None):
        super().__init__(model, rows, length)
        self.final = torch.zeros_like(self.lengths)  # columns that are stored
        self.keys, self.values = (new_cache(model, rows, self.length + 1) for _ in range(2))

    def rollback(self, lengths: Tensor) -> None:
        super().rollback(lengths)
        self.final = torch.minimum(self.final, self.lengths + 1)

    def _ask_each(self, positions: Tensor, counts: Tensor) -> Asked:
        valid = torch.arange(positions.shape[1], device=counts.device) < counts[:, None]
        return self._ask(positions, valid, (self.lengths[:, None] + 1).expand(positions.shape))

    def _ask_run(
        self, before: Tensor, positions: Tensor, counts: Tensor, ahead: Tensor, ahead_counts: Tensor
    ) -> tuple[Asked, Asked]:
        run = positions.shape[1]
        offset = torch.arange(run + ahead.shape[1], device=before.device)
        limits = torch.where(offset < run, counts[:, None], run + ahead_counts[:, None])
        sees = torch.where(offset < run, before[:, None] + offset, self.lengths[:, None]) + 1
        asked = self._ask(torch.cat((positions, ahead), 1), offset < limits, sees)
        of_run = asked.column < run
        return asked.part(of_run), asked.part(~of_run, -run)

    @torch.no_grad()
    def _ask(self, positions: Tensor, valid: Tensor, sees: Tensor) -> Asked:
        """Run the content not yet stored and a query slot for each valid question (R, K), which sees `sees` columns."""
        counts = valid.sum(1)
        place = (~valid).long().argsort(dim=1, stable=True)  # (R, K) the valid questions of a row in front
        pending = self.lengths + 1 - self.final  # (R,) content slots
        total = torch.where(counts > 0, pending + counts, 0)
        offset = torch.arange(int(total.max()) if len(total) else 0, device=total.device)
        row, column = (offset < total[:, None]).nonzero(as_tuple=True)
        if not len(row):
            nothing = self.model.token_embedding.weight.new_zeros(0, self.model.config.width)
            return Asked(nothing, row, column, self.model)
        index = (self.final[:, None] + offset).clamp(max=self.length)  # (R, Q) in the cache, of content slots
        asking = offset >= pending[:, None]
        question = place.gather(1, (offset - pending[:, None]).clamp(0, max(0, positions.shape[1] - 1)))  # (R, Q)
        before = (index - 1).clamp(min=0)
        content = self.tokens.gather(1, before)
        own = torch.where(index == 0, 0, self.positions.gather(1, before) + 1)
        own = torch.where(asking, positions.gather(1, question) + 1, own)
        below, itself = torch.where(asking, sees.gather(1, question), index), torch.where(asking, -1, index)
        sight = Sight(total, below, itself, self.length + 1)
        its = asking[row, column]
        hidden = self.model.slots(
            content[row, column][None],
            own[row, column][None],
            its[None],
            self._attention(sight, counts, row[~its], index[row, column][~its], ~its),
            its.nonzero()[:, 0],
        )[0]
        self.passes += 1
        self.tokens_forwarded += len(row)
        self.final = torch.where(total > 0, self.lengths + 1, self.final)
        return Asked(hidden, row[its], question[row, column][its], self.model)

    def _attention(
        self, sight: Sight, asked: Tensor, row: Tensor, place: Tensor, stored: Tensor
    ) -> Callable[[int], Attend]:
        """Say how packed slots attend: keys and values of the `stored` ones go to their place, then all read."""
        number_type = self.keys[0].dtype
        of_all, of_asked = sight.reader(number_type), sight.last(asked).reader(number_type)

        def attend(layer: int) -> Attend:
            keys, values = self.keys[layer], self.values[layer]
            read = of_asked if layer + 1 == len(self.keys) else of_all

            def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # each (1, H, P, d)
                store(keys, key[0][:, stored], row, place)
                store(values, value[0][:, stored], row, place)
                return read(query[0].to(keys.dtype), keys, values)[None]

            return mix

        return attend
