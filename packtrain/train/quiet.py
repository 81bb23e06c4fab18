"""Keeping the terminal to packtrain's own lines: what libraries say goes to the log file, or is not said at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from transformers.utils import logging as transformers_logging

from packtrain.train.rank_log import RankLog


def quiet_libraries(*, on_cpu: bool) -> None:
    """Turns off progress bars and advice; called once at the start of a process that trains."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if on_cpu:  # DeepSpeed, where installed, would say on stdout that it has found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def warnings_to(log: RankLog) -> None:
    """Sends Python's warnings to the log file: they are for developers, and packtrain says its own things itself."""

    def note(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        log.note(f"{filename}:{lineno}: {category.__name__}: {message}")

    warnings.showwarning = note


@contextmanager
def without_future_warnings() -> Iterator[None]:
    """Keeps libraries from warning of each other's old names, inside the block, where there is no log file to note it in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
