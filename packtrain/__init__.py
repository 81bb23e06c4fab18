"""packtrain: YAML-driven fine-tuning of language models on packed sequences, proved free of contamination."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packtrain.library.attach import attach as attach

__version__ = "0.1.0"
_PUBLIC = {"attach": "packtrain.library.attach"}
"""The library's names and the modules that have them: those import torch, which the command does not wait for."""


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
