"""Pictures of a run: what its model needs to see them, and drawn ones for proofs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.data.dataset import Document, has_pictures_in
from packtrain.data.pictures.pixels import PictureReader
from packtrain.data.pictures.processor import PictureProcessor
from packtrain.data.sources.chunks import BadRow
from packtrain.errors import UserError
from packtrain.model.forward import Batch
from packtrain.model.load import base_model
from packtrain.packing.collate import collate_padded
from packtrain.packing.pictures import Sight
from packtrain.proof.exhibits import Exhibits
from packtrain.proof.isolation import vocabulary_size

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared

_SIZES = (56, 84), (112, 56)
"""Heights and widths of drawn pictures, in pixels."""
_TEXT = 13
"""Tokens of text around a drawn picture."""


def take_sight(run: Prepared) -> None:
    """Set what the loaded model needs to see the pictures of the data. Nothing without pictures.

    Without data, as in `packtrain verify`, any model with an image processor sees. Raises UserError for a model that takes no pictures, and if
    towers are to be trained without any.
    """
    config, base, data = run.config, base_model(run.model), getattr(run, "data", None)
    processor = PictureProcessor(config.model, config.data.max_picture_tokens)
    has_pictures = data is not None and any(has_pictures_in(part) for part in (data.train, data.eval) if part)
    may_come = (data is None or data.stream is not None) and bool(processor.content)
    trains = config.model.towers == "trained"
    if not has_pictures and not may_come:
        if trains:
            fix = "Leave it out, or give data with pictures (docs/pictures.md)."
            raise UserError("no document has a picture", where="model.towers", fix=fix, code="towers-without-pictures")
        return
    try:
        sight = Sight.of(base, PictureReader(processor), processor.tokens)
    except BadRow as bad:
        if not has_pictures:  # nothing to see yet
            return
        raise UserError(bad.what, where="model.path", fix=bad.fix, code="no-image-processor") from bad
    if "pixel_values" not in sight.takes:
        if not has_pictures:
            return
        what = f"the data has pictures, and {type(base).__name__} takes none"
        fix = "Name a model whose config.json names a class that sees, or take the pictures out."
        raise UserError(what, where="model.path", fix=fix, code="model-sees-nothing")
    # all processes run sharded towers together, and train them alike
    run.sight = replace(sight, blank=processor.document(*_SIZES[0])) if trains or run.ranks.sharded else sight


def drawn_pictures(run: Prepared) -> list[Document]:
    """Return documents that are a picture each. None without a sight."""
    if run.sight is None:
        return []
    processor = PictureProcessor(run.config.model, run.config.data.max_picture_tokens)
    return [processor.document(*size) for size in _SIZES]


def in_text(picture: Document, text: Document) -> Document:
    """Return `text` with the picture behind its first token."""
    ids, mask = (
        np.concatenate([own[:1], other, own[1:]]).astype(own.dtype)
        for own, other in ((text.input_ids, picture.input_ids), (text.loss_mask, picture.loss_mask))
    )
    return Document(ids, mask, tuple(replace(one, start=one.start + 1, end=one.end + 1) for one in picture.pictures))


def exhibits_of(run: Prepared) -> Exhibits | None:
    """Return two documents with drawn pictures for the proof, None if the model need not see."""
    if run.sight is None:
        return None
    ids: Any = np.random.default_rng(0).integers(0, vocabulary_size(base_model(run.model)), (2, _TEXT))
    texts = (Document(own, np.zeros(_TEXT, bool)) for own in run.sight.as_text(ids))
    return Exhibits(
        run.sight, *(in_text(picture, text) for picture, text in zip(drawn_pictures(run), texts, strict=True))
    )


def picture_batch(run: Prepared) -> Batch | None:
    """Return a padded document with a picture, without labels. None unless towers are trained."""
    exhibits = exhibits_of(run) if run.config.model.towers == "trained" else None
    if exhibits is None:
        return None
    batch = collate_padded([exhibits.first], exhibits.sight.text, exhibits.sight)
    return {name: value for name, value in batch.items() if name != "shift_labels"}
