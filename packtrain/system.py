"""Safe use of the operating system: durable files, streams, signals, calls with a time limit.

A file or folder is whole or absent after a kill or power failure. It is written under another name, synced and renamed, and the
parent folder is synced; otherwise a renamed file can come back empty. Standard streams cannot end a run: `packtrain sft … | head -1`,
`>&-` and `> /dev/full` only lose the printed text, which logs/ has, too. Calls that may never return, because of a dead disk, a silent
server or a broken driver, run in daemon threads: a thread that is stuck in the kernel cannot be ended.
"""

from __future__ import annotations

import atexit
import errno
import gc
import hashlib
import io
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from packtrain.wording import CleanStream

_OUTPUTS = {"stdout": 1, "stderr": 2}
kept: list[str] = []
"""Output of libraries, for the log of this process. A bug shows it if there is no log yet."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a process to end."""
DISK_S = 3
_disk, _unfinished = threading.Lock(), list[Future]()
"""`in_time` locks each call, so they run one by one. `_unfinished` has the calls that did not return in time."""
_Result = TypeVar("_Result")


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def hash_of(path: Path, digest_size: int = 64) -> str:
    """Return BLAKE2 of the bytes of a file."""
    digest = hashlib.blake2b(digest_size=digest_size)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def aside(path: Path) -> Path:
    """Return the path of a file or folder while it is being written or removed."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a file (UTF-8) atomically.

    Raises OSError if the path is a device, a pipe or a folder: renaming would replace it.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    try:
        aside(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:  # no space: remove the part that was written, and name the file
        aside(path).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    publish(aside(path), path)


def publish(staging: Path, target: Path) -> None:
    """Sync a file, or a folder with all its files, and rename it to `target`."""
    for folder, _, files in os.walk(staging):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if staging.is_file():
        sync(staging)
    os.replace(staging, target)
    sync(target.parent)


def remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that no part of it is ever seen under its name."""
    shutil.rmtree(aside(folder), ignore_errors=True)
    folder.rename(aside(folder))
    shutil.rmtree(aside(folder), ignore_errors=True)


def open_streams() -> None:
    """Open /dev/null for each closed standard stream, and make writes blocking.

    Otherwise the next open file would get the closed stream's number, and all output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, number in _OUTPUTS.items():
        if getattr(sys, name) is None:  # Python sets it to None if it was closed at the start
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        with suppress(OSError):
            os.set_blocking(number, True)


def outlive_terminal() -> None:
    """Drop output that cannot be printed, from now on. Called once, before a process trains or launches."""
    open_streams()
    for name, number in _OUTPUTS.items():
        stream: Any = getattr(sys, name)
        inner = stream.unchanged if isinstance(stream, CleanStream) else stream
        with suppress(OSError, ValueError):  # a stream of a test or a notebook has no descriptor, and stays
            if isinstance(inner, io.TextIOWrapper) and inner.fileno() == number:
                inner.flush()
                raw = _LastingFile(number, "w", closefd=False)
                by_lines = raw.isatty() or number == 2
                lasting = io.TextIOWrapper(io.BufferedWriter(raw), inner.encoding, "replace", line_buffering=by_lines)
                if isinstance(stream, CleanStream):
                    stream.unchanged = lasting
                else:
                    setattr(sys, name, lasting)


def redirect_output(file: Path) -> None:
    """Append the output of this process and its children to `file` from now on."""
    _point_outputs_at(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def _point_outputs_at(*descriptors: int) -> None:
    """Point stdout and stderr at two descriptors, or both at one, and close these."""
    with suppress(OSError, ValueError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    for number, descriptor in zip(_OUTPUTS.values(), descriptors * 2, strict=False):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def kept_from_terminal() -> Iterator[None]:
    """Keep all output of the block, even from C libraries, in `kept`.

    If the block fails, everything kept since its start is printed on stderr.
    """
    before = len(kept)
    memory = os.memfd_create("printed") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    outputs, failed = [os.dup(number) for number in _OUTPUTS.values()], False
    _point_outputs_at(os.dup(memory))
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        _point_outputs_at(*outputs)
        with open(memory, "rb") as file:
            file.seek(0)
            text = file.read().decode(errors="replace")
        if failed:
            print(*kept[before:], text, sep="", end="", file=sys.stderr, flush=True)
        else:
            kept.append(text)


def quiet_at_exit() -> None:
    """Drop all output while Python tears down its objects.

    C++ libraries complain about objects that are still there.
    """
    atexit.register(lambda: _point_outputs_at(os.open(os.devnull, os.O_WRONLY)))


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import torch and the libraries on it (3,500 modules) with Python's garbage collector off.

    That is a quarter faster. Later full collections save 0.4 s each, and the end of the process 2 s. Libraries print into the log.
    """
    quiet_at_exit()  # frozen objects are never freed, and C++ libraries (triton's nanobind) complain about theirs
    gc.disable()
    try:
        with kept_from_terminal():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send everything that this process and its children print inside the block to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class _LastingFile(io.FileIO):
    """A descriptor that becomes /dev/null when a write fails. Writes wait even if another process made it non-blocking."""

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # the pipe is full
                select.select([], [self], [])
            return written
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM outside training. Training has its own handler (train/run_state.py)."""


@contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Call `listener` with the number of each SIGINT and SIGTERM in the block. It may raise.

    The old handlers are restored afterwards. Only for the main thread.
    """
    before = {number: signal.signal(number, lambda received, _: listener(received)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def told_at_once(tell: Callable[[int], None]) -> Iterator[None]:
    """Call `tell` with the first SIGINT or SIGTERM of the block, from a thread.

    The main thread may be inside a backward pass of many seconds. Only for the main thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        with open(read, "rb", buffering=0) as pipe:
            numbers = (received[0] for received in iter(lambda: pipe.read(1), b""))
            if first := next(filter(ENDING.__contains__, numbers), 0):
                tell(first)
            for _ in numbers:  # Python complains if nobody reads
                pass

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join(1)  # it keeps what `tell` knows, and a model that outlives its process group crashes at exit


def leave(code: int) -> NoReturn:
    """End this process now, even if its threads are busy. Printed text is flushed first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"


def start(work: Callable[[], _Result], name: str = "") -> Future[_Result]:
    """Call `work` in a daemon thread."""
    future = Future[_Result]()

    def answer() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=answer, name=name or None, daemon=True).start()
    return future


def in_time(work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Return the result of `work`, or `otherwise` if it raises OSError or is stuck.

    A call is stuck if it takes longer than DISK_S, or if an earlier call has not returned; it then runs after that one. This serves the
    diagnosis of a hanging run, whose disk may be the cause.
    """

    def in_order() -> _Result:
        with _disk:
            return work()

    _unfinished[:] = [earlier for earlier in _unfinished if not earlier.done()]
    limit_s = 0 if _unfinished else DISK_S
    future = start(in_order)
    with suppress(OSError):  # TimeoutError, too
        return future.result(limit_s)
    if not future.done():
        _unfinished.append(future)
    return otherwise


@contextmanager
def holding(thing: object, **values: object) -> Iterator[None]:
    """Give attributes of `thing`, an object or a module, these values inside the block."""
    own = getattr(thing, "__dict__", {})  # a class's own dict keeps its static methods wrapped
    before = {name: own.get(name, getattr(thing, name, None)) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
