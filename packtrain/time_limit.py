"""Work that may never return: on a dead disk, a silent server, a broken driver. It is done in threads that do not outlive the process,
since nobody can end a thread that is stuck in the kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from typing import TypeVar

DISK_S = 3
_disk, _disk_work = threading.Lock(), list[Future]()
"""Held while `in_time` works, and what it has not done yet."""
_Result = TypeVar("_Result")


class Work(Future[_Result]):
    """Work that has been begun."""

    def result(self, timeout: float | None = None) -> _Result:
        """What the work returns. Raises what it raises, and TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        except NoAnswer as error:  # another class than Python's TimeoutError before Python 3.11
            raise TimeoutError from error


def start(work: Callable[[], _Result], name: str = "") -> Work[_Result]:
    """Begins `work`."""
    future = Work[_Result]()

    def answer() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # is raised where the answer is asked for
            future.set_exception(error)

    threading.Thread(target=answer, name=name or None, daemon=True).start()
    return future


def in_time(work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """What `work` returns; `otherwise` if it raises OSError or takes longer than DISK_S, or an earlier call is still stuck.

    For diagnoses of a run that stands still, perhaps because of its disk. Later calls do their work after those that are stuck.
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
