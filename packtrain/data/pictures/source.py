"""Pictures of rows before tokenising: paths, URLs and encoded bytes."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlparse

from packtrain.data.pictures.encoded import Picture, inspect_bytes
from packtrain.data.sources.chunks import BadRow, is_object, wrong_type
from packtrain.wording import first_line

KEYS = ("bytes", "base64", "image", "image_url", "url", "path")
"""Keys of a picture in a part, or in Hugging Face's Image feature. Bytes go before a path, which may be a mere name."""
KINDS = ("image", "image_url")
"""Types of parts that are pictures."""
MISPLACED = "pictures misplaced"
"""Reason for dropping rows whose pictures and places differ in number."""
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture of a row: its path or URL, or else its encoded bytes. `field` is its place in the row."""

    path: str
    content: bytes = field(default=b"", repr=False)
    field: str = field(default="", compare=False)


def read_source(value: object, where: str, folder: str) -> PictureSource | None:
    """Read the picture at `where`; None for a part without one. Relative paths start from `folder`, a path or URL."""
    if is_object(value):
        name = next((name for name in KEYS if value.get(name) not in (None, "", b"")), None)
        if name is None:
            return None
        inner, where = value[name], f"{where}.{name}"
        if name in ("bytes", "base64") and isinstance(inner, str):
            return PictureSource("", _decode(inner, where), where)
        return read_source(inner, where, folder)
    if isinstance(value, (bytes, bytearray)):
        return PictureSource("", bytes(value), where)
    if not isinstance(value, str):
        raise wrong_type("a path, a URL or the bytes of a picture", value, where)
    if value.startswith("data:"):
        return PictureSource("", _decode(value.partition(",")[2], where), where)
    if value.startswith("file://"):
        value = unquote(urlparse(value).path)
    if "://" in value:
        return PictureSource(value, field=where)
    if "://" in folder:
        return PictureSource(f"{folder.rstrip('/')}/{value}", field=where)
    return PictureSource(os.path.abspath(os.path.join(folder, os.path.expanduser(value))), field=where)


def _decode(text: str, where: str) -> bytes:
    try:
        if content := base64.b64decode("".join(text.split()), validate=True):
            return content
        raise ValueError("it is empty")
    except (binascii.Error, ValueError) as error:
        raise BadRow("broken picture", f"expected base64: {error}", where) from None


@lru_cache(16)
def look(source: PictureSource) -> Picture:
    """Return the picture with its size in pixels, not decoded. Raises BadRow for a picture that cannot be used."""
    content, name = source.content, source.path or "the picture"
    if not content:
        try:
            content = _fetch(source.path) if "://" in source.path else _read(Path(source.path))
        except Exception as error:  # libraries of buckets may raise anything
            why = getattr(error, "strerror", None) or first_line(error)
            raise BadRow("no picture", f"cannot read {name}: {why}", source.field) from error
    seen = inspect_bytes(content, name, source.field)
    if source.path and "://" not in source.path:
        return Picture(source.path, 0, 0, *seen.size, 0, 0, seen.hash)
    return Picture("", 0, len(content), *seen.size, 0, 0, seen.hash, content)


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a device may have no end
        raise OSError(None, "it is no file")
    return path.read_bytes()


def _fetch(url: str) -> bytes:
    if url.startswith(("http://", "https://")):
        from huggingface_hub import get_session

        answer = get_session().get(url, timeout=_TIMEOUT_S, follow_redirects=True)
        answer.raise_for_status()
        return answer.content
    import fsspec

    with fsspec.open(url, "rb").open() as file:
        return file.read()
