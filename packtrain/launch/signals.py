"""The signals that ask a process to end, SIGINT and SIGTERM, for as long as a block listens to them. The main thread's alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def heard_by(listener: Callable[[int], None]) -> Iterator[None]:
    """Inside the block both go to `listener`, by their number, which may raise; afterwards to whoever had them before."""

    def pass_on(number: int, _: object) -> None:
        listener(number)

    before = {number: signal.signal(number, pass_on) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
