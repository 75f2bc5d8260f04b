"""The laws of samplers, on a vocabulary of 3 and 4 positions: chi-squared against the enumerated law."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyorder as ao
from anyorder.sampling.filters import Filters
from anyorder.sampling.stepwise import MEASURES
from tests.conftest import small_model

COUNT = 24_000
ORDER = torch.tensor([[2, 0, 3, 1]])
TEXTS = torch.tensor(list(itertools.product(range(3), repeat=4)))  # (81, 4)
MODEL = small_model(positions=4, vocabulary=3, scale=7.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def law_along(order: Tensor, filters: Filters, known: dict[int, int] | None = None) -> Tensor:
    """Enumerate the probability of each of TEXTS, what is known given, the rest along `order` (1, 4): (81,)."""
    known = known or {}
    whole = torch.tensor([[*sorted(known), *(p for p in order[0].tolist() if p not in known)]])
    logits = MODEL(TEXTS, whole.expand(81, 4))  # (81, 4, V)
    blanks = 4 - len(known)
    progress = ((torch.arange(4) - len(known)) / max(1, blanks - 1)).expand(81, 4)
    law = filters.law(logits.log_softmax(-1), None, progress)
    steps = law.gather(2, TEXTS.gather(1, whole.expand(81, 4))[..., None])[..., 0]  # (81, 4)
    fits = torch.stack([TEXTS[:, p] == token for p, token in known.items()]).all(0) if known else torch.ones(81)
    return steps[:, len(known) :].double().sum(1).exp() * fits


def misfit(tokens: Tensor, law: Tensor) -> float:
    """Say by how many standard deviations chi-squared exceeds its mean; texts that are rare count together."""
    index = (tokens * torch.tensor([27, 9, 3, 1])).sum(1)
    counts = torch.bincount(index, minlength=81).double()
    assert law.sum() == pytest.approx(1, abs=1e-5)
    assert not counts[law == 0].any(), "a text came that cannot"
    expected = law * len(tokens)
    common = expected >= 5
    seen, due = counts[common], expected[common]
    if expected[~common].sum() > 0:
        seen = torch.cat((seen, counts[~common].sum()[None]))
        due = torch.cat((due, expected[~common].sum()[None]))
    freedom = len(due) - 1
    return float((((seen - due) ** 2 / due).sum() - freedom) / (2 * freedom) ** 0.5)


FILTERS = {"as it is": Filters(), "filtered": Filters(0.8, top_p=0.85), "annealed": Filters(1.3, 0.6, min_p=0.1)}


def ways(filters: Filters) -> dict[str, Any]:
    last = filters.last_temperature
    temperature = filters.temperature if last is None else (filters.temperature, last)
    return {"temperature": temperature, "top_p": filters.top_p, "min_p": filters.min_p}


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("way", ["sequential", "exact", "exact 1", "exact 2", "exact 3", "exact 4"])
def test_generation_has_the_enumerated_law(way: str, filtered: str) -> None:
    filters = FILTERS[filtered]
    exact, _, draft = way.partition(" ")
    how: dict[str, Any] = {"exact": exact == "exact", "draft": int(draft or 0), **ways(filters)}
    out = ao.generate(MODEL, COUNT, 4, ORDER.expand(COUNT, 4), generator=seeded(), **how)
    assert misfit(out.tokens, law_along(ORDER, filters)) < 4
    if exact == "exact" and filtered == "as it is":
        assert len(set(out.steps.amax(1).tolist())) > 1  # rows of a batch accepted different numbers


@pytest.mark.parametrize("how", [{}, {"exact": True}, {"exact": True, "draft": 2, "top_p": 0.9}])
def test_infilling_has_the_enumerated_law_with_rows_of_several_patterns(how: dict[str, Any]) -> None:
    patterns: tuple[dict[int, int], ...] = ({1: 2}, {0: 1, 3: 0}, {})
    tokens, blanks = torch.zeros(COUNT, 4, dtype=torch.long), torch.ones(COUNT, 4, dtype=torch.bool)
    for number, known in enumerate(patterns):
        for position, token in known.items():
            tokens[number::3, position], blanks[number::3, position] = token, False
    out = ao.fill(MODEL, tokens, blanks, ORDER.expand(COUNT, 4), generator=seeded(1), **how)
    filters = Filters(top_p=float(str(how.get("top_p", 1.0))))
    for number, known in enumerate(patterns):
        assert misfit(out.tokens[number::3], law_along(ORDER, filters, known)) < 4


def test_several_orders_and_choices_have_the_enumerated_law() -> None:
    """Half of the rows in another order; every third row's first two positions hold (0, 1), (2, 1) or (1, 0)."""
    orders = ORDER.repeat(COUNT, 1)
    orders[::2] = torch.tensor([3, 1, 2, 0])
    options = torch.tensor([[0, 1], [2, 1], [1, 0]])
    few = 3000
    choices = [ao.Choice(row, (0, 1), options) for row in range(0, few, 3)]
    for exact in (False, True):
        tokens, blanks = torch.zeros(few, 4, dtype=torch.long), torch.ones(few, 4, dtype=torch.bool)
        chosen = ao.fill(MODEL, tokens, blanks, orders[:few], exact=exact, choices=choices, generator=seeded())
        assert {tuple(row) for row in chosen.tokens[::3, :2].tolist()} == {(0, 1), (2, 1), (1, 0)}
        out = ao.generate(MODEL, COUNT, 4, orders, exact=exact, generator=seeded())
        for start in (0, 1):
            assert misfit(out.tokens[start::2], law_along(orders[start : start + 1], Filters())) < 4


def test_choices_have_the_enumerated_law() -> None:
    options = torch.tensor([[0, 1], [2, 1], [1, 0]])
    few, row = 20_000, 500
    allowed = {tuple(option) for option in options.tolist()}
    with torch.no_grad():
        logits = MODEL(TEXTS, ORDER.expand(81, 4)).log_softmax(-1)
    law = torch.zeros(81, dtype=torch.float64)
    for number, text in enumerate(TEXTS.tolist()):
        if (text[2], text[0]) not in allowed:
            continue
        first = torch.full((3,), -torch.inf)
        first[options[:, 0]] = 0.0
        second = torch.full((3,), -torch.inf)
        second[[b for a, b in allowed if a == text[2]]] = 0.0
        steps = [logits[number, 0] + first, logits[number, 1] + second, logits[number, 2], logits[number, 3]]
        law[number] = sum(float(s.log_softmax(-1)[text[p]]) for s, p in zip(steps, (2, 0, 3, 1), strict=True))
        law[number] = law[number].exp()
    for exact in (False, True):
        found = []
        generator = seeded()
        for _ in range(few // row):
            tokens, blanks = torch.zeros(row, 4, dtype=torch.long), torch.ones(row, 4, dtype=torch.bool)
            choices = [ao.Choice(r, (2, 0), options) for r in range(row)]
            its = ao.fill(
                MODEL, tokens, blanks, ORDER.expand(row, 4), exact=exact, choices=choices, generator=generator
            )
            found.append(its.tokens)
        assert misfit(torch.cat(found), law) < 4


@pytest.mark.parametrize("measure", MEASURES)
def test_adaptive_orders_have_the_enumerated_law(measure: str) -> None:
    """At each step the surest blank by the uncached model; a window of 2 looks at the first two blanks."""
    for window in (0, 2):

        def surest(known: dict[int, int], window: int = window) -> tuple[int, Tensor]:
            tokens = torch.zeros(1, 4, dtype=torch.long)
            for position, token in known.items():
                tokens[0, position] = token
            left = [p for p in range(4) if p not in known][: window or 4]
            laws = [MODEL(tokens, torch.tensor([[*known, p]]))[0, -1].log_softmax(-1) for p in left]
            best = int(torch.stack([MEASURES[measure](law[None])[0] for law in laws]).argmax())
            return left[best], laws[best].double().exp()

        law = torch.zeros(81, dtype=torch.float64)

        def spread(known: dict[int, int], share: float, law: Tensor = law) -> None:
            if len(known) == 4:
                law[sum(known[p] * 3 ** (3 - p) for p in range(4))] += share
                return
            position, chances = surest(known)
            for token in range(3):
                spread({**known, position: token}, share * float(chances[token]))

        with torch.no_grad():
            spread({}, 1.0)
        order = f"{measure}({window})" if window else measure
        out = ao.generate(MODEL, COUNT, 4, order, generator=seeded(2))
        assert misfit(out.tokens, law) < 4


@pytest.mark.parametrize(
    "way",
    [
        lambda: ao.generate(MODEL, COUNT, 4, ORDER.expand(COUNT, 4), steps=2, generator=seeded()),
        lambda: ao.generate(MODEL, COUNT, 4, "random", burst=4, generator=seeded()),
    ],
    ids=["two steps for four positions", "burst"],
)
def test_the_test_tells_approximate_samplers_apart(way: Callable[[], ao.Written]) -> None:
    out = way()
    if out.order[0].tolist() == ORDER[0].tolist() == out.order[1].tolist():
        law = law_along(ORDER, Filters())
    else:  # random orders: the mean law over all of them
        every = [law_along(torch.tensor([order]), Filters()) for order in itertools.permutations(range(4))]
        law = torch.stack(every).mean(0)
        fair = ao.generate(MODEL, COUNT, 4, "random", generator=seeded())
        assert misfit(fair.tokens, law) < 4
    assert misfit(out.tokens, law) > 10


@pytest.mark.parametrize("family", ["encoder", "two_stream", "sedd"])
@torch.no_grad()
def test_other_families_have_their_enumerated_law(family: str) -> None:
    """One token a time in a random order, which of an encoder is first-hitting; along one order; and speculation."""
    model = small_model(family=family, positions=4, vocabulary=3, scale=7.0)

    def law_of(order: tuple[int, ...]) -> Tensor:
        logits = model.along(TEXTS, torch.tensor([order]).expand(81, 4)).log_softmax(-1)
        return logits.gather(2, TEXTS[:, list(order)][..., None])[..., 0].double().sum(1).exp()

    every = torch.stack([law_of(order) for order in itertools.permutations(range(4))]).mean(0)
    assert misfit(ao.generate(model, COUNT, 4, "random", generator=seeded()).tokens, every) < 4
    along = law_of((2, 0, 3, 1))
    for exact in (False, True) if family == "two_stream" else (False,):
        out = ao.generate(model, COUNT, 4, ORDER.expand(COUNT, 4), exact=exact, generator=seeded())
        assert misfit(out.tokens, along) < 4
    if family == "encoder":  # ancestral, in so many steps that two tokens rarely fall into one
        out = ao.generate(model, COUNT, 4, "random", steps=400, schedule="ancestral", generator=seeded())
        assert misfit(out.tokens, every) < 4
        few = ao.generate(model, COUNT, 4, "random", steps=2, schedule="ancestral", generator=seeded())
        assert misfit(few.tokens, every) > 10


@torch.no_grad()
def test_ancestral_sampling_asks_nothing_when_nothing_changes() -> None:
    model = small_model(family="encoder", positions=4, vocabulary=3)
    out = ao.generate(model, 1, 4, "random", steps=100_000, schedule="ancestral", generator=seeded())
    assert out.forward_passes <= 4
