"""Orders: each distribution's law, its text form, and what is refused."""

import itertools
from collections import Counter

import pytest
import torch

import anyorder as ao
from anyorder.orders import check, parse

FORMS = [
    "left_to_right",
    "right_to_left",
    "random",
    "fixed(7)",
    "within_blocks(4, 3)",
    "across_blocks(4, 3)",
    "mix(0.9*random, 0.1*left_to_right)",
    "anneal(left_to_right, mix(1.0*random, 3.0*fixed(2)), 0.25, 0.75)",
]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 10, 16])
def test_rows_are_permutations_and_the_text_form_reads_back(form: str, length: int) -> None:
    distribution = parse(form)
    drawn = distribution.sample(8, length, generator(), progress=0.5)
    assert drawn.dtype == torch.long
    assert torch.equal(drawn.sort(1).values, torch.arange(length).expand(8, length))
    assert str(distribution) == form
    assert torch.equal(parse(str(distribution)).sample(8, length, generator(), 0.5), drawn)


def test_random_is_uniform_over_permutations() -> None:
    drawn = parse("random").sample(24_000, 4, generator())
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) == set(itertools.permutations(range(4)))
    chi_squared = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_squared < 49.7  # the 0.999 quantile for 23 degrees of freedom


def test_blocks() -> None:
    within = parse("within_blocks(4, 1)").sample(2, 10)[0]
    assert torch.equal(within // 4, torch.arange(10) // 4)
    assert not torch.equal(within, torch.arange(10))
    across = parse("across_blocks(4, 2)").sample(2, 10)[0].tolist()
    blocks = [list(group) for _, group in itertools.groupby(across, key=lambda position: position // 4)]
    assert sorted(blocks) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert blocks != sorted(blocks)


def test_fixed_is_the_same_in_every_row_and_another_for_another_seed() -> None:
    one, other = (parse(f"fixed({seed})").sample(3, 16, generator()) for seed in (1, 2))
    assert (one == one[0]).all()
    assert not torch.equal(one, other)


def test_mix_takes_parts_by_weight_and_anneal_by_progress() -> None:
    mixed = parse("mix(3*left_to_right, 1*right_to_left)").sample(10_000, 5, generator())
    assert abs(float((mixed[:, 0] == 0).double().mean()) - 0.75) < 4 * (0.75 * 0.25 / 10_000) ** 0.5
    annealed = parse("anneal(left_to_right, right_to_left, 0.2, 0.6)")
    for progress, share in ((0.0, 0.0), (0.2, 0.0), (0.4, 0.5), (0.6, 1.0), (1.0, 1.0)):
        last = annealed.sample(10_000, 5, generator(), progress)[:, 0] == 4
        assert abs(float(last.double().mean()) - share) <= 4 * (share * (1 - share) / 10_000) ** 0.5


@pytest.mark.parametrize(
    "form",
    ["", "sideways", "random(3)", "fixed(x)", "fixed(1, 2)", "within_blocks()", "within_blocks(0)", "mix()",
     "mix(random)", "mix(nan*random)", "mix(-1*random, 2*random)", "anneal(random)", "anneal(random, random, 1, 0)",
     "mix(1*random", "random)"],
)  # fmt: skip
def test_what_is_no_order_is_refused_with_the_accepted_forms(form: str) -> None:
    with pytest.raises(ao.InputError, match=r"accepted: left_to_right, .*anneal"):
        parse(form)


def test_orders_that_do_not_fit_are_refused() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    check(torch.tensor([[3, 1], [0, 2]]), tokens)
    for order, words in (
        (torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]]), "repeats position 1 in row 0"),
        (torch.tensor([[0, 1, 2, 4], [0, 1, 2, 3]]), "positions 0 to 4"),
        (torch.tensor([[0, 1, 2, 3]]), "does not match"),
        (torch.zeros(2, 5, dtype=torch.long), "does not match"),
        (torch.zeros(2, 4), "dtype"),
    ):
        with pytest.raises(ao.InputError, match=words):
            check(order, tokens)
