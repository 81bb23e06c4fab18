"""What files of tests share: two network hosts, and a cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.two_hosts import TwoHosts, two_hosts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(made: TwoHosts) -> Iterator[TwoHosts]:
    """The two hosts, whole again after each test, which must leave nothing running."""
    yield made
    made.heal()
    made.assert_empty()


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    """A cgroup of 256 MiB."""
    root = Path("/sys/fs/cgroup")
    v1 = (root / "memory/memory.limit_in_bytes").exists()
    group = (root / "memory" if v1 else root) / f"packtrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(2**28))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    group.rmdir()
