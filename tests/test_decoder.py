"""The decoder's laws: causality, partial orders, what each injection can and cannot tell."""

import pytest
import torch

import anyorder as ao
from anyorder import orders
from anyorder.config import ModelConfig
from anyorder.models.decoder import Decoder
from tests.conftest import INJECTIONS, small_model


def draw(seed: int = 0, batch: int = 3, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (batch, length), generator=generator)
    return tokens, orders.Random().sample(batch, length, generator)


@pytest.mark.parametrize("injection", [*INJECTIONS, "none"])
@torch.no_grad()
def test_a_row_depends_on_no_token_at_or_after_it(injection: str) -> None:
    model = small_model(injection=injection)
    tokens, order = draw()
    if injection == "none":
        order = torch.arange(16).expand(3, 16)
    logits = model(tokens, order)
    for step in range(16):
        changed = tokens.scatter(1, order[:, step:], (tokens.gather(1, order[:, step:]) + 1) % 64)
        after = model(changed, order)
        assert torch.equal(after[:, : step + 1], logits[:, : step + 1])
        if step < 15:  # and the next row does see the token at this step
            assert (after[:, step + 1] - logits[:, step + 1]).abs().max() > 1e-4


@pytest.mark.parametrize("injection", INJECTIONS)
@torch.no_grad()
def test_partial_orders_give_the_first_rows_of_whole_ones(injection: str) -> None:
    model = small_model(injection=injection)
    tokens, order = draw()
    assert torch.allclose(model(tokens, order[:, :5]), model(tokens, order)[:, :5], atol=1e-5)


@pytest.mark.parametrize("injection", INJECTIONS)
@torch.no_grad()
def test_predictions_depend_on_the_target_and_on_the_order_of_the_context(injection: str) -> None:
    model = small_model(injection=injection)
    tokens, _ = draw(batch=1)
    last = {tuple(order): model(tokens, torch.tensor([order]))[0, -1] for order in ([3, 5, 9], [3, 5, 2], [5, 3, 9])}
    assert (last[3, 5, 9] - last[3, 5, 2]).abs().max() > 1e-3  # another target
    assert (last[3, 5, 9] - last[5, 3, 9]).abs().max() > 1e-3  # the same context set in another order


@torch.no_grad()
def test_rotary_alone_sees_only_the_distance_from_content_to_target() -> None:
    """Shift all positions by two: with content positions silenced, the prediction is the same."""
    model = small_model(injection="rotary", layers=1)
    model.position_embedding.weight.zero_()
    tokens, _ = draw(batch=1)
    moved = torch.roll(tokens, 2, 1)
    distances = []
    for shift in (0, 2):
        rotation = model.injection.rotation(torch.tensor([[5 + shift]]), torch.tensor([[8 + shift]]), torch.float32)
        assert rotation is not None
        (query_cosine, query_sine), (key_cosine, key_sine) = rotation
        distances.append(query_cosine * key_cosine + query_sine * key_sine)  # cos(query angle - key angle)
    assert torch.allclose(distances[0], distances[1], atol=1e-6)
    assert isinstance(model, Decoder)
    model.start_embedding.zero_()  # a start slot of zeros has no content to be near or far
    model.blocks[0].attention.qkv.bias.zero_()  # type: ignore[union-attr, operator]
    here, there = (model(t, torch.tensor([o]))[0, -1] for t, o in ((tokens, [3, 5, 9]), (moved, [5, 7, 11])))
    assert torch.allclose(here, there, atol=1e-4)


def test_a_model_of_one_order_refuses_others() -> None:
    model = small_model(injection="none")
    tokens, order = draw()
    with pytest.raises(ao.InputError, match="left to right only"):
        ao.order_nll(model, tokens, order)
    assert ao.order_nll(model, tokens, torch.arange(7).expand(3, 7)).shape == (3, 7)


def test_texts_that_are_too_long_and_orders_with_repeats_are_refused() -> None:
    model = small_model()
    tokens = torch.zeros(1, 17, dtype=torch.long)
    with pytest.raises(ao.InputError, match=r"17 tokens.*at most 16"):
        model(tokens, torch.arange(17)[None])
    with pytest.raises(ao.InputError, match="repeats position"):
        model(tokens[:, :4], torch.tensor([[0, 1, 1, 2]]))


@pytest.mark.parametrize("text", ["", "sinusoid", "adaln+adaln", "none+rotary", "adaln+"])
def test_unknown_injections_are_refused(text: str) -> None:
    with pytest.raises(ao.InputError, match="accepted: none, add, layer, adaln, rotary"):
        small_model(injection=text)


def test_gates_start_where_asked() -> None:
    for start in (0.0, 1.0):
        model = small_model(injection="adaln", gate_start=start, scale=1.0)
        _, modulation = model.injection.at_block(0, torch.zeros(1, 16, 32), torch.arange(16)[None])
        assert modulation is not None
        for part in modulation:
            assert (part[2] - start).abs().max() < 0.01
            assert part[0].abs().max() < 0.01


def test_published_shapes() -> None:
    """Parameters of the published AO-GPT, by the arithmetic of its shape."""
    with torch.device("meta"):
        from anyorder.config import preset

        for name, layers, width in (("small", 12, 768), ("medium", 24, 1024)):
            model = Decoder(preset(name, 50257).model)
            block = 12 * width**2 + 9 * width + 2 * width + 2 * 64 + (128 + 1) * 6 * width
            outside = 2 * 50304 * width + 50304 + (1025 + 1 + 1) * width + 1024 * 128 + (128 + 1) * 2 * width
            assert sum(p.numel() for p in model.parameters()) == layers * block + outside
            training = preset(name, 50257).training
            assert training.learning_rate == {"small": 6e-4, "medium": 3e-4}[name]
            assert training.learning_rate * training.final_learning_rate == pytest.approx(6e-5)
            assert (training.batch_size, training.steps, training.warmup) == (1024, 500_000, 2000)
            assert (training.weight_decay, training.beta2, training.ema_decay) == (0.05, 0.95, 0.9999)


def test_weights_start_as_published() -> None:
    model = Decoder(ModelConfig(layers=8, heads=2, width=64, positions=64, vocabulary=512, injection="adaln"))
    model.initialise(torch.Generator().manual_seed(0))
    weight = model.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    residual = model.blocks[0].mlp.down.weight  # type: ignore[union-attr]
    assert isinstance(residual, torch.Tensor)
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(weight.detach().abs().max()) <= 0.06
    assert float(residual.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
