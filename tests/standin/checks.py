"""What is asked of the stand-in GPUs themselves and of parts of packtrain on them; each function runs in a process that has them."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import pytest
import torch

from packtrain.attention.kernels.selection import LayerFeatures, choose_kernel
from packtrain.config.schema import RunConfig
from packtrain.errors import CheckFailed
from packtrain.model.spread import Ranks
from packtrain.train.run import train

CUDA = torch.device("cuda", 0)
HALF = LayerFeatures(torch.bfloat16, 2, 16, 16, window=True)


def joins_on_the_gpu_of_its_local_rank() -> None:
    """Of LOCAL_RANK where a launcher has set it, or the first."""
    index = int(os.environ["LOCAL_RANK"]) if "RANK" in os.environ else 0

    def work(_: RunConfig, ranks: Ranks, peers: Any) -> int:
        assert peers is None and (ranks.rank, ranks.world_size) == (0, 1)
        assert ranks.device == torch.device("cuda", index) and torch.cuda.current_device() == index
        return 7

    assert train("sft", RunConfig(), work) == 7


def refuses_what_cuda_refuses() -> None:
    """On two devices."""
    first, second = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    for other in (second, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            first + other
    assert (first + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(2)
    with pytest.raises(TypeError, match=r"Tensor.cpu\(\)"):
        first.numpy()


def notes_touches_waits_and_bytes() -> None:
    from standin_gpus import device, tensor

    torch.cuda.set_device(1)
    torch.ones(1, device="cuda")
    beside = threading.Thread(target=lambda: torch.ones(1, device="cuda"), name="beside")
    beside.start()
    beside.join()
    assert device.touched == {1: "MainThread", 0: "beside"}

    row = torch.arange(1024.0, device="cuda")
    before, waits = torch.cuda.memory_allocated(), len(tensor.waits)
    twice = row * 2
    assert torch.cuda.memory_allocated() == before + 4096 and len(tensor.waits) == waits
    assert (twice.sum().item(), twice[row < 2].tolist()) == (1023 * 1024, [0, 2])
    assert tensor.waits[waits:] == ["_local_scalar_dense", "index", "tolist"]
    del twice
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() > before + 4096


def indexes_as_torch_does() -> None:
    row, there = torch.arange(12).view(4, 3), torch.arange(12, device="cuda").view(4, 3)
    for key in ([2, 0], range(2), (slice(None), [0, 2]), torch.tensor([True, False, True, False]), -1):
        assert there[key].cpu().equal(row[key]), key
    there[[1, 3]] = 0
    assert there.sum().item() == 0 + 1 + 2 + 6 + 7 + 8


def has_torchs_kernel_forward_and_backward() -> None:
    choice = choose_kernel(HALF, CUDA)  # by outputs and gradients of a dense reference, prefixes and window among it
    assert choice.kernel is not None and choice.kernel.name == "torch's varlen_attn", choice.why_not()
    assert choose_kernel(LayerFeatures(torch.bfloat16, 2, 16, 16, sinks=True), CUDA).kernel is None
    assert choose_kernel(LayerFeatures(torch.bfloat16, 2, 16, 16, softcap=9.0), CUDA).kernel is None


def ends_with_the_kernel_that_broke_the_device() -> None:
    """An illegal access ends a process's use of the GPU: every call after it fails, also those of kernels that are right."""
    from standin_gpus import device

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size):
        device.broken = "CUDA error: an illegal memory access was encountered"
        return q + k.sum()

    sys.modules["flash_attn_interface"] = types.SimpleNamespace(flash_attn_varlen_func=kernel)  # type: ignore[assignment]
    with pytest.raises(CheckFailed, match=r"FlashAttention 3 made cuda:0 unusable .* illegal memory access") as failed:
        choose_kernel(HALF, CUDA)
    assert failed.value.problems[0].where == "model.attention" and failed.value.problems[0].fix


def passes_over_a_kernel_without_code_for_the_device() -> None:
    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size):
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")

    sys.modules["flash_attn_interface"] = types.SimpleNamespace(flash_attn_varlen_func=kernel)  # type: ignore[assignment]
    choice = choose_kernel(HALF, CUDA)
    assert choice.kernel is not None and "no kernel image" in dict(choice.lacks)["FlashAttention 3"]
