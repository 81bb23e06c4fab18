"""Which flash kernel a run on a CPU takes where several are right: the first in their order, and the same on all ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import Run, base_config, joined, train, written

from packtrain.attention import kernel_choice
from packtrain.attention.spec import BACKENDS
from packtrain.plan.origin import origin_in
from tests.stand_in_kernels import flash_attention_2, flash_attention_3
from tests.train import forked

KERNELS = {
    "FlashAttention 3": ("flash_attn_interface", flash_attention_3),
    "FlashAttention 2": ("flash_attn", flash_attention_2),
}


def kept_by(run: Run, step: int) -> set[str]:
    """The kernels that a checkpoint names."""
    return {*json.loads((run.checkpoint(step) / "kernels.json").read_text()).values()}


def with_kernels(arguments: Any, environment: dict[str, str], *rest: Any, without: str = "") -> None:
    """The command on a CPU that has two kernels, but for the one of that name."""
    kernel_choice.CANDIDATES = tuple(one for one in kernel_choice.CANDIDATES if one[0] in KERNELS and one[0] != without)
    for module, kernel in KERNELS.values():
        sys.modules[module] = SimpleNamespace(flash_attn_varlen_func=kernel)  # type: ignore[assignment]
    BACKENDS.all()["flash"] = replace(BACKENDS["flash"], devices=("cpu",), formats=("float32",))
    forked.run(arguments, environment, *rest)


def with_a_layer_on_rank_1(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """As `with_kernels`. Only rank 1 meets some kind of layer."""
    if environment["RANK"] == "1":
        kernel_choice.keep_kernels({"a layer": "FlashAttention 2"}, print)
    with_kernels(arguments, environment, *rest)


def with_other_kernels_on_each_rank(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """As `with_kernels`, but only rank 0 has the first."""
    with_kernels(arguments, environment, *rest, without="" if environment["RANK"] == "0" else "FlashAttention 3")


def test_all_ranks_take_the_first_kernel_that_is_right_and_checkpoints_name_those_of_all(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1, "checkpoint_every": 1})
    run = train(tmp_path, config, processes=2, begin=with_a_layer_on_rank_1)
    assert run.summary["attention"] == "flash (FlashAttention 3)"
    assert "kernel" not in origin_in(run.checkpoint(1))  # another one is no reason to refuse a checkpoint
    assert kept_by(run, 1) == {"FlashAttention 3", "FlashAttention 2"}


def test_a_resumed_run_keeps_its_kernel_while_that_is_right(tmp_path: Path) -> None:
    """It begins without the first kernel. It goes on with both, or without its own."""
    config = base_config(tmp_path, trainer={"max_steps": 1, "checkpoint_every": 1})
    run = train(tmp_path, config, begin=partial(with_kernels, without="FlashAttention 3"))
    longer = "trainer.max_steps=2", run.resume(1)
    again = train(tmp_path, config, *longer, name="again", begin=with_kernels)
    anew = train(tmp_path, config, *longer, "trainer.resume_despite=[model.attention]", name="anew", begin=with_kernels)
    other = train(
        tmp_path, config, *longer, name="other", begin=partial(with_kernels, without="FlashAttention 2"), processes=2
    )
    for one, name in ((run, "2"), (again, "2"), (anew, "3"), (other, "3")):
        assert one.summary["attention"].startswith(f"flash (FlashAttention {name}")
        assert kept_by(one, max(map(int, (kept[5:] for kept in one.kept)))) == {f"FlashAttention {name}"}
    assert "others: not tried" in again.summary["attention"] and "another kernel" not in again.log + anew.log
    said = "by another kernel than before, which rounds differently: FlashAttention 2: this version of packtrain does"
    assert other.log.count(said) == 1


@pytest.mark.parametrize("asked", ["auto", "flash"])
def test_ranks_that_would_take_different_kernels_are_refused(tmp_path: Path, asked: str) -> None:
    config = base_config(tmp_path, model={"attention": asked}, trainer={"max_steps": 1})
    results = joined(2, "sft", written(tmp_path, config), begin=with_other_kernels_on_each_rank, expect=3)
    assert all(f"rank {rank}: flash by {name}" in results[0].stderr for rank, name in enumerate(KERNELS))
