"""Tiny models run on one thread, without warnings about their sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sweep import quietly_on_one_thread


@pytest.fixture(autouse=True, scope="module")
def on_one_thread() -> Iterator[None]:
    with quietly_on_one_thread():
        yield
