"""Every estimator against the value by enumeration: 4 positions, a vocabulary of 3, an untrained model."""

import itertools
import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

import anyorder as ao
from anyorder import orders
from anyorder.evaluation.ensemble import (
    context_members,
    draw_contexts,
    draw_places,
    insert,
    mean_probability,
    prefix_members,
)
from anyorder.evaluation.figures import AlongOrders, Ensemble, Figure, PaperEnsemble, masked_bound, score
from anyorder.models.model import LanguageModel
from tests.conftest import small_model

N, V = 4, 3
TOKENS = torch.tensor([[2, 0, 1, 2]])
PERMUTATIONS = torch.tensor(list(itertools.permutations(range(N))))
Sets = list[tuple[tuple[int, ...], int]]


def model_of(injection: str = "rotary") -> LanguageModel:
    return small_model(scale=12.0, positions=N, vocabulary=V, injection=injection)


@cache
def logprob_of(injection: str, context: tuple[int, ...], target: int) -> float:
    """log p(x[target] | context in this order), each from a pass of its own."""
    with torch.no_grad():
        return -float(ao.order_nll(model_of(injection), TOKENS, torch.tensor([[*context, target]]))[0, -1])


def ensemble_by_enumeration(injection: str, members: int) -> float:
    """Sum over steps of the mean over sets, targets, and tuples of shuffles of the set, of -log of the mean."""
    total = 0.0
    for size in range(N):
        values = []
        for context in itertools.combinations(range(N), size):
            shuffles = list(itertools.permutations(context))
            for target in sorted(set(range(N)) - set(context)):
                p = [math.exp(logprob_of(injection, shuffle, target)) for shuffle in shuffles]
                values += [-math.log(sum(chosen) / members) for chosen in itertools.product(p, repeat=members)]
        total += sum(values) / len(values)
    return total


def mixture_by_enumeration(injection: str, repeats: int) -> float:
    p = [
        math.exp(sum(logprob_of(injection, tuple(order[:i]), order[i]) for i in range(N)))
        for order in PERMUTATIONS.tolist()
    ]
    values = [-math.log(sum(chosen) / repeats) for chosen in itertools.product(p, repeat=repeats)]
    return sum(values) / len(values)


def expected(figure: Figure, injection: str) -> list[float]:
    match figure:
        case AlongOrders(repeats=1):
            return [ensemble_by_enumeration(injection, 1)]
        case AlongOrders(repeats=repeats):
            return [ensemble_by_enumeration(injection, 1), mixture_by_enumeration(injection, repeats)]
        case Ensemble(members=members) | PaperEnsemble(members=members):
            return [ensemble_by_enumeration(injection, size) for size in (1, 2, 3)[:members]]
    raise AssertionError(figure)


@pytest.mark.parametrize("injection", ["rotary", "adaln"])
@pytest.mark.parametrize(
    "figure",
    [
        AlongOrders("any order", orders.Random()),
        AlongOrders("any order", orders.Random(), 2),
        masked_bound(2),
        masked_bound(3),
        Ensemble(3, 1),
        Ensemble(3, 4),
        PaperEnsemble(3),
    ],
    ids=str,
)
def test_expectation_equals_the_value_by_enumeration(figure: Figure, injection: str) -> None:
    count = 4000
    numbers = list(range(count))
    (found,) = [nats for _, nats in score(figure, model_of(injection), iter([(numbers, TOKENS.repeat(count, 1))]), 7)]
    wanted = torch.tensor(expected(figure, injection), dtype=torch.float64)
    assert found.shape == (count, len(figure.columns)) == (count, len(wanted))
    error = found.std(0) / math.sqrt(count)
    assert ((found.mean(0) - wanted).abs() < 4 * error).all()
    assert (error < 0.1).all()  # of figures near 6 to 12


@torch.no_grad()
def test_paper_mode_is_exact_over_all_orders_and_all_places() -> None:
    """Every order with every sequence of insertions, each as likely as any other: the expectation without chance."""
    places = torch.tensor(list(itertools.product(*(range(i + 1) for i in range(N)))))  # (24, N)
    assert len(places) == 24
    rows = PERMUTATIONS.repeat_interleave(24, 0)
    members = places.repeat(24, 1)[:, None]
    tokens = TOKENS.expand(len(rows), N)
    model = model_of()
    first = -ao.order_nll(model, tokens, rows)[:, None]
    both = torch.cat((first, prefix_members(model, tokens, rows, members)), 1)
    found = -mean_probability(both, (1, 2), 1).sum(-1).mean(-1)
    assert found.tolist() == pytest.approx([ensemble_by_enumeration("rotary", size) for size in (1, 2)], abs=1e-5)


@torch.no_grad()
def test_fast_mode_is_exact_over_all_contexts() -> None:
    """Every size, every pair of orders of the same first positions."""
    model = model_of()
    total = torch.zeros(2, dtype=torch.float64)
    for size in range(N):
        pairs = [(a, b) for a, b in itertools.product(PERMUTATIONS.tolist(), repeat=2) if a[size:] == b[size:]]
        shuffled = torch.tensor(pairs)[:, None]  # (P, 1, 2, N)
        assert all(set(a[:size]) == set(b[:size]) for a, b in pairs)
        sizes = torch.full((len(pairs), 1), size)
        logprobs = context_members(model, TOKENS.expand(len(pairs), N), sizes, shuffled)
        total += -mean_probability(logprobs, (1, 2), 2).sum(-1).mean((1, 2)) / (N - size)
    assert total.tolist() == pytest.approx([ensemble_by_enumeration("rotary", size) for size in (1, 2)], abs=1e-5)


def test_insertion_at_uniform_places_makes_every_permutation_equally_likely() -> None:
    made = set()
    for places in itertools.product(*(range(i + 1) for i in range(N))):
        permutation = torch.empty(1, 0, dtype=torch.long)
        for step, place in enumerate(places):
            permutation = insert(permutation, torch.tensor([place]), torch.tensor([step]))
        made.add(tuple(permutation[0].tolist()))
    assert len(made) == 24
    drawn = draw_places(30000, N, torch.Generator().manual_seed(0))
    for step in range(N):
        counts = torch.bincount(drawn[:, step], minlength=step + 1).double()
        assert len(counts) == step + 1
        assert float(((counts - 30000 / (step + 1)) ** 2).sum() / (30000 / (step + 1))) < 25  # chi-squared, 3 at most


def test_contexts_are_stratified_and_shuffled_within_one_set() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(2000):
        sizes, drawn = draw_contexts(3, 2, 7, generator)
        for k, size in enumerate(sizes.tolist()):
            assert 7 * k / 3 - 1 < size < 7 * (k + 1) / 3
            first, second = drawn[k].tolist()
            assert sorted(first) == list(range(7))
            assert set(first[:size]) == set(second[:size])
            assert first[size:] == second[size:]
        seen += sizes.tolist()
    counts = torch.bincount(torch.tensor(seen), minlength=7).double()
    assert float(((counts - 6000 / 7) ** 2).sum() / (6000 / 7)) < 25  # every size equally often


def batches_of(tokens: Tensor, size: int) -> Iterator[tuple[list[int], Tensor]]:
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        yield list(range(start, start + len(part))), part


@pytest.mark.parametrize("figure", [AlongOrders("x", orders.Random(), 2), Ensemble(4, 3), PaperEnsemble(3)], ids=str)
def test_figures_repeat_and_do_not_depend_on_the_batch(figure: Figure) -> None:
    model = small_model()
    tokens = torch.randint(64, (11, 16), generator=torch.Generator().manual_seed(0))
    found = [
        torch.cat([nats for _, nats in score(figure, model, batches_of(tokens, size), 1)]) for size in (11, 1, 3, 8)
    ]
    for other in found[1:]:
        assert ((found[0] - other).mean(0).abs() / 16 < 1e-6).all()
        assert ((found[0] - other).abs() < 1e-4).all()
    different = torch.cat([nats for _, nats in score(figure, model, batches_of(tokens, 11), 2)])
    assert (different - found[0]).abs().max() > 0.1


def test_the_mixture_is_never_worse_than_the_mean() -> None:
    figure = AlongOrders("x", orders.Random(), 4)
    tokens = torch.randint(64, (30, 16), generator=torch.Generator().manual_seed(0))
    nats = torch.cat([part for _, part in score(figure, small_model(), batches_of(tokens, 8), 1)])
    assert (nats[:, 1] <= nats[:, 0] + 1e-9).all()
    assert (nats[:, 0] - nats[:, 1]).max() > 0.1


def test_the_caller_keeps_its_gradients() -> None:
    for _ in score(AlongOrders("x", orders.LeftToRight()), small_model(), batches_of(TOKENS.repeat(8, 4), 4), 0):
        assert torch.is_grad_enabled()


def test_a_left_to_right_model_has_no_ensemble() -> None:
    model = small_model(injection="none")
    for figure in (Ensemble(2, 2), PaperEnsemble(2), masked_bound(2)):
        with pytest.raises(ao.InputError, match="reads in any order"):
            next(score(figure, model, batches_of(torch.zeros(2, 16, dtype=torch.long), 2), 0))
