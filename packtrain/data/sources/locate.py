"""Find the sources of data.train and data.eval, and read them as streams of chunks.

A source may be an entry of LLaMA-Factory's `dataset_info.json`. An entry names a file, a folder or a hub data set; its `columns`, `tags`,
`formatting` and `ranking` describe the rows. `Translation` renames the columns during parsing, so that all later code sees Alpaca's or
ShareGPT's columns. LLaMA-Factory's `columns` and `tags` replace all defaults, and ours do too: a column that an entry does not name is not
read, and reported. A prompt without an answer is running text.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.config import is_list
from packtrain.config.keys import suggest
from packtrain.config.rules.paths_and_packages import DATA_SUFFIXES, is_local, nearest, read_info
from packtrain.config.schema import BUILT_IN, LISTED, DataSource, Split, SplitText
from packtrain.data.sources import quickstart, quickstart_pictures
from packtrain.data.sources.chunks import (
    CHUNK_ROWS,
    UNLISTED,
    BadRow,
    Chunk,
    Json,
    RawRow,
    cut_into_chunks,
    is_object,
)
from packtrain.data.sources.files import (
    READABLE,
    SUFFIXES,
    RemoteFile,
    kind_of,
    list_hub,
    list_remote,
    read_file,
    suffix_of,
)
from packtrain.data.tokens.pretrained import OFFLINE_ADVICE, offline_unless_reachable
from packtrain.errors import UserError
from packtrain.objectives.spec import OBJECTIVES, Examples

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
"""Words for splits in file names, as in `datasets`."""
_READABLE = f"{READABLE}, and folders of these or of datasets.save_to_disk."
_QUICKSTART: dict[Examples, Callable[..., list[Json]]] = {
    "documents": quickstart.conversations,
    "pairs": quickstart.preferences,
    "answers": quickstart.labelled,
}


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of `files`: pairs of a name and a reader of chunks from any number. A source without files has one pair.

    `size` sums the chunks' sizes (0 if unknown). `remark` is a decision about the source. `key` and the bytes of `paths` determine the
    rows: their tokens are found again after a file was moved or touched, and never reused after one byte
    changed. `samples` counts its documents in an epoch, if dataset_info.json sets it.
    """

    name: str
    key: str
    paths: tuple[Path | RemoteFile, ...]
    size: int
    files: Sequence[tuple[str, Callable[[int], Iterator[Chunk]]]]
    remark: str = ""
    samples: int | None = None

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows in order. Raises UserError for an unreadable file."""
        return chain.from_iterable(read(0) for _, read in self.files)

    def identity(self, hash_file: Callable[[Path], str]) -> str:
        """Return a hash of everything that determines the rows."""
        files = [path for path in self.paths if isinstance(path, Path)]
        parts = (self.key, *(f"{suffix_of(path)} {hash_file(path)}" for path in files))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def locate(
    source: DataSource,
    role: Split,
    seed: int,
    objective: str,
    split_text: SplitText,
    *,
    streaming: bool = False,
) -> Source:
    """Find the source at `source.path`: built-in, file, glob, folder, or else a hub data set.

    `objective` chooses the built-in rows. `streaming` reads files of a bucket or of the hub in place.
    Raises UserError for a path that does not exist, holds nothing to read, or cannot be loaded from the hub.
    """
    path, where = source.path, f"data.{role}"
    if path.startswith(LISTED):
        source, translate, samples = look_up(source, where)
        split_text = "line" if split_text == "document" else split_text  # LLaMA-Factory reads .txt files by line
        plain = locate(source, role, seed, objective, split_text, streaming=streaming)
        return replace(_changed(plain, translate=translate), samples=samples)
    if source.columns:
        bare = replace(source, columns={})
        plain = locate(bare, role, seed, objective, split_text, streaming=streaming)
        return _changed(plain, columns=source.columns)
    if "://" in path:
        if not streaming:
            fix = "Set data.streaming=true, or copy the files to this machine."
            raise UserError(f"{path} is read where it is only as a stream", where=where, fix=fix, code="only-as-stream")
        return _choose(path, list_remote(path, where), source, split_text, where)
    if path in BUILT_IN:
        if source.split not in ("train", "eval") or source.subset or (role, source.split) == ("eval", "train"):
            named = f"subset {source.subset!r}" if source.subset else f"split {source.split!r}"
            fix = "Take split train or eval to train on, eval to evaluate on; no subset."
            raise UserError(f"{path} has no {named} for {where}", where=where, fix=fix, code="no-such-split")
        return _generate(path, source.split, seed, objective)
    local = Path(path).expanduser()
    if (local / "state.json").exists() or (local / "dataset_dict.json").exists():
        return _load_saved(local, source)
    if not (local.exists() or any(sign in path for sign in "*?[")):
        forgotten = next((f"{path}{suffix}" for suffix in SUFFIXES if os.path.exists(f"{local}{suffix}")), "")
        if not (looks_local(path) or forgotten):
            if streaming:
                return _choose(f"{path} [{source.split}]", list_hub(source, where), DataSource(), split_text, where)
            return load_from_hub(source, where)
        hint = f"Did you mean {forgotten}?" if forgotten else nearest(path)
        fix = _READABLE if local.suffix and suffix_of(local) is None else f"{hint} A hub id is owner/name."
        raise UserError(f"no such file: {path}", where=where, fix=fix, code="no-such-path")
    return _choose(str(local), _list_files(local), source, split_text, where)


def _changed(plain: Source, **fields: object) -> Source:
    """Return the source with these fields set in its chunks."""

    def changed(read: Callable[[int], Iterator[Chunk]], first: int) -> Iterator[Chunk]:
        return (replace(chunk, **fields) for chunk in read(first))

    files = [(name, partial(changed, read)) for name, read in plain.files]
    return replace(plain, key=" ".join([plain.key, *map(str, fields.values())]), files=files)


def _choose(
    name: str, found: Sequence[Path | RemoteFile], source: DataSource, split_text: SplitText, where: str
) -> Source:
    """Choose the data files. In a folder with several splits by name, choose the source's split."""
    files = [file for file in found if suffix_of(file) and not _is_about_data(file.name)]
    if not files:
        fix = f"{_READABLE} If a file is one of these under another suffix, rename it."
        raise UserError(f"{name!r}: there is nothing to read in it", where=where, fix=fix, code="nothing-to-read")
    splits = _group_by_split(name, files) if Path(name).is_dir() or not re.search(r"[*?[]", name) else {}
    if (source.split != "train" and len(splits) < 2) or source.subset is not None:
        what = f"plain files have no {'splits' if source.subset is None else 'subsets'} to choose from"
        raise UserError(what, where=name, fix="Name the file, or a glob of files, that holds it.", code="no-splits")
    if len(splits) < 2:
        return _from_files(name, files, split_text)
    if (wanted := _SPLITS.get(source.split, source.split)) not in splits:
        fix = f"Give split, one of {', '.join(splits)}; or name files."
        raise UserError(f"no file is of the split {source.split!r}", where=name, fix=fix, code="no-such-split")
    chosen = splits[wanted]
    remark = f"{len(chosen)} of {len(files)} files, by their names"
    return _from_files(f"{name} [{wanted}]", chosen, split_text, remark)


def _generate(name: str, split: Split, seed: int, objective: str) -> Source:
    examples = OBJECTIVES[objective].examples
    make = _QUICKSTART[examples] if name == "quickstart" else quickstart_pictures.conversations
    if make == quickstart_pictures.conversations and examples != "documents":
        fix = "Train on it with packtrain sft, or take quickstart."
        raise UserError(f"{name} has no {examples}", where="data.train", fix=fix, code="only-conversations")

    def read(first: int) -> Iterator[Chunk]:
        rows = enumerate(make(split, seed, None), 1)
        return islice(cut_into_chunks(name, ((at, row, 1) for at, row in rows)), first, None)

    code = (Path(str(quickstart.__file__)), Path(str(quickstart_pictures.__file__)))
    return Source(name, f"{name} {objective} {split} {seed}", code[: 1 + (name != "quickstart")], 0, [(name, read)])


def _from_files(name: str, files: Sequence[Path | RemoteFile], split_text: SplitText, remark: str = "") -> Source:
    remarks, key = [remark], "files"
    if any(kind_of(path) == ".txt" for path in files):
        remarks.append(f"each {'.txt file' if split_text == 'document' else split_text} is a row (data.split_text)")
        key += f" {split_text}"
    size = sum(path.stat().st_size for path in files if isinstance(path, Path))
    said = "; ".join(f"{name}: {remark}" for remark in remarks if remark)
    readers = [(str(file), partial(read_file, file, split_text)) for file in files]
    return Source(name, key, tuple(files), size, readers, said)


def _from_dataset(name: str, dataset: datasets.Dataset) -> Source:
    """Make a source from a data set of the `datasets` library. Its fingerprint covers the origin and all transformations."""

    def chunks(start: int) -> Iterator[Chunk]:
        return islice(cut(), start, None)

    def cut() -> Iterator[Chunk]:
        first = 1
        for table in dataset.with_format("arrow").iter(batch_size=CHUNK_ROWS):
            for batch in table.combine_chunks().to_batches():
                numbers = range(first, first + batch.num_rows)
                yield Chunk(name, numbers, batch, len(numbers), by_line=False)
                first = numbers.stop

    key = f"table {dataset._fingerprint} {dataset.num_rows}"  # pyright: ignore[reportPrivateUsage]
    return Source(name, key, (), dataset.num_rows, [(name, chunks)])


def _list_files(local: Path) -> list[Path]:
    """Return the file itself, or all files of a folder or glob. Skips hidden files."""
    if local.is_file():
        return [local]
    pattern = f"{glob.escape(str(local))}/**" if local.is_dir() else str(local)
    return [file for file in sorted(map(Path, glob.glob(pattern, recursive=True))) if file.is_file()]


def _group_by_split(folder: str, files: Sequence[Path | RemoteFile]) -> dict[str, list[Path | RemoteFile]]:
    """Group files by the split in their names or folders, as `datasets` does: "train-0001.parquet"."""
    splits: dict[str, list[Path | RemoteFile]] = {}
    for path in files:
        words = re.split(r"[^a-z]+", str(path).removeprefix(folder).lower())
        for split in [_SPLITS[word] for word in words if word in _SPLITS][-1:]:
            splits.setdefault(split, []).append(path)
    return splits


def looks_local(path: str) -> bool:
    """Return whether a missing path means a file or folder. Otherwise it is a hub id (owner/name)."""
    first, slash, _ = path.partition("/")
    return is_local(path, DATA_SUFFIXES) or (Path(first).is_dir() if slash else "." in first)


def _load_saved(folder: Path, source: DataSource) -> Source:
    """Load a folder of datasets.save_to_disk."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder can make `datasets` raise anything
        what = f"cannot read the saved data set: {error}"
        raise UserError(what, where=str(folder), fix="Save it again.", code="broken-saved-data") from error
    if isinstance(loaded, datasets.Dataset):
        return _from_dataset(str(folder), loaded)
    if source.split not in loaded:
        fix = f"Give split, one of {', '.join(map(str, loaded))}."
        raise UserError(f"no split {source.split!r}", where=str(folder), fix=fix, code="no-such-split")
    return _from_dataset(f"{folder} [{source.split}]", loaded[source.split])


def load_from_hub(source: DataSource, where: str) -> Source:
    """Load a data set of the Hugging Face hub. Raises UserError, at the config key `where`."""
    import datasets

    with offline_unless_reachable() as online:
        try:
            loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
        except Exception as error:  # network, access, name, split, subset: see the library's message
            what = f"no file or folder {source.path} is here, and the hub has no such data set: {error}"
            fix = "Check the spelling, split and subset, and your access (hf auth login)." if online else OFFLINE_ADVICE
            raise UserError(what, where=where, fix=fix, code="not-on-hub") from error
    assert isinstance(loaded, datasets.Dataset), "load_dataset with a split gives one data set"
    return _from_dataset(f"{source.path} [{source.split}]", loaded)


_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {"observation": "tool", "function_call": "function_call", "human": "user", "gpt": "assistant"}
"""ShareGPT's speakers → roles of messages, if they differ."""
_OURS = {**_COLUMNS, "kto_tag": "label"}
_KNOWN = {
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name"),
    *("formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags"),
}


@dataclass(frozen=True)
class Translation:
    """Column names of an entry: `columns`, `tags` and `ranking`. `form` is its formatting: alpaca, sharegpt or openai."""

    form: str
    ranking: bool
    columns: Mapping[str, str]
    tags: Mapping[str, str]

    def __call__(self, row: RawRow) -> RawRow:
        """Return the row under our names."""
        if isinstance(row, BadRow):
            return row
        chat, columns = self.form != "alpaca", self.columns
        read = ("messages",) if chat else ("prompt", "query", "response", "history")
        read += ("system", "tools", "images", "videos", "audios", "kto_tag")
        read += ("chosen", "rejected") if self.ranking else ()
        ours = {_OURS.get(name, name): row[columns[name]] for name in read if columns.get(name) in row}
        named = {columns.get(name) for name in read}
        ours |= {f"{name}{UNLISTED}": value for name, value in row.items() if name not in named}
        if not chat and not self.ranking and "response" not in columns:
            return {"text": ours.pop("instruction", None), **ours}
        if not chat:
            return ours if "prompt" in columns else {"instruction": "", **ours}
        if self.form == "openai":
            ours["messages"] = ours.pop("conversations", None)
        for name in ("conversations", "messages", "chosen", "rejected"):
            if is_list(turns := ours.get(name)):
                ours[name] = [self._turn(turn) for turn in turns]
            elif is_object(turns):
                ours[name] = self._turn(turns)
        return ours

    def _turn(self, turn: object) -> object:
        if not is_object(turn):
            return turn
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        spoken = {self.tags[name]: word for name, word in _TAGS.items() if name in self.tags}
        role: Any = turn.get(str(role_tag))
        role = spoken.get(role, role) if isinstance(role, str) else role
        if self.form != "openai":
            return {"from": role, "value": turn.get(content_tag)}
        rest = {name: value for name, value in turn.items() if name not in (role_tag, content_tag)}
        return {**rest, "role": _ROLES.get(role, role), "content": turn.get(content_tag)}


def look_up(source: DataSource, where: str) -> tuple[DataSource, Translation, int | None]:
    """Return the source of an entry `lf:FILE#NAME`, its Translation, and its num_samples or None.

    Raises UserError for a missing entry, or one that packtrain cannot read. num_samples counts documents in an epoch.
    """
    path, _, name = source.path.removeprefix(LISTED).rpartition("#")
    entries = read_info(Path(path))
    if (entry := entries.get(name)) is None:
        what = f"{path} has no data set {name!r}"
        raise UserError(what, where=where, fix=suggest(name, entries, "", 3), code="no-such-data-set")
    place, form = f"{path}, {name}", entry.get("formatting", "alpaca")
    if unknown := sorted({*entry} - _KNOWN):
        what = f"{unknown[0]!r} is no key of an entry"
        raise UserError(what, where=place, fix=suggest(unknown[0], _KNOWN), code="unknown-entry-key")
    if form not in ("alpaca", "sharegpt", "openai"):
        what = f"formatting is {form!r}"
        raise UserError(what, where=place, fix="It is alpaca, sharegpt or openai.", code="unknown-formatting")
    if "folder" in entry:
        fix = "Name its files in data.train, as hf://datasets/OWNER/NAME/FOLDER/* with data.streaming=true."
        raise UserError("a folder of a hub data set is not read by its name", where=place, fix=fix, code="hub-folder")
    found = entry.get("hf_hub_url") or entry.get("cloud_file_name")
    if found is None and "file_name" in entry and not {"ms_hub_url", "om_hub_url", "script_url"} & {*entry}:
        found = str(Path(path).parent / entry["file_name"])
    if found is None:
        what = "it is on a hub that packtrain does not read, or made by a script"
        raise UserError(what, where=place, fix="Give data.train its files.", code="entry-not-readable")
    columns, tags = entry.get("columns", _COLUMNS), entry.get("tags", _TAGS)
    translation = Translation(form, bool(entry.get("ranking")), columns, tags)
    split = str(entry.get("split", "train")) if "hf_hub_url" in entry else "train"
    plain = replace(source, path=str(found), subset=entry.get("subset"), split=split)
    return plain, translation, entry.get("num_samples")
