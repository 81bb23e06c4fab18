"""Which flash kernel a run takes where several are right: the first in their order, and the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from running import base_config, train

from packtrain.attention import flash
from packtrain.attention.kernels import selection
from packtrain.attention.kernels.varlen import _by_signature
from packtrain.plan.origin import origin_in
from tests.stand_in_kernels import flash_attention_2, flash_attention_3
from tests.train import forked

KERNELS = {"FlashAttention 3": flash_attention_3, "FlashAttention 2": flash_attention_2}


def with_kernels(arguments: Any, environment: dict[str, str], *rest: Any, without: str = "") -> None:
    """The command on a CPU that has two kernels, but for the one of that name."""

    def standing_in(kernel: Any) -> Any:
        def attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic
        ):
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return kernel(q, k, v, *lengths, softmax_scale=softmax_scale, causal=causal)

        return lambda: _by_signature(attend)

    selection.CANDIDATES = tuple((name, standing_in(one)) for name, one in KERNELS.items() if name != without)
    flash.DEVICES, flash.FORMATS = ("cpu",), (torch.float32,)
    forked.run(arguments, environment, *rest)


def with_other_kernels_on_each_rank(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """As `with_kernels`, but only rank 0 has the first."""
    with_kernels(arguments, environment, *rest, without="" if environment["RANK"] == "0" else "FlashAttention 3")


def test_all_ranks_take_the_first_kernel_that_is_right_and_checkpoints_name_none(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1, "checkpoint_every": 1})
    run = train(tmp_path, config, processes=2, begin=with_kernels)
    assert run.summary["attention"] == "flash (FlashAttention 3)"
    (checkpoint,) = (run.folder / "checkpoints").glob("step-*")
    assert "kernel" not in origin_in(checkpoint)


@pytest.mark.parametrize("asked", ["auto", "flash"])
def test_ranks_that_would_take_different_kernels_are_refused(tmp_path: Path, asked: str) -> None:
    config = base_config(tmp_path, model={"attention": asked}, trainer={"max_steps": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    results = forked.joined(2, "sft", str(tmp_path / "run.yaml"), begin=with_other_kernels_on_each_rank)
    assert [result.returncode for result in results] == [3, 3]
    assert all(f"rank {rank}: flash by {name}" in results[0].stderr for rank, name in enumerate(KERNELS))
