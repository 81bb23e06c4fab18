"""Markers of the test suite."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'slow: takes more than a few seconds; left out by -m "not slow"')
