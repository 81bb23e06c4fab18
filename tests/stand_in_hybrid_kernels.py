"""Stand-ins for the kernels of hybrid models, with the same signatures and demands.

They compute one document at a time, by transformers' own functions.

`sys.modules.update(PACKAGES)` installs them, for models whose code transformers has not imported yet.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

PACKAGES: dict[str, ModuleType] = {}
BLIND: set[str] = set()
"""Packages that ignore borders."""
CALLS: list[tuple[str, int]] = []
"""Package and number of documents of each call."""


def stands_in(package: str) -> Callable[[Any], Any]:
    """Put the function into `package`."""

    def put(function: Any) -> Any:
        module = PACKAGES.setdefault(package, ModuleType(package))
        module.__spec__ = ModuleSpec(package, None)
        setattr(module, function.__name__, function)
        return function

    return put


def torchs(model_type: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name).__wrapped__


def per_document(package: str, borders: list[int], axis: int, run: Any, *tensors: torch.Tensor) -> torch.Tensor:
    length = tensors[0].shape[axis]
    borders = [0, length] if package in BLIND else borders
    assert borders[0] == 0 and borders[-1] == length
    CALLS.append((package, len(borders) - 1))
    cuts = [[tensor.narrow(axis, start, end - start) for tensor in tensors] for start, end in pairwise(borders)]
    return torch.cat([run(*cut) for cut in cuts], dim=axis)


def borders_of(seq_idx: torch.Tensor | None, rows: int, length: int) -> list[int]:
    if seq_idx is None:
        return [0, length]
    assert seq_idx.dtype == torch.int32 and seq_idx.shape == (rows, length) == (1, length) and seq_idx.is_contiguous()
    return [0, *(seq_idx[0].diff().nonzero()[:, 0] + 1).tolist(), length]


@stands_in("causal_conv1d")
def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None
):  # fmt: skip
    assert activation in (None, "silu", "swish")
    assert seq_idx is None or (x.stride(1) == 1 and x.stride(0) % 8 == x.stride(2) % 8 == 0), "channels last, by eights"
    run = torchs("bamba", "causal_conv1d_fn")
    borders = borders_of(seq_idx, x.shape[0], x.shape[2])
    return per_document("causal_conv1d", borders, 2, lambda part: run(part, weight, bias, activation), x)


@stands_in("fla")
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert cu_seqlens is None or (q.shape[0] == 1 and not kwargs)
    run, l2norm = (
        torchs("qwen3_next", "torch_chunk_gated_delta_rule"),
        {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel},
    )
    borders = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    return per_document("fla", borders, 1, lambda *part: run(*part, **l2norm)[0], q, k, v, g, beta), None


@stands_in("mamba_ssm")
def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    scan, settings = torchs("bamba", "mamba2_chunk_scan"), {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}

    def run(x: Any, dt: Any, B: Any, C: Any) -> Any:
        return scan(x, dt, A, B, C, chunk_size, dt_limit=dt_limit, **settings)

    return per_document("mamba_ssm", borders_of(seq_idx, *x.shape[:2]), 1, run, x, dt, B, C)


@stands_in("mamba_ssm")
def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None, dt_limit=(0.0, float("inf")),
    return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None,
    headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    assert ngroups == 1 and not norm_before_gate
    inner, states = len(dt_bias) * headdim, len(conv1d_weight) - len(dt_bias) * headdim
    gate, mixed, dt = zxbcdt.split([inner, inner + states, len(dt_bias)], dim=-1)
    mixed = causal_conv1d_fn(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    x, B, C = mixed.transpose(1, 2).split([inner, states // 2, states // 2], dim=-1)
    x, B, C = x.unflatten(2, (-1, headdim)), B[:, :, None], C[:, :, None]
    limits = {"dt_softplus": True, "dt_limit": dt_limit, "seq_idx": seq_idx}
    output = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, dt_bias=dt_bias, **limits).flatten(2)
    output = torch.nn.functional.rms_norm(output * gate.sigmoid() * gate, (inner,), rmsnorm_weight, rmsnorm_eps)
    return torch.nn.functional.linear(output, outproj_weight, outproj_bias)
