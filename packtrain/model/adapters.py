"""Adapters: new ones, or a folder of saved ones given as a model.

A folder of adapters (final/ of a LoRA run) names its base model. Given as model.path with peft=lora its adapters are trained further; with
peft=none they are merged first. Given as objective.reference it is a second, frozen set on the same base; if the bases differ, a merged model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import extract_commit_hash

from packtrain.config.keys import suggest
from packtrain.config.rules import PEFT_OPTIONS
from packtrain.config.schema import Peft
from packtrain.data.tokens.pretrained import check_model_folder
from packtrain.errors import Problem, UserError, boundary
from packtrain.model.expert_adapters import choose_tensors, expert_tensors, forward_in_products
from packtrain.model.towers import towers_of
from packtrain.model.weights import WeightFiles, let_copy, source_of
from packtrain.plan.known_model import BASE, check_base, has_experts, is_adapted, is_at, sampled_hash

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

_TASKS = {False: "CAUSAL_LM", True: "SEQ_CLS"}
"""PEFT's task types, by whether the model has a score instead of the output head."""
_WHOLE = re.compile(r"\.(\w+)(?<!lora_[AB])\.(?:base_layer\.)?weight$")
_PATTERNS = "rank_pattern", "alpha_pattern"
_HEADS = ("classifier", "score")
"""Modules that PEFT copies for a SEQ_CLS model."""


def add_adapters(model: PreTrainedModel, peft: Peft, seed: int, *, scores: bool = False) -> PreTrainedModel:
    """Add new adapters to `model`; they depend only on `seed`. With `scores` the head of a reward model is trained in full beside
    them, as PEFT does for classifiers. Raises UserError if they do not fit."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    peft = fit_to_layers(model, peft)
    let_copy(model, [*peft.modules_to_save, *_HEADS])
    with boundary("the adapters do not fit", "peft.target_modules", _names(model), code="adapters-do-not-fit"):
        return _ready(get_peft_model(model, _lora_config(peft, _TASKS[scores])), model)


def _lora_config(peft: Peft, task: str | None) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=peft.r,
        lora_alpha=peft.alpha,
        lora_dropout=peft.dropout,
        target_modules=peft.target_modules,
        modules_to_save=peft.modules_to_save or None,
        task_type=task,  # type: ignore[arg-type]  # PEFT turns it into its enum
        **peft.options,
    )


def odd_layers(model: nn.Module) -> list[str]:
    """Return the last names of linear layers that cannot have adapters, such as routers."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    odd, settings = set[str](), LoraConfig()
    for place, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and (name := place.rpartition(".")[2]) not in odd:
            try:
                _check_lora_target_modules_mamba(settings, model, name)
                own = type(layer).__module__.startswith(("transformers.models.", "transformers_modules."))
                if own and type(layer).forward is not nn.Linear.forward:
                    empty = {key: torch.empty(one.shape, device="meta") for key, one in layer.named_parameters()}
                    made = torch.func.functional_call(layer, empty, torch.empty(1, layer.in_features, device="meta"))
                    odd |= {name} if made.shape != (1, layer.out_features) else set()
            except Exception:  # it returns a tuple, or does not accept a matrix
                odd.add(name)
    return sorted(odd)


def joint_tensors(weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the last names of tensors that hold the matrices of several experts or heads."""
    shapes = {name: [size for size in getattr(one, "ds_shape", one.shape) if size > 1] for name, one in weights}
    stacked = re.compile(
        r"(^|\.)experts\.(.*\.)?(?!weight)\w+(?<!bias)$"
    )  # such as DBRX's, one below the other in a matrix
    joint = (
        name
        for name, shape in shapes.items()
        if (len(shape) == 3 and "conv" not in name) or (len(shape) > 1 and stacked.search(name))
    )
    ends = (name.replace(".base_layer", "").removesuffix(".weight").split(".")[-2:] for name in joint)
    return sorted({".".join(end) for end in ends})


def fit_to_layers(model: PreTrainedModel, peft: Peft) -> Peft:
    """Leave towers and layers without adapters out of an all-linear `peft`, and return it.

    Raises UserError if another choice names such layers, and for a name that no module has: PEFT would train the others without a word.
    """
    from peft.utils import transformers_weight_conversion as conversion

    names, absent, odd = [name for name, _ in model.named_modules()], list[tuple[str, str]](), odd_layers(model)
    own = peft.options
    excluded, targets, beside = own.get("exclude_modules", []), peft.target_modules, list[str]()
    tables, parts = conversion._MOE_TARGET_MODULE_MAPPING, {part for name in names for part in name.split(".")}
    # names that PEFT itself finds in joint tensors: of all-linear, it would adapt experts and lose layers of these names
    known = tables.get(conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, ""), {})
    towers = towers_of(model) if targets == "all-linear" else []
    if towers or (known and targets == "all-linear"):  # PEFT would shorten names, and then leave the towers' out
        inside, head = rf"({'|'.join(map(re.escape, towers or ['-']))})(\..*)?", model.get_output_embeddings()
        layers = [
            name for name, one in model.named_modules() if isinstance(one, (nn.Linear, Conv1D)) and one is not head
        ]
        layers = [name for name in layers if is_adapted(name, targets) and not re.fullmatch(inside, name)]
        ends = {end if not (end := name.rpartition(".")[2]).isdigit() else name for name in layers} - {*odd, *_HEADS}
        targets = sorted(ends - {*known})
        beside = [at for at in layers if at.rpartition(".")[2] in ends - {*targets} and not is_adapted(at, excluded)]
        theirs = [excluded] if isinstance(excluded, str) else [rf"(.*\.)?{re.escape(name)}" for name in excluded]
        excluded = "|".join([*theirs, inside]) if towers else excluded
    elif targets == "all-linear" and odd:
        excluded = rf"{excluded}|(.*\.)?({'|'.join(odd)})" if isinstance(excluded, str) else [*{*excluded, *odd}]
    if (targets, excluded) != (peft.target_modules, peft.options.get("exclude_modules", [])):
        peft = replace(peft, target_modules=targets, options={**peft.options, "exclude_modules": excluded})
    if tensors := choose_tensors(model, peft, beside):
        given = {key: own[key] for key in _PATTERNS if key in own and beside}  # for these weights too
        fitted = {key: {rf"({at})(\.weight)?": n for at, n in one.items()} for key, one in given.items()}
        peft = replace(peft, options={**peft.options, **fitted, "target_parameters": tensors})
        names += [*expert_tensors(model), *(f"{name}.weight" for name in beside)]
    for key, given in (("target_modules", targets), ("options.exclude_modules", excluded)):
        wanted = [(one, [one]) for one in given] if isinstance(given, list) else [(given, given)]
        absent += [(key, one) for one, by in wanted if not any(is_adapted(name, by) for name in names)]
    ends = peft.modules_to_save
    absent += [("modules_to_save", end) for end in ends if not any(name.endswith(end) for name in names)]
    for key in _PATTERNS:
        absent += [(f"options.{key}", at) for at in own.get(key, {}) if not any(is_at(at, name) for name in names)]
    joint = joint_tensors(model.named_parameters())
    of_experts = ("experts", "gate_up_proj", *(part for table in tables.values() for part in table)) if joint else ()
    fixes = dict.fromkeys(of_experts, f"Leave it out: experts are joint tensors ({', '.join(joint)}): peft.experts.")
    what = f"{type(model).__name__} has no module"
    problems = []
    for key, name in ((key, name) for key, name in absent if name not in known):
        fix = fixes.get(name) or suggest(name, parts, _names(model))
        problems.append(Problem(f"{what} {name!r}", f"peft.{key}", fix, code="no-such-module"))
    chosen = {name.rpartition(".")[2] for name in names if is_adapted(name, targets) and not is_adapted(name, excluded)}
    if asked := [name for name in odd if name in chosen]:
        fix = f"Leave them out: peft.options.exclude_modules={json.dumps(asked)}"
        what = f"{', '.join(asked)}: such layers cannot have adapters"
        problems.append(Problem(what, "peft.target_modules", fix, code="layers-not-adaptable"))
    if problems:
        raise UserError(problems)
    return peft


def _names(model: PreTrainedModel) -> str:
    """Return a sentence with the names of a model's modules."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules() if not name.rpartition(".")[2].isdigit()}
    return f"Its modules are called {', '.join(sorted(names - {''}))}."


def continue_adapters(model: PreTrainedModel, folder: str, peft: Peft, *, scores: bool = False) -> PreTrainedModel:
    """Load the adapters of `folder`. With peft=lora they are trained further, else merged into `model`. Raises UserError if their
    settings differ from `peft`, or they do not fit."""
    fitted = fit_to_layers(model, peft) if peft.kind == "lora" else peft
    adapted = load_adapters(model, folder, scores=scores, trained=peft.kind == "lora")
    if peft.kind != "lora":
        with boundary(f"cannot merge the adapters of {folder}", "model.path", code="adapters-not-mergeable"):
            untie_if_adapted(adapted)
            return adapted.merge_and_unload().requires_grad_(True)
    theirs, ours = cast("LoraConfig", adapted.peft_config["default"]), _lora_config(fitted, None)
    for one in (theirs, ours):
        vars(one)["experts"] = has_experts(one.target_parameters)
    names = {"experts": "experts", "r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    names |= {f"options.{name}": name for name in PEFT_OPTIONS if name != "init_lora_weights"}
    for key, name in names.items():
        value, asked = getattr(theirs, name), getattr(ours, name)
        if value != asked and (value or asked):  # nothing excluded is None, or an empty set
            what = f"the adapters of {folder} have {name} {value}, not {asked}"
            fix = f"set peft.{key}={json.dumps(value, default=list)}, or peft=none to merge them and train the whole model"
            raise UserError(what, where=f"peft.{key}", fix=fix, code="adapter-settings-differ")
    return _ready(adapted, model)


def load_adapters(model: PreTrainedModel, folder: str, *, scores: bool, trained: bool) -> PeftModel:
    """Return PEFT's model of `model` with the adapters of `folder`, `trained` or frozen. Raises UserError if they do not fit."""
    from peft import PeftConfig, PeftModel

    place = Path(folder).expanduser()
    check_model_folder(place)
    fix = f"See {place / 'adapter_config.json'}."
    with boundary(f"cannot load the adapters of {folder}", "model.path", fix, code="adapters-unreadable"):
        settings = PeftConfig.from_pretrained(str(place))
        let_copy(model, [*(getattr(settings, "modules_to_save", None) or []), *_HEADS])
        check_base(place, _files_of(model))
        settings.task_type = _TASKS[scores]  # type: ignore[assignment]  # adapters of a language model become a reward model's
        adapted = PeftModel.from_pretrained(model, str(place), config=settings, is_trainable=trained)
        _check_weights(adapted, place)
        if (place / GENERATION_CONFIG_NAME).is_file() and not scores:  # they may have learned another end of an answer
            model.generation_config = GenerationConfig.from_pretrained(place)
    if getattr(model, "grown", False):  # frozen, and saved again with the adapters
        ends = tuple(f".{name}.weight" for name in embeddings_in(folder))
        whole = adapted.named_parameters(remove_duplicate=False)
        beside = {name: one.detach() for name, one in whole if name.endswith(ends) and not one.requires_grad}
        vars(adapted)["beside"] = beside
    return adapted


def embeddings_in(folder: str) -> dict[str, int]:
    """Return the rows of whole weights beside adapters (embeddings, output heads) by module."""
    from peft.utils import load_peft_weights

    weights = load_peft_weights(str(Path(folder).expanduser()), device="cpu")
    found = {_WHOLE.search(name): weight for name, weight in weights.items()}
    return {name[1]: len(weight) for name, weight in found.items() if name}


def take_vocabulary(model: PreTrainedModel, held: dict[str, int], folder: str) -> None:
    """Resize the embeddings of `model` to the rows that its adapters hold.

    Tokens were added before the adapters were trained. Raises UserError if the adapters have no output head for them.
    """
    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    rows = held.get(_name_of(model, embeddings))
    if rows in (None, len(embeddings.weight)):
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    vars(model)["grown"] = True
    head, embeddings = cast(nn.Linear | None, model.get_output_embeddings()), model.get_input_embeddings()
    if head is not None and head.weight is not embeddings.weight and _name_of(model, head) not in held:
        what = f"the adapters have {rows} embeddings, and no output head for the tokens that were added"
        fix = "Save them with save_embedding_layers=True (PEFT)."
        raise UserError(what, where=folder, fix=fix, code="adapters-lack-head")


def _name_of(model: PreTrainedModel, module: nn.Module) -> str:
    return next((name.rpartition(".")[2] for name, one in model.named_modules() if one is module), "")


def untie_if_adapted(adapted: PeftModel) -> None:
    """Untie the output head from the embeddings before adapters are merged into one of them. The adapted model reads the other one
    unchanged."""
    model = cast(PreTrainedModel, adapted.get_base_model())
    config, both = model.config.get_text_config(), (model.get_input_embeddings(), model.get_output_embeddings())
    layers: list = [getattr(part, "base_layer", getattr(part, "original_module", part)) for part in both]
    adapts = [part is not layer for part, layer in zip(both, layers, strict=True)]
    if not any(adapts) or None in layers or layers[0].weight is not layers[1].weight:
        return
    first, second = (getattr(part, "weight", None) for part in both)
    if all(hasattr(part, "modules_to_save") for part in both) and first is second:
        return  # trained as one
    layers[1].weight = torch.nn.Parameter(layers[1].weight.detach().clone(), requires_grad=False)
    config.tie_word_embeddings = model.config.tie_word_embeddings = False


def _check_weights(adapted: PeftModel, place: Path) -> None:
    """Raise UserError if the file of the adapters lacks weights. PEFT would use new ones without a word."""
    from peft import get_peft_model_state_dict
    from peft.utils import load_peft_weights

    held, fix = load_peft_weights(str(place)).keys(), "See whether its adapter_config.json belongs to them."
    if lacking := sorted(get_peft_model_state_dict(adapted).keys() - held):
        what = f"{len(lacking)} weights of the adapters are not in their file: {lacking[0]} …"
        raise UserError(what, where=str(place), fix=fix, code="adapter-weights-missing")
    taken = get_peft_model_state_dict(adapted, save_embedding_layers=True).keys()
    if surplus := sorted(name for name in held - taken if not any(f".{head}." in name for head in _HEADS)):
        what = f"{len(surplus)} weights in their file are not of these adapters: {surplus[0]} …"
        raise UserError(what, where=str(place), fix=fix, code="adapter-weights-surplus")


def name_base(adapted: PeftModel, path: str, revision: str | None) -> None:
    """Make adapters name their base by its resolved path, or by hub id and commit."""
    named, place = adapted.peft_config["default"], Path(path).expanduser()
    source = cast(WeightFiles, source_of(adapted.get_base_model()))
    named.base_model_name_or_path = str(place.resolve()) if place.exists() else path
    named.revision = None if place.exists() else extract_commit_hash(source.files[0], None) or revision
    source.hash = sampled_hash(source.files)


def write_base(adapted: PeftModel, folder: Path) -> None:
    """Write the base beside adapters: its name, the hash of its files, its relative path."""
    if (source := source_of(adapted.get_base_model())) and source.hash:
        base = str(adapted.peft_config["default"].base_model_name_or_path)
        place = {"path": os.path.relpath(base, os.path.realpath(folder))} if os.path.isabs(base) else {}
        (folder / BASE).write_text(json.dumps({"base": base, "weights": source.hash, **place}, indent=2) + "\n")


def _files_of(model: nn.Module) -> list[str]:
    """Return the files that the weights of `model` come from, [] for new weights."""
    source = source_of(model)
    return source.files if source else []


def add_reference(model: PeftModel, folder: str) -> None:
    """Add the adapters of `folder` to the adapted `model` as its reference. They are frozen, not saved, and inactive until TRL turns them on."""
    place = Path(folder).expanduser()
    check_model_folder(place)
    fix = f"See {place / 'adapter_config.json'}."
    check_base(place, _files_of(model.get_base_model()))
    with boundary(f"cannot load the adapters of {folder}", "objective.reference", fix, code="adapters-unreadable"):
        model.load_adapter(str(place), adapter_name="ref", is_trainable=False)
        model.set_adapter("default")
    vars(model)["save_pretrained"] = partial(model.save_pretrained, selected_adapters=["default"])


def _ready(adapted: nn.Module, model: PreTrainedModel) -> PreTrainedModel:
    """Prepare `adapted` for training: its layers no longer cast inputs that autocast casts back. Raises UserError if the head is adapted."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        what = "adapters on the output head are not supported: the fused loss reads its weight directly"
        raise UserError(what, where="peft.target_modules", fix="remove the head from it", code="adapters-on-head")
    for layer in adapted.modules():
        # DoRA computes norms of weights in the input's format
        if isinstance(layer, LoraLayer) and not layer.lora_variant:
            layer._cast_input_dtype = _cast_unless_autocast  # type: ignore[method-assign]
        if isinstance(layer, ParamWrapper):
            layer.forward = MethodType(forward_in_products, layer)  # type: ignore[method-assign]
    return cast(PreTrainedModel, adapted)


def _cast_unless_autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if dtype == torch.float32 and torch.is_autocast_enabled(x.device.type) else x.to(dtype)
