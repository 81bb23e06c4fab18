"""A picture of a document, without its pixels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture between the tokens of a document.

    `file` holds its encoded bytes (png, jpeg, …): `size` bytes from `offset`, or all of the file if `size` is 0. Its tokens are the
    document's tokens from `start` to before `end`, with line breaks and borders of tiles between them. `height` and `width` in pixels, as a
    viewer shows it (turned by EXIF).
    """

    file: str
    offset: int
    size: int
    height: int
    width: int
    start: int
    end: int
