"""Weights in a model's files that the model does not take: counted, refused where its layers lack them, else carried into final/.

transformers drops them without a word, layers for multi-token prediction (MTP) among them, which config.json still promises.
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
from transformers import modeling_gguf_pytorch_utils as gguf_files
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import extract_commit_hash

from packtrain.boundary import holding
from packtrain.errors import UserError, read_json
from packtrain.model.weights.hashes import sampled_hash
from packtrain.plan.known_model import BASE
from packtrain.wording import counted

_BLOCKS, _SHOWN = 1024, 4
_NO_SHAPE = torch.empty(0, device="meta")
MTP = re.compile(r"mtp|nextn", re.IGNORECASE)
"""Layers for multi-token prediction: in names of weights, and in keys of a config that count them."""
_COMPUTED = re.compile(
    r"(inv_freq|masked_bias|position_ids|(cos|sin)_cached|_extra_state|rope_freqs\.weight|rot_embd\.weight)$"
)
"""Buffers that old files hold, and that models compute."""


@dataclass(slots=True)
class WeightFiles:
    """Where a model was read from: its files, and by name in them the file and shape of each weight that it does not take.

    `kept` are those that final/ gets, `left` counts the others, each by a pattern of their names.
    """

    files: list[str]
    total: int
    untaken: dict[str, tuple[str, torch.Tensor]]
    renamed: dict[str, str]
    kept: dict[str, str] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    hash: str = ""

    def in_words(self, kept: str) -> str:
        """The line of the header about them, "" for none; `kept` says what becomes of these."""
        said = []
        for found, what in ((Counter(self.kept.values()), kept), (self.left, "are left out")):
            names = [f"{name} ({count})" for name, count in found.items()]
            said += [f"{', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)} {what}"] if names else []
        return (said and f"{len(self.untaken)} of {self.total} weights are not the model's: {'; '.join(said)}") or ""


@contextmanager
def noting_source() -> Iterator[None]:
    """Inside the block, `from_pretrained` leaves a WeightFiles on the model: `source`."""
    read, map_gguf = PreTrainedModel._load_pretrained_model, gguf_files.get_gguf_hf_weights_map
    passed_over: list[str] = []

    class Names(dict[str, str]):
        def __contains__(self, name: Any) -> bool:
            found = dict.__contains__(self, name)
            passed_over.extend([] if found or name is None else [name])
            return found

    def noted(model: Any, state_dict: Any, files: list[str] | None, settings: Any, *more: Any) -> Any:
        own, changes = model.state_dict(), settings.weight_mapping or []
        held = (
            _shapes(files or []) if state_dict is None else dict.fromkeys([*state_dict, *passed_over], ("", _NO_SHAPE))
        )
        loaded = read(model, state_dict, files, settings, *more)
        renamings = [one for one in changes if isinstance(one, WeightRenaming)]
        conversions = [one for one in changes if isinstance(one, WeightConverter)]
        prefix = model.base_model_prefix
        renamed = {name: rename_source_key(name, renamings, conversions, prefix, own)[0] for name in held}
        untaken = {name: at for name, at in held.items() if not {name, renamed[name]} & own.keys()}
        model.source = WeightFiles(files or [], len(held), untaken, renamed)
        return loaded

    mapped: Any = {"get_gguf_hf_weights_map": lambda *given, **named: Names(map_gguf(*given, **named))}
    with holding(PreTrainedModel, _load_pretrained_model=staticmethod(noted)), holding(gguf_files, **mapped):
        yield


def judge(model: Any, stays: Callable[[str], bool], *, quantised: bool) -> None:
    """Sorts the weights that `model` does not take: layers and modules of their own are kept for final/, unless a name `stays` out.

    Raises UserError for weights that its layers lack; those of a `quantised` model may be scales, and are left out.
    """
    source: WeightFiles = model.source
    patterns = [one for one in model._keys_to_ignore_on_load_unexpected or () if not re.search(r"\d", one)]
    # modules without weights, that keep buffers: the rotary embedding
    computing = {
        name.rpartition(".")[2]
        for name, part in model.named_modules()
        if not [*part.parameters()] and [*part.buffers()]
    }
    lacking: dict[str, str] = {}
    for name, (file, weight) in source.untaken.items():
        place, own = _place_of(model, source.renamed[name])
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        computed = (weight.dim() == 4 and weight.shape[:2] == (1, 1)) or not (
            weight.is_floating_point() or quantised
        )  # a mask
        if own is not None:
            if file and not (quantised or stays(place)):
                source.kept[name] = own
            else:
                source.left[own] += 1
        elif (
            quantised
            or computed
            or _COMPUTED.search(name)
            or computing & {*name.split(".")}
            or any(re.search(one, name) for one in patterns)
        ):
            source.left[pattern] += 1
        else:
            lacking[place] = pattern
    if lacking:
        shown = ", ".join(dict.fromkeys(lacking.values()))
        what = f"{len(lacking)} of {source.total} weights in its files belong to layers of {type(model).__name__} that do not take them: {shown}"
        fix = (
            "see whether its config.json belongs to these files (model_type, switches), or take the weights out of them"
        )
        raise UserError(what, where="model.path", fix=" ".join(_switches(model, {*lacking})) or fix)


def _place_of(model: Any, name: str) -> tuple[str, str | None]:
    """The name of a weight in full; if it belongs to a layer or module of its own, that one's pattern."""
    if block := re.match(r"blk\.(\d+)\.", name):  # as .gguf files name them
        return name, None if int(block[1]) < model.config.get_text_config().num_hidden_layers else f"{block[0]}*"
    prefix, found = f"{model.base_model_prefix}.", list[tuple[int, str, nn.Module]]()
    for full in (name, prefix + name, name.removeprefix(prefix)):
        module, depth, parts = model, 0, full.split(".")
        while (inner := module._modules.get(parts[depth])) is not None and depth + 1 < len(parts):
            module, depth = inner, depth + 1
        found.append((depth, full, module))
    # a prefix that is only added counts for nothing
    depth, full, module = max(found, key=lambda one: one[0] - (len(one[1]) > len(name)))
    parts = full.split(".")
    holds_layers = any(isinstance(part, nn.ModuleList) for part in (module, *module.children()))
    alone = depth + 1 < len(parts) and not any(part.isdigit() for part in parts[:depth])
    own = alone and (module is model or holds_layers)
    return full, ".".join([*parts[: depth + 1], "*"]) if own else None


def _switches(model: Any, lacking: set[str]) -> list[str]:
    """Settings of model.config, true or false, by which a model like `model` takes some of the weights that it is `lacking`."""
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
    """Adds the weights that are kept for final/ to those of `model` saved in `folder`, as they are, and to their index; says so.

    Where there are none, config.json no longer counts layers for multi-token prediction.
    """
    kept = dict[str, list[str]]()
    for name in model.source.kept if getattr(model, "source", None) else ():
        kept.setdefault(model.source.untaken[name][0], []).append(name)
    saved, index = sorted(folder.glob("model*.safetensors")), folder / SAFE_WEIGHTS_INDEX_NAME
    if not kept:
        return _forget(folder / "config.json") if not any(map(MTP.search, _shapes(saved))) else ""
    names = [f"model-{at + 1:05}-of-{len(saved) + len(kept):05}.safetensors" for at in range(len(saved) + len(kept))]
    for name, (file, own) in zip(names[len(saved) :], kept.items(), strict=True):
        whole = load_state_dict(file)
        save_file({one: whole[one].clone().contiguous() for one in own}, folder / name, metadata={"format": "pt"})
    files = [old.rename(folder / name) for old, name in zip(saved, names, strict=False)]
    shapes = _shapes([*files, *(folder / name for name in names[len(saved) :])])
    sizes = {"total_parameters": sum(one.numel() for _, one in shapes.values())}
    sizes["total_size"] = sum(one.numel() * one.itemsize for _, one in shapes.values())
    places = {name: Path(file).name for name, (file, _) in shapes.items()}
    index.write_text(json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True) + "\n")
    return f", with {counted(sum(map(len, kept.values())), 'weights')} as they came"


def name_base(adapted: Any, path: str, revision: str | None) -> None:
    """Has adapters name their base so that it is found from any folder: its resolved path, or its hub id and commit."""
    named, local = adapted.peft_config["default"], os.path.exists(os.path.expanduser(path))
    named.base_model_name_or_path = os.path.realpath(os.path.expanduser(path)) if local else path
    base = adapted.get_base_model()
    named.revision = None if local else extract_commit_hash(base.source.files[0], None) or revision
    base.source.hash = sampled_hash(base.source.files, _BLOCKS)


def write_base(adapted: Any, folder: Path) -> None:
    """Writes beside adapters what their base was: its name, the hash of its files, and where it lies from here."""
    source, base = (
        getattr(adapted.get_base_model(), "source", None),
        adapted.peft_config["default"].base_model_name_or_path,
    )
    if source and source.hash:
        place = {"path": os.path.relpath(base, os.path.realpath(folder))} if os.path.isabs(base) else {}
        (folder / BASE).write_text(json.dumps({"base": base, "weights": source.hash, **place}, indent=2) + "\n")


def check_base(model: Any, folder: Path) -> None:
    """Raises UserError if the files of `model` are not those that the adapters in `folder` were trained on."""
    file = folder / BASE
    known, source = read_json(file) if file.exists() else {}, getattr(model, "source", None)
    if known.get("weights") and source and known["weights"] != sampled_hash(source.files, _BLOCKS):
        here = os.path.dirname(source.files[0])
        what = f"the adapters of {folder} were trained on {known.get('base')}, and {here} has other weights"
        fix = f"Name the model that they were trained on. If its weights were only stored anew, remove {file}."
        raise UserError(what, where=f"{folder / 'adapter_config.json'}: base_model_name_or_path", fix=fix)


def _shapes(files: Iterable[str | Path]) -> dict[str, tuple[str, torch.Tensor]]:
    """The weights in `files` by name: the file, and a tensor on the meta device."""
    return {
        name: (str(file), one) for file in files for name, one in load_state_dict(file, map_location="meta").items()
    }


def _forget(config: Path) -> str:
    """Has config.json count no layers for multi-token prediction; says so where it did."""
    values = json.loads(config.read_text()) if config.exists() else {}
    counts = {
        name: 0
        for name, value in values.items()
        if MTP.search(name) and re.search("layers|modules", name) and type(value) is int and value
    }
    if counts:
        config.write_text(json.dumps(values | counts, indent=2, sort_keys=True) + "\n")
    return "".join(f", {name} 0 in its config.json" for name in counts)
