"""Find and load a trained model. A run folder stands for its final/; adapters bring their base model."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packtrain.config.rules import PEFT_OPTIONS
from packtrain.config.rules.paths_and_packages import MODEL_SUFFIXES, is_local, model_of, nearest
from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError, read_json
from packtrain.plan.known_model import base_of, has_experts
from packtrain.run_folder import RunFolder
from packtrain.system import fast_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Trained:
    """A model by its `path` (folder, .gguf file or hub id). `base`: of adapters; `run`: trained it, if known."""

    path: str
    base: str | None
    run: RunFolder | None

    @property
    def folder(self) -> Path:
        """The local folder. Raises UserError for a hub id or a file."""
        if not os.path.isdir(place := os.path.expanduser(self.path)):
            fix = "Download it: hf download, then name it."
            raise UserError(f"{self.path} is no folder", where="MODEL", fix=fix, code="not-a-folder")
        return Path(place)

    @property
    def scores(self) -> bool:
        """Whether it is a reward model: it gives a score instead of tokens."""
        if self.base is not None:
            return read_json(self.folder / "adapter_config.json").get("task_type") == "SEQ_CLS"
        config = Path(os.path.expanduser(self.path), "config.json")
        kinds = read_json(config).get("architectures") if config.is_file() else None
        return any("SequenceClassification" in str(kind) for kind in kinds or ())


def find_trained(named: str) -> Trained:
    """Find the model of a run folder, model folder, .gguf file or hub id. Raises UserError if it is missing."""
    place = Path(os.path.expanduser(named))
    if not place.is_dir():
        if not place.exists() and is_local(named, MODEL_SUFFIXES):
            raise UserError(f"there is no {named}", where="MODEL", fix=nearest(named), code="no-such-model")
        return Trained(named, None, None)
    path = model_of(named)
    runs = RunFolder(place), RunFolder(place.resolve().parent)
    return Trained(path, base_of(path), next((run for run in runs if run.summary.exists()), None))


def adapters_of(trained: Trained) -> Peft:
    """Return the settings to train its adapters further. A whole model has none."""
    if trained.base is None:
        return Peft()
    saved = read_json(file := trained.folder / "adapter_config.json")
    if saved.get("peft_type") != "LORA":
        fix = "Merge them: packtrain merge."
        raise UserError("these are no LoRA adapters", where=str(file), fix=fix, code="not-lora")
    asked = {name: saved.get(name) for name in PEFT_OPTIONS}
    options = {name: value for name, value in asked.items() if value not in (None, [], PEFT_OPTIONS[name].default)}
    return Peft(
        kind="lora",
        r=saved["r"],
        alpha=saved["lora_alpha"],
        dropout=saved["lora_dropout"],
        target_modules=saved["target_modules"],
        experts=has_experts(saved.get("target_parameters")),
        options=options,
    )


def load_trained(
    trained: Trained,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    *,
    trust: bool = False,
    on_gpu: bool = False,
    dequantize: bool = False,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load the model in eval mode, and its tokenizer. `on_gpu`: use a GPU if there is one. Adapters stay apart (a PeftModel).

    `dequantize`: quantised weights become numbers in the model's format.
    """
    with fast_imports():
        import torch

        from packtrain.data.tokens.pretrained import load_tokenizer
        from packtrain.model.load import load_model
        from packtrain.model.precision import settle_kernels
        from packtrain.train.log.console import quiet_libraries
    quiet_libraries(on_cpu=not torch.cuda.is_available())
    settle_kernels()  # sdpa sees a new length with every token
    warnings.simplefilter("ignore")

    named = Model(path=trained.path, dtype=dtype, trust_remote_code=trust)
    tokenizer = load_tokenizer(named)
    scores = trained.scores
    model: Any = load_model(named, Peft(), tokenizer, seed=0, scores=scores, dequantize=dequantize, apart=True)
    device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    return model.to(device).eval().requires_grad_(False), tokenizer
