"""Sight of a run, and drawn pictures for its proofs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from packtrain.data.dataset import Document, has_pictures_in
from packtrain.data.pictures.processor import PictureProcessor, PictureReader
from packtrain.data.sources.chunks import BadRow
from packtrain.errors import UserError
from packtrain.model.forward import Batch
from packtrain.model.load import base_model
from packtrain.packing.collate import collate_padded
from packtrain.packing.pictures import Sight
from packtrain.proof.exhibits import Exhibits, two_texts

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared

_SIZES = (56, 84), (112, 56)
"""Heights and widths of drawn pictures, in pixels."""
_TEXT_TOKENS = 13
"""Number of tokens of text around a drawn picture."""


def take_sight(run: Prepared) -> None:
    """Set `run.sight`, which shows pictures to the model. It stays None for data without pictures.

    A stream may bring pictures later, and `packtrain verify` has no data: there, any model with an image processor gets a sight.
    Raises UserError for data with pictures if the model takes none, and for trained towers if no picture can come.
    """
    config, base, data = run.config, base_model(run.model), getattr(run, "data", None)
    processor = _processor(run)
    has_pictures = data is not None and any(has_pictures_in(part) for part in (data.train, data.eval) if part)
    may_come = (data is None or data.stream is not None) and bool(processor.content)
    trains_towers = config.model.towers == "trained"
    if not has_pictures and not may_come:
        if trains_towers:
            fix = "Leave it out, or give data with pictures (docs/pictures.md)."
            raise UserError("no document has a picture", where="model.towers", fix=fix, code="towers-without-pictures")
        return
    try:
        sight = Sight.of(base, PictureReader(processor), processor.tokens)
    except BadRow as bad:
        if not has_pictures:
            return  # without a sight: the first picture of a stream raises this error
        raise UserError(bad.what, where="model.path", fix=bad.fix, code="no-image-processor") from bad
    if "pixel_values" not in sight.takes:
        if not has_pictures:
            return
        what = f"the data has pictures, and {type(base).__name__} takes none"
        fix = "Name a model whose config.json names a class that sees, or take the pictures out."
        raise UserError(what, where="model.path", fix=fix, code="model-sees-nothing")
    # trained or sharded towers wait for all processes: each must run them in every micro-batch
    blank = processor.document(*_SIZES[0]) if trains_towers or run.ranks.sharded else None
    run.sight = replace(sight, blank=blank)


def _processor(run: Prepared) -> PictureProcessor:
    return PictureProcessor(run.config.model, run.config.data.max_picture_tokens)


def drawn_pictures(run: Prepared) -> list[Document]:
    """Return documents of one drawn picture each; none without a sight."""
    return [] if run.sight is None else [_processor(run).document(*size) for size in _SIZES]


def in_text(picture: Document, text: Document) -> Document:
    """Insert the picture after the first token of `text`."""
    ids, mask = (
        np.concatenate([own[:1], other, own[1:]]).astype(own.dtype)
        for own, other in ((text.input_ids, picture.input_ids), (text.loss_mask, picture.loss_mask))
    )
    moved = (replace(shown, start=shown.start + 1, end=shown.end + 1) for shown in picture.pictures)
    return Document(ids, mask, tuple(moved))


def exhibits_of(run: Prepared) -> Exhibits | None:
    """Return two documents with drawn pictures for the proof, None without a sight."""
    if run.sight is None:
        return None
    texts = two_texts(base_model(run.model), run.sight, _TEXT_TOKENS)
    first, last = (
        in_text(picture, Document(ids, np.zeros(_TEXT_TOKENS, bool)))
        for picture, ids in zip(drawn_pictures(run), texts, strict=True)
    )
    return Exhibits(run.sight, first, last)


def picture_batch(run: Prepared) -> Batch | None:
    """Return a padded document with a picture, without labels. None unless towers are trained.

    A backward pass from it shows which weights of the towers get gradients.
    """
    exhibits = exhibits_of(run) if run.config.model.towers == "trained" else None
    if exhibits is None:
        return None
    batch = collate_padded([exhibits.first], exhibits.sight.text, exhibits.sight)
    return {name: value for name, value in batch.items() if name != "shift_labels"}
