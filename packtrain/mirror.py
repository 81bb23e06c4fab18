"""Copy of a run in a bucket (trainer.mirror), at any URL that fsspec can write.

fsspec's packages find their credentials by themselves. A thread in the process that opened the run folder copies new files: each
checkpoint once it is complete, metrics and other small files every minute, final/ when the run is done. A checkpoint's manifest is copied
last and removed first, so that half a checkpoint is never read. A finished run's summary.json follows final/. Training does not wait
for the copy. If copying fails, the failure is printed, the run goes on, and the copy is tried again.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from packtrain.errors import PeerFailed, UserError
from packtrain.plan.origin import MANIFEST, ORIGIN, list_checkpoints, same_course, written_into
from packtrain.run_folder import RunFolder, object_of
from packtrain.system import aside, hash_of, publish, start
from packtrain.wording import clean, first_line

KEY = "trainer.mirror"
_INSIDE = re.compile(r"checkpoints/step-(\d+)/(.+)")
_POLL_S, _SMALL_S = 2.0, 60.0
_PAUSES_S = (5.0, 10.0, 20.0, 60.0, 300.0)
"""Seconds to wait after the first failure, the second, …"""
_TRIES = 3
"""Tries to reach the bucket at the start. Also tries to copy the rest at the end."""
_SILENT_S = 300
"""Seconds without a byte that end a wait. The end of a run waits for the copy, its start for an answer."""


class Mirror:
    """The copy of the run in `folder` at `url`; `keep` is trainer.keep_checkpoints."""

    def __init__(self, url: str, folder: RunFolder, keep: int | None = None) -> None:
        import fsspec

        self.url, self._folder, self._keep = url.rstrip("/"), folder, keep
        options: Any = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
        self._system, self._root = cast("tuple[Any, str]", fsspec.core.url_to_fs(self.url, **options))
        self._names: set[str] = set()
        self._manifests: dict[int, bytes] = {}
        """Manifests of the checkpoints in the bucket, by step."""
        self._older = set[int]()
        """Steps of checkpoints in the bucket that were not fetched."""
        self._copied: dict[str, tuple[int, int]] = {}
        """Size and time of change of each other file when it was copied."""
        self._ending, self._heard_at, self._failure = threading.Event(), time.monotonic(), ""
        self._small_at = 0.0
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def fetch(self, resume: str) -> None:
        """Fetch the newest checkpoint and the figures up to it, before a run.

        Only with `resume` auto, and if the run folder has no checkpoint as new. Raises UserError if the bucket cannot be written, or if the
        bucket or run folder has files that this would replace; PeerFailed without an answer.
        """
        self._folder.check_ours()
        for left in reversed(range(_TRIES)):
            try:
                start(self._look).result(_SILENT_S / _TRIES)
                return self._fetch(resume)
            except UserError:
                raise
            except Exception as error:
                what = f"{self.url} cannot be read and written: {_shortly(error)}"
                if isinstance(error, (PermissionError, FileNotFoundError)) or "credentials" in what:
                    fix = "Check the URL, and the credentials that its package finds."
                    raise UserError(what, where=KEY, fix=fix, code="mirror-refused") from error
                if not left:
                    fix = "Try again, or leave the key out."
                    raise PeerFailed(what, where=KEY, fix=fix, code="mirror-unreachable") from error
                time.sleep(_PAUSES_S[0])

    def _fetch(self, resume: str) -> None:
        mine, newest = list_checkpoints(self._folder.checkpoints), max(self._manifests, default=-1)
        done = self._object("summary.json").get("status") == "done"
        there = self._object(f"checkpoints/step-{newest:06d}/{ORIGIN}")
        here = object_of(mine[max(mine)] / ORIGIN) if mine else {}
        other = there and here and not same_course(there, here)
        fetches = resume == "auto" and not (done or other or self._folder.status() == "done")
        newer = sorted((step for step in self._manifests if step > max(mine, default=-1) and fetches), reverse=True)
        if newer and not any(self._download(step) for step in newer) and not mine:
            what = f"no checkpoint in {self.url} agrees with its manifest"
            fix = "Name another place, or an intact checkpoint in trainer.resume."
            raise UserError(what, where=KEY, fix=fix, code="mirror-damaged")
        behind = resume == "auto" and not newer and newest > max(mine, default=-1)
        mine = list_checkpoints(self._folder.checkpoints)
        self._older = {step for step in self._manifests if step < max(mine, default=-1)} - mine.keys()
        if (done or self._manifests) and (behind or other or not mine or self._folder.gives_way(resume)):
            has = "a finished run" if done else "checkpoints of a run"
            fix = "Name another place, or remove what is there."
            what = f"{self.url} has {has}, which this one does not continue"
            raise UserError(what, where=KEY, fix=fix, code="mirror-of-another-run")

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def close(self) -> None:
        """Copy the rest while that makes progress. Print a line if it does not."""
        self._ending.set()
        self._heard_at = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - self._heard_at < _SILENT_S:
            self._thread.join(_POLL_S)
        if self._failure or self._thread.is_alive():
            why = self._failure or f"nothing was sent for {_SILENT_S} s"
            _say(f"{self.url} has not all of the run ({why}): the rest is in {self._folder.root} alone")

    def _look(self) -> None:
        """List the bucket's files. Writing the mark of a run folder first shows that writing is allowed."""
        self._system.invalidate_cache()
        self._system.pipe_file(self._at(self._folder.mark.name), b"packtrain copies a run to this folder.\n")
        self._names = {name[len(self._root) :].lstrip("/") for name in self._system.find(self._root)}
        found = [match for name in self._names if (match := _INSIDE.fullmatch(name)) and match[2] == MANIFEST]
        self._manifests = {int(match[1]): self._read(match[0]) for match in found}

    def _download(self, step: int) -> bool:
        """Fetch a checkpoint and the small files into the run folder. Returns whether it matches its manifest."""
        target = self._folder.checkpoints / f"step-{step:06d}"
        staging, there = aside(target), f"checkpoints/{target.name}"
        _say(f"getting {target.name} from {self.url}")
        self._folder.set_mark()
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        (staging / MANIFEST).write_bytes(self._manifests[step])
        written = written_into(staging)
        try:
            for name, (_, digest) in written.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                self._system.get_file(self._at(f"{there}/{name}"), str(staging / name))
                if hash_of(staging / name) != digest:
                    raise ValueError(f"{name} is damaged")
            if not written:
                raise ValueError(f"{MANIFEST} is none")
        except (FileNotFoundError, ValueError) as error:
            _say(f"{there} in {self.url} is damaged: {_shortly(error)}")
            shutil.rmtree(staging, ignore_errors=True)
            return False
        best = object_of(staging / "trainer_state.json").get("best_global_step")
        if best in self._manifests and best not in (step, *list_checkpoints(self._folder.checkpoints)):
            self._download(best)  # the run may end with its weights
        for path in self._folder.entries():
            if path.name in self._names and (path in self._folder.records or not path.exists()):
                path.write_bytes(self._read(path.name))
        publish(staging, target)
        return True

    def _work(self) -> None:
        """Copy new files until the run has ended, and then the rest. This is the thread."""
        failures = 0
        while not self._ending.wait(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1] if failures else _POLL_S):
            failures = 0 if self._try_to_copy() else failures + 1
        for _ in range(_TRIES):
            if self._try_to_copy(everything=True):
                return
            time.sleep(_PAUSES_S[0])

    def _try_to_copy(self, *, everything: bool = False) -> bool:
        """Copy new files; return whether that succeeded. The same failure is printed only once."""
        now = time.monotonic()
        small = everything or now - self._small_at > _SMALL_S
        try:
            self._copy_new(small=small)
        except BaseException as error:  # asyncio's CancelledError is no Exception
            if (why := _shortly(error)) != self._failure:
                _say(f"copying to {self.url} failed and is tried again: {why}")
            self._failure = why
            return False
        if self._failure:
            _say(f"copying to {self.url} works again")
        self._failure, self._small_at = "", now if small else self._small_at
        return True

    def _copy_new(self, *, small: bool) -> None:
        """Copy what the bucket lacks, checkpoints first. Remove what the run folder no longer has."""
        folder = self._folder
        if folder.attempt.root.is_dir():  # until this run begins, the folder holds an earlier run
            return
        checkpoints = list_checkpoints(folder.checkpoints)
        for step, checkpoint in reversed(checkpoints.items()):
            try:
                self._copy_checkpoint(step, checkpoint)
            except FileNotFoundError:
                if checkpoint.is_dir():  # else it was removed meanwhile, since there is a newer one
                    raise
        there = {int(match[1]) for name in self._names if (match := _INSIDE.fullmatch(name))}
        held = self._older.intersection(sorted({*checkpoints, *self._older})[-(self._keep or 0) :])
        for step in there - {*checkpoints, *held} if checkpoints else ():
            self._remove_checkpoint(step)
        done = folder.status() == "done"
        if not (small or done):
            return
        finals = folder.finals
        inside = [path for final in finals if done for path in final.rglob("*") if path.is_file()]
        later = {folder.summary} if done else {folder.summary, folder.ledger}  # a large ledger goes with checkpoints
        for path in [*inside, *(path for path in folder.entries() if path.is_file() and path not in later)]:
            self._copy(path)
        gone = {name for name in self._names if name.startswith(tuple(f"{final.name}/" for final in finals))}
        for name in gone - {str(path.relative_to(folder.root)) for path in inside}:
            self._remove(name)
        if folder.summary.exists():
            self._copy(folder.summary)
        else:
            self._remove(folder.summary.name)

    def _copy_checkpoint(self, step: int, checkpoint: Path) -> None:
        manifest = (checkpoint / MANIFEST).read_bytes()
        if self._manifests.get(step) == manifest:
            return
        self._remove_checkpoint(step)
        for name in written_into(checkpoint):
            self._put(checkpoint / name)
        for log in self._folder.records:
            if log.exists():
                self._copy(log)
        self._put(checkpoint / MANIFEST)
        self._manifests[step] = manifest

    def _remove_checkpoint(self, step: int) -> None:
        inside = f"checkpoints/step-{step:06d}/"
        self._remove(f"{inside}{MANIFEST}")
        self._manifests.pop(step, None)
        for name in [name for name in self._names if name.startswith(inside)]:
            self._remove(name)

    def _copy(self, path: Path) -> None:
        """Copy a file that has changed since it was copied."""
        stat, name = path.stat(), str(path.relative_to(self._folder.root))
        if self._copied.get(name) != (stat.st_size, stat.st_mtime_ns):
            self._put(path)
            self._copied[name] = (stat.st_size, stat.st_mtime_ns)

    def _put(self, path: Path) -> None:
        from fsspec.callbacks import Callback

        def hear(*_: object, **__: object) -> None:
            self._heard_at = time.monotonic()

        name = str(path.relative_to(self._folder.root))
        self._names.add(name)
        self._system.put_file(str(path), self._at(name), callback=Callback(hooks={"hear": hear}))
        hear()

    def _remove(self, name: str) -> None:
        if name in self._names:
            with suppress(FileNotFoundError):
                self._system.rm_file(self._at(name))
            self._names.discard(name)
            self._copied.pop(name, None)

    def _object(self, name: str) -> dict[str, object]:
        """Return a JSON object in the bucket, {} if there is none."""
        with suppress(ValueError):
            if name in self._names and isinstance(content := json.loads(self._read(name)), dict):
                return content
        return {}

    def _read(self, name: str) -> bytes:
        return cast(bytes, self._system.cat_file(self._at(name)))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


def fetch_record(url: str, folder: Path) -> None:
    """Fetch the small files of a run at `url` into `folder`, for its report. Raises UserError if the URL is unreadable."""
    import fsspec

    try:
        system, root = cast("tuple[Any, str]", fsspec.core.url_to_fs(url.rstrip("/")))
        files = [path for path in system.ls(root, detail=False) if system.isfile(path)]
        for path in files:
            system.get_file(path, str(folder / path.rpartition("/")[2]))
    except Exception as error:
        fix = "Check the URL, and the credentials that its package finds."
        raise UserError(f"{url} cannot be read: {_shortly(error)}", where=url, fix=fix, code="bad-url") from error


def _shortly(error: BaseException) -> str:
    return clean(first_line(error))


def _say(line: str) -> None:
    print(clean(line), file=sys.stderr, flush=True)
