"""How layers run in training: activations computed again, compiled parts, experts one by one.

`trainer.gradient_checkpointing`: `full`: every layer keeps only its input and runs once more in the backward pass. `every_n`: each nth layer
does so, the others keep all. `selective`: every layer does so, but keeps the results of attention and of every second matrix product, which cost
the most time for their memory. torchtitan does the same, by torch's `create_selective_checkpoint_contexts`. The result of an adapter's second
factor, as wide as the layer and quickly made, is not kept. Losses and gradients are equal bit by bit under each. Layers switch themselves
(transformers' GradientCheckpointingLayer): no module is wrapped, and weights keep their names.

`trainer.activation_offload`: the kept inputs wait in the host's memory. TRL's OffloadActivations (torchtune's) copies tensors to pinned
memory on a separate stream while the next layers compute, and back before they are used. Around a whole step it would also move tensors that
are not activations: gradients that the output head has already made, autocast's copies of weights, weights that FSDP2 has gathered. So
it gets only the tensors that each layer's checkpoint keeps.

`trainer.torch_compile` is regional compilation (docs.pytorch.org/tutorials/recipes/regional_compilation.html): the code compiled for the first
layer serves all. The regions are a layer's parts, not the whole layer: transformers checkpoints activations around a layer's forward. Attention
by Segments stays outside of the graphs, since the documents of a row are Python numbers that differ from row to row. FSDP2's hooks, which gather
a layer's weights, belong to the layer, so they run as usual.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch._dynamo.config
import torch._inductor.config
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packtrain.attention.backends import OWN_CODE, attention_functions
from packtrain.attention.forwards import uses_attention_interface
from packtrain.errors import UserError
from packtrain.proof.comparison import has_routers

KEY, OFFLOAD_KEY = "trainer.gradient_checkpointing", "trainer.activation_offload"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
_EXPERT_PRODUCT = "aten::_grouped_mm"
_ATTENTION = re.compile(r"aten::_(scaled_dot_product|flash_attention|efficient_attention)|torch_attn::|flash_attn")
_THIN = 8
"""A product is made again if its result is this many times wider than its inner dimension. In the reverse case it is kept."""


def check_offload(device: torch.device) -> None:
    """Raise UserError if `device` has no separate memory."""
    if device.type == "cpu":
        what = "on a CPU activations are in the host's memory already"
        fix = "set it to false, or run on a machine with GPUs"
        raise UserError(what, where=OFFLOAD_KEY, fix=fix, code="offload-on-cpu")


def can_recompute(model: PreTrainedModel, policy: str) -> bool:
    """Return whether the layers of `model` can recompute by `policy`."""
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    return model.supports_gradient_checkpointing and (policy == "full" or any(layers))


def recompute(model: PreTrainedModel, policy: str, *, offload: bool = False) -> None:
    """Make the layers of `model` recompute by `policy`: none, full, every_2 … or selective. It replaces an earlier policy.

    `model` has no adapters around it. `offload`: the kept tensors wait in the host's memory. Raises UserError if no layer can.
    """
    if "_set_gradient_checkpointing" in vars(model):
        model.activation_checkpointing_disable()
        del vars(model)["_set_gradient_checkpointing"]
    if policy == "none":
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not can_recompute(model, policy):
        what = f"the layers of {type(model).__name__} cannot compute their activations again"
        other = "full" if model.supports_gradient_checkpointing else "none"
        raise UserError(what, where=f"{KEY} ({policy})", fix=f"set {KEY}={other}", code="cannot-recompute")
    every = int(policy.removeprefix("every_")) if policy.startswith("every_") else 1
    # transformers adds the biases of experts to the results of their products, in place: kept tensors must not change
    biased = any(getattr(module, "has_bias", False) for module in model.modules())
    kept = _PRODUCTS if biased else (*_PRODUCTS, _EXPERT_PRODUCT)
    rerun: Callable[..., object] = partial(checkpoint, use_reentrant=False)
    if policy == "selective":
        rerun = partial(rerun, context_fn=lambda: create_selective_checkpoint_contexts(_keep_every_second(kept)))
    if offload:
        rerun = _offloading(rerun)

    def switch(self: PreTrainedModel, enable: bool = True, **_: object) -> None:
        """Replace transformers' method. TRL switches off for a reference pass, and on again without our choices."""
        type(self)._set_gradient_checkpointing(self, enable, rerun)
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = enable and number % every == 0

    vars(model)["_set_gradient_checkpointing"] = types.MethodType(switch, model)
    model.activation_checkpointing_enable()


def _offloading(rerun: Callable[..., object]) -> Callable[..., object]:
    """Return `rerun`, but with its inputs moved to the host until the backward pass."""
    from trl.models.activation_offloading import OffloadActivations

    moving = OffloadActivations()

    def rerun_offloading(*given: object, **options: object) -> object:
        # not `with moving`: that forgets tensors that earlier layers moved. Tensors saved inside of the checkpoint have their own hooks
        with saved_tensors_hooks(moving.pack_hook, moving.unpack_hook):
            return rerun(*given, **options)

    return rerun_offloading


def recompute_in_eval(model: PreTrainedModel) -> None:
    """Make checkpointed layers recompute in eval mode too. Setting the mode of `model` ends it."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = layer.gradient_checkpointing


def _keep_every_second(kinds: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return the policy for one run of a layer. It recomputes the first product by these operators, keeps the second, and so on.
    The last of seven is not kept: the backward pass does not need its result."""
    products: Counter[bool] = Counter()

    def decide(
        run: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *args: torch.Tensor, **_: object
    ) -> CheckpointPolicy:
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


COMPILE_KEY = "trainer.torch_compile"
BACKEND = "inductor"
MAX_VARIANTS = 16
"""Most compilations of a part (proofs and training, rows and batches need several). After these it runs uncompiled."""


def compile_layers(model: PreTrainedModel) -> int:
    """Compile the parts of the layers of `model` when they first run. Returns the number of layers.

    Parameters keep their names. Raises UserError if the model's code does not allow it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if why := _why_not_compiled(model, layers):
        what, fix = f"{type(model).__name__} cannot be compiled: {why}", f"set {COMPILE_KEY}=false"
        raise UserError(what, where=COMPILE_KEY, fix=fix, code="cannot-compile")
    for name in attention_functions():
        AttentionInterface.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    setattr(torch._inductor.config, "fallback_random", True)  # noqa: B010  # dropout draws the same numbers as without compiling
    setattr(torch._dynamo.config, "recompile_limit", MAX_VARIANTS)  # noqa: B010
    for layer in layers:
        for part in layer.children():
            part.compile(dynamic=True, backend=BACKEND)
    return len(layers)


def is_compiled(model: nn.Module) -> bool:
    """Return whether layers of `model` are compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _why_not_compiled(model: PreTrainedModel, layers: Sequence[nn.Module]) -> str:
    """Return why `model` cannot be compiled, in words; "" if it can."""
    experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    reasons = {
        "its layers are not marked as such (transformers' GradientCheckpointingLayer)": not layers,
        "its layers carry a state from token to token, so each length needs a program of its own": model._is_stateful,
        OWN_CODE: not uses_attention_interface(model),
        "its experts differ from token to token": experts,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


EXPERTS_KEY = "model.experts"
LOOP = "eager"
"""Its name in transformers' ExpertsInterface."""


def can_group(model: nn.Module) -> bool:
    """Return whether tensors of `model` hold all experts of a layer. transformers can then multiply them in any way."""
    quantised = getattr(model, "is_quantized", False)  # their experts have their own formats and code
    return not quantised and any(hasattr(module, "_is_expert_parallel") for module in model.modules())


_LAYOUT = ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm")


def can_fuse(experts: nn.Module) -> bool:
    """Return whether Liger's kernel can compute `experts`.

    It computes down(silu(gate) * up), with gate and up in one tensor [E, 2I, H].
    """
    plain = getattr(type(experts), "_apply_gate", None) is _default_apply_gate
    silu = isinstance(getattr(experts, "act_fn", None), (nn.SiLU, SiLUActivation))
    return plain and silu and [name for name in _LAYOUT if getattr(experts, name, False)] == [*_LAYOUT[:2]]


def loop_over_experts(model: PreTrainedModel, asked: str) -> None:
    """Make experts compute one after the other. changes/experts.py groups or fuses them later, by proof.

    Raises UserError if `asked`, model.experts, names a way that this model does not have.
    """
    if can_group(model):
        model.set_experts_implementation(LOOP)
        joint = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
        if asked == "fused" and (others := [module for module in joint if not can_fuse(module)]):
            what = f"Liger's kernel cannot compute {type(others[0]).__name__}, only silu without biases"
            raise UserError(what, where=f"{EXPERTS_KEY} (fused)", fix="set it to auto", code="experts-not-fusable")
    elif asked != "auto":
        what = "its experts are code of its own" if has_routers(model) else "it has no experts"
        what = f"{type(model).__name__} cannot do that: {what}"
        raise UserError(what, where=f"{EXPERTS_KEY} ({asked})", fix="set it to auto", code="experts-not-groupable")
