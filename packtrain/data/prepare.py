"""`data.train` and `data.eval` to TokenDatasets or PairDatasets: each source is tokenised once, in parallel, and cached.

The reader (this process) cuts sources into chunks, workers parse and tokenise them, and results are written in the
order of the source, with only a few chunks in flight: memory does not grow with the data. The result does not depend
on the number of workers.

Workers are spawned, not forked: by now this process may hold torch's and the tokenizer's threads, and a fork copies
their locks in whatever state they are. A spawned worker costs a second of imports and 100 MB (no torch), so
small data is tokenised right here.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from packtrain.config.schema import Data, DataSource
from packtrain.data.dataset import TokenDataset, hold_out, make_dataset, weighted
from packtrain.data.formats.conversations import Format, Objective
from packtrain.data.formats.recognise import OF_PAIRS, recognise
from packtrain.data.pairs import PairDataset
from packtrain.data.report import Counts
from packtrain.data.sources import resolve as sources
from packtrain.data.sources.hashing import hash_file
from packtrain.data.sources.rows import BadRow, Chunk
from packtrain.data.tokens import templates
from packtrain.data.tokens.cache import cache_folder, open_or_build
from packtrain.data.tokens.codec import codec_of
from packtrain.data.tokens.paired import PairEncoder
from packtrain.data.tokens.store import Store, StoreWriter
from packtrain.data.tokens.tokenise import MOST_PROBLEMS, Encoder, Outcome, Settings
from packtrain.errors import PacktrainError, Problem, UserError
from packtrain.monitor import heartbeat
from packtrain.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 5
"""Goes up whenever the same rows would become other tokens or masks, so that old caches are not used."""
FEW_ROWS = 1000
FEW_CHUNKS = 8
MOST_WORKERS = 16
LOOK_AHEAD = 3


Documents = TypeVar("Documents", TokenDataset, PairDataset)


@dataclass(frozen=True)
class PreparedData(Generic[Documents]):
    """The documents (or preference pairs) to train on, and the held-out ones where there are any."""

    train: Documents
    eval: Documents | None


def prepare(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, seed: int, template: str | None = None, progress: bool = False
) -> PreparedData[TokenDataset]:
    """Tokenise (or find in the cache) what `data` names.

    `template` overrides data.chat_template; `progress` shows a bar on stderr. Raises UserError naming file, line and
    field of rows that cannot be used, or why no document is left. Every process of a launch may call it: one works,
    the others wait.
    """
    return _prepared(data, tokenizer, seed, template, progress, "sft")


def prepare_pairs(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, seed: int, template: str | None = None, progress: bool = False
) -> PreparedData[PairDataset]:
    """The same for preference pairs; raises UserError for other rows, too."""
    made = _prepared(data, tokenizer, seed, template, progress, "dpo")
    return PreparedData(PairDataset(made.train), None if made.eval is None else PairDataset(made.eval))


def _prepared(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    template: str | None,
    progress: bool,
    objective: Objective,
) -> PreparedData[TokenDataset]:
    if data.train is None:
        raise UserError("there is nothing to train on", where="data.train", fix="Give a file, a folder or a hub id.")
    codec, chat = codec_of(tokenizer), templates.choose(template or data.chat_template, tokenizer)
    encoder = (Encoder if objective == "sft" else PairEncoder)(codec, chat, _settings(data, objective))
    console = Console(stderr=True, quiet=not progress)
    with ExitStack() as stack:
        workshop = _Workshop(encoder, data.workers or min(_cores(), MOST_WORKERS), stack)
        maker = _Maker(workshop, data, objective, cache_folder(data.cache_dir), seed, console)
        mixer = _Mixer(seed, 1 if objective == "sft" else 2)
        train_sources = sources.wanted(data.train, "train")
        train = [maker.store(source, "train") for source in train_sources]
        if data.eval is None or isinstance(data.eval, (int, float)):
            return mixer.with_fraction(train, train_sources, data.eval)
        eval_sources = sources.wanted(data.eval, "eval")
        held = [maker.store(source, "eval") for source in eval_sources]
        return PreparedData(mixer.mixed(train, train_sources, "train"), mixer.mixed(held, eval_sources, "eval"))


def _settings(data: Data, objective: Objective) -> Settings:
    """The keys that decide the tokens; raises UserError for values that the objective has no use for."""
    overlong, columns = data.overlong, tuple(sorted(data.columns.items()))
    if objective == "sft":
        if overlong in ("keep_start", "keep_end"):
            what = f"data.overlong={overlong} is for preference pairs"
            raise UserError(what, where="data.overlong", fix="Set it to truncate, split, drop or error.")
        return Settings(data.loss_on, data.max_length, overlong, data.bad_rows, columns)
    if data.format not in ("auto", *OF_PAIRS):
        what = f"data.format={data.format} has no preference pairs"
        raise UserError(
            what, where="data.format", fix="Set it to auto, preference or ranked, or train with packtrain sft."
        )
    if data.loss_on not in ("auto", "completion"):
        what = f"data.loss_on={data.loss_on}, but preferences are about the answers"
        raise UserError(what, where="data.loss_on", fix="Set it to auto or completion.")
    if overlong == "split":
        what = "a preference pair cannot be split: the later parts would have no prompt"
        raise UserError(what, where="data.overlong", fix="Set it to truncate, keep_end, drop or error.")
    overlong = "truncate" if overlong == "keep_start" else overlong
    return Settings("completion", data.max_length, overlong, data.bad_rows, columns)


Made = tuple[Store, bool]


@dataclass(frozen=True, slots=True)
class _Mixer:
    """Stores to data sets, documents that belong `together` (by this many) always side by side."""

    seed: int
    together: int

    def with_fraction(
        self, made: list[Made], given: list[DataSource], fraction: float | None
    ) -> PreparedData[TokenDataset]:
        if not fraction:
            return PreparedData(self.mixed(made, given, "train"), None)
        if not 0 < fraction < 1:
            raise UserError(
                f"data.eval={fraction} is not a fraction", where="data.eval", fix="Give a number from 0 to 1."
            )
        stores = [store for store, _ in made]
        held = hold_out(stores, fraction)
        train = self.mixed(made, given, "train", held)
        documents = np.concatenate(
            [np.repeat(side, store.fates["documents"]) for store, side in zip(stores, held, strict=True)]
        )
        rows, names = np.flatnonzero(documents).astype(np.int64), [source.path for source in given]
        return PreparedData(train, make_dataset(stores, rows, names, built=[new for _, new in made], sides=held))

    def mixed(
        self, made: list[Made], given: list[DataSource], role: sources.Role, held: list[np.ndarray] | None = None
    ) -> TokenDataset:
        """All stores, each with its weight, without the documents of the rows `held` (for each store bool[its rows])."""
        parts, first, held_out = [], 0, 0
        for number, ((store, _), source) in enumerate(zip(made, given, strict=True)):
            rows = np.arange(first, first + len(store), dtype=np.int64)
            if held is not None:
                rows = rows[~np.repeat(held[number], store.fates["documents"])]
                held_out += len(store) - len(rows)
            if len(rows):
                parts.append(weighted(rows, source, number, self.seed, f"data.{role}", together=self.together))
            first += len(store)
        return make_dataset(
            [store for store, _ in made],
            np.concatenate(parts),
            [source.path for source in given],
            built=[new for _, new in made],
            sides=None if held is None else [~side for side in held],
            held_out=held_out,
        )


@dataclass
class _Maker:
    """Makes the store of a source, or finds it."""

    workshop: _Workshop
    data: Data
    objective: Objective
    folder: Path
    seed: int
    console: Console

    def store(self, given: DataSource, role: sources.Role) -> Made:
        try:
            source = sources.resolve(given, role, self.seed, self.objective)
            identity = source.identity(partial(hash_file, memory=self.folder / "hashes"))
        except OSError as error:
            where = str(error.filename or given.path)
            raise UserError(f"cannot be used: {error.strerror or error}", where=where) from error
        encoder = self.workshop.encoder
        chat = encoder.template.content if encoder.template else ""
        parts = (VERSION, identity, self.objective, self.data.format, encoder.settings, encoder.codec.content, chat)
        key = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

        def say(message: str) -> None:
            self.console.print(f"{source.name}: {message}", highlight=False, markup=False)

        return open_or_build(self.folder, key, partial(self._build, source), say)

    def _build(self, source: sources.Source, folder: Path) -> None:
        started = time.monotonic()
        chunks = source.chunks()
        format, seen = self._look(source, chunks)
        self.workshop.encoder.check(format, source.name)
        with closing(StoreWriter(folder)) as writer, _bar(self.console, source.size) as advance:
            rows, outcomes = 0, self.workshop.encode(_chain(seen, chunks), format)
            for chunk, outcome in outcomes:
                if outcome.problems:
                    raise _bad_rows(outcome, outcomes)
                writer.add(outcome.documents, outcome.fates)
                rows += len(outcome.fates)
                advance(chunk.size, rows)
                heartbeat.progress()
            if not (counts := writer.counts).kept:
                keys = "data.loss_on, max_length" if self.objective == "sft" else "data.max_length, overlong"
                raise UserError(_nothing_left(counts), where=source.name, fix=f"See data.format, {keys}.")
            writer.finish(format, time.monotonic() - started)

    def _look(self, source: sources.Source, chunks: Iterator[Chunk]) -> tuple[Format, list[Chunk]]:
        """The source's format, from the columns of the first chunk that has a readable row; and the chunks read."""
        seen: list[Chunk] = []
        problems = []
        for chunk in chunks:
            seen.append(chunk)
            names: dict[str, None] = {}
            first: list[str] = []
            for where, row in chunk.rows():
                if isinstance(row, BadRow):
                    problems.append(row.problem(where))
                else:
                    first = first or list(row)
                    names.update(dict.fromkeys(row))
            if names:
                if problems and self.data.bad_rows == "error":
                    raise _shown(problems, len(problems), complete=False)
                keys = (self.data.format, self.data.columns)
                return recognise(first, list(names), *keys, source.name, self.objective), seen
        if problems:
            raise _shown(problems, len(problems), complete=True)
        raise UserError("there are no rows", where=source.name, fix="Give a source that is not empty.")


def _bad_rows(first: Outcome, more: Iterator[tuple[Chunk, Outcome]]) -> UserError:
    """The error of the bad rows of `first` and of a few chunks that follow it."""
    problems, bad = list(first.problems), first.bad
    for _, outcome in islice(more, FEW_CHUNKS):
        problems, bad = [*problems, *outcome.problems], bad + outcome.bad
    return _shown(problems, bad, complete=next(more, None) is None)


def _shown(problems: list[Problem], bad: int, *, complete: bool) -> UserError:
    """The error of `bad` rows with the first `problems`; it says how many there are where not all are shown."""
    shown = problems[:MOST_PROBLEMS]
    note = "" if complete else "There may be more further down."
    if bad > len(shown):
        note = f"These are the first {len(shown)} of {'' if complete else 'at least '}{bad:,} bad rows."
    if note:
        shown[-1] = replace(shown[-1], fix=f"{shown[-1].fix} {note}")
    return UserError(shown)


def _nothing_left(counts: Counts) -> str:
    reasons = ", ".join(
        f"{number} {reason}" for reason, number in sorted(counts.dropped.items(), key=lambda item: -item[1])
    )
    return f"no document is left of {counted(counts.rows, 'rows')}; dropped: {reasons}"


def _chain(seen: list[Chunk], rest: Iterator[Chunk]) -> Iterator[Chunk]:
    yield from seen
    yield from rest


@dataclass
class _Workshop:
    """Encodes chunks in order: few of them here, many in processes that live until the stack is closed."""

    encoder: Encoder
    workers: int
    stack: ExitStack
    pool: ProcessPoolExecutor | None = field(default=None)

    def encode(self, chunks: Iterator[Chunk], format: Format) -> Iterator[tuple[Chunk, Outcome]]:
        first: list[Chunk] = []
        rows = 0
        for chunk in chunks:
            first.append(chunk)
            rows += len(chunk)
            if rows > FEW_ROWS or len(first) > FEW_CHUNKS:
                break
        else:
            yield from ((chunk, self.encoder.encode(chunk, format)) for chunk in first)
            return
        every = _chain(first, chunks)
        if self.workers == 1:
            yield from ((chunk, self.encoder.encode(chunk, format)) for chunk in every)
            return
        try:
            yield from self._in_parallel(every, format)
        except BrokenProcessPool as error:
            fix = "Out of memory, most likely: set data.workers lower."
            raise PacktrainError("a tokenising process died", where="data.workers", fix=fix) from error

    def _in_parallel(self, chunks: Iterator[Chunk], format: Format) -> Iterator[tuple[Chunk, Outcome]]:
        pool = self.pool
        if pool is None:
            context = multiprocessing.get_context("spawn")
            # By file: of arguments beyond what a pipe holds, Python waits for ever for a worker that died unread.
            encoder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="packtrain-")), "encoder")
            encoder.write_bytes(pickle.dumps(self.encoder))
            pool = ProcessPoolExecutor(self.workers, context, initializer=_start_worker, initargs=(encoder,))
            self.pool = pool
            self.stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        waiting: deque[tuple[Chunk, Future[Outcome]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_encode, chunk, format)))
            if len(waiting) >= LOOK_AHEAD * self.workers:
                chunk, future = waiting.popleft()
                yield chunk, future.result()
        while waiting:
            chunk, future = waiting.popleft()
            yield chunk, future.result()


_encoder: Encoder


def _start_worker(encoder: Path) -> None:
    """In a worker: load the encoder; one thread each, as there is a process per core; end when the parent ends."""
    global _encoder
    _encoder = pickle.loads(encoder.read_bytes())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the pool
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode(chunk: Chunk, format: Format) -> Outcome:
    return _encoder.encode(chunk, format)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def _bar(console: Console, size: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the console while the `with` lasts; gives `advance(size, rows so far)`."""
    columns = (TextColumn("tokenising"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rows]:,} rows"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=size or None, rows=0)
        yield lambda done, rows: bar.update(task, advance=done, rows=rows)
