"""Ports for what a test starts: one that was free a moment ago, and that no other test of this process has been given."""

from __future__ import annotations

from packtrain.monitor import channel

_given: set[int] = set()


def free_port() -> int:
    """Another one each time."""
    while (port := channel.free_port()) in _given:
        pass
    _given.add(port)
    return port
