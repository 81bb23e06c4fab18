"""Turn `data.train` and `data.eval` into data sets of documents.

Each source is tokenised once, in parallel, and cached. This process cuts sources into chunks, workers parse and tokenise them, and this
process writes the results in order; only a few chunks are in flight. Workers are forks of a server that has imported this module only:
forks of this process would copy locks of torch and the tokenizer. This process tokenises small data (FEW_ROWS, FEW_BYTES) itself.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn

from packtrain.config.schema import Data, DataSource, Format, Model, Split, sources
from packtrain.data.dataset import Dataset, PairDataset, TokenDataset, Tokenised, UnpairedDataset, hold_out, mix_sources
from packtrain.data.formats.columns import detect_format
from packtrain.data.pictures.processor import PictureProcessor
from packtrain.data.sources.chunks import BadRow, Chunk, is_object
from packtrain.data.sources.left_out import LeftOut
from packtrain.data.sources.locate import Source, locate
from packtrain.data.tokens.cache import EncodedChunk, StoreWriter, cache_folder, hash_file, open_or_build
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.encode import LEFT_OUT, MAX_PROBLEMS, Encoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import PacktrainError, Problem, UserError
from packtrain.monitor import heartbeat
from packtrain.objectives.spec import OBJECTIVES, Spec
from packtrain.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from packtrain.data.streaming import Stream

VERSION = 26
"""Increase it whenever the same rows would give other tokens or masks, so that old caches are not used."""
FEW_ROWS, FEW_BYTES, FEW_CHUNKS = 10_000, 4 << 20, 40
"""Limits of the data that this process tokenises itself, in about the time that workers take to start."""
MAX_WORKERS = 16
PREFETCH = 3
END_S = 30
"""Seconds that workers may take to finish their current chunks, once no more are wanted."""


@dataclass(frozen=True)
class PreparedData:
    """Training data set of an objective (see dataset_of), and an optional held-out one."""

    train: Dataset
    eval: Dataset | None
    sets: Mapping[str, object] = field(default_factory=dict[str, object])
    """The parts of `eval` by the names of data.eval; {"": eval} without names."""
    stream: Stream | None = None
    """The stream of training data with data.streaming (streaming.py); `train` then has the first rows."""


def dataset_of(objective: Spec, documents: TokenDataset) -> Dataset:
    """Return the data set of an objective, made from its documents."""
    if objective.pairs:
        return PairDataset(documents, with_margins=objective.margins)
    return UnpairedDataset(documents) if objective.examples == "answers" else documents


def prepare(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    objective: str,
    *,
    seed: int,
    progress: bool = False,
    day: str = "",
    first_rows: TokenDataset | None = None,
    model: Model | None = None,
) -> PreparedData:
    """Tokenise the sources of `data` for the objective, or find them in the cache.

    A stream's `first_rows` stand for data.train: only data.eval is tokenised then. `progress` shows a bar on stderr; `day` is the date in
    templates, `model` the one whose processor knows pictures. UserError names file, line and field of unusable rows, or says why no document remains. Every process of a launch may call it:
    one works, the others wait.
    """
    encoder = make_encoder(data, tokenizer, objective, day, model)
    mix = partial(mix_sources, seed=seed, together=OBJECTIVES[objective].documents)
    held_out: TokenDataset | None = None
    with ExitStack() as stack:
        console = Console(stderr=True, quiet=not progress)
        tokeniser = Tokeniser(encoder, cache_folder(data.cache_dir), seed, console, stack)
        trained = [] if first_rows else sources(data.train, "train")
        parts = [tokeniser.tokenise(source, "train") for source in trained]
        if parts and (remark := tokeniser.left_out.check()):
            parts[0] = replace(parts[0], remark="; ".join(filter(None, (parts[0].remark, remark))))
        if isinstance(data.eval, (int, float)) and data.eval:
            held = hold_out(parts, data.eval)
            train = mix(parts, "data.train", kept=[~rows for rows in held], weigh=not data.stages)
            held_out = mix(parts, "data.eval", kept=held, weigh=False)
        else:
            if data.eval:
                eval_parts = [tokeniser.tokenise(source, "eval") for source in sources(data.eval, "eval")]
                held_out = mix(eval_parts, "data.eval")
                if parts and (remark := _remark_overlap(parts, eval_parts)):
                    held_out.report = replace(held_out.report, remarks=(*held_out.report.remarks, remark))
            train = first_rows or mix(parts, "data.train", weigh=not data.stages)
    made = partial(dataset_of, OBJECTIVES[objective])
    prepared = PreparedData(made(train), None if held_out is None else made(held_out))
    if held_out is None or not isinstance(data.eval, dict):
        return replace(prepared, sets={"": prepared.eval} if prepared.eval else {})
    ends = np.cumsum([len(sources(item)) for item in data.eval.values()])
    borders = np.searchsorted(held_out.source_of, [0, *ends])  # documents are in the order of their sources
    parts_by_name = zip(data.eval, pairwise(borders.tolist()), strict=True)
    return replace(prepared, sets={name: made(held_out.part(*ends)) for name, ends in parts_by_name})


def make_encoder(
    data: Data, tokenizer: PreTrainedTokenizerBase, objective: str, day: str, model: Model | None = None
) -> Encoder:
    """Make the encoder that turns rows into documents. Without a `model` it refuses pictures."""
    template, today = choose_template(data.chat_template, tokenizer), date.fromisoformat(day) if day else date.today()
    pictures = PictureProcessor(model, data.max_picture_tokens) if model else None
    return Encoder(plain_tokenizer(tokenizer), template and template.on(today), data, objective, pictures)


def _remark_overlap(train: list[Tokenised], evaluated: list[Tokenised]) -> str:
    """Return a remark on rows of data.eval found in data.train, "" without any."""
    trained, held_out = (np.concatenate([part.store.fates["content"] for part in side]) for side in (train, evaluated))
    if not (number := np.count_nonzero(np.isin(held_out, trained, kind="sort"))):  # numpy 2.0's table overflows
        return ""
    rows = f"{number:,} of the {counted(len(held_out), 'rows')} of data.eval"
    return f"{rows} are in data.train too: the held-out loss will look better than it is"


@dataclass
class Tokeniser:
    """Builder of a source's store, unless the cache has it.

    Chunks are encoded in order: a few in this process, many in worker processes that live until the stack is closed.
    """

    encoder: Encoder
    folder: Path
    seed: int
    console: Console
    stack: ExitStack
    pool: ProcessPoolExecutor | None = None

    @cached_property
    def left_out(self) -> LeftOut:
        """Return the rows of data.train that are left out."""
        return LeftOut(self.encoder.data.leave_out)

    @property
    def settings(self) -> tuple[object, ...]:
        """Return the settings that decide the documents of a row; the cache key includes them."""
        data, template, pictures = self.encoder.data, self.encoder.template, self.encoder.pictures
        keys = (data.format, data.loss_on, data.max_length, data.overlong, data.bad_rows, sorted(data.columns.items()))
        contents = template.content if template else "", pictures.content if pictures else ""
        return (*keys, data.system, data.render, *contents)

    def tokenise(self, given: DataSource, role: Split) -> Tokenised:
        encoder, data = self.encoder, self.encoder.data
        try:
            source = locate(given, role, self.seed, encoder.objective, data.split_text)
            source = self.left_out.mark(source) if role == "train" else source
            identity = source.identity(partial(hash_file, memory=self.folder / "hashes"))
        except OSError as error:
            where = str(error.filename or given.path)
            raise UserError(f"cannot be used: {error.strerror or error}", where=where, code="bad-source") from error
        parts = (VERSION, identity, encoder.objective, encoder.tokenizer.content, *self.settings)
        if encoder.pictures and encoder.pictures.content:  # relative paths of pictures begin there
            parts += (*(str(path.resolve().parent) for path in source.paths if isinstance(path, Path)),)
        key = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

        def say(message: str) -> None:
            self.console.print(f"{source.name}: {message}", highlight=False, markup=False)

        store, built = open_or_build(self.folder, key, partial(self._build, source), say)
        if role == "train":
            reason = store.reasons.index(LEFT_OUT) if LEFT_OUT in store.reasons else -1
            self.left_out.match(source, int(np.count_nonzero(store.fates["dropped"] == reason)))
        given = given if source.samples is None else replace(given, samples=source.samples)
        return Tokenised(given, store, built, source.remark)

    def _build(self, source: Source, folder: Path) -> None:
        started = time.monotonic()
        chunks = source.chunks()
        format, seen = self.detect(source, chunks)
        self.encoder.check(format, source.name)
        writer, rows = StoreWriter(folder), 0
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[rows]:,} rows"))
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("tokenising", total=source.size or None, rows=0)
            for chunk, outcome in self.encode(chain(seen, chunks), format):
                if outcome.problems:
                    raise refuse_rows(outcome.problems)
                writer.add(outcome)
                rows += len(outcome.fates)
                bar.update(task, advance=chunk.size, rows=rows)
                heartbeat.progress()
            if writer.dropped.total() == rows:
                reasons = ", ".join(f"{number} {reason}" for reason, number in writer.dropped.most_common())
                what = f"no document remains of {counted(rows, 'rows')}; dropped: {reasons}"
                fix = "See data.format, data.loss_on, data.max_length, data.overlong, data.leave_out."
                raise UserError(what, where=source.name, fix=fix, code="no-document-remains")
            writer.finish(format, time.monotonic() - started)

    def detect(self, source: Source, chunks: Iterator[Chunk]) -> tuple[Format, list[Chunk]]:
        """Detect the format from the columns of the first chunk with a readable row. Return it and the chunks read."""
        seen: list[Chunk] = []
        problems = list[Problem]()
        for chunk in chunks:
            seen.append(chunk)
            rows = list(chunk.rows())
            problems += [row.problem(where) for where, row in rows if isinstance(row, BadRow)]
            columns = [list(row) for _, row in rows if is_object(row) and row]
            if columns:
                names = list(dict.fromkeys(name for row in columns for name in row))
                data, objective = self.encoder.data, self.encoder.objective
                own = chunk.columns or data.columns
                return detect_format(columns[0], names, data.format, own, source.name, objective), seen
        if problems:
            raise refuse_rows(problems)
        raise UserError("there are no rows", where=source.name, fix="Give a source that is not empty.", code="no-rows")

    def read_first(self, source: Source, documents: int) -> tuple[Format, list[EncodedChunk]]:
        """Encode the first chunks of a source, up to this number of documents. Raises UserError if they cannot be used, or have none."""
        chunks, outcomes = source.chunks(), list[EncodedChunk]()
        format, seen = self.detect(source, chunks)
        self.encoder.check(format, source.name)
        for chunk in chain(seen, chunks):
            outcomes.append(self.encoder.encode(chunk, format))
            if outcomes[-1].problems:
                raise refuse_rows(outcomes[-1].problems)
            if sum(len(outcome.lengths) for outcome in outcomes) >= documents:
                break
        if not any(len(outcome.lengths) for outcome in outcomes):
            fix = "See data.format, data.max_length."
            raise UserError("no document remains of any row", where=source.name, fix=fix, code="no-document-remains")
        return format, outcomes

    def encode(
        self, chunks: Iterator[Chunk], format: Format, *, ahead: bool = False
    ) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Yield the chunks in order with their tokens. `ahead`: always use other processes; the processes of a launch share the cores."""
        processes = count_tokenising_processes()
        if ahead:
            processes = max(processes // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        first = [] if ahead else list(islice(chunks, FEW_CHUNKS + 1))
        rows, size = sum(map(len, first)), sum(chunk.size for chunk in first)
        small = len(first) <= FEW_CHUNKS and rows <= FEW_ROWS and size <= FEW_BYTES
        if not ahead and (small or processes == 1):
            yield from ((chunk, self.encoder.encode(chunk, format)) for chunk in chain(first, chunks))
            return
        self.pool = pool = self.pool or self._start(processes)
        waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in chain(first, chunks):
                waiting.append((chunk, pool.submit(_encode_in_worker, chunk, format)))
                if len(waiting) >= PREFETCH * processes:
                    chunk, future = waiting.popleft()
                    yield chunk, future.result()
            while waiting:
                chunk, future = waiting.popleft()
                yield chunk, future.result()
        except BrokenProcessPool as error:
            fix = "Out of memory, most likely: use fewer cores (taskset -c 0-3 packtrain …), and data.split_text=line for long texts."
            what = "a tokenising process died"
            raise PacktrainError(what, where="data.train", fix=fix, code="tokenising-process-died") from error

    def _start(self, processes: int) -> ProcessPoolExecutor:
        context = _Context()
        context.set_forkserver_preload([__name__])
        resource_tracker.ensure_running()  # if the forkserver started the tracker, the tracker would unblock the signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            forkserver.ensure_running()  # signals to the whole process group would end the forkserver, and the pool with it
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(self.encoder,))
        self.stack.callback(_end, pool)
        return pool


class _Worker(ForkServerProcess):
    """A process that `terminate` kills, since it ignores SIGTERM.

    A broken pool terminates its workers and waits for them. Since Python 3.12 it holds its lock meanwhile.
    """

    terminate = ForkServerProcess.kill


class _Context(ForkServerContext):
    Process = _Worker


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers after their current chunks. A worker killed in the middle of a result would leave the pool waiting for the rest."""
    manager = cast("threading.Thread | None", pool._executor_manager_thread)
    workers, limit = [*(pool._processes or {})], time.monotonic() + END_S
    pool.shutdown(wait=False, cancel_futures=True)
    while manager is not None and manager.is_alive():
        if pool._broken or time.monotonic() > limit:
            for pid in workers:  # Process.kill does nothing if the forkserver was killed, too
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        manager.join(0.1)


def refuse_rows(problems: list[Problem]) -> UserError:
    """Return the error about the first unusable rows."""
    *others, last = problems[:MAX_PROBLEMS]
    return UserError([*others, replace(last, fix=f"{last.fix} Later rows may have the same problem.")])


_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    """Set up a worker with one thread, as each core has a process. Ignore signals to the whole group: a stream needs its workers until its last
    step, and the parent ends them."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode_in_worker(chunk: Chunk, format: Format) -> EncodedChunk:
    return _encoder.encode(chunk, format)


def count_tokenising_processes() -> int:
    """Return one process for each CPU core that this process may use, up to MAX_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)
