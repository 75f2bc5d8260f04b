"""Read GPT-2 weights in the Hugging Face layout: a folder with config.json and model.safetensors, or a hub name."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyorder.checkpoint import read_tensors
from anyorder.config import ModelConfig
from anyorder.errors import InputError, first_line
from anyorder.integrations.published import Published
from anyorder.models.decoder import Decoder

FILES = ("config.json", "model.safetensors", "tokenizer.json")
NAMES = (  # their name -> ours, applied in turn
    (r"^transformer\.", ""),
    (r"^wte\.", "token_embedding."),
    (r"^ln_f\.", "final_norm."),
    (r"^h\.", "blocks."),
    (r"^lm_head\.", "head."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".mlp_norm."),
    (r"\.attn\.c_attn\.", ".attention.qkv."),
    (r"\.attn\.c_proj\.", ".attention.out."),
    (r"\.mlp\.c_fc\.", ".mlp.up."),
    (r"\.mlp\.c_proj\.", ".mlp.down."),
)
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
ACCEPTED = "accepted: a GPT-2 model in the Hugging Face layout, with config.json and model.safetensors"


def is_gpt2(folder: Path) -> bool:
    """Tell whether a folder holds a GPT-2 of the Hugging Face layout."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") == "gpt2"
    except (OSError, ValueError, AttributeError):
        return False


def fetch_gpt2(name: str) -> Path:
    """Bring a model of the hub onto this machine; return its folder."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the hub's failures have no common ancestor
        raise InputError(
            f"there is no folder {name}, and no model of that name can be read from the hub ({first_line(error)}); "
            f"{ACCEPTED}"
        ) from None


def read_gpt2(folder: Path) -> Published:
    """Read a folder; the text begins behind an end-of-text token, GPT-2's own start, at its first position."""
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        theirs = read_tensors(folder / "model.safetensors")
        config = _config(about)
        weights = _renamed(theirs, config, int(about["bos_token_id"]))
        with torch.device("meta"):
            Decoder(config).load_state_dict(weights, assign=True)
    except InputError as error:
        raise InputError(f"{folder}: {error}; {ACCEPTED}") from None
    except Exception as error:  # files can be wrong in every way
        raise InputError(f"{folder} is not laid out as expected ({first_line(error)}); {ACCEPTED}") from None
    return Published(config, weights, weights, 0)


def _config(about: dict[str, Any]) -> ModelConfig:
    if about["model_type"] != "gpt2" or about["activation_function"] not in ACTIVATIONS:
        raise InputError(f"it is a {about['model_type']} with {about['activation_function']}")
    if about.get("n_inner") not in (None, 4 * about["n_embd"]) or about.get("layer_norm_epsilon", 1e-5) != 1e-5:
        raise InputError("its inner width is not four times its width, or its norms have another epsilon than 1e-5")
    if about.get("scale_attn_by_inverse_layer_idx") or not about.get("scale_attn_weights", True):
        raise InputError("its attention is scaled in another way than by the square root of a head's width")
    return ModelConfig(
        layers=about["n_layer"],
        heads=about["n_head"],
        width=about["n_embd"],
        positions=about["n_positions"] - 1,  # the first is the start slot's
        vocabulary=about["vocab_size"],
        injection="none",
        norm="layer",
        qk_norm=False,
        bias=True,
        tied_head=True,
        activation=ACTIVATIONS[about["activation_function"]],  # type: ignore[arg-type]
    )


def _renamed(theirs: dict[str, Tensor], config: ModelConfig, start: int) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in theirs.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # a mask, not a weight
            continue
        ours = name
        for pattern, replacement in NAMES:
            ours = re.sub(pattern, replacement, ours)
        matrix = ours.startswith("blocks.") and tensor.dim() == 2
        weights[ours] = tensor.float().T.contiguous() if matrix else tensor.float()  # theirs are (in, out)
    weights["position_embedding.weight"] = weights.pop("wpe.weight")
    weights["start_embedding"] = weights["token_embedding.weight"][start].clone()
    if "head.weight" in weights and not torch.equal(weights["head.weight"], weights["token_embedding.weight"]):
        raise InputError("its head is not tied to its embedding")
    weights["head.weight"] = weights["token_embedding.weight"]
    return weights
