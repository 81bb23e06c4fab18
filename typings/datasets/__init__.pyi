"""Types of datasets, which ships none: only the part that packtrain uses."""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

class Dataset:
    _fingerprint: str
    num_rows: int
    def with_format(self, type: str) -> Dataset: ...
    def iter(self, batch_size: int) -> Iterator[pa.Table]: ...

class DatasetDict(Mapping[str, Dataset]): ...

class BuilderConfig:
    data_files: Mapping[str, Sequence[str]] | None

class DatasetBuilder:
    config: BuilderConfig

def load_dataset(path: str, name: str | None = None, *, split: str) -> Dataset: ...
def load_dataset_builder(path: str, name: str | None = None) -> DatasetBuilder: ...
def load_from_disk(path: str) -> Dataset | DatasetDict: ...
def disable_progress_bars() -> None: ...
