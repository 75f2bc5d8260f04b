"""The training loop: a generator of events. Everything random in step s is drawn from (seed, s)."""

import fcntl
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from anyorder import orders
from anyorder.checkpoint import (
    RunConfig,
    folder_of,
    load_optimizer,
    load_weights,
    newest_whole,
    read_run,
    read_tensors,
    save,
    set_aside_corrupt,
    start_run,
    steps_of,
    write_config,
)
from anyorder.config import MAY_CHANGE, ModelConfig, TrainingConfig
from anyorder.data.batches import Batches, generator_for, spread_chunks
from anyorder.data.shards import Dataset
from anyorder.errors import InputError
from anyorder.evaluation.figures import AlongOrders, score
from anyorder.files import write_text
from anyorder.models.encoder import Encoder
from anyorder.models.families import make_model
from anyorder.models.model import LanguageModel
from anyorder.objectives import draw_hidden, masked_nll, order_nll, score_entropy, stratified
from anyorder.precision import autocast, pick_device, pick_precision
from anyorder.training.events import Ended, Event, Saved, Started, Stepped, Validated
from anyorder.training.memory import keep_freed_memory
from anyorder.training.optimizers import (
    EMA,
    learning_rate_share,
    make_optimizers,
    make_state,
    optimizer_tensors,
    set_learning_rate,
)

VALIDATION_DRAWS = 8  # of what is hidden, for each held-out chunk of an encoder


def train(
    run: Path,
    config: RunConfig,
    data: Dataset,
    stop: Callable[[], bool] = lambda: False,
    first: LanguageModel | None = None,
) -> Iterator[Event]:
    """Train until the last step, or until stop() says so; go on from the newest checkpoint where there is one.

    `first` holds the weights to begin with, if they are not to be drawn.
    """
    training = config.training
    assert training is not None
    distribution = orders.parse(training.orders)
    _check_single_order(config.model, distribution)
    stream = data.split("train", config.model.positions)
    held_out = spread_chunks(
        data.split("validation", config.model.positions), config.model.positions, training.validation_sequences
    )
    if steps_of(run):
        _check_same(run, config)  # refused before anything is written
    batches = Batches(stream, config.model.positions, training.batch_size, training.seed)
    model = first or make_model(config.model).initialise(generator_for(training.seed, "weights"))
    loop = _Loop(run, model, training, distribution, batches, held_out)
    start_run(run)
    with _alone(run):
        if steps_of(run):
            _check_same(run, config)  # another process may have saved meanwhile
        else:
            write_text(run / "tokenizer.json", data.tokenizer.to_json())
        write_config(run, config)
        yield from loop.events(stop)


def _check_single_order(model: ModelConfig, distribution: orders.OrderDistribution) -> None:
    if model.family == "sedd" and not orders.is_uniform(distribution):
        raise InputError(
            f"family sedd hides every position by the same chance, and the orders are {distribution}; "
            "accepted: --orders random"
        )
    if model.family == "decoder" and model.injection == "none" and distribution != orders.LeftToRight():
        raise InputError(
            f"a model with injection none reads left to right only, and the orders are {distribution}; "
            "accepted: --orders left_to_right, or another injection"
        )


def _check_same(run: Path, config: RunConfig) -> None:
    """Refuse to go on with a run under a configuration it was not started with."""
    before = read_run(run)
    if before.training is None:
        raise InputError(f"{run} was imported and has no optimizer state; accepted: a run that was trained here")
    for name in ("tokenizer_sha256", "content_sha256"):
        if getattr(before, name) != getattr(config, name):
            what = "another tokenizer" if name == "tokenizer_sha256" else "other text or another split"
            raise InputError(
                f"the data were prepared with {what} than those {run} was started on; accepted: the same data"
            )
    for part in ("model", "training"):
        old, new = getattr(before, part), getattr(config, part)
        for field in fields(old):
            was, now = getattr(old, field.name), getattr(new, field.name)
            if was != now and field.name not in MAY_CHANGE:
                raise InputError(
                    f"{run} was started with {field.name} = {was} and now {now} was given; "
                    "accepted: the same to go on, or another --out"
                )


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Hold the run's lock, which the system drops if the process dies."""
    with (run / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another process is training {run}; wait for it, or choose another --out") from None
        yield


def draw_step(
    model: LanguageModel,
    distribution: orders.OrderDistribution,
    batch: int,
    length: int,
    generator: torch.Generator,
    progress: float,
) -> tuple[Tensor, ...]:
    """Draw what is random in a step of the model's family, all of it for the global batch, each (B, ...)."""
    if model.config.family == "sedd":
        time = stratified(batch, generator)
        return time.float(), draw_hidden(time, length, generator)
    order = distribution.sample(batch, length, generator, progress)  # (B, T)
    if not isinstance(model, Encoder):
        return (order,)
    return order, (stratified(batch, generator) * length).long().clamp(max=length - 1)


def nats_of(
    model: LanguageModel, distribution: orders.OrderDistribution, tokens: Tensor, *drawn: Tensor
) -> Tensor:  # (B, T)
    """Score tokens (B, T) by the family's objective, with what was drawn for them; which follows from the orders."""
    if not isinstance(model, Encoder):
        return order_nll(model, tokens, *drawn)
    if model.noise is not None:
        return score_entropy(model, tokens, *drawn)
    order, known = drawn
    return masked_nll(model, tokens, order, known, orders.is_uniform(distribution))


class _Loop:
    """What one process holds while it trains."""

    def __init__(
        self,
        run: Path,
        model: LanguageModel,
        training: TrainingConfig,
        distribution: orders.OrderDistribution,
        batches: Batches,
        held_out: Tensor,
    ):
        self.run, self.training, self.distribution, self.batches = run, training, distribution, batches
        self.device = pick_device()
        self.precision = pick_precision(training.precision, self.device)
        self.autocast = autocast(self.precision, self.device)
        self.held_out = held_out.to(self.device)
        self.model = model.to(self.device).train()
        self.optimizers = make_optimizers(self.model, training)
        self.ema = EMA(self.model, training.ema_decay)
        self.step = 0

    def events(self, stop: Callable[[], bool]) -> Iterator[Event]:
        keep_freed_memory()
        saved = self._resume()
        length = self.batches.length
        yield Started(
            self.step,
            self.training.steps,
            sum(p.numel() for p in self.model.parameters()),
            str(self.device),
            self.precision,
            self.batches.count,
            len(self.batches.stream) - self.batches.count * length,
        )
        with _open_metrics(self.run, self.step) as metrics:
            while self.step < self.training.steps and not stop():
                stepped = self._one_step(saved)
                _write(metrics, stepped)
                yield stepped
                last = self.step == self.training.steps
                validating = last or self.step % self.training.validate_every == 0
                saving = last or self.step % self.training.checkpoint_every == 0
                if validating or saving:
                    self._demand_finite(saved)
                if validating:
                    validated = Validated(self.step, self._validate())
                    _write(metrics, validated)
                    yield validated
                if saving:
                    saved = self._save()
                    yield Saved(saved, folder_of(self.run, saved))
            if saved != self.step:
                self._demand_finite(saved)
                saved = self._save()
                yield Saved(saved, folder_of(self.run, saved))
        yield Ended(self.step, self.step == self.training.steps)

    def _resume(self) -> int | None:
        """Take up the newest whole checkpoint; return its step."""
        newest = newest_whole(self.run)
        set_aside_corrupt(self.run, newest)
        if newest is not None:
            folder = folder_of(self.run, newest)
            if newest > 0:
                make_state(self.optimizers)
                load_optimizer(folder, optimizer_tensors(self.model, self.optimizers))
            load_weights(self.model, folder, "raw")
            for name, tensor in read_tensors(folder / "ema.safetensors").items():
                self.ema.average[name].copy_(tensor)
            self.step = newest
        return newest

    def _one_step(self, saved: int | None) -> Stepped:
        start = time.perf_counter()
        config, step = self.training, self.step
        share = learning_rate_share(step, config)
        set_learning_rate(self.optimizers, share)
        tokens = self.batches.rows(step)  # (B, T)
        generator = generator_for(config.seed, "orders", step)
        drawn = draw_step(self.model, self.distribution, len(tokens), tokens.shape[1], generator, step / config.steps)
        loss = 0.0
        parts = (part.to(self.device).chunk(config.micro_batches) for part in (tokens, *drawn))
        for part in zip(*parts, strict=True):
            with self.autocast():
                nats = nats_of(self.model, self.distribution, *part).mean()
            (nats / config.micro_batches).backward()
            loss += nats.item() / config.micro_batches
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._diverged(f"the loss is {loss} and the gradient's norm {norm} at step {step + 1}", saved)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.ema.update(self.step)
        speed = tokens.numel() / (time.perf_counter() - start)
        return Stepped(self.step, loss, share * config.learning_rate, norm, speed)

    def _diverged(self, what: str, saved: int | None) -> InputError:
        good = "there is no checkpoint yet"
        if saved is not None:
            good = f"the last good checkpoint is {folder_of(self.run, saved)}"
        return InputError(
            f"{what}; {good}; accepted: finite ones, which a lower learning rate or more warm-up may give"
        )

    def _demand_finite(self, saved: int | None) -> None:
        """Refuse to validate or save weights that an update has broken."""
        weights = [p.detach() for p in self.model.parameters()] + list(self.ema.average.values())
        if not torch.stack(torch._foreach_norm(weights)).isfinite().all():
            raise self._diverged(f"the weights are not finite at step {self.step}", saved)

    def _validate(self) -> dict[str, float]:
        """Score the held-out chunks with the EMA weights, by the same draws at every validation."""
        model = self.ema.model
        rows = max(1, self.training.batch_size // self.training.micro_batches)
        found = {}
        if isinstance(model, Encoder):  # which would read each text again for every step of an order
            return {"bound": self._validation_bound(model, rows)}
        for name in ("left_to_right", "random") if model.any_order else ("left_to_right",):
            numbers = torch.arange(len(self.held_out)).split(rows)
            batches = zip((part.tolist() for part in numbers), self.held_out.split(rows), strict=True)
            parts = score(AlongOrders(name, orders.parse(name)), model, batches, 0, self.autocast)
            found[name] = torch.cat([nats for _, nats in parts]).mean().item() / self.held_out.shape[1]
        return found

    @torch.no_grad()
    def _validation_bound(self, model: Encoder, rows: int) -> float:
        """Repeat the training objective on every held-out chunk."""
        found = []
        for repeat in range(VALIDATION_DRAWS):
            generator = generator_for(0, "validation", repeat)
            count, length = self.held_out.shape
            drawn = draw_step(model, self.distribution, count, length, generator, 1.0)
            parts = (part.to(self.device).split(rows) for part in (self.held_out, *drawn))
            for part in zip(*parts, strict=True):
                with self.autocast():
                    found.append(nats_of(model, self.distribution, *part).double().sum())
        return float(torch.stack(found).sum()) / self.held_out.numel() / VALIDATION_DRAWS

    def _save(self) -> int:
        raw = {name: p.detach() for name, p in self.model.named_parameters()}
        state = optimizer_tensors(self.model, self.optimizers)
        save(self.run, self.step, self.model.config, raw, self.ema.average, state, self.training.keep)
        return self.step


@contextmanager
def _open_metrics(run: Path, step: int) -> Iterator[IO[str]]:
    """Open metrics.jsonl for appending, without what was written after the checkpoint that the run goes on from."""
    path = run / "metrics.jsonl"
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by a kill
    write_text(path, "".join(kept))
    with path.open("a", encoding="utf-8") as file:
        yield file


def _write(metrics: IO[str], event: Stepped | Validated) -> None:
    line = (
        {"step": event.step, "validation": event.nats}
        if isinstance(event, Validated)
        else {field.name: getattr(event, field.name) for field in fields(event)}
    )
    metrics.write(json.dumps(line) + "\n")
    metrics.flush()
