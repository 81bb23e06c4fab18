"""What comes and goes is tried again a few times, counted and told: the hub and disks of a network.

huggingface_hub tries each request again itself (up to five times, with pauses of 1 to 8 s); these retries are counted here, and what
still fails for a reason that may pass is tried again as a whole.
"""

from __future__ import annotations

import errno
import io
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from packtrain.monitor.heartbeat import progress
from packtrain.wording import first_line

Kind = Literal["hub", "storage"]
_Found = TypeVar("_Found")
PAUSES_S = (1.0, 4.0, 15.0)
"""Before each further attempt."""
_PASSING = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EREMOTEIO, errno.EAGAIN),
)
_STATUS = (408, 429, 500, 502, 503, 504)
_OF_CONNECTIONS = ("Timeout", "ConnectError", "ConnectionError", "RemoteProtocolError", "ReadError", "IncompleteRead")

counted: Counter[str] = Counter()
"""Further attempts of this process, by what was tried."""
listeners: list[Callable[[str], None]] = []
"""Are told of each further attempt."""


def patiently(kind: Kind, what: str, work: Callable[[], _Found]) -> _Found:
    """What `work` returns, tried again after each of PAUSES_S if it fails for a reason that may pass. `what` names it."""
    _watch_hub()
    for pause_s in PAUSES_S:
        try:
            return work()
        except Exception as error:  # libraries wrap what the network says in errors of every type
            if not may_pass(error):
                raise
            _note(kind, f"{what}: {first_line(error)}; trying again in {pause_s:g} s")
        progress()
        time.sleep(pause_s)
    return work()


def may_pass(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, speaks of a connection or a disk that may come back."""
    for one in _chain(error):
        if type(one).__name__ == "OfflineModeIsEnabled":  # a ConnectionError, of a choice
            return False
        status = getattr(getattr(one, "response", None), "status_code", None)
        if status is not None:
            return status in _STATUS
        if isinstance(one, OSError) and one.errno in _PASSING:
            return True
        if isinstance(one, TimeoutError | ConnectionError) or type(one).__name__.endswith(_OF_CONNECTIONS):
            return True
    return False


def opened(path: Path) -> io.BufferedReader:
    """The file for reading bytes; where its disk goes away in the middle, it is opened again at the same place."""
    return io.BufferedReader(_Patient(path), 1 << 20)


class _Patient(io.RawIOBase):
    """A file whose reads are tried again."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._file = patiently("storage", str(path), lambda: open(path, "rb", 0))  # noqa: SIM115

    def readinto(self, buffer: Any) -> int | None:
        def read() -> int | None:
            if self._file.closed:
                self._file = open(self._path, "rb", 0)  # noqa: SIM115
                self._file.seek(self._at)
            try:
                return self._file.readinto(buffer)
            except OSError:
                self._file.close()
                raise

        number = patiently("storage", str(self._path), read)
        self._at += number or 0
        return number

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _note(kind: Kind, what: str) -> None:
    counted[kind] += 1
    for tell in listeners:
        tell(what)


@cache
def _watch_hub() -> None:
    """Counts what huggingface_hub tries again by itself, which it says in its log."""

    class Counted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "[Retry " in (said := record.getMessage()):
                _note("hub", f"the hub: {said}")

    logging.getLogger("huggingface_hub").addHandler(Counted(logging.WARNING))
