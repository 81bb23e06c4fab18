"""`data.train` and `data.eval` to data sets of documents: each source is tokenised once, in parallel, and cached.

The reader (this process) cuts sources into chunks, workers parse and tokenise them, and results are written in order,
whatever the number of workers. Only a few chunks are in flight, so memory does not grow with the data.

Workers are forks of a server that has imported this module and nothing more: forks of this process would copy the locks of
torch's and the tokenizer's threads in any state. The server takes a second to start, so small data (up to FEW_ROWS,
FEW_BYTES) is tokenised by this process alone.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from packtrain.config.objective import TRAITS, ObjectiveKind
from packtrain.config.schema import Data, DataSource, Format, Split, sources
from packtrain.data.dataset import PairDataset, TokenDataset, Tokenised, UnpairedDataset, hold_out, mix_sources
from packtrain.data.formats.columns import detect_format
from packtrain.data.sources.chunks import BadRow, Chunk
from packtrain.data.sources.locate import Files, Source, locate
from packtrain.data.tokens.cache import StoreWriter, cache_folder, hash_file, open_or_build
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.encode import ENCODERS, MOST_PROBLEMS, EncodedChunk, Encoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import PacktrainError, Problem, UserError
from packtrain.monitor import heartbeat
from packtrain.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 15
"""Goes up whenever the same rows would become other tokens or masks, so that old caches are not used."""
FEW_ROWS, FEW_BYTES, FEW_CHUNKS = 10_000, 4 << 20, 40
"""What this process tokenises itself, in about the time that workers take to start."""
MOST_WORKERS = 16
LOOK_AHEAD = 3


AnyDataset = TypeVar("AnyDataset", TokenDataset, PairDataset, UnpairedDataset)


@dataclass(frozen=True)
class PreparedData(Generic[AnyDataset]):
    """The documents (or preference pairs) to train on, and the held-out ones where there are any."""

    train: AnyDataset
    eval: AnyDataset | None


def prepare(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, seed: int, progress: bool = False
) -> PreparedData[TokenDataset]:
    """Tokenise (or find in the cache) what `data` names; `progress` shows a bar on stderr.

    Raises UserError naming file, line and field of rows that cannot be used, or why no document remains. Every process of
    a launch may call it: one works, the others wait.
    """
    return _prepare(data, tokenizer, seed, progress, "sft", lambda documents: documents)


def prepare_pairs(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, seed: int, progress: bool = False
) -> PreparedData[PairDataset]:
    """As `prepare`, for preference pairs; also raises UserError for rows that are no pairs."""
    return _prepare(data, tokenizer, seed, progress, "dpo", PairDataset)


def prepare_unpaired(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, seed: int, progress: bool = False
) -> PreparedData[UnpairedDataset]:
    """As `prepare`, for answers with labels; also raises UserError for rows that have none."""
    return _prepare(data, tokenizer, seed, progress, "kto", UnpairedDataset)


def prepare_with_margins(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, seed: int, progress: bool = False
) -> PreparedData[PairDataset]:
    """As `prepare_pairs`, with their margins."""
    return _prepare(data, tokenizer, seed, progress, "reward", partial(PairDataset, with_margins=True))


PREPARE: dict[ObjectiveKind, Callable[..., PreparedData[Any]]] = {
    "sft": prepare,
    "dpo": prepare_pairs,
    "kto": prepare_unpaired,
    "reward": prepare_with_margins,
}


def _prepare(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    progress: bool,
    objective: ObjectiveKind,
    dataset_class: Callable[[TokenDataset], AnyDataset],
) -> PreparedData[AnyDataset]:
    if data.train is None:
        raise UserError("there is nothing to train on", where="data.train", fix="Give a file, a folder or a hub id.")
    template = choose_template(data.chat_template, tokenizer)
    encoder = ENCODERS[objective](plain_tokenizer(tokenizer), template, data)
    console = Console(stderr=True, quiet=not progress)
    mix = partial(mix_sources, seed=seed, together=TRAITS[objective].documents)
    held_out: TokenDataset | None = None
    with ExitStack() as stack:
        workers = _Workers(encoder, count_tokenising_processes(), stack)
        tokeniser = _Tokeniser(workers, data, objective, cache_folder(data.cache_dir), seed, console)
        parts = [tokeniser.tokenise(source, "train") for source in sources(data.train, "train")]
        if isinstance(data.eval, (int, float)) and data.eval:
            held = hold_out(parts, data.eval)
            train = mix(parts, "data.train", kept=[~rows for rows in held])
            held_out = mix(parts, "data.eval", kept=held, weigh=False)
        else:
            if data.eval:
                eval_parts = [tokeniser.tokenise(source, "eval") for source in sources(data.eval, "eval")]
                held_out = mix(eval_parts, "data.eval")
                if remark := _remark_overlap(parts, eval_parts):
                    held_out.report = replace(held_out.report, remarks=(*held_out.report.remarks, remark))
            train = mix(parts, "data.train")
    return PreparedData(dataset_class(train), None if held_out is None else dataset_class(held_out))


def _remark_overlap(train: list[Tokenised], evaluated: list[Tokenised]) -> str:
    """A remark on rows of data.eval that are in data.train, "" where there are none."""
    trained, held_out = (np.concatenate([part.store.fates["content"] for part in side]) for side in (train, evaluated))
    number, rows = np.count_nonzero(np.isin(held_out, trained)), counted(len(held_out), "rows")
    remark = f"{number:,} of the {rows} of data.eval are in data.train too: the held-out loss is too low by what was memorised"
    return remark if number else ""


@dataclass
class _Tokeniser:
    """Builds the store of a source, or finds it in the cache."""

    workers: _Workers
    data: Data
    objective: ObjectiveKind
    folder: Path
    seed: int
    console: Console

    def tokenise(self, given: DataSource, role: Split) -> Tokenised:
        try:
            source = locate(given, role, self.seed, self.objective, self.data.split_text)
            identity = source.identity(partial(hash_file, memory=self.folder / "hashes"))
        except OSError as error:
            where = str(error.filename or given.path)
            raise UserError(f"cannot be used: {error.strerror or error}", where=where) from error
        encoder, data = self.workers.encoder, self.workers.encoder.data
        chat = encoder.template.content if encoder.template else ""
        keys = (data.format, data.loss_on, data.max_length, data.overlong, data.bad_rows, sorted(data.columns.items()))
        parts = (VERSION, identity, self.objective, keys, encoder.tokenizer.content, chat)
        key = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

        def say(message: str) -> None:
            self.console.print(f"{source.name}: {message}", highlight=False, markup=False)

        store, built = open_or_build(self.folder, key, partial(self._build, source), say)
        return Tokenised(given, store, built, source.remark() if isinstance(source, Files) else "")

    def _build(self, source: Source, folder: Path) -> None:
        started = time.monotonic()
        chunks = source.chunks()
        format, seen = self._detect(source, chunks)
        self.workers.encoder.check(format, source.name)
        writer = StoreWriter(folder)
        columns = (
            TextColumn("tokenising"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rows]:,} rows"),
        )
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console) as bar:
            task, rows = bar.add_task("", total=source.size or None, rows=0), 0
            for chunk, outcome in self.workers.encode(chain(seen, chunks), format):
                if outcome.problems:
                    raise _bad_rows(outcome.problems)
                writer.add(outcome.documents, outcome.fates)
                rows += len(outcome.fates)
                bar.update(task, advance=chunk.size, rows=rows)
                heartbeat.progress()
            if not (counts := writer.counts).kept:
                reasons = ", ".join(f"{rows} {reason}" for reason, rows in Counter(counts.dropped).most_common())
                what = f"no document remains of {counted(counts.rows, 'rows')}; dropped: {reasons}"
                keys = "data.loss_on, data.max_length" if self.objective == "sft" else "data.max_length, data.overlong"
                raise UserError(what, where=source.name, fix=f"See data.format, {keys}.")
            writer.finish(format, time.monotonic() - started)

    def _detect(self, source: Source, chunks: Iterator[Chunk]) -> tuple[Format, list[Chunk]]:
        """The source's format, from the columns of the first chunk that has a readable row; and the chunks read."""
        seen: list[Chunk] = []
        problems = []
        for chunk in chunks:
            seen.append(chunk)
            rows = list(chunk.rows())
            problems += [row.problem(where) for where, row in rows if isinstance(row, BadRow)]
            columns = [list(row) for _, row in rows if isinstance(row, dict) and row]
            if columns:
                names = list(dict.fromkeys(name for row in columns for name in row))
                keys = (self.data.format, self.data.columns)
                return detect_format(columns[0], names, *keys, source.name, self.objective), seen
        if problems:
            raise _bad_rows(problems)
        raise UserError("there are no rows", where=source.name, fix="Give a source that is not empty.")


def _bad_rows(problems: list[Problem]) -> UserError:
    """The error of the first rows that cannot be used."""
    *others, last = problems[:MOST_PROBLEMS]
    return UserError([*others, replace(last, fix=f"{last.fix} There may be more further down.")])


@dataclass
class _Workers:
    """Encodes chunks in order: a few in this process, many in worker processes that live until the stack is closed."""

    encoder: Encoder
    number: int
    stack: ExitStack
    pool: ProcessPoolExecutor | None = None

    def encode(self, chunks: Iterator[Chunk], format: Format) -> Iterator[tuple[Chunk, EncodedChunk]]:
        first = list(islice(chunks, FEW_CHUNKS + 1))
        rows, size = sum(map(len, first)), sum(chunk.size for chunk in first)
        small = len(first) <= FEW_CHUNKS and rows <= FEW_ROWS and size <= FEW_BYTES
        if small or self.number == 1:
            yield from ((chunk, self.encoder.encode(chunk, format)) for chunk in chain(first, chunks))
            return
        self.pool = pool = self.pool or self._start()
        waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in chain(first, chunks):
                waiting.append((chunk, pool.submit(_encode, chunk, format)))
                if len(waiting) >= LOOK_AHEAD * self.number:
                    chunk, future = waiting.popleft()
                    yield chunk, future.result()
            while waiting:
                chunk, future = waiting.popleft()
                yield chunk, future.result()
        except BrokenProcessPool as error:
            fix = "Out of memory, most likely: with fewer cores (taskset -c 0-3 packtrain …) there are fewer of them."
            raise PacktrainError("a tokenising process died", where="data.train", fix=fix) from error

    def _start(self) -> ProcessPoolExecutor:
        # Sent by file: Python hangs if a worker dies before it has read arguments larger than a pipe's buffer.
        encoder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="packtrain-")), "encoder")
        encoder.write_bytes(pickle.dumps(self.encoder))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # The server and its forks inherit the mask: Ctrl-C reaches the whole group, and this process ends them.
        resource_tracker.ensure_running()  # which the server starts too, and that would undo the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pool = ProcessPoolExecutor(self.number, context, initializer=_start_worker, initargs=(encoder,))
        self.stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        return pool


_encoder: Encoder


def _start_worker(encoder: Path) -> None:
    """In a worker: load the encoder; one thread each, as there is a process per core; end when the parent ends."""
    global _encoder
    _encoder = pickle.loads(encoder.read_bytes())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode(chunk: Chunk, format: Format) -> EncodedChunk:
    return _encoder.encode(chunk, format)


def count_tokenising_processes() -> int:
    """One for each CPU core that this process may use, up to MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)
