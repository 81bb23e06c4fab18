"""`attach` on TRL's own trainers, on a GPU: flash attention is taken, and training is that of the CPU."""

from __future__ import annotations

import pytest

from tests.standin import trl_runs


@pytest.mark.parametrize(
    "run",
    [trl_runs.grpo, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (trl_runs.sft, trl_runs.dpo))],
    ids=lambda one: one.__name__,
)
def test_a_trainer_of_trl_trains_as_on_the_cpu(gpus, run) -> None:
    gpus.call(run)
    forward, backward = gpus.flash_calls(0)
    assert forward and backward and max(backward) > 1 and set(gpus.touched()[0]) == {0}
