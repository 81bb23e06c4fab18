"""Read remote files in place through fsspec. Buckets (s3://, gs://, https://) and the Hugging Face hub (hf://)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec

from packtrain.config.schema import DataSource
from packtrain.data.tokens.pretrained import OFFLINE_ADVICE, offline_unless_reachable
from packtrain.errors import PeerFailed, UserError

_WAITS_S = (1, 5, 25)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL."""

    url: str

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self) -> BinaryIO:
        """Open the file; its bytes are fetched while they are read."""
        return cast(Any, fsspec.open(self.url, "rb")).open()


def list_remote(url: str, where: str) -> list[RemoteFile]:
    """List the file at `url`, or all files of a folder or glob. Sorted by name. UserError if it cannot be reached."""
    try:
        system, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
        if any(sign in path for sign in "*?["):
            found = system.glob(path)
        else:
            found = [path] if system.isfile(path) else system.find(path)
            if not found:
                system.info(path)  # raises an error that says why
        seen = [name for name in sorted(map(str, found)) if "/." not in name.removeprefix(path)]  # none hidden
        return [RemoteFile(str(system.unstrip_protocol(name))) for name in seen]
    except ImportError as error:
        raise UserError(f"{url} cannot be read: {error}", where=where, fix="Install the package it names.") from error
    except Exception as error:  # libraries of buckets may raise anything: no access, no such bucket, no network
        what = f"{url} cannot be read: {type(error).__name__}: {error}"
        raise UserError(what, where=where, fix="Check the URL and your access to it.") from error


def read_patiently(name: str, read: Callable[[int], Iterator[Any]], first: int) -> Iterator[tuple[int, Any]]:
    """Yield a file's chunks from number `first` on, with their numbers. If reading a URL fails, wait and continue there."""
    for wait_s in (*_WAITS_S, None):
        try:
            for chunk in read(first):
                first += 1
                yield first - 1, chunk
            return
        except (UserError, PeerFailed):
            if wait_s is None or "://" not in name:
                raise
            time.sleep(wait_s)


def list_hub(source: DataSource, where: str) -> list[RemoteFile]:
    """List the files of a split of a hub data set. Raises UserError if it is not made of files."""
    import datasets

    with offline_unless_reachable() as online:
        try:
            files = datasets.load_dataset_builder(source.path, source.subset).config.data_files
        except Exception as error:  # the same errors as from load_dataset
            fix = "Check the spelling and the subset, and your access (hf auth login)." if online else OFFLINE_ADVICE
            raise UserError(f"the hub has no such data set: {error}", where=where, fix=fix) from error
    if not files or source.split not in files:
        named = f"its splits are {', '.join(map(str, files))}" if files else "it is not made of files"
        fix = "Name a split, or its files as hf://datasets/OWNER/NAME/PATH."
        raise UserError(f"no files of the split {source.split!r} of {source.path}: {named}", where=where, fix=fix)
    return [RemoteFile(str(file)) for file in files[source.split]]
