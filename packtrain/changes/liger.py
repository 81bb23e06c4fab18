"""`model.kernels=liger`: Liger's fused kernels (arXiv 2410.10989) for norms, rotation and activations.

Liger's own functions patch the loaded model, by model type. Its cross-entropies stay off, since model/forward.py has the output head. Experts
are not patched: Liger's kernel for them does not support autocast. changes/experts.py has it for model.experts=fused.
The functions also patch names in transformers' files. There only functions stay patched, such as the rotation, which the layers look up in
each call. Classes become transformers' again, so that models loaded later are unchanged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.model.layers import is_compiled
from packtrain.model.load import base_model

_ABSENT = object()
_OWN_HEAD = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def why_no_kernels(device: torch.device) -> str:
    """Return why Liger's kernels cannot run on `device`, "" if they can."""
    if device.type != "cuda":
        return "they need a GPU"
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        return "liger-kernel is not installed: pip install 'packtrain[liger]'"
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it warns of back ends for other devices
    return ""


def why_no_liger(model: PreTrainedModel, device: torch.device) -> str:
    """Return why Liger's kernels cannot serve `model` on `device`; "" if they can be tried."""
    if lacks := why_no_kernels(device):
        return lacks
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # pyright: ignore[reportMissingImports]

    kind = base_model(model).config.model_type
    return "" if kind in MODEL_TYPE_TO_APPLY_LIGER_FN else f"liger-kernel has none for {kind}"


def fuse_by_liger(model: PreTrainedModel) -> Callable[[], None]:
    """Make `model` compute with Liger's kernels, and return the undo function.

    One kernel runs first. If this process cannot build or run it, that raises an exception before anything is changed.
    """
    from liger_kernel.transformers import LigerRMSNorm  # pyright: ignore[reportMissingImports]
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    LigerRMSNorm(64).to(model.device)(torch.ones(2, 64, device=model.device)).sum().backward()
    modules = [*base_model(model).modules()]
    files = [vars(sys.modules[name]) for name in sorted({type(module).__module__ for module in modules})]
    places: list[dict[str, object]] = [*files, *(vars(module) for module in modules)]
    before = [dict(place) for place in places]
    changed: list[tuple[dict[str, object], str, Any]] = []

    def undo() -> None:
        for place, name, value in changed:
            _put_back(place, name, value)

    try:
        _apply_liger_kernel_to_instance(base_model(model), **_OWN_HEAD)
    finally:
        for place, old in zip(places, before, strict=True):
            names = [name for name, value in place.items() if old.get(name, _ABSENT) is not value]
            changed += [(place, name, old.get(name, _ABSENT)) for name in names]
        if sys.exc_info()[0] is not None:
            undo()
    bare = [(module, getattr(module, "get_base_layer", lambda module=module: module)()) for module in modules]
    experts = {id(vars(module)) for module, own in bare if hasattr(own, "_is_expert_parallel")}  # adapted ones too
    for place, name, value in [change for change in changed if id(change[0]) in experts]:
        _put_back(place, name, value)
    for place, name, value in changed:
        if isinstance(value, type):
            place[name] = value
    return undo


def _put_back(place: dict[str, object], name: str, value: Any) -> None:
    place.pop(name, None) if value is _ABSENT else place.__setitem__(name, value)


def _propose(situation: Situation) -> Proposal | None:
    if situation.config.model.kernels == "auto" and not situation.on_gpu:
        return None
    lacks = why_no_liger(situation.model, situation.ranks.device)
    if not lacks and is_compiled(situation.model):
        lacks = "trainer.torch_compile fuses them already"
    return Proposal(what="norms, rotation and activations by Liger's kernels", make=fuse_by_liger, lacks=lacks)


CHANGE = Change(name="liger", label="kernels", order=30, propose=_propose)
