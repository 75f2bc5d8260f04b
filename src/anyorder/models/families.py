"""The families of models, and the context of each."""

from torch import Tensor

from anyorder.config import ModelConfig
from anyorder.models.cached import CachedContext
from anyorder.models.context import Context
from anyorder.models.decoder import Decoder
from anyorder.models.encoder import Encoder, EncoderContext
from anyorder.models.model import LanguageModel
from anyorder.models.two_stream import TwoStream, TwoStreamContext


def make_model(config: ModelConfig) -> LanguageModel:
    """Build a model with weights that are not drawn yet."""
    match config.family:
        case "decoder":
            return Decoder(config)
        case "two_stream":
            return TwoStream(config)
        case "encoder" | "sedd":
            return Encoder(config)


def open_context(
    model: LanguageModel, rows: int, length: int | None = None, text_lengths: Tensor | None = None
) -> Context:
    """Begin to read `rows` texts of `length` positions; row r has text_lengths[r] tokens, where texts differ."""
    match model:
        case Decoder():
            return CachedContext(model, rows, length)
        case TwoStream():
            return TwoStreamContext(model, rows, length)
        case Encoder():
            return EncoderContext(model, rows, length, text_lengths)
    raise TypeError(f"no context for {type(model).__name__}")
