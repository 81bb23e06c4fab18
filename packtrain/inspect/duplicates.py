"""Documents that repeat earlier ones, exactly or almost.

Two documents are near duplicates if about SIMILAR of the n-grams of tokens in either are in both (Jaccard). A signature is the
smallest of each of HASHES functions of a document's n-grams; two documents agree in each with the probability of their Jaccard
similarity (MinHash, Broder 1997), so the share of hashes in which they agree estimates it, to about 0.07. Only documents that
agree in all of a band of the signature are compared. N-grams that many documents share (system prompts, headers of the template)
do not count. Written with arrays, over blocks of documents end to end: a set per document would take minutes for a million.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRAM = 4
SIMILAR = 0.8
BANDS, BAND = 8, 4
HASHES = BANDS * BAND
FEWEST = 32
"""N-grams of a document that is compared."""
COMMON = 0.02
"""An n-gram that more than this part of the documents of a sample have does not count."""
SAMPLE, LEAST_SAMPLE = 2000, 8
_BITS = 18
_RANDOM = np.random.default_rng(7)
_MULTIPLIERS = (_RANDOM.integers(0, 2**31, HASHES, np.uint32) * 2 + 1).astype(np.uint32)
_BAND_MULTIPLIERS = _RANDOM.integers(0, 2**63, BAND, np.uint64) * np.uint64(2) + np.uint64(1)


def hash_documents(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """uint64[documents]: of documents end to end, a hash of the tokens and their places, Σ hash of the token · (2 · place + 1)."""
    starts = np.cumsum(lengths) - lengths
    values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    plain = np.add.reduceat(values, starts)
    placed = np.add.reduceat(values * np.arange(len(values), dtype=np.uint64), starts)
    return np.uint64(2) * (placed - starts.astype(np.uint64) * plain) + plain + lengths.astype(np.uint64)


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
    """bool[2 ** _BITS]: by the first bits of their hash, the n-grams that many of the documents `samples` have."""
    grams = [np.unique(hash_grams(ids)[: 1 - GRAM] >> np.uint32(32 - _BITS)) for ids in samples if len(ids) >= GRAM]
    if len(grams) < LEAST_SAMPLE:
        return np.zeros(1 << _BITS, bool)
    return np.bincount(np.concatenate(grams), minlength=1 << _BITS) > max(3, COMMON * len(grams))


def sign(ids: np.ndarray, lengths: np.ndarray, common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signatures uint32[n, HASHES] of documents end to end, `ids` int32[T] of `lengths` int64[n], by n-grams that are not
    `common`; and bool[n], whether they have enough of these to be compared."""
    hashed, ends = hash_grams(ids), np.cumsum(lengths)
    counts = ~common[hashed >> np.uint32(32 - _BITS)]
    for offset in range(1, GRAM):  # these reach into the next document
        counts[np.maximum(ends - offset, ends - lengths)] = False
    number = np.add.reduceat(counts, ends - lengths, dtype=np.int64)
    compared = number >= FEWEST
    signatures = np.zeros((len(lengths), HASHES), np.uint32)
    if compared.any():
        hashed = hashed[counts & np.repeat(compared, lengths)]
        first = np.cumsum(number[compared]) - number[compared]
        for at, multiplier in enumerate(_MULTIPLIERS):
            signatures[compared, at] = np.minimum.reduceat(hashed * multiplier, first)
    return signatures, compared


def find_equal(hashes: np.ndarray) -> np.ndarray:
    """int64[n]: for each of the values the place of the first one that is equal, -1 for itself."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.where(first[inverse] == np.arange(len(hashes)), -1, first[inverse])


def find_similar(signatures: np.ndarray) -> np.ndarray:
    """int64[n]: for each of `signatures` uint32[n, HASHES or more] the most similar earlier one, -1 for none.

    Bands are those of the first HASHES; the first signature of those that agree in a band stands for them.
    """
    best, most = np.full(len(signatures), -1), np.zeros(len(signatures))
    for band in range(BANDS):
        keys = signatures[:, band * BAND : (band + 1) * BAND].astype(np.uint64) @ _BAND_MULTIPLIERS
        earlier = find_equal(keys)
        later = np.flatnonzero(earlier >= 0)
        share = (signatures[later] == signatures[earlier[later]]).mean(1)
        better = (share >= SIMILAR) & (share > most[later])
        best[later[better]], most[later[better]] = earlier[later[better]], share[better]
    return best
