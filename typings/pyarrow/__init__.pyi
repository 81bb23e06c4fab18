"""Types of pyarrow, which ships none: only the part that packtrain uses."""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from pyarrow import ipc as ipc

class ArrowException(Exception): ...

class Scalar:
    def as_py(self) -> object: ...

class StructScalar(Scalar):
    def items(self) -> Iterator[tuple[str, Scalar]]: ...

class ListScalar(Scalar):
    @property
    def values(self) -> Iterable[Scalar] | None: ...

class Array:
    def __getitem__(self, at: int) -> Scalar: ...

class Schema:
    names: list[str]

class RecordBatch:
    num_rows: int
    nbytes: int
    schema: Schema
    def column(self, name: str) -> Array: ...
    def take(self, rows: Array) -> RecordBatch: ...

class Table:
    def combine_chunks(self) -> Table: ...
    def to_batches(self) -> list[RecordBatch]: ...

class NativeFile(io.RawIOBase): ...

class OSFile(NativeFile):
    def __init__(self, path: str) -> None: ...

class PythonFile(NativeFile):
    def __init__(self, file: BinaryIO, mode: str) -> None: ...

class CompressedInputStream(NativeFile):
    def __init__(self, file: NativeFile, compression: str) -> None: ...

def memory_map(path: str) -> NativeFile: ...
def array(values: Sequence[Any] | range) -> Array: ...
