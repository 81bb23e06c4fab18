from collections.abc import Iterator
from typing import BinaryIO

from pyarrow import RecordBatch

class RowGroupMetaData:
    num_rows: int
    total_byte_size: int

class FileMetaData:
    def row_group(self, number: int) -> RowGroupMetaData: ...

class ParquetFile:
    num_row_groups: int
    metadata: FileMetaData
    def __init__(self, file: BinaryIO) -> None: ...
    def __enter__(self) -> ParquetFile: ...
    def __exit__(self, *error: object) -> None: ...
    def iter_batches(self, batch_size: int, row_groups: list[int]) -> Iterator[RecordBatch]: ...
