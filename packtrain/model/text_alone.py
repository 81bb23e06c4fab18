"""Mends of multimodal models whose forward fails on text alone, in transformers 5.24.

Molmo2 in training asks for the kinds of tokens, which are 0 for text. Llama4ForConditionalGeneration reads a field that the outputs of its
text part lack.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def let_run_text(model: PreTrainedModel) -> None:
    """Let `model` run text alone, if its forward would fail on it."""
    name = type(model).__name__
    if name == "Molmo2ForConditionalGeneration":
        model.base_model.register_forward_pre_hook(_add_kinds, with_kwargs=True)
    if name == "Llama4ForConditionalGeneration":
        model.get_submodule("language_model").register_forward_hook(_add_pictures)


def _add_kinds(module: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    ids = named.get("input_ids")
    tokens = named["inputs_embeds"][..., 0] if ids is None else ids
    if named.get("mm_token_type_ids") is None:
        named["mm_token_type_ids"] = torch.zeros_like(tokens, dtype=torch.int64)
    return given, named


def _add_pictures(module: nn.Module, given: tuple, outputs: Any) -> None:
    if not hasattr(outputs, "image_outputs"):
        outputs.image_outputs = None
