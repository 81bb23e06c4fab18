"""Which flash kernel a run takes where several are right: measured, the same on all ranks, and kept when it resumes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from running import base_config, train

from packtrain.attention import flash
from packtrain.attention.kernels import selection
from packtrain.attention.kernels.varlen import _by_signature
from packtrain.plan.origin import origin_in
from tests.stand_in_kernels import flash_attention_2, flash_attention_3
from tests.train import forked


def with_kernels(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """The command on a CPU that has two kernels. By rank 0's times the first is slow, by rank 1's the second.

    LATER the second is slow everywhere.
    """
    slow = 1 if "LATER" in environment else int(environment["RANK"])

    def standing_in(kernel: Any, pause: float) -> Any:
        def attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic
        ):
            time.sleep(pause)
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return kernel(q, k, v, *lengths, softmax_scale=softmax_scale, causal=causal)

        return lambda: _by_signature(attend)

    kernels = {"FlashAttention 3": flash_attention_3, "FlashAttention 2": flash_attention_2}
    pauses = 0.006 * (slow == 0), 0.006 * (slow == 1)
    selection.CANDIDATES = tuple(
        (name, standing_in(one, pause)) for (name, one), pause in zip(kernels.items(), pauses, strict=True)
    )
    flash.DEVICES, flash.FORMATS = ("cpu",), (torch.float32,)
    forked.run(arguments, environment, *rest)


def attention_of(folder: Path) -> list[str]:
    """What each rank says of its attention."""
    logs = sorted((folder / "logs").glob("rank-*.log"))
    return [line for log in logs for line in log.read_text().splitlines() if " attention  " in line]


def test_ranks_take_the_kernel_that_is_faster_on_rank_0_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2, "checkpoint_every": 2})
    run = train(tmp_path, config, processes=2, begin=with_kernels)
    assert run.summary["attention"].startswith("flash (FlashAttention 2 (measured on a row of one layer")
    said = attention_of(run.folder)
    assert len(said) == 2 and all("FlashAttention 3 " in line and "FlashAttention 2 " in line for line in said)
    assert len({line.split("flash", 1)[1] for line in said}) == 1  # rank 0's times on both
    (checkpoint,) = (run.folder / "checkpoints").glob("step-*")
    assert origin_in(checkpoint)["kernel"] == "FlashAttention 2"
    (run.folder / "summary.json").unlink()  # as if it had been stopped
    resumed = train(tmp_path, config, "trainer.max_steps=3", processes=2, begin=with_the_other_slow)
    assert resumed.summary["attention"] == "flash (FlashAttention 2 (as before the checkpoint))"


def with_the_other_slow(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """As `with_kernels`, but on both ranks the kernel that was taken is the slow one now."""
    with_kernels(arguments, {**environment, "LATER": "1"}, *rest)


@pytest.mark.parametrize(
    "named, said",
    [("trainer.deterministic=true", "flash (FlashAttention 3)"), ("model.attention=flash", "flash (asked for)")],
)
def test_the_order_decides_where_bits_must_not_differ_or_the_user_named_the_backend(
    tmp_path: Path, named: str, said: str
) -> None:
    run = train(tmp_path, base_config(tmp_path, trainer={"max_steps": 1}), named, processes=2, begin=with_kernels)
    assert run.summary["attention"] == said
