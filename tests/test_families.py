"""The families: what each conditional depends on, what each objective estimates, and every command for each of them."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anyorder as ao
from anyorder import orders
from anyorder.checkpoint import folder_of, read_tensors
from anyorder.cli import main
from anyorder.data.shards import Dataset
from anyorder.integrations.gpt2 import read_gpt2
from anyorder.models.encoder import Encoder, log_ratio, noise
from anyorder.models.families import open_context
from anyorder.models.two_stream import TwoStream
from anyorder.objectives import draw_hidden, masked_nll, score_entropy, stratified
from anyorder.training.warm import warm_start
from tests.conftest import refused, small_model

N, V = 4, 5
TOKENS = torch.tensor([[3, 1, 4, 1]])
FAMILIES = ("decoder", "two_stream", "encoder", "sedd")


def tiny(**changes: Any) -> Any:
    return small_model(positions=N, vocabulary=V, **changes)


@pytest.mark.parametrize("changes", [{"family": "encoder", "injection": i} for i in ("none", "rotary")])
@torch.no_grad()
def test_an_encoder_does_not_see_the_order_of_its_context(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    predicted = []
    for permutation in itertools.permutations((2, 7, 9, 14)):
        context = open_context(model, 1, 16)
        revealed = torch.tensor([permutation])
        context.reveal(revealed, tokens.gather(1, revealed))
        predicted.append(context.marginals(torch.tensor([[0, 5]])))
    assert all(torch.equal(predicted[0], other) for other in predicted)


@pytest.mark.parametrize(("family", "expected"), [("encoder", 32), ("decoder", 64), ("two_stream", 64)])
@torch.no_grad()
def test_the_number_of_conditionals(family: str, expected: int) -> None:
    """n 2^(n-1) sets and targets for an encoder, sum over k < n of n!/(n-1-k)! ordered contexts for decoders."""
    model = tiny(family=family)
    found = []
    for size in range(N):
        for context in itertools.permutations(range(N), size):
            for target in set(range(N)) - set(context):
                logits = model.along(TOKENS, torch.tensor([[*context, target]]))[0, -1]
                found.append((target, logits.log_softmax(-1)))
    distinct: list[tuple[int, Tensor]] = []
    for target, law in found:
        if not any(target == t and torch.allclose(law, other, atol=1e-6, rtol=0) for t, other in distinct):
            distinct.append((target, law))
    formula = N * 2 ** (N - 1) if family == "encoder" else sum(math.perm(N, k + 1) for k in range(N))
    assert len(distinct) == expected == formula


@torch.no_grad()
def exact_mean(model: Encoder, distribution: list[tuple[int, ...]], all_hidden: bool) -> float:
    """Average the training objective over all orders of a distribution and all numbers revealed."""
    values = [
        masked_nll(model, TOKENS, torch.tensor([order]), torch.tensor([known]), all_hidden).mean()
        for order in distribution
        for known in range(N)
    ]
    return float(torch.stack(values).double().mean())


@pytest.mark.parametrize("injection", ["none", "rotary"])
@torch.no_grad()
def test_the_encoders_objectives_have_the_any_order_expectation(injection: str) -> None:
    model = tiny(family="encoder", injection=injection)
    every = list(itertools.permutations(range(N)))
    along = {order: float(ao.order_nll(model, TOKENS, torch.tensor([order])).double().mean()) for order in every}
    any_order = sum(along.values()) / len(every)
    assert exact_mean(model, every, True) == pytest.approx(any_order, abs=1e-5)
    assert exact_mean(model, every, False) == pytest.approx(any_order, abs=1e-5)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        assert exact_mean(model, [order], False) == pytest.approx(along[order], abs=1e-5)
        assert abs(exact_mean(model, [order], True) - along[order]) > 1e-3  # all hidden is right for random orders only
    assert len({round(value, 4) for value in along.values()}) > 20


def test_which_objective_applies_follows_from_the_orders() -> None:
    for text, uniform in (
        ("random", True),
        ("mix(0.5*random, 0.5*random)", True),
        ("mix(1.0*random, 0.0*left_to_right)", True),
        ("mix(0.9*random, 0.1*left_to_right)", False),
        ("left_to_right", False),
        ("fixed(1)", False),
        ("within_blocks(2)", False),
        ("anneal(random, left_to_right)", False),
        ("anneal(random, random)", True),
    ):
        assert orders.is_uniform(orders.parse(text)) == uniform


class TimeIndependent(Encoder):
    """An encoder's conditional as a score: p(x_i = y | visible) / (e^sigma - 1)."""

    def log_scores(self, tokens: Tensor, visible: Tensor, time: Tensor) -> Tensor:
        logprobs = self(tokens, visible).float().log_softmax(-1)
        return logprobs - log_ratio(noise(time))[:, None, None]


@torch.no_grad()
def test_the_score_entropy_of_a_time_independent_score_is_the_any_order_loss() -> None:
    encoder = tiny(family="encoder")
    model = TimeIndependent(encoder.config)
    model.load_state_dict(encoder.state_dict())
    every = torch.tensor(list(itertools.permutations(range(N))))
    any_order = float(ao.order_nll(encoder, TOKENS.expand(24, N), every).double().sum(1).mean())
    generator = torch.Generator().manual_seed(0)
    count = 60_000
    time = stratified(count, generator)
    hidden = draw_hidden(time, N, generator)
    found = score_entropy(model, TOKENS.expand(count, N), time.float(), hidden).double().sum(1)
    error = float(found.std()) / math.sqrt(count)
    assert abs(float(found.mean()) - any_order) < 4 * error
    assert error < 0.02 * any_order


@torch.no_grad()
def test_sedds_own_bound_is_above_the_entropy_it_bounds() -> None:
    """With scores of its own the bound is a sum of terms that are 0 only for the true score."""
    model = tiny(family="sedd")
    generator = torch.Generator().manual_seed(0)
    time = stratified(512, generator)
    hidden = draw_hidden(time, N, generator)
    nats = score_entropy(model, TOKENS.expand(512, N), time.float(), hidden)
    assert (nats[~hidden] == 0).all()
    sigma = noise(time.float())
    r = (-log_ratio(sigma)).exp()[:, None]
    scores = model.log_scores(TOKENS.expand(512, N), ~hidden, time.float()).gather(2, TOKENS.expand(512, N)[..., None])
    others = nats / ((1 - 1e-3) / (1 - (1 - 1e-3) * time.float()))[:, None]
    single = scores[..., 0].exp() - r * scores[..., 0] + r * (r.log() - 1)  # the true token's own term, never negative
    assert (others[hidden] >= single[hidden] - 1e-3 * r.expand_as(hidden)[hidden]).all()
    assert (single >= -1e-3 * r).all()


@torch.no_grad()
def test_the_content_stream_leaks_nothing() -> None:
    for injection in ("none", "rotary"):
        model = small_model(family="two_stream", injection=injection)
        assert isinstance(model, TwoStream)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(64, (3, 16), generator=generator)
        order = orders.Random().sample(3, 16, generator)
        before = model(tokens, order)
        for step in range(16):
            changed = tokens.scatter(1, order[:, step:], (tokens.gather(1, order[:, step:]) + 1) % 64)
            after = model(changed, order)
            assert torch.equal(after[:, : step + 1], before[:, : step + 1])
            if step < 15:
                assert not torch.allclose(after[:, step + 1], before[:, step + 1], atol=1e-3)


def run_of(family: str, data: Dataset, folder: Path, steps: int = 6) -> list[str]:
    arguments = f"--layers 2 --width 32 --heads 2 --positions 16 --batch-size 8 --steps {steps} --checkpoint-every 3"
    how = "random" if family == "sedd" else "mix(0.9*random, 0.1*left_to_right)"
    command = ["train", "tiny", "--data", str(data.folder), "--out", str(folder), "--family", family]
    return [*command, *arguments.split(), "--validate-every", "3", "--orders", how]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_command_works_for_each_family(
    family: str, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(run_of(family, data, run)) == 0
    assert "held-out nats per token" in capsys.readouterr().out
    # resume: from the first checkpoint again, to the same bits
    whole = read_tensors(folder_of(run, 6) / "model.safetensors")
    average = read_tensors(folder_of(run, 6) / "ema.safetensors")
    for path in folder_of(run, 6).rglob("*"):
        if path.is_file():
            path.unlink()
    folder = folder_of(run, 6)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()
    folder.rmdir()
    assert main(run_of(family, data, run)) == 0
    assert "goes on from step 3" in capsys.readouterr().out
    for name, tensor in read_tensors(folder_of(run, 6) / "model.safetensors").items():
        assert torch.equal(tensor, whole[name]), name
    for name, tensor in read_tensors(folder_of(run, 6) / "ema.safetensors").items():
        assert torch.equal(tensor, average[name]), name
    report = tmp_path / "report.json"
    evaluate = ["evaluate", str(run), "--data", str(data.folder), "--limit", "5", "--bound", "--json", str(report)]
    assert main(evaluate) == 0
    names = [result["name"] for result in json.loads(report.read_text())["texts"][0]["results"]]
    assert names == ["left to right", "any order", "masked-diffusion bound"] + ["score-entropy bound"] * (
        family == "sedd"
    )
    capsys.readouterr()
    if family in ("decoder", "two_stream"):
        assert main([*evaluate[:-2], "--ensemble", "4"]) == 0
        assert "ensemble of 4" in capsys.readouterr().out
    else:
        assert "make no difference" in refused(capsys, *evaluate[:-2], "--ensemble", "4")
    ways = [[], ["--steps", "4"], ["--steps", "20", "--schedule", "ancestral"], ["--order", "margin"]]
    if family in ("decoder", "two_stream"):
        ways.append(["--exact"])
    else:
        assert "accepted: a model of family decoder or two_stream" in refused(capsys, "sample", run, "--exact")
    noisy = [["--steps", "7", "--schedule", schedule] for schedule in ("euler", "tweedie")]
    for way in ways + (noisy if family == "sedd" else []):
        assert main(["sample", str(run), "--samples", "2", "--json", *way]) == 0
        written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [len(text["written"]) for text in written] == [16, 16]
    if family != "sedd":
        assert "accepted: linear, cosine or ancestral" in refused(capsys, "sample", run, *noisy[0])
    assert main(["fill", str(run), "the {} of {2}", "--longest", "3", "--samples", "2", "--order", "random"]) == 0
    assert capsys.readouterr().out.count("written in this order") == 2
    assert main(["score", str(run), "--text", "the {people} of"]) == 0


def test_what_a_family_cannot_do_is_refused(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family in ("two_stream", "encoder", "sedd"):
        said = refused(capsys, *run_of(family, data, tmp_path / "run"), "--injection", "adaln")
        assert "accepted: --injection none or rotary" in said
    command = [*run_of("sedd", data, tmp_path / "run")[:-1], "left_to_right"]
    assert "accepted: --orders random" in refused(capsys, *command)
    assert not (tmp_path / "run").exists()


def test_sedds_samplers_fill_as_many_as_the_noise_takes_back() -> None:
    """With scores of 1 / (e^sigma - 1) in sum, a step of four fills a quarter; Euler nears that in small steps."""
    model = small_model(family="sedd", scale=0.0, positions=4, vocabulary=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tokens, blanks = torch.zeros(2000, 4, dtype=torch.long), torch.ones(2000, 4, dtype=torch.bool)
    for schedule, steps, until in (("tweedie", 4, 1), ("euler", 120, 30)):
        out = ao.fill(
            model, tokens, blanks, "random", steps=steps, schedule=schedule, generator=torch.Generator().manual_seed(0)
        )
        share = float((out.steps < until).float().mean())
        assert share == pytest.approx(0.25, abs=0.03)
        assert out.tokens.float().mean() == pytest.approx(1.0, abs=0.05)


def test_gpt2_weights_of_the_hub_layout_give_its_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs_config = transformers.GPT2Config(
        vocab_size=64, n_positions=17, n_embd=32, n_layer=2, n_head=2, bos_token_id=5, eos_token_id=5
    )
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(theirs_config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "gpt2")
    model, tokenizer = ao.load(tmp_path / "gpt2")
    assert tokenizer is None
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
    order = torch.arange(16).expand(3, 16)
    with torch.no_grad():
        expected = theirs(torch.cat((torch.full((3, 1), 5), tokens), 1)).logits[:, :-1]
        assert torch.allclose(model.along(tokens, order), expected, atol=1e-4)
    with pytest.raises(ao.InputError, match="left to right only"):
        model.along(tokens, order.flip(1))
    assert main(["import", str(tmp_path / "gpt2"), "--out", str(tmp_path / "run")]) == 0
    again, _ = ao.load(tmp_path / "run")
    with torch.no_grad():
        assert torch.allclose(again.along(tokens, order), expected, atol=1e-4)
    about = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    for change, words in (({"activation_function": "relu"}, "relu"), ({"n_inner": 7}, "four times")):
        (tmp_path / "gpt2" / "config.json").write_text(json.dumps({**about, **change}))
        with pytest.raises(ao.InputError, match=words):
            read_gpt2(tmp_path / "gpt2")


@pytest.mark.parametrize("injection", ["adaln", "add", "layer", "add+layer", "layer+adaln"])
def test_a_warm_start_changes_nothing_left_to_right_and_learns(injection: str) -> None:
    donor = small_model(injection="none", norm="layer", tied_head=True, activation="gelu_tanh")
    model = warm_start(donor, small_model(injection=injection).config)
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
    order = torch.arange(16).expand(3, 16)
    with torch.no_grad():
        assert torch.allclose(model.along(tokens, order), donor.along(tokens, order), atol=1e-5)
    ao.order_nll(model, tokens, order.flip(1)).mean().backward()
    gradients = [p.grad for name, p in model.named_parameters() if name.startswith("injection.")]
    assert all(g is not None for g in gradients)
    assert any(float(g.abs().max()) > 0 for g in gradients if g is not None)


def test_training_starts_from_a_left_to_right_run(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "--layers 2 --width 32 --heads 2 --positions 16 --batch-size 8 --checkpoint-every 2 --validate-every 2"
    train = ["train", "tiny", "--data", str(data.folder), *shape.split()]
    donor = ["--out", str(tmp_path / "donor"), "--injection", "none", "--orders", "left_to_right", "--steps", "40"]
    assert main([*train, *donor]) == 0
    start = [*train, "--start", str(tmp_path / "donor"), "--steps", "2"]
    before, _ = ao.load(tmp_path / "donor")
    slow = ["--learning-rate", "1e-9", "--muon-learning-rate", "1e-9", "--weight-decay", "0"]
    assert main([*start, "--out", str(tmp_path / "warm"), "--injection", "adaln", *slow]) == 0
    after, _ = ao.load(tmp_path / "warm")
    tokens = torch.from_numpy(data.split("validation", 16).chunks(np.arange(4), 16))
    order = torch.arange(16).expand(4, 16)
    with torch.no_grad():
        assert torch.allclose(after.along(tokens, order), before.along(tokens, order), atol=1e-3)
    assert main([*start, "--out", str(tmp_path / "warm"), "--injection", "adaln", *slow]) == 0
    assert "has all its 2 steps" in capsys.readouterr().out
    again = [*train, "--steps", "2", "--out", str(tmp_path / "warm"), "--injection", "adaln", *slow]
    assert "was started with" in refused(capsys, *again)
    assert "accepted: an injection of add, layer and adaln" in refused(
        capsys, *start, "--out", tmp_path / "no", "--injection", "rotary"
    )
    assert "layers = 3 was given" in refused(
        capsys, *start, "--out", tmp_path / "no", "--injection", "adaln", "--layers", 3
    )
    assert "accepted: two decoders" in refused(
        capsys, *start, "--out", tmp_path / "no", "--family", "encoder", "--injection", "none"
    )
