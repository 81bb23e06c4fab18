"""Work in a process of its own: code of the user's in it may end that process, whatever its exit code, and is found out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from packtrain.errors import UserError
from packtrain.launch.exit_status import exit_code_of
from packtrain.launch.worker import end_with_parent


def done_apart(work: Callable[[], int], *, name: str, where: str) -> int:
    """Does `work` in a child process and returns its exit code, as `exit_code_of` does; nothing heavy is imported here yet.

    Raises UserError if the process ends before the work does: `name` is the code that must have ended it, given by `where`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    told, tell = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        end_with_parent(parent)
        code = exit_code_of(lambda: _flushed(work()))
        os.write(tell, bytes([code]))
        os._exit(code)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl+C reaches the child, too, which says so
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(tell)
    os.set_blocking(told, False)  # a process that the work has left behind may hold the other end
    try:
        said = os.read(told, 1)
    except BlockingIOError:
        said = b""
    finally:
        os.close(told)
    if said:
        return said[0]
    how = f"with exit code {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    raise UserError(
        f"{name} ended the process {how}, and nothing was proved", where=where, fix="Have it return or raise."
    )


def _flushed(code: int) -> int:
    sys.stdout.flush()
    return code
