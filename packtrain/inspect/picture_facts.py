"""Pictures of shown examples, and the audit's checks of pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from packtrain.data.pictures.encoded import Picture, thumbnail
from packtrain.data.pictures.processor import PictureProcessor
from packtrain.data.pictures.source import MISPLACED
from packtrain.data.tokens.encode import STRAY
from packtrain.errors import UserError
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.rendering import Shown
from packtrain.wording import counted

THUMBNAILS = 60
"""Most thumbnails on a page; each takes a few kB."""
PICTURE_FAULTS = {
    "pictures_without_tokens": (
        "these rows have more or fewer pictures than places for them, so they are left out",
        "Write one place (a part of type image, or <image>) for each picture.",
    ),
    "tokens_without_pictures": (
        "the tokens contain the model's token for a picture ({token}), but no picture belongs to it",
        "Take it out of the texts or tokens, or give the pictures: parts of type image, or a column images.",
    ),
    "pictures_cut_off": (
        "pictures lie beyond data.max_length={max_length} and are cut off",
        "Raise data.max_length, or lower data.max_picture_tokens.",
    ),
    "same_picture_twice": (
        "the same picture stands in the row twice, byte for byte",
        "If it is not meant, see where the rows were written: the second may be another picture's place.",
    ),
    "pictures_scaled_down": (
        "pictures have more than data.max_picture_tokens={most} tokens, so they are scaled down",
        "Raise data.max_picture_tokens if details matter, such as small writing.",
    ),
    "shared_pictures": (
        "a picture of an earlier row is here again, byte for byte",
        "Several questions on one picture are usual. Else take them out: the answers belong to another picture.",
    ),
}
"""Faults of pictures: problem and fix."""
MEANT = ("pictures_scaled_down", "shared_pictures")
"""Faults that may be intended."""


def find_picture_faults(corpus: Corpus, stray: np.ndarray) -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """Yield each fault of PICTURE_FAULTS: name, rows of data.train, and earlier rows repeated there.

    `stray`: bool[documents], True with a picture's token outside of all pictures.
    """
    yield "pictures_without_tokens", _trained(corpus, corpus.dropped_for(MISPLACED)), []
    rows = np.union1d(corpus.row_of[corpus.in_train & stray], _trained(corpus, corpus.dropped_for(STRAY)))
    yield "tokens_without_pictures", rows, []
    yield "pictures_cut_off", _trained(corpus, corpus.fates["cut_pictures"] > 0), []
    table = corpus.pictures[corpus.in_train[corpus.pictures["document"]]]
    # both documents of a pair, and all parts of a split row, are one row: a shared prompt shows its pictures once
    _, twice = np.unique(table[["document", "hash"]], return_counts=True)
    documents = np.unique(table[["document", "hash"]])["document"][twice > 1]
    yield "same_picture_twice", np.unique(corpus.row_of[documents]), []
    yield "pictures_scaled_down", np.unique(corpus.row_of[table["document"][_are_scaled(corpus, table)]]), []
    first, earlier = dict[int, int](), dict[int, int]()
    for row, seen in zip(corpus.row_of[table["document"]].tolist(), table["hash"].tolist(), strict=True):
        if first.setdefault(seen, row) != row:
            earlier.setdefault(row, first[seen])
    yield "shared_pictures", np.array([*earlier], np.int64), [*earlier.values()]


def _trained(corpus: Corpus, rows: np.ndarray) -> np.ndarray:
    return np.flatnonzero(corpus.rows_of_train & rows)


def _are_scaled(corpus: Corpus, table: np.ndarray) -> np.ndarray:
    """Return which pictures are scaled down, bool[n]. The processor is asked once for each size."""
    most = corpus.config.data.max_picture_tokens
    if most is None or not len(table):
        return np.zeros(len(table), bool)
    processor = PictureProcessor(corpus.config.model, most)
    sizes, which = np.unique(table[["height", "width"]], return_inverse=True)
    scaled = [processor.scale(int(height), int(width)) != (height, width) for height, width in sizes.tolist()]
    return np.array(scaled)[which]


def show_picture(picture: Picture) -> Shown:
    """Return the span that stands for a picture's tokens."""
    tokens = picture.end - picture.start
    fields = {name: getattr(picture, name) for name in ("width", "height", "file", "offset", "size")}
    text = f"[picture {picture.width}×{picture.height}] ({counted(tokens, 'tokens')})"
    return {"text": text, "trained": False, "special": True, "picture": {**fields, "tokens": tokens}}


def add_thumbnails(examples: Iterable[Shown]) -> None:
    """Add `image`, a data URL, to the pictures of shown examples. Pictures that are gone stay words."""
    parts = (part for example in examples for part in example["parts"])
    pictures: list[dict] = [span["picture"] for part in parts for span in part["spans"] if "picture" in span]
    for shown in pictures[:THUMBNAILS]:
        fields: Mapping[str, object] = {name: shown[name] for name in ("file", "offset", "size", "height", "width")}
        try:
            shown["image"] = thumbnail(Picture(**fields, start=0, end=shown["tokens"]))
        except UserError:
            continue
