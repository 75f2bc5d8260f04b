"""Several tokens a pass along an order: drafted each on its own, verified together, exactly the model's own law.

Every pass verifies the drafts there are, as a chain along the order, and drafts what comes behind them. Row by row the
first draft that fails is replaced by a draw from what its law has more than the draft's: that makes the law exact,
wherever the drafts came from. So those behind it stay, and no pass writes less than one token.
Burst sampling tries several orders for the same drafts and keeps the luckiest, which is not exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.models.context import Asked
from anyorder.sampling.filters import draw, gather, uniform
from anyorder.sampling.writing import Reveal, Writing

MOST = 16  # drafts of a row, where their number adapts
HOPE = 0.2  # a draft is worth its slot as long as it is likelier than this to be reached and accepted


@dataclass(frozen=True)
class _Run:
    """Tokens at positions (B, n), of row r the first counts[r], each with a law and the model's conditional."""

    positions: Tensor  # (B, n)
    tokens: Tensor  # (B, n)
    laws: Tensor  # (B, n, E) log-probabilities
    own: Tensor  # (B, n, V)
    counts: Tensor  # (B,)

    def take(self, first: Tensor, counts: Tensor) -> "_Run":
        """Keep counts[r] entries of row r, from first[r] on."""
        column = first[:, None] + torch.arange(int(counts.max()), device=first.device)
        return self.pick(column.clamp(max=max(0, self.tokens.shape[1] - 1)), counts)

    def followed_by(self, other: "_Run") -> "_Run":
        """Append another run to this one, row by row."""
        width, more = self.tokens.shape[1], other.tokens.shape[1]
        column = torch.arange(width + more, device=self.counts.device).expand(len(self.counts), -1)
        gap = width - self.counts[:, None]  # between a row's own entries and the others
        column = torch.where(column < self.counts[:, None], column, column + gap).clamp(max=max(0, width + more - 1))
        joined = _Run(
            torch.cat((self.positions, other.positions), 1),
            torch.cat((self.tokens, other.tokens), 1),
            torch.cat((self.laws, other.laws), 1),
            torch.cat((self.own, other.own), 1),
            self.counts,
        )
        return joined.pick(column, self.counts + other.counts)

    def pick(self, column: Tensor, counts: Tensor) -> "_Run":
        """Take entries column (B, k) of each row, of which counts[r] count."""
        laws, own = (part.gather(1, column[..., None].expand(-1, -1, part.shape[-1])) for part in (self.laws, self.own))
        return _Run(self.positions.gather(1, column), self.tokens.gather(1, column), laws, own, counts)

    def of_rows(self, rows: Tensor) -> "_Run":
        return _Run(self.positions[rows], self.tokens[rows], self.laws[rows], self.own[rows], self.counts[rows])


class _Pace:
    """How many tokens to draft in each row: as many as HOPE allows at the row's rate of acceptance."""

    def __init__(self, rows: Tensor, draft: int):
        self.fixed = torch.full_like(rows, draft) if draft else None
        self.seen = torch.full_like(rows, 2, dtype=torch.float)  # as if one of two had been accepted
        self.held = torch.ones_like(self.seen)

    def saw(self, accepted: Tensor, failed: Tensor) -> None:
        self.held = self.held + accepted
        self.seen = self.seen + accepted + failed

    def wanted(self) -> Tensor:
        if self.fixed is not None:
            return self.fixed
        rate = self.held / self.seen
        return (math.log(HOPE) / rate.clamp(max=0.999).log()).long().clamp(1, MOST)


def speculative(writing: Writing, order: Tensor, draft: int = 0) -> Iterator[Reveal]:
    """Write the blanks along order (B, T), what is known first; `draft` tokens ahead, or 0 to adapt their number."""
    context = writing.context
    pace = _Pace(writing.total, draft)
    drafts = _nothing(writing)
    while bool((left := writing.remaining()).any()):
        before = context.lengths
        # one more than are to be drafted: where all drafts hold, the first is drawn from its very law
        counts = torch.minimum(left - drafts.counts, pace.wanted() + 1)
        ahead = writing.next(order, int(counts.max()), drafts.counts)
        of_drafts, of_ahead = context.chain(drafts.positions, drafts.tokens, drafts.counts, ahead, counts)
        true = _read(writing, of_drafts, drafts.positions, drafts.counts, drafts, verified=True)
        new = _read(writing, of_ahead, ahead, counts, drafts, verified=False)
        accepted = _accepted(drafts, true, writing.generator)
        pace.saw(accepted, accepted < drafts.counts)
        yield _settle(writing, before, drafts, true, new, accepted)
        drafts = drafts.followed_by(new)
        drafts = drafts.take(accepted + 1, torch.minimum(drafts.counts - accepted - 1, pace.wanted()).clamp(0))


def burst(writing: Writing, tries: int) -> Iterator[Reveal]:
    """Draft all blanks at once, verify the drafts along `tries` random orders, keep the order that holds longest.

    Two passes a step. Approximate: an order chosen for how well its drafts did favours lucky drafts.
    """
    while bool((left := writing.remaining()).any()):
        nothing, before = _nothing(writing), writing.context.lengths
        blanks = writing.open_first()[:, : int(left.max())]  # (B, n)
        drafts = _read(writing, writing.context.ask(blanks, left), blanks, left, nothing, verified=False)
        rows = torch.arange(len(left), device=left.device)
        of_try = rows.repeat_interleave(tries)
        key = uniform((len(of_try), blanks.shape[1]), writing.generator, left.device)
        shuffle = (key + (torch.arange(blanks.shape[1], device=left.device) >= left[of_try, None])).argsort(1)
        tried = drafts.of_rows(of_try).pick(shuffle, left[of_try])
        several = writing.fork(of_try)
        of_drafts, _ = several.context.chain(tried.positions, tried.tokens, tried.counts)
        true = _read(several, of_drafts, tried.positions, tried.counts, tried, verified=True)
        accepted = _accepted(tried, true, writing.generator)
        best = rows * tries + accepted.view(-1, tries).argmax(1)
        writing.context = several.context.fork(best)
        yield _settle(writing, before, tried.of_rows(best), true.of_rows(best), nothing, accepted[best])


def _settle(writing: Writing, before: Tensor, drafts: _Run, true: _Run, new: _Run, accepted: Tensor) -> Reveal:
    """Write what was accepted and one token more: for the draft that failed, or, where none did, the first new one."""
    everything, truth = drafts.followed_by(new), true.followed_by(new)
    failed = accepted < drafts.counts
    more = accepted < everything.counts
    tokens = everything.tokens.clone()
    tokens[failed, accepted[failed]] = _replacement(drafts, true, accepted, failed, writing.generator)
    writing.context.rollback(before + accepted)
    newest = torch.minimum(accepted, everything.counts - 1).clamp(min=0)[:, None]
    writing.context.reveal(everything.positions.gather(1, newest), tokens.gather(1, newest), more.long())
    logprobs, own = gather(truth.laws, tokens), gather(truth.own, tokens)
    return writing.record(Reveal(everything.positions, tokens, logprobs, own, accepted + more))


def _nothing(writing: Writing) -> _Run:
    none = writing.tokens[:, :0]
    laws, own = (none[..., None].expand(-1, -1, size).float() for size in (writing.entries, writing.vocabulary))
    return _Run(none, none, laws, own, torch.zeros_like(writing.total))


def _read(writing: Writing, asked: Asked, positions: Tensor, counts: Tensor, drafts: _Run, verified: bool) -> _Run:
    """Gather the laws of questions at positions (B, n): of the drafts themselves, or behind them with tokens drawn."""
    column = torch.arange(positions.shape[1], device=positions.device).expand(positions.shape)
    known = column if verified else drafts.counts[:, None].expand(positions.shape)  # drafts that each question sees
    done = writing.total - writing.remaining()
    place = done[:, None] + column + (0 if verified else drafts.counts[:, None])
    progress = (place / (writing.total[:, None] - 1).clamp(min=1)).clamp(max=1.0)
    tokens = drafts.tokens if verified else torch.zeros_like(positions)
    # a draft that is asked for again with nothing before it keeps its law: the context does not answer twice
    laws, own = (
        part.clone() if verified else torch.zeros(*positions.shape, part.shape[-1], device=positions.device)
        for part in (drafts.laws, drafts.own)
    )
    for part in writing.laws(asked, positions, progress, (drafts.positions, drafts.tokens, known)):
        where = part.row, part.column
        laws[where], own[where] = part.law, part.own
        if not verified:
            tokens[where] = draw(part.law, writing.generator)
    return _Run(positions, tokens, laws, own, counts)


def _accepted(drafts: _Run, true: _Run, generator: torch.Generator | None) -> Tensor:
    """Count the drafts of each row up to the first that fails: each holds with probability min(1, p / q): (B,)."""
    if not drafts.tokens.shape[1]:
        return torch.zeros_like(drafts.counts)
    chance = uniform(drafts.tokens.shape, generator, drafts.tokens.device)
    ratio = gather(true.laws, drafts.tokens) - gather(drafts.laws, drafts.tokens)  # (B, n)
    column = torch.arange(chance.shape[1], device=chance.device)
    holds = (chance.log() < ratio) & (column < drafts.counts[:, None])
    return holds.long().cumprod(1).sum(1)


def _replacement(
    drafts: _Run, true: _Run, accepted: Tensor, failed: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw from the normalised (p - q)+ in each row that failed: (F,)."""
    row, column = failed.nonzero()[:, 0], accepted[failed]
    p, q = true.laws[row, column], drafts.laws[row, column]  # (F, E)
    rest = (p.double().exp() - q.double().exp()).clamp(min=0)
    # p and q may agree to the last digit: then nothing fails but by rounding, and p itself is as good
    return draw(torch.where(rest.sum(-1, keepdim=True) > 0, rest.log(), p.double()), generator)
