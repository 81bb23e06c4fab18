"""One pass over the tokens of all stores, in blocks of documents, by arrays: what the statistics and the audit need of them.

Blocks are read, not mapped, and in a few threads, so memory stays small however large the data is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packtrain.data.tokens.cache import Store
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.scan.near_duplicates import HASHES, SAMPLE, Signatures, common_grams, grams, signatures_of
from packtrain.inspect.scan.roles import PARTS, Headers, headers_of
from packtrain.inspect.scan.vocabulary import LATIN, SCRIPTS, Vocabulary

BLOCK = 1 << 19
"""Tokens that are looked at together."""
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class TokenScan:
    """Of each document, by its number (corpus.py): `hashes` uint64 of all its tokens, `signatures` of its n-grams.

    bool[documents]: whether it trains the end of an answer (`ends`), two ends in a row (`ends_twice`), begins with two BOS
    (`two_bos`), has a token for what the tokenizer does not know (`unknown`), or ends inside a trained answer (`open`). `script`
    uint8 is that of most of its letters. `roles`: tokens, trained tokens and turns by role, of the trained documents.
    """

    hashes: np.ndarray
    signatures: Signatures
    common: np.ndarray
    ends: np.ndarray
    ends_twice: np.ndarray
    two_bos: np.ndarray
    unknown: np.ndarray
    open: np.ndarray
    script: np.ndarray
    roles: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class _Scanner:
    """The corpus and what is known of its tokenizer and template, for the scan of one block after another."""

    corpus: Corpus
    vocabulary: Vocabulary
    headers: Headers
    common: np.ndarray

    @cached_property
    def is_end(self) -> np.ndarray:
        return self.vocabulary.table(self.corpus.end_ids)

    @cached_property
    def random(self) -> np.ndarray:
        return np.random.default_rng(5).integers(0, 2**64, len(self.vocabulary), np.uint64)

    def scan(self, block: tuple[int, int, int], found: dict[str, np.ndarray]) -> np.ndarray:
        """Writes what a block's documents are into the arrays `found` of all documents; returns what roles say in them."""
        number, first, end = block
        store = self.corpus.stores[number]
        ids, mask = store.read(first, end)
        lengths = store.lengths[first:end].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        inside = slice(int(self.corpus.first_documents[number]) + first, int(self.corpus.first_documents[number]) + end)
        signatures_of(grams(ids), lengths, self.common, found["signatures"][inside], found["compared"][inside])
        found["hashes"][inside] = self._hashes(ids, lengths, starts)
        found["script"][inside] = self._script(ids, lengths, starts)
        for name, values in self._ends(ids, mask, lengths, starts).items():
            found[name][inside] = values
        if (bos := self.corpus.tokenizer.bos_id) is not None:
            second = np.minimum(starts + 1, len(ids) - 1)
            found["two_bos"][inside] = (lengths > 1) & (ids[starts] == bos) & (ids[second] == bos)
        if self.corpus.unknown is not None:
            found["unknown"][inside] = np.logical_or.reduceat(ids == self.corpus.unknown, starts)
        return self._roles(ids, mask, lengths, starts, self.corpus.times[inside])

    def _hashes(self, ids: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """A hash of the tokens and their places: Σ random(token) · (2 · place + 1)."""
        values = self.random[ids]
        alone = np.add.reduceat(values, starts)
        values *= np.arange(len(ids), dtype=np.uint64)
        placed = np.add.reduceat(values, starts)
        return np.uint64(2) * (placed - starts.astype(np.uint64) * alone) + alone + lengths.astype(np.uint64)

    def _script(self, ids: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        scripts = self.vocabulary.scripts[ids]
        times = np.zeros((len(lengths), len(SCRIPTS)), np.int64)
        times[:, LATIN] = np.add.reduceat(scripts == LATIN, starts, dtype=np.int64)
        others = np.flatnonzero(scripts > LATIN)
        np.add.at(times, (np.searchsorted(starts, others, side="right") - 1, scripts[others]), 1)
        return times.argmax(1).astype(np.uint8)

    def _ends(
        self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, starts: np.ndarray
    ) -> dict[str, np.ndarray]:
        trained = np.flatnonzero(self.is_end[ids] & mask)
        of = np.searchsorted(starts, trained, side="right") - 1
        ends, twice = np.zeros(len(lengths), bool), np.zeros(len(lengths), bool)
        ends[of] = True
        apart = np.diff(trained)
        again = (np.diff(of) == 0) & (apart <= 3) if len(of) else np.empty(0, bool)
        for step in (1, 2):  # only white space between them
            between = np.minimum(trained[:-1] + step, len(ids) - 1)
            again &= (apart <= step) | self.vocabulary.is_space[ids[between]]
        twice[of[1:][again]] = True
        last = starts + lengths - 1
        return {"ends": ends, "ends_twice": twice, "open": mask[last] & ~self.is_end[ids[last]]}

    def _roles(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        lengths: np.ndarray,
        starts: np.ndarray,
        times: np.ndarray,
    ) -> np.ndarray:
        """int64[3, roles]: tokens, trained tokens and turns of each role; the last two roles are the two parts.

        Documents count as often as they are trained on: `times` int64[documents].
        """
        names = len(self.headers.names)
        places, roles = self.headers.find(ids)
        of = np.searchsorted(starts, places, side="right") - 1
        has = np.zeros(len(lengths), bool)
        has[of] = True
        begins = np.zeros(len(ids), bool)
        begins[places] = True
        before = starts[has & ~begins[starts]]
        at = np.concatenate([places, before, starts[~has]])
        role = np.concatenate([roles, np.zeros(len(before), np.uint8), np.full((~has).sum(), names, np.uint8)])
        order = np.argsort(at, kind="stable")
        at, role = at[order], role[order]
        tokens = np.diff(np.append(at, len(ids)))
        trained = np.add.reduceat(mask, at, dtype=np.int64)
        weight = times[np.searchsorted(starts, at, side="right") - 1]
        found = np.zeros((3, names + 2), np.int64)
        for row, figures in enumerate((tokens, trained, 1)):
            found[row] = np.bincount(role, weights=weight * figures, minlength=names + 2)
        whole, learned, number = found[:, names]
        found[:, names + 1], found[:, names] = (learned, learned, number), (whole - learned, 0, number)
        return found


def scan(corpus: Corpus, vocabulary: Vocabulary) -> TokenScan:
    """Reads every token of the corpus's stores."""
    headers = headers_of(corpus.chat)
    common = common_grams(_sample(corpus))
    scanner = _Scanner(corpus, vocabulary, headers, common)
    blocks = list(_blocks(corpus.stores))
    _ = scanner.is_end, scanner.random, vocabulary.scripts, vocabulary.is_space  # once, before the threads
    total = len(corpus.lengths)
    flags = {name: np.zeros(total, bool) for name in ("compared", "ends", "ends_twice", "two_bos", "unknown", "open")}
    found = {"hashes": np.empty(total, np.uint64), "script": np.empty(total, np.uint8), **flags}
    found["signatures"] = np.zeros((total, HASHES), np.uint32)
    with ThreadPoolExecutor(THREADS) as threads:
        said = list(threads.map(lambda block: scanner.scan(block, found), blocks))
    roles: dict[str, np.ndarray] = {}
    for (number, _, _), part in zip(blocks, said, strict=True):
        names = (*headers.names, *PARTS.get(corpus.stores[number].format, ("prompt", "answer")))
        if names[-1] == names[-2]:
            part[2, -1] = 0  # one turn, not two parts of it
        for name, figures in zip(names, part.T, strict=True):
            roles[name] = roles.get(name, 0) + figures
    signatures = Signatures(found.pop("signatures"), found.pop("compared"))
    spoken = {name: figures for name, figures in roles.items() if figures[0]}
    return TokenScan(signatures=signatures, common=common, roles=spoken, **found)


def _blocks(stores: tuple[Store, ...]) -> Iterator[tuple[int, int, int]]:
    """(store, first document, end) of blocks of about BLOCK tokens."""
    for number, store in enumerate(stores):
        ends = np.cumsum(store.lengths, dtype=np.int64)
        first = 0
        while first < len(store):
            before = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
            yield number, first, end
            first = end


def _sample(corpus: Corpus) -> list[np.ndarray]:
    """The tokens of documents spread evenly over all of them."""
    total = len(corpus.lengths)
    return [corpus.read(int(number)) for number in np.unique(np.linspace(0, total - 1, min(SAMPLE, total)).astype(int))]
