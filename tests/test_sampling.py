"""Sampling: golden rows, filters, schedules, how many passes, what each step yields, what is refused."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch

import anyorder as ao
from anyorder.models.inference import prepare_for_inference
from anyorder.sampling.filters import Filters, draw, parse_temperature
from anyorder.sampling.schedules import revealed
from anyorder.sampling.stepwise import progress_of
from tests.conftest import GOLDEN, INJECTIONS, small_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("schedule", "steps"), [*itertools.product(("linear", "cosine"), (16, 4, 1))])
def test_greedy_rows_are_those_of_the_published_implementation(schedule: str, steps: int) -> None:
    expected = torch.load(GOLDEN / "aogpt_expected.pt", weights_only=True)
    model, _ = ao.load(GOLDEN / "aogpt.pt")
    every: tuple[dict[str, Any], ...] = ({"top_p": 0.0}, {"temperature": 0.0}, {"top_k": 1})
    for how in every:
        out = ao.generate(model, 3, 16, expected["random_order"], steps=steps, schedule=schedule, **how)
        assert torch.equal(out.tokens, expected[f"greedy_{schedule}_{steps}"])
        assert out.forward_passes == steps


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("how", [{"steps": 5}, {"exact": True}, {"order": "margin"}, {"burst": 3}, {"steps": 3}])
@torch.no_grad()
def test_cached_log_probabilities_are_those_of_the_model(injection: str, how: dict[str, Any]) -> None:
    """Each token's log-probability again, uncached, from what was revealed before its step or place in the chain."""
    model = small_model(injection=injection)
    lengths = torch.tensor([16, 11, 14, 16])
    tokens = torch.randint(64, (4, 16), generator=seeded(1))
    blanks = torch.rand(4, 16, generator=seeded(2)) < torch.tensor([0.3, 0.6, 0.9, 1.0])[:, None]
    blanks &= torch.arange(16) < lengths[:, None]
    order = str(how.get("order", "random"))
    rest = {name: value for name, value in how.items() if name != "order"}
    out = ao.fill(model, tokens, blanks, order, lengths=lengths, generator=seeded(3), **rest)
    chained = "exact" in how or "burst" in how  # a step's tokens are a chain, not independent of each other
    worst, checked = 0.0, 0
    for row in range(4):
        known = int((~blanks[row, : lengths[row]]).sum())
        its_order = out.order[row, : lengths[row]]
        assert torch.equal(its_order[:known].sort().values, (~blanks[row, : lengths[row]]).nonzero()[:, 0])
        for place in range(known, int(lengths[row])):
            position = its_order[place]
            step = out.steps[row, position]
            seen = place if chained else known + int((out.steps[row, its_order[known:]] < step).sum())
            text = out.tokens[row : row + 1]
            logits = model(text, torch.cat((its_order[:seen], position[None]))[None])[0, -1]
            worst = max(
                worst, abs(float(logits.log_softmax(-1)[text[0, position]] - out.model_logprobs[row, position]))
            )
            checked += 1
    assert checked == int(blanks.sum())
    assert worst < 1e-5


@pytest.mark.parametrize("order", ["left_to_right", "random", "right_to_left"])
def test_speculation_is_never_slower_in_passes_than_one_token_a_time(order: str) -> None:
    model = small_model(scale=3.0)
    for seed, draft in itertools.product(range(6), (0, 1, 3, 8)):
        tokens = torch.randint(64, (5, 16), generator=seeded(seed))
        blanks = torch.rand(5, 16, generator=seeded(seed)) < 0.7
        most = int(blanks.sum(1).max())
        out = ao.fill(model, tokens, blanks, order, exact=True, draft=draft, generator=seeded(seed))
        assert out.forward_passes <= most
        assert torch.equal(out.tokens[~blanks], tokens[~blanks])
    cold = ao.fill(model, tokens, blanks, order, exact=True, temperature=0.0, generator=seeded())
    slow = ao.fill(model, tokens, blanks, order, temperature=0.0, generator=seeded())
    assert torch.equal(cold.tokens, slow.tokens)


def test_an_easy_law_is_written_in_few_passes() -> None:
    model = small_model(scale=0.01)  # every conditional is nearly the same: drafts hold
    out = ao.generate(model, 4, 16, exact=True, generator=seeded())
    assert out.forward_passes <= 6


def test_passes_and_slots_are_counted() -> None:
    model = small_model()
    out = ao.generate(model, 2, 16, "random", generator=seeded())
    assert (out.forward_passes, out.token_forwards) == (16, 32)  # a slot is computed once
    out = ao.generate(model, 2, 16, "random", steps=4, generator=seeded())
    # the first step asks 4 of nothing; each other step ends the 4 slots revealed before it, but for the one that its
    # own replica already is, and asks 4 replicas of the newest
    assert (out.forward_passes, out.token_forwards) == (4, 2 * (4 + 3 * (3 + 4)))
    tokens, blanks = torch.zeros(1, 16, dtype=torch.long), torch.arange(16)[None] >= 12
    out = ao.fill(model, tokens, blanks)
    assert (out.forward_passes, out.token_forwards) == (4, 16)  # the known text goes through with the first question


def test_steps_are_yielded_as_they_are_done() -> None:
    model = small_model()
    writing = ao.Writing(model, torch.zeros(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.bool))
    seen = 0
    for reveal in ao.write(writing, ao.Manner("random", steps=8)):
        seen += 1
        assert reveal.counts.tolist() == [2, 2]
        assert torch.equal(writing.tokens.gather(1, reveal.positions), reveal.tokens)
        assert int((writing.tokens >= 0).sum()) == 4 * seen
    assert seen == 8


def test_progress_goes_from_0_to_1_over_a_row() -> None:
    counts = torch.tensor([[1, 0], [0, 2], [3, 1], [0, 0], [1, 0]])
    found = torch.stack([progress_of(step, counts) for step in range(5)])
    assert found[:, 0].tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert found[:3, 1].tolist() == [0, 0.5, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_are_exact(schedule: str) -> None:
    """Against rational arithmetic; and where the published float32 formula is one short, ours is not."""
    for count, steps in itertools.product((1, 2, 3, 7, 16, 24, 100, 1024), (1, 2, 3, 4, 6, 9, 16, 24, 64, 1024)):
        if steps > count:
            continue
        found = revealed(schedule, count, steps)
        assert len(found) == steps
        assert found[-1] == count
        assert all(a < b for a, b in itertools.pairwise(found))
        for step, (before, after) in enumerate(itertools.pairwise([0, *found]), 1):
            share = Fraction(step, steps)
            if schedule == "linear":
                due = math.floor(count * share)
            else:  # cosines of these angles are rational
                exact = {Fraction(2, 3): Fraction(1, 2), Fraction(1): Fraction(1)}
                due = math.floor(count * exact.get(share, 1 - math.cos(share * math.pi / 2)))
            assert after == min(count, max(due, before + 1))
    assert revealed("linear", 24, 6) == [4, 8, 12, 16, 20, 24]
    assert revealed("cosine", 6, 3) == [1, 3, 6]


def test_filters() -> None:
    logprobs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for filters, expected in (
        (Filters(), [0.5, 0.3, 0.15, 0.05]),
        (Filters(top_p=0.6), [0.625, 0.375, 0, 0]),  # the token that crosses is kept
        (Filters(top_p=0.0), [1, 0, 0, 0]),
        (Filters(top_k=3), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Filters(min_p=0.5), [0.625, 0.375, 0, 0]),
        (Filters(temperature=0.0), [1, 0, 0, 0]),
        (Filters(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Filters(temperature=1e-40), [1, 0, 0, 0]),
        (Filters(0.5, top_p=0.7), [0.25 / 0.34, 0.09 / 0.34, 0, 0]),
    ):
        assert torch.allclose(filters.law(logprobs).exp(), torch.tensor([expected]).float(), atol=1e-6), filters
    random = torch.randn(50, 1000, generator=seeded())
    assert torch.equal(Filters(top_p=1.0).law(random), random.log_softmax(-1))  # top-p 1 changes nothing, not one bit
    kept = Filters(top_p=0.9).law(random) > -torch.inf
    chances = random.softmax(-1)
    held = (chances * kept).sum(-1)
    smallest = chances.masked_fill(~kept, 1).amin(-1)
    assert (held >= 0.9).all()
    assert (held - smallest < 0.9).all()
    ties = torch.zeros(1, 8)
    assert int((Filters(top_k=3).law(ties) > -torch.inf).sum()) == 3
    allowed = torch.tensor([[False, True, True, False]])
    assert torch.allclose(Filters(top_k=1).law(logprobs, allowed).exp(), torch.tensor([[0, 1.0, 0, 0]]))
    hot_to_cold = Filters(2.0, 0.0).law(logprobs.expand(3, 4), None, torch.tensor([0.0, 0.5, 1.0]))
    for row, temperature in enumerate((2.0, 1.0, 0.0)):
        assert torch.allclose(hot_to_cold[row], Filters(temperature).law(logprobs)[0])


def test_drawing_takes_only_what_has_probability() -> None:
    law = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.5]]).log()
    drawn = torch.stack([draw(law, seeded(seed)) for seed in range(200)])
    assert set(drawn[:, 0].tolist()) == {2}
    assert set(drawn[:, 1].tolist()) == {1, 3}


def test_padded_entries_are_never_written() -> None:
    model = small_model(entries=5, scale=0.1)
    every: tuple[dict[str, Any], ...] = ({}, {"steps": 3}, {"exact": True}, {"burst": 2}, {"order": "entropy"})
    for how in every:
        out = ao.generate(model, 200, 16, generator=seeded(), **how)
        assert set(out.tokens.unique().tolist()) == {0, 1, 2, 3, 4}


def test_an_adaptive_order_writes_the_surest_first_several_at_a_time() -> None:
    model = small_model()
    tokens, blanks = torch.zeros(1, 16, dtype=torch.long), torch.ones(1, 16, dtype=torch.bool)
    out = ao.fill(model, tokens, blanks, "probability", steps=4, temperature=0.0)
    with torch.no_grad():
        sure = torch.stack([model(tokens, torch.tensor([[p]]))[0, -1].softmax(-1).amax() for p in range(16)])
    assert out.order[0, :4].tolist() == sure.argsort(descending=True)[:4].tolist()
    near = ao.fill(model, tokens, blanks, "margin(3)", temperature=0.0)
    for place, position in enumerate(near.order[0].tolist()):
        blank = sorted(set(range(16)) - set(near.order[0, :place].tolist()))
        assert position in blank[:3]


def test_what_cannot_be_is_refused() -> None:
    model = small_model()
    tokens, blanks = torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.bool)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"steps": 0}, "steps is 0; accepted: 1 to 8"),
        ({"steps": 9}, "steps is 9; accepted: 1 to 8"),
        ({"schedule": "square", "steps": 2}, "unknown schedule"),
        ({"schedule": "cosine"}, "without steps"),
        ({"schedule": "cosine", "exact": True}, "without steps"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": (1.0, -1.0)}, "last temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p 2.0"),
        ({"draft": 2}, "it together with exact"),
        ({"exact": True, "steps": 2}, "accepted: one of them"),
        ({"exact": True, "steps": 2, "schedule": "cosine"}, "accepted: one of them"),
        ({"exact": True, "order": "margin"}, "depends on what is written"),
        ({"burst": 2, "order": "left_to_right"}, "accepted: random"),
        ({"order": "margin(0)"}, "window of 0"),
        ({"order": "sideways"}, "or where the model is surest: probability, margin, entropy"),
        ({"lengths": torch.tensor([4])}, "a blank at position 4 of row 0, a text of 4 tokens"),
        ({"lengths": torch.tensor([9])}, "accepted: one for each row, 1 to 8"),
        ({"allowed": torch.ones(3, dtype=torch.bool)}, "does not broadcast"),
    )
    for how, words in refused:
        with pytest.raises(ao.InputError) as error:
            ao.fill(model, tokens, blanks, **how)
        assert words in str(error.value)
    with pytest.raises(ao.InputError, match="batch is 0"):
        ao.generate(model, 0, 8)
    with pytest.raises(ao.InputError, match="accepted: 1 to 16"):
        ao.generate(model, 1, 17)
    one_order = small_model(injection="none")
    with pytest.raises(ao.InputError, match="left to right only"):
        ao.generate(one_order, 1, 8, "random", generator=seeded())
    beyond: tuple[dict[str, Any], ...] = ({"steps": 2}, {"order": "margin"})
    for how in beyond:
        with pytest.raises(ao.InputError, match="left to right only"):  # its newest slot knows one question
            ao.generate(one_order, 1, 8, **{"order": "left_to_right", "generator": seeded(), **how})
    none = torch.zeros(0, 8, dtype=torch.long)
    with pytest.raises(ao.InputError, match="at least one text"):
        ao.fill(model, none, none.bool())
    out = ao.generate(one_order, 2, 8, "left_to_right", exact=True, generator=seeded())
    assert out.order.tolist() == [list(range(8))] * 2
    for text in ("x", "1..", "..1"):
        with pytest.raises(ao.InputError, match="accepted: a number, or two"):
            parse_temperature(text)


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.2)])
def test_a_model_prepared_to_write_is_the_same_model(injection: str, precision: Any, tolerance: float) -> None:
    """Packed weights, mirrored norms and tables, against the plain model along the same order."""
    plain = small_model(injection=injection, scale=3.0)
    ready = prepare_for_inference(small_model(injection=injection, scale=3.0), precision)
    order = torch.rand(3, 16, generator=seeded(1)).argsort(1)
    for how in ({}, {"steps": 4}):
        ours = ao.generate(ready, 3, 16, order, generator=seeded(), **how)
        if how:
            assert ours.forward_passes == 4
            continue
        with torch.no_grad():
            nats = ao.order_nll(plain, ours.tokens, order)
        again = torch.zeros(3, 16).scatter(1, order, -nats)
        assert float((again - ours.model_logprobs).abs().max()) < tolerance
