"""data.streaming: read sources in order during training, without holding them as a whole.

A source is read in blocks of data.shuffle_buffer rows. (seed, source, pass, block) decide the order of a block's examples. While they are
taken, the next block is tokenised at the same rate: two blocks are in memory. Only two things decide the next examples: where the block
begins (file, chunk of rows), and how many of its examples were taken. A checkpoint holds just these; a resumed run tokenises
one block again. A sliding window would mix a little better, but a checkpoint would hold its rows.

The number of an example decides its source (Mixture). When a source has ended, the others take its share. With data.stages no source
ends: each begins again in another order, as without streaming.

Every rank reads and tokenises the whole stream. All ranks then compute the same documents: they exchange
nothing, and no rank waits for another one's disk. The price is that every rank tokenises.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from packtrain.config.schema import Data, DataSource, Format, Model, name_sources, sources
from packtrain.data.dataset import (
    SUMMED,
    TURNS,
    DataReport,
    Dataset,
    Mixture,
    TokenDataset,
    Tokenised,
    begin_examples,
    make_mixture,
    mix_sources,
    sum_fates,
)
from packtrain.data.formats.columns import merge_uses
from packtrain.data.prepare import PreparedData, Tokeniser, dataset_of, make_encoder, prepare, refuse_rows
from packtrain.data.sources.chunks import Chunk
from packtrain.data.sources.files import read_patiently
from packtrain.data.sources.locate import Source, locate
from packtrain.data.tokens.cache import FATES, Document, EncodedChunk, MemoryStore, cache_folder
from packtrain.errors import Json, UserError
from packtrain.objectives.spec import OBJECTIVES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Place = Json
"""Position in a source, as JSON: where the block begins (file, its name, chunk), the numbers of block and pass, and how many of its examples
were `taken`. Also the figures of the rows `before` the block and including it; and `ended`, once the source has ended."""
_START: Place = {"file": 0, "name": "", "chunk": 0, "block": 0, "pass": 0, "taken": 0, "before": {}, "figures": {}}


@dataclass(frozen=True, slots=True)
class Example:
    """Documents trained together (two for a pair), with the row's fate and its location."""

    documents: list[Document]
    fate: np.void
    row: str


@dataclass(frozen=True, slots=True)
class Window:
    """Number of `examples` of one step, their data set, and the row of each item.

    `place` is the stream's position after this step. `mark` is a 16-bit hash of its tokens and pictures. `last`: the stream ends here.
    """

    data: Dataset
    examples: int
    rows: list[str]
    place: Place
    mark: int
    last: bool = False


@dataclass
class _Block:
    """Examples of consecutive rows, with the first row's place and the figures of all rows."""

    start: tuple[int, str, int] | None = None
    examples: list[Example] = field(default_factory=list[Example])
    figures: Counter[str] = field(default_factory=Counter[str])

    def add(self, chunk: Chunk, encoded: EncodedChunk, together: int) -> None:
        """Add the outcome of a chunk."""
        store, fates = MemoryStore.of(encoded, ""), encoded.fates
        self.figures["rows"] += len(fates)
        self.figures.update(f"dropped: {fate.dropped}" for fate in fates if fate.dropped)
        self.figures.update(sum_fates(store.fates[store.fates["dropped"] == 0]))
        row_of = np.repeat(np.arange(len(fates)), store.fates["documents"])
        begins = begin_examples(store, together)
        borders = [*np.flatnonzero(begins).tolist(), len(store)]
        of_examples = store.fates[row_of[begins]]
        of_examples["documents"], of_examples["desirable"] = np.diff(borders), store.labels()[begins]
        for fate, (first, end) in zip(of_examples, pairwise(borders), strict=True):
            row = chunk.place(int(row_of[first]))
            self.examples.append(Example([store[number] for number in range(first, end)], fate, row))


@dataclass
class SourceStream:
    """Examples of one source; `place` is the position after the last example taken."""

    source: Source
    given: DataSource
    number: int
    format: Format
    together: int
    tokeniser: Tokeniser
    place: Place = field(default_factory=lambda: dict(_START))
    chunks_read: int = 0
    unread: dict[str, str] = field(default_factory=dict[str, str])

    def examples(self) -> Iterator[Example]:
        """Yield the examples from `place` on. Raises UserError for unusable rows, or if another file is at this place."""
        data, taken = self.tokeniser.encoder.data, self.place["taken"]
        while True:
            first, found, encoded = self.place, False, self._encode()
            number, before = first["block"], Counter[str](first["before"])
            block = self._fill(_Block(), encoded, 1)
            while block.start is not None:
                order, following = np.arange(len(block.examples)), _Block()
                if data.shuffle:
                    seed = [self.tokeniser.seed, 5, self.number, first["pass"], number]
                    order = np.random.default_rng(seed).permutation(order)
                known = {**dict(zip(("file", "name", "chunk"), block.start, strict=True)), "block": number}
                known |= {"pass": first["pass"], "before": dict(before), "figures": dict(before + block.figures)}
                for done, at in enumerate(order[taken:].tolist(), taken + 1):
                    found, self.place = True, {**known, "taken": done}
                    self._fill(following, encoded, done / len(order))
                    yield block.examples[at]
                before, number, taken = before + block.figures, number + 1, 0
                block = self._fill(following, encoded, 1)
            self.place = {**self.place, "figures": dict(before)}  # add the rows after the last example
            if not data.stages or not (found or first["taken"]):  # a pass without an example would have no end
                return
            self.place = {**_START, "pass": first["pass"] + 1, "before": dict(before), "figures": dict(before)}

    def _fill(
        self, block: _Block, encoded: Iterator[tuple[tuple[int, str, int], Chunk, EncodedChunk]], share: float
    ) -> _Block:
        """Fill `block` with at least this share of its rows, or with all remaining ones."""
        data = self.tokeniser.encoder.data
        while block.figures["rows"] < share * (data.shuffle_buffer if data.shuffle else 1):
            if (item := next(encoded, None)) is None:
                break
            block.start = block.start or item[0]
            block.add(*item[1:], self.together)
        return block

    def _encode(self) -> Iterator[tuple[tuple[int, str, int], Chunk, EncodedChunk]]:
        """Yield the chunks from `place` on, with their places, tokenised ahead."""
        places: deque[tuple[int, str, int]] = deque()
        file, skip, parts = self.place["file"], self.place["chunk"], self.source.files
        here = "".join(name for name, _ in parts[file : file + 1])
        if (came := self.place["name"]) and Path(came).name != Path(here).name:
            what = f"the run had come to {came}, and other files are there now"
            fix = "Put the files back, or start over with trainer.resume=never."
            raise UserError(what, where="data.train", fix=fix, code="files-changed")

        def chunks() -> Iterator[Chunk]:
            for number, (name, read) in enumerate(parts[file:], file):
                for at, chunk in read_patiently(name, read, skip if number == file else 0):
                    places.append((number, name, at))
                    yield chunk

        for chunk, encoded in self.tokeniser.encode(chunks(), self.format, ahead=True):
            self.chunks_read += 1
            merge_uses(self.unread, encoded.unread)
            if encoded.problems:
                raise refuse_rows(encoded.problems)
            yield places.popleft(), chunk, encoded


@dataclass
class Stream:
    """Steps of all sources together; `report` covers their first rows."""

    streams: list[SourceStream]
    mixture: Mixture
    objective: str
    examples_per_step: int
    report: DataReport
    stack: ExitStack

    def windows(self, place: Place | None = None) -> Iterator[Window]:
        """Yield step by step, from the beginning or from the `place` of a window."""
        step, held = place["step"] if place else 0, None
        for name, stream in zip(self.report.sources, self.streams, strict=True):
            stream.place = dict(place["sources"].get(name, _START) if place else _START)
        taking = [stream.examples() for stream in self.streams]
        while True:
            first = step * self.examples_per_step
            wanted = self.mixture.sources(first, first + self.examples_per_step).tolist()
            taken = [self._take(taking, number, source) for number, source in enumerate(wanted, first)]
            found = [item for item in taken if item is not None]
            places = [dict(stream.place) for stream in self.streams]
            place = {"step": step + 1, "sources": dict(zip(self.report.sources, places, strict=True))}
            if held is not None:
                yield held if found else replace(held, last=True, place={**place, "step": step})
            if not found:
                return
            held, step = self._window(found, place), step + 1

    def _take(self, taking: list[Iterator[Example]], number: int, source: int) -> tuple[int, Example] | None:
        """Return example `number` of the run, from this source if possible. Draw another source if it has ended. None if all have ended."""
        while True:
            stream = self.streams[source]
            if not stream.place.get("ended"):
                if (example := next(taking[source], None)) is not None:
                    return source, example
                stream.place = {**stream.place, "ended": True}
            goes_on = [not stream.place.get("ended") for stream in self.streams]
            if not (shares := np.array(self.mixture.shares[self.mixture.stage_of(number)]) * goes_on).any():
                return None
            drawn = np.random.default_rng([self.mixture.seed, 6, number, sum(goes_on)])
            source = int(drawn.choice(len(shares), p=shares / shares.sum()))

    def _window(self, taken: list[tuple[int, Example]], place: Place) -> Window:
        documents = [document for _, example in taken for document in example.documents]
        ids = np.concatenate([document.input_ids for document in documents])
        mask = np.concatenate([document.loss_mask for document in documents])
        lengths = np.array([len(document.input_ids) for document in documents], np.int32)
        fates, seen = np.array([example.fate for _, example in taken], FATES), [own.pictures for own in documents]
        store = MemoryStore(ids, mask, lengths, fates, self.report.format, pictures=seen)
        data = TokenDataset([store], np.arange(len(store)), self.report)
        sizes = [len(example.documents) for _, example in taken]
        data.source_of = np.repeat(np.array([source for source, _ in taken], np.int16), sizes)
        hashes = np.array([picture.hash for own in seen for picture in own], np.uint64)
        mark = zlib.crc32(hashes.data, zlib.crc32(mask.data, zlib.crc32(ids.data))) & 0xFFFF
        together = OBJECTIVES[self.objective].documents
        rows = [example.row for _, example in taken for _ in example.documents[::together]]
        return Window(dataset_of(OBJECTIVES[self.objective], data), len(taken), rows, place, mark)

    def report_at(self, place: Place, **trained: int) -> DataReport:
        """Report on the rows read up to this place; `trained` gives the figures of training."""
        figures = sum((Counter[str](own["figures"]) for own in place["sources"].values()), Counter[str]())
        known = {name: figures[name] for name in ("rows", "kept", *SUMMED, *TURNS)}
        dropped = {name.removeprefix("dropped: "): n for name, n in figures.items() if name.startswith("dropped: ")}
        remarks = (*self.report.remarks[:-1], "data.streaming: the rows are those that were read")
        unread = {name: stream.unread for name, stream in zip(self.report.sources, self.streams, strict=True)}
        # pictures are counted in the first rows alone
        return replace(self.report, **known, **trained, dropped=dropped, remarks=remarks, unread=unread, pictures=None)


def open_stream(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    objective: str,
    examples_per_step: int,
    *,
    seed: int,
    day: str = "",
    model: Model | None = None,
) -> PreparedData:
    """Open `data.train` as a stream, with its first rows as data set `train`. Code that asks what rows are like uses these.

    `data.eval` is read as a whole. UserError if a source is missing, or its first rows cannot be used.
    """
    encoder, stack, given = (
        make_encoder(data, tokenizer, objective, day, model),
        ExitStack(),
        sources(data.train, "train"),
    )
    console, together = Console(stderr=True, quiet=True), OBJECTIVES[objective].documents
    streams, first_rows, identity = list[SourceStream](), list[Tokenised](), list[list[object]]()
    tokeniser = Tokeniser(encoder, cache_folder(data.cache_dir), seed, console, stack)
    for number, named in enumerate(given):
        source = locate(named, "train", seed, objective, data.split_text, streaming=True)
        source = tokeniser.left_out.mark(source)
        tokeniser.left_out.match(source, None)
        if source.samples is not None:
            what = "num_samples are those of an epoch, which a stream has not"
            fix = "Name the entry's files in its place."
            raise UserError(what, where=f"data.train, {named.path}", fix=fix, code="samples-of-stream")
        format, outcomes = tokeniser.read_first(source, 1)
        first_rows.append(Tokenised(named, MemoryStore.of(outcomes[-1], format), False, source.remark))
        files = [source.key, source.size, *(name for name, _ in source.files)]
        identity.append([named.weight, bool(data.stages), *files, *tokeniser.settings])
        streams.append(SourceStream(source, named, number, format, together, tokeniser))
    sample = mix_sources(first_rows, "data.train", seed, together=together, weigh=False)
    sample.fingerprint = hashlib.blake2b(
        f"{sample.fingerprint} {json.dumps(identity)}".encode(), digest_size=16
    ).hexdigest()
    remark = "data.streaming: these figures are of the first rows of each source"
    remarks = (*filter(None, (tokeniser.left_out.check(),)), remark)
    sample.report = replace(sample.report, remarks=(*sample.report.remarks, *remarks))
    weights = {name: source.weight for name, source in zip(name_sources(given), given, strict=True)}
    mixture = make_mixture(data.stages, weights, examples_per_step, seed)
    stream = Stream(streams, mixture, objective, examples_per_step, sample.report, stack)
    evaluated = prepare(data, tokenizer, objective, seed=seed, day=day, first_rows=sample, model=model)
    return replace(evaluated, stream=stream)
