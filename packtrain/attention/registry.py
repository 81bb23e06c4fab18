"""The attention backends of packtrain/attention and of other packages."""

from __future__ import annotations

from packtrain.attention.spec import Backend
from packtrain.registry import Registry

BACKENDS = Registry(Backend, "backend", package="packtrain.attention", module="spec", attribute="BACKEND")


def tried_by_auto() -> list[Backend]:
    """Return the backends that model.attention=auto tries, the best first."""
    return [backend for backend in BACKENDS.all().values() if backend.auto]
