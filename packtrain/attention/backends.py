"""Which attention serves the flattened rows: decided once, with the reason, and carried as a value.

`flash` is transformers' own flash path (FlashAttention 4, 3 or 2, whichever is installed), which takes a row's borders as
`cu_seq_lens_q/k`; `segmented` runs everywhere. Padded batches keep the attention that the model came with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from packtrain.attention import segmented
from packtrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Backend:
    """`name` as in model.attention, `implementation` as transformers knows it, and `why` it was taken."""

    name: str
    implementation: str
    why: str


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation that `model` has now, by transformers' name."""
    return str(model.config._attn_implementation)


def choose_backend(wanted: str, model: PreTrainedModel, device: torch.device) -> Backend:
    """The backend for flattened rows of `model` on `device`.

    Raises UserError where `wanted` (model.attention) names one that is not available here: it is never replaced silently.
    """
    flash, lack = _flash_implementation(model, device)
    if wanted == "flash" and flash is None:
        raise UserError(f"flash attention is not available: {lack}", where="model.attention", fix="set it to auto")
    if flash is not None and wanted in ("auto", "flash"):
        return Backend("flash", flash, "asked for" if wanted == "flash" else "fastest kernel on this device")
    return Backend("segmented", segmented.NAME, "asked for" if wanted == "segmented" else f"no flash kernel: {lack}")


def _flash_implementation(model: PreTrainedModel, device: torch.device) -> tuple[str | None, str]:
    """The newest flash path that can run, or None and what is lacking."""
    if device.type != "cuda":
        return None, f"the device is {device.type}"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return None, f"the weights are {model.dtype}, the kernels take bfloat16 and float16"
    if not model._supports_flash_attn:
        return None, f"{type(model).__name__} does not support it"
    for version, available in (
        (4, is_flash_attn_4_available),
        (3, is_flash_attn_3_available),
        (2, is_flash_attn_2_available),
    ):
        if available():
            return f"flash_attention_{version}", ""
    return None, "no flash-attn package is installed"
