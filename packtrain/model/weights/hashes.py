"""Hashes of weights that do not depend on how rows are spread over processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from packtrain.monitor.heartbeat import waiting

_BLOCKS, _BLOCK_BYTES = 1024, 2**16


def weights_hash(model: torch.nn.Module, *, trained: bool = True) -> str:
    """Hash names, types, shapes and bytes of weights and saved buffers, adapters included. `trained=False` leaves out trained weights.
    If processes share the weights, all call it together, and each hashes its own rows.

    It is the exclusive or of xxh3 hashes of all rows, with their numbers as seeds, so that rows may be hashed anywhere.
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
            parts ^= _of_rows(tensor.to_local(), start[0], seed)
        elif tensor.device.type != "meta":
            whole ^= _of_rows(tensor, 0, seed)
    if mesh is not None:
        found: list[int] = [0] * mesh.size(mesh.ndim - 1)
        with waiting("the other ranks to hash their parts of the weights"):
            dist.all_gather_object(found, parts, group=mesh.get_group(mesh.ndim - 1))
        for part in found:
            whole ^= part
    described.update(whole.to_bytes(16, "big"))
    return described.hexdigest()


def sampled_hash(files: Iterable[str]) -> str:
    """Hash the sizes of `files`, their first bytes and blocks spread over them. No process sees all weights that are read by slices;
    weights of another training differ everywhere."""
    found = xxhash.xxh3_128()
    for file in sorted(files, key=os.path.basename):
        end = os.path.getsize(file)
        found.update(f"{os.path.basename(file)} {end}".encode())
        with open(file, "rb") as opened:
            blocks = min(_BLOCKS, 2 + end // _BLOCK_BYTES)  # a small file is read whole
            for number in range(blocks):
                opened.seek(max(0, end - _BLOCK_BYTES) * number // (blocks - 1))
                found.update(opened.read(_BLOCK_BYTES))
    return found.hexdigest()


def _of_rows(tensor: torch.Tensor, first: int, seed: int) -> int:
    """Hash the rows of `tensor`. `first` is the number of its first row."""
    total = 0
    for number, row in enumerate(_rows(tensor), first):
        total ^= xxhash.xxh3_128_intdigest(row, (seed + number) % 2**64)
    return total


def _rows(tensor: torch.Tensor) -> Iterator[memoryview]:
    if type(tensor).__module__.startswith("torchao."):  # numbers and their scales
        tensor = tensor.dequantize()
    if tensor.numel():
        flat = memoryview(cast(Any, tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()))
        size = len(flat) // (len(tensor) if tensor.dim() else 1)
        for start in range(0, len(flat), size):
            yield flat[start : start + size]
