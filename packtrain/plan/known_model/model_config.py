"""What is wrong with a model before it is loaded, as far as its config tells: no torch, no hub.

Keys, defaults and names of layers are those of the installed transformers (transformers_source.py), values those of config.json in
the model's folder or in the hub's cache. What neither has is found when the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice

from packtrain.config.keys import suggest
from packtrain.config.schema import Model, Peft
from packtrain.errors import Problem, UserError
from packtrain.plan.known_model.shapes import LLAMA_KIN, MOST_LAYERS, is_adapted, known_sizes, stored_config, weights_of
from packtrain.plan.known_model.transformers_source import defaults_of, is_trained, layer_names, model_types
from packtrain.wording import shortened

_SIZE = re.compile(
    r"vocab_size|(moe_)?intermediate_size|hidden_size|head_dim|num_(hidden_layers|attention_heads|key_value_heads)"
    r"|max_position_embeddings|n_(positions|embd|layer|head|ctx)"
)
_ID = re.compile(r"\w*token_id")
_NUMBER = re.compile(r"\b[0-9]+\b")
_LAYERS = ("num_hidden_layers", "n_layer")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")
_MOST_TOLD = 50  # each costs a search for what was meant
_NEVER_STORED = ("lm_head", "score")  # a head that shares the embeddings' weight, or a new one
OF_ROTARY_MODELS = ("head_dim", "partial_rotary_factor", "rope_scaling", "rope_theta")
"""What a new config with rope_parameters takes, though it is no field of its own: most go into rope_parameters."""


def check_model(model: Model, peft: Peft, despite: Sequence[str] = (), *, scores: bool = False) -> None:
    """Raises UserError with what is wrong with model.config and with the names of layers in `peft`, as far as it is known here.

    `despite` is trainer.resume_despite, which may name keys of model.config.
    """
    found = chain(_values(model), _keys(model, despite, scores=scores), _layers(model, peft, scores=scores))
    if problems := list(islice(found, _MOST_TOLD)):
        raise UserError(problems)


def unknown_keys(found: Collection[str], known: Collection[str], kind: str, where: str = "") -> Iterator[Problem]:
    """A problem for each key of model.config that the config of this `kind` does not have: transformers would keep it, and use it
    for nothing."""
    inner = defaults_of(f"{kind}_text") if "text_config" in known else {}
    for name in (one for one in found if one not in known):
        rotary = name in OF_ROTARY_MODELS and "rope_parameters" in known
        holder = "rope_parameters" if rotary else "text_config" if "text_config" in known else ""
        instead = f"Write it into model.config.{holder}." if holder else "Take it away."
        fix = instead if rotary or name in inner else suggest(name, known, instead)
        yield Problem(f"the config of a {kind} model has no {name!r}", where or f"model.config.{name}", fix)


def checked_when_loaded(model: Model, peft: Peft, *, scores: bool = False) -> bool:
    """Whether `peft` names layers, and they are not known before the model is loaded."""
    if peft.kind != "lora" or _layers_of(model, scores=scores):
        return False
    if isinstance(peft.target_modules, str) and peft.target_modules != "all-linear":
        return True  # a pattern for whole names
    named = peft.modules_to_save or isinstance(peft.target_modules, list)
    return bool(named) and not _names_of(model, scores=scores)


def positions_of_config(model: Model) -> int | None:
    """The most positions that the model is made for; None where that is not known here."""
    sizes = known_sizes(model)
    said = (found.get(name) for found in (sizes, defaults_of(str(sizes.get("model_type", "")))) for name in _POSITIONS)
    return next((value for value in said if type(value) is int), None)


def _values(model: Model) -> Iterator[Problem]:
    for name, value in model.config.items():
        where = f"model.config.{name}"
        several = (
            value if isinstance(value, list) else [value]
        )  # a width of each layer, an id of each token that ends a text
        if _SIZE.fullmatch(name) and value is not None and any(type(one) is not int or one < 1 for one in several):
            yield Problem(f"found {shortened(value)}", where, "Allowed: whole number ≥ 1.")
        elif name in _LAYERS and type(value) is int and value > MOST_LAYERS:
            yield Problem(f"found {shortened(value)}", where, f"Allowed: at most {MOST_LAYERS:,}.")
        if _ID.fullmatch(name) and any(one is not None and type(one) is not int for one in several):
            yield Problem(f"found {shortened(value)}", where, "Allowed: the number of a token, or null.")
    for name, value in known_sizes(model).items():
        if name in _LAYERS and name not in model.config and isinstance(value, int) and value > MOST_LAYERS:
            yield Problem(
                f"{name} is {shortened(value)}", f"model.path, {model.path}/config.json", "Mend it, or get it anew."
            )


def _keys(model: Model, despite: Sequence[str], *, scores: bool) -> Iterator[Problem]:
    """A model type that cannot be trained, or keys of model.config that a config of the type does not have."""
    sizes, types = known_sizes(model), model_types()
    kind = sizes.get("model_type")
    if kind is None or (model.path and model.path.endswith(".gguf")):
        return
    if model.trust_remote_code and ("auto_map" in sizes or str(kind) not in types):
        return
    where = "model.config.model_type" if "model_type" in model.config else "model.path"
    own_code = "auto_map" in sizes and "It has code of its own: trust it with model.trust_remote_code=true."
    if not isinstance(kind, str) or kind not in types:
        fix = own_code or suggest(str(kind), types, "docs/architectures.md lists what trains.")
        yield Problem(f"transformers knows no model type {shortened(kind)}", where, fix)
    elif not is_trained(kind, scores=scores):
        what, fix = f"{kind} is no causal language model", "Take one: docs/architectures.md lists what trains."
        if scores:
            what, fix = f"transformers has no classifier of {kind}", "Take a model that it has one of: docs/reward.md."
        yield Problem(what, where, own_code or fix)
    elif own := defaults_of(kind):
        beside = set(stored_config(model))
        if "rope_parameters" in own:  # which takes up these keys of a file
            beside = {*OF_ROTARY_MODELS} if model.path is None else beside - {*OF_ROTARY_MODELS}
        known = {*own, *beside, "model_type"}
        yield from unknown_keys(model.config, known, kind)
        named = [one.split(".")[2] for one in despite if one.startswith("model.config.")]
        yield from unknown_keys(named, known, kind, "trainer.resume_despite")


def _layers(model: Model, peft: Peft, *, scores: bool) -> Iterator[Problem]:
    """Names in `peft` that match no layer of the model; where its layers are not known here, no layer of any model of its type."""
    if peft.kind != "lora":
        return
    layers, targets = _layers_of(model, scores=scores), peft.target_modules
    whole = {_NUMBER.sub("0", layer) for layer in layers}  # of all blocks one
    names = {part for one in whole for part in one.split(".")} - {"0"} or _names_of(model, scores=scores)
    wanted = {f"peft.modules_to_save[{at}]": one for at, one in enumerate(peft.modules_to_save)}
    wanted |= {f"peft.target_modules[{at}]": one for at, one in enumerate(targets if isinstance(targets, list) else ())}
    known = f"Layers are {', '.join(sorted(names))}." if layers else "Take it away: a print of the model has the names."
    for where, name in wanted.items() if names else ():
        start = "." if "target_modules" in where else ""  # of modules_to_save peft takes the end of a name for it, too
        parts = [_NUMBER.sub("0", name)] if layers else [part for part in name.split(".") if not part.isdigit()]
        if not all(any(f"{start}{part}." in f".{one}." for one in whole or names) for part in parts):
            fix = suggest(name, names, known)
            yield Problem(f"no layer of the model has the name {shortened(name)}", where, fix)
    if layers and isinstance(targets, str) and not any(is_adapted(layer, targets) for layer in layers):
        fix = f"A text is a pattern for whole names, such as {min(layers, key=len)}; of names write a list."
        yield Problem(f"no layer of the model matches {shortened(targets)}", "peft.target_modules", fix)


def _layers_of(model: Model, *, scores: bool) -> set[str]:
    """The layers of a model whose files call them as they are called when it is loaded, or whose sizes are known; else none."""
    if known_sizes(model).get("model_type") not in LLAMA_KIN:
        return set()
    try:
        shapes = weights_of(model, scores=scores).shapes
    except UserError:
        return set()
    return {*(re.sub(r"\.(weight|bias)$", "", name) for name in shapes), *_NEVER_STORED}


def _names_of(model: Model, *, scores: bool) -> Collection[str]:
    """The names that layers of the model's type may have; none where its own code is run, or they are not found."""
    sizes = known_sizes(model)
    own_code = model.trust_remote_code and "auto_map" in sizes
    return () if own_code else layer_names(str(sizes.get("model_type")), scores=scores)
