"""The files and folders that a run reads, by config key: none may lie where it writes (run_folder.py)."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

from packtrain.config.schema import RunConfig, sources
from packtrain.plan.reference_choice import base_of


def inputs(config: RunConfig, given: str | None) -> Iterator[tuple[str, str]]:
    """(key, path), globs written out; hub ids and names of built-in things are among them. `given` is the config's own path."""
    model, data, reference = config.model, config.data, config.objective.reference
    named = {"model.path": model.path, "model.tokenizer": model.tokenizer, "objective.reference": reference}
    bases = {f"the base of {key}": base_of(path) for key, path in named.items()}
    for key, path in {"the config": given, **named, **bases, "data.chat_template": data.chat_template}.items():
        if path:
            yield key, path
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        for source in sources(value):
            found = glob.glob(os.path.expanduser(source.path), recursive=True)
            yield from ((key, path) for path in found or [source.path])
