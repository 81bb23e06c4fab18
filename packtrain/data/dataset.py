"""Data sets for training: documents or preference pairs by index, with a report.

A TokenDataset is a list of stores (one for each tokenised source) and a list of row numbers. Weights, held-out fractions and mixtures only
change the row numbers; no token is copied. A PairDataset reads two documents at a time. The documents of an UnpairedDataset are
desirable or not. A pair's prompt is everything before the first trained target of either document.

A `Mixture` (data.stages, and streams) gives the source of example m of a run, for any m. Examples are drawn in blocks of BLOCK. In each block
every source has exactly its share, in an order by (seed, stage, block). This depends neither on the length of the run nor on the number of
ranks, so a run can resume from any step, and may become longer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, starmap

import numpy as np

from packtrain.config.schema import DataSource, Stage, name_sources
from packtrain.data.formats.columns import name_unread
from packtrain.data.pictures.album import tabulate_pictures
from packtrain.data.pictures.tally import PictureFigures, count_pictures
from packtrain.data.tokens.cache import REASONS, Document, Store
from packtrain.errors import UserError
from packtrain.wording import counted

MIN_PROMPT = 2
"""Shortest prompt in tokens worth computing once: its last token predicts the answer, so it runs in front of each answer."""


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Figures of preference pairs.

    `prompt_share` is the prompts' share of all tokens, each prompt counted in both documents of its pair. Computing prompts once saves
    half of this share. It is possible for `shareable` of the `pairs`: their prompts have at least two tokens.
    """

    pairs: int
    prompt_share: float
    shareable: int


@dataclass(frozen=True, slots=True)
class LabelFigures:
    """Numbers of desirable and undesirable answers in an epoch."""

    desirable: int
    undesirable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Report on a data set. Each row is either kept or dropped: rows == kept + sum(dropped.values()).

    The fields from `rows` to `two_bos` cover all rows of the sources, or the rows on this side of the split if data.eval is a fraction.
    `cut_tokens` were lost to data.max_length; `dropped_chunks` are parts of split documents, and answers by turns, without a trained token. `apart`
    counts kept rows with a token across an answer's border (tokens/encode.py). `retold` counts rows that TRL's training version of the chat template renders,
    since the model's own template gives no exact loss mask for them. `turns_asked`, `turns_thoughts` and `turns_answers` count rows with a
    document for each answer, by the reason (REASONS in tokens/cache.py). `tools_in_system` counts rows whose system prompt lists their tools
    already, so that the template got none. `two_bos` counts rows that begin with BOS twice. The fields from
    `documents` to `trained_tokens` describe one epoch, with weights; there are fewer `examples` than documents if rows give several that are drawn
    together. `held_out` documents are on the other side. `seconds` is the tokenising time (0 if all was cached), `remarks` are decisions about
    a source, `unread` has the sources' columns from Row.unread.
    """

    dropped: dict[str, int]
    rows: int = 0
    kept: int = 0
    truncated: int = 0
    split: int = 0
    dropped_chunks: int = 0
    cut_tokens: int = 0
    apart: int = 0
    retold: int = 0
    turns_asked: int = 0
    turns_thoughts: int = 0
    turns_answers: int = 0
    tools_in_system: int = 0
    two_bos: int = 0
    documents: int
    examples: int = 0
    tokens: int
    trained_tokens: int
    held_out: int = 0
    format: str
    sources: tuple[str, ...]
    seconds: float
    pairs: PairFigures | None = None
    labels: LabelFigures | None = None
    pictures: PictureFigures | None = None
    remarks: tuple[str, ...] = ()
    unread: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    def decisions(self) -> list[str]:
        """Return `remarks`, decisions about single rows, and unread columns."""
        ways = [
            (self.apart, "tokenised in parts, as a token would lie over the border of an answer"),
            (self.retold, "rendered by TRL's training version of the chat template, for an exact loss mask"),
            (self.tools_in_system, "list their tools in the system prompt, so the chat template does not"),
            (self.two_bos, "begin with BOS twice: their text holds it, too, so take it out there"),
        ]
        for name, why in zip(TURNS, REASONS[1:], strict=True):
            ways.append((getattr(self, name), f"by turns, each answer as it will be asked for: {why}"))
        said = [f"{counted(rows, 'rows')} {way}" for rows, way in ways if rows]
        return [*self.remarks, *said, *chain.from_iterable(starmap(name_unread, self.unread.items()))]


TURNS = ("turns_asked", "turns_thoughts", "turns_answers")
"""Figures of a DataReport that count kept rows by turns, in the order of REASONS."""
SUMMED = ("truncated", "split", "dropped_chunks", "cut_tokens", "apart", "retold", "tools_in_system", "two_bos")
"""Figures of a DataReport that are sums over the fates of kept rows."""


def sum_fates(fates: np.ndarray) -> dict[str, int]:
    """Return the figures of kept rows in a DataReport: SUMMED and TURNS."""
    sums = {name: int(fates[name].sum(dtype=np.int64)) for name in SUMMED}
    turns = {name: int(np.count_nonzero(fates["turns"] == why)) for why, name in enumerate(TURNS, 1)}
    return {"kept": len(fates), **sums, **turns}


class TokenDataset:
    """Documents for training. They pickle with stores as paths, so that loader processes share the mapped files.

    lengths: int32[n], tokens of each document. trained: int32[n], its trained targets. first: int64[stores + 1], the row number
    of each store's first document. examples: int64[m + 1], the borders of the examples, if some have several documents; else None: each
    document is one. `fingerprint` changes whenever a token, a mask, an example or the order changes.
    """

    def __init__(self, stores: Sequence[Store], rows: np.ndarray, report: DataReport) -> None:
        """Select `rows` int64[n], numbered through the stores one after the other."""
        self.stores, self.rows, self.report = tuple(stores), rows, report
        self.first = np.concatenate([[0], np.cumsum([len(store) for store in self.stores])]).astype(np.int64)
        self.lengths: np.ndarray = np.concatenate([store.lengths for store in self.stores])[rows]
        self.trained: np.ndarray = np.concatenate([store.trained for store in self.stores])[rows]
        self.fingerprint = _hash("".join(store.fingerprint for store in self.stores).encode(), rows)
        begins = np.concatenate([begin_examples(store) for store in self.stores])[rows]
        self.examples = None if begins.all() else np.append(np.flatnonzero(begins), len(rows))
        if self.examples is not None:
            self.fingerprint = _hash(self.fingerprint.encode(), self.examples)

    @cached_property
    def source_of(self) -> np.ndarray:
        """Return the number of each document's source, in report.sources: int16[n]."""
        return (np.searchsorted(self.first, self.rows, side="right") - 1).astype(np.int16)

    def part(self, first: int, end: int) -> TokenDataset:
        """Return the documents from number `first` to before `end`, with the report of the whole."""
        return TokenDataset(self.stores, self.rows[first:end], self.report)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        """Return document number `index`, 0 to len - 1."""
        row = self.rows[index]
        store = int(np.searchsorted(self.first, [row], side="right")[0]) - 1
        return self.stores[store][int(row - self.first[store])]


@dataclass(frozen=True, slots=True)
class Preference:
    """One pair: both documents begin with the same `prompt` tokens. All later tokens are targets.

    `prompt` is 0 if it has fewer than MIN_PROMPT tokens.
    """

    chosen: Document
    rejected: Document
    prompt: int


class PairDataset:
    """Pairs for training; they pickle like their documents.

    lengths: int32[n], tokens of both documents of a pair, with the prompt in each. shared_lengths: int32[n], its tokens if
    the prompt (except its last token) is computed once. trained: int32[n], its targets. prompts: int32[n], see
    Preference. margins: float32[n], only `with_margins`. `fingerprint` changes whenever a token, a mask, a margin or the
    order changes.
    """

    def __init__(self, documents: TokenDataset, *, with_margins: bool = False) -> None:
        """Pair up `documents`: chosen, rejected, chosen, rejected, …"""
        self.documents, self.fingerprint, self.stores = documents, documents.fingerprint, documents.stores
        self.examples = None
        lengths, trained = documents.lengths, documents.trained
        before = (lengths - trained)[::2]
        self.lengths: np.ndarray = lengths[::2] + lengths[1::2]
        self.trained: np.ndarray = trained[::2] + trained[1::2]
        self.prompts: np.ndarray = np.where(before >= MIN_PROMPT, before, 0)
        self.shared_lengths: np.ndarray = self.lengths - np.maximum(self.prompts - 1, 0)
        share = 2 * int(before.sum(dtype=np.int64)) / int(lengths.sum(dtype=np.int64))
        figures = PairFigures(len(before), round(share, 4), int(np.count_nonzero(self.prompts)))
        self.report: DataReport = replace(documents.report, pairs=figures)
        if with_margins:
            margins = [np.repeat(store.fates["margin"], store.fates["documents"]) for store in documents.stores]
            self.margins: np.ndarray = np.concatenate(margins)[documents.rows[::2]]
            self.fingerprint = _hash(documents.fingerprint.encode(), self.margins)

    @cached_property
    def source_of(self) -> np.ndarray:
        """Return the number of each pair's source: int16[n]."""
        return self.documents.source_of[::2]

    @cached_property
    def rows(self) -> np.ndarray:
        """Return the number of each pair through the stores: int64[n]."""
        return self.documents.rows[::2] // 2

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Preference:
        """Return pair number `index`, 0 to len - 1."""
        chosen, rejected = self.documents[2 * index], self.documents[2 * index + 1]
        return Preference(chosen, rejected, int(self.prompts[index]))


class UnpairedDataset(TokenDataset):
    """Answers for training: labelled documents.

    trained: int32[n], the targets of each: all tokens after the prompt. labels: bool[n], True for desirable answers. `fingerprint`
    changes whenever a token, a mask, a label or the order changes.
    """

    def __init__(self, documents: TokenDataset) -> None:
        self.__dict__.update(documents.__dict__)
        self.labels: np.ndarray = np.concatenate([store.labels() for store in documents.stores])[documents.rows]
        self.fingerprint = _hash(documents.fingerprint.encode(), self.labels)
        desirable = int(np.count_nonzero(self.labels))
        self.report = replace(documents.report, labels=LabelFigures(desirable, len(self.labels) - desirable))


Dataset = TokenDataset | PairDataset
"""The training data of an objective."""


def has_pictures_in(data: Dataset) -> bool:
    """Return whether documents of the data's sources have pictures."""
    documents = data.documents if isinstance(data, PairDataset) else data
    return any(bool(store.pictures) for store in documents.stores)


def begin_examples(store: Store, together: int = 1) -> np.ndarray:
    """Return which documents begin an example: bool[n].

    An example has all documents of a row by turns, or `together` documents (2 of a pair), or else one.
    """
    if together > 1:
        return np.arange(len(store)) % together == 0
    documents = store.fates["documents"]
    begins = np.repeat(store.fates["turns"] == 0, documents)
    begins[(np.cumsum(documents, dtype=np.int64) - documents)[documents > 0]] = True
    return begins


def list_members(borders: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the members of the `chosen` groups: int64. Group g has the numbers from `borders`[g] to before `borders`[g + 1]."""
    sizes = np.diff(borders)[chosen]
    ends = np.cumsum(sizes)
    return np.repeat(borders[chosen] + sizes - ends, sizes) + np.arange(sizes.sum())


def _hash(fingerprint: bytes, values: np.ndarray) -> str:
    return hashlib.blake2b(fingerprint + values.tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Tokenised:
    """Documents of a source in their `store`. `built`: this process made the store; else the cache had it. `remark` is about the source."""

    source: DataSource
    store: Store
    built: bool
    remark: str = ""


def hold_out(parts: Sequence[Tokenised], fraction: float) -> list[np.ndarray]:
    """Choose the held-out rows of each part: bool[rows of its source]. Takes `fraction` of the different rows.

    The rows with the lowest content hashes are held out, which is as good as random. Equal rows, all parts of a split row and pairs with
    the same prompt fall on the same side, independent of how they are tokenised. UserError unless each side has a document.
    """
    content = np.concatenate([part.store.fates["content"] for part in parts])
    different, inverse = np.unique(content, return_inverse=True)
    held = inverse < max(1, round(fraction * len(different)))
    documents = np.concatenate([part.store.fates["documents"] for part in parts])
    if not (documents[held].any() and documents[~held].any()):
        rows = f"{len(content)} rows ({len(different)} different)"
        what = f"cannot hold out {fraction:g} of {rows}: one side would be empty"
        fix = "Give data.eval a source of its own, or more rows (of .txt files with data.split_text=line or paragraph)."
        raise UserError(what, where="data.eval", fix=fix, code="empty-side")
    return np.split(held, np.cumsum([len(part.store.fates) for part in parts])[:-1])


def mix_sources(
    parts: Sequence[Tokenised],
    key: str,
    seed: int,
    *,
    together: int = 1,
    kept: Sequence[np.ndarray] | None = None,
    weigh: bool = True,
) -> TokenDataset:
    """Return all parts with their report, each part repeated by its weight (once, unless `weigh`).

    Examples are drawn whole (`begin_examples`). `key` is the config key that errors name. `kept` selects rows, a bool[rows] for each part.
    """
    stores = [part.store for part in parts]
    kept = [np.ones(len(store.fates), bool) for store in stores] if kept is None else kept
    rows, sums, dropped, first = list[np.ndarray](), Counter[str](), Counter[str](), 0
    for number, (part, here) in enumerate(zip(parts, kept, strict=True)):
        store, weight, samples = part.store, part.source.weight, part.source.samples
        inside = np.repeat(here, store.fates["documents"])
        own = first + np.flatnonzero(inside)
        starts = np.flatnonzero(begin_examples(store, together)[inside])
        weight = weight if samples is None else samples / max(len(starts), 1)
        first += len(store)
        sums["held_out"] += len(store) - len(own)
        if len(own):
            chosen = np.arange(len(starts))
            chosen = _repeat_by_weight(chosen, part.source, weight, number, seed, key) if weigh else chosen
            rows.append(own[list_members(np.append(starts, len(own)), chosen)])
            sums["examples"] += len(chosen)
        fates = store.fates[here]
        times = np.bincount(fates["dropped"], minlength=1).tolist()
        dropped.update({store.reasons[reason]: times[reason] for reason in range(1, len(times)) if times[reason]})
        sums.update(sum_fates(fates[fates["dropped"] == 0]))
    all_rows = np.concatenate(rows)
    names = name_sources([part.source for part in parts])
    table = tabulate_pictures((store.pictures, len(store)) for store in stores)
    report = DataReport(
        rows=sums["kept"] + dropped.total(),
        dropped=dict(dropped),
        documents=len(all_rows),
        tokens=int(np.concatenate([store.lengths for store in stores])[all_rows].sum(dtype=np.int64)),
        trained_tokens=int(np.concatenate([store.trained for store in stores])[all_rows].sum(dtype=np.int64)),
        format=", ".join(dict.fromkeys(store.format for store in stores)),
        sources=names,
        seconds=sum(part.store.seconds for part in parts if part.built),
        remarks=tuple(part.remark for part in parts if part.remark),
        unread={name: store.unread for name, store in zip(names, stores, strict=True) if store.unread},
        pictures=count_pictures(table, np.bincount(all_rows, minlength=first)),
    )
    return TokenDataset(stores, all_rows, replace(report, **sums))


def _repeat_by_weight(
    examples: np.ndarray, source: DataSource, weight: float, number: int, seed: int, key: str
) -> np.ndarray:
    """Repeat `examples` int64[n] floor(weight) times, and once more a random part for the weight's fraction.

    (seed, number of the source) fix the random part; it stays in order. Raises UserError if the weight takes no example.
    """
    whole, part = int(weight), weight - int(weight)
    extra = np.random.default_rng([seed, 2, number]).permutation(len(examples))[: round(part * len(examples))]
    taken = np.concatenate([*[examples] * whole, examples[np.sort(extra)]])
    if not len(taken):
        what = f"weight={weight:g} selects none of the {len(examples):,} documents of {source.path}"
        raise UserError(what, where=key, fix="Raise its weight, or remove the source.", code="weight-too-small")
    return taken


BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the sources in each stage. The `shares` of a stage add up to 1. `first` has the number of each stage's first example, from 0."""

    first: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    seed: int

    def sources(self, first: int, end: int) -> np.ndarray:
        """Return the source of each example from `first` to before `end`: int16 [end - first]."""
        parts = list[np.ndarray]()
        while first < end:
            stage = self.stage_of(first)
            block, within = divmod(first - self.first[stage], BLOCK)
            last = min((end, *self.first[stage + 1 : stage + 2]))
            parts.append(_draw_block(self.shares[stage], self.seed, stage, block)[within:][: last - first])
            first += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int16)

    def counts(self, end: int) -> np.ndarray:
        """Return how many examples before number `end` come from each source: int64 [sources]."""
        total = np.zeros(len(self.shares[0]), np.int64)
        for stage, start in enumerate(self.first):
            stop = min((end, *self.first[stage + 1 : stage + 2]))
            if stop > start:
                blocks, rest = divmod(stop - start, BLOCK)
                total += blocks * _share_out(self.shares[stage])
                drawn = _draw_block(self.shares[stage], self.seed, stage, blocks)
                total += np.bincount(drawn[:rest], minlength=len(total))
        return total

    def stage_of(self, example: int) -> int:
        """Return the number of an example's stage."""
        return sum(start <= example for start in self.first) - 1


def make_mixture(stages: Sequence[Stage], weights: Mapping[str, float], examples_per_step: int, seed: int) -> Mixture:
    """Make the mixture of `stages` over the sources' names. Without stages, `weights` hold for the whole run."""
    given = [stage.weights for stage in stages] or [weights]
    rows = [[float(stage.get(name, 0)) for name in weights] for stage in given]
    ends = [stage.until * examples_per_step for stage in stages if stage.until is not None]
    shares = tuple(tuple(weight / sum(row) for weight in row) for row in rows)
    return Mixture((0, *ends), shares, seed)


def _share_out(shares: tuple[float, ...]) -> np.ndarray:
    """Return the examples of each source in a block: int64 [sources]. Any positive share gives at least one."""
    exact = BLOCK * np.array(shares)
    counts = np.maximum(np.floor(exact), exact > 0).astype(np.int64)
    by_rest = np.argsort(counts - exact, kind="stable")
    counts[by_rest[: max(BLOCK - int(counts.sum()), 0)]] += 1
    counts[counts.argmax()] += BLOCK - int(counts.sum())
    return counts


@lru_cache(maxsize=16)
def _draw_block(shares: tuple[float, ...], seed: int, stage: int, block: int) -> np.ndarray:
    counts = _share_out(shares)
    return np.random.default_rng([seed, 3, stage, block]).permutation(
        np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    )
