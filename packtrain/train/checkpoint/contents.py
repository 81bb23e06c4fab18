"""Contents of a checkpoint by weight, for any strategy and any number of processes.

A `CheckpointContents` returns a whole weight and its optimizer states (for AdamW `exp_avg`, `exp_avg_sq`, `step`) by the weight's name,
one weight at a time. Files are mapped into memory, so that a process holds little more than the tensors that it asks for. DeepSpeed's
universal checkpoints offer the same for Adam only, as a second copy on disk.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers.trainer import OPTIMIZER_NAME
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from packtrain.model.load import base_model
from packtrain.model.spread import loading_whole, read_shards, shards_in
from packtrain.strategies.registry import STRATEGIES

ORDER = "order"
"""Key in the optimizer's file: the weight names, in the order of the optimizer's numbers."""


def read_contents(checkpoint: Path, strategy: str, model: nn.Module) -> CheckpointContents:
    """Open `checkpoint`, written for this `model` by a run with `strategy`."""
    if strategy == "fsdp2":
        return _Shards(checkpoint)
    if STRATEGIES[strategy].steps_in_backward:
        return _Zero(checkpoint)
    return _Plain(checkpoint, model)


class _Plain:
    """Checkpoint of ddp: a model folder or adapters. The optimizer's state dict numbers its states."""

    def __init__(self, checkpoint: Path, model: nn.Module) -> None:
        self._folder, self._model = checkpoint, model
        whole = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
        self.order = whole[ORDER]
        self._states = {name: whole["state"].get(number, {}) for number, name in enumerate(self.order)}

    def weight(self, name: str) -> torch.Tensor:
        if name in self._files:
            file, key = self._files[name]
            return file.get_tensor(key)
        return self._converted[name]

    def states(self, name: str) -> dict[str, Any]:
        return self._states[name]

    @cached_property
    def _files(self) -> dict[str, tuple[Any, str]]:
        """Map each name in the model to the weight's open file and its name there."""
        model: Any = self._model
        if isinstance(model, PeftModel):
            files = [self._folder / ADAPTER_SAFE_WEIGHTS_NAME]
            marks = {name: torch.empty(0) for name in model.state_dict()}
            name_of = {id(mark): name for name, mark in marks.items()}
            kept = get_peft_model_state_dict(model, marks, save_embedding_layers=False)
            named = {key: name_of[id(mark)] for key, mark in kept.items()}
        else:
            files, named = sorted(self._folder.glob("*.safetensors")), {}
        opened = [safe_open(file, "pt") for file in files]
        return {named.get(key) or key: (file, key) for file in opened for key in file.keys()}  # noqa: SIM118

    @cached_property
    def _converted(self) -> dict[str, torch.Tensor]:
        """Return all weights. Used if transformers saves the model in another form than it computes with (experts) or ties weights."""
        base = base_model(self._model)
        with loading_whole():
            loaded = type(base).from_pretrained(self._folder, dtype=base.dtype)
        held = (*loaded.named_parameters(remove_duplicate=False), *loaded.named_buffers(remove_duplicate=False))
        return {name: tensor.detach() for name, tensor in held}


class _Shards:
    """Checkpoint of FSDP2, in the format of torch.distributed.checkpoint."""

    order = None

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        self._kept = shards_in(checkpoint)

    def weight(self, name: str) -> torch.Tensor:
        return self._read([f"model.{name}"])[0]

    def states(self, name: str) -> dict[str, Any]:
        prefix = f"optimizer.state.{name}."
        keys = [key for key in self._kept if key.startswith(prefix)]
        return dict(zip((key.removeprefix(prefix) for key in keys), self._read(keys), strict=True))

    def _read(self, keys: list[str]) -> list[Any]:
        return read_shards(self._folder, {key: self._kept[key] for key in keys})


class _Zero:
    """Checkpoint of DeepSpeed. Each process wrote a flat float32 part of each group's weights and states."""

    def __init__(self, checkpoint: Path) -> None:
        folder = checkpoint / (checkpoint / "latest").read_text().strip()
        self._ranks: list[dict[str, Any]] = []
        while files := list(folder.glob(f"*zero_pp_rank_{len(self._ranks)}_mp_rank_00_optim_states.pt")):
            self._ranks.append(_opened(files[0])["optimizer_state_dict"])
        first = folder / "mp_rank_00_model_states.pt"  # stages 1 and 2 keep weights whole
        first = first if first.is_file() else folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        engine = _opened(first)
        groups, self._module = engine["param_shapes"], engine["module"]
        self._shapes = {name: shape for group in groups for name, shape in group.items()}
        self.order = list(self._shapes)
        self._pieces = self._by_partition(groups) if "fp32_flat_groups" in self._ranks[0] else self._by_fragment()

    def weight(self, name: str) -> torch.Tensor:
        if name not in self._pieces:  # a buffer
            return self._module[name]
        key = "fp32_flat_groups" if "fp32_flat_groups" in self._ranks[0] else "single_partition_of_fp32_groups"
        return self._whole(name, [self._ranks[rank][key][group] for rank, group, _, _ in self._pieces[name]])

    def states(self, name: str) -> dict[str, Any]:
        kept = [self._state(rank, group) for rank, group, _, _ in self._pieces[name]]
        return {key: self._whole(name, [state[key] for state in kept]) for key in kept[0]}

    def _state(self, rank: int, group: int) -> dict[str, Any]:
        kept = self._ranks[rank]
        part = kept["optimizer_state_dict" if "optimizer_state_dict" in kept else "base_optimizer_state"]
        return part["state"].get(group, {})

    def _whole(self, name: str, parts: list[Any]) -> Any:
        """Concatenate the parts. Values that are not split are equal on all ranks; return the first."""
        if not isinstance(parts[0], torch.Tensor) or not parts[0].dim():
            return parts[0]
        places = [(start, count) for _, _, start, count in self._pieces[name]]
        pieces = [part.narrow(0, *place) for part, place in zip(parts, places, strict=True)]
        return torch.cat(pieces).view(self._shapes[name])

    def _by_fragment(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """Map name → (rank, group, start, count) of its pieces, in order. Stages 1 and 2 cut a group as a whole."""
        pieces = defaultdict(list)
        for rank, kept in enumerate(self._ranks):
            for group, fragments in enumerate(kept["param_slice_mappings"]):
                for name, fragment in fragments.items():
                    pieces[name].append((rank, group, fragment.start, fragment.numel))
        return pieces

    def _by_partition(self, groups: list[dict[str, torch.Size]]) -> dict[str, list[tuple[int, int, int, int]]]:
        """Map name → (rank, group, start, count) of its pieces. Stage 3 cuts each weight and pads its last part."""
        pieces = defaultdict(list)
        for group, shapes in enumerate(groups):
            start = 0
            for name, shape in shapes.items():
                size = math.ceil(shape.numel() / len(self._ranks))
                for rank in range(len(self._ranks)):
                    count = max(0, min(size, shape.numel() - rank * size))
                    pieces[name].append((rank, group, start, count))
                start += size
        return pieces


CheckpointContents = _Plain | _Shards | _Zero
"""Reader of a checkpoint, by the names of `named_parameters()`; all tensors are whole and on the CPU. `order`: the weight names in the order
of the optimizer's numbers (None: its states go by name). `weight`: a weight or a buffer; DeepSpeed's weights are float32. `states`: the
optimizer's states ({} for a weight that never had a gradient), as tensors of the weight's shape or plain values; they include MASTER."""


def _opened(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)  # they contain classes of DeepSpeed
