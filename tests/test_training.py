"""Training: optimizers, schedule, averages, accumulation, and what stops a run."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import anyorder as ao
from anyorder.checkpoint import RunConfig, read_run, steps_of
from anyorder.config import ModelConfig, Preset, TrainingConfig, from_json, preset, to_json
from anyorder.data.corpora import open_corpus
from anyorder.data.prepare import prepare
from anyorder.data.shards import Dataset, open_dataset
from anyorder.training import loop
from anyorder.training.events import Saved, Stepped, Validated
from anyorder.training.loop import train
from anyorder.training.optimizers import EMA, learning_rate_share, make_optimizers
from tests.conftest import small_model, write_texts

TRAINING = TrainingConfig(steps=12, batch_size=8, learning_rate=3e-3, checkpoint_every=5, validate_every=6, warmup=2)


def run_config(data: Dataset, injection: str = "rotary", **training: object) -> RunConfig:
    model = ModelConfig(layers=2, heads=2, width=32, positions=16, vocabulary=320, injection=injection)
    changed = replace(TRAINING, **training)  # type: ignore[arg-type]
    return RunConfig("test", model, changed, data.tokenizer_sha256, data.content_sha256)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_parameter_has_one_optimizer_and_only_matrices_decay(optimizer: str) -> None:
    model = small_model(injection="adaln+rotary")
    config = replace(TRAINING, optimizer=optimizer, muon_learning_rate=1e-2)  # type: ignore[arg-type]
    optimizers = make_optimizers(model, config)
    groups = [(type(o).__name__, g) for o in optimizers for g in o.param_groups]
    owners = [id(p) for _, group in groups for p in group["params"]]
    assert sorted(owners) == sorted(id(p) for p in model.parameters())
    for _, group in groups:
        for parameter in group["params"]:
            assert (group["weight_decay"] > 0) == (parameter.dim() >= 2)
    in_muon = {id(p) for kind, group in groups if kind == "Muon" for p in group["params"]}
    matrices = {id(p) for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2}
    assert in_muon == (matrices if optimizer == "muon" else set())


def test_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    config = replace(TRAINING, steps=110, warmup=10, final_learning_rate=0.1)
    assert [learning_rate_share(s, config) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate_share(60, config) == pytest.approx(0.55)
    assert learning_rate_share(110, config) == pytest.approx(0.1)
    shares = [learning_rate_share(s, config) for s in range(10, 110)]
    assert shares == sorted(shares, reverse=True)


def test_average_follows_the_published_warm_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    ema = EMA(model, decay=0.5)
    expected = 0.0
    for n, value in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], start=1):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update(n)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value
        assert float(ema.average["weight"]) == pytest.approx(expected, rel=1e-6)


def test_accumulated_gradients_are_those_of_the_whole_batch(data: Dataset, tmp_path: Path) -> None:
    losses = {}
    for parts in (1, 4):
        config = run_config(data, micro_batches=parts, precision="fp32")
        losses[parts] = [e.loss for e in train(tmp_path / str(parts), config, data) if isinstance(e, Stepped)]
    assert losses[1] == pytest.approx(losses[4], abs=1e-4)
    assert losses[1][-1] < losses[1][0] - 0.1


@pytest.mark.parametrize("injection", ["none", "adaln"])
def test_events_and_metrics(data: Dataset, tmp_path: Path, injection: str) -> None:
    orders = "left_to_right" if injection == "none" else "random"
    events = list(train(tmp_path / "run", run_config(data, injection, orders=orders), data))
    assert [e.step for e in events if isinstance(e, Saved)] == [5, 10, 12]
    validated = [e for e in events if isinstance(e, Validated)]
    assert [e.step for e in validated] == [6, 12]
    assert set(validated[0].nats) == ({"left_to_right"} if injection == "none" else {"left_to_right", "random"})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["validation"] for line in lines if "validation" in line] == [e.nats for e in validated]


def test_validation_is_of_the_averaged_weights(data: Dataset, tmp_path: Path) -> None:
    """What the run reports is what the saved EMA weights score, not the raw ones."""
    config = run_config(data, precision="fp32", validate_every=12, checkpoint_every=12)
    (validated,) = [e for e in train(tmp_path / "run", config, data) if isinstance(e, Validated)]
    reported = validated.nats["left_to_right"]
    rows = loop.spread_chunks(data.split("validation", 16), 16, TRAINING.validation_sequences)
    order = torch.arange(16).expand(len(rows), 16)
    scores = {}
    for weights in ("ema", "raw"):
        model, _ = ao.load(tmp_path / "run", weights=weights)
        with torch.no_grad():
            scores[weights] = float(ao.order_nll(model, rows, order).mean())
    assert reported == pytest.approx(scores["ema"], abs=1e-5)
    assert abs(reported - scores["raw"]) > 1e-3


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.order_nll
    calls = 0

    def poisoned(*arguments: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(*arguments) * (math.nan if calls == 8 else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "order_nll", poisoned)
    config = run_config(data)
    with pytest.raises(ao.InputError, match=r"nan .* at step 8; the last good checkpoint is .*step-5;"):
        list(train(tmp_path / "run", config, data))
    model, _ = ao.load(tmp_path / "run")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_run_goes_on_only_under_its_own_configuration(data: Dataset, tmp_path: Path) -> None:
    list(train(tmp_path / "run", run_config(data), data))
    for change, words in (
        ({"steps": 13}, "steps = 12 and now 13"),
        ({"seed": 1}, "seed = 0 and now 1"),
    ):
        with pytest.raises(ao.InputError, match=words):
            list(train(tmp_path / "run", run_config(data, **change), data))  # type: ignore[arg-type]
    with pytest.raises(ao.InputError, match="injection = rotary and now adaln"):
        list(train(tmp_path / "run", run_config(data, "adaln"), data))
    list(train(tmp_path / "run", run_config(data, checkpoint_every=3), data))  # a habit, not the run's identity


def test_two_processes_do_not_train_one_run(data: Dataset, tmp_path: Path) -> None:
    first = train(tmp_path / "run", run_config(data), data)
    next(first)
    with pytest.raises(ao.InputError, match="another process is training"):
        list(train(tmp_path / "run", run_config(data), data))
    first.close()  # type: ignore[attr-defined]
    list(train(tmp_path / "run", run_config(data), data))


def test_a_model_of_one_order_is_not_trained_on_others(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ao.InputError, match=r"left to right only.*--orders left_to_right"):
        list(train(tmp_path / "run", run_config(data, "none"), data))


def test_configurations_survive_json_and_refuse_what_they_do_not_know() -> None:
    for name in ("tiny", "demo", "small", "medium"):
        chosen: Preset = preset(name, 2048)
        assert from_json(ModelConfig, json.loads(json.dumps(to_json(chosen.model))), "x") == chosen.model
        assert from_json(TrainingConfig, json.loads(json.dumps(to_json(chosen.training))), "x") == chosen.training
    fields = to_json(preset("tiny", 300).model)
    wrong: list[Callable[[], object]] = [
        lambda: from_json(ModelConfig, {**fields, "depth": 3}, "config.json"),
        lambda: from_json(ModelConfig, {**fields, "layers": "3"}, "config.json"),
        lambda: from_json(ModelConfig, {**fields, "norm": "batch"}, "config.json"),
        lambda: from_json(ModelConfig, {"layers": 3}, "config.json"),
        lambda: from_json(ModelConfig, [1], "config.json"),
    ]
    for attempt in wrong:
        with pytest.raises(ao.InputError, match=r"config\.json"):
            attempt()
    with pytest.raises(ao.InputError, match="multiple of 6"):
        ModelConfig(layers=1, heads=3, width=32, positions=8, vocabulary=8)
    with pytest.raises(ao.InputError, match="accepted: tiny, demo, small, medium"):
        preset("huge", 300)
    with pytest.raises(ao.InputError, match="at most 50304"):
        preset("small", 60_000)


def test_weights_that_an_update_broke_are_never_saved(data: Dataset, tmp_path: Path) -> None:
    config = run_config(data, learning_rate=1e39, checkpoint_every=1, warmup=0)
    with pytest.raises(ao.InputError, match=r"the weights are not finite at step 1; there is no checkpoint yet"):
        list(train(tmp_path / "run", config, data))
    assert steps_of(tmp_path / "run") == []


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": -1.0}, {"learning_rate": math.nan}, {"clip": 0.0}, {"clip": -1.0}, {"ema_decay": 1.0},
     {"warmup": -1}, {"weight_decay": -1.0}, {"optimizer": "muon"}, {"batch_size": 7, "micro_batches": 3},
     {"steps": 10**11}],
)  # fmt: skip
def test_settings_that_cannot_train_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ao.InputError, match=r"\b(muon_)?" + next(iter(change)).replace("optimizer", "learning_rate")):
        replace(TRAINING, **change)  # type: ignore[arg-type]


def test_a_start_that_failed_does_not_bind_the_next(data: Dataset, tmp_path: Path) -> None:
    first = train(tmp_path / "run", run_config(data, seed=3), data)
    next(first)
    first.close()  # type: ignore[attr-defined]
    list(train(tmp_path / "run", run_config(data, seed=4), data))
    assert read_run(tmp_path / "run").training == run_config(data, seed=4).training


def test_a_second_process_changes_nothing_of_the_first(data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(open_corpus(write_texts(tmp_path / "texts")), tmp_path / "other", "bpe:290", validation=0.2)
    other = open_dataset(tmp_path / "other")
    first = train(run, run_config(data), data)
    next(first)
    for dataset in (data, other):
        with pytest.raises(ao.InputError, match="another process"):
            list(train(run, run_config(dataset, checkpoint_every=1), dataset))
    list(first)
    assert read_run(run) == run_config(data)
    ao.load(run)  # with the tokenizer that it was trained with


def test_damaged_metrics_do_not_stop_a_run(data: Dataset, tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    events = train(
        tmp_path / "run", run_config(data), data, stop=lambda: metrics.exists() and metrics.stat().st_size > 900
    )
    list(events)
    with metrics.open("ab") as file:
        file.write(b'\xff{"step": 3')
    list(train(tmp_path / "run", run_config(data), data))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
