"""Weights in files: each process reads and hashes its own slices.

transformers reads safetensors by slices into parameters that are DTensors, even if it stacks experts while it reads them
(core_model_loading.DtensorShardOperation). So inside `reading_files` a model on the meta device gets such parameters before its files are
read: `Shard(0)` on the mesh, as fully_shard makes them. model/spread.py takes them over; for ZeRO-3 it gathers them one by one.

These stay whole in every process until then: weights that are in no file (a new head), buffers, weights that the library makes from whole
ones (a fused projection that is cut into three), and all weights of other kinds of files (.bin, .gguf) and of quantised models.

transformers silently drops weights that the model does not take, even layers for multi-token prediction (MTP) that config.json promises.
This module counts them. Weights of separate layers and modules are carried into final/. Weights that belong in layers of the model are refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, LoadStateDictInfo, load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from packtrain.errors import UserError, read_json
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.known_model import sampled_hash
from packtrain.system import holding
from packtrain.wording import counted

_SAFETENSORS = re.compile(r"\.safetensors$")


class _Names(dict[str, str]):
    """A table of names. `in` appends each name that it lacks to `passed_over`."""

    passed_over: list[str]

    def __contains__(self, name: object) -> bool:
        if not (found := super().__contains__(name)) and isinstance(name, str):
            self.passed_over.append(name)
        return found


@contextmanager
def reading_files(mesh: DeviceMesh | None) -> Iterator[None]:
    """Make `from_pretrained` leave WeightFiles on the model, as its `source`, inside the block.

    On a one-dimensional `mesh` it reads only this process's rows; None: whole weights.
    """
    load = cast(Callable[..., tuple[LoadStateDictInfo, object]], PreTrainedModel._load_pretrained_model)
    map_gguf: Callable[..., dict[str, str]] = gguf.get_gguf_hf_weights_map
    passed_over = list[str]()

    def map_names(*given: object, **named: object) -> dict[str, str]:
        (names := _Names(map_gguf(*given, **named))).passed_over = passed_over
        return names

    def load_and_note(
        model: PreTrainedModel,
        state_dict: dict | None,
        paths: list[str] | None,
        settings: LoadStateDictConfig,
        *more: object,
    ) -> tuple[LoadStateDictInfo, object]:
        files, own, changes = paths or [], model.state_dict(), settings.weight_mapping or []
        gguf_names = dict.fromkeys((*(state_dict or ()), *passed_over), ("", torch.empty(0, device="meta")))
        in_files = gguf_names or _shapes(files)
        by_slices = state_dict is None and settings.hf_quantizer is None and all(map(_SAFETENSORS.search, files))
        if sliced := mesh if files and by_slices else None:
            vars(model)["hash_of_files"] = sampled_hash(files)
            _shard(model, sliced, changes)
        loaded, rest = load(model, state_dict, paths, settings, *more)
        if sliced:
            _replace_unfilled(model, loaded)
        renamings = [one for one in changes if isinstance(one, WeightRenaming)]
        conversions = [one for one in changes if isinstance(one, WeightConverter)]
        untaken = {}
        for name, at in in_files.items():
            renamed, _ = rename_source_key(name, renamings, conversions, model.base_model_prefix, own)
            untaken |= {} if {name, renamed} & own.keys() else {name: (*at, renamed)}
        vars(model)["source"] = WeightFiles(files, len(in_files), untaken)
        return loaded, rest

    noting = holding(PreTrainedModel, _load_pretrained_model=staticmethod(load_and_note))
    with noting, holding(gguf, get_gguf_hf_weights_map=map_names):
        yield


def source_of(model: nn.Module) -> WeightFiles | None:
    """Return the files that `model` was read from, None for new weights."""
    return vars(model).get("source")


def _replace_unfilled(model: PreTrainedModel, loaded: LoadStateDictInfo) -> None:
    """Replace slices that no file has filled: by whole weights, or by empty slices."""
    for names, weight in _sliced(model).items():
        own = weight.to_local()
        # converting experts fails in a process that has none
        if not own.numel() and (broken := loaded.conversion_errors.keys() & names):
            loaded.conversion_errors.pop(broken.pop())
            loaded.missing_keys -= {*names}
            made = put_weight(model, names, _like(weight, torch.empty_like(own, device="cpu")))
            vars(made)["_is_hf_initialized"] = True
        elif own.is_meta:  # tied or initialised later: whole, since random numbers depend on the shape
            put_weight(model, names, torch.empty(weight.shape, dtype=weight.dtype, device="meta"))


def _shard(model: nn.Module, mesh: DeviceMesh, conversions: Sequence[WeightTransform]) -> None:
    """Make the meta parameters of `model` DTensors. Each process has the rows that fully_shard would give it."""
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    whole = [cast(WeightConverter, one.reverse_transform()) for one in converters if not _keeps_rows(one)]
    for names, weight in _named(model).items():
        if weight.dim() and not any(apply_converters(name, whole)[1] for name in names):
            shape, _ = compute_local_shape_and_global_offset(weight.shape, mesh, [Shard(0)])
            part = torch.empty(shape, dtype=weight.dtype, device="meta")
            made = DTensor.from_local(part, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
            put_weight(model, names, made, weight.requires_grad)


def _keeps_rows(converter: WeightConverter) -> bool:
    """Return whether rows of the converted weight come from the same rows of the files. Rows may be experts."""
    return all(
        (isinstance(step, MergeModulelist) and step.dim == 0) or (isinstance(step, Concatenate) and step.dim > 0)
        for step in converter.operations
    )


def take_slices(model: nn.Module) -> dict[tuple[str, ...], DTensor]:
    """Take the sliced parameters of `model`, by their names (several if tied). Whole ones on the meta device replace them."""
    taken = _sliced(model)
    for names, weight in taken.items():
        put_weight(model, names, torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad)
    return taken


def put_slices(model: nn.Module, taken: dict[tuple[str, ...], DTensor]) -> None:
    """Put the slices of `take_slices` back. fully_shard has replaced their parameters on the meta device."""
    for names, weight in taken.items():
        made = model.get_parameter(names[0])  # FSDP2 knows this object, and keeps it
        part = weight.to_local()  # a view of its file is copied: see `let_copy`; torch's checkpoints copy deeply too
        read = _like(cast(DTensor, made), part.clone() if part.storage_offset() else part)
        torch.utils.swap_tensors(made, nn.Parameter(read, requires_grad=weight.requires_grad))


def let_copy(model: nn.Module, modules: list[str]) -> None:
    """Give slices that are views of their file a separate storage. `modules` are ends of module names. deepcopy fails for a DTensor of
    such a view: its address is not 0, so deepcopy looks for a storage that does not exist."""
    for names, weight in _sliced(model).items():
        if weight.storage_offset() and any(name.rpartition(".")[0].endswith((*modules,)) for name in names):
            put_weight(model, names, _like(weight, weight.to_local().clone()), weight.requires_grad)


def _sliced(model: nn.Module) -> dict[tuple[str, ...], DTensor]:
    return {names: weight for names, weight in _named(model).items() if isinstance(weight, DTensor)}


def _named(model: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    """Return each parameter by all its names."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[weight] = (*names.get(weight, ()), name)
    return {all_names: weight for weight, all_names in names.items()}


def put_weight(model: nn.Module, names: tuple[str, ...], value: torch.Tensor, trained: bool = True) -> nn.Parameter:
    """Make `value` the parameter of these `names`, and return it."""
    made = nn.Parameter(value, requires_grad=trained and value.is_floating_point())
    for name in names:
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, made)
    return made


def _like(weight: DTensor, part: torch.Tensor) -> DTensor:
    """Return `part` as this process's rows of a tensor that is sharded like `weight`."""
    part = part.detach()
    return DTensor.from_local(part, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


def weights_hash(model: torch.nn.Module, *, trained: bool = True) -> str:
    """Hash names, types, shapes and bytes of weights and saved buffers, adapters included. `trained=False` leaves out trained weights.
    If processes share the weights, all call it together, and each hashes its own rows.

    The hashes of rows (xxh3, seeded with the row's number) are combined by exclusive or, so any process may hash any row.
    """
    described, whole, parts, seen, mesh = xxhash.xxh3_128(), 0, 0, set(), None
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen or (tensor.requires_grad and not trained):
            continue
        seen.add(id(tensor))
        described.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        seed, tensor = described.intdigest(), tensor.detach()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            _, start = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
            parts ^= _hash_rows(tensor.to_local(), start[0], seed)
        elif tensor.device.type != "meta":
            whole ^= _hash_rows(tensor, 0, seed)
    if mesh is not None:
        found: list[int] = [0] * mesh.size(mesh.ndim - 1)
        with waiting("the other ranks to hash their parts of the weights"):
            dist.all_gather_object(found, parts, group=mesh.get_group(mesh.ndim - 1))
        for part in found:
            whole ^= part
    described.update(whole.to_bytes(16, "big"))
    return described.hexdigest()


def _hash_rows(tensor: torch.Tensor, first: int, seed: int) -> int:
    """Hash the rows of `tensor`. `first` is the number of its first row."""
    total = 0
    for number, row in enumerate(_rows(tensor), first):
        total ^= xxhash.xxh3_128_intdigest(row, (seed + number) % 2**64)
    return total


def _rows(tensor: torch.Tensor) -> Iterator[memoryview]:
    if type(tensor).__module__.startswith("torchao."):  # numbers and their scales
        tensor = tensor.dequantize()
    if tensor.numel():
        flat = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        size = len(flat) // (len(tensor) if tensor.dim() else 1)
        for start in range(0, len(flat), size):
            yield flat[start : start + size]


_SHOWN = 4
MTP = re.compile(r"mtp|nextn", re.IGNORECASE)
"""Layers for multi-token prediction: in names of weights, and in keys of a config that count them."""
_COMPUTED = re.compile(r"rotary|inv_freq|rope_freqs|rot_embd|(masked_bias|position_ids|(cos|sin)_cached|_extra_state)$")
"""Buffers that old files hold, and that models compute."""


@dataclass(slots=True)
class WeightFiles:
    """Files of a model, and the weights in them that it does not take.

    `untaken`: name in the file → file, tensor on the meta device, name in the model. `kept`: name of each one that final/ gets → its pattern.
    `left`: pattern → number of the others. `total` counts all weights in the files. `hash` is set if adapters depend on it.
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


def judge(model: PreTrainedModel, source: WeightFiles, stays: Callable[[str], bool], *, quantised: bool) -> None:
    """Sort the weights of `source` that `model` does not take into kept and left ones.

    Separate layers and modules are kept for final/, except names that `stays` accepts. Weights of a `quantised` model may be scales, and are left.
    Raises UserError for weights that layers of the model lack.
    """
    lacking = dict[str, str]()
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
        fix = "check that its config.json belongs to these files (model_type, switches), or take these weights out"
        fix = " ".join(_switches(model, {*lacking})) or fix
        raise UserError(what, where="model.path", fix=fix, code="weights-without-place")


def _place_of(model: PreTrainedModel, name: str) -> tuple[str, str]:
    """Return the full name of a weight and its module's pattern. The pattern is "" if the model has the module."""
    if block := re.match(r"blk\.(\d+)\.", name):  # the name in .gguf files
        return name, "" if int(block[1]) < model.config.get_text_config().num_hidden_layers else f"{block[0]}*"
    found, prefix = list[tuple[int, list[str], nn.Module]](), f"{model.base_model_prefix}."
    for full in (name, prefix + name, name.removeprefix(prefix)):
        module, depth, parts = model, 0, full.split(".")
        while depth + 1 < len(parts) and (inner := module._modules.get(parts[depth])) is not None:
            module, depth = inner, depth + 1
        # an added prefix does not count
        found.append((depth - (len(full) > len(name)), parts[: depth + 1], module))
    _, begin, module = max(found, key=lambda one: one[0])
    full = name if name.startswith(".".join(begin)) else prefix + name
    holds_layers = module is model or any(isinstance(one, nn.ModuleList) for one in (module, *module.children()))
    alone = holds_layers and ".".join(begin) != full and not any(part.isdigit() for part in begin[:-1])
    return full, ".".join([*begin, "*"]) if alone else ""


def _switches(model: PreTrainedModel, lacking: set[str]) -> list[str]:
    """Return switches of model.config that make a model take `lacking` weights, and need no others."""
    found, own = [], model.state_dict().keys()
    for name, value in model.config.get_text_config().to_dict().items():
        changed = deepcopy(model.config)
        with suppress(Exception), torch.device("meta"):  # not every combination makes a model
            setattr(changed.get_text_config(), name, not value)
            more = type(model)(changed).state_dict().keys() - own if isinstance(value, bool) else set()
            if more and more <= lacking:
                key = name if changed.get_text_config() is changed else f"text_config.{name}"
                found.append(f"set model.config.{key}={json.dumps(not value)}")
    return found


def carry(model: nn.Module, folder: Path) -> str:
    """Add the weights kept for final/ to the files and the index in `folder`, unchanged.

    Returns words for the last lines of a run. If the saved files have no layers for multi-token prediction, set their counts in config.json to 0.
    """
    source, kept = source_of(model), defaultdict[str, list[str]](list)
    if source:
        for name in source.kept:
            kept[source.untaken[name][0]].append(name)
    saved = sorted(folder.glob("model*.safetensors"))
    if not (source and kept):
        return "" if any(map(MTP.search, _shapes(saved))) else _zero_mtp_counts(folder / "config.json")
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


def _shapes(files: Iterable[str | Path]) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the weights in `files` by name. Each has its file, and a tensor on the meta device."""
    return {name: (str(file), one) for file in files for name, one in load_state_dict(file, "meta").items()}


def _zero_mtp_counts(config: Path) -> str:
    """Set the counts of layers for multi-token prediction in config.json to 0. Returns words about it, "" if there were none."""
    values = read_json(config) if config.exists() else {}
    named = [name for name in values if MTP.search(name) and "layer" in name]
    if counts := [name for name in named if type(values[name]) is int and values[name]]:
        config.write_text(json.dumps(values | dict.fromkeys(counts, 0), indent=2, sort_keys=True) + "\n")
    return "".join(f", {name} 0 in its config.json" for name in counts)
