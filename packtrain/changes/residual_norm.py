"""Sums of the residual stream and their norms in one of Liger's kernels.

A layer's forward is made again from its source: `hidden = residual + hidden; residual = hidden; hidden = self.norm(hidden)` becomes
`hidden, residual = self.norm(residual, hidden)`. The sum at the end of a layer stays apart, since the next layer norms it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from textwrap import dedent
from typing import Any

import torch
from torch import nn

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.model.spread import language_layers

_TERM = r"([\w.]+(?:\([\w.]+\)| \* [\w.]+)?)"
_SUM = re.compile(rf"^( +)(\w+) = {_TERM} \+ {_TERM}\n\1(\w+) = \2\n\1\2 = self\.(\w+)\(\2\)$", re.MULTILINE)


def layers_with_sums(model: nn.Module) -> Iterator[tuple[nn.Module, type, list[Any]]]:
    """Yield the layers with sums to join, each with its new class and its norms."""
    for layer in language_layers(model):
        made, names = _make_again(type(layer))
        norms = [getattr(layer, name, None) for name in names]
        if norms and all("casting_mode" in getattr(norm, "__dict__", ()) for norm in norms):
            yield layer, made, norms


@cache
def _make_again(kind: type[nn.Module]) -> tuple[type, list[str]]:
    """Make a class of layers again from its source. Return it with the names of the norms; without any if it has no sums."""
    code, space = inspect.unwrap(kind.forward), {"__module__": kind.__module__}
    with suppress(Exception):  # there is no source, or it does not run alone
        source = ast.unparse(ast.parse(dedent(inspect.getsource(code))))
        source = source.removeprefix("@auto_docstring\n")  # it reads a file
        exec(_SUM.sub(r"\1\2, \5 = self.\6(\3, \4)", source), code.__globals__, space)
        # a class, since transformers computes layers again inside the forward of their class
        return type(kind.__name__, (kind,), space), [names[-1] for names in _SUM.findall(source)]
    return kind, []


def sum_in_norms(model: nn.Module) -> Callable[[], None]:
    """Make the layers of `model` add and norm in one kernel. Returns the undo function."""
    from liger_kernel.ops import LigerFusedAddRMSNormFunction  # pyright: ignore[reportMissingImports]

    undo = ExitStack()
    for layer, made, norms in [*layers_with_sums(model)]:
        undo.callback(setattr, layer, "__class__", type(layer))
        layer.__class__ = made
        for norm in norms:
            undo.callback(vars(norm).__setitem__, "forward", norm.forward)
            vars(norm)["forward"] = partial(_run, norm, norm.forward, LigerFusedAddRMSNormFunction.apply)
    return undo.close


def _run(norm: Any, own: Any, kernel: Any, hidden: torch.Tensor, other: torch.Tensor | None = None) -> Any:
    """Return the norm of `hidden`; with `other`, the norm of their sum, and the sum."""
    if other is None:
        return own(hidden)
    if hidden.dtype != other.dtype:  # the kernel would round the sum to the format of `hidden`
        return own(total := hidden + other), total
    return kernel(hidden, other, norm.weight, norm.variance_epsilon, norm.offset, norm.casting_mode, norm.in_place)


def _propose(situation: Situation) -> Proposal | None:
    what = "sums of the stream and their norms by one of Liger's kernels"
    return Proposal(what=what, make=sum_in_norms) if any(layers_with_sums(situation.model)) else None


# after Liger has replaced the norms
CHANGE = Change(name="residual_norm", label="sums", order=32, kernel=False, propose=_propose)
