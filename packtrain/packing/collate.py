"""Turn documents, answers or preference pairs into the arguments of one forward pass.

The arguments hold padded rows or one flattened row. Labels are shifted here, document by document: no label crosses a border and the
model's own shift is not used. `shift_labels[t]` is the token that position t has to predict, or IGNORE. A target is a token to predict.

Answers also come with the places of their targets in the batch, answer by answer. Pairs have all chosen answers first, then all
rejected ones. A pair with a shared prompt is three segments: the prompt without its last token, then for each answer that last token
(which predicts the answer's first) and the answer. A `sight` adds the model's arguments for the documents' pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from packtrain.data.dataset import Document, Preference
from packtrain.packing.pictures import Sight
from packtrain.packing.prefixes import SharedRow, outside_pictures
from packtrain.packing.segments import Segments, SplitSegments, own_tokens, split_row

ModelInputs = dict[str, Any]
"""Arguments of a forward pass by name: tensors, the Segments of a row, lengths."""
RowLayout = Literal["padding", "flat", "shared"]
"""Input of the model: a padded batch, a flattened row, or a flattened row whose documents share equal beginnings."""
IGNORE = -100
KERNEL_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of a row for kernels that know where documents begin."""
FILLER = Document(input_ids=np.zeros(2, dtype=np.int32), loss_mask=np.zeros(2, dtype=bool))
FILLER_PAIR = Preference(chosen=FILLER, rejected=FILLER, prompt=0)
"""Stand in for no examples, where a rank has none in a step but must take part. They have no targets."""


def shifted_labels(document: Document) -> torch.Tensor:
    """Return for each position the next token if it is trained, else IGNORE: int64 [length]. The last one is IGNORE."""
    labels = np.full(len(document.input_ids), IGNORE, dtype=np.int64)
    trained = document.loss_mask[1:]
    labels[:-1][trained] = document.input_ids[1:][trained]
    return torch.as_tensor(labels)


def collate_padded(documents: Sequence[Document], pad_token_id: int, sight: Sight | None = None) -> ModelInputs:
    """Collate a right-padded batch: `input_ids`, `attention_mask`, `shift_labels`, each int64 [documents, longest]."""
    documents = _with_blank(documents or [FILLER], sight)
    labels = [shifted_labels(document) for document in documents]
    return {**_pad(documents, pad_token_id, sight), "shift_labels": pad_sequence(labels, True, IGNORE)}


def _pad(documents: Sequence[Document], pad_token_id: int, sight: Sight | None) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, int64 [documents, longest], and the arguments for pictures."""
    ids = [torch.as_tensor(document.input_ids.astype(np.int64)) for document in documents]
    mask = [torch.ones_like(tokens) for tokens in ids]
    padded = {"input_ids": pad_sequence(ids, True, pad_token_id), "attention_mask": pad_sequence(mask, True)}
    if sight is None:
        return padded
    rows, longest = padded["input_ids"].shape
    places = [number * longest + np.arange(len(tokens)) for number, tokens in enumerate(ids)]
    return padded | sight.see(documents, places, rows, longest).arguments


def collate_flat(documents: Sequence[Document], sight: Sight | None = None) -> ModelInputs:
    """Collate one row of T = Σ lengths tokens. Returns `input_ids` and `shift_labels` int64 [1, T], and `row_arguments`."""
    documents = _with_blank(documents or [FILLER], sight)
    segments = Segments(tuple(len(document.input_ids) for document in documents))
    places = np.split(np.arange(segments.tokens), segments.starts[1:])
    return {
        "input_ids": torch.as_tensor(np.concatenate([d.input_ids for d in documents]).astype(np.int64))[None],
        "shift_labels": torch.cat([shifted_labels(document) for document in documents])[None],
        **_arguments(documents, segments, places, sight),
    }


def collate_shared(documents: Sequence[Document], row: SharedRow, sight: Sight | None = None) -> ModelInputs:
    """Collate a row with each shared beginning once. Otherwise like `collate_flat`.

    `documents` are in the order of `row`. `label_places` int64 [n] also comes: a token's place once for each document that trains it.
    `label_owners` int64 [n] has these documents.
    """
    batch, trained = _collate_row(documents, row.segments, row.places, sight)
    places = np.concatenate(trained)
    owners, order = np.repeat(np.arange(len(trained)), [*map(len, trained)]), np.argsort(places, kind="stable")
    return {**batch, "label_places": places[order], "label_owners": owners[order]}


def _collate_row(
    documents: Sequence[Document], segments: Segments, places: Sequence[np.ndarray], sight: Sight | None
) -> tuple[ModelInputs, list[np.ndarray]]:
    """Collate a row whose documents have their tokens at `places`. Return the places of each document's targets, too."""
    given = len(documents)
    if len(completed := _with_blank(documents, sight)) > given:
        blank, prefixes = len(completed[-1].input_ids), (*segments.prefixes, None) if segments.prefixes else ()
        documents, places = completed, [*places, np.arange(segments.tokens, segments.tokens + blank)]
        segments = Segments((*segments.lengths, blank), prefixes)
    ids, labels, trained = np.empty(segments.tokens, np.int64), np.full(segments.tokens, IGNORE), list[np.ndarray]()
    for document, at in zip(documents, places, strict=True):
        ids[at] = document.input_ids
        labelled = np.flatnonzero(document.loss_mask[1:])
        labels[at[labelled]] = document.input_ids[labelled + 1]
        trained.append(at[labelled])
    row = {"input_ids": torch.as_tensor(ids)[None], "shift_labels": torch.as_tensor(labels)[None]}
    return {**row, **_arguments(documents, segments, places, sight)}, trained[:given]


def _with_blank(documents: Sequence[Document], sight: Sight | None) -> Sequence[Document]:
    """Add the document with a picture that trained or sharded towers need in every micro-batch."""
    return documents if sight is None else sight.with_blank(documents)


def _arguments(
    documents: Sequence[Document], segments: Segments, places: Sequence[np.ndarray], sight: Sight | None
) -> ModelInputs:
    """Return the `row_arguments` and the arguments for pictures, whose positions replace the usual ones."""
    if sight is None or not any(document.pictures for document in documents):
        return row_arguments(segments)
    seen = sight.see(documents, places, 1, segments.tokens)
    two_way = sight.two_way or segments.two_way
    segments = replace(segments, pictures=seen.pictures, blocks=seen.blocks, two_way=two_way)
    return row_arguments(segments) | seen.arguments


def row_arguments(segments: Segments) -> ModelInputs:
    """Return the arguments for a flattened row, or a part of it, besides its tokens.

    They are `segments` and `position_ids`. A row that is neither split nor shares prefixes also gets the arguments of flash kernels.
    """
    arguments = {"position_ids": segments.position_ids()[:, own_tokens(segments)], "segments": segments}
    if not any(segments.prefix_lengths) and not isinstance(segments, SplitSegments):
        borders, longest = segments.cumulative_lengths(), max(segments.lengths)
        arguments |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "seq_idx": segments.segment_ids()}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    return arguments


def part_of(batch: ModelInputs, part: int, parts: int) -> ModelInputs:
    """Return part number `part` of a collated row without pictures. Places of answers still refer to the whole row."""
    segments = split_row(batch["segments"], part, parts)
    here = own_tokens(segments)
    own = {name: batch[name][:, here] for name in ("input_ids", "shift_labels") if name in batch}
    if "shift_labels" in batch:
        places = batch["label_places"] if "label_places" in batch else label_positions(batch["shift_labels"])
        first, end, _ = here.indices(segments.tokens)
        mine = (places >= first) & (places < end)
        own["label_places"] = places[mine] - first
        own |= {name: batch[name][mine] for name in ("label_owners", "label_records") if name in batch}
    return {**batch, **own, **row_arguments(segments)}


def label_positions(labels: torch.Tensor) -> np.ndarray:
    """Return the places of labels other than IGNORE in the flattened `labels`, int64 [n].

    The CPU finds them: on a GPU, their number would have to be waited for.
    """
    return np.flatnonzero(labels.cpu().numpy() != IGNORE)


def collate_answers(
    documents: Sequence[Document],
    pad_token_id: int,
    rows: RowLayout,
    prompts: Sequence[int] = (),
    sight: Sight | None = None,
) -> ModelInputs:
    """Collate answers, each a document with its prompt.

    `prompts`: for pairs, the number of tokens of each prompt. `documents` then has all chosen ones first, then all rejected ones.

    Returns the arguments of `collate_padded` or `collate_flat` and: `label_places`; `target_places` int64 [targets], the places of
    targets in the flattened batch, answer by answer; `target_counts` int64 [answers]. A token that both answers of a pair train is
    two targets.
    """
    if rows == "padding":
        batch = collate_padded(documents, pad_token_id, sight)
        longest = batch["input_ids"].shape[1]
        targets = [at * longest + np.flatnonzero(document.loss_mask[1:]) for at, document in enumerate(documents)]
    else:
        batch, targets = _collate_row(documents, *_lay_out(documents, prompts, shared=rows == "shared"), sight)
    return {
        **batch,
        "label_places": label_positions(batch["shift_labels"]),
        "target_places": torch.as_tensor(np.concatenate(targets)),
        "target_counts": torch.tensor([len(own) for own in targets]),
    }


def collate_pairs(
    pairs: Sequence[Preference], pad_token_id: int, rows: RowLayout, sight: Sight | None = None
) -> ModelInputs:
    """Collate pairs: see `collate_answers`."""
    pairs = pairs or [FILLER_PAIR]
    return collate_answers(_list_documents(pairs), pad_token_id, rows, [pair.prompt for pair in pairs], sight)


def collate_unpaired(
    documents: Sequence[Document], pad_token_id: int, rows: RowLayout, sight: Sight | None = None
) -> ModelInputs:
    """Collate single answers, each with its prompt: see `collate_answers`."""
    return collate_answers(documents or [FILLER], pad_token_id, rows, sight=sight)


def collate_scored(
    pairs: Sequence[Preference],
    margins: Sequence[float] | np.ndarray,
    pad_token_id: int,
    rows: RowLayout,
    sight: Sight | None = None,
) -> ModelInputs:
    """Collate B pairs for a reward model, all chosen documents first: `input_ids`, `margin` float32 [B].

    A padded batch has an `attention_mask`. A row has the `row_arguments` and `ends` int64 [2B], the place of each document's scored
    token: its last token that is not padding, as in transformers' models.
    """
    pairs, margins = (pairs, margins) if len(pairs) else ([FILLER_PAIR], [0.0])
    documents, margin = _list_documents(pairs), torch.tensor(margins, dtype=torch.float32)
    if rows == "padding":
        return {**_pad(_with_blank(documents, sight), pad_token_id, sight), "margin": margin}
    segments, places = _lay_out(documents, [pair.prompt for pair in pairs], shared=rows == "shared")
    lasts = [np.flatnonzero(document.input_ids != pad_token_id)[-1:] for document in documents]
    ends = np.array([at[last[0] if len(last) else 0] for at, last in zip(places, lasts, strict=True)])
    row, _ = _collate_row(documents, segments, places, sight)
    del row["shift_labels"]
    return {**row, "margin": margin, "ends": torch.as_tensor(ends)}


def _list_documents(pairs: Sequence[Preference]) -> list[Document]:
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def _lay_out(
    documents: Sequence[Document], prompts: Sequence[int], *, shared: bool
) -> tuple[Segments, list[np.ndarray]]:
    """Lay out documents as a row of T tokens. The two documents of a pair become neighbours.

    `prompts` as in `collate_answers`. If `shared`, the row has a prompt of two tokens or more once, without its last token and up to
    the first picture that differs. Returns the row's segments, and for each document the places of its tokens in the row.
    """
    pairs, alone = len(prompts), [(number,) for number in range(len(documents))]
    groups = [(number, number + pairs) for number in range(pairs)] or alone
    places: list[np.ndarray] = [np.zeros(0, np.int64)] * len(documents)
    lengths, prefixes, end = list[int](), list[int | None](), 0
    for group, prompt in zip(groups, prompts or [0] * len(groups), strict=True):
        common = _count_shareable([documents[number] for number in group], prompt) if shared else 0
        beginning, prefix = np.arange(end, end + common), None
        if common:
            prefix = len(lengths)
            lengths.append(common)
            prefixes.append(None)
        end += common
        for number in group:
            lengths.append(len(documents[number].input_ids) - common)
            prefixes.append(prefix)
            places[number] = np.append(beginning, np.arange(end, end + lengths[-1]))
            end += lengths[-1]
    sharing = any(prefix is not None for prefix in prefixes)
    return Segments(tuple(lengths), tuple(prefixes) if sharing else ()), places


def _count_shareable(documents: Sequence[Document], prompt: int) -> int:
    """Return how many tokens at the beginning of the prompt the documents can share."""
    by_number = zip_longest(*(document.pictures for document in documents))
    differ = [min(picture.start for picture in each if picture) for each in by_number if len({*each}) > 1]
    return outside_pictures(documents[0], min([prompt - 1, *differ]))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` to `device` via pinned memory, without waiting for work that is queued there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def on_device(batch: ModelInputs, device: torch.device) -> ModelInputs:
    """Move the tensors of `batch` to `device`."""
    return {
        name: to_device(value, device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
