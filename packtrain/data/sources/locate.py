"""Finds the sources of data.train and data.eval (files, folders, hub, quickstart) and reads them as streams of chunks.

Each source has an `identity`, a hash of its content: its cached tokens are still found after a file was moved or touched,
and never reused after a byte of it changed.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from packtrain.config.objective import ObjectiveKind
from packtrain.config.rules.paths_and_packages import DATA_SUFFIXES, is_local, nearest
from packtrain.config.schema import DataSource, Split, SplitText
from packtrain.data.sources import quickstart
from packtrain.data.sources.chunks import CHUNK_ROWS, Chunk, ParsedChunk, TableChunk
from packtrain.data.sources.files import READABLE, kind_of, read_file, read_texts, suffix_of
from packtrain.data.sources.offline import OFFLINE_ADVICE, offline_unless_reachable
from packtrain.errors import UserError
from packtrain.monitor.retries import patiently

if TYPE_CHECKING:
    import datasets

_is_about_data = re.compile(
    r"(readme|licen[sc]e|notice)\b.*|dataset_(info|infos|dict)\.json|cache-.*\.arrow", re.I
).fullmatch
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The words of file names for splits, as in `datasets`."""
HashFile = Callable[[Path], str]
_READABLE = f"{READABLE}, and folders of these or of datasets.save_to_disk."


@dataclass(frozen=True, slots=True)
class Files:
    """Files of SUFFIXES, read in the order given; `split_text` is for those of running text, `size` in bytes.

    They are a split of a folder that holds `all_files`, where that is not 0.
    """

    name: str
    paths: tuple[Path, ...]
    split_text: SplitText = "document"
    all_files: int = 0

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def identity(self, hash_file: HashFile) -> str:
        """Hash of the files' bytes and kinds, and of what is a document of running text."""
        kinds = {path: f"{suffix_of(path)}{f' {self.split_text}' * _is_text(path)}" for path in self.paths}
        return _digest("files", *(f"{kind} {hash_file(path)}" for path, kind in kinds.items()))

    def chunks(self) -> Iterator[Chunk]:
        """All rows; raises UserError for a file that cannot be read at all."""
        for path in self.paths:
            yield from read_file(path, self.split_text)

    def remark(self) -> str:
        """What was decided about them, and what was taken for a row of running text; "" for nothing."""
        remarks = (
            [f"{self.name}: {len(self.paths)} of {self.all_files} files, by their names"] if self.all_files else []
        )
        if any(map(_is_text, self.paths)):
            text = f"each {self.split_text} is a row"
            if self.split_text == "document":
                lines = sum(1 for path in self.paths if _is_text(path) for _ in read_texts(path, "line"))
                text = f"each .txt file is a row (data.split_text=line would make {lines:,})"
            remarks.append(f"{self.name}: {text}")
        return "; ".join(remarks)


@dataclass(frozen=True, slots=True)
class Table:
    """A data set of the `datasets` library: from the hub, or a folder that save_to_disk wrote; `size` in rows."""

    name: str
    dataset: datasets.Dataset

    @property
    def size(self) -> int:
        return self.dataset.num_rows

    def identity(self, hash_file: HashFile) -> str:
        """The fingerprint by `datasets`, which covers the origin and all transformations."""
        return _digest("table", self.dataset._fingerprint, str(self.dataset.num_rows))

    def chunks(self) -> Iterator[Chunk]:
        """All rows."""
        first = 1
        tables = cast(Iterator[pa.Table], self.dataset.with_format("arrow").iter(batch_size=CHUNK_ROWS))
        for table in tables:
            for batch in table.combine_chunks().to_batches():
                yield TableChunk(self.name, first, batch, batch.num_rows)
                first += batch.num_rows


_QUICKSTART: dict[ObjectiveKind, Callable[..., list[dict[str, Any]]]] = {
    "sft": quickstart.conversations,
    "dpo": quickstart.preferences,
    "kto": quickstart.labelled,
    "reward": quickstart.relevance,
}


@dataclass(frozen=True, slots=True)
class Quickstart:
    """packtrain's built-in data of an objective; `size` is unknown before they are generated."""

    name: str
    split: Split
    seed: int
    objective: ObjectiveKind = "sft"
    size: int = 0

    def identity(self, hash_file: HashFile) -> str:
        """Hash of the code that generates them."""
        return _digest(
            "quickstart", hash_file(Path(str(quickstart.__file__))), self.objective, self.split, str(self.seed)
        )

    def chunks(self) -> Iterator[Chunk]:
        """All rows."""
        rows = _QUICKSTART[self.objective](self.split, self.seed, None)
        for start in range(0, len(rows), CHUNK_ROWS):
            part = rows[start : start + CHUNK_ROWS]
            yield ParsedChunk(self.name, list(range(start + 1, start + 1 + len(part))), [*part], len(part))


Source = Files | Table | Quickstart


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def locate(
    source: DataSource,
    role: Split,
    seed: int,
    objective: ObjectiveKind = "sft",
    split_text: SplitText = "document",
) -> Source:
    """Find what `source.path` names: quickstart (for the objective), a file, a glob, a folder, else a hub data set.

    Raises UserError for a path that does not exist, holds nothing to read, or cannot be loaded from the hub.
    """
    path, where = source.path, f"data.{role}"
    if path == "quickstart":
        if (
            source.split not in ("train", "eval")
            or source.subset is not None
            or (role, source.split) == ("eval", "train")
        ):
            what = f"quickstart has no {f'subset {source.subset!r}' if source.subset else f'split {source.split!r}'} for {where}"
            raise UserError(
                what, where=where, fix="Take split train or eval to train on, eval to evaluate on; no subset."
            )
        return Quickstart(path, source.split, seed, objective)
    local = Path(path).expanduser()
    if (local / "state.json").exists():
        return Table(str(local), _load_saved(local, source))
    if (local / "dataset_dict.json").exists():
        return Table(f"{local} [{source.split}]", _load_saved(local, source))
    if not (local.exists() or any(sign in path for sign in "*?[")):
        if not looks_local(path):
            return Table(f"{path} [{source.split}]", _load_from_hub(source, role))
        fix = _READABLE if local.suffix and suffix_of(local) is None else f"{nearest(path)} A hub id is owner/name."
        raise UserError(f"no such file: {path}", where=where, fix=fix)
    files = _list_files(local)
    if not files:
        fix = f"{_READABLE} Rename a file that is one of these."
        raise UserError(f"{path!r}: there is nothing to read in it", where=where, fix=fix)
    splits = _group_by_split(local, files) if local.is_dir() else {}
    if (source.split != "train" and len(splits) < 2) or source.subset is not None:
        what = f"there is no {'split' if source.subset is None else 'subset'} to choose in plain files"
        raise UserError(what, where=str(local), fix="Name the file, or a glob of files, that holds it.")
    if len(splits) < 2:
        return Files(str(local), tuple(files), split_text)
    if (wanted := _SPLITS.get(source.split, source.split)) not in splits:
        fix = f"Give split, one of {', '.join(splits)}; or name files."
        raise UserError(f"no file is of the split {source.split!r}", where=str(local), fix=fix)
    return Files(f"{local} [{wanted}]", tuple(splits[wanted]), split_text, len(files))


def _is_text(path: Path) -> bool:
    return kind_of(path) == ".txt"


def _list_files(local: Path) -> list[Path]:
    """The file itself, or the files of a folder or a glob that are data: neither hidden nor about the data, as readmes."""
    if local.is_file():
        return [local] if suffix_of(local) else []
    pattern = f"{glob.escape(str(local))}/**" if local.is_dir() else str(local)
    files = sorted(map(Path, glob.glob(pattern, recursive=True)))
    return [file for file in files if suffix_of(file) and file.is_file() and not _is_about_data(file.name)]


def _group_by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The files of each split that their names (or folders') contain, as `datasets` reads them: "train-0001.parquet"."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        words = re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())
        for split in [_SPLITS[word] for word in words if word in _SPLITS][-1:]:
            splits.setdefault(split, []).append(path)
    return splits


def looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as a file or a folder, and not as a hub id (owner/name)."""
    first, slash, _ = path.partition("/")
    return is_local(path, DATA_SUFFIXES) or (Path(first).is_dir() if slash else "." in first)


def _load_saved(folder: Path, source: DataSource) -> datasets.Dataset:
    import datasets

    try:
        loaded = patiently("storage", str(folder), lambda: datasets.load_from_disk(str(folder)))
    except Exception as error:  # whatever a damaged folder makes `datasets` raise
        raise UserError(f"cannot read the saved data set: {error}", where=str(folder), fix="Save it again.") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if source.split not in loaded:
        fix = f"Give split, one of {', '.join(map(str, loaded))}."
        raise UserError(f"no split {source.split!r}", where=str(folder), fix=fix)
    return loaded[source.split]


def _load_from_hub(source: DataSource, role: Split) -> datasets.Dataset:
    import datasets

    with offline_unless_reachable() as online:
        try:
            given = source.path, source.subset
            loaded = patiently("hub", source.path, lambda: datasets.load_dataset(*given, split=source.split))
        except Exception as error:  # network, access, name, split, subset: the library's message has it
            what = f"cannot load {source.path!r}: there is no such file here, so it was taken for a hub id; {error}"
            fix = "Check the spelling, split and subset, and your access (hf auth login)." if online else OFFLINE_ADVICE
            raise UserError(what, where=f"data.{role}", fix=fix) from error
    assert isinstance(loaded, datasets.Dataset), "load_dataset with a split gives one data set"
    return loaded
