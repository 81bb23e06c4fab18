"""`trainer.mixed_precision=fp8`: matrix products of the layers in 8-bit floating point by torchao.

It works over autocast to bfloat16, with torchao's recipe "rowwise": each token and each row of a weight has its own scale. One scale for a
whole tensor is faster, but the documents of a row would change each other's rounding. Embeddings, output head, routers and adapters stay the
same. Modules change their class in place, so weights keep their names and their places in the engine that shards them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.errors import UserError
from packtrain.model.spread import language_layers
from packtrain.proof.comparison import Tolerance

KEY = "trainer.mixed_precision"
TOLERANCE = Tolerance(outputs=math.inf, loss=2e-2, gradients=0.5)
"""For the first rows, against bfloat16. Rounding a factor to e4m3 (4 significant bits) costs 2.6 % in the mean square, a product of
two 3.7 %, and errors add up over the products of all layers. Emulated, the gradients are off by 0.25 of their norm on SmolLM2-135M (30 layers)
and by 0.10 to 0.34 on tiny models of seven families, the loss by up to 6e-3. A wrong product is off by about 1."""
_MULTIPLE = 16  # the products need sizes of a weight that are multiples of it
_ROUTERS = ("gate", "router")


def check_float8(device: torch.device) -> None:
    """Raise UserError unless `device` is a GPU that multiplies in 8-bit floating point."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    fix = "it takes a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell); set it to auto"
    what = f"{what} does not multiply in 8-bit floating point"
    raise UserError(what, where=f"{KEY} (fp8)", fix=fix, code="no-fp8-device")


def multiply_in_float8(model: PreTrainedModel, *, emulate: bool = False) -> Callable[[], None]:
    """Make the linear modules in the layers of `model` multiply in 8 bits. Returns the undo function.

    `emulate`: on any device, by rounding the factors. Raises UserError if no module can.
    """
    torchao = import_module("torchao.float8")
    float8_linear: Any = import_module("torchao.float8.float8_linear").Float8Linear
    # the gradient of a weight sums over the tokens of a row: zeros pad their number to a multiple of 16
    config = replace(torchao.Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True, emulate=emulate)
    modules = [
        module for layer in language_layers(model) for name, module in layer.named_modules() if _fits(name, module)
    ]
    if not modules:
        what = f"{type(model).__name__} has no linear modules in its layers whose sizes are multiples of {_MULTIPLE}"
        raise UserError(what, where=f"{KEY} (fp8)", fix="set it to auto", code="no-fp8-layers")
    settings: Any = vars(float8_linear(_MULTIPLE, _MULTIPLE, bias=False, device="meta", config=config))
    added = settings.keys() - vars(nn.Linear(1, 1))
    for module in modules:
        vars(module).update({name: settings[name] for name in added})
        module.__class__ = float8_linear

    def undo() -> None:
        for module in modules:
            module.__class__ = nn.Linear
            for name in added:
                del vars(module)[name]

    return undo


def _fits(name: str, module: nn.Module) -> bool:
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _check(situation: Situation) -> None:
    if situation.precision.fp8:
        check_float8(situation.ranks.device)


def _propose(situation: Situation) -> Proposal | None:
    if not situation.precision.fp8:
        return None
    what = "products of layers in 8 bits (torchao, rowwise)"
    return Proposal(what=what, make=multiply_in_float8, key=KEY, tolerance=TOLERANCE)


CHANGE = Change(name="fp8", order=40, kernel=False, propose=_propose, check=_check)
