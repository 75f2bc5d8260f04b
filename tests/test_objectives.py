"""The objective: three forms of one loss agree, by enumeration."""

import itertools
import math

import numpy as np
import pytest
import torch

import anyorder as ao
from tests.conftest import small_model

N, V = 4, 5


@pytest.mark.parametrize("injection", ["rotary", "adaln", "add+rotary"])
@torch.no_grad()
def test_any_order_loss_masked_diffusion_integral_and_sampled_form_agree(injection: str) -> None:
    model = small_model(injection=injection, positions=N, vocabulary=V).double()
    tokens = torch.tensor([[3, 1, 4, 1]])
    permutations = list(itertools.permutations(range(N)))

    any_order = float(ao.order_nll(model, tokens.expand(24, N), torch.tensor(permutations)).sum(1).mean())

    def nll(context: tuple[int, ...], target: int) -> float:
        """-log p(x[target] | context in this order), through a partial order."""
        return float(ao.order_nll(model, tokens, torch.tensor([[*context, target]]))[0, -1])

    def masked_sum(visible: tuple[int, ...]) -> float:
        """Sum over masked positions, averaged over the orders of what is visible."""
        contexts = list(itertools.permutations(visible))
        masked = [position for position in range(N) if position not in visible]
        return sum(nll(context, target) for context in contexts for target in masked) / len(contexts)

    # integral over t of (1/t) sum over subsets of t^masked (1-t)^visible * ...; eight nodes are exact for polynomials
    nodes, weights = np.polynomial.legendre.leggauss(8)
    subsets = [s for size in range(N) for s in itertools.combinations(range(N), size)]
    sums = {subset: masked_sum(subset) for subset in subsets}
    integral = sum(
        w / 2 * sum(t ** (N - len(s)) * (1 - t) ** len(s) * value for s, value in sums.items()) / t
        for t, w in zip((nodes + 1) / 2, weights, strict=True)
    )

    # n * E_l 1/(n-l+1) E_sigma sum over r >= l of -log p(x[sigma_r] | x[sigma_<l])
    sampled = N * np.mean(
        [
            np.mean([sum(nll(p[:step], target) for target in p[step:]) for p in permutations]) / (N - step)
            for step in range(N)
        ]
    )

    assert any_order == pytest.approx(integral, abs=1e-5)
    assert any_order == pytest.approx(float(sampled), abs=1e-5)
    # and the three are not equal because nothing matters: single orders differ
    single = ao.order_nll(model, tokens.expand(24, N), torch.tensor(permutations)).sum(1)
    assert float(single.std()) > 1e-2


@torch.no_grad()
def test_nats_are_a_law_over_texts_along_any_order() -> None:
    model = small_model(positions=3, vocabulary=3)
    texts = torch.tensor(list(itertools.product(range(3), repeat=3)))
    for order in itertools.permutations(range(3)):
        nats = ao.order_nll(model, texts, torch.tensor([order]).expand(27, 3)).double().sum(1)
        assert float(nats.neg().exp().sum()) == pytest.approx(1.0, abs=1e-5)
        assert float(nats.std()) > 0.01


def test_nats_stand_in_the_order_of_steps() -> None:
    model = small_model()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    order = torch.stack([torch.arange(15, -1, -1), torch.arange(16)])
    nats = ao.order_nll(model, tokens, order)
    logits = model(tokens, order).log_softmax(-1)
    assert nats[0, 2].item() == pytest.approx(-logits[0, 2, tokens[0, 13]].item(), abs=1e-5)
    assert nats.shape == (2, 16)
    assert not math.isclose(nats[0, 2].item(), nats[0, 13].item(), abs_tol=1e-6)
