"""What is wrong with a model before it is loaded, as far as its config tells: no torch, no hub.

The keys of a model's config and their defaults are read from the source of transformers' class, which takes milliseconds where
importing it takes seconds; the values from config.json in the model's folder or in the hub's cache. Where neither is there,
loading the model tells.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packtrain.config.keys import near
from packtrain.config.schema import Model, Peft
from packtrain.errors import Problem, UserError
from packtrain.plan.known_model.shapes import LLAMA_KIN, MOST_LAYERS, is_adapted, known_sizes, weights_of
from packtrain.wording import shortened

_SIZE = re.compile(
    r"vocab_size|(moe_)?intermediate_size|hidden_size|head_dim|num_(hidden_layers|attention_heads|key_value_heads)"
    r"|max_position_embeddings|n_(positions|embd|layer|head|ctx)"
)
_ID = re.compile(r"\w*token_id")
_LAYERS = ("num_hidden_layers", "n_layer")
_NEVER_STORED = ("lm_head", "score")  # a head that shares the embeddings' weight, or a new one
_OF_EVERY_CONFIG = ("_name_or_path", "output_attentions")
OF_ROTARY_MODELS = ("head_dim", "partial_rotary_factor", "rope_scaling", "rope_theta")
"""What the config of a model with rope_parameters takes, though it is no field of its own: most go into rope_parameters."""


def check_model(model: Model, peft: Peft, *, scores: bool = False) -> None:
    """Raises UserError with what is wrong with model.config and with the names of layers in `peft`, as far as it is known here."""
    problems = [*_values(model), *_names(model), *_layers(model, peft, scores=scores)]
    if problems:
        raise UserError(problems)


def positions_of_config(model: Model) -> int | None:
    """The most positions that the model is made for; None where that is not known here."""
    found = config_of(model)
    value = next((found[name] for name in ("max_position_embeddings", "n_positions") if name in found), None)
    return value if type(value) is int else None


def config_of(model: Model) -> dict[str, Any]:
    """The values of the model's config that are known here: model.config, config.json, and transformers' defaults."""
    sizes = known_sizes(model)
    return {**defaults_of(str(sizes.get("model_type", ""))), **sizes}


def _values(model: Model) -> Iterator[Problem]:
    for name, value in model.config.items():
        where = f"model.config.{name}"
        if _SIZE.fullmatch(name) and value is not None and (type(value) is not int or value < 1):
            yield Problem(f"found {shortened(value)}", where, "Allowed: whole number ≥ 1.")
        elif name in _LAYERS and value is not None and value > MOST_LAYERS:
            yield Problem(f"found {shortened(value)}", where, f"Allowed: at most {MOST_LAYERS:,}.")
        ids = value if isinstance(value, list) else [value]
        if _ID.fullmatch(name) and any(one is not None and type(one) is not int for one in ids):
            yield Problem(f"found {shortened(value)}", where, "Allowed: the number of a token, or null.")
    for name, value in known_sizes(model).items():
        if name in _LAYERS and name not in model.config and isinstance(value, int) and value > MOST_LAYERS:
            yield Problem(
                f"{name} is {shortened(value)}", f"model.path, {model.path}/config.json", "Mend it, or get it anew."
            )


def _names(model: Model) -> Iterator[Problem]:
    """Keys that the model's config does not have: transformers would keep them and use none of them."""
    if model.path and model.path.endswith(".gguf"):
        return
    sizes = known_sizes(model)
    kind = sizes.get("model_type")
    if kind is None:
        return
    if not isinstance(kind, str) or (kind not in model_types() and not model.trust_remote_code):
        meant = near(str(kind), model_types(), 1)
        fix = f"Did you mean {meant[0]}?" if meant else "docs/architectures.md lists what trains."
        yield Problem(f"transformers knows no model type {shortened(kind)}", "model.config.model_type", fix)
        return
    own = defaults_of(kind)
    known = {*own, *(name for name in sizes if name not in model.config)}
    for name in model.config if own else ():
        if name not in known and name != "model_type":
            meant = near(name, known, 1)
            fix = f"Did you mean {meant[0]}?" if meant else "Take it away."
            yield Problem(f"the config of a {kind} model has no {name!r}", f"model.config.{name}", fix)


def _layers(model: Model, peft: Peft, *, scores: bool) -> Iterator[Problem]:
    """Names in `peft` that match no layer of a model whose layers are called in its files as they are when it is loaded."""
    if peft.kind != "lora" or known_sizes(model).get("model_type") not in LLAMA_KIN:
        return
    try:
        shapes = weights_of(model, scores=scores).shapes
    except UserError:
        return
    layers = {*(re.sub(r"\.(weight|bias)$", "", name) for name in shapes), *_NEVER_STORED}
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    targets = peft.target_modules
    wanted = {f"peft.modules_to_save[{at}]": one for at, one in enumerate(peft.modules_to_save)}
    wanted |= {f"peft.target_modules[{at}]": one for at, one in enumerate(targets if isinstance(targets, list) else ())}
    for where, name in wanted.items():
        if not any(f".{name}." in f".{layer}." for layer in layers):
            meant = near(name, leaves, 1)
            fix = f"Did you mean {meant[0]}?" if meant else f"Layers are {', '.join(leaves)}."
            yield Problem(f"no layer of the model has the name {shortened(name)}", where, fix)
    if isinstance(targets, str) and not any(is_adapted(layer, targets) for layer in layers):
        fix = f"A text is a pattern for whole names, such as {min(layers, key=len)}; of names write a list."
        yield Problem(f"no layer of the model matches {shortened(targets)}", "peft.target_modules", fix)


@cache
def model_types() -> tuple[str, ...]:
    """The model types that transformers knows."""
    text = "".join(_source(f"models/auto/{file}") for file in ("auto_mappings.py", "configuration_auto.py"))
    return tuple(dict.fromkeys(re.findall(r'"([\w.-]+)"\s*[,:]\s*"\w+Config"', text)))


@cache
def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Every key of a model type's config with its default (None where that is computed); {} where the class is not found."""
    folder = model_type.replace("-", "_").replace(".", "_")
    classes = _classes(f"models/{folder}/configuration_{folder}.py") if re.fullmatch(r"\w+", folder) else {}
    found = next((one for one in classes.values() if _keys_of_class(one).get("model_type") == model_type), None)
    merged: dict[str, Any] = {}
    while found is not None:
        merged = {**_keys_of_class(found), **merged}
        bases = [ast.unparse(base) for base in found.bases]
        found = next((classes[base] for base in bases if base in classes), None)
        if found is None and "PreTrainedConfig" not in bases:
            return {}
    common = _classes("configuration_utils.py").get("PreTrainedConfig")
    if not merged or common is None:
        return {}
    beside = (*_OF_EVERY_CONFIG, *(OF_ROTARY_MODELS if "rope_parameters" in merged else ()))
    return {**dict.fromkeys(beside), **_keys_of_class(common), **merged}


@cache
def _keys_of_class(made: ast.ClassDef) -> dict[str, Any]:
    """The keys that a class declares, the other names that it has for them, and those that its methods make or take."""
    found: dict[str, Any] = {}
    for node in ast.walk(made):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            found[node.attr] = None
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("kwargs.") and node.args:
            found[str(_literal(node.args[0]))] = None
    for node in made.body:
        if not isinstance(node, (ast.AnnAssign, ast.Assign)):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        name, value = ast.unparse(target), _literal(node.value)
        if name == "attribute_map" and isinstance(value, dict):
            found |= dict.fromkeys([*value, *value.values()])  # either name of a pair is taken
        elif name == "model_type" or isinstance(node, ast.AnnAssign):
            found[name] = value
    return found


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


@cache
def _classes(path: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(_source(path)).body if isinstance(node, ast.ClassDef)}


def _source(path: str) -> str:
    """The text of a file of transformers, "" if there is none; the package is not imported."""
    found = importlib.util.find_spec("transformers")
    for place in (found.submodule_search_locations or ()) if found else ():
        file = Path(place, path)
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""
