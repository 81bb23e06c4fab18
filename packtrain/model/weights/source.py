"""Weights in the files that a model does not take, and the base of adapters.

transformers drops such weights without a word, also layers for multi-token prediction (MTP) that config.json promises. Here they are counted.
Separate layers and modules are carried into final/. If layers of the model lack the weights, they are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import extract_commit_hash

from packtrain.errors import UserError, read_json
from packtrain.model.weights.hashes import sampled_hash
from packtrain.plan.known_model import BASE
from packtrain.system import holding
from packtrain.wording import counted

_SHOWN = 4
MTP = re.compile(r"mtp|nextn", re.IGNORECASE)
"""Layers for multi-token prediction: in names of weights, and in keys of a config that count them."""
_COMPUTED = re.compile(r"rotary|inv_freq|rope_freqs|rot_embd|(masked_bias|position_ids|(cos|sin)_cached|_extra_state)$")
"""Buffers that old files hold, and that models compute."""


@dataclass(slots=True)
class WeightFiles:
    """Files of a model, and the weights in them that it does not take.

    `untaken`: name in the file → file, tensor on the meta device, name in the model. final/ gets the `kept` ones; the others are `left`. Both
    have patterns of names. `total` counts all weights in the files. `hash` is set if adapters depend on it.
    """

    files: list[str]
    total: int
    untaken: dict[str, tuple[str, torch.Tensor, str]]
    kept: dict[str, str] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    hash: str = ""

    def in_words(self, kept: str) -> str:
        """Return the header's line about untaken weights; `kept` says how the kept ones are used."""
        said = []
        for found, what in ((Counter(self.kept.values()), kept), (self.left, "are left out")):
            names = [f"{name} ({count})" for name, count in found.items()]
            said += [f"{', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)} {what}"] if names else []
        return f"{len(self.untaken)} of {self.total} weights are not the model's: {'; '.join(said)}" if said else ""


@contextmanager
def noting_files() -> Iterator[None]:
    """Make `from_pretrained` leave WeightFiles on the model, as its `source`, inside the block."""
    read, map_gguf, passed_over = PreTrainedModel._load_pretrained_model, gguf.get_gguf_hf_weights_map, list[str]()

    class Names(dict[str, str]):
        def __contains__(self, name: Any) -> bool:
            found = dict.__contains__(self, name)
            passed_over.extend([] if found or name is None else [name])
            return found

    def noted(model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **more: Any) -> Any:
        own, changes, nothing = model.state_dict(), load_config.weight_mapping or [], torch.empty(0, device="meta")
        of_gguf = dict.fromkeys((*(state_dict or ()), *passed_over), ("", nothing))
        held = of_gguf or _shapes(checkpoint_files or ())
        loaded = read(model, state_dict, checkpoint_files, load_config, **more)
        renamings = [one for one in changes if isinstance(one, WeightRenaming)]
        conversions = [one for one in changes if isinstance(one, WeightConverter)]
        untaken = {}
        for name, at in held.items():
            renamed, _ = rename_source_key(name, renamings, conversions, model.base_model_prefix, own)
            untaken |= {} if {name, renamed} & own.keys() else {name: (*at, renamed)}
        model.source = WeightFiles(checkpoint_files or [], len(held), untaken)
        return loaded

    mapped: Any = {"get_gguf_hf_weights_map": lambda *given, **named: Names(map_gguf(*given, **named))}
    with holding(PreTrainedModel, _load_pretrained_model=staticmethod(noted)), holding(gguf, **mapped):
        yield


def judge(model: Any, stays: Callable[[str], bool], *, quantised: bool) -> None:
    """Sort the weights that `model` does not take into kept and left ones.

    Separate layers and modules are kept for final/, unless a name `stays` out. Weights of a `quantised` model may be scales, and are left.
    Raises UserError for weights that layers of the model lack.
    """
    source, lacking = model.source, dict[str, str]()
    patterns = [one for one in model._keys_to_ignore_on_load_unexpected or () if not re.search(r"\d", one)]
    for name, (file, weight, renamed) in source.untaken.items():
        place, own = _place_of(model, renamed)
        pattern = own or re.sub(r"\.\d+\.", ".*.", name)
        is_mask = not weight.is_floating_point() or (weight.dim() == 4 and weight.shape[:2] == (1, 1))
        if own and file and not quantised and not stays(place):
            source.kept[name] = own
        elif own or quantised or is_mask or any(re.search(one, name) for one in (_COMPUTED, *patterns)):
            source.left[pattern] += 1
        else:
            lacking[place] = pattern
    if lacking:
        shown, kind = ", ".join(dict.fromkeys(lacking.values())), type(model).__name__
        what = f"{len(lacking)} of {source.total} weights in its files have no place in the layers of {kind}: {shown}"
        fix = "see whether its config.json belongs to these files (model_type, switches), or take these weights out"
        raise UserError(what, where="model.path", fix=" ".join(_switches(model, {*lacking})) or fix)


def _place_of(model: Any, name: str) -> tuple[str, str]:
    """Return the full name of a weight and its module's pattern. The pattern is "" if the model has the module."""
    if block := re.match(r"blk\.(\d+)\.", name):  # the name in .gguf files
        return name, "" if int(block[1]) < model.config.get_text_config().num_hidden_layers else f"{block[0]}*"
    found, prefix = list[tuple[int, list[str], Any]](), f"{model.base_model_prefix}."
    for full in (name, prefix + name, name.removeprefix(prefix)):
        module, depth, parts = model, 0, full.split(".")
        while depth + 1 < len(parts) and (inner := module._modules.get(parts[depth])) is not None:
            module, depth = inner, depth + 1
        found.append(
            (depth - (len(full) > len(name)), parts[: depth + 1], module)
        )  # an added prefix counts for nothing
    _, begin, module = max(found, key=lambda one: one[0])
    full = name if name.startswith(".".join(begin)) else prefix + name
    holds_layers = module is model or any(isinstance(one, nn.ModuleList) for one in (module, *module.children()))
    alone = holds_layers and ".".join(begin) != full and not any(part.isdigit() for part in begin[:-1])
    return full, ".".join([*begin, "*"]) if alone else ""


def _switches(model: Any, lacking: set[str]) -> list[str]:
    """Return switches of model.config that make a model take `lacking` weights."""
    found = []
    for name, value in model.config.get_text_config().to_dict().items():
        changed = deepcopy(model.config)
        with suppress(Exception), torch.device("meta"):  # not every combination makes a model
            setattr(changed.get_text_config(), name, not value)
            if isinstance(value, bool) and lacking & type(model)(changed).state_dict().keys():
                key = name if changed.get_text_config() is changed else f"text_config.{name}"
                found.append(f"set model.config.{key}={json.dumps(not value)}")
    return found


def carry(model: Any, folder: Path) -> str:
    """Add the weights kept for final/ to the files and the index in `folder`, unchanged.

    Returns words for the last lines of a run. If there are none, config.json no longer counts layers for multi-token prediction.
    """
    source: Any = getattr(model, "source", None)
    kept = dict[str, list[str]]()
    for name in source.kept if source else ():
        kept.setdefault(source.untaken[name][0], []).append(name)
    saved = sorted(folder.glob("model*.safetensors"))
    if not kept:
        return "" if any(map(MTP.search, _shapes(saved))) else _forget(folder / "config.json")
    number = len(saved) + len(kept)
    files = [folder / f"model-{at:05}-of-{number:05}.safetensors" for at in range(1, number + 1)]
    for file, (old, names) in zip(files[len(saved) :], kept.items(), strict=True):
        held = load_state_dict(old)
        save_file({name: held[name].clone().contiguous() for name in names}, file, metadata={"format": "pt"})
    for file, old in zip(files, saved, strict=False):  # the last step that may fail: before it `saved` are whole
        old.rename(file)
    shapes = _shapes(files)
    sizes = {"total_parameters": sum(one.numel() for _, one in shapes.values())}
    sizes["total_size"] = sum(one.numel() * one.itemsize for _, one in shapes.values())
    index = {"metadata": sizes, "weight_map": {name: Path(file).name for name, (file, _) in shapes.items()}}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return f", with {counted(len(source.kept), 'weights')} as they came"


def name_base(adapted: Any, path: str, revision: str | None) -> None:
    """Make adapters name their base by its resolved path, or by hub id and commit."""
    named, source, place = adapted.peft_config["default"], adapted.get_base_model().source, Path(path).expanduser()
    named.base_model_name_or_path = str(place.resolve()) if place.exists() else path
    named.revision = None if place.exists() else extract_commit_hash(source.files[0], None) or revision
    source.hash = sampled_hash(source.files)


def write_base(adapted: Any, folder: Path) -> None:
    """Write the base beside adapters: its name, the hash of its files, its relative path."""
    if (source := getattr(adapted.get_base_model(), "source", None)) and source.hash:
        base = adapted.peft_config["default"].base_model_name_or_path
        place = {"path": os.path.relpath(base, os.path.realpath(folder))} if os.path.isabs(base) else {}
        (folder / BASE).write_text(json.dumps({"base": base, "weights": source.hash, **place}, indent=2) + "\n")


def check_base(model: Any, folder: Path) -> None:
    """Raise UserError if adapters in `folder` were trained on other files than `model` has."""
    file = folder / BASE
    known, source = read_json(file) if file.exists() else {}, getattr(model, "source", None)
    if known.get("weights") and source and known["weights"] != sampled_hash(source.files):
        here = os.path.dirname(source.files[0])
        what = f"the adapters of {folder} were trained on {known.get('base')}, and {here} has other weights"
        fix = f"Name the model that they were trained on. If its weights were only stored anew, remove {file}."
        raise UserError(what, where=f"{folder / 'adapter_config.json'}: base_model_name_or_path", fix=fix)


def _shapes(files: Iterable[str | Path]) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the weights in `files` by name. Each has its file, and a tensor on the meta device."""
    return {name: (str(file), one) for file in files for name, one in load_state_dict(file, "meta").items()}


def _forget(config: Path) -> str:
    """Set the counts of layers for multi-token prediction in config.json to 0. Returns words about it, "" if there were none."""
    values = read_json(config) if config.exists() else {}
    counts = {
        name for name, value in values.items() if MTP.search(name) and type(value) is int and value and "layer" in name
    }
    if counts:
        config.write_text(json.dumps(values | dict.fromkeys(counts, 0), indent=2, sort_keys=True) + "\n")
    return "".join(f", {name} 0 in its config.json" for name in counts)
