"""`packtrain export`: a trained model for the hub, llama.cpp (GGUF), Ollama, or as a merged folder; each by the tool made for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from packtrain.errors import UserError
from packtrain.serve.gguf import convert, find_converter, find_ollama, write_modelfile
from packtrain.serve.merge import beside, check_free_place, merge, write_merged
from packtrain.serve.trained import Trained, find_trained

Target = Literal["hub", "gguf", "ollama", "merged"]


def export(
    named: str,
    to: Target,
    *,
    name: str | None,
    public: bool,
    output: Path | None,
    converter: str | None,
    dtype: str | None,
) -> list[str]:
    """Exports the model that `named` stands for; returns lines that say what is where, and what to do next."""
    if to == "merged":
        return [str(merge(named, output, dtype))]
    trained = find_trained(named)
    if to == "hub":
        from packtrain.serve.hub import push

        return [push(trained, name, public=public)]
    if trained.scores:
        what = "a reward model gives scores, and programs that run GGUF want tokens"
        raise UserError(what, where=named, fix="Export it to the hub: --to hub.")
    program, target = find_converter(converter), output or beside(trained, "gguf")
    check_free_place(target)
    with _whole(trained, dtype) as folder:
        file = convert(program, folder, target, {"float32": "f32", "bfloat16": "bf16"}.get(dtype or "", "auto"))
        if to == "gguf":
            return [str(file)]
        return [*write_modelfile(folder, file), *find_ollama(file.parent, name or _name_of(trained))]


@contextmanager
def _whole(trained: Trained, dtype: str | None) -> Iterator[Path]:
    """The folder of a whole model: the model's own, or one that adapters are merged into for as long as the block runs."""
    if trained.base is None:
        yield trained.folder
        return
    with TemporaryDirectory(prefix="packtrain-merged-") as folder:
        write_merged(trained, Path(folder, "merged"), dtype)
        yield Path(folder, "merged")


def _name_of(trained: Trained) -> str:
    return (trained.run.root if trained.run else trained.folder).resolve().name.lower()
