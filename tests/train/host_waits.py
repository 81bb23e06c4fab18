"""Which operations of a training step make the process wait for its device, and whose they are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from here import ALONE, train_here
from running import LLAMA, write_jsonl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from packtrain.config.compose import load_config
from packtrain.model.spread import Ranks
from packtrain.train import loader
from packtrain.train.loop import StepTrainer

FIRST, LAST = 5, 7
"""The steps that are looked at: after those that are proved, between two logged lines, and without a checkpoint."""
PACKAGES = ("packtrain", "trl", "transformers", "accelerate", "peft")
_ON_THE_CPU = {
    "packtrain/packing/segments.py",
    "packtrain/packing/collate.py",
    "packtrain/attention/per_document.py::_batch",
}
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_DATA_DEPENDENT = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Waits(TorchDispatchMode):
    """On a CPU: counts what would wait on a GPU, reads of values and results whose size depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._reads = _Reads(self.found)

    def __enter__(self) -> Any:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean = name in _INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1])
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if boolean or counted or name in _DATA_DEPENDENT:
            note(self.found)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Reads that are no operations: lists and arrays of a tensor."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            note(self._found)
        return func(*args, **(kwargs or {}))


def note(found: Counter[str]) -> None:
    """Counts one wait of the innermost library on the stack, except where tensors are on the CPU by design."""
    frame: Any = sys._getframe(1)
    while frame is not None and (place := place_of(frame.f_code.co_filename)) is None:
        frame = frame.f_back
    if frame is None:
        found["?"] += 1
    elif not {place, whose := f"{place}::{frame.f_code.co_name}"} & _ON_THE_CPU:
        found[whose] += 1


def place_of(file: str) -> str | None:
    """A file of one of PACKAGES, from the name of the package on; None for others."""
    parts = Path(file).parts
    last = max((at for at, part in enumerate(parts) if part in PACKAGES), default=None)
    if last is None or "site-packages" in parts[last:] or "tests" in parts[last:]:
        return None
    return "/".join(parts[last:])


def train_watched(
    changes: list[str], folder: Path, ranks: Ranks = ALONE, *, watch: AbstractContextManager[Any]
) -> None:
    """Trains eight steps by a config with these `changes`, with `watch` open over steps FIRST to LAST."""
    config = load_config(None, ["trainer.log_every=4", "trainer.max_steps=8", *changes])
    begin: Callable[..., Any] = StepTrainer.next_batches

    def watched(self: StepTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.step == FIRST - 1:
            watch.__enter__()
        elif self.state.step == LAST:
            watch.__exit__(None, None, None)
        return begin(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTrainer, "next_batches", watched)
        patch.setattr(loader, "loader_processes", lambda **_: 1)  # what the loader does is no part of the step
        train_here(config, folder / "run", ranks)


def tiny_run(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The config of a tiny run on these rows, as overrides."""
    data = write_jsonl(folder / "data.jsonl", rows)
    sizes = [f"+model.config.{name}={value}" for name, value in LLAMA.items()]
    model = ["model.init=random", "model.tokenizer=quickstart", *sizes]
    batch = ["batch.examples_per_step=6", "batch.tokens_per_device=512", "data.max_length=200"]
    return [*model, *batch, f"data.train={data}", f"data.cache_dir={folder / 'cache'}"]


def answers(kind: str, count: int) -> list[dict[str, Any]]:
    """Rows of pairs, or of answers with labels."""
    if kind == "kto":
        return [{"prompt": "Say it: ", "completion": " river" * (n % 7 + 1), "label": n % 3 > 0} for n in range(count)]
    return [
        {"prompt": "Say it: ", "chosen": " river" * (n % 7 + 1), "rejected": " stone" * (n % 3 + 1)}
        for n in range(count)
    ]
