"""The probability of any part given any other: against enumeration, and against the chain rule."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import anyorder as ao
from anyorder.data.tokenizer import Tokenizer
from anyorder.evaluation.marked import read_marks, score_marked, windows
from tests.conftest import MODELS, small_model

N, V = 4, 3


def mask(*positions: int, length: int = N) -> Tensor:
    return torch.isin(torch.arange(length), torch.tensor(positions, dtype=torch.long))


@pytest.mark.parametrize("injection", ["rotary", "adaln"])
def test_every_part_given_every_other_is_a_law(injection: str) -> None:
    """Over all texts with the same given part, the probabilities of a query sum to one, and equal the chain rule's."""
    model = small_model(scale=12.0, positions=N, vocabulary=V, injection=injection)
    checked = 0
    for parts in itertools.product(range(3), repeat=N):  # 0 is given, 1 asked for, 2 neither
        query, given = (torch.tensor([part == which for part in parts]) for which in (1, 0))
        if not query.any():
            continue
        values = itertools.product(range(V), repeat=int(query.sum()))
        rows = torch.tensor([2, 1, 0, 2]).repeat(V ** int(query.sum()), 1)
        rows[:, query] = torch.tensor(list(values))
        found = ao.logprob(model, rows, query.expand_as(rows), given.expand_as(rows))
        assert not found[:, ~query].any()
        assert float(found.sum(1).exp().sum()) == pytest.approx(1.0, abs=1e-5)
        order = torch.tensor([p for p in range(N) if given[p]] + [p for p in range(N) if query[p]])
        with torch.no_grad():
            nats = ao.order_nll(model, rows, order.expand(len(rows), -1))[:, int(given.sum()) :]
        assert torch.allclose(found[:, query], -nats, atol=1e-5)
        checked += 1
    assert checked == 3**N - 2**N


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_a_batch_of_different_masks_is_one_pass_and_equals_its_rows(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(**changes)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (7, 16), generator=generator)
    part = torch.rand(7, 16, generator=generator)
    query, given = part < 0.3, part > 0.6
    query[:, 5], given[:, 5] = True, False
    passes = []
    run = type(model).run_blocks

    def counted(*arguments: Any, **named: Any) -> torch.Tensor:
        passes.append(1)
        return run(*arguments, **named)

    monkeypatch.setattr(type(model), "run_blocks", counted)
    found = ao.logprob(model, tokens, query, given)
    if "family" not in changes or changes["family"] == "two_stream":
        assert len(passes) == 1
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.allclose(found[one], ao.logprob(model, tokens[one], query[one], given[one]), atol=1e-5)
    # what is neither asked for nor given is not read
    other = torch.where(query | given, tokens, (tokens + 1) % 64)
    assert torch.equal(found, ao.logprob(model, other, query, given))
    # what is given is read
    assert not torch.allclose(found, ao.logprob(model, torch.where(given, (tokens + 1) % 64, tokens), query, given))


def test_the_order_of_the_query_is_the_callers() -> None:
    model = small_model()
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    query, given = mask(2, 5, 9, length=16)[None], mask(0, 1, length=16)[None]
    found = ao.logprob(model, tokens, query, given, order="right_to_left")
    with torch.no_grad():
        nats = ao.order_nll(model, tokens, torch.tensor([[0, 1, 9, 5, 2]]))
    assert found[0, [9, 5, 2]].tolist() == pytest.approx((-nats[0, 2:]).tolist(), abs=1e-5)


def test_bad_masks() -> None:
    model, tokens = small_model(), torch.zeros(2, 4, dtype=torch.long)
    query, given = mask(1, 2).repeat(2, 1), mask(0).repeat(2, 1)
    with pytest.raises(ao.InputError, match="position 2 of row 0 is both in the query and given"):
        ao.logprob(model, tokens, query, mask(2).repeat(2, 1))
    with pytest.raises(ao.InputError, match="the query of row 1 is empty"):
        ao.logprob(model, tokens, torch.stack((mask(1), mask())), given)
    with pytest.raises(ao.InputError, match="accepted: a bool mask"):
        ao.logprob(model, tokens, query.long(), given)
    with pytest.raises(ao.InputError, match="accepted: a bool mask"):
        ao.logprob(model, tokens, query[:, :3], given)
    with pytest.raises(ao.InputError, match="left to right only"):
        ao.logprob(small_model(injection="none"), tokens, mask(1).repeat(2, 1), mask(2).repeat(2, 1))
    plain = ao.logprob(small_model(injection="none"), tokens, mask(2, 3).repeat(2, 1), mask(0, 1).repeat(2, 1))
    assert (plain[:, 2:] < 0).all()


@pytest.mark.parametrize(("count", "size"), [(5, 8), (8, 8), (9, 8), (16, 8), (23, 8), (1, 1), (4, 1)])
def test_windows_score_each_token_once_with_as_much_before_it_as_fits(count: int, size: int) -> None:
    cut = windows(count, size)
    assert [t for _, new, end in cut for t in range(new, end)] == list(range(count))
    assert all(0 <= first <= new < end <= count and end - first <= size for first, new, end in cut)
    first, _, end = cut[-1]
    assert end - first == min(size, count)


def test_marks_are_read_as_the_model_reads_text(tokenizer: Tokenizer) -> None:
    marked = read_marks("the people of the {world peace} in {war}.", None, tokenizer)
    assert marked.text == "the people of the world peace in war."
    assert tokenizer.decode(marked.tokens.tolist()) == marked.text
    assert tokenizer.decode(marked.tokens[marked.query].tolist()) == " world peace war"
    assert bool((marked.query ^ marked.given).all())
    both = read_marks("the {people} of the world", "{the} people of the {world}", tokenizer)
    assert tokenizer.decode(both.tokens[both.given].tolist()) == "the world"
    assert not bool((both.query & both.given).any())
    plain = read_marks("the {{people}} of", None, tokenizer)
    assert plain.text == "the {people} of"
    assert bool(plain.query.all())


def test_a_text_longer_than_the_model_goes_in_windows(tokenizer: Tokenizer) -> None:
    model = small_model(vocabulary=tokenizer.vocabulary)
    marked = read_marks("the people of the world in peace and war " * 3, None, tokenizer)
    count = len(marked.tokens)
    assert count > 2 * 16
    found = score_marked(model, marked, "left_to_right", torch.Generator())
    assert found.shape == (count,)
    assert bool((found < 0).all())
    last = marked.tokens[None, count - 16 :]
    with torch.no_grad():
        nats = ao.order_nll(model, last, torch.arange(16)[None])
    assert float(found[-1]) == pytest.approx(-float(nats[0, -1]), abs=1e-5)
    assert math.isfinite(float(found.sum()))
