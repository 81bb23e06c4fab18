"""Time and memory for programs of the user: a chat template or a regular expression may loop or allocate without end.

jinja's sandbox limits `range` alone, and not what loops inside each other or doubled texts take. So the system interrupts: a timer,
and a limit on the address space. Either is the user's to know at once, for every row would meet it.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from packtrain.errors import UserError

MOST_S = 3.0
MOST_BYTES = 1 << 30
_LEAST_S = 0.01
_PAGE = resource.getpagesize()


class _TooLong(Exception):
    """Raised by the timer."""


@contextmanager
def limited(what: str, where: str, fix: str, seconds: float = MOST_S) -> Iterator[None]:
    """Inside the block `what` may compute for so many `seconds` of this thread and take MOST_BYTES; else UserError, at `where`.

    Only in the main thread, where signals arrive, and on Linux; elsewhere there are no limits.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return
    until = time.thread_time() + seconds

    def interrupt(*_: object) -> None:
        if (left := until - time.thread_time()) <= 0:
            raise _TooLong
        # the timer counts all threads of the process, of which others may be busy
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, _LEAST_S))

    before = signal.signal(signal.SIGVTALRM, interrupt)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + MOST_BYTES
    lowered = soft == resource.RLIM_INFINITY or most < soft
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        if lowered:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        yield
    except (_TooLong, MemoryError) as error:
        long = isinstance(error, _TooLong)
        did = f"computes for more than {seconds:g} s" if long else "takes more than 1 GiB of memory"
        raise UserError(f"{what} {did}", where=where, fix=fix) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if lowered:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _address_space() -> int:
    """Bytes that this process has mapped."""
    with open("/proc/self/statm", "rb", buffering=0) as file:  # a tenth of the time that Path.read_text takes
        return int(file.read(32).split()[0]) * _PAGE
