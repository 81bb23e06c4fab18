"""Turn documents or preference pairs into the arguments of one forward pass.

The arguments hold padded rows or one flattened row. Labels are shifted here, document by document: no label crosses a border and the
model's own shift is not used. `shift_labels[t]` is the token that position t has to predict, or IGNORE.
Pairs always come with the padded batch that TRL's losses read: all chosen answers first, then all rejected ones. The model runs
on a flattened row. An AnswerLayout maps its tokens to their places in that batch (model/forward.py). With shared prompts a pair
is three segments: the prompt without its last token, then for each answer that last token (it predicts the answer) and the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from packtrain.data.dataset import Document, Preference
from packtrain.packing.prefixes import SharedRow
from packtrain.packing.segments import Segments, SplitSegments, own_tokens, split_row

RowLayout = Literal["padding", "flat", "shared"]
"""Input of the model: the padded batch, a flattened row, or a flattened row with shared prompts (for documents: shared prefixes)."""
IGNORE = -100
FILLER = Document(input_ids=np.zeros(2, dtype=np.int32), loss_mask=np.zeros(2, dtype=bool))
FILLER_PAIR = Preference(chosen=FILLER, rejected=FILLER, prompt=0)
"""Fillers of an empty micro-batch (a step with fewer documents than ranks): their forward passes train nothing."""


def shifted_labels(document: Document) -> torch.Tensor:
    """Return the next token at each position where it is trained, else IGNORE: int64 [length]. The last position has IGNORE."""
    labels = np.full(len(document.input_ids), IGNORE, dtype=np.int64)
    trained = document.loss_mask[1:]
    labels[:-1][trained] = document.input_ids[1:][trained]
    return torch.from_numpy(labels)


def collate_padded(documents: Sequence[Document], pad_token_id: int) -> dict[str, Any]:
    """Collate a right-padded batch: `input_ids`, `attention_mask`, `shift_labels`, each int64 [documents, longest]."""
    documents = documents or [FILLER]
    labels = [shifted_labels(document) for document in documents]
    return {**_pad(documents, pad_token_id), "shift_labels": pad_sequence(labels, True, IGNORE)}


def _pad(documents: Sequence[Document], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, int64 [documents, longest]."""
    ids = [torch.from_numpy(document.input_ids.astype(np.int64)) for document in documents]
    mask = [torch.ones_like(tokens) for tokens in ids]
    return {"input_ids": pad_sequence(ids, True, pad_token_id), "attention_mask": pad_sequence(mask, True)}


def collate_flat(documents: Sequence[Document]) -> dict[str, Any]:
    """Collate one row of T = Σ lengths tokens. Returns `input_ids` and `shift_labels` int64 [1, T], and `row_arguments`."""
    documents = documents or [FILLER]
    segments = Segments(tuple(len(document.input_ids) for document in documents))
    return {
        "input_ids": torch.from_numpy(np.concatenate([d.input_ids for d in documents]).astype(np.int64))[None],
        "shift_labels": torch.cat([shifted_labels(document) for document in documents])[None],
        **row_arguments(segments),
    }


def collate_shared(documents: Sequence[Document], row: SharedRow) -> dict[str, Any]:
    """Collate the documents of `row` (in its order) with each shared beginning once. Like `collate_flat` otherwise.
    `label_places` int64 [n] lists a token's place once for each document that trains it.
    """
    ids = np.concatenate([document.input_ids for document in documents])[row.sources].astype(np.int64)
    labels = torch.full((row.segments.tokens,), IGNORE)
    trained = []
    for document, places in zip(documents, row.places, strict=True):
        own = shifted_labels(document)
        labelled = label_positions(own)
        labels[places[labelled]] = own[labelled]
        trained.append(places[labelled])
    places = np.sort(np.concatenate(trained))
    named = {"input_ids": torch.from_numpy(ids)[None], "shift_labels": labels[None], "label_places": places}
    return {**named, **row_arguments(row.segments)}


def row_arguments(segments: Segments) -> dict[str, Any]:
    """Return the model's arguments for a flattened row besides its tokens: `segments` and `position_ids`. Also takes a part of a row.
    A row that is neither split nor shares prefixes also gets the arguments of flash kernels."""
    arguments = {"position_ids": segments.position_ids()[:, own_tokens(segments)], "segments": segments}
    if not any(segments.prefix_lengths) and not isinstance(segments, SplitSegments):
        borders, longest = segments.cumulative_lengths(), max(segments.lengths)
        arguments |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "seq_idx": segments.segment_ids()}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    return arguments


def part_of(batch: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Return part number `part` of a collated row. For documents it has tokens, labels and `label_places`.
    Answers stay padded: only their `layout` is split."""
    if (layout := batch.get("layout")) is not None:
        return {**batch, "layout": replace(layout, segments=split_row(layout.segments, part, parts))}
    segments = split_row(batch["segments"], part, parts)
    here = own_tokens(segments)
    own = {name: batch[name][:, here] for name in ("input_ids", "shift_labels")}
    places = batch["label_places"] if "label_places" in batch else label_positions(batch["shift_labels"])
    first, end, _ = here.indices(segments.tokens)
    own_places = places[(places >= first) & (places < end)] - first
    return {**own, **row_arguments(segments), "label_places": own_places}


def label_positions(labels: torch.Tensor) -> np.ndarray:
    """Return flat positions of the labels in `labels` [rows, T]: int64 [n]. The CPU finds them, so that no device is waited for."""
    return np.flatnonzero(labels.cpu().numpy() != IGNORE)


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """Places of a flattened row's T tokens in the padded batch: `rows`, `columns` (int64 [T]).

    `inside` (int64): the tokens outside the last column, which predicts nothing. `trained` (like `label_positions`): the tokens that
    predict an answer's token. `ends` int64 [documents]: the token that a reward model scores in each document.
    """

    segments: Segments
    rows: torch.Tensor
    columns: torch.Tensor
    inside: torch.Tensor
    trained: np.ndarray | None = None
    ends: torch.Tensor | None = None

    def pin_memory(self) -> AnswerLayout:
        """Return a copy in pinned memory."""
        values = {name: getattr(self, name) for name in ("rows", "columns", "inside", "ends")}
        return replace(self, **{name: value.pin_memory() for name, value in values.items() if value is not None})


def collate_pairs(pairs: Sequence[Preference], pad_token_id: int, rows: RowLayout) -> dict[str, Any]:
    """Collate `input_ids`, `attention_mask`, `completion_mask` int64 [2B, L], and a `layout` unless `rows` is "padding"."""
    pairs = pairs or [FILLER_PAIR]
    batch = _pad_answers(_list_documents(pairs), pad_token_id)
    return batch if rows == "padding" else _add_layout(batch, _lay_out_pairs(pairs, rows))


def _list_documents(pairs: Sequence[Preference]) -> list[Document]:
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def _lay_out_pairs(pairs: Sequence[Preference], rows: RowLayout) -> AnswerLayout:
    lengths = [len(document.input_ids) for document in _list_documents(pairs)]
    prompts = [pair.prompt if rows == "shared" else 0 for pair in pairs]
    return layout_of(lengths, [(number, number + len(pairs)) for number in range(len(pairs))], prompts)


def collate_unpaired(documents: Sequence[Document], pad_token_id: int, rows: RowLayout) -> dict[str, Any]:
    """Collate single answers, each with its prompt, like `collate_pairs`: [B, L]."""
    documents = documents or [FILLER]
    batch = _pad_answers(documents, pad_token_id)
    if rows == "padding":
        return batch
    lengths, groups = [len(document.input_ids) for document in documents], [(at,) for at in range(len(documents))]
    return _add_layout(batch, layout_of(lengths, groups, [0] * len(groups)))


def _pad_answers(documents: Sequence[Document], pad_token_id: int) -> dict[str, Any]:
    """Return `input_ids`, `attention_mask`, `completion_mask` int64 [documents, longest]."""
    targets = [torch.from_numpy(document.loss_mask.astype(np.int64)) for document in documents]
    return {**_pad(documents, pad_token_id), "completion_mask": pad_sequence(targets, True)}


def _add_layout(batch: dict[str, Any], layout: AnswerLayout) -> dict[str, Any]:
    """Add the `layout` of the flattened row to `batch`, with the positions that are trained."""
    predicts = batch["completion_mask"].roll(-1, dims=1)  # roll wraps into the last column, which `inside` leaves out
    trained = layout.inside[predicts[layout.rows[layout.inside], layout.columns[layout.inside]].nonzero()[:, 0]]
    return {**batch, "layout": replace(layout, trained=trained.numpy())}


def collate_scored(
    pairs: Sequence[Preference], margins: Sequence[float] | np.ndarray, pad_token_id: int, rows: RowLayout
) -> dict[str, Any]:
    """Collate pairs for a reward model: `input_ids` and `attention_mask` int64 [2B, L], `margin` float32 [B].

    A flattened row gives [1, T] and its `layout`. The last token that is not padding is scored, as in transformers' models.
    """
    pairs, margins = (pairs, margins) if len(pairs) else ([FILLER_PAIR], [0.0])
    padded, margin = _pad(_list_documents(pairs), pad_token_id), torch.tensor(margins, dtype=torch.float32)
    if rows == "padding":
        return {**padded, "margin": margin}
    row, ids = _lay_out_pairs(pairs, rows), padded["input_ids"]
    last = (torch.arange(ids.shape[1]) * (ids != pad_token_id)).argmax(dim=1)
    places = torch.full_like(ids, -1)
    places[row.rows, row.columns] = torch.arange(len(row.rows))
    document = torch.arange(len(ids))
    ends, chosen_ends = places[document, last], places[document % len(pairs), last]
    # the tokens of a shared prompt are at the places of the chosen document
    layout = replace(row, ends=torch.where(ends < 0, chosen_ends, ends))
    flat = ids[row.rows, row.columns][None]
    return {"input_ids": flat, "attention_mask": torch.ones_like(flat), "margin": margin, "layout": layout}


def layout_of(lengths: Sequence[int], groups: Sequence[Sequence[int]], prompts: Sequence[int]) -> AnswerLayout:
    """Lay out a padded batch as a flattened row; its rows have `lengths` tokens. All rows of group g begin with the same
    `prompts[g]` tokens. If these are two or more, all but the last are computed once."""
    pieces: list[tuple[int, int, int, int | None]] = []  # row of the batch, first column, end, number of the prefix
    for group, prompt in zip(groups, prompts, strict=True):
        common, prefix = 0, None
        if prompt > 1:
            common, prefix = prompt - 1, len(pieces)
            pieces.append((group[0], 0, common, None))
        pieces += [(row, common, lengths[row], prefix) for row in group]
    prefixes = tuple(prefix for *_, prefix in pieces)
    columns = torch.cat([torch.arange(first, end) for _, first, end, _ in pieces])
    return AnswerLayout(
        Segments(tuple(end - first for _, first, end, _ in pieces), prefixes if any(prompts) else ()),
        rows=torch.cat([torch.full((end - first,), row) for row, first, end, _ in pieces]),
        columns=columns,
        inside=(columns < max(lengths) - 1).nonzero()[:, 0],
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` to `device` via pinned memory, without waiting for work that is queued there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors of `batch` to `device`."""
    return {
        name: to_device(value, device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
