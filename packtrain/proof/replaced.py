"""Compare replaced modules with float32, each kind alone on inputs of the run.

Over many layers rounding errors add up to some percent, and a small fault would not show in them. In one module they are some thousandths.
A module also counts as replaced if its code looks up a replaced function, as attention does with the rotation. Layers always count.
Modules around layers do not, nor hooks of layers under FSDP2.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache, PreTrainedModel

from packtrain.proof.upcast import LOW, UpcastMode, in_float32, layers_in, raised
from packtrain.wording import first_line

# A replaced module may be off from float32 by (_FACTOR + _FEW / n) times the error of its own code, plus _FLOOR.
_FACTOR = 2
_FEW = 32  # errors of n numbers vary by chance, the more the smaller n
_FLOOR = 0.4  # units in the last place: rounding twice more is off by a third of one, in the mean square
# Smaller rows are mere rounding; their errors are relative to
_SMALLEST_WEIGHT = 1e-3  # of the gradients of all weights of the module
_SMALLEST_TOKEN = 0.1  # of the median norm of a token
CANNOT = "the model cannot compute by it"
State = dict[object, object]
Figures = dict[str, torch.Tensor]
"""Outputs of a call and gradients of its inputs [tokens, width], and of weights [1, n], by name."""


def states_of(model: nn.Module) -> dict[nn.Module, State]:
    """Return the state of each module."""
    return {module: _state(module) for module in model.modules()}


def _state(module: nn.Module) -> State:
    """Return everything replaceable: attributes, parts, hooks, class, and globals that the forward looks up."""
    own, code = vars(module), inspect.unwrap(type(module).forward)
    names = code.__code__.co_names if inspect.isfunction(code) else ()
    state: State = {"class": type(module), "code": code, **own}
    state |= {(name,): code.__globals__.get(name) for name in names}
    if "_is_expert_parallel" in own:  # their config says which function computes them
        state["experts"] = own["config"]._experts_implementation
    for group in ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"):
        state |= {(group, key): value for key, value in own[group].items()}
    return state


def _differ(one: State, other: State) -> bool:
    return one.keys() != other.keys() or any(value is not other[name] for name, value in one.items())


@dataclass(slots=True)
class Kind:
    """Modules in the same place of different layers, of one class.

    `owner` has their weights under FSDP2. `call` is a call of one of them: the module and its arguments. `exact` are its figures in
    float32, {} if it cannot run alone; `errors` of the module's own code are relative to them.
    """

    modules: list[nn.Module]
    owner: FSDPModule | None
    device: str = "cpu"
    autocast: torch.dtype | None = None
    call: tuple[nn.Module, Any] | None = None
    differentiable: bool = False
    exact: Figures = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def note(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Keep the first call, or the first one whose inputs have gradients."""
        floats = [leaf for leaf in tree_leaves((args, kwargs)) if _is_float(leaf)]
        differentiable = any(leaf.requires_grad for leaf in floats)
        if self.call is None or (differentiable and not self.differentiable):
            self.device = device = floats[0].device.type if floats else "cpu"
            self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            self.call, self.differentiable = (module, tree_map(_detached, (args, kwargs))), differentiable


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Cache):  # it would grow with each call
        return None
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if _is_float(leaf) else leaf


def kinds_of(model: PreTrainedModel, before: Mapping[nn.Module, State]) -> dict[str, Kind]:
    """Return the kinds of layers, and of modules with other states than `before`. All ranks have the same."""
    layers, places = layers_in(model), {module: name for name, module in model.named_modules()}
    around = {part for part in places if part not in layers and not {*layers}.isdisjoint(part.modules())}
    changed = {part for part in before if part not in around and _differ(before[part], _state(part))}
    touched = [layer for layer in layers if not changed.isdisjoint(layer.modules())] or layers
    groups: list[Any] = [part for part in reversed(places) if isinstance(part, FSDPModule)]
    kinds = dict[str, Kind]()
    for part, name in places.items():
        if part in changed or part in touched:
            owner = next((group for group in groups if part in {*group.modules()}), None)
            kind = kinds.setdefault(f"{type(part).__name__} ({re.sub('[0-9]+', '*', name)})", Kind([], owner))
            kind.modules += [part] if kind.owner is owner else []
    return kinds


@contextmanager
def capturing(kinds: Mapping[str, Kind]) -> Iterator[None]:
    """Keep a call for each kind."""
    with ExitStack() as hooks:
        for kind in kinds.values():
            for module in kind.modules:
                hooks.enter_context(module.register_forward_pre_hook(kind.note, with_kwargs=True))
        yield


def measure_own(model: PreTrainedModel, kinds: Mapping[str, Kind], dtype: torch.dtype) -> None:
    """Measure the errors of the unchanged modules, computed in `dtype`. Kinds that cannot run alone are left out."""
    for kind in kinds.values():
        with _gathered(kind), suppress(Exception):  # of the model's code, or the module was never called
            with in_float32(model, dtype):
                exact = _figures(kind, dtype, exact=True)
            kind.exact, kind.errors = exact, _errors(_figures(kind, dtype), exact)


def judge(kinds: Mapping[str, Kind], dtype: torch.dtype) -> tuple[list[str], str]:
    """Return refusals, inner modules first, and the worst error in words. The modules are changed. Frees what the kinds hold."""
    found = list[tuple[float, str]]()  # error as a share of the allowed one, in words
    for name, kind in reversed([*kinds.items()]):
        exact = kind.exact
        with _gathered(kind):
            try:
                errors = _errors(_figures(kind, dtype), exact) if exact else {}
            except Exception as error:  # ranks gather the next module together all the same
                errors = dict[str, float]()
                found.append((math.inf, f"{CANNOT}: {first_line(error)}"))
        for what, error in errors.items():
            own, factor = kind.errors[what], _FACTOR + _FEW / exact[what].numel()
            if own < math.inf:
                words = f"{what} of {name} is off by {error:.2g} from float32 (its own code by {own:.2g})"
                found.append((error / (factor * own + _FLOOR * torch.finfo(dtype).eps), words))
        kind.call, kind.exact = None, {}  # next the whole model runs
    alone = f"{sum(bool(kind.errors) for kind in kinds.values())} of {len(kinds)} kinds of modules run alone"
    module = f"{alone}, at worst {max(found)[1]}" if found else "no module runs alone"
    return [words for share, words in found if share > 1], module


@contextmanager
def _gathered(kind: Kind) -> Iterator[None]:
    """Gather the weights. All ranks do it together."""
    if isinstance(kind.owner, FSDPModule):
        kind.owner.unshard()
    yield
    if isinstance(kind.owner, FSDPModule):
        kind.owner.reshard()


def _figures(kind: Kind, dtype: torch.dtype, *, exact: bool = False) -> Figures:
    """Run the module once. Returns its outputs, and gradients of its inputs and trained weights; `exact`: all in float32."""
    assert kind.call is not None
    module, given = kind.call
    args, kwargs = tree_map(_detached, raised(given) if exact else given)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if _is_float(leaf) and leaf.requires_grad]
    inputs = {f"input {number}": leaf for number, leaf in enumerate(leaves, 1)}
    autocast = None if exact else kind.autocast
    with ExitStack() as undo:
        for part in [part for part in module.modules() if part.training]:
            undo.callback(setattr, part, "training", True)
            part.training = False
        if exact:
            undo.enter_context(_float32_weights(module))
            undo.enter_context(UpcastMode(dtype))
        undo.enter_context(torch.autocast(kind.device, autocast, enabled=autocast is not None))
        output = module.forward(*args, **kwargs) if isinstance(module, FSDPModule) else module(*args, **kwargs)
        sources = {**inputs, **{name: one for name, one in module.named_parameters() if one.requires_grad}}
    outputs = [leaf for leaf in tree_leaves(output) if _is_float(leaf)]
    figures = {f"output {number}": leaf.detach().reshape(-1, leaf.shape[-1]) for number, leaf in enumerate(outputs, 1)}
    ends = [leaf for leaf in outputs if leaf.requires_grad]
    if ends and sources:
        # random gradients of the outputs, exact in `dtype`
        noise = [torch.randn(end.shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(end) for end in ends]
        found = torch.autograd.grad(ends, [*sources.values()], noise, materialize_grads=True, allow_unused=True)
        for name, gradient in zip(sources, found, strict=True):
            rows = (-1, gradient.shape[-1]) if name in inputs else (1, -1)
            figures[f"the gradient of {name}"] = gradient.reshape(rows)
    return figures


@contextmanager
def _float32_weights(module: nn.Module) -> Iterator[None]:
    """Give `module` float32 copies of its 16-bit weights inside the block."""
    dicts = [part._parameters for part in module.modules()]
    low = [(own, name, one) for own in dicts for name, one in own.items() if one is not None and one.dtype in LOW]
    copies = {weight: weight.detach().float().requires_grad_(weight.requires_grad) for _, _, weight in low}
    try:
        for own, name, weight in low:
            own[name] = copies[weight]  # type: ignore[assignment]
        yield
    finally:
        for own, name, weight in low:
            own[name] = weight


def _errors(figures: Figures, exact: Figures) -> dict[str, float]:
    """Return the relative error of each figure: the root mean square over its rows."""
    weights = math.hypot(*(figure.norm().item() for figure in exact.values() if len(figure) == 1))
    errors = dict[str, float]()
    for name, one in exact.items():
        sizes, off = one.norm(dim=1), figures[name].float().sub(one).norm(dim=1)
        smallest = _SMALLEST_TOKEN * sizes.median().item() if len(one) > 1 else _SMALLEST_WEIGHT * weights
        mean = (off / sizes.clamp(min=max(smallest, 1e-30))).square().mean().sqrt().item()
        errors[name] = math.inf if math.isnan(mean) else mean
    return errors
