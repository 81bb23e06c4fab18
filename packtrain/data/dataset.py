"""What training sees of the data: documents by number, out of one or more stores, each as often as its weight says.

A TokenDataset is stores plus a list of row numbers. Weights, held-out fractions and mixtures only change the list; no
token is ever copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from packtrain.data.report import DataReport, add
from packtrain.data.store import Document, Store
from packtrain.errors import UserError


class TokenDataset:
    """Documents for training; picklable (stores by path), so that loader processes share the mapped files.

    lengths: int32[n], tokens of each document. trained: int32[n], its trained targets. `fingerprint` changes whenever
    a token, a mask or the order changes.
    """

    def __init__(self, stores: Sequence[Store], rows: np.ndarray, report: DataReport) -> None:
        """`rows` int64[n] counts through the stores, one after the other."""
        self.stores, self.rows, self.report = tuple(stores), rows, report
        self._first = np.concatenate([[0], np.cumsum([len(store) for store in self.stores])]).astype(np.int64)
        self.lengths: np.ndarray = np.concatenate([store.lengths for store in self.stores])[rows]
        self.trained: np.ndarray = np.concatenate([store.trained for store in self.stores])[rows]
        digest = hashlib.blake2b(digest_size=16)
        for store in self.stores:
            digest.update(store.fingerprint.encode())
        digest.update(rows.tobytes())
        self.fingerprint = digest.hexdigest()

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[tuple[Store, ...], np.ndarray, DataReport]]:
        return (TokenDataset, (self.stores, self.rows, self.report))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        """Document number `index`, 0 to len - 1."""
        row = self.rows[index]
        if len(self.stores) == 1:
            return self.stores[0][int(row)]
        store = int(np.searchsorted(self._first, row, side="right")) - 1
        return self.stores[store][int(row - self._first[store])]


def make_dataset(
    stores: Sequence[Store], rows: np.ndarray, names: Sequence[str], *, built: Sequence[bool], held_out: int = 0
) -> TokenDataset:
    """A TokenDataset with its report; `built` says which stores were made by this process."""
    counts = add(store.counts for store in stores)
    lengths = np.concatenate([store.lengths for store in stores])[rows]
    trained = np.concatenate([store.trained for store in stores])[rows]
    report = DataReport(
        rows=counts.rows,
        kept=counts.kept,
        dropped=counts.dropped,
        truncated=counts.truncated,
        split=counts.split,
        dropped_chunks=counts.dropped_chunks,
        cut_tokens=counts.cut_tokens,
        pairs_apart=counts.pairs_apart,
        documents=len(rows),
        tokens=int(lengths.sum(dtype=np.int64)),
        trained_tokens=int(trained.sum(dtype=np.int64)),
        held_out=held_out,
        format=", ".join(dict.fromkeys(store.format for store in stores)),
        sources=tuple(names),
        seconds=sum(store.seconds for store, new in zip(stores, built, strict=True) if new),
    )
    return TokenDataset(stores, rows, report)


def hold_out(content: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which documents bool[n] are held out: those of a random set of texts, about `fraction` of the documents.

    `content` uint64[n] are hashes of whole documents: equal texts, and the parts of a document that was split, always
    fall on the same side. At least one document is held out and one is left, else UserError.
    """
    texts, inverse, times = np.unique(content, return_inverse=True, return_counts=True)
    order = np.random.default_rng([seed, 1]).permutation(len(texts))
    target = max(1, round(fraction * len(content)))
    chosen = order[: int(np.searchsorted(np.cumsum(times[order]), target)) + 1]
    mask = np.isin(inverse, chosen)
    if mask.all():
        what = f"cannot hold out {fraction:g} of {len(content)} documents ({len(texts)} different): none would be left"
        raise UserError(what, where="data.eval", fix="Give data.eval a source of its own, or more documents.")
    return mask


def weighted(rows: np.ndarray, weight: float, seed: int, source: int) -> np.ndarray:
    """`rows` int64[n], each floor(weight) times, and a random part of them once more for the fraction of the weight.

    The random part is fixed by (seed, source), and its rows keep their order.
    """
    whole, part = int(weight), weight - int(weight)
    rng = np.random.default_rng([seed, 2, source])
    extra = np.sort(rng.permutation(len(rows))[: round(part * len(rows))])
    return np.concatenate([*[rows] * whole, rows[extra]])
