"""The residual stream flows in autocast's format, from the embeddings on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.model.load import base_model
from packtrain.model.spread import language_layers
from packtrain.proof.comparison import Tolerance, tolerance_of

Stream = torch.Tensor | tuple[torch.Tensor, ...]
"""The output of a layer: the residual stream, alone or first."""


def carry_in(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Make the residual stream of `model` flow in `dtype` under autocast. Returns the undo function.

    Autocast leaves embeddings, sums and norms in the format of their inputs. With float32 weights the whole stream would be float32. So the
    embeddings and layers cast their outputs.
    """

    def cast(module: nn.Module, inputs: object, output: Stream) -> Stream:
        stream = output[0] if isinstance(output, tuple) else output
        if not torch.is_autocast_enabled(stream.device.type):
            return output
        return (stream.to(dtype), *output[1:]) if isinstance(output, tuple) else stream.to(dtype)

    base: Any = base_model(model)
    hooks = ExitStack()
    for part in (base.get_input_embeddings(), *language_layers(base)):
        hooks.enter_context(part.register_forward_hook(cast))
    return hooks.close


def _propose(situation: Situation) -> Proposal | None:
    embeddings: Any = situation.model.get_input_embeddings()
    dtype = situation.precision.autocast
    # under FSDP2 weights are already gathered in that format
    if dtype is None or not situation.on_gpu or situation.ranks.sharded or embeddings.weight.dtype != torch.float32:
        return None
    rounding = tolerance_of(dtype)
    return Proposal(
        what=f"stream in {str(dtype).removeprefix('torch.')}",
        make=lambda model: carry_in(model, dtype),
        # the stream rounds more numbers, so its tolerance is twice as wide
        tolerance=Tolerance(2 * rounding.outputs, 2 * rounding.loss, 2 * rounding.gradients),
    )


CHANGE = Change(name="residual", order=20, kernel=False, propose=_propose)
