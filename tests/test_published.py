"""Published checkpoints: what this package computes is what the published implementation computes."""

import re
from pathlib import Path

import pytest
import torch

import anyorder as ao
from anyorder.integrations.published import read_published
from tests.conftest import GOLDEN


@pytest.mark.parametrize("name", ["aogpt", "sigma"])
@pytest.mark.parametrize("order", ["random", "l2r"])
def test_logits_and_loss_are_the_published_ones(name: str, order: str) -> None:
    expected = torch.load(GOLDEN / f"{name}_expected.pt", weights_only=True)
    model, tokenizer = ao.load(GOLDEN / f"{name}.pt")
    assert tokenizer is None
    with torch.no_grad():
        logits = model(expected["tokens"], expected[f"{order}_order"])
        nats = ao.order_nll(model, expected["tokens"], expected[f"{order}_order"])
    assert (logits - expected[f"{order}_logits"]).abs().max() < 1e-4
    assert (nats.mean() - expected[f"{order}_loss"]).abs() < 1e-4


@pytest.mark.parametrize("name", ["aogpt", "sigma"])
def test_raw_weights_come_on_request_and_differ(name: str) -> None:
    raw, _ = ao.load(GOLDEN / f"{name}.pt", weights="raw")
    ema, _ = ao.load(GOLDEN / f"{name}.pt")
    file = torch.load(GOLDEN / f"{name}.pt", weights_only=True)
    assert torch.equal(raw.token_embedding.weight, file["model"]["transformer.wte.weight"])
    assert not torch.equal(raw.token_embedding.weight, ema.token_embedding.weight)


def test_a_compiled_models_prefix_is_dropped(tmp_path: Path) -> None:
    file = torch.load(GOLDEN / "aogpt.pt", weights_only=True)
    file["model"] = {f"_orig_mod.{name}": tensor for name, tensor in file["model"].items()}
    torch.save(file, tmp_path / "compiled.pt")
    assert torch.equal(
        read_published(tmp_path / "compiled.pt").ema["head.weight"],
        read_published(GOLDEN / "aogpt.pt").ema["head.weight"],
    )


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "cut.pt").write_bytes((GOLDEN / "aogpt.pt").read_bytes()[:5000])
    torch.save({"model": {}}, tmp_path / "half.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    for name in ("text", "cut", "half", "tensor"):
        with pytest.raises(ao.InputError, match=re.escape(f"{name}.pt")):
            ao.load(tmp_path / f"{name}.pt")


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(ao.InputError):
        ao.load(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()
