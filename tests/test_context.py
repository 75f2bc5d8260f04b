"""The cache: what it answers is what the model computes from nothing, however the context came about."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anyorder as ao
from anyorder.models.context import Context
from anyorder.models.encoder import Encoder
from anyorder.models.families import open_context
from anyorder.models.model import LanguageModel
from tests.conftest import MODELS, small_model

ROWS, LENGTH = 5, 16


def uncached(model: LanguageModel, context: Context, position: Tensor) -> Tensor:
    """Log-probabilities of what is asked of each row, from one whole pass a row: position (R, K) -> (R, K, V)."""
    rows = []
    for row, asked in enumerate(position.tolist()):
        known = int(context.lengths[row])
        revealed = context.positions[row, :known]
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        tokens[0, revealed] = context.tokens[row, :known]
        if isinstance(model, Encoder):
            visible = torch.zeros(1, LENGTH, dtype=torch.bool).index_fill(1, revealed, True)
            rows.append(model(tokens, visible)[0, asked])
            continue
        rows.append(torch.stack([model(tokens, torch.cat((revealed, torch.tensor([p])))[None])[0, -1] for p in asked]))
    return torch.stack(rows).log_softmax(-1)


def open_positions(context: Context, count: int, generator: torch.Generator) -> Tensor:
    """Draw positions that are not revealed: (R, count)."""
    rows = []
    for row in range(ROWS):
        revealed = set(context.positions[row, : int(context.lengths[row])].tolist())
        left = torch.tensor([p for p in range(LENGTH) if p not in revealed])
        rows.append(left[torch.randperm(len(left), generator=generator)[:count]])
    return torch.stack(rows)


@pytest.mark.parametrize("changes", MODELS, ids=str)
@torch.no_grad()
def test_cached_equals_uncached_through_ragged_reveals_questions_and_rollbacks(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    generator = torch.Generator().manual_seed(0)
    context = open_context(model, ROWS, LENGTH)
    worst, questions = 0.0, 0
    for _ in range(40):
        room = LENGTH - int(context.lengths.max())
        action = int(torch.randint(4, (1,), generator=generator))
        if action == 0 or room < 5:
            context.rollback((torch.rand(ROWS, generator=generator) * (context.lengths + 1)).long())
            continue
        asked = open_positions(context, int(torch.randint(1, 4, (1,), generator=generator)), generator)
        expected = uncached(model, context, asked)
        worst = max(worst, float((context.marginals(asked).log_softmax(-1) - expected).abs().max()))
        tokens = torch.randint(64, asked.shape, generator=generator)
        scored = context.score(asked, tokens)
        worst = max(worst, float((scored - expected.gather(2, tokens[..., None])[..., 0]).abs().max()))
        questions += asked.numel()
        if action == 1:  # reveal one that was asked for, not always the first: its replica becomes the slot
            chosen = torch.randint(asked.shape[1], (ROWS, 1), generator=generator)
            context.reveal(asked.gather(1, chosen), tokens[:, :1])
        elif action == 2:  # reveal another number in each row, none in some
            counts = torch.randint(asked.shape[1] + 1, (ROWS,), generator=generator)
            context.reveal(asked, tokens, counts)
    assert questions > 100
    assert worst < 1e-5


@pytest.mark.parametrize("changes", MODELS, ids=str)
@torch.no_grad()
def test_a_chain_scores_what_is_asked_one_by_one_and_looks_ahead(changes: dict[str, Any]) -> None:
    """Ragged runs, with and without questions behind them, against one question at a time."""
    model = small_model(**changes)
    generator = torch.Generator().manual_seed(2)
    context = open_context(model, ROWS, LENGTH)
    slow = open_context(model, ROWS, LENGTH)
    for counts, ahead_counts in (((3, 0, 2, 1, 4), (2, 1, 0, 3, 1)), ((0, 2, 1, 3, 1), (1, 0, 3, 2, 0))):
        positions = open_positions(context, 7, generator)
        run, ahead = positions[:, :4], positions[:, 4:]
        tokens = torch.randint(64, run.shape, generator=generator)
        of_run, of_ahead = context.chain(run, tokens, torch.tensor(counts), ahead, torch.tensor(ahead_counts))
        found = of_run.table(run.shape).log_softmax(-1)
        for column in range(4):
            one = (torch.tensor(counts) > column).long()
            expected = uncached(model, slow, run[:, column : column + 1])[:, 0]
            active = one.bool()
            assert torch.allclose(found[active, column], expected[active], atol=1e-5)
            slow.reveal(run[:, column : column + 1], tokens[:, column : column + 1], one)
        expected = uncached(model, slow, ahead)
        looked = of_ahead.table(ahead.shape).log_softmax(-1)
        for row, count in enumerate(ahead_counts):
            assert torch.allclose(looked[row, :count], expected[row, :count], atol=1e-5)
        assert torch.equal(context.lengths, slow.lengths)


@torch.no_grad()
def test_ragged_questions_are_answered_where_they_are_asked() -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(1)
    context = open_context(model, ROWS, LENGTH)
    context.reveal(open_positions(context, 6, generator), torch.randint(64, (ROWS, 6), generator=generator))
    asked, counts = open_positions(context, 4, generator), torch.tensor([4, 0, 1, 3, 2])
    logits = context.marginals(asked, counts)
    expected = uncached(model, context, asked)
    for row, count in enumerate(counts.tolist()):
        assert torch.allclose(logits[row, :count].log_softmax(-1), expected[row, :count], atol=1e-5)
        assert not logits[row, count:].any()


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_asking_nothing_is_answered_by_nothing(changes: dict[str, Any]) -> None:
    context = open_context(small_model(**changes), 2, LENGTH)
    place = torch.tensor([[3], [5]])
    context.reveal(place, torch.zeros(2, 1, dtype=torch.long))
    nothing = torch.zeros(2, dtype=torch.long)
    assert not context.marginals(place + 1, nothing).any()
    expected = uncached(context.model, context, place + 1)
    assert torch.allclose(context.marginals(place + 1).log_softmax(-1), expected, atol=1e-5)


@torch.no_grad()
def test_only_what_is_new_is_computed() -> None:
    """The lazy newest slot: a step computes the slot of the last token with its question, and nothing twice."""
    model = small_model()
    context = open_context(model, 2, LENGTH)
    order = torch.stack([torch.randperm(LENGTH, generator=torch.Generator().manual_seed(s)) for s in range(2)])
    for step in range(LENGTH):
        context.marginals(order[:, step : step + 1])
        context.reveal(order[:, step : step + 1], torch.zeros(2, 1, dtype=torch.long))
    assert context.passes == LENGTH
    assert context.tokens_forwarded == 2 * LENGTH  # one slot a step and row


@torch.no_grad()
def test_a_left_to_right_model_refuses_other_questions() -> None:
    model = small_model(injection="none")
    context = open_context(model, 1, LENGTH)
    context.marginals(torch.tensor([[0]]))
    context.reveal(torch.tensor([[0]]), torch.tensor([[5]]))
    with pytest.raises(ao.InputError, match="left to right only"):
        context.marginals(torch.tensor([[3]]))


def test_more_than_the_text_holds_is_refused() -> None:
    with pytest.raises(ao.InputError, match="accepted: 1 to 16"):
        open_context(small_model(), 1, 17)
    context = open_context(small_model(), 1, 4)
    context.reveal(torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ao.InputError, match="more than the 4 positions"):
        context.reveal(torch.tensor([[0]]), torch.tensor([[0]]))
    with pytest.raises(ao.InputError, match="leave open"):
        context.marginals(torch.tensor([[0]]))
