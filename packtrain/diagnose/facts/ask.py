"""Questions to a machine that may never answer: a broken driver, a dead disk, a silent name server.

Each is asked in a thread of its own, all at once, and nobody waits for one beyond its limit: what did not answer is a
line of the report. A command that is given up is killed with all that it started, and is never read beyond some MiB.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Generic, TypeVar

LIMIT_S = 5.0
_MOST = 8 * 2**20
_running: set[subprocess.Popen[bytes]] = set()

Value = TypeVar("Value")


class NoAnswer(Exception):
    """A command gave no usable answer; the text says why, `output` is what it had said by then."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(why)
        self.output = output


class Question(Generic[Value]):
    """`ask` is called at once, in a thread; `answer` waits for it, at most `limit_s` seconds from the start."""

    def __init__(self, ask: Callable[[], Value], limit_s: float = LIMIT_S) -> None:
        self._end = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._value: list[Value] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    def answer(self) -> Value:
        """What was found. Raises NoAnswer."""
        self._thread.join(max(0.0, self._end - time.monotonic()))
        if self._value:
            return self._value[0]
        if isinstance(self._error, NoAnswer):
            raise self._error
        if self._error is not None:
            raise NoAnswer(first_line(str(self._error)) or type(self._error).__name__)
        raise NoAnswer(f"no answer within {self._limit_s:.3g} s")

    @property
    def done(self) -> bool:
        """Whether it is answered, or will not be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is answered or given up."""
        self._thread.join(max(0.0, self._end - time.monotonic()))

    def _run(self, ask: Callable[[], Value]) -> None:
        try:
            self._value.append(ask())
        except Exception as error:  # whatever is wrong with one fact must not cost the others
            self._error = error


def command(
    argv: Sequence[str],
    limit_s: float = LIMIT_S,
    env: Mapping[str, str] | None = None,
    hold: Callable[[], str] | None = None,
) -> str:
    """What a command prints on stdout. Raises NoAnswer where it is not there, fails, or takes longer than `limit_s`.

    With `hold` it gets on stdin what that returns, which a command that waits for it can take as its cue.
    """
    end = time.monotonic() + limit_s
    program = shutil.which(argv[0])
    if program is None:
        raise NoAnswer("not installed")
    settings = {**os.environ, "LC_ALL": "C", **(env or {})}
    process = subprocess.Popen(
        [program, *argv[1:]],
        stdin=subprocess.PIPE if hold else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=settings,
        start_new_session=True,
    )
    _running.add(process)
    try:
        assert process.stdout is not None and process.stderr is not None
        said, complained = _Reader(process.stdout), _Reader(process.stderr)
        if hold and process.stdin is not None:
            cue = hold()
            with suppress(OSError):  # it is gone already
                process.stdin.write(cue.encode())
                process.stdin.close()
        said.join(max(0.0, end - time.monotonic()))
        if said.is_alive():
            raise NoAnswer(f"no answer within {limit_s:.3g} s", said.text)
        if len(said.data) >= _MOST:
            raise NoAnswer(f"answers with more than {_MOST // 2**20} MiB", said.text)
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
        if process.returncode:
            complained.join(0.1)
            why = first_line(complained.text) or first_line(said.text) or f"ends with exit code {process.returncode}"
            raise NoAnswer(why, said.text)
        return said.text
    finally:
        _end(process)


def end_commands() -> None:
    """Kills whatever still runs."""
    for process in list(_running):
        _end(process)


def first_line(text: str) -> str:
    """The first line that says something, not longer than a terminal is wide."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = "".join(letter for letter in line if letter.isprintable())
    return line if len(line) <= 200 else f"{line[:199]}…"


class _Reader(threading.Thread):
    """Reads a stream up to _MOST bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self.data = bytearray()
        self.start()

    def run(self) -> None:
        with suppress(OSError, ValueError):
            while len(self.data) < _MOST and (chunk := os.read(self._stream.fileno(), 2**16)):
                self.data += chunk

    @property
    def text(self) -> str:
        return bytes(self.data).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the command's whole process group, and does not wait for what cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
    _running.discard(process)
