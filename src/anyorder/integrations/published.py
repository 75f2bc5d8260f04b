"""Read the published AO-GPT and sigma-GPT training checkpoints (`.pt`), by parameter name, EMA weights or raw ones."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from anyorder.config import ModelConfig
from anyorder.errors import InputError, first_line
from anyorder.models.decoder import Decoder

NAMES = (  # published name -> ours, applied in turn
    (r"^transformer\.wte\.", "token_embedding."),
    (r"^transformer\.wpe\.", "position_embedding."),
    (r"^transformer\.wnonee\.weight$", "start_embedding"),
    (r"^transformer\.wtpe\.", "injection.target_position_embedding."),
    (r"^transformer\.(final_layer\.)?ln_f\.", "final_norm."),
    (r"^transformer\.final_layer\.adaLN_final\.1\.", "injection.final_map."),
    (r"^transformer\.h\.(\d+)\.adaLN\.1\.", r"injection.block_maps.\1."),
    (r"^transformer\.h\.", "blocks."),
    (r"^lm_head\.", "head."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".mlp_norm."),
    (r"\.attn\.c_attn\.", ".attention.qkv."),
    (r"\.attn\.c_proj\.", ".attention.out."),
    (r"\.attn\.q_norm\.", ".attention.query_norm."),
    (r"\.attn\.k_norm\.", ".attention.key_norm."),
    (r"\.mlp\.c_fc\.", ".mlp.up."),
    (r"\.mlp\.c_proj\.", ".mlp.down."),
)
ACCEPTED = "accepted: a training checkpoint of AO-GPT or sigma-GPT with model, ema_model and model_args"


@dataclass(frozen=True)
class Published:
    """What a published checkpoint holds, in this package's names."""

    config: ModelConfig
    raw: dict[str, Tensor]
    ema: dict[str, Tensor]
    step: int

    def model(self, weights: Literal["ema", "raw"]) -> Decoder:
        model = Decoder(self.config)
        model.load_state_dict(self.ema if weights == "ema" else self.raw)
        return model.eval()


def read_published(path: Path) -> Published:
    """Read a published `.pt` file; nothing in it is executed."""
    checkpoint = _read(path)
    try:
        return _understand(checkpoint)
    except InputError as error:
        raise InputError(f"{path}: {error}; {ACCEPTED}") from None
    except Exception as error:  # a file can be wrong in every way that Python objects can
        raise InputError(f"{path} is not laid out as expected ({first_line(error)}); {ACCEPTED}") from None


def _understand(checkpoint: dict[str, Any]) -> Published:
    raw = {name.removeprefix("module.").removeprefix("_orig_mod."): t for name, t in checkpoint["model"].items()}
    arguments = checkpoint["model_args"]
    adaln = "transformer.h.0.adaLN.1.weight" in raw
    tied = torch.equal(raw["lm_head.weight"], raw["transformer.wte.weight"])
    config = ModelConfig(
        layers=arguments["n_layer"],
        heads=arguments["n_head"],
        width=arguments["n_embd"],
        positions=arguments["block_size"],
        vocabulary=arguments["vocab_size"],
        injection="adaln" if adaln else "add",
        norm="rms" if adaln else "layer",
        qk_norm="transformer.h.0.attn.q_norm.weight" in raw,
        bias=arguments["bias"],
        tied_head=tied,
        entries=50257 if arguments["vocab_size"] == 50304 else 0,  # GPT-2's, padded
    )
    # shadow parameters are listed as model.parameters() lists them, where a tied head counts once
    names = [name for name in raw if not (tied and name.startswith("lm_head."))]
    shadows = checkpoint["ema_model"]["shadow_params"]
    if len(names) != len(shadows):
        raise InputError(f"it has {len(shadows)} EMA tensors for {len(names)} parameters")
    ema = dict(zip(names, shadows, strict=True))
    found = Published(config, _renamed(raw, tied), _renamed(ema, tied), int(checkpoint["iter_num"]))
    for weights in (found.raw, found.ema):
        with torch.device("meta"):
            Decoder(config).load_state_dict(weights, assign=True)
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"there is no file {path}; {ACCEPTED}")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise InputError(f"its part {damaged} is damaged")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except InputError as error:
        raise InputError(f"{path} cannot be read as a checkpoint ({error}); {ACCEPTED}") from None
    except Exception:  # torch raises whatever the bytes lead it to, and advises what would execute them
        raise InputError(f"{path} cannot be read as a checkpoint (torch cannot unpickle it); {ACCEPTED}") from None
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds a {type(checkpoint).__name__}; {ACCEPTED}")
    missing = [key for key in ("model", "ema_model", "model_args", "iter_num") if key not in checkpoint]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}; {ACCEPTED}")
    return checkpoint


def _renamed(weights: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor.detach().float().reshape(-1) if name == "start_embedding" else tensor.detach().float()
    if tied:
        renamed["head.weight"] = renamed["token_embedding.weight"]
    return renamed
