"""How long a run over whole epochs will be, as far as counting the rows of its files tells: no row is read, none tokenised."""

from __future__ import annotations

import math
from pathlib import Path

from packtrain.config.schema import DataSource, RunConfig, sources
from packtrain.wording import counted

_COUNTED = 1 << 25  # bytes of a file whose lines are counted; the rest is taken to be like them
_CHUNK = 1 << 20


def length_in_words(config: RunConfig) -> str | None:
    """Steps of the run and where they come from; None where trainer.max_steps says them, or the rows cannot be counted.

    Rows that are dropped, held out by hash, or split are not foreseen, so that it is about so many.
    """
    per_step, epochs = config.batch.examples_per_step, config.trainer.epochs
    if config.trainer.max_steps is not None or per_step is None:
        return None
    rows = [_rows(source) for source in sources(config.data.train)]
    if not rows or any(count is None for count in rows):
        return None
    held_out = config.data.eval if isinstance(config.data.eval, float) else 0.0
    documents = round(sum(count for count in rows if count) * (1 - held_out))
    unit = "documents" if config.objective.kind == "sft" else "pairs"
    steps = math.ceil(math.ceil(documents / per_step) * epochs)
    whole = f"about {counted(steps, 'steps')}: {epochs:g} × {counted(documents, unit)}"
    return f"{whole} in {per_step} a step, if every row of data.train is one"


def _rows(source: DataSource) -> float | None:
    """Lines of a .jsonl file, times its weight; None of anything else."""
    path = Path(source.path).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    lines = seen = 0
    with path.open("rb") as file:
        while seen < _COUNTED and (chunk := file.read(_CHUNK)):
            lines += chunk.count(b"\n")
            seen += len(chunk)
    size = path.stat().st_size
    return source.weight * lines * (size / seen if seen else 1)
