"""DeepSpeed's flat parts: each process keeps one of every optimizer group's float32 weights and states.

Here a weight is found in them: in a checkpoint, and in the optimizer of this process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from packtrain.train.engine import CheckpointContents, Names, States, exact_weight, put_weights, states_of

_FLATS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes with the float32 weights: of ZeRO-3, of ZeRO-1 and ZeRO-2, and of ZeRO-1 over bfloat16 weights."""


class FlatParts:
    """Reader of a checkpoint of DeepSpeed. Each process wrote a flat float32 part of each group's weights and states."""

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
        kept = [self._ranks[rank][key][group] for rank, group, _, _ in self._pieces[name]]
        return cast(torch.Tensor, self._whole(name, kept))

    def states(self, name: str) -> States:
        kept = [self._state(rank, group) for rank, group, _, _ in self._pieces[name]]
        return {key: self._whole(name, [state[key] for state in kept]) for key in kept[0]}

    def _state(self, rank: int, group: int) -> States:
        kept = self._ranks[rank]
        part = kept["optimizer_state_dict" if "optimizer_state_dict" in kept else "base_optimizer_state"]
        return part["state"].get(group, {})

    def _whole(self, name: str, parts: Sequence[torch.Tensor | float]) -> torch.Tensor | float:
        """Concatenate the parts. Values that are not split are equal on all ranks; return the first."""
        if not isinstance(parts[0], torch.Tensor) or not parts[0].dim():
            return parts[0]
        places = [(start, count) for _, _, start, count in self._pieces[name]]
        pieces = [
            part.narrow(0, *place) for part, place in zip(cast(Sequence[torch.Tensor], parts), places, strict=True)
        ]
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


def _opened(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)  # they contain classes of DeepSpeed


def put_into_zero(contents: CheckpointContents, zero: Any, names: Names) -> None:
    """Fill `zero`, DeepSpeed's optimizer: float32 weights and states, and the model's weights."""
    partitioned, flats = hasattr(zero, _FLATS[0]), _flats(zero)
    counts_plainly = type(zero.optimizer).__module__.startswith(
        "deepspeed"
    )  # its own optimizers; torch's count in tensors
    filled: list[dict[str, Any]] = [{} for _ in flats]
    for weight, name in names.items():
        if (place := _place(zero, weight)) is None:
            continue
        group, at, start, count = place
        for key, value in {"": exact_weight(contents, name), **states_of(contents, name)}.items():
            if isinstance(value, torch.Tensor) and value.dim():
                part = filled[group].setdefault(key, torch.zeros_like(flats[group], requires_grad=False))
                part[at : at + count] = value.reshape(-1)[start : start + count]
            else:
                filled[group].setdefault(key, int(value) if key == "step" and counts_plainly else value)
    own = zero.state_dict()
    exact = [state.pop("", flat) for state, flat in zip(filled, flats, strict=True)]
    own["fp32_flat_groups" if partitioned else "single_partition_of_fp32_groups"] = exact
    states = {group: state for group, state in enumerate(filled) if state}
    own["optimizer_state_dict" if partitioned else "base_optimizer_state"]["state"] = states
    if partitioned:
        zero.checkpoint_event_prologue()
    zero.load_state_dict({torch.distributed.get_rank(): own}, load_optimizer_states=True, load_from_fp32_weights=True)
    if partitioned:
        zero.checkpoint_event_epilogue()
    else:
        put_weights(contents, names)


def masters_in(zero: Any, names: Names) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield each weight, this process's part of its float32 master, and the part's start.

    The start is a flat index in the weight. The part is DeepSpeed's own tensor, so changes take effect."""
    flats = _flats(zero)
    for weight in names:
        if (place := _place(zero, weight)) is not None:
            group, at, start, count = place
            yield weight, flats[group].detach()[at : at + count], start


def _flats(zero: Any) -> list[torch.Tensor]:
    """Return the flat float32 weights of each group."""
    return next(getattr(zero, name) for name in _FLATS if hasattr(zero, name))


def _place(zero: Any, weight: Any) -> tuple[int, int, int, int] | None:
    """Return the place of this process's part: optimizer group, start in its flat tensor, start in the weight, count. None: it has none."""
    if hasattr(zero, _FLATS[0]):  # ZeRO-3 cuts each weight and pads its last part
        group, at, size = zero.grad_position[zero.get_param_id(weight)]
        start = torch.distributed.get_rank() * size
        return group, at, start, max(0, min(size, weight.ds_numel - start))
    if (mapping := getattr(weight, "_hp_mapping", None)) is None:  # ZeRO-1 and ZeRO-2 cut a group as a whole
        return None
    part = mapping.lp_fragment_address
    return mapping.param_group_index, mapping.hp_fragment_address.start, part.start, part.numel
