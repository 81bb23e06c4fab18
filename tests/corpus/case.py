"""A hostile case: files that nobody would write on purpose, a command on them, and what must hold whatever they are.

Of every case the same is asked: it ends as it should and never with exit code 1, without a traceback, within LIMIT_S; no file
of the user is changed or lost, and none appears beside the run's own; no secret that was planted leaves, neither on the
terminal nor in a file. A case is the command itself, forked from a process that has imported everything (train/forked.py): it may
hang, end without a word, or use up its limits.

A new case is a `Case` in the list of a file test_corpus_*.py. To see one alone: pytest tests/corpus -k 'part of its name'.
Of large families a sample is run; all of them: pytest tests/corpus -m 'exhaustive or not exhaustive'.
"""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.train import forked

LIMIT_S = 10
_HUNG_S = 30  # a process that does not compute is given longer: the machine may be busy
_HASHED = 2**26  # bytes; of larger files the size is compared
_SHOWN = 3000
OWN = ("run", "run/*", "home/*", "*.lock")
"""What a run may write, by default: its folder, and what is under HOME."""

Make = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`packtrain ARGUMENTS` in a folder with `files`, which `expect`s one of these exit codes and `says` each of these texts.

    `files` are by path, as text, bytes, or a function that makes something at the path; paths under home/ are under HOME.
    `env` are variables beside a few (None: without it). `secrets` must be seen nowhere, if in `files` and arguments alone.
    What matches `writes` (globs) may be made or changed. `begin` is called in the process before the command is; it has to be
    a function of a module.
    """

    name: str
    arguments: tuple[str, ...]
    files: Mapping[str, str | bytes | Make] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    expect: tuple[int, ...] = (2,)
    says: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    writes: tuple[str, ...] = OWN
    begin: Callable[[], object] | None = None
    limit_s: int = LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """How a case ended; `code` is negative for a signal, None for one that had to be killed."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    before: Mapping[str, str]
    after: Mapping[str, str]
    leaked: tuple[str, ...]


Begun = Callable[..., BaseProcess]


def sampled(cases: Sequence[Case], one_in: int = 1) -> list[Any]:
    """The cases for parametrize; of generated ones `one_in` so many is always run, the others are marked exhaustive."""
    rest = pytest.mark.exhaustive
    return [pytest.param(one, id=one.name, marks=rest if at % one_in else ()) for at, one in enumerate(cases)]


def each_of(cases: Sequence[Case], one_in: int = 1) -> Callable[[Case, Path], None]:
    """Return the test of a file's cases. One of every `one_in` cases runs without -m exhaustive."""

    @pytest.mark.parametrize("case", sampled(cases, one_in))
    def test_case(case: Case, tmp_path: Path) -> None:
        check(case, tmp_path)
        shutil.rmtree(tmp_path, ignore_errors=True)

    return test_case


def command(name: str, *arguments: str, **more: Any) -> Case:
    return Case(name=name, arguments=arguments, **more)


def check(case: Case, folder: Path) -> None:
    """Carries a case out in an empty folder; fails with everything that does not hold, and how to see it again."""
    outcome = carry_out(case, folder)
    if broken := faults(case, outcome):
        raise AssertionError(explained(case, outcome, broken, folder))


def carry_out(case: Case, folder: Path, begun: Begun = forked.begun) -> Outcome:
    """What became of a case; `begun` begins a process that calls a function with arguments."""
    work, output = placed(case, folder), [folder / "stdout", folder / "stderr"]
    before, began = tree(work), time.monotonic()
    process = begun(_begin, case.arguments, environment_of(case, work), work, output, case.begin, case.limit_s)
    process.join(_HUNG_S)
    code = process.exitcode
    if code is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    written = [one.read_bytes() if one.exists() else b"" for one in output]
    said = [one.decode(errors="replace") for one in written]
    after = tree(work)
    leaked = tuple(_leaks(case.secrets, written, work, before, after))
    return Outcome(code, *said, time.monotonic() - began, before, after, leaked)


def placed(case: Case, folder: Path) -> Path:
    """The folder in which the files of a case are, made in an empty one."""
    work = folder / "work"
    (work / "home").mkdir(parents=True)
    for path, content in case.files.items():
        _make(work / path, content)
    return work


def faults(case: Case, outcome: Outcome) -> list[str]:
    """What does not hold, each in a sentence; none where all does."""
    broken = []
    if outcome.code is None or outcome.code in (-signal.SIGXCPU, -signal.SIGKILL):
        broken.append(f"it did not end within {case.limit_s} s of computing or {_HUNG_S} s at all")
    elif outcome.code not in case.expect:
        broken.append(f"exit code {outcome.code}, not {' or '.join(map(str, case.expect))}")
    printed = outcome.stdout + outcome.stderr
    if "Traceback" in printed:
        broken.append("a traceback")
    broken += [f"it does not say {text!r}" for text in case.says if text not in printed]
    broken += [f"a secret is in {place}" for place in outcome.leaked]
    for path in sorted({*outcome.before, *outcome.after}):
        was, now = outcome.before.get(path), outcome.after.get(path)
        if was != now and not any(fnmatch(path, one) for one in case.writes):
            broken.append(f"{path} was {'made' if was is None else 'lost' if now is None else 'changed'}")
    return broken


def explained(case: Case, outcome: Outcome, broken: list[str], folder: Path) -> str:
    """The failure of a case, with its command and what it printed."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in case.env.items() if value is not None]
    lines = [f"case {case.name!r}:", *(f"  ✗ {one}" for one in broken)]
    lines += [f"in {folder / 'work'} ({outcome.seconds:.1f} s, exit code {outcome.code}):"]
    lines += [f"  $ {' '.join([*variables, 'packtrain', shlex.join(case.arguments)])}"]
    for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        lines += [f"{name}:", *(f"  {line}" for line in text[-_SHOWN:].splitlines())] if text else []
    return "\n".join(lines)


def tree(root: Path) -> dict[str, str]:
    """Everything below a folder by its path, as its kind and content."""
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.fsdecode(os.path.relpath(path, os.fsencode(root)))] = _content(path)
    return found


def _content(path: bytes) -> str:
    at = os.lstat(path)
    if stat.S_ISLNK(at.st_mode):
        return f"link to {os.readlink(path)!r}"
    if stat.S_ISREG(at.st_mode) and at.st_size <= _HASHED and os.access(path, os.R_OK):
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    return f"{stat.filemode(at.st_mode)} {at.st_size if stat.S_ISREG(at.st_mode) else ''}"


def _make(path: Path, content: str | bytes | Make) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


def environment_of(case: Case, work: Path) -> dict[str, str]:
    """Variables that lead nowhere else: of the test's own are only those that Python and torch need."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")}
    home = {"HOME": str(work / "home"), "TMPDIR": str(work / "home"), "XDG_CACHE_HOME": str(work / "home/.cache")}
    steady = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"}
    merged: dict[str, str | None] = {**kept, **home, **steady, **case.env}
    return {name: value for name, value in merged.items() if value is not None}


def _begin(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    cwd: Path,
    outputs: list[Path],
    begin: Callable[[], object] | None,
    limit_s: int,
) -> None:
    """The command itself, in a process and a group of its own."""
    os.setsid()
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + limit_s, int(used) + limit_s + 1))
    gc.freeze()
    os.environ.clear()
    for name, value in environment.items():
        os.environb[os.fsencode(name)] = os.fsencode(value)
    os.chdir(cwd)
    for number, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["packtrain", *arguments]
    if begin:
        begin()
    from packtrain.cli import main

    main()


def _leaks(
    secrets: tuple[str, ...], printed: list[bytes], work: Path, before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    """The places where a secret is seen: what was printed, and what was written since."""
    places = dict(zip(("stdout", "stderr"), printed, strict=True))
    for path, content in after.items():
        if before.get(path) != content and (work / path).is_file() and not (work / path).is_symlink():
            places[path] = (work / path).read_bytes()
    return [place for place, text in places.items() if any(one.encode() in text for one in secrets)]
