"""Files opened as bytes or text: decompressed while they are read, and as Unicode in whatever form their first bytes name.

zstd comes from pyarrow: no package more, several frames in one file, and four times the speed of gzip.
"""

from __future__ import annotations

import codecs
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import pyarrow as pa

from packtrain.errors import UserError

PACKED = (".gz", ".zst")
_UTF8 = "utf-8-sig"
_MARKS = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def open_bytes(path: Path) -> BinaryIO:
    """The file, decompressed where its name ends in one of PACKED."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path))
    if name.endswith(".zst"):
        unpacked: Any = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        return io.BufferedReader(unpacked, 1 << 20)
    return open(path, "rb", 1 << 20)


def _encoding(path: Path) -> tuple[str, bytes]:
    """_UTF8, or the form of Unicode that the byte order mark names; and the file's first bytes."""
    with open_bytes(path) as file:
        head = file.read(4)
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), _UTF8), head


def open_text(path: Path, newline: str | None = "") -> TextIO:
    """The file as text, `newline` as in `open`; in UTF-8, bytes that are none are kept as surrogates (\\udc80 to \\udcff).

    Raises UserError for UTF-16 that does not say so: half of its bytes would be taken for NUL.
    """
    encoding, head = _encoding(path)
    if encoding == _UTF8 and b"\0" in head[:2]:
        what = "the file begins with a NUL byte, as UTF-16 without a byte order mark does"
        fix = (
            f"Convert it (iconv -f utf-16{'be' if head[0] == 0 else 'le'} -t utf-8), or take it away if it is no text."
        )
        raise UserError(what, where=str(path), fix=fix)
    return io.TextIOWrapper(open_bytes(path), encoding, "surrogateescape" if encoding == _UTF8 else "strict", newline)


def lines_of(path: Path) -> Iterator[bytes]:
    """Lines in UTF-8, each with the \\n that ends it."""
    encoding, _ = _encoding(path)
    if encoding == _UTF8:
        with open_bytes(path) as file:
            yield from file
    else:
        with io.TextIOWrapper(open_bytes(path), encoding, newline="\n") as text:
            for line in text:
                yield line.encode()
