"""Routers of experts in the proof of isolation, in 16 bits.

A product of matrices rounds differently with another number of rows, and how many tokens an expert gets depends on all documents
of the row. So in 16 bits a router may take another expert for a token whose best two are nearly equal, and its outputs
jump, although nothing has passed between documents. With the routing kept as it was, a document may move by rounding alone;
what leaks into it moves its hidden states, and its outputs as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


class Routing:
    """The routing of the tokens of one row in all layers of `model`, recorded in one call and kept in others.

    It is seen where a layer calls its `experts(hidden [T, h], chosen [T, k], weights [T, …])`, as transformers' models do.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
        self._known: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def known(self) -> bool:
        """Whether a routing was recorded."""
        return bool(self._known)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the routing of a call inside the block."""

        def record(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
            if (routing := _routing_of(given)) is not None:
                self._known[module] = routing

        with self._before_experts(record):
            yield

    @contextmanager
    def kept(self, tokens: torch.Tensor) -> Iterator[None]:
        """Gives the `tokens` (bool [T]) the recorded routing in calls inside the block."""

        def keep(module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            routing, known = _routing_of(given), self._known.get(module)
            if routing is None or known is None or known[0].shape != routing[0].shape or len(routing[0]) != len(tokens):
                return None
            those = tokens.to(routing[0].device)[:, None]
            return given[0], *(torch.where(those, old, new) for old, new in zip(known, routing, strict=True))

        with self._before_experts(keep):
            yield

    @contextmanager
    def _before_experts(self, hook: Callable[[torch.nn.Module, tuple[Any, ...]], Any]) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(hook) for module in self._experts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _routing_of(given: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The experts of each token and their weights, in the arguments of a call; None if they are others."""
    if len(given) != 3 or not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 2 for tensor in given[1:]):
        return None
    chosen, weights = given[1:]
    return None if chosen.is_floating_point() or len(chosen) != len(weights) else (chosen, weights)
