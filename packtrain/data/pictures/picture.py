"""A picture of a document, without its pixels."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture between the tokens of a document.

    `file` holds its encoded bytes (png, jpeg, …): `size` bytes from `offset`, or the whole file if `size` is 0. `content` has the bytes
    if no file has them, as in a stream. `hash` is a 64-bit hash of these bytes, 0 if unknown. `start` and `end`: its tokens in the
    document; line breaks and borders of tiles may be among them. `height` and `width` in pixels, as a viewer shows it (turned by EXIF).
    """

    file: str
    offset: int
    size: int
    height: int
    width: int
    start: int
    end: int
    hash: int = 0
    content: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """Return the picture's file or place, for messages."""
        inside = f", {self.size:,} bytes from byte {self.offset:,}" if self.size and self.file else ""
        return f"{self.file or 'a picture of the stream'}{inside}"
