"""Floating-point operations of training a model, for the logged MFU (model FLOPs utilisation).

Only operations that the training needs count, as in Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B): no padding, and nothing
that gradient checkpointing runs again, and no towers of pictures. A weight of a linear layer takes 2 FLOPs a token forwards, 2 for the gradient of its input,
from the first trained layer on, and 2 for its own gradient, if it is trained. An expert counts by the share of tokens that it gets, the
output head by the tokens that predict a target: it is computed at no others.
Attention takes 2 FLOPs for every dimension of a query and a key that it may see, 2 for the value, and twice that backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from packtrain.model.load import base_model
from packtrain.model.spread import elements, language_layers


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """FLOPs by purpose.

    `token`: for a token in the linear layers. `target`: for a target in the output head. `by_window`: for a (query, key) pair in all attention
    layers with this window (None: no window).
    """

    token: float
    target: float
    by_window: dict[int | None, float]

    def of(self, lengths: np.ndarray, shared: np.ndarray | None, targets: int) -> float:
        """Return the FLOPs of documents of `lengths` int[n] tokens.

        `targets`: their trained targets together. `shared` int[m]: lengths of beginnings that are computed once with another document.
        """
        shared = np.zeros(0, np.int64) if shared is None else shared
        tokens = int(lengths.sum(dtype=np.int64)) - int(shared.sum(dtype=np.int64))
        visible = {window: visible_keys(lengths, window) - visible_keys(shared, window) for window in self.by_window}
        attention = sum(pair * visible[window] for window, pair in self.by_window.items())
        return tokens * self.token + targets * self.target + attention


def visible_keys(lengths: np.ndarray, window: int | None) -> int:
    """Count the keys that all queries may see, in documents of `lengths` int[n]. Without a window a document has l(l + 1) / 2."""
    whole = lengths.astype(np.int64)
    inside = whole if window is None else np.minimum(whole, window)
    beyond = (whole - inside) * (window or 0)
    return int((inside * (inside + 1) // 2 + beyond).sum())


def training_flops(model: torch.nn.Module, *, forwards: int = 0) -> TrainingFlops:
    """Return the FLOPs of training `model` (adapters included). `forwards`: extra forward passes, such as DPO's of the reference."""
    base = base_model(model)
    config = base.config.get_text_config()
    layers, embedding = language_layers(base), cast(nn.Module, base.get_input_embeddings())
    embedding_trained = any(weight.requires_grad for weight in embedding.parameters())
    trained = (number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    first = 0 if embedding_trained else next(trained, len(layers))
    more, token, target = 2 * forwards, 0.0, 0.0
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            if len(getattr(weight, "ds_shape", weight.shape)) > 1 and "original_module" not in name:
                gradients = 2 * (number >= first) + 2 * weight.requires_grad
                share = _share_of_an_expert(config) if ".experts." in f".{name}" else 1.0
                token += elements(weight) * share * (2 + more * ("lora_" not in name) + gradients)
    if (head := base.get_output_embeddings()) is not None:
        weight = cast(nn.Linear, head).weight
        reached = 2 if first < len(layers) else 0
        target = elements(weight) * (2 + more + reached + 2 * weight.requires_grad)
    return TrainingFlops(token, target, _attention(config, len(layers), first, more))


def _share_of_an_expert(config: PreTrainedConfig) -> float:
    """Return the mean share of the tokens that an expert gets."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(config, name, None))), 1)
    return (getattr(config, "num_experts_per_tok", None) or experts) / experts


def _attention(config: PreTrainedConfig, layers: int, first: int, more: int) -> dict[int | None, float]:
    """Return the FLOPs of a (query, key) pair in all layers, by window. Layers before the `first` trained one have no backward pass."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return {}
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    value = getattr(config, "v_head_dim", None) or width
    kinds = getattr(config, "layer_types", None) or [None] * layers
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    by_window: dict[int | None, float] = {}
    for number, kind in enumerate(kinds[:layers]):
        if (kind is not None and "attention" not in kind) or kind == "linear_attention":
            continue
        own = window if kind in (None, "sliding_attention") else None
        passes = 1 + more // 2 + 2 * (number >= first)
        by_window[own] = by_window.get(own, 0.0) + passes * 2 * heads * (width + value)
    return by_window
