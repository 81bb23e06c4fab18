"""`packtrain export`: a trained model for the hub, llama.cpp (GGUF), Ollama, or as a merged folder; each by the tool made for it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from packtrain.errors import UserError
from packtrain.serve.gguf import convert, find_converter, give_to_ollama
from packtrain.serve.merge import beside, check_free_place, merge, write_merged
from packtrain.serve.trained import find_trained

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
    with ExitStack() as stack:
        folder = trained.folder
        if trained.base is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="packtrain-merged-")), "merged")
            write_merged(trained, folder, dtype)
        file = convert(program, folder, target, {"float32": "f32", "bfloat16": "bf16"}.get(dtype or "", "auto"))
        own = trained.run.root if trained.run else trained.folder
        return [str(file)] if to == "gguf" else give_to_ollama(folder, file, name or own.resolve().name.lower())
