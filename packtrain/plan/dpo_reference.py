"""Folders of adapters in the place of a model, and which reference DPO holds the model to: known before anything is loaded.

A folder of adapters (what a LoRA run leaves in final/) names its base model. No torch: the memory of a run hangs on this
(memory.py), and training makes what is said here (train/reference.py, train/adapters.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, cast

from packtrain.config.schema import SHARDED_WEIGHTS, RunConfig
from packtrain.errors import UserError

Kind = Literal["model", "adapters_off", "adapters", "precomputed", "path"]
_CONFIG = "adapter_config.json"


def base_of(path: str | None) -> str | None:
    """The base model of the adapters in the folder `path`; None where it is no such folder. Raises UserError where none is named."""
    found = Path(path or "").expanduser() / _CONFIG
    if path is None or not found.is_file():
        return None
    try:
        base = json.loads(found.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(found)) from error
    if not base:
        raise UserError("the adapters do not say of which model they are", where=f"{found}: base_model_name_or_path")
    return str(base)


def same_base(one: str | None, other: str | None) -> bool:
    """Whether both are adapters of one model, or the model itself."""
    bases = [base_of(path) or path for path in (one, other)]
    return None not in bases and len({str(Path(cast(str, base)).expanduser().resolve()) for base in bases}) == 1


def kind_of(config: RunConfig) -> Kind:
    """What objective.reference means in this run."""
    wanted, lora = config.objective.reference, config.peft.kind == "lora"
    if wanted == "auto" and not (lora and starts_from_adapters(config)):
        return "adapters_off" if lora else "model"
    if wanted in ("model", "adapters_off", "precomputed"):
        return cast(Kind, wanted)
    folder = adapters_of_reference(config)
    # spread weights take no adapters afterwards
    fits = lora and base_of(folder) is not None and same_base(folder, config.model.path)
    beside = fits and config.strategy.name not in SHARDED_WEIGHTS
    return "adapters" if beside else "model" if wanted == "auto" else "path"


def starts_from_adapters(config: RunConfig) -> bool:
    """Whether model.path is a folder of adapters."""
    return config.model.init == "pretrained" and base_of(config.model.path) is not None


def adapters_of_reference(config: RunConfig) -> str:
    """The folder of adapters that is the reference where its kind is `adapters`."""
    named = config.objective.reference
    return str(config.model.path) if named == "auto" else named


def starts_at_reference(config: RunConfig) -> bool:
    """Whether the model is its own reference before step 1."""
    kind = kind_of(config)
    if kind == "adapters":
        return config.objective.reference == "auto"
    return kind in ("model", "precomputed") or (kind == "adapters_off" and not starts_from_adapters(config))
