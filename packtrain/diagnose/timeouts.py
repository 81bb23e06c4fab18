"""Asking a machine that may never answer (a broken driver, a dead disk, a silent name server), with a limit on every answer.

Each question is asked in a thread of its own, all at once. A process that is given up is killed with all that it started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from packtrain.wording import first_line

PROBE_LIMIT_S = 5.0
_running: set[subprocess.Popen[bytes]] = set()

Value = TypeVar("Value")


class Unanswered(Exception):
    """There is no usable answer; the text says why, `output` is what a process had printed by then."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(why)
        self.output = output


class Probe(Generic[Value]):
    """`ask` is called at once, in a thread; `answer` waits for it, at most `limit_s` seconds from the start."""

    def __init__(self, ask: Callable[[], Value], limit_s: float = PROBE_LIMIT_S) -> None:
        self._end, self._limit_s = time.monotonic() + limit_s, limit_s
        self._value: list[Value] = []
        self._why = f"no answer within {limit_s:.3g} s"
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    def answer(self) -> Value:
        """The answer. Raises Unanswered if there is none in time."""
        self._thread.join(max(0.0, self._end - time.monotonic()))
        if not self._value:
            raise Unanswered(self._why)
        return self._value[0]

    def _run(self, ask: Callable[[], Value]) -> None:
        try:
            self._value.append(ask())
        except Exception as error:  # whatever is wrong with one fact must not cost the others
            self._why = first_line(error)


def ask_python(module: str, *arguments: str, limit_s: float, env: Mapping[str, str] | None = None) -> str:
    """What `python -m module arguments…` prints on stdout. Raises Unanswered where it fails, or takes longer than `limit_s`."""
    # files, not pipes: they need no reader, and a grandchild that inherits one blocks nothing
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        _running.add(process)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Unanswered(f"no answer within {limit_s:.3g} s", _text(output)) from None
        finally:
            _kill(process)
        if code:
            before, _, traceback = _text(errors).rpartition("Traceback (most recent call last):")
            why = (before.strip() or traceback.strip().rpartition("\n")[2]).partition("\n")[0]
            raise Unanswered(why or f"ends with exit code {code}", _text(output))
        return _text(output)


def _text(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole process group; does not wait for what cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
    _running.discard(process)


def kill_processes() -> None:
    """Kills all processes that still run."""
    for process in list(_running):
        _kill(process)
