"""`pack` and `PackedCollator`: rows without padding for any loop, `Trainer` or `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from packtrain.packing.bins import best_fit, in_order
from packtrain.packing.collate import IGNORE, row_arguments
from packtrain.packing.segments import Segments

Feature = Mapping[str, object]
"""A document in the form of transformers' and TRL's data sets: `input_ids`, and more (PackedCollator)."""
_MASKS = ("completion_mask", "assistant_masks")
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def pack(
    lengths: Iterable[int],
    tokens_per_row: int,
    *,
    strategy: Literal["best_fit", "in_order"] = "best_fit",
    seed: int = 0,
) -> list[list[int]]:
    """Pack whole documents into rows of at most `tokens_per_row` tokens.

    Returns the documents' numbers by row, each number once. `lengths` are tokens. `best_fit` makes the fewest rows; their order and
    neighbours change with `seed`. `in_order` keeps the given order. The result serves as `batch_sampler` of torch's DataLoader.

    Raises ValueError for a document that is longer than a row, or has no token.

    >>> from packtrain import pack
    >>> sorted(sorted(row) for row in pack([300, 120, 700, 80], 1000))
    [[0, 2], [1, 3]]
    >>> pack([300, 120, 700, 80], 1000, strategy="in_order")
    [[0, 1], [2, 3]]
    """
    counts = np.fromiter(lengths, dtype=np.int64)
    if len(counts) and counts.min() < 1:
        raise ValueError(f"document {counts.argmin()} has no token")
    if strategy == "best_fit":
        rows = best_fit(counts, tokens_per_row, np.random.default_rng(seed))
    elif strategy == "in_order":
        rows = in_order(counts, tokens_per_row)
    else:
        raise ValueError(f'strategy is {strategy!r}: set it to "best_fit" or "in_order"')
    return [rows[number].tolist() for number in range(len(rows))]


@dataclass(frozen=True)
class PackedCollator:
    """A data collator that makes one row [1, T] of documents.

    A model after `attach` keeps the documents apart exactly. A feature has `input_ids` and optionally `labels` (-100: not trained), or a
    `completion_mask` or `assistant_masks` of zeros and ones; by default every token is trained. Tokens with `attention_mask` 0 are left out.
    A feature may hold several documents: with `seq_lengths`, as TRL packs them, or as a list of features.

    A batch is `input_ids`, `labels` and `position_ids`, int64 [1, T], and `segments` (Segments) for attached models. Labels
    stand at their tokens, as in transformers; the first token of a document has none. `return_flash_attn_kwargs` adds
    `cu_seq_lens_q/k` and `max_length_q/k`, `return_seq_idx` adds `seq_idx` for state-space kernels. Set `return_segments=False` for
    models that do not take Segments. Raises ValueError for features without tokens, or with a wrong number of labels.

    >>> from packtrain import PackedCollator
    >>> collate = PackedCollator()
    >>> row = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "completion_mask": [0, 1]}])
    >>> row["input_ids"].tolist(), row["position_ids"].tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]])
    >>> row["labels"].tolist()
    [[-100, 6, 7, -100, 9]]
    >>> row["segments"].lengths
    (3, 2)
    """

    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    return_segments: bool = True

    def __call__(self, features: Sequence[Feature | Sequence[Feature]]) -> dict[str, object]:
        """Make the row of all documents of `features`, in their order."""
        documents = [document for feature in features for document in _documents_of(feature)]
        if not documents:
            raise ValueError("a batch without features")
        segments = Segments(tuple(len(ids) for ids, _ in documents))
        arguments = row_arguments(segments)
        row = {
            "input_ids": torch.from_numpy(np.concatenate([ids for ids, _ in documents]))[None],
            "labels": torch.from_numpy(np.concatenate([labels for _, labels in documents]))[None],
            "position_ids": arguments["position_ids"],
        }
        unwanted = () if self.return_flash_attn_kwargs else _FLASH
        unwanted += () if self.return_seq_idx else ("seq_idx",)
        unwanted += () if self.return_segments else ("segments",)
        return {**row, **{name: value for name, value in arguments.items() if name not in unwanted}}


def _documents_of(feature: Feature | Sequence[Feature]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield token ids and labels of each document of a feature, int64 [length]."""
    if not isinstance(feature, (Mapping, str)):
        for document in feature:
            yield from _documents_of(document)
        return
    if isinstance(feature, str) or "input_ids" not in feature:
        raise ValueError(f"a feature is a document with input_ids, or a list of them, not {feature!r}")
    ids = _numbers(feature["input_ids"])
    labels = _labels_of(feature, ids)
    lengths = _numbers(feature.get("seq_lengths", [len(ids)]))
    if lengths.sum() != len(ids) or lengths.min(initial=1) < 1:
        raise ValueError(f"a feature of {len(ids)} tokens has seq_lengths {lengths.tolist()}")
    mask = _numbers(feature.get("attention_mask", np.ones(len(ids))), like=ids, name="attention_mask").astype(bool)
    borders = lengths.cumsum()[:-1]
    for tokens, targets, real in zip(*(np.split(values, borders) for values in (ids, labels, mask)), strict=True):
        if not real.any():
            raise ValueError("a document without a token")
        targets = targets[real]
        targets[0] = IGNORE
        yield tokens[real], targets


def _labels_of(feature: Feature, ids: np.ndarray) -> np.ndarray:
    """Return a feature's labels, int64 [length], as a copy. Without labels: its token ids where its masks are 1."""
    if (given := feature.get("labels")) is not None:
        return _numbers(given, like=ids, name="labels").copy()
    labels = ids.copy()
    for name in _MASKS:
        if feature.get(name) is not None:
            labels[_numbers(feature[name], like=ids, name=name) == 0] = IGNORE
    return labels


def _numbers(values: Any, *, like: np.ndarray | None = None, name: str = "") -> np.ndarray:
    """Convert a list, array or tensor to int64 [n]. Raises ValueError if its length differs from the tokens'."""
    numbers = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, dtype=np.int64)
    if numbers.ndim != 1:
        raise ValueError(f"a feature is one document [tokens], not {list(numbers.shape)}: a list of ids each")
    if like is not None and len(numbers) != len(like):
        raise ValueError(f"a feature has {len(like)} input_ids and {len(numbers)} {name}")
    return numbers
