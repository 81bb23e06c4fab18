"""`trainer.gradient_checkpointing`: which layers keep their activations for the backward pass, and which compute them again.

`full`: every layer keeps its input alone and runs once more in the backward pass. `every_n`: each nth layer does, the others keep
all. `selective`: every layer does, but for the results of attention and of every second matrix product, which are kept: what is
cheap to keep for what it costs, as torchtitan does, by torch's `create_selective_checkpoint_contexts`. The result of an adapter's
second factor, as wide as the layer and quickly made, is not kept. Losses and gradients are the same bits with each.

Layers switch themselves (transformers' GradientCheckpointingLayer): no module is wrapped, and weights keep their names.

`trainer.activation_offload`: what a layer keeps waits in the host's memory. TRL's OffloadActivations (torchtune's) copies tensors to pinned
memory on a stream of its own while the next layers compute, and back before they are used. Around a whole step it would also move what
is not activations: gradients that the output head has made already, autocast's copies of weights, weights that FSDP2 has gathered. So
it is given what each layer's checkpoint keeps, and nothing else.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from packtrain.errors import UserError

KEY, OFFLOAD_KEY = "trainer.gradient_checkpointing", "trainer.activation_offload"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
_OF_EXPERTS = "aten::_grouped_mm"
_ATTENTION = re.compile(r"aten::_(scaled_dot_product|flash_attention|efficient_attention)|torch_attn::|flash_attn")
_THIN = 8
"""Products whose inner dimension is so many times smaller than their result is wide are made again, the reverse are kept."""


def check_offload(device: torch.device) -> None:
    """Raises UserError where `device` has no memory of its own."""
    if device.type == "cpu":
        what = "on a CPU activations are in the host's memory already"
        raise UserError(what, where=OFFLOAD_KEY, fix="set it to false, or run on a machine with GPUs")


def recompute(model: PreTrainedModel, policy: str, *, offload: bool = False) -> None:
    """Has the layers of `model` (without adapters around it) work by `policy`: full, every_2 … or selective; with `offload` what they keep
    is in the host's memory meanwhile.

    Raises UserError where the model has no layers that can.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or (policy != "full" and not layers):
        what = f"the layers of {type(model).__name__} cannot compute their activations again"
        other = "full" if model.supports_gradient_checkpointing else "none"
        raise UserError(what, where=f"{KEY} ({policy})", fix=f"set {KEY}={other}")
    every = int(policy.removeprefix("every_")) if policy.startswith("every_") else 1
    # transformers adds the biases of experts to the results of their products, in place: what is kept may not change
    biased = any(getattr(module, "has_bias", False) for module in model.modules())
    kept = _PRODUCTS if biased else (*_PRODUCTS, _OF_EXPERTS)
    context: dict[str, Any] = {}
    if policy == "selective":
        context["context_fn"] = lambda: create_selective_checkpoint_contexts(_keep_every_second(kept))

    rerun: Callable[..., Any] = partial(checkpoint, use_reentrant=False, **context)
    if offload:
        rerun = _offloading(rerun)

    def switch(self: Any, enable: bool = True, **_: Any) -> None:
        """In place of transformers' own: TRL switches off for a pass of the reference, and on again without our choices."""
        type(self)._set_gradient_checkpointing(self, enable, rerun)
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = enable and number % every == 0

    own: Any = model
    own._set_gradient_checkpointing = types.MethodType(switch, model)
    own.activation_checkpointing_enable()


def _offloading(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, torch's or with its options, whose inputs are moved to the host until the backward pass."""
    from trl.models.activation_offloading import OffloadActivations

    return partial(_checkpoint_moving, OffloadActivations(), checkpoint)


def _checkpoint_moving(moving: Any, checkpoint: Callable[..., Any], *given: Any, **options: Any) -> Any:
    # not `with moving`: that forgets what earlier layers have moved. What the layer saves inside of the checkpoint has hooks of its own
    with saved_tensors_hooks(moving.pack_hook, moving.unpack_hook):
        return checkpoint(*given, **options)


def recompute_in_eval(model: PreTrainedModel) -> None:
    """Has the layers that compute their activations again do so in eval mode, too, until the mode of `model` is set again."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = layer.gradient_checkpointing


def _keep_every_second(kinds: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """The policy of one run of a layer, for products by these operators. The first one is made again and the second kept: so the last of
    seven, whose result the backward pass needs nowhere, is not."""
    products: Counter[bool] = Counter()

    def decide(run: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        name, keep = operator.name().partition(".")[0], False
        if name in kinds:
            rows, columns = args[-2:] if name == "aten::addmm" else args[:2]
            inner, width = rows.shape[-1], columns.shape[-1]
            if max(inner, width) < _THIN * min(inner, width):
                products[run.is_recompute] += 1
                keep = products[run.is_recompute] % 2 == 0
            else:
                keep = inner > width
        elif _ATTENTION.match(name):
            keep = "backward" not in name
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
