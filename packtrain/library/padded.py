"""Convert padded calls [B, L] to rows without padding, and per-token outputs back.

Only the call's arguments are read: token ids, attention mask, positions and labels. Common beginnings of documents (the prompt
of a group or a pair, turns of a chat) are found from the ids (packing/prefixes.py), and are in a row once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packtrain.packing.collate import IGNORE, on_device, row_arguments, to_device
from packtrain.packing.prefixes import rows_of
from packtrain.packing.segments import Segments

TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "margin")
"""Arguments of a call that rows do not get. `margin` belongs to TRL's reward loss, which finds it in the batch."""


class NotPacked(Exception):
    """Why a call runs unpacked, in a few words."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of a padded call, and the way of their outputs back to the batch.
    `rows`: segments of each row, and int64 [T] the place (b · L + column) of each token in the batch, which has `shape` [B, L].
    `slots`, int64 [B · L]: for each place the number of its token, counted through the rows; the total of tokens for padding.
    `real`: tokens that are not padding."""

    rows: tuple[tuple[Segments, np.ndarray], ...]
    slots: np.ndarray
    shape: torch.Size
    real: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all rows."""
        return sum(segments.tokens for segments, _ in self.rows)

    def arguments(self, row: int, input_ids: torch.Tensor) -> dict[str, Any]:
        """Return the model's arguments for one of the rows."""
        segments, places = self.rows[row]
        ids = input_ids.flatten()[to_device(torch.from_numpy(places), input_ids.device)][None]
        return {"input_ids": ids, **on_device(row_arguments(segments), input_ids.device)}


def layout_of_call(
    call: Mapping[str, Any],
    *,
    left_padding: bool,
    share: bool,
    tokens_per_row: int | None,
) -> Layout:
    """Lay out a padded call, given by its keyword arguments, in rows.

    `left_padding`: padding on the left does not change the model's outputs. Waits for the device of ids and mask. Raises NotPacked if
    packing is impossible or saves nothing."""
    ids, mask = call["input_ids"], call["attention_mask"]
    real = mask.bool().cpu().numpy()
    starts, lengths = real.argmax(axis=1), real.sum(axis=1)
    columns = np.arange(real.shape[1])
    if (real != ((columns >= starts[:, None]) & (columns < (starts + lengths)[:, None]))).any():
        raise NotPacked("an attention mask with holes")
    if not lengths.any():
        raise NotPacked("no tokens")
    rows = np.flatnonzero(lengths)
    if (given := call.get("position_ids")) is not None:
        if given.dim() != 2 or (given.cpu().numpy() != columns - starts[:, None])[real].any():
            raise NotPacked("position_ids of their own")
    elif starts[rows].any() and not left_padding:
        raise NotPacked("padding on the left changes the outputs of the model")
    tokens = ids.cpu().numpy()
    documents = [tokens[row, starts[row] : starts[row] + lengths[row]] for row in rows]
    packed = rows_of(documents, tokens_per_row or int(lengths.sum()), share=share)
    slots, before, laid_rows = np.full(real.shape, sum(row.segments.tokens for row in packed)), 0, []
    for row in packed:
        places = [
            rows[number] * real.shape[1] + starts[rows[number]] + np.arange(len(documents[number]))
            for number in row.documents
        ]
        slots.flat[np.concatenate(places)] = before + np.concatenate(row.places)
        laid_rows.append((row.segments, np.concatenate(places)[row.sources]))
        before += row.segments.tokens
    if before == real.size:
        raise NotPacked("nothing padded and nothing shared")
    return Layout(tuple(laid_rows), slots.ravel(), ids.shape, int(lengths.sum()))


def check_call(call: Mapping[str, Any]) -> None:
    """Raise NotPacked unless the keyword arguments are a padded batch of texts, outside of generation."""
    ids, mask = call.get("input_ids"), call.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise NotPacked("no batch of input_ids")
    if call.get("past_key_values") is not None or call.get("use_cache"):
        raise NotPacked("generation with a cache")
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise NotPacked("no attention mask of the shape of input_ids")
    if call.get("output_attentions"):
        raise NotPacked("output_attentions")
    for name, value in call.items():
        number = isinstance(value, str) or (isinstance(value, torch.Tensor) and not value.dim())  # num_items_in_batch
        if name not in TAKEN and isinstance(value, torch.Tensor | Sequence) and not number:
            raise NotPacked(name)


def row_of_positions(call: Mapping[str, Any]) -> Segments | None:
    """Return the row of a call whose positions restart with each document, else None. Padding-free collators of other libraries write
    these positions. Reads the positions on the CPU, so it waits for their device."""
    ids, positions = call.get("input_ids"), call.get("position_ids")
    if any(call.get(name) is not None for name in ("past_key_values", "attention_mask")):
        return None
    if ids is None or positions is None or positions.shape != ids.shape or ids.dim() != 2 or len(ids) != 1:
        return None
    counted = positions[0].cpu().numpy()
    starts = np.flatnonzero(counted == 0)
    if len(starts) < 2 or starts[0]:
        return None
    row = Segments(tuple(np.diff(starts, append=len(counted)).tolist()))
    return row if (row.position_ids()[0].numpy() == counted).all() else None


def places_with_labels(labels: torch.Tensor, layout: Layout) -> np.ndarray:
    """Return the places whose next token has a label. They are int64 [n], counted through [B, L - 1]. Raises NotPacked unless there is a
    label for each token, or if such a place is padding: a model's output there depends on how it treats padding."""
    if labels.shape != layout.shape:
        raise NotPacked("labels of another shape")
    labelled = labels.cpu().numpy()[:, 1:] != IGNORE
    padding = layout.slots.reshape(layout.shape)[:, :-1] == layout.tokens
    if (labelled & padding).any():
        raise NotPacked("a label after padding")
    return np.flatnonzero(labelled)


def at_places(values: torch.Tensor, slots: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Put the rows' outputs `values` [T, …] at `slots`, as a tensor [*shape, …]. It is zero where a slot is T."""
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded.index_select(0, slots).view(*shape, *values.shape[1:])
