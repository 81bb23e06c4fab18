"""Types of fsspec, which ships none: only the part that packtrain uses."""

from typing import BinaryIO

from fsspec import core as core

class OpenFile:
    def open(self) -> BinaryIO: ...

def open(url: str, mode: str) -> OpenFile: ...
