"""packtrain: YAML-driven fine-tuning of language models on packed sequences, proved free of contamination.

`__all__` is the library (docs/library.md). It is imported lazily, because it needs torch, which takes seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig
    from packtrain.library.attach import attach
    from packtrain.library.collator import PackedCollator, pack
    from packtrain.packing.segments import Segments
    from packtrain.train.optim.dither import dither_weights

__version__ = "0.1.0"
__all__ = ["PackedCollator", "Segments", "attach", "dither_weights", "pack"]
_MODULES = {"PackedCollator": "library.collator", "Segments": "packing.segments"}
_MODULES |= {"attach": "library.attach", "dither_weights": "train.optim.dither", "pack": "library.collator"}

# Otherwise importing pyarrow starts a thread, and a fork of a process with threads may inherit a lock that nobody opens.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"packtrain.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import torch and the libraries on it (3,500 modules) with Python's garbage collector off.

    That is a quarter faster. Later full collections save 0.4 s each, and the end of the process 2 s. Libraries print into the log.
    """
    from packtrain.system import kept_from_terminal, quiet_at_exit

    quiet_at_exit()  # frozen objects are never freed, and C++ libraries (triton's nanobind) complain about theirs
    gc.disable()
    try:
        with kept_from_terminal():
            yield
    finally:
        gc.freeze()
        gc.enable()


def work(verb: str, config: RunConfig) -> int:
    """Do one process's work under a training or measuring verb; return its exit code."""
    with fast_imports():
        from packtrain.train.run import train
    if verb == "bench":
        from packtrain.bench.measured_run import measure_in

        return train(verb, config, measure_in)
    if verb == "eval":
        from packtrain.train.run import evaluate_in

        return train(verb, config, evaluate_in)
    return train(verb, config)
