"""Documents that are almost the same, among millions: MinHash signatures, buckets of equal parts of them, and a check by all n-grams.

Two documents are near duplicates if at least SIMILAR of the n-grams of tokens in either are in both (Jaccard). A signature is the
smallest of each of HASHES functions of a document's n-grams; two documents agree in each with the probability of their Jaccard
similarity (Broder 1997). Documents that agree in all of a band of the signature are candidates; the likelier half of these is
compared n-gram by n-gram. N-grams that many documents share (system prompts, headers of the template) do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GRAM = 4
SIMILAR = 0.8
BANDS, BAND = 6, 4
HASHES = BANDS * BAND
FEWEST = 32
"""N-grams of a document that is compared."""
COMMON = 0.02
"""An n-gram that more than this part of the documents of a sample have does not count."""
SAMPLE = 2000
FEW = 8
"""Documents that say nothing of what is common."""
MOST_CHECKED = 20_000
"""Candidates that are compared n-gram by n-gram: of more, that many by chance."""
_BITS = 18
_MULTIPLIERS = (np.random.default_rng(7).integers(0, 2**31, HASHES, np.uint32) * 2 + 1).astype(np.uint32)
_BLOCK = 1 << 18


@dataclass(frozen=True, eq=False)
class Signatures:
    """uint32[documents, HASHES]; `compared` bool[documents]: those that have enough n-grams of their own."""

    values: np.ndarray
    compared: np.ndarray


def grams(ids: np.ndarray) -> np.ndarray:
    """uint32[T]: a hash of the GRAM tokens from each place on; the last ones wrap around."""
    mixed = ids.astype(np.uint32) * np.uint32(2654435761)
    mixed ^= mixed >> np.uint32(15)
    hashed = mixed.copy()
    for offset in range(1, GRAM):
        hashed *= np.uint32(0x85EBCA6B)
        hashed[:-offset] += mixed[offset:]
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> np.uint32(13)
    return hashed


def whole(lengths: np.ndarray) -> np.ndarray:
    """bool[T]: the places from which GRAM tokens are in one document."""
    inside = np.ones(int(lengths.sum()), bool)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    for offset in range(1, GRAM):
        inside[np.maximum(ends - offset, starts)] = False
    inside[starts[lengths < GRAM]] = False
    return inside


def common_grams(samples: Sequence[np.ndarray]) -> np.ndarray:
    """bool[2 ** _BITS]: the n-grams, by the first bits of their hash, that many of the documents `samples` have."""
    table = np.zeros(1 << _BITS, bool)
    found = [
        np.unique(grams(ids)[: len(ids) - GRAM + 1] >> np.uint32(32 - _BITS)) for ids in samples if len(ids) >= GRAM
    ]
    if len(found) < FEW:
        return table
    values, times = np.unique(np.concatenate(found), return_counts=True)
    table[values[times > max(3, COMMON * len(found))]] = True
    return table


def signatures_of(
    hashed: np.ndarray, lengths: np.ndarray, common: np.ndarray, values: np.ndarray, compared: np.ndarray
) -> None:
    """Writes the signatures of documents end to end, whose `grams` are `hashed` uint32[T], into the fields of Signatures."""
    kept = whole(lengths) & ~common[hashed >> np.uint32(32 - _BITS)]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    number = np.add.reduceat(kept, starts, dtype=np.int64)
    compared[:] = number >= FEWEST
    if compared.any():
        kept &= np.repeat(compared, lengths)
        own = hashed[kept]
        first = np.cumsum(number[compared]) - number[compared]
        for at, multiplier in enumerate(_MULTIPLIERS):
            values[compared, at] = np.minimum.reduceat(own * multiplier, first)


def candidates(signatures: Signatures, chosen: np.ndarray, eldest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each document of `chosen` (numbers) the likeliest earlier one of its buckets and how alike their signatures are.

    int64[chosen], -1 for none, and float[chosen]. A bucket's first document stands for it: the one with the lowest `eldest`
    int[chosen].
    """
    best = np.full(len(chosen), -1, np.int64)
    alike = np.zeros(len(chosen))
    usable = np.flatnonzero(signatures.compared[chosen])
    usable = usable[np.argsort(eldest[usable], kind="stable")]
    for band in range(BANDS):
        part = signatures.values[chosen[usable], band * BAND : (band + 1) * BAND].astype(np.uint64)
        key = np.zeros(len(usable), np.uint64)
        for column in part.T:
            key = (key ^ column) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        order = np.argsort(key, kind="stable")
        key = key[order]
        first = np.append(True, key[1:] != key[:-1]) if len(key) else np.empty(0, bool)
        leader = usable[order[np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))]]
        member = usable[order]
        leader, member = leader[~first], member[~first]
        for at in range(0, len(member), _BLOCK):
            one, other = member[at : at + _BLOCK], leader[at : at + _BLOCK]
            same = (signatures.values[chosen[one]] == signatures.values[chosen[other]]).mean(1)
            better = same > alike[one]
            best[one[better]], alike[one[better]] = chosen[other[better]], same[better]
    return best, alike


def similarity(one: np.ndarray, other: np.ndarray, common: np.ndarray) -> float:
    """The Jaccard similarity of two documents' n-grams that are not `common`."""
    sets = []
    for ids in (one, other):
        hashed = grams(ids)[: max(0, len(ids) - GRAM + 1)]
        sets.append(np.unique(hashed[~common[hashed >> np.uint32(32 - _BITS)]]))
    both = len(np.intersect1d(*sets, assume_unique=True))
    return both / max(1, len(sets[0]) + len(sets[1]) - both)
