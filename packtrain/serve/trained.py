"""What a path names after a training, and how it is loaded: a run folder stands for its final/, and adapters bring their base model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packtrain.config.rules.paths_and_packages import MODEL_SUFFIXES, is_local, nearest
from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError, read_json
from packtrain.plan.known_model import base_of
from packtrain.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Trained:
    """A model by its `path` (folder, .gguf file or hub id), the `base` of adapters, and the `run` that trained it, where it is known."""

    path: str
    base: str | None
    run: RunFolder | None

    @property
    def folder(self) -> Path:
        """The local folder. Raises UserError for a hub id or a file."""
        if not os.path.isdir(place := os.path.expanduser(self.path)):
            raise UserError(f"{self.path} is no folder", where="MODEL", fix="Download it: hf download, then name it.")
        return Path(place)

    @property
    def tokenizer(self) -> str:
        """Where its tokenizer is: adapters may come without one."""
        own = self.base is None or (self.folder / "tokenizer_config.json").exists()
        return self.path if own else str(self.base)

    @property
    def scores(self) -> bool:
        """Whether it is a reward model, which gives a score in place of tokens."""
        if self.base is not None:
            return read_json(self.folder / "adapter_config.json").get("task_type") == "SEQ_CLS"
        config = Path(os.path.expanduser(self.path), "config.json")
        kinds = read_json(config).get("architectures") if config.is_file() else None
        return any("SequenceClassification" in str(kind) for kind in kinds or ())


def find_trained(named: str) -> Trained:
    """The model that a run folder, a model folder, a .gguf file or a hub id stands for. Raises UserError where it is not there."""
    place = Path(os.path.expanduser(named))
    if not place.exists():
        if is_local(named, MODEL_SUFFIXES):
            raise UserError(f"there is no {named}", where="MODEL", fix=nearest(named))
        return Trained(named, None, None)
    run, path = RunFolder(place), named
    if run.mark.exists() or run.summary.exists():
        if not run.final.is_dir():
            fix = "Let the run end, or name a checkpoint's model: RUN_DIR/checkpoints/step-…"
            raise UserError("this run has no final/ yet", where=named, fix=fix)
        path = str(run.final)
    elif place.is_dir():
        run = RunFolder(place.resolve().parent)
        if not any((place / name).exists() for name in ("config.json", "adapter_config.json")):
            what = "there is neither a config.json nor an adapter_config.json"
            raise UserError(what, where=named, fix="Name a run folder (trainer.output_dir), or a model's own folder.")
    return Trained(path, base_of(path), run if run.summary.exists() and place.is_dir() else None)


def adapters_of(path: str | None) -> Peft:
    """The settings by which a training goes on with the adapters of a folder; those of no adapters for other models."""
    if base_of(path) is None:
        return Peft()
    file = Path(os.path.expanduser(str(path)), "adapter_config.json")
    saved = read_json(file)
    try:
        return Peft(kind="lora", r=saved["r"], alpha=saved["lora_alpha"], dropout=saved["lora_dropout"])
    except KeyError as error:
        raise UserError(
            f"these are no LoRA adapters: there is no {error}", where=str(file), fix="Merge them."
        ) from error


def load_trained(trained: Trained, dtype: str = "auto", trust: bool = False) -> tuple[Any, Any]:
    """The model, on the CPU and in eval mode, and its tokenizer; adapters stay apart from it, frozen (a PeftModel)."""
    from packtrain.data.tokens.pretrained import load_tokenizer
    from packtrain.model.adapters import load_adapters
    from packtrain.model.load import load_model

    base: Any = Model(path=trained.base or trained.path, dtype=dtype, trust_remote_code=trust)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(replace(base, path=trained.tokenizer))
    model: Any = load_model(base, Peft(), tokenizer, seed=0, scores=trained.scores)
    if trained.base is not None:
        model = load_adapters(model, trained.path, scores=trained.scores, trained=False)
    return model.eval().requires_grad_(False), tokenizer
