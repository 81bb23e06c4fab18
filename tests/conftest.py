"""Markers of the test suite, and how its made-up examples are chosen: the same each time, however long the machine takes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'slow: takes more than a few seconds; left out by -m "not slow"')
