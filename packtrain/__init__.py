"""packtrain: YAML-driven fine-tuning of language models on packed sequences, proved free of contamination.

`__all__` is the library (docs/library.md). It is imported lazily, because it needs torch, which takes seconds.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
