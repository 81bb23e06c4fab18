"""Which reference model dpo and kto use, and folders of adapters as model.path: decided before anything is loaded.

A folder of adapters (final/ of a LoRA run) names its base model. The memory estimate depends on this choice (memory.py), and
training makes the reference accordingly (model/reference.py, model/adapters.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from packtrain.config.objective import Objective
from packtrain.config.schema import SHARDED_WEIGHTS, Model, Peft, Strategy
from packtrain.errors import UserError, read_json

Kind = Literal["model", "adapters_off", "adapters", "precomputed", "path"]
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ReferenceChoice:
    """The reference of a run; `kind` says how it is made.

    `adapters` is the folder of its adapters, "" for none; `at_start` whether the model equals its reference before step 1.
    """

    kind: Kind
    adapters: str
    at_start: bool


def base_of(path: str | None) -> str | None:
    """The base model of the adapters in the folder `path`; None if it is no folder of adapters. Raises UserError if none is named."""
    file = Path(os.path.expanduser(path or "")) / _CONFIG
    if path is None or not os.path.isfile(file):
        return None
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError("the adapters do not say of which model they are", where=f"{file}: base_model_name_or_path")
    return base


def reference_of(model: Model, peft: Peft, objective: Objective, strategy: Strategy) -> ReferenceChoice:
    """What objective.reference means in this run."""
    wanted, lora = objective.reference, peft.kind == "lora"
    continued = model.init == "pretrained" and base_of(model.path) is not None  # from a folder of adapters
    adapters = str(model.path) if wanted == "auto" else wanted
    kind: Kind
    if wanted == "auto" and not (lora and continued):
        kind = "adapters_off" if lora else "model"
    elif wanted in ("model", "adapters_off", "precomputed"):
        kind = cast(Kind, wanted)
    else:
        bases = [base_of(adapters), base_of(model.path) or model.path]
        same = None not in bases and len({os.path.realpath(os.path.expanduser(base or "")) for base in bases}) == 1
        if lora and same and strategy.name not in SHARDED_WEIGHTS:  # adapters cannot be added to sharded weights
            return ReferenceChoice("adapters", adapters, wanted == "auto")
        kind = "model" if wanted == "auto" else "path"
    return ReferenceChoice(kind, "", kind in ("model", "precomputed") or (kind == "adapters_off" and not continued))
