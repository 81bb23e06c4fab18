"""Examples that repeat others: the same tokens, or almost, inside what is trained, and between that and what is held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.inspect.corpus import Corpus
from packtrain.inspect.scan.near_duplicates import MOST_CHECKED, SIMILAR, candidates, similarity
from packtrain.inspect.scan.token_scan import TokenScan

LIKELY = SIMILAR - 0.2
"""How alike signatures must be for documents to be compared: two standard deviations below."""


@dataclass(frozen=True, eq=False)
class Duplicate:
    """Documents (numbers; of pairs the chosen one) that repeat the document of `of`, each int64[n]; `count` of them in all.

    Where there are too many to compare, `count` is estimated from a sample, and the documents are those of the sample.
    """

    documents: np.ndarray
    of: np.ndarray
    count: int


def duplicates(corpus: Corpus, scan: TokenScan) -> tuple[Duplicate, Duplicate]:
    """Trained examples with the tokens of an earlier one, and others that are almost an earlier one."""
    numbers, hashes = _examples(corpus, scan, corpus.in_train)
    first, again = _first_of(hashes)
    same = Duplicate(numbers[again], numbers[first[again]], int(again.sum()))
    alone = numbers[~again]
    return same, _similar(corpus, scan, alone, np.zeros(len(alone), np.int8), held_out=False)


def leaks(corpus: Corpus, scan: TokenScan) -> tuple[Duplicate, Duplicate]:
    """Held-out examples with the tokens of a trained one, and others that are almost one."""
    trained, of_trained = _examples(corpus, scan, corpus.in_train)
    held, of_held = _examples(corpus, scan, corpus.in_eval)
    order = np.argsort(of_trained, kind="stable")
    at = np.minimum(np.searchsorted(of_trained[order], of_held), len(order) - 1)
    known = of_trained[order][at] == of_held
    same = Duplicate(held[known], trained[order][at[known]], int(known.sum()))
    numbers = np.concatenate([trained, held[~known]])
    return same, _similar(corpus, scan, numbers, np.arange(len(numbers)) >= len(trained), held_out=True)


def _examples(corpus: Corpus, scan: TokenScan, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first document of each example among the documents `chosen`, and the hash of all its tokens."""
    numbers = np.flatnonzero(chosen)[:: corpus.together]
    hashes = scan.hashes[numbers]
    if corpus.together == 2:
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + scan.hashes[numbers + 1]
    return numbers, hashes


def _first_of(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each hash the place of its first appearance, and whether it is a later one."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return first[inverse], first[inverse] != np.arange(len(hashes))


def _similar(corpus: Corpus, scan: TokenScan, numbers: np.ndarray, eldest: np.ndarray, *, held_out: bool) -> Duplicate:
    best, alike = candidates(scan.signatures, numbers, eldest)
    found = np.flatnonzero((best >= 0) & (alike >= LIKELY))
    if held_out:
        found = found[corpus.in_eval[numbers[found]] & corpus.in_train[best[found]]]
    checked = found
    if len(found) > MOST_CHECKED:
        checked = np.sort(np.random.default_rng(0).choice(found, MOST_CHECKED, replace=False))
    true = np.array([_is_similar(corpus, scan, int(numbers[at]), int(best[at])) for at in checked], bool)
    kept = checked[true]
    count = round(len(kept) * len(found) / max(1, len(checked)))
    return Duplicate(numbers[kept], best[kept], count)


def _is_similar(corpus: Corpus, scan: TokenScan, one: int, other: int) -> bool:
    """Whether the documents are, of pairs both of either."""
    return all(
        similarity(corpus.read(one + side), corpus.read(other + side), scan.common) >= SIMILAR
        for side in range(corpus.together)
    )
