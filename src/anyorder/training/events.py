"""What training yields as it goes; the command line prints it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Started:
    step: int
    steps: int
    parameters: int
    device: str
    precision: str
    chunks: int
    left_over: int


@dataclass(frozen=True)
class Stepped:
    step: int  # number of steps done
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float


@dataclass(frozen=True)
class Validated:
    step: int
    nats: dict[str, float]  # by order, of the EMA weights


@dataclass(frozen=True)
class Saved:
    step: int
    folder: Path


@dataclass(frozen=True)
class Ended:
    step: int
    finished: bool


Event = Started | Stepped | Validated | Saved | Ended
