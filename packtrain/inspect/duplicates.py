"""Examples that repeat others, exactly or almost, inside what is trained, and between that and what is held out.

Two documents are near duplicates if at least SIMILAR of the n-grams of tokens in either are in both (Jaccard). A signature is the
smallest of each of HASHES functions of a document's n-grams; two documents agree in each with the probability of their Jaccard
similarity (MinHash, Broder 1997). Documents that agree in all of a band of the signature are candidates, which are compared
n-gram by n-gram. N-grams that many documents share (system prompts, headers of the template) do not count. Written with arrays,
over blocks of documents end to end: a set per document, as in datasketch, would take minutes for a million.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GRAM = 4
SIMILAR = 0.8
LIKELY = SIMILAR - 0.2
"""How alike signatures must be for documents to be compared: two standard deviations below."""
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
_RANDOM = np.random.default_rng(7)
_MULTIPLIERS = (_RANDOM.integers(0, 2**31, HASHES, np.uint32) * 2 + 1).astype(np.uint32)
_BAND_MULTIPLIERS = _RANDOM.integers(0, 2**63, BAND, np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """Of each document: `hashes` uint64 of all its tokens, `signatures` uint32[HASHES], and whether it has enough n-grams to be
    `compared`. `common` bool[2 ** _BITS] are the n-grams, by the first bits of their hash, that do not count."""

    hashes: np.ndarray
    signatures: np.ndarray
    compared: np.ndarray
    common: np.ndarray


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Examples that repeat others, both by their place in the examples, each int64[n]; `count` of them in all.

    Where there are too many to compare, `count` is estimated from a sample, and the examples are those of the sample.
    """

    repeats: np.ndarray
    originals: np.ndarray
    count: int


def hash_grams(ids: np.ndarray) -> np.ndarray:
    """uint32[T]: a hash of the GRAM tokens from each place on; the last GRAM - 1 are none."""
    mixed = ids.astype(np.uint32) * np.uint32(2654435761)
    mixed ^= mixed >> np.uint32(15)
    hashed = mixed.copy()
    for offset in range(1, GRAM):
        hashed *= np.uint32(0x85EBCA6B)
        hashed[:-offset] += mixed[offset:]
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0xC2B2AE35)
    return hashed ^ (hashed >> np.uint32(13))


def find_common_grams(samples: Sequence[np.ndarray]) -> np.ndarray:
    """bool[2 ** _BITS]: the n-grams that many of the documents `samples` have."""
    grams = [np.unique(hash_grams(ids)[: 1 - GRAM] >> np.uint32(32 - _BITS)) for ids in samples if len(ids) >= GRAM]
    times = np.bincount(np.concatenate(grams), minlength=1 << _BITS) if len(grams) >= FEW else np.zeros(1 << _BITS)
    return times > max(3, COMMON * len(grams))


def sign(
    ids: np.ndarray, lengths: np.ndarray, common: np.ndarray, signatures: np.ndarray, compared: np.ndarray
) -> None:
    """Writes the signatures of documents end to end, `ids` int32[T] of `lengths` int64[n], into the fields of Fingerprints."""
    hashed, ends = hash_grams(ids), np.cumsum(lengths)
    counts = ~common[hashed >> np.uint32(32 - _BITS)]
    for offset in range(1, GRAM):  # of the next document
        counts[np.maximum(ends - offset, ends - lengths)] = False
    number = np.add.reduceat(counts, ends - lengths, dtype=np.int64)
    compared[:] = number >= FEWEST
    if compared.any():
        hashed = hashed[counts & np.repeat(compared, lengths)]
        first = np.cumsum(number[compared]) - number[compared]
        for at, multiplier in enumerate(_MULTIPLIERS):
            signatures[compared, at] = np.minimum.reduceat(hashed * multiplier, first)


def find_candidates(signatures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of `signatures` the likeliest earlier one that agrees in a band, and how alike they are.

    int64[n], -1 for none, and float[n]. The first document of those that agree in a band stands for them.
    """
    best, alike = np.full(len(signatures), -1), np.zeros(len(signatures))
    for band in range(BANDS):
        keys = signatures[:, band * BAND : (band + 1) * BAND].astype(np.uint64) @ _BAND_MULTIPLIERS
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        later = np.flatnonzero(first[inverse] != np.arange(len(keys)))
        earlier = first[inverse[later]]
        same = (signatures[later] == signatures[earlier]).mean(1)
        better = same > alike[later]
        best[later[better]], alike[later[better]] = earlier[better], same[better]
    return best, alike


def compare(first: np.ndarray, second: np.ndarray, common: np.ndarray) -> float:
    """The Jaccard similarity of two documents' n-grams that are not `common`."""
    sets = []
    for ids in (first, second):
        hashed = hash_grams(ids)[: max(0, len(ids) - GRAM + 1)]
        sets.append(np.unique(hashed[~common[hashed >> np.uint32(32 - _BITS)]]))
    both = len(np.intersect1d(*sets, assume_unique=True))
    return both / max(1, len(sets[0]) + len(sets[1]) - both)
