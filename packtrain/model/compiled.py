"""`trainer.torch_compile`: compiled kernels for the parts of every layer except attention.

Regional compilation (docs.pytorch.org/tutorials/recipes/regional_compilation.html): the code compiled for the first layer serves
all. The regions are a layer's parts, not the whole layer: transformers checkpoints activations around a layer's forward. Attention by
Segments stays outside of the graphs, since the documents of a row are Python numbers that differ from row to row. FSDP2's hooks, which
gather a layer's weights, belong to the layer, so they run as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packtrain.attention.backends import OWN_CODE, attention_functions
from packtrain.attention.forwards import uses_attention_interface
from packtrain.errors import UserError

inductor: Any = torch._inductor.config
dynamo: Any = torch._dynamo.config
KEY = "trainer.torch_compile"
BACKEND = "inductor"
MAX_VARIANTS = 16
"""How often a part is compiled anew, for proofs and training, rows and batches. After that it runs uncompiled."""


def compile_layers(model: PreTrainedModel) -> int:
    """Compile the parts of the layers of `model` when they first run. Returns the number of layers.

    Parameters keep their names. Raises UserError if the model's code does not allow it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if why := _why_not(model, layers):
        raise UserError(f"{type(model).__name__} cannot be compiled: {why}", where=KEY, fix=f"set {KEY}=false")
    for name in attention_functions():
        AttentionInterface.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    inductor.fallback_random = True  # dropout draws the same numbers as without compiling
    dynamo.recompile_limit = MAX_VARIANTS
    for layer in layers:
        for part in layer.children():
            part.compile(dynamic=True, backend=BACKEND)
    return len(layers)


def is_compiled(model: nn.Module) -> bool:
    """Return whether layers of `model` are compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _why_not(model: PreTrainedModel, layers: Sequence[nn.Module]) -> str:
    """Return why `model` cannot be compiled, in words; "" if it can."""
    experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    reasons = {
        "its layers are not marked as such (transformers' GradientCheckpointingLayer)": not layers,
        "its layers carry a state from token to token, so that each length is a program of its own": model._is_stateful,
        OWN_CODE: not uses_attention_interface(model),
        "which experts compute is another thing for each row": experts,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
