"""Tests that train: tiny models on one thread, so that small machines are not fought over."""

from __future__ import annotations

import gc

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Every trainer collects garbage at its end, which half of its time went into: of what was imported there is none."""
    gc.collect()
    gc.freeze()
