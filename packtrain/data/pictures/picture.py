"""A picture of a document, without its pixels."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture between the tokens of a document.

    `file` holds its encoded bytes (png, jpeg, …): `size` bytes from `offset`, or all of the file if `size` is 0. Its tokens are the
    document's tokens from `start` to before `end`, with line breaks and borders of tiles between them. `height` and `width` in pixels, as a
    viewer shows it (turned by EXIF). `hash` is a 64-bit hash of the encoded bytes: pictures that look alike have one. `content` has the
    bytes themselves while no file has them, as in a stream.
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
        """The picture's place, for messages."""
        inside = f", {self.size:,} bytes from byte {self.offset:,}" if self.size and self.file else ""
        return f"{self.file or 'a picture of the stream'}{inside}"
