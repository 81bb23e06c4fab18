"""One pass over the tokens of all stores, in blocks of documents, by arrays: what the statistics and the audit need of them.

Blocks are read, not mapped, and in a few threads, so memory stays small however large the data is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from packtrain.data.tokens.cache import Store
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.duplicates import HASHES, SAMPLE, Fingerprints, find_common_grams, sign
from packtrain.inspect.roles import PARTS, Headers, learn_headers

BLOCK = 1 << 19
"""Tokens that are read together."""
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class TokenScan:
    """What the tokens of each document show, by its number (corpus.py).

    bool[documents]: whether it trains the end of an answer (`ends`), two ends in a row (`ends_twice`), begins with two BOS
    (`two_bos`), has a token for what the tokenizer does not know (`unknown`), or ends inside a trained answer (`open`).
    `roles`: tokens, trained tokens and turns by role, of the trained documents.
    """

    fingerprints: Fingerprints
    ends: np.ndarray
    ends_twice: np.ndarray
    two_bos: np.ndarray
    unknown: np.ndarray
    open: np.ndarray
    roles: dict[str, np.ndarray]


def scan(corpus: Corpus) -> TokenScan:
    """Reads every token of the corpus's stores."""
    headers, total = learn_headers(corpus.chat), len(corpus.lengths)
    sample = np.unique(np.linspace(0, total - 1, min(SAMPLE, total)).astype(int))
    common = find_common_grams([corpus.read(int(number)) for number in sample])
    prints = Fingerprints(
        np.empty(total, np.uint64), np.zeros((total, HASHES), np.uint32), np.zeros(total, bool), common
    )
    flags = {name: np.zeros(total, bool) for name in ("ends", "ends_twice", "two_bos", "unknown", "open")}

    def scan_block(block: tuple[int, int, int]) -> np.ndarray:
        store_number, first, end = block
        store = corpus.stores[store_number]
        ids, mask = store.read(first, end)
        lengths = store.lengths[first:end].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        inside = slice(*(int(corpus.first_documents[store_number]) + at for at in (first, end)))
        sign(ids, lengths, common, prints.signatures[inside], prints.compared[inside])
        prints.hashes[inside] = _hash_documents(ids, lengths, starts)
        for name, values in _find_flags(corpus, ids, mask, lengths, starts).items():
            flags[name][inside] = values
        return _count_roles(headers, ids, mask, starts, corpus.times[inside])

    blocks = list(_cut_blocks(corpus.stores))
    with ThreadPoolExecutor(THREADS) as threads:
        counted = list(threads.map(scan_block, blocks))
    roles: dict[str, np.ndarray] = {}
    for (store_number, _, _), part in zip(blocks, counted, strict=True):
        names = (*headers.names, *PARTS.get(corpus.stores[store_number].format, ("prompt", "answer")))
        if names[-1] == names[-2]:
            part[2, -1] = 0  # one turn, not two parts of it
        for name, figures in zip(names, part.T, strict=True):
            roles[name] = roles.get(name, 0) + figures
    return TokenScan(prints, **flags, roles={name: figures for name, figures in roles.items() if figures[0]})


def _cut_blocks(stores: tuple[Store, ...]) -> Iterator[tuple[int, int, int]]:
    """(store, first document, end) of blocks of about BLOCK tokens."""
    for number, store in enumerate(stores):
        ends = np.cumsum(store.lengths, dtype=np.int64)
        first = 0
        while first < len(store):
            before = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
            yield number, first, end
            first = end


def _hash_documents(ids: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """uint64[documents]: a hash of the tokens and their places, Σ hash of the token · (2 · place + 1)."""
    values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    alone = np.add.reduceat(values, starts)
    placed = np.add.reduceat(values * np.arange(len(values), dtype=np.uint64), starts)
    return np.uint64(2) * (placed - starts.astype(np.uint64) * alone) + alone + lengths.astype(np.uint64)


def _find_flags(
    corpus: Corpus, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, starts: np.ndarray
) -> dict[str, np.ndarray]:
    """The flags of TokenScan for the documents of a block."""
    is_end = np.isin(ids, corpus.end_ids)
    trained = np.flatnonzero(is_end & mask)
    document = np.searchsorted(starts, trained, side="right") - 1
    ends, twice, two_bos = (np.zeros(len(lengths), bool) for _ in range(3))
    ends[document] = True
    # with at most one token between them, such as a line end: a header of another turn has more
    twice[document[1:][(np.diff(document) == 0) & (np.diff(trained) <= 2)]] = True
    if (bos := corpus.tokenizer.bos_id) is not None:
        two_bos = (lengths > 1) & (ids[starts] == bos) & (ids[np.minimum(starts + 1, len(ids) - 1)] == bos)
    unknown = np.logical_or.reduceat(ids == (-1 if corpus.unknown is None else corpus.unknown), starts)
    last = starts + lengths - 1
    opened = mask[last] & ~is_end[last]
    return {"ends": ends, "ends_twice": twice, "two_bos": two_bos, "unknown": unknown, "open": opened}


def _count_roles(
    headers: Headers, ids: np.ndarray, mask: np.ndarray, starts: np.ndarray, times: np.ndarray
) -> np.ndarray:
    """int64[3, roles]: tokens, trained tokens and turns of each role; the last two roles are the two parts.

    Documents count as often as they are trained on: `times` int64[documents].
    """
    names = len(headers.names)
    places, roles = headers.find(ids)
    has_header = np.zeros(len(starts), bool)
    has_header[np.searchsorted(starts, places, side="right") - 1] = True
    role_at = np.full(len(ids), -1)  # of the tokens at which a turn begins
    role_at[starts] = np.where(has_header, 0, names)
    role_at[places] = roles
    at = np.flatnonzero(role_at >= 0)
    tokens = np.diff(np.append(at, len(ids)))
    trained = np.add.reduceat(mask, at, dtype=np.int64)
    weight = times[np.searchsorted(starts, at, side="right") - 1]
    counts = np.zeros((3, names + 2), np.int64)
    for row, figures in enumerate((tokens, trained, 1)):
        counts[row] = np.bincount(role_at[at], weights=weight * figures, minlength=names + 2)
    whole, learned, number = counts[:, names]
    counts[:, names + 1], counts[:, names] = (learned, learned, number), (whole - learned, 0, number)
    return counts
