"""Options that commands share: what of a preset can be changed, and how texts are written."""

import dataclasses
from typing import Annotated, Any, Literal

from tyro.conf import arg

from anyorder import orders
from anyorder.config import Family, ModelConfig, Precision, Preset
from anyorder.errors import InputError
from anyorder.sampling.fill import Manner
from anyorder.sampling.filters import Filters, parse_temperature
from anyorder.sampling.schedules import Schedule


def _of(metavar: str) -> Any:
    """Describe an option that stands for a field of the preset."""
    return arg(metavar=metavar, help_behavior_hint="(default: the preset's)")


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What of a preset to change."""

    orders: Annotated[str | None, _of("TEXT")] = None
    """Order distribution, such as random or mix(0.9*random, 0.1*left_to_right)."""
    injection: Annotated[str | None, _of("TEXT")] = None
    """How a slot learns its target: none, add, layer, adaln, rotary, or several joined by +."""
    family: Annotated[Family | None, _of("{decoder,two_stream,encoder,sedd}")] = None
    """Family of models: decoder (GPT), two_stream (XLNet), encoder (MDLM/RADD), sedd."""
    steps: Annotated[int | None, _of("INT")] = None
    """Number of optimizer steps."""
    batch_size: Annotated[int | None, _of("INT")] = None
    """Sequences in one step."""
    micro_batches: Annotated[int | None, _of("INT")] = None
    """Parts that a batch goes through in (gradient accumulation)."""
    optimizer: Annotated[Literal["adamw", "muon"] | None, _of("{adamw,muon}")] = None
    """adamw for all, or muon for the blocks' matrices with adamw for the rest."""
    learning_rate: Annotated[float | None, _of("FLOAT")] = None
    """Peak learning rate of AdamW."""
    muon_learning_rate: Annotated[float | None, _of("FLOAT")] = None
    """Peak learning rate of Muon."""
    warmup: Annotated[int | None, _of("INT")] = None
    """Steps of linear warm-up."""
    weight_decay: Annotated[float | None, _of("FLOAT")] = None
    """Weight decay, of matrices only."""
    clip: Annotated[float | None, _of("FLOAT")] = None
    """Largest norm of the gradient."""
    ema_decay: Annotated[float | None, _of("FLOAT")] = None
    """Decay of the averaged weights."""
    precision: Annotated[Precision | None, _of("{auto,bf16,fp32}")] = None
    """Number type of products; auto takes bf16 where the device has it."""
    seed: Annotated[int | None, _of("INT")] = None
    """Seed of weights, batches and orders."""
    checkpoint_every: Annotated[int | None, _of("INT")] = None
    """Steps between checkpoints."""
    validate_every: Annotated[int | None, _of("INT")] = None
    """Steps between validations."""
    layers: Annotated[int | None, _of("INT")] = None
    """Number of blocks."""
    heads: Annotated[int | None, _of("INT")] = None
    """Attention heads."""
    width: Annotated[int | None, _of("INT")] = None
    """Width of the residual stream."""
    positions: Annotated[int | None, _of("INT")] = None
    """Length of the sequences the model reads."""
    norm: Annotated[Literal["rms", "layer"] | None, _of("{rms,layer}")] = None
    """RMSNorm or LayerNorm."""
    qk_norm: Annotated[bool | None, _of("{True,False}")] = None
    """Normalise queries and keys per head."""
    bias: Annotated[bool | None, _of("{True,False}")] = None
    """Biases in linear maps."""
    tied_head: Annotated[bool | None, _of("{True,False}")] = None
    """Share the head's weight with the token embedding."""
    gate_start: Annotated[float | None, _of("FLOAT")] = None
    """adaln only: what gates start at, 0 as published or 1."""
    rotary_base: Annotated[float | None, _of("FLOAT")] = None
    """rotary only: base of the frequencies."""

    def shape_given(self) -> dict[str, Any]:
        """Name what of the model's shape is given, the injection and family aside."""
        fields = {field.name for field in dataclasses.fields(ModelConfig)} - {"injection", "family"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name in fields and value is not None}

    def apply(self, to: Preset) -> Preset:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if "orders" in given:
            given["orders"] = str(orders.parse(given["orders"]))
        model = {name: value for name, value in given.items() if hasattr(to.model, name)}
        training = {name: value for name, value in given.items() if hasattr(to.training, name)}
        made = Preset(dataclasses.replace(to.model, **model), dataclasses.replace(to.training, **training))
        injections = made.model.injection.split("+")
        for name, used in (
            ("gate_start", "adaln" in injections),
            ("rotary_base", "rotary" in injections),
            ("muon_learning_rate", made.training.optimizer == "muon"),
        ):
            if name in given and not used:
                raise InputError(
                    f"{name} was given, which {made.model.injection} with {made.training.optimizer} does not use; "
                    "accepted: gate_start with adaln, rotary_base with rotary, muon_learning_rate with muon"
                )
        return made


@dataclasses.dataclass(frozen=True)
class Ways:
    """How tokens are drawn, and how many at a time."""

    steps: int | None = None
    """Write in so many steps, several tokens at once; without it one token a step."""
    schedule: Schedule = "linear"
    """Tokens of each step: linear, as many in each; cosine, few at first; ancestral, each in a step of its own at
    random (masked diffusion); euler or tweedie, SEDD's own."""
    exact: bool = False
    """Write several tokens a pass and still sample from the model's own law (speculative)."""
    draft: int = 0
    """With --exact: tokens drafted ahead; 0 adapts their number."""
    burst: int = 0
    """Write several tokens a pass along the best of so many random orders (approximate)."""
    temperature: str = "1.0"
    """1 samples from the model's law, less is surer, 0 takes the likeliest; 1.0..0.7 goes from one to the other."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this much probability."""
    min_p: float = 0.0
    """Draw from tokens at least this share as likely as the likeliest."""

    def manner(self, order: str) -> Manner:
        return Manner(order, self.steps, self.schedule, self.exact, self.draft, self.burst)

    def filters(self) -> Filters:
        return Filters(*parse_temperature(self.temperature), self.top_k, self.top_p, self.min_p)
