"""How far the same training may differ by rounding alone. Derived, since what one processor shows is too narrow on the next.

Kernels, threads and processes add the same numbers in another order. Each addition in float32 is off by up to half of EPS, one way or the
other, so a sum of `terms` numbers wanders by about √terms of that, in both runs that are compared.
"""

from __future__ import annotations

import math

import torch

EPS = torch.finfo(torch.float32).eps
TOKENS = 256
"""The most of a micro-batch (running.py::base_config): a loss and a gradient are sums over them."""


def of_sum(terms: int = TOKENS) -> float:
    """The relative difference of two sums: of a loss, or of the norm of a gradient."""
    return EPS * math.sqrt(terms)


def of_adam(weights: int) -> float:
    """The relative difference of a norm of `weights` numbers that Adam made from zeros, such as an adapter.

    Adam divides each gradient by its own size, so the smallest ones count as much as the largest. All are off by the rounding of a usual
    one. The smallest is `weights` times smaller than that: its step is off by as many roundings, which is √weights of the norm of all.
    """
    return of_sum() * math.sqrt(weights)
