"""What of a run lies on each machine's own disk, in a few letters: packtrain's code, the model's files, the data.

Large files are read in samples, so that a terabyte takes no longer than a gigabyte: two files of one size that differ only
between the samples look the same. The run itself compares the whole once its data is tokenised.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from packtrain.config.schema import DataSource, RunConfig
from packtrain.diagnose.checks.check import size

NOT_HERE = "no file or folder here"
_BLOCK = 2**20
_SAMPLES = 16  # blocks of a file; one of no more than these is read whole
_MOST_FILES = 512


def code_fingerprint() -> str:
    """Of every Python file of packtrain, wherever it is installed."""
    return files_fingerprint(Path(__file__).parents[1], "**/*.py")


def fingerprint_of(path: str) -> str:
    """Size and digest of a file, of the files of a folder or of a glob; NOT_HERE where there is none."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return files_fingerprint(place, "**/*")
        names = [str(place)] if place.is_file() else sorted(glob.glob(str(place), recursive=True))
        return _of_files([(os.path.basename(name), Path(name)) for name in names if os.path.isfile(name)])
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def data_fingerprints(config: RunConfig, of: Callable[[str], str] = fingerprint_of) -> dict[str, str]:
    """What each path of model and data is on this machine, by config key and path; a hub id is no file anywhere."""
    return {f"{key} {path}": of(path) for key, path in _paths(config)}


def files_fingerprint(folder: Path, pattern: str) -> str:
    """Of the files below a folder, by their names in it."""
    found = [(str(file.relative_to(folder)), file) for file in folder.glob(pattern) if file.is_file()]
    return _of_files(sorted(found))


def _of_files(files: list[tuple[str, Path]]) -> str:
    if not files:
        return NOT_HERE
    digest, total = hashlib.blake2b(digest_size=6), 0
    for number, (name, file) in enumerate(files):
        length = file.stat().st_size
        total += length
        digest.update(f"{name if len(files) > 1 else ''} {length}\n".encode())
        for block in _sampled(file, length) if number < _MOST_FILES else ():
            digest.update(block)
    amount = f"{total} bytes" if total < _BLOCK else size(total)
    return f"{f'{len(files)} files, ' if len(files) > 1 else ''}{amount}, {digest.hexdigest()}"


def _sampled(file: Path, length: int) -> Iterator[bytes]:
    step = max(_BLOCK, length // _SAMPLES)
    with file.open("rb") as opened:
        for at in range(0, length, step):
            opened.seek(at)
            yield opened.read(_BLOCK)


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.model.path:
        yield "model.path", config.model.path
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for one in sources if isinstance(sources, list) else [sources]:
            path = one.path if isinstance(one, DataSource) else one
            if isinstance(path, str) and path and path != "quickstart":
                yield key, path
