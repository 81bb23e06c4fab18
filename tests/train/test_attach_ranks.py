"""`attach` on two processes, however weights are spread over them: TRL's trainer does the same with it and without."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from tiny_models import off, tiny_model
from torch.distributed.tensor import DTensor

from tests.train import forked

_ZERO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
_GLOO: dict[str, Any] = {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
_FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def by_zero(stage: int) -> dict[str, Any]:
    stages = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {**_GLOO, "deepspeed": {**_ZERO, "zero_allow_untested_optimizer": True, "zero_optimization": stages}}


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"use_cpu": True},
    "zero2": by_zero(2),
    "zero3": by_zero(3),
    "fsdp2": {**_GLOO, "fsdp": True, "fsdp_config": _FSDP},
}
KINDS = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


def train_by(strategy: str, environment: dict[str, str], folder: Path) -> None:
    """One of the processes: the same training without `attach` and with it."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if strategy == "fsdp2":
        torch.distributed.init_process_group("gloo")
    if strategy.startswith("zero"):
        import deepspeed.ops

        # CPU inference by shared memory, whose compilation takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from trl_trainers import make, ran

    results = []
    for attached in (False, True):
        AcceleratorState._reset_state()
        if strategy != "ddp":  # accelerate would not choose gloo by itself, nor FSDP without GPUs
            state = PartialState(backend="gloo")
            state.distributed_type = DistributedType[KINDS[strategy].replace("FSDP", "MULTI_GPU")]
        settings = {"per_device_train_batch_size": 4, "beta": 0.1, "gradient_accumulation_steps": 2}
        trainer = make("grpo", folder, **settings, **STRATEGIES[strategy])
        result = ran(trainer, attached=attached)
        stats = result.handle and result.handle.stats
        results.append((result.losses, result.weights, stats and (stats.calls, stats.shared_tokens, stats.unchanged)))
    assert trainer.accelerator.num_processes == 2 and trainer.accelerator.distributed_type.name == KINDS[strategy]
    sharded = [isinstance(p, DTensor) or hasattr(p, "ds_id") for p in trainer.model.parameters()]
    assert all(sharded) == any(sharded) == (strategy in ("zero3", "fsdp2"))
    torch.save(results, folder / f"{environment['RANK']}.pt")


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "fsdp2")) for name in STRATEGIES]
)
def test_two_processes(strategy: str, tmp_path: Path) -> None:
    if strategy.startswith("zero") and not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    ranks = [forked.begun(train_by, strategy, variables, tmp_path) for variables in forked.told_by_torchrun(2)]
    for rank in ranks:
        rank.join(90)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for rank in range(2):
        (losses, weights, _), (ours, found, stats) = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert ours == pytest.approx(losses, abs=1e-5)
        assert off(found, weights) < 1e-6
        calls, shared, unchanged = stats
        assert calls >= 2 * len(losses) and shared > 0 and not unchanged
