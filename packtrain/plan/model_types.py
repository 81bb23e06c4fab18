"""Check the name of a model type before anything is loaded.

transformers has tables of model types by task. We read them from the library's source, since an import takes torch and seconds. A type
in no table of language models is refused. The types in UNTRAINABLE are refused, too: they are in one of these tables, but do not train on text.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from packtrain.config.keys import suggest
from packtrain.errors import Json, UserError

_TRAINED = {
    False: ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    True: ("SEQUENCE_CLASSIFICATION",),
}
"""Tables of types that train, by whether a model gives scores instead of answers."""
_TABLE = re.compile(r"MODEL_FOR_(\w+?)(_MAPPING)?_NAMES|(MODEL)_MAPPING_NAMES")
_CODEBOOKS = "it predicts several audio codes at a time"
_DRAFTS = "it drafts for a larger Gemma 4: it runs on that model's hidden states, keys and values, not on tokens"
_PICTURE = "it takes a picture with every text"
_SOUND = "it takes sound with every text"
_SPEAKS = "it joins a model that answers with one that speaks. The first trains alone: save its `thinker`"
_TWO_PARTS = "an encoder reads the input, and a decoder writes the answer"
UNTRAINABLE = {
    "blip": _PICTURE,
    "blip-2": _PICTURE,
    "diffusion_gemma": "it fills in blocks of tokens, and predicts no next token",
    "evolla": "it takes a protein with every text",
    "florence2": _TWO_PARTS,
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "idefics": _PICTURE,
    "instructblip": _PICTURE,
    "instructblipvideo": _PICTURE,
    "kosmos-2": _PICTURE,
    "kyutai_speech_to_text": _SOUND,
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "pi0": "it predicts movements of a robot, from its state",
    "pix2struct": _TWO_PARTS,
    "pp_formulanet": _TWO_PARTS,
    "qwen2_5_omni": _SPEAKS,
    "qwen3_omni_moe": _SPEAKS,
    "t5gemma2": _TWO_PARTS,
    "udop": _TWO_PARTS,
    "vision-encoder-decoder": _TWO_PARTS,
    "voxtral_realtime": _SOUND,
}
"""Language models of transformers that do not train on text, and why."""
PACKAGES = {"fast_vlm": "timm", "gemma3n": "timm", "inkling_mm_model": "scipy", "perception_lm": "timm"}
"""Package for the towers of a type."""


def check_type(config: Json, where: str, *, scores: bool) -> None:
    """Raise UserError if the model type does not train, or lacks a package.

    `scores`: for a reward model. A model with code of its own (`auto_map`) is not checked here: loading it shows whether it trains.
    """
    kind = str(config.get("model_type", ""))
    if not kind or config.get("auto_map"):
        return
    tables = _tables()
    known = {name for names in tables.values() for name in names}
    if kind not in known:
        fix = suggest(kind, known, "Upgrade transformers, or see docs/architectures.md, which lists what trains.")
        raise UserError(f"transformers knows no model type {kind!r}", where=where, fix=fix, code="unknown-model-type")
    why = UNTRAINABLE.get(kind)
    if not why and not any(kind in tables[name] for name in _TRAINED[scores]):
        tasks = [name.lower().replace("_", " ") for name, names in tables.items() if kind in names and name != "MODEL"]
        why = f"transformers has it for {', '.join(tasks)}" if tasks else "it is a part of other models"
    if why:
        fix = "Take a causal language model: docs/architectures.md lists what trains."
        task = " to give scores" if scores else ""
        raise UserError(f"a {kind} model does not train{task}: {why}", where=where, fix=fix, code="type-not-trained")
    if (package := PACKAGES.get(kind)) and find_spec(package) is None:
        what, fix = f"a {kind} model needs the package {package}", f"pip install {package}"
        raise UserError(what, where=where, fix=fix, code="package-missing")


@cache
def _tables() -> dict[str, set[str]]:
    """Return the registered model types by table, for example CAUSAL_LM. MODEL has all types with a class."""
    folder = cast(list[str], cast(ModuleSpec, find_spec("transformers")).submodule_search_locations)[0]
    tables = dict[str, set[str]]()
    for statement in ast.parse(Path(folder, "models", "auto", "modeling_auto.py").read_text(encoding="utf-8")).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Name) and (found := _TABLE.fullmatch(target.id)):
            pairs = [part for part in ast.walk(statement) if isinstance(part, ast.Tuple) and len(part.elts) == 2]
            names = {part.elts[0].value for part in pairs if isinstance(part.elts[0], ast.Constant)}
            tables[found[1] or "MODEL"] = cast(set[str], names)
    return tables
