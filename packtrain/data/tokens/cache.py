"""One folder per tokenised source, named by the hash of all that decides its content; complete or absent.

It is built in a folder of its own and renamed when whole, under a lock that the operating system lets go when its
holder dies. So processes that start together build it once, an interrupted build leaves nothing that could be taken
for a result, and what a killed process left (`*.building`) is removed by the next one to build.

What is complete is only read, so a cache may lie on a read-only disk. Nothing complete is ever removed: another process,
or another machine on the same disk, may be training from it. The README that is put into the folder says so.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from packtrain.data.tokens.store import DamagedStore, Store
from packtrain.errors import PeerFailed, UserError
from packtrain.monitor.heartbeat import progress

README = """Tokenised data of packtrain, one folder for each source and each way of tokenising it.

Nothing here is removed by itself, and everything can be made anew. To make room:
    rm -r THIS_FOLDER                                      while no run uses it, or
    find THIS_FOLDER -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -r {} +    for what is older than 30 days.
"""
STALLED_S = 900.0
POLL_S = 0.5


def cache_folder(configured: str | None) -> Path:
    """data.cache_dir, else $PACKTRAIN_CACHE, else ~/.cache/packtrain; made if need be, UserError if it cannot be.

    It need not be writable: what is in it can be used.
    """
    folder = Path(configured or os.environ.get("PACKTRAIN_CACHE") or "~/.cache/packtrain").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder: {error}", where="data.cache_dir", fix="Set data.cache_dir."
        ) from error
    return folder


def open_or_build(
    folder: Path, key: str, build: Callable[[Path], None], say: Callable[[str], None]
) -> tuple[Store, bool]:
    """The store of `key` and whether it was built now; `build(empty folder)` makes it where there is none.

    Raises PeerFailed when another process holds the build and has written nothing for STALLED_S seconds, UserError when
    the disk takes no more.
    """
    final, building = folder / key, folder / f"{key}.building"
    if (found := _whole(final, say)) is not None:
        return found, False
    if not os.access(folder, os.W_OK):
        what = f"this data is not in {folder} yet, and nothing can be written there"
        raise UserError(what, where="data.cache_dir", fix="Set data.cache_dir to another folder.")
    with _only_one(folder, key, say):
        if (found := _whole(final, say)) is not None:
            return found, False
        (folder / "README.txt").write_text(README.replace("THIS_FOLDER", str(folder)), encoding="utf-8")
        _sweep(folder, key)
        shutil.rmtree(final, ignore_errors=True)
        building.mkdir()
        try:
            build(building)
            building.rename(final)
        except BaseException as error:  # Ctrl-C too: an interrupted build leaves nothing
            shutil.rmtree(building, ignore_errors=True)
            if isinstance(error, OSError):
                what = f"the tokenised data cannot be kept: {error}"
                raise UserError(what, where=str(folder), fix="Make room there, or set data.cache_dir.") from error
            raise
    return Store(final), True


def _whole(folder: Path, say: Callable[[str], None]) -> Store | None:
    if not folder.is_dir():
        return None
    try:
        return Store(folder)
    except DamagedStore as error:
        say(f"the tokenised data in {folder} is damaged ({error}): it is made anew")
        return None


@contextmanager
def _only_one(folder: Path, key: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `key`; says for whom it waits, and gives up when the holder stands still."""
    lock = FileLock(folder / f"{key}.lock")
    owner, building = folder / f"{key}.owner", folder / f"{key}.building"
    waited = False
    still_since, seen = time.monotonic(), -1.0
    while True:
        try:
            lock.acquire(timeout=POLL_S)
            break
        except Timeout:
            progress()  # it gives up by itself
        if not waited:
            say(f"{_described(owner)} is tokenising this data; waiting for it")
            waited = True
        if (now := _newest(building)) != seen:
            seen, still_since = now, time.monotonic()
        elif time.monotonic() - still_since > STALLED_S:
            what = (
                f"{_described(owner)} holds the tokenising of this data and has written nothing for {STALLED_S:.0f} s"
            )
            raise PeerFailed(what, where=str(building), fix="Look whether it hangs, end it, and start again.")
    try:
        owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _described(owner: Path) -> str:
    try:
        known = json.loads(owner.read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def _newest(folder: Path) -> float:
    try:
        return max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
    except OSError:
        return 0.0


def _sweep(folder: Path, own_key: str) -> None:
    """Remove what killed processes left: builds whose lock nobody holds."""
    for left in folder.glob("*.building"):
        key = left.name.removesuffix(".building")
        if key == own_key:  # we hold this lock
            shutil.rmtree(left, ignore_errors=True)
            continue
        lock = FileLock(folder / f"{key}.lock")
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(left, ignore_errors=True)
        except Timeout:
            pass  # somebody is building it
