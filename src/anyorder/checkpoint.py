"""Run directories: config.json, tokenizer.json, metrics.jsonl and checkpoints that are whole or not there.

checkpoints/step-N/ holds model.safetensors and ema.safetensors, which anybody can read, about.json with the step and
the model's shape, optimizer/ in the format of torch.distributed.checkpoint, and checkpoint.json with the hashes of
all these.
"""

import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint

from anyorder.config import ModelConfig, TrainingConfig, from_json, to_json
from anyorder.data.tokenizer import Tokenizer, load_tokenizer
from anyorder.errors import InputError
from anyorder.files import file_sha256, new_folder, remove_leftovers, sync, write_text
from anyorder.models.families import make_model
from anyorder.models.model import LanguageModel

Weights = Literal["ema", "raw"]
OWN = (  # what a killed process may leave of a run that it was making
    *("checkpoints", "config.json", "tokenizer.json", "metrics.jsonl", ".lock"),
    *(".config.json.partial", ".tokenizer.json.partial", ".metrics.jsonl.partial"),
)
ACCEPTED = "accepted: a run folder written by anyorder train or anyorder import"


class CorruptCheckpoint(UserWarning):
    """A checkpoint is not what was written; an older one is used."""


@dataclass(frozen=True)
class RunConfig:
    """What a run directory's config.json says. Imported runs have no training and no data."""

    preset: str
    model: ModelConfig
    training: TrainingConfig | None
    tokenizer_sha256: str | None
    content_sha256: str | None


def start_run(run: Path) -> None:
    """Make the folders of a run, refusing a folder that holds anything else."""
    if run.exists() and not run.is_dir():
        raise InputError(f"{run} is a file; accepted: a run to go on with, or a name that is free")
    if run.is_dir() and not is_run(run) and any(path.name not in OWN for path in run.iterdir()):
        raise InputError(f"{run} exists and is not a run; accepted: a run to go on with, or a name that is free")
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    for folder in (run, run.parent):
        sync(folder)


def write_config(run: Path, config: RunConfig) -> None:
    write_text(run / "config.json", json.dumps(to_json(config), indent=1) + "\n")


def is_run(run: Path) -> bool:
    return (run / "config.json").is_file()


def read_run(run: Path) -> RunConfig:
    """Read config.json, refusing what it should not hold."""
    path = run / "config.json"
    if not path.is_file():
        raise InputError(f"{run} is not a run: there is no {path}; {ACCEPTED}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        training = fields["training"]
        return RunConfig(
            preset=fields["preset"],
            model=from_json(ModelConfig, fields["model"], f"{path} (model)"),
            training=None if training is None else from_json(TrainingConfig, training, f"{path} (training)"),
            tokenizer_sha256=fields["tokenizer_sha256"],
            content_sha256=fields["content_sha256"],
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a run's configuration ({type(error).__name__}: {error}); {ACCEPTED}") from None


def run_tokenizer(run: Path, config: RunConfig) -> Tokenizer | None:
    """Read the run's tokenizer, refusing another than it was trained with."""
    if config.tokenizer_sha256 is None:
        return None
    tokenizer = load_tokenizer(run / "tokenizer.json")
    if tokenizer.sha256 != config.tokenizer_sha256:
        raise InputError(f"{run}/tokenizer.json is not the tokenizer that {run} was trained with; {ACCEPTED}")
    return tokenizer


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


def steps_of(run: Path) -> list[int]:
    """List the steps of the checkpoints there are, whole or not, in ascending order."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-(0|[1-9][0-9]*)", name))


def save(
    run: Path,
    step: int,
    model: ModelConfig,
    raw: dict[str, Tensor],
    ema: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest `keep`."""
    final = folder_of(run, step)
    with new_folder(final, _survivor(run)) as folder:
        for name, tensors in (("model", raw), ("ema", ema)):
            path = folder / f"{name}.safetensors"
            save_file({key: t.detach().contiguous() for key, t in tensors.items()}, path)
            path.chmod(0o644)  # the library makes it the owner's alone
        if optimizer:
            with _quiet_distributed():
                distributed_checkpoint.save(dict(optimizer), checkpoint_id=folder / "optimizer", no_dist=True)
        about = json.dumps({"step": step, "model": to_json(model)}, indent=1)
        (folder / "about.json").write_text(about + "\n", encoding="utf-8")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        hashes = {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
        (folder / "checkpoint.json").write_text(json.dumps({"sha256": hashes}, indent=1) + "\n", encoding="utf-8")
    for old in steps_of(run)[:-keep]:
        _remove(folder_of(run, old))
    return final


def _survivor(run: Path) -> str:
    steps = steps_of(run)
    return f"the previous checkpoint {folder_of(run, steps[-1])} is untouched" if steps else "there was none before"


def _remove(folder: Path) -> None:
    """Remove a checkpoint such that a process killed on the way leaves no half of one under its name."""
    doomed = folder.with_name(f".{folder.name}.removed.partial")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def verify(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None; a file that may not be read is an OSError, not its fault."""
    try:
        recorded = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))["sha256"]
        if not {"about.json", "model.safetensors", "ema.safetensors"} <= set(dict(recorded)):
            return "checkpoint.json names no weights"
    except (FileNotFoundError, KeyError, TypeError, ValueError, RecursionError):
        return "checkpoint.json is missing or unreadable"
    for name, expected in recorded.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_sha256(folder / name) != expected:
            return f"{name} is not as it was written"
    return None


def newest_whole(run: Path) -> int | None:
    """Find the newest checkpoint that is as it was written, warn of each that is not; None if there never was one."""
    steps = steps_of(run)
    for step in reversed(steps):
        wrong = verify(folder_of(run, step))
        if wrong is None:
            return step
        older = "looking for an older one" if step != steps[0] else "there is no older one"
        warnings.warn(
            f"checkpoint {folder_of(run, step)} is corrupt ({wrong}); {older}", CorruptCheckpoint, stacklevel=2
        )
    if steps:
        raise InputError(f"{run} has no whole checkpoint: all {len(steps)} are corrupt; move them away to start again")
    return None


def set_aside_corrupt(run: Path, newest: int | None) -> None:
    """Rename what is newer than the newest whole checkpoint, and remove what killed processes left."""
    for step in steps_of(run):
        if newest is None or step > newest:
            broken = folder_of(run, step)
            aside = broken.with_name(f"corrupt-{broken.name}")
            shutil.rmtree(aside, ignore_errors=True)
            broken.rename(aside)
    for leftover in (run / "checkpoints").glob(".step-*.partial"):
        remove_leftovers(run / "checkpoints" / leftover.name.split(".")[1])


def load_weights(model: nn.Module, folder: Path, weights: Weights) -> None:
    """Copy a checkpoint's weights into a model of the same shape."""
    path = folder / ("ema.safetensors" if weights == "ema" else "model.safetensors")
    copy_weights(model, read_tensors(path), str(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}); {ACCEPTED}") from None


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    parameters = dict(model.named_parameters())
    different = [n for n in parameters.keys() | tensors.keys() if n not in parameters or n not in tensors]
    different += [n for n in parameters.keys() & tensors.keys() if parameters[n].shape != tensors[n].shape]
    if different:
        raise InputError(f"{where} is of another model: {sorted(different)[0]} differs; {ACCEPTED}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def load_optimizer(folder: Path, state: dict[str, Tensor]) -> None:
    """Fill the optimizers' tensors in place."""
    if not (folder / "optimizer").is_dir():
        raise InputError(f"{folder} has no optimizer state: it was imported, so training cannot go on from it")
    loaded: dict[str, Any] = dict(state)
    with _quiet_distributed():
        distributed_checkpoint.load(loaded, checkpoint_id=folder / "optimizer", no_dist=True)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def load_run(run: Path, weights: Weights = "ema") -> tuple[LanguageModel, Tokenizer | None]:
    """Load the newest whole checkpoint of a run."""
    config = read_run(run)
    tokenizer = run_tokenizer(run, config)
    step = newest_whole(run)
    if step is None:
        raise InputError(f"{run} has no checkpoint yet; accepted: a run that has trained to its first one")
    folder = folder_of(run, step)
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    if from_json(ModelConfig, about["model"], f"{folder}/about.json (model)") != config.model:
        raise InputError(f"{run}/config.json describes another model than {folder} was saved from; {ACCEPTED}")
    model = make_model(config.model)
    load_weights(model, folder, weights)
    return model.eval(), tokenizer


@contextmanager
def _quiet_distributed() -> Iterator[None]:
    """Silence the library's remarks about there being one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.*")
        logger = logging.getLogger("torch.distributed")
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)
