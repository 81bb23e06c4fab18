"""Scan of all tokens for the audit: one pass over arrays, in blocks of documents.

Blocks are read, not mapped, in a few threads. Memory stays small for any size of data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from packtrain.data.tokens.cache import Store
from packtrain.inspect.corpus import Corpus

BLOCK = 1 << 19
"""Tokens read together."""
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class TokenScan:
    """Properties of each document's tokens, by its number (corpus.py).

    `hashes`: uint64 of all tokens. The others are bool. The document trains the end of an answer (`ends`) or two ends in a row
    (`ends_twice`), begins with two BOS (`two_bos`), has a token for text that the tokenizer does not know (`unknown`), or ends inside a
    trained answer (`open`).
    """

    hashes: np.ndarray
    ends: np.ndarray
    ends_twice: np.ndarray
    two_bos: np.ndarray
    unknown: np.ndarray
    open: np.ndarray


def scan(corpus: Corpus) -> TokenScan:
    """Read every token of the corpus's stores."""
    total = len(corpus.lengths)
    scanned = TokenScan(np.empty(total, np.uint64), *(np.zeros(total, bool) for _ in range(5)))

    def scan_block(block: tuple[int, int, int]) -> None:
        store_number, first, end = block
        store = corpus.stores[store_number]
        ids, mask = store.read(first, end)
        lengths = store.lengths[first:end].astype(np.int64)
        inside = slice(*(int(corpus.first_documents[store_number]) + at for at in (first, end)))
        scanned.hashes[inside] = hash_documents(ids, lengths)
        _set_flags(scanned, inside, corpus, ids, mask, lengths)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(scan_block, _cut_blocks(corpus.stores)))
    return scanned


def _cut_blocks(stores: tuple[Store, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (store, first document, end) of blocks of about BLOCK tokens."""
    for number, store in enumerate(stores):
        ends = np.cumsum(store.lengths, dtype=np.int64)
        first = 0
        while first < len(store):
            before = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
            yield number, first, end
            first = end


def _set_flags(
    scanned: TokenScan, inside: slice, corpus: Corpus, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> None:
    """Set the flags of the documents `inside`, a block of `ids` int32[T] and `mask` bool[T]."""
    starts = np.cumsum(lengths) - lengths
    last = starts + lengths - 1
    is_end = np.isin(ids, corpus.end_ids)
    trained = np.flatnonzero(is_end & mask)
    document = np.searchsorted(starts, trained, side="right") - 1
    scanned.ends[inside][document] = True
    # with at most one token between them, such as a line end: the header of another turn has more
    scanned.ends_twice[inside][document[1:][(np.diff(document) == 0) & (np.diff(trained) <= 2)]] = True
    if (bos := corpus.tokenizer.bos_id) is not None:
        second = ids[np.minimum(starts + 1, len(ids) - 1)]
        scanned.two_bos[inside] = (lengths > 1) & (ids[starts] == bos) & (second == bos)
    if corpus.unknown_id is not None:
        scanned.unknown[inside] = np.logical_or.reduceat(ids == corpus.unknown_id, starts)
    scanned.open[inside] = mask[last] & ~is_end[last]


def hash_documents(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash documents lying end to end: uint64[documents]. A hash covers tokens and places: Σ hash of the token · (2 · place + 1)."""
    starts = np.cumsum(lengths) - lengths
    values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    plain = np.add.reduceat(values, starts)
    placed = np.add.reduceat(values * np.arange(len(values), dtype=np.uint64), starts)
    return np.uint64(2) * (placed - starts.astype(np.uint64) * plain) + plain + lengths.astype(np.uint64)


def find_equal(hashes: np.ndarray) -> np.ndarray:
    """Return the place of the first equal value: int64[n]. The first itself has -1."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.where(first[inverse] == np.arange(len(hashes)), -1, first[inverse])
