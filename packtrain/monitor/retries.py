"""What fails for a reason that may pass, on the hub or a network disk, is tried again a few times, counted and reported."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

from packtrain.monitor.heartbeat import progress
from packtrain.wording import first_line

Kind = Literal["hub", "storage"]
_Result = TypeVar("_Result")
PAUSES_S = (1.0, 4.0, 15.0)
"""Before each further attempt."""
_PASSING = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EREMOTEIO, errno.EAGAIN),
)
_STATUS = (408, 429, 500, 502, 503, 504)
_CONNECTION_ERRORS = (
    "Timeout",
    "ConnectError",
    "ConnectionError",
    "RemoteProtocolError",
    "ReadError",
    "IncompleteRead",
)

counted: Counter[str] = Counter()
"""Further attempts of this process, by what was tried."""
listeners: list[Callable[[str], None]] = []
"""Called with a sentence for each further attempt."""


def patiently(kind: Kind, what: str, work: Callable[[], _Result]) -> _Result:
    """What `work` returns, tried again after each of PAUSES_S if it fails for a reason that may pass. `what` names it."""
    for pause_s in PAUSES_S:
        try:
            return work()
        except Exception as error:  # libraries wrap what the network says in errors of every type
            if not may_pass(error):
                raise
            line = first_line(error)
        counted[kind] += 1
        for listener in listeners:
            listener(f"{what}: {line}; trying again in {pause_s:g} s")
        progress()
        time.sleep(pause_s)
    return work()


def may_pass(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, speaks of a connection or a disk that may come back."""
    while error is not None:
        # a ConnectionError, of a choice, which `datasets` wraps in another
        if "OfflineModeIsEnabled" in f"{type(error).__name__} {error}":
            return False
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status in _STATUS
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        if isinstance(error, TimeoutError | ConnectionError) or type(error).__name__.endswith(_CONNECTION_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False
