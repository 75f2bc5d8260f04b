"""What a model and a training run are made of: frozen dataclasses, presets as functions, JSON there and back."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from anyorder.errors import InputError

C = TypeVar("C")
LARGE = 10**9  # no count of anything here reaches it
Precision = Literal["auto", "bf16", "fp32"]  # of matrix products; "auto" is bf16 where the device has it


Family = Literal["decoder", "two_stream", "encoder", "sedd"]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. `injection` is how a slot learns its target: see models/injection.py."""

    layers: int
    heads: int
    width: int
    positions: int
    vocabulary: int
    injection: str = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = True
    bias: bool = True
    tied_head: bool = False
    gate_start: float = 0.0  # `adaln` only: 0 as published, 1 passes every block's output through from the start
    rotary_base: float = 100.0  # `rotary` only
    family: Family = "decoder"
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # the latter is GPT-2's
    entries: int = 0  # how many of the vocabulary occur in text, the rest is padding and never written; 0: all

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "positions", "vocabulary"):
            if not 1 <= getattr(self, name) < LARGE:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: 1 or more, below {LARGE:,}")
        if not 0 <= self.entries <= self.vocabulary:
            raise InputError(f"entries is {self.entries}; accepted: 0 to {self.vocabulary}, the vocabulary")
        if not 0 < self.rotary_base < math.inf or not math.isfinite(self.gate_start):
            raise InputError(
                f"rotary_base is {self.rotary_base} and gate_start {self.gate_start}; "
                "accepted: a finite base above 0 and a finite start"
            )
        if self.family != "decoder" and self.injection not in ("none", "rotary"):
            raise InputError(
                f"family {self.family} was given with injection {self.injection}, and only a decoder's slots need to "
                "be told their target; accepted: --injection none or rotary"
            )
        if self.width % (2 * self.heads):
            raise InputError(
                f"width {self.width} does not divide into {self.heads} heads of an even size; "
                f"accepted: a multiple of {2 * self.heads}"
            )


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained. Of these, only the fields of `MAY_CHANGE` may change when a run is taken up again."""

    steps: int
    batch_size: int  # sequences in one step, over all micro-batches
    learning_rate: float  # AdamW's
    micro_batches: int = 1  # gradient accumulation: the batch goes through in this many parts
    orders: str = "random"
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_learning_rate: float = 0.0  # for the blocks' matrices, when optimizer is "muon"
    warmup: int = 0
    final_learning_rate: float = 0.1  # what the cosine ends at, as a share of the peak
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    ema_decay: float = 0.9999
    precision: Precision = "auto"
    seed: int = 0
    checkpoint_every: int = 1000
    validate_every: int = 500
    validation_sequences: int = 64
    keep: int = 2  # checkpoints that stay; two, so that one that rots leaves another
    start: str = ""  # the hash of the weights that training began with, if they were not drawn

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "micro_batches", "checkpoint_every", "validate_every", "validation_sequences")
        for name in (*counts, "keep"):
            if not 1 <= getattr(self, name) < LARGE:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: 1 or more, below {LARGE:,}")
        for name in ("learning_rate", "clip", *(["muon_learning_rate"] if self.optimizer == "muon" else [])):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: a finite number above 0")
        for name in ("warmup", "weight_decay", "muon_learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: 0 or more")
        for name in ("ema_decay", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: 0 or more and less than 1")
        if not 0 <= self.final_learning_rate <= 1:
            raise InputError(f"final_learning_rate is {self.final_learning_rate}; accepted: a share from 0 to 1")
        if self.batch_size % self.micro_batches:
            raise InputError(
                f"batch_size {self.batch_size} does not divide into {self.micro_batches} micro-batches; "
                "accepted: a number of micro-batches that divides it"
            )


MAY_CHANGE = ("checkpoint_every", "validate_every", "validation_sequences", "keep")


@dataclass(frozen=True)
class Preset:
    model: ModelConfig
    training: TrainingConfig


def tiny(vocabulary: int) -> Preset:
    """Trains in about a minute: for trying an idea, and for comparisons at equal tokens."""
    return _ours(vocabulary, heads=2, width=128, positions=64, batch_size=64, steps=600)


def demo(vocabulary: int) -> Preset:
    """The model of `make demo`: 4 layers of 256 at 128 positions, minutes on two CPU cores."""
    return _ours(vocabulary, heads=4, width=256, positions=128, batch_size=32, steps=700)


def _ours(vocabulary: int, heads: int, width: int, positions: int, batch_size: int, steps: int) -> Preset:
    return Preset(
        ModelConfig(
            layers=4,
            heads=heads,
            width=width,
            positions=positions,
            vocabulary=_padded(vocabulary),
            injection="rotary",
            entries=vocabulary,
        ),
        TrainingConfig(
            steps=steps,
            batch_size=batch_size,
            learning_rate=2e-3,
            optimizer="muon",
            muon_learning_rate=6e-3,
            warmup=30,
            final_learning_rate=0.0,
            orders="mix(0.9*random, 0.1*left_to_right)",
            ema_decay=0.99,
            checkpoint_every=100,
            validate_every=100,
        ),
    )


def _published(vocabulary: int, layers: int, heads: int, width: int, learning_rate: float) -> Preset:
    return Preset(
        ModelConfig(
            layers=layers,
            heads=heads,
            width=width,
            positions=1024,
            vocabulary=50304,
            injection="adaln",
            norm="rms",
            entries=min(vocabulary, 50304),
        ),
        TrainingConfig(
            steps=500_000,
            batch_size=1024,
            micro_batches=64,
            learning_rate=learning_rate,
            final_learning_rate=6e-5 / learning_rate,
            warmup=2000,
            orders="mix(0.9*random, 0.1*left_to_right)",
            checkpoint_every=1000,
            validate_every=2500,
        ),
    )


def small(vocabulary: int) -> Preset:
    """The published AO-GPT of 124M parameters plus its conditioning: 12 layers of 768 at 1024 positions."""
    return _published(vocabulary, layers=12, heads=12, width=768, learning_rate=6e-4)


def medium(vocabulary: int) -> Preset:
    """The published AO-GPT of 350M: 24 layers of 1024 at 1024 positions."""
    return _published(vocabulary, layers=24, heads=16, width=1024, learning_rate=3e-4)


PRESETS: dict[str, Callable[[int], Preset]] = {f.__name__: f for f in (tiny, demo, small, medium)}


def preset(name: str, vocabulary: int) -> Preset:
    """Find a preset by name for a tokenizer of `vocabulary` entries."""
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; accepted: {', '.join(PRESETS)}")
    found = PRESETS[name](vocabulary)
    if found.model.vocabulary < vocabulary:
        raise InputError(
            f"preset {name} has a vocabulary of {found.model.vocabulary} and the data's tokenizer one of {vocabulary}; "
            f"accepted: a tokenizer of at most {found.model.vocabulary} entries (gpt2 has 50257)"
        )
    return found


def _padded(vocabulary: int) -> int:
    """Round up to a multiple of 64, which matrix products like."""
    return -(-vocabulary // 64) * 64


def to_json(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_json(kind: type[C], fields: object, where: str) -> C:
    """Read a dataclass back, refusing fields it does not have and values of another type."""
    types = get_type_hints(kind)
    if not isinstance(fields, dict):
        raise InputError(f"{where} holds {json.dumps(fields)[:40]} where the fields of {kind.__name__} should be")
    unknown = sorted(set(fields) - set(types))
    if unknown:
        raise InputError(
            f"{where} has {', '.join(unknown)}, which {kind.__name__} does not; accepted: {', '.join(types)}"
        )
    for name, value in fields.items():
        accepted = get_args(types[name]) if get_args(types[name]) else None
        wrong = value not in accepted if accepted else not isinstance(value, _json_types(types[name]))
        if wrong:
            kinds = " or ".join(map(repr, accepted)) if accepted else types[name].__name__
            raise InputError(f"{where} has {name} = {value!r}; accepted: {kinds}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise InputError(f"{where} is not a whole {kind.__name__}: {error}") from None


def _json_types(kind: type) -> tuple[type, ...]:
    return (int, float) if kind is float else (kind,)
