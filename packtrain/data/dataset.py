"""What training sees of the data: documents by number, out of one or more stores, each as often as its weight says.

A TokenDataset is stores plus a list of row numbers. Weights, held-out fractions and mixtures only change the list; no
token is ever copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from packtrain.config.schema import DataSource
from packtrain.data.report import DataReport, add, count
from packtrain.data.tokens.store import Document, Store
from packtrain.errors import UserError

MOST_REPEATED = 2**28
"""Documents of an epoch that a weight may make of a source: their numbers alone take 4 GiB."""


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
    stores: Sequence[Store],
    rows: np.ndarray,
    names: Sequence[str],
    *,
    built: Sequence[bool],
    sides: Sequence[np.ndarray] | None = None,
    held_out: int = 0,
) -> TokenDataset:
    """A TokenDataset with its report; `built` says which stores were made by this process.

    `sides` are, for each store, the source's rows bool[its rows] that the report is about; all where it is None.
    """
    if sides is None:
        counts = add(store.counts for store in stores)
    else:
        counts = add(count(store.fates[side], store.reasons) for store, side in zip(stores, sides, strict=True))
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


def hold_out(stores: Sequence[Store], fraction: float) -> list[np.ndarray]:
    """For each store, which rows of its source bool[its rows] are held out: `fraction` of the different rows.

    They are those with the lowest hashes of what they say, which is as good as drawn by lot. So equal rows, the parts of a
    row that was split and preference pairs with the same prompt fall on the same side, and the same rows are held out with
    any template, tokenizer, data.max_length and seed. At least one document is held out and one is left, else UserError.
    """
    content = np.concatenate([store.fates["content"] for store in stores])
    said, inverse = np.unique(content, return_inverse=True)
    held = inverse < max(1, round(fraction * len(said)))
    documents = np.concatenate([store.fates["documents"] for store in stores])
    for side, words in ((held, "no document would be held out"), (~held, "none would be left")):
        if not documents[side].any():
            what = f"cannot hold out {fraction:g} of {len(content)} rows ({len(said)} different): {words}"
            raise UserError(what, where="data.eval", fix="Give data.eval a source of its own, or more rows.")
    return np.split(held, np.cumsum([len(store.fates) for store in stores])[:-1])


def weighted(
    rows: np.ndarray, source: DataSource, number: int, seed: int, where: str, *, together: int = 1
) -> np.ndarray:
    """`rows` int64[n], each floor(weight) times, and a random part of them once more for the fraction of the weight.

    So many neighbours stay `together`: 2 for the documents of preference pairs. The random part is fixed by (seed, number of the source), and its rows keep their order. Raises UserError for a
    weight that takes none of them, or more than anything could be done with.
    """
    rows, weight = rows[::together], source.weight
    if not (weight <= 1 or weight * len(rows) <= MOST_REPEATED):  # true of NaN too
        what = f"weight={weight:g} makes {weight * len(rows):.2g} documents of the {len(rows):,} of {source.path}"
        raise UserError(what, where=where, fix="Weights are relative to one epoch: lower it, raise trainer.epochs.")
    whole, part = int(weight), weight - int(weight)
    extra = np.random.default_rng([seed, 2, number]).permutation(len(rows))[: round(part * len(rows))]
    taken = np.concatenate([*[rows] * whole, rows[np.sort(extra)]])
    if not len(taken):
        what = f"weight={weight:g} takes none of the {len(rows):,} documents of {source.path}"
        raise UserError(what, where=where, fix="Raise its weight, or take the source away.")
    return (taken[:, None] + np.arange(together)).ravel()
