"""Figures from nats: by hand, and their errors by resampling."""

import math

import numpy as np
import pytest
import torch

from anyorder.evaluation.likelihood import estimate, xz_bits_per_byte


def test_figures_by_hand() -> None:
    nats = torch.tensor([8.0, 12.0, 10.0], dtype=torch.float64)
    found = estimate(nats, torch.tensor([2, 2, 2]), torch.tensor([4, 2, 1]))
    assert found.nats_per_token == pytest.approx(5.0)
    assert found.nats_error == pytest.approx(1 / math.sqrt(3))  # of 4, 6 and 5
    assert found.perplexity == pytest.approx(math.exp(5))
    assert found.perplexity_error == pytest.approx(math.exp(5) / math.sqrt(3))
    assert found.bits_per_byte == pytest.approx(30 / 7 / math.log(2))
    assert (found.sequences, found.tokens) == (3, 6)


def test_a_short_sequence_weighs_as_its_tokens() -> None:
    found = estimate(torch.tensor([8.0, 8.0, 1.0]), torch.tensor([4, 4, 1]), None)
    assert found.nats_per_token == pytest.approx(17 / 9)
    assert found.tokens == 9


def test_errors_are_those_of_resampling() -> None:
    draw = np.random.default_rng(0)
    sizes, lengths = draw.integers(20, 90, 400), draw.integers(8, 17, 400)
    nats = 2.0 * sizes + draw.normal(0, 12, 400)
    bits, per_token = [], []
    for _ in range(2000):
        chosen = draw.integers(0, 400, 400)
        bits.append(nats[chosen].sum() / sizes[chosen].sum() / math.log(2))
        per_token.append(nats[chosen].sum() / lengths[chosen].sum())
    found = estimate(*(torch.from_numpy(part) for part in (nats, lengths, sizes)))
    assert found.bits_error == pytest.approx(np.std(bits), rel=0.1)
    assert found.nats_error == pytest.approx(np.std(per_token), rel=0.1)


def test_one_sequence_has_no_error_and_some_tokenizers_no_bytes() -> None:
    found = estimate(torch.tensor([8.0]), torch.tensor([2]), None)
    assert (found.nats_error, found.perplexity_error, found.bits_per_byte, found.bits_error) == (None, None, None, None)


def test_xz_is_that_of_the_program() -> None:
    text = bytes(np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8))
    assert 8.0 < xz_bits_per_byte(text) < 8.2  # noise does not shrink
    assert xz_bits_per_byte(b"the people " * 1000) < 0.2
