"""Towers of multimodal models: their names, and hooks for text alone.

Two models fail on text alone in transformers 5.24. Hooks give them the missing values: Molmo2 in training needs token types, which
are 0 for text. Llama4ForConditionalGeneration reads a field that the outputs of its text part lack.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.attention.forwards import language_model

_SEES = re.compile("vision|audio|vq")
"""Beginnings of the keys of towers in the config of a whole model."""


def towers_of(model: PreTrainedModel) -> list[str]:
    """Return the names of towers and projectors, outermost modules only. A text model has none.

    In most models they stand beside the language model and its head. In others (git, chameleon) they are parts of it, and a tower is
    known by its config.
    """
    part, head = language_model(model), model.get_output_embeddings()

    def beside(module: nn.Module, place: str) -> list[str]:
        found = list[str]()
        for name, child in module.named_children():
            if child is part:
                found += within(child, f"{place}{name}.")
            elif part in (inside := [*child.modules()]) or head in inside:
                found += [] if child is head else beside(child, f"{place}{name}.")
            elif any(True for _ in child.parameters()):  # dropout and the like have none
                found.append(f"{place}{name}")
        return found

    def within(module: nn.Module, place: str) -> list[str]:
        found = list[str]()
        for name, child in module.named_children():
            key = getattr(getattr(child, "config", None), "base_config_key", "")
            found += [f"{place}{name}"] if _SEES.match(key) else within(child, f"{place}{name}.")
        return found

    return beside(model, "") if model.config.get_text_config() is not model.config else within(model, "")


def let_run_text(model: PreTrainedModel) -> None:
    """Let `model` run text alone, if its forward would fail on it."""
    name = type(model).__name__
    if name == "Molmo2ForConditionalGeneration":
        model.base_model.register_forward_pre_hook(_add_token_types, with_kwargs=True)
    if name == "Llama4ForConditionalGeneration":
        model.get_submodule("language_model").register_forward_hook(_add_image_outputs)


def _add_token_types(module: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    ids = named.get("input_ids")
    tokens = named["inputs_embeds"][..., 0] if ids is None else ids
    if named.get("mm_token_type_ids") is None:
        named["mm_token_type_ids"] = torch.zeros_like(tokens, dtype=torch.int64)
    return given, named


def _add_image_outputs(module: nn.Module, given: tuple, outputs: Any) -> None:
    if not hasattr(outputs, "image_outputs"):
        outputs.image_outputs = None
