"""Asking a machine that may never answer (a broken driver, a dead disk, a silent name server), with a limit on every answer.

Each question is asked in a thread of its own, all at once. A command that is given up is killed with all that it started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

LIMIT_S = 5.0
_MOST = 2**20  # bytes of what a command says that are read
_running: set[subprocess.Popen[bytes]] = set()

Value = TypeVar("Value")


class Unanswered(Exception):
    """There is no usable answer; the text says why, `output` is what a command had said by then."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(why)
        self.output = output


class Probe(Generic[Value]):
    """`ask` is called at once, in a thread; `answer` waits for it, at most `limit_s` seconds from the start."""

    def __init__(self, ask: Callable[[], Value], limit_s: float = LIMIT_S) -> None:
        self._end, self._limit_s = time.monotonic() + limit_s, limit_s
        self._value: list[Value] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is answered, or will not be."""
        return not self._thread.is_alive()

    def answer(self) -> Value:
        """What was found. Raises Unanswered."""
        self._thread.join(max(0.0, self._end - time.monotonic()))
        if self._value:
            return self._value[0]
        if isinstance(self._error, Unanswered):
            raise self._error
        if self._error is not None:
            raise Unanswered(first_line(str(self._error)) or type(self._error).__name__)
        raise Unanswered(f"no answer within {self._limit_s:.3g} s")

    def _run(self, ask: Callable[[], Value]) -> None:
        try:
            self._value.append(ask())
        except Exception as error:  # whatever is wrong with one fact must not cost the others
            self._error = error


class Inquiry:
    """Questions by name, all asked at once; `lacks` has a line for each that was not answered."""

    def __init__(self) -> None:
        self._probes: dict[str, Probe] = {}
        self.lacks: list[str] = []

    def ask(self, name: str, ask: Callable[[], Value], limit_s: float = LIMIT_S) -> None:
        """Begins to ask."""
        self._probes[name] = Probe(ask, limit_s)

    def answer(self, name: str, otherwise: Value) -> Value:
        """What was found, or `otherwise`."""
        try:
            return self._probes[name].answer()
        except Unanswered as refusal:
            self.lacks.append(f"{name}: {refusal}")
            return otherwise


def command(argv: Sequence[str], limit_s: float = LIMIT_S, env: Mapping[str, str] | None = None) -> str:
    """What a command prints on stdout. Raises Unanswered where it is not there, fails, or takes longer than `limit_s`."""
    program = shutil.which(argv[0])
    if program is None:
        raise Unanswered("not installed")
    # files, not pipes: they need no reader, and a grandchild that inherits one blocks nothing
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            start_new_session=True,
        )
        _running.add(process)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Unanswered(f"no answer within {limit_s:.3g} s", _text(output)) from None
        finally:
            _kill(process)
        if process.returncode:
            why = first_line(_text(errors)) or first_line(_text(output)) or f"ends with exit code {process.returncode}"
            raise Unanswered(why, _text(output))
        return _text(output)


def _text(file) -> str:
    file.seek(0)
    return file.read(_MOST).decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The command's whole process group; does not wait for what cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
    _running.discard(process)


def kill_commands() -> None:
    """Whatever still runs."""
    for process in list(_running):
        _kill(process)


def first_line(text: str) -> str:
    """The first line that says something, not longer than 200 letters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "".join(letter for letter in line if letter.isprintable())[:200]
