"""Any-order training from left-to-right weights: the injection begins as the identity."""

import dataclasses
import hashlib

from anyorder.config import ModelConfig
from anyorder.data.batches import generator_for
from anyorder.errors import InputError
from anyorder.models.decoder import Decoder
from anyorder.models.families import make_model
from anyorder.models.model import LanguageModel


def warm_start(donor: LanguageModel, wanted: ModelConfig) -> LanguageModel:
    """Give a donor's weights to a model with the injection that is wanted; all else of its shape is the donor's.

    At step 0 it predicts left to right what the donor does.
    """
    if not isinstance(donor, Decoder) or wanted.family != "decoder":
        raise InputError(
            f"the weights to start from are of family {donor.config.family} and the model of {wanted.family}; "
            "accepted: two decoders"
        )
    shape = dataclasses.replace(donor.config, injection=wanted.injection, entries=wanted.entries)
    if wanted.injection == donor.config.injection:
        return _filled(shape, donor)
    if donor.any_order:
        raise InputError(
            f"the weights to start from have injection {donor.config.injection} and the model {wanted.injection}; "
            "accepted: the same, or weights with injection none"
        )
    if "adaln" in wanted.injection:
        shape = dataclasses.replace(shape, gate_start=1.0)
    return _filled(shape, donor)


def _filled(shape: ModelConfig, donor: LanguageModel) -> LanguageModel:
    model = make_model(shape).initialise(generator_for(0, "warm start"))
    missing, unexpected = model.load_state_dict(donor.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("injection.") for name in missing)
    if shape.injection != donor.config.injection:
        model.injection.become_identity()
    return model


def weights_sha256(model: LanguageModel) -> str:
    """Hash the weights, to know them again."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()
