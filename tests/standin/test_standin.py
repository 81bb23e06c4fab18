"""The stand-in GPUs do what the tests on them rely on, and the choice of kernels holds on them; each claim is a function of checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.standin import checks
from tests.train import forked

ON_ONE = (
    checks.indexes_as_torch_does,
    checks.makes_tensors_of_their_size_where_they_belong,
    checks.makes_tensors_on_the_device_around,
    checks.refuses_what_the_kernel_cannot_do,
    checks.sums_losses_on_the_gpu_as_on_the_cpu,
    checks.refuses_products_in_8_bits_on_a_gpu_that_has_none,
    checks.attends_by_the_kernels_of_a_gpu,
    checks.has_torchs_kernel_forward_and_backward,
    checks.ends_with_the_kernel_that_broke_the_device,
    checks.takes_the_fastest_of_the_right_kernels,
    checks.passes_over_a_kernel_without_code_for_the_device,
    checks.keeps_inputs_of_layers_on_the_host,
)
ON_TWO = (checks.refuses_what_cuda_refuses, checks.notes_touches_waits_and_bytes)


@pytest.mark.parametrize("check", (*ON_ONE, *ON_TWO), ids=lambda one: one.__name__)
def test_it(gpus, check) -> None:
    gpus.call(check, devices=2 if check in ON_TWO else 1)


def test_ranks_have_nccl(gpus, tmp_path: Path) -> None:
    gpus.call(checks.sends_what_is_on_devices_alone, devices=2, ranks=2)
    gpus.call(checks.limits_what_waits_for_another_rank, devices=2, ranks=2, env={"DONE": str(tmp_path / "done")})


def test_a_rank_without_memory_to_try_a_kernel_takes_that_of_the_others(gpus) -> None:
    gpus.call(checks.takes_another_ranks_kernel_without_memory_to_try_it, ranks=2)


@pytest.mark.parametrize("launched", ["by nobody", "by torchrun", "by nobody, in a shell with LOCAL_RANK"])
def test_a_process_joins_on_its_own_gpu(gpus, launched: str) -> None:
    local = {"LOCAL_RANK": "7"} if launched != "by nobody" else {}
    variables = {**(forked.told_by_torchrun(1)[0] if "torchrun" in launched else {}), **local}
    gpus.call(checks.joins_on_the_gpu_of_its_local_rank, devices=8, env=variables)


@pytest.mark.sample("grpo")
@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo"])
def test_an_attached_trainer_of_trl_trains_as_on_the_cpu_by_flash(gpus, kind: str) -> None:
    gpus.call(checks.trains_by_trl, env={"KIND": kind})
    forward, backward = gpus.flash_calls(0)
    assert forward and backward and max(backward) > 1 and set(gpus.touched()[0]) == {0}
