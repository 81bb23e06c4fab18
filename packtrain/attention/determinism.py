"""Bit for bit the same on a GPU (`trainer.deterministic`).

Many kernels add up with atomic operations, in whatever order their threads arrive, so that two runs of a config differ in their
last bits and soon in more. torch has deterministic ones for most of them, which are slower and take more memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NEEDED = "does not have a deterministic implementation"
"""What torch says of an operation that has none."""


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Inside the block torch takes deterministic kernels only, if `enabled`, and raises RuntimeError for what has none.

    Enter it before the first product of matrices on the GPU: cuBLAS reads its variable then.
    """
    if not enabled:
        yield
        return
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of those that are deterministic the faster one
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it takes the algorithm that happens to be faster
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark
