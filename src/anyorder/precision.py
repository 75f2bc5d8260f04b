"""Which number type products run in, and on which device: chosen once, said aloud."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch

from anyorder.config import Precision


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def native_bf16(device: torch.device) -> bool:
    """Tell whether the device multiplies bfloat16 in hardware, rather than emulating it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def pick_precision(wanted: Precision, device: torch.device) -> Literal["bf16", "fp32"]:
    if wanted == "auto":
        return "bf16" if native_bf16(device) else "fp32"
    return wanted


def autocast(precision: Literal["bf16", "fp32"], device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Make contexts in which products run in `precision`; weights, softmax and loss stay in float32."""
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
