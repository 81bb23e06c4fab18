"""Time limits for calls that may never return. The cause may be a dead disk, a silent server or a broken driver.
The calls run in daemon threads, since a thread that is stuck in the kernel cannot be ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from typing import TypeVar

DISK_S = 3
_disk, _disk_work = threading.Lock(), list[Future]()
"""The lock that makes `in_time` run calls one by one, and the unfinished calls."""
_Result = TypeVar("_Result")


class Work(Future[_Result]):
    """A call that runs in its own thread."""

    def result(self, timeout: float | None = None) -> _Result:
        """Return the result of the call. Raises its error, or TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        except NoAnswer as error:  # not Python's TimeoutError before Python 3.11
            raise TimeoutError from error


def start(work: Callable[[], _Result], name: str = "") -> Work[_Result]:
    """Call `work` in a daemon thread."""
    future = Work[_Result]()

    def answer() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=answer, name=name or None, daemon=True).start()
    return future


def in_time(work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Return the result of `work`, or `otherwise` if it raises OSError or is stuck.

    Stuck means longer than DISK_S, or behind an earlier call that has not returned; such calls run when that one returns. This serves the
    diagnosis of a run that stands still, perhaps because of its disk.
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
