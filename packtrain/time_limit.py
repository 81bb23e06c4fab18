"""Time limits for calls that may never return: on a dead disk, a silent server, a broken driver. They run in daemon threads, since a
thread that is stuck in the kernel cannot be ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from typing import TypeVar

DISK_S = 3
_disk, _disk_work = threading.Lock(), list[Future]()
"""The lock under which `in_time` runs one call after another, and the calls that have not returned."""
_Result = TypeVar("_Result")


class Work(Future[_Result]):
    """A call that runs in a thread of its own."""

    def result(self, timeout: float | None = None) -> _Result:
        """The result of the call. Raises what the call raises, and TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        except NoAnswer as error:  # another class than Python's TimeoutError before Python 3.11
            raise TimeoutError from error


def start(work: Callable[[], _Result], name: str = "") -> Work[_Result]:
    """Calls `work` in a daemon thread."""
    future = Work[_Result]()

    def answer() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=answer, name=name or None, daemon=True).start()
    return future


def in_time(work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """The result of `work`, or `otherwise` if it raises OSError, takes longer than DISK_S, or an earlier call is still stuck.

    For the diagnosis of a run that stands still, perhaps because of its disk. Calls behind a stuck one run once it returns.
    """

    def in_order() -> _Result:
        with _disk:
            return work()

    _disk_work[:] = [earlier for earlier in _disk_work if not earlier.done()]
    limit_s = 0 if _disk_work else DISK_S
    future = start(in_order)
    with suppress(OSError):  # TimeoutError, too
        return future.result(limit_s)
    if not future.done():
        _disk_work.append(future)
    return otherwise
