"""Encoded pictures: their size without decoding, the checks before training, and the decoding itself.

Decoding gives the same pixels as transformers' `load_image`, which TRL uses: turned by EXIF, then `convert("RGB")`, which drops
alpha. A truncated file lacks the end marker of its format. Only a file without the marker is decoded before training, to be sure.
"""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.data.sources.chunks import BadRow
from packtrain.errors import UserError
from packtrain.wording import first_line

if TYPE_CHECKING:
    from PIL import Image

_SIDE = 192  # pixels of a thumbnail's longer side at most
MAX_PIXELS = 1 << 27
"""Most pixels of a picture (400 MB when decoded). Larger ones are mostly decompression bombs."""
_TURNED = (5, 6, 7, 8)
"""Values of EXIF's orientation that swap height and width."""
_MORE_BITS = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""PIL's modes with more than 8 bits. `convert("RGB")` would clip them."""
_PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Marks of a PNG that may have EXIF's orientation."""
_TAIL = 4096
"""Last bytes of a file that are searched for the end marker: some writers add bytes after it."""
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""End markers by format."""


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


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """Size and hash of an encoded picture.

    `size`: height and width as a viewer shows it. `hash`: 64 bits, of the encoded bytes.
    """

    size: tuple[int, int]
    hash: int


@contextmanager
def _open(content: bytes) -> Iterator[Image.Image]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL warns of large pictures and of odd metadata
        with Image.open(io.BytesIO(content)) as image:
            yield image


def inspect_bytes(content: bytes, name: str, field: str) -> PictureHeader:
    """Read the header of an encoded picture. Raises BadRow for a picture that cannot be trained on."""
    from PIL import Image

    def refuse(reason: str, what: str, fix: str = "") -> BadRow:
        return BadRow(reason, f"{name} {what}", field, fix)

    try:
        with _open(content) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                fix = "Scale it down: models see far fewer pixels."
                raise refuse("huge picture", f"has {width}×{height} pixels, more than {MAX_PIXELS:,}", fix)
            if getattr(image, "is_animated", False) and image.format != "MPO":
                fix = "Save the frame that you mean as a picture of its own."
                raise refuse("animated picture", f"is animated ({image.format}, several frames)", fix)
            if image.mode in _MORE_BITS:
                fix = "Convert it to 8 bits for each channel."
                raise refuse("picture of many bits", f"has grey values of more than 8 bits (mode {image.mode})", fix)
            if not _has_end(content, image.format or ""):
                image.load()
            # getexif decodes a PNG: skip it for one that has no EXIF
            may_turn = image.format != "PNG" or any(mark in content for mark in _PNG_EXIF)
            turned = may_turn and image.getexif().get(0x0112) in _TURNED
    except BadRow:
        raise
    except Image.DecompressionBombError as error:
        raise refuse("huge picture", f"is too large: {error}") from error
    except Exception as error:  # PIL's readers may raise anything for damaged files
        told = "is no picture that PIL can read" if isinstance(error, Image.UnidentifiedImageError) else ""
        raise refuse("broken picture", told or f"is broken: {first_line(error)}", "Get the picture anew.") from error
    return PictureHeader((width, height) if turned else (height, width), _hash(content))


def _has_end(content: bytes, format: str) -> bool:
    """Return whether the file has the end that its format wants. False for formats without an end marker."""
    if format == "WEBP":
        return len(content) >= int.from_bytes(content[4:8], "little") + 8
    if format == "GIF":
        return content.rstrip(b"\0").endswith(b";")
    return format in _ENDS and _ENDS[format] in content[-_TAIL:]


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def read_bytes(picture: Picture) -> bytes:
    """Return the encoded picture. Raises UserError if its file is gone."""
    if picture.content:
        return picture.content
    try:
        if not picture.size:
            return Path(picture.file).read_bytes()
        with open(picture.file, "rb") as file:
            file.seek(picture.offset)
            return file.read(picture.size)
    except OSError as error:
        what = f"a picture cannot be read any more: {error.strerror or error}"
        fix = "Put it back where it was when the data was tokenised."
        raise UserError(what, where=picture.name, fix=fix, code="picture-gone") from error


def decode(picture: Picture) -> Image.Image:
    """Return the picture in RGB. Raises UserError if it is broken, or changed since it was tokenised."""
    from PIL import ImageOps

    content = read_bytes(picture)
    try:
        with _open(content) as image:
            made = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # PIL's readers may raise anything for damaged files
        what, fix = f"the picture is broken: {first_line(error)}", "Get it anew, or take its row out."
        raise UserError(what, where=picture.name, fix=fix, code="picture-broken") from error
    if (made.height, made.width) != (picture.height, picture.width) or picture.hash not in (0, _hash(content)):
        what = f"this is not the picture of {picture.width}×{picture.height} pixels that was tokenised"
        fix = "Put the old one back, or set data.cache_dir to another folder, which tokenises the data anew."
        raise UserError(what, where=picture.name, fix=fix, code="picture-changed")
    return made


def thumbnail(picture: Picture) -> str:
    """Return a small copy of the picture as a data URL. Raises UserError if the picture is broken."""
    image, file = decode(picture), io.BytesIO()
    image.thumbnail((_SIDE, _SIDE))
    image.save(file, "jpeg", quality=90, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
