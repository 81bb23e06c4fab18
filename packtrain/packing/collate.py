"""Documents → the keyword arguments of one forward pass: padded, or flattened into one row.

Labels are shifted here, document by document, so no label ever crosses a border and the model's own shift is not used:
`shift_labels[t]` is the token that position t has to predict, or IGNORE. A flattened row needs no padding token and no
attention mask; it carries what every kind of kernel asks for (Segments, position ids, cu_seqlens, seq_idx).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from packtrain.data.dataset import Document
from packtrain.packing.segments import Segments

IGNORE = -100
FILLER = Document(input_ids=np.zeros(2, dtype=np.int32), loss_mask=np.zeros(2, dtype=bool))
"""Stands in for an empty micro-batch (a step with fewer documents than ranks): it is run, and trains nothing."""


def shifted_labels(document: Document) -> torch.Tensor:
    """int64 [length]: at t the token t + 1 where that one is trained, else IGNORE; IGNORE at the last position."""
    labels = np.full(len(document.input_ids), IGNORE, dtype=np.int64)
    trained = document.loss_mask[1:]
    labels[:-1][trained] = document.input_ids[1:][trained]
    return torch.from_numpy(labels)


def collate_padded(documents: Sequence[Document], pad_token_id: int) -> dict[str, Any]:
    """Right-padded batch: `input_ids`, `attention_mask`, `shift_labels`, each int64 [documents, longest]."""
    documents = documents or [FILLER]
    shape = (len(documents), max(len(document.input_ids) for document in documents))
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE)
    for row, document in enumerate(documents):
        length = len(document.input_ids)
        input_ids[row, :length] = torch.from_numpy(document.input_ids.astype(np.int64))
        attention_mask[row, :length] = 1
        labels[row, :length] = shifted_labels(document)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "shift_labels": labels}


def collate_flat(documents: Sequence[Document]) -> dict[str, Any]:
    """One row of T = Σ lengths tokens: `input_ids`, `position_ids`, `shift_labels` int64 [1, T], `segments`, and the
    arguments that transformers' flash path (`cu_seq_lens_q/k`, `max_length_q/k`) and state-space kernels (`seq_idx`) take.
    """
    documents = documents or [FILLER]
    segments = Segments(tuple(len(document.input_ids) for document in documents))
    return {
        "input_ids": torch.from_numpy(np.concatenate([d.input_ids for d in documents]).astype(np.int64))[None],
        "shift_labels": torch.cat([shifted_labels(document) for document in documents])[None],
        **row_arguments(segments),
    }


def row_arguments(segments: Segments) -> dict[str, Any]:
    """What a model is told of a flattened row beside its tokens: `segments`, `position_ids`, and the kernels' arguments.

    Those kernels know of no shared prefix: where there is one, they are told nothing.
    """
    told = {"position_ids": segments.position_ids(), "segments": segments}
    if any(segments.prefix_lengths):
        return told
    borders, longest = segments.cumulative_lengths(), max(segments.lengths)
    return {
        **told,
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": segments.segment_ids(),
    }


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """`batch` with its tensors on `device`."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
