"""Held-out figures: their errors, their independence of the batch size, and what they leave behind."""

import math

import numpy as np
import pytest
import torch

from anyorder.evaluation.likelihood import estimate, sequence_nats, xz_bits_per_byte
from anyorder.orders import LeftToRight, Random
from tests.conftest import small_model


def rows(count: int = 70) -> torch.Tensor:
    return torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(0))


def test_figures_by_hand() -> None:
    nats = torch.tensor([8.0, 12.0, 10.0], dtype=torch.float64)
    found = estimate(nats, torch.tensor([[0, 1], [1, 1], [1, 2]]), np.array([3, 1, 0]), orders=4)
    assert found.nats_per_token == pytest.approx(5.0)
    assert found.nats_error == pytest.approx(1 / math.sqrt(3))  # of 4, 6 and 5
    assert found.perplexity == pytest.approx(math.exp(5))
    assert found.bits_per_byte == pytest.approx(30 / 7 / math.log(2))
    assert (found.sequences, found.tokens, found.orders) == (3, 6, 4)


def test_the_error_of_bits_per_byte_is_that_of_resampling() -> None:
    draw = np.random.default_rng(0)
    texts = torch.from_numpy(draw.integers(0, 8, (400, 16)))
    sizes = np.arange(8)
    nats = torch.from_numpy(2.0 * sizes[texts].sum(1) + draw.normal(0, 12, 400))
    again = []
    for _ in range(2000):
        chosen = draw.integers(0, 400, 400)
        again.append(float(nats[chosen].sum()) / sizes[texts[chosen]].sum() / math.log(2))
    assert estimate(nats, texts, sizes).bits_error == pytest.approx(np.std(again), rel=0.1)


def test_one_sequence_has_no_error_and_some_tokenizers_no_bytes() -> None:
    found = estimate(torch.tensor([8.0]), torch.tensor([[0, 1]]), None)
    assert (found.nats_error, found.bits_per_byte, found.bits_error) == (None, None, None)


def test_figures_repeat_and_do_not_depend_on_the_batch_size() -> None:
    model = small_model()
    found = [torch.cat(list(sequence_nats(model, rows(), Random(), 1, 2, size))) for size in (1, 7, 64, 70)]
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-4)
    different = torch.cat(list(sequence_nats(model, rows(), Random(), 2, 2, 70)))
    assert (different - found[0]).abs().max() > 0.1


def test_the_caller_keeps_its_gradients() -> None:
    for _ in sequence_nats(small_model(), rows(), LeftToRight(), 0, batch_size=32):
        assert torch.is_grad_enabled()


def test_xz_is_that_of_the_program() -> None:
    text = bytes(np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8))
    assert 8.0 < xz_bits_per_byte(text) < 8.2  # noise does not shrink
    assert xz_bits_per_byte(b"the people " * 1000) < 0.2
