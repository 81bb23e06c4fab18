"""What rounding the weights of final/ costs: the loss of some documents with the exact weights and with the saved ones.

Both are computed in float32, without autocast, so that nothing but the weights differs. A layer gets its float32 weights as its
forward pass begins and loses them as it ends: there is one such layer at a time, also where it is gathered from all processes
(FSDP2). ZeRO-3 gathers single weights while a layer runs, and cannot be given others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor

from packtrain.attention.backends import SEGMENTED, attending_by
from packtrain.model.load import base_model
from packtrain.model.precision import without_autocast
from packtrain.model.spread import layers_of, most_of_all
from packtrain.train.optim.final_weights import exact_weights, format_in_final, keeps_masters, rounded

_Give = Callable[[str], torch.Tensor]
_Rounding = Callable[[str, torch.Tensor], torch.Tensor]
_TRAINED = "default"  # peft's name of the adapters that are trained
_FREE = 2**30  # bytes of a GPU that are left to the forward pass


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """Losses on the same documents, computed in float32, of the `exact` weights and of the `saved` ones.

    The documents are `held_out`, or those of the last step.
    """

    exact: float
    saved: float
    held_out: bool

    def sentence(self) -> str:
        """The cost in words."""
        what = "held-out loss" if self.held_out else "on the last step's documents loss"
        said = f"rounded to bfloat16 for final/, the weights have {what} {self.saved:.4f} in place of {self.exact:.4f}"
        seen = round(self.saved, 4) > round(self.exact, 4)
        kept = ": trainer.save_dtype=float32 keeps what was learned (docs/precision.md)" if seen else ""
        return f"{said} (both computed in float32){kept}"


@torch.no_grad()
def rounding_cost(trainer: Any, dtype: torch.dtype, seed: int | None, *, merges: bool) -> RoundingCost | str | None:
    """What it costs that final/ has its weights in `dtype`, and adapters in them if it `merges`; None if nothing is rounded.

    A string says why it was not measured. Called by all processes when what was trained is saved, and not yet merged.
    """
    model, deepspeed = trainer.model, trainer.is_deepspeed_enabled
    weights, adapted = dict(model.named_parameters(remove_duplicate=False)), base_model(model) is not model
    formats = {name: format_in_final(name, weight, dtype, adapted=adapted) for name, weight in weights.items()}
    masters = keeps_masters(trainer.optimizer, deepspeed=deepspeed)
    stored = [weights[name].dtype for name, one in formats.items() if one == dtype]
    if dtype != torch.bfloat16 or not (merges or (stored and masters) or any(one != dtype for one in stored)):
        return None
    if trainer.settings.sharded and deepspeed:
        return f"{trainer.settings.strategy} gathers single weights while a layer runs"
    layers = _layers(model, sharded=trainer.settings.sharded)
    needed = sum(one.numel() for one in weights.values()) if deepspeed else max(layer.numbers() for layer in layers)
    if most_of_all(_lacks(needed, trainer.args.device), trainer.args.device):
        return "the devices have no memory for float32 weights"
    master_of = exact_weights(trainer.optimizer, deepspeed=deepspeed)
    if deepspeed:  # all processes have to ask for them together
        known = {id(weight): master_of(weight) for weight in weights.values()}
        master_of = lambda weight: known[id(weight)]  # noqa: E731

    def exact(name: str) -> torch.Tensor:
        master = master_of(weights[name])
        return (_whole(weights[name].data) if master is None else master).float()

    def in_final(name: str) -> torch.Tensor:
        if merges or formats[name] != dtype:
            return exact(name)
        as_it_is = weights[name].dtype == dtype  # rounded by the optimizer
        return (_whole(weights[name].data) if as_it_is else rounded(exact(name), dtype, name, seed)).float()

    def rounding(name: str, weight: torch.Tensor) -> torch.Tensor:
        return rounded(weight, dtype, name, seed).float()

    losses = []
    for give, merged in ((exact, None), (in_final, rounding if merges else None)):
        with _computing_with(trainer, layers, give, merged):
            losses.append(trainer.compared_loss())
    return RoundingCost(*losses, held_out=trainer.settings.evaluation is not None)


class _Layer:
    """A part of the model whose weights come and go together: a layer, or all that is outside of layers."""

    def __init__(self, module: nn.Module, inside: dict[str, nn.Module]) -> None:
        """`inside` are its modules, by their names in the whole model."""
        self.module, self._inside = module, inside
        self._adapted: Any = [one for one in inside.values() if isinstance(one, BaseTunerLayer)]
        self._before: dict[nn.Parameter, torch.Tensor] = {}

    def numbers(self) -> int:
        """Of all its weights together."""
        return sum(weight.numel() for module in self._inside.values() for weight in module.parameters(recurse=False))

    def enter(self, give: _Give, merged: _Rounding | None) -> None:
        """Puts the weights that `give` has for names in place; with `merged`, adapters are merged into them, and all rounded by it."""
        names: dict[nn.Parameter, str] = {}
        for name, module in self._inside.items():
            for key, weight in module.named_parameters(recurse=False):  # FSDP2's are others while a layer runs
                names.setdefault(weight, f"{name}.{key}".removeprefix("."))
        self._before = {weight: weight.data for weight in names}
        for weight, name in names.items():
            weight.data = give(name)
        if merged is None:
            return
        for one in self._adapted:
            weight = one.get_base_layer().weight
            weight.data = weight.data + one.get_delta_weight(_TRAINED)  # not in place: it may be the model's own
            one.merged_adapters.append(_TRAINED)
        for weight, name in names.items():
            weight.data = merged(name, weight.data)

    def leave(self) -> None:
        """Takes them away."""
        for weight, data in self._before.items():
            weight.data = data
        self._before = {}
        for one in self._adapted:
            one.merged_adapters.clear()


def _layers(model: nn.Module, *, sharded: bool) -> list[_Layer]:
    """The layers of `model`, and what is called as a whole: of sharded adapted models that is the base (model/spread.py)."""
    tops = [*layers_of(model), base_model(model) if sharded else model]
    names = {module: name for name, module in model.named_modules()}

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if child not in tops:
                yield from inside(child)

    return [_Layer(top, {names[one]: one for one in inside(top)}) for top in tops]


@contextmanager
def _computing_with(trainer: Any, layers: list[_Layer], give: _Give, merged: _Rounding | None) -> Iterator[None]:
    """Inside the block the model computes in float32 with other weights; not where adapters are off for a reference."""
    model, settings = trainer.model, trainer.settings
    adapted: Any = next((one for one in model.modules() if isinstance(one, BaseTunerLayer)), None)

    def enter(layer: _Layer) -> None:
        trained = adapted is None or (not adapted.disable_adapters and adapted.active_adapters == [_TRAINED])
        layer.enter(give, merged if trained else None)

    with ExitStack() as undo:
        # layers that are compiled (trainer.torch_compile) would be compiled anew, for these formats and nothing but this
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(without_autocast(model, trainer.accelerator))
        if settings.backend == "flash":  # its kernels do not compute in float32
            undo.enter_context(attending_by(base_model(model), SEGMENTED))
        for layer in layers:
            undo.callback(layer.module.register_forward_pre_hook(lambda *_, layer=layer: enter(layer)).remove)
            after = layer.module.register_forward_hook(lambda *_, layer=layer: layer.leave(), always_call=True)
            undo.callback(after.remove)
        model.eval()
        undo.callback(model.train)
        yield


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _lacks(numbers: int, device: torch.device) -> bool:
    """Whether `device` has no memory for float32 `numbers` and a forward pass."""
    if device.type != "cuda":
        return False
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free < 4 * numbers + _FREE
