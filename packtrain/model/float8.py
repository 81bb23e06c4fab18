"""`trainer.mixed_precision=fp8`: the matrix products of the layers in 8-bit floating point by torchao, over autocast to bfloat16.

torchao's recipe "rowwise": each token and each row of a weight has a scale of its own. With one scale for a whole tensor, which is
faster, the documents of a row would change each other's rounding. Embeddings, output head, routers and adapters stay as they are.
Modules change their class in place, so that weights keep their names and their places in what shards them.
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

from packtrain.errors import UserError
from packtrain.model.spread import layers_of
from packtrain.proof.comparison import Tolerance

KEY = "trainer.mixed_precision"
TOLERANCE = Tolerance(outputs=math.inf, loss=2e-2, gradients=0.5)
"""Of the first rows, against bfloat16. Rounding a factor to e4m3 (4 significant bits) costs 2.6 % in the mean square, so a product of
two 3.7 %, and the products of all layers add up: emulated, 0.25 of the norm of all gradients on SmolLM2-135M (30 layers), 0.10 to
0.34 on tiny models of seven families; of the loss up to 6e-3. A wrong product is off by about 1."""
_MULTIPLE = 16  # of the sizes of a weight, which the products need
_ROUTERS = ("gate", "router")


def check_float8(device: torch.device) -> None:
    """Raises UserError unless `device` is a GPU that multiplies in 8-bit floating point."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    fix = "it takes a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell); set it to auto"
    raise UserError(f"{what} does not multiply in 8-bit floating point", where=f"{KEY} (fp8)", fix=fix)


def multiply_in_float8(model: PreTrainedModel, *, emulate: bool = False) -> Callable[[], None]:
    """Has the linear modules in the layers of `model` multiply in 8 bits; returns the function that undoes it.

    `emulate`: on any device, by rounding the factors. Raises UserError where no module can.
    """
    torchao = import_module("torchao.float8")
    float8_linear: Any = import_module("torchao.float8.float8_linear").Float8Linear
    # the gradient of a weight is a sum over the tokens of a row, whose number is made a multiple of 16 by zeros
    config = replace(torchao.Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True, emulate=emulate)
    modules = [module for layer in layers_of(model) for name, module in layer.named_modules() if _fits(name, module)]
    if not modules:
        what = f"{type(model).__name__} has no linear modules in its layers whose sizes are multiples of {_MULTIPLE}"
        raise UserError(what, where=f"{KEY} (fp8)", fix="set it to auto")
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
