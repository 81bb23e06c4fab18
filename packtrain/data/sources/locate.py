"""What data.train and data.eval name: files, folders, the hub, or the quickstart, all as streams of chunks.

A source also has an `identity`: a hash of its content, so that tokenised data is found again when a file was moved
or touched, and never reused when a byte of it changed.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import pyarrow as pa

from packtrain.config.schema import DataSource
from packtrain.data.formats.columns import Objective
from packtrain.data.sources import quickstart
from packtrain.data.sources.chunks import CHUNK_ROWS, Chunk, ParsedChunk, RawRow, TableChunk
from packtrain.data.sources.files import SUFFIXES, read_file, suffix_of
from packtrain.data.sources.hub import OFFLINE_ADVICE, offline_unless_reachable
from packtrain.errors import UserError

if TYPE_CHECKING:
    import datasets

Role = Literal["train", "eval"]
HashFile = Callable[[Path], str]
FILES = {".txt", ".md", ".tsv", ".xls", ".xlsx", ".pdf", ".docx", ".html", ".xml", ".yaml", ".yml", ".log", ".arrow"}
FILES |= {".feather", ".orc", ".avro", ".pkl", ".npy", ".npz", ".bin", ".db", ".sqlite", ".jsonlines", ".zip", ".tar"}
FILES |= {".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z"}
"""Endings of files that people have data in, and that no hub id ends in."""
READABLE = f"Readable are {', '.join(SUFFIXES)}, and folders of these or of datasets.save_to_disk."


@dataclass(frozen=True, slots=True)
class Files:
    """Files of SUFFIXES, read in the order given; `size` in bytes."""

    name: str
    paths: tuple[Path, ...]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def identity(self, hash_file: HashFile) -> str:
        """Hash of the files' bytes and kinds."""
        return _digest("files", *(f"{suffix_of(path)} {hash_file(path)}" for path in self.paths))

    def chunks(self) -> Iterator[Chunk]:
        """All rows; raises UserError for a file that cannot be read at all."""
        for path in self.paths:
            yield from read_file(path)


@dataclass(frozen=True, slots=True)
class Table:
    """A data set of the `datasets` library: from the hub, or a folder that save_to_disk wrote; `size` in rows."""

    name: str
    dataset: datasets.Dataset

    @property
    def size(self) -> int:
        return self.dataset.num_rows

    def identity(self, hash_file: HashFile) -> str:
        """Hash of its Arrow files and of the order of its rows, or its fingerprint where it has no files."""
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        indices = self.dataset._indices  # the order of a data set that was shuffled or filtered and saved unflattened
        parts = [hash_file(path) for path in files] if files else [self.dataset._fingerprint]
        order = hashlib.blake2b(indices.column(0).to_numpy().tobytes() if indices else b"").hexdigest()
        return _digest("table", *parts, order, str(self.dataset.num_rows))

    def chunks(self) -> Iterator[Chunk]:
        """All rows."""
        first = 1
        tables = cast(Iterator[pa.Table], self.dataset.with_format("arrow").iter(batch_size=CHUNK_ROWS))
        for table in tables:
            for batch in table.combine_chunks().to_batches():
                yield TableChunk(self.name, first, batch, batch.num_rows)
                first += batch.num_rows


@dataclass(frozen=True, slots=True)
class Quickstart:
    """packtrain's built-in conversations, or preference pairs; `size` is not known before they are made."""

    name: str
    split: quickstart.Split
    seed: int
    objective: Objective = "sft"
    size: int = 0

    def identity(self, hash_file: HashFile) -> str:
        """Hash of the program that makes them."""
        return _digest(
            "quickstart", hash_file(Path(str(quickstart.__file__))), self.objective, self.split, str(self.seed)
        )

    def chunks(self) -> Iterator[Chunk]:
        """All rows."""
        make = quickstart.conversations if self.objective == "sft" else quickstart.preferences
        rows: list[RawRow] = list(make(self.split, self.seed, None))
        for start in range(0, len(rows), CHUNK_ROWS):
            part = rows[start : start + CHUNK_ROWS]
            yield ParsedChunk(self.name, list(range(start + 1, start + 1 + len(part))), part, len(part))


Source = Files | Table | Quickstart


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def sources_in(value: str | DataSource | list[str | DataSource], role: Role) -> list[DataSource]:
    """A value of data.train or data.eval as a list of sources; `quickstart` alone stands for its split of that name."""
    splits = {"quickstart": role}
    values = value if isinstance(value, list) else [value]
    return [DataSource(path=one, split=splits.get(one, "train")) if isinstance(one, str) else one for one in values]


def locate(source: DataSource, role: Role, seed: int, objective: Objective = "sft") -> Source:
    """Find what `source.path` names: quickstart (for the objective), a file, a glob, a folder, else a hub data set.

    Raises UserError for a path that does not exist, holds nothing to read, or cannot be loaded from the hub.
    """
    path = source.path
    if not path:
        raise UserError("a source has no path", where=f"data.{role}", fix="Give a file, a folder or a hub id.")
    if path == "quickstart":
        return _quickstart(source, role, seed, objective)
    local, where = Path(path).expanduser(), f"data.{role}"
    if (local / "state.json").exists():
        return Table(str(local), _saved(local, source))
    if (local / "dataset_dict.json").exists():
        return Table(f"{local} [{source.split}]", _saved(local, source))
    if local.is_dir():  # without hidden files: copies that editors, notebooks and macOS keep
        found = [
            one for one in sorted(local.rglob("*")) if not any(part[0] == "." for part in one.relative_to(local).parts)
        ]
    elif local.exists():
        found = [local]
    elif any(sign in path for sign in "*?["):
        found = [Path(name) for name in sorted(glob.glob(str(local), recursive=True))]
    elif looks_local(path):
        fix = READABLE if local.suffix and suffix_of(local) is None else _nearest(local)
        raise UserError(f"no such file: {path}", where=where, fix=fix)
    else:
        return Table(f"{path} [{source.split}]", _from_hub(source, role))
    files = tuple(one for one in found if suffix_of(one) and one.is_file())
    if not files:
        raise UserError(f"there is nothing to read in {path!r}", where=where, fix=READABLE)
    if source.split != "train" or source.subset is not None:
        what = f"there is no {'split' if source.subset is None else 'subset'} to choose in plain files"
        raise UserError(what, where=str(local), fix="Name the file, or a glob of files, that holds it.")
    return Files(str(local), files)


def looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as a file or a folder, and not as a hub id (owner/name)."""
    first, *rest = path.split("/")
    return (
        path.startswith((".", "/", "~"))
        or len(rest) > 1
        or suffix_of(Path(path)) is not None
        or Path(path).suffix.lower() in FILES
        or ("." in first if not rest else Path(first).is_dir())
    )


def _quickstart(source: DataSource, role: Role, seed: int, objective: Objective) -> Quickstart:
    if source.subset is not None:
        raise UserError("quickstart has no subsets", where=f"data.{role}", fix="Leave subset away.")
    if role == "eval" and source.split == "train":
        what = "quickstart's split train is for training: evaluating on it would measure what was learnt by heart"
        raise UserError(what, where="data.eval", fix="Set split: eval, or data.eval=quickstart.")
    if source.split not in ("train", "eval"):
        raise UserError(f"quickstart has no split {source.split!r}", where=f"data.{role}", fix="Take train or eval.")
    return Quickstart(source.path, source.split, seed, objective)


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either; relative paths start at {Path.cwd()}."
    names = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=3, cutoff=0.5)
    hint = f"Near it: {', '.join(names)}." if names else f"The folder {path.parent.resolve()} has nothing like it."
    return f"{hint} A hub id has the form owner/name."


def _saved(folder: Path, source: DataSource) -> datasets.Dataset:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes `datasets` raise
        raise UserError(f"cannot read the saved data set: {error}", where=str(folder), fix="Save it again.") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if source.split not in loaded:
        fix = f"Give split, one of {', '.join(map(str, loaded))}."
        raise UserError(f"no split {source.split!r}", where=str(folder), fix=fix)
    return loaded[source.split]


def _from_hub(source: DataSource, role: Role) -> datasets.Dataset:
    import datasets

    with offline_unless_reachable() as online:
        try:
            loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
        except Exception as error:  # network, access, name, split, subset: the library's message has it
            what = f"cannot load {source.path!r}: there is no such file here, so it was taken for a hub id; {error}"
            fix = "Check the spelling, split and subset, and your access (hf auth login)." if online else OFFLINE_ADVICE
            raise UserError(what, where=f"data.{role}", fix=fix) from error
    assert isinstance(loaded, datasets.Dataset), "load_dataset with a split gives one data set"
    return loaded
