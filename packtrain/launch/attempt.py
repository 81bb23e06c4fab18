"""A launch in its run folder: the lock, the user's files, and its own files.

Only one run at a time writes in a run folder: two would resume from each other's checkpoints, and both report success. The lock is on a
file in logs/, which always belongs to the active run. The system releases it when the process ends for any reason. Machines that
share the disk see the lock if the file system has locks (NFS, Lustre and local ones do).
"""

from __future__ import annotations

import fcntl
import glob
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from packtrain.config.compose import to_yaml
from packtrain.config.schema import RunConfig, sources
from packtrain.errors import UserError
from packtrain.monitor.channel import PUBLISHED
from packtrain.plan.known_model import base_of
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.plan.origin import check_config
from packtrain.run_folder import RunFolder, environment, object_of, write_json
from packtrain.system import write_text
from packtrain.wording import Redactor, clean

LOCK = "lock"
_LOCK_WAIT_S = 1  # a process that only checks the lock holds it for a moment


def _in_use_error(folder: Path) -> UserError:
    what, shown = "a run", str(folder)
    host = str(object_of(folder / "logs" / PUBLISHED).get("host", ""))
    if host and host != socket.gethostname():
        what, shown = "a run of another machine", f"{folder} ({host})"
    fix = "Wait for its end, or name another folder."
    return UserError(f"{what} is going on in {shown}", where="trainer.output_dir", fix=fix, code="run-folder-in-use")


def check_free(folder: Path) -> None:
    """Raise UserError if a run is going on in `folder`."""
    # an unmarked folder may hold a user's file of that name, which a lock would empty
    if not os.path.exists(RunFolder(folder).mark):
        return
    # all machines of a run check when they start: a shared lock lets them all in
    with suppress(FileNotFoundError, PermissionError), open(folder / "logs" / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use_error(folder) from error
        except OSError:  # a file system without locks
            pass


def is_locked(folder: Path) -> bool:
    """Return whether a run is going on in `folder`."""
    try:
        check_free(folder)
    except UserError:
        return True
    return False


class RunLock(ExitStack):
    """The lock of a run, held by machine 0 until the end. Each launch takes it anew: logs/ may have been replaced."""

    held = False

    def take(self, folder: Path) -> None:
        """Lock `folder`, whose logs/ exists. Raises UserError if another run has locked it."""
        self.close()
        try:
            self.enter_context(FileLock(folder / "logs" / LOCK, mode=0o666).acquire(timeout=_LOCK_WAIT_S))
        except Timeout as error:
            raise _in_use_error(folder) from error
        except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
            pass
        self.held = True


def inputs(config: RunConfig, given: str | None) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of everything that a run reads and so must not overwrite (run_folder.py).

    Globs are expanded. Hub ids and names of built-in things are included. `given` is the config's own path.
    """
    model, data, reference = config.model, config.data, config.objective.reference
    named = {"model.path": model.path, "model.tokenizer": model.tokenizer, "objective.reference": reference}
    bases = {f"the base of {key}": base_of(path) for key, path in named.items()}
    files = {"data.chat_template": data.chat_template, "data.leave_out": data.leave_out}
    for key, path in {"the config": given, **named, **bases, **files}.items():
        if path:
            yield key, path
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        for source in sources(value):
            paths = glob.glob(os.path.expanduser(source.path), recursive=True)
            yield from ((key, path) for path in paths or [source.path])


def check_attempt(config: RunConfig, given: str | None, folder: RunFolder, resume: str) -> None:
    """Raise UserError if the folder has foreign files, or checkpoints that this config cannot continue."""
    check_config(asdict(config), folder, resume)
    folder.check_ours(inputs(config, given))


def open_attempt(
    config: RunConfig, given: str | None, folder: RunFolder, lock: RunLock, plan: LaunchPlan, resume: str
) -> None:
    """Write config, plan and environment. Raises UserError if it cannot.

    An earlier run's files stay untouched. The folder is locked again, until `lock` is closed.
    """
    if not lock.held:
        check_free(folder.root)
    check_attempt(config, given, folder, resume)
    with writing():
        folder.open_attempt(resume)
        lock.take(folder.root)
        lines = [clean(line) for line in config.topology.setup]  # only topology.setup may hold secrets
        shown = replace(config, topology=replace(config.topology, setup=lines))
        write_text(folder.attempt.config, to_yaml(shown))
        write_json(folder.attempt.plan, Redactor(os.environ).plain(plan.to_json()))
        write_json(folder.attempt.environment, environment())
        if not plan.in_process:
            write_text(folder.attempt.accelerate, yaml.safe_dump(dict(plan.accelerate)))
        if plan.engine_settings is not None:
            write_json(folder.attempt.engine, plan.engine_settings)


@contextmanager
def writing() -> Iterator[None]:
    """Turn an OSError inside the block into a UserError about the run folder."""
    try:
        yield
    except OSError as error:
        what = f"the run folder cannot be written: {error.strerror}"
        where = f"trainer.output_dir ({error.filename})" if error.filename else "trainer.output_dir"
        raise UserError(what, where=where, fix="Name another folder.", code="run-folder-not-writable") from error
