"""TRL's own trainers with `attach` and without: the same losses, gradients and figures, also on two processes, however weights are spread."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig
from tiny_models import off, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification
from trl_trainers import STEPS, Ran, make, ran

from packtrain import attach
from tests.train import forked

HYBRID = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
TIMES = ("time", "runtime", "per_second", "flos", "second")


def same(expected: Ran, found: Ran) -> None:
    assert len(found.losses) == len(expected.losses) >= STEPS
    assert found.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-5)
    for theirs, ours in zip(expected.gradients, found.gradients, strict=True):
        assert off(ours, theirs) < 1e-4
    for theirs, ours in zip(expected.logged, found.logged, strict=True):
        figures = {name: value for name, value in theirs.items() if not any(word in name for word in TIMES)}
        assert {name: ours[name] for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-5, nan_ok=True)


def compared(kind: str, folder: Path, **given: Any) -> Ran:
    expected = ran(make(kind, folder, **given), attached=False)
    found = ran(make(kind, folder, **given), attached=True)
    same(expected, found)
    assert found.handle is not None and found.handle.stats.calls >= STEPS and not found.handle.stats.unchanged
    return found


@pytest.mark.sample("grpo-4")
@pytest.mark.parametrize(("kind", "group"), [("grpo", 4), ("rloo", 2), ("grpo", 8), ("rloo", 8)])
def test_groups(kind: str, group: int, tmp_path: Path) -> None:
    """With a reference, completions that end at once, prompts of one token, and several micro-batches a step."""
    found = compared(kind, tmp_path, group=group, beta=0.1, gradient_accumulation_steps=2)
    stats = found.handle.stats
    assert stats.shared_tokens > 0 and stats.row_slots < stats.padded_slots / 2


def test_empty_completions_and_equal_prompts(tmp_path: Path) -> None:
    """`mask_truncated_completions` empties those that were cut off: of all of a batch, at times."""
    compared("grpo", tmp_path, equal_prompts=True, mask_truncated_completions=True, num_iterations=2)


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "llama") for kind in ("dpo", "kto", "distillation", "sft")), ("grpo", "lfm2")]
)
def test_other_objectives_and_hybrids(kind: str, family: str, tmp_path: Path) -> None:
    tiny_model(family, **(HYBRID if family == "lfm2" else {})).save_pretrained(tmp_path / "model")
    found = compared(kind, tmp_path, **({"activation_checkpointing": True} if kind == "kto" else {}))
    assert found.handle.stats.shared_tokens > 0


@pytest.mark.parametrize(
    ("kind", "family", "backend"),
    [("dpo", "llama", "segmented"), ("kto", "llama", "segmented"), ("dpo", "lfm2", "mixers")],
)
def test_a_reference_under_autocast_is_proved_by_the_tolerance_of_bfloat16(
    kind: str, family: str, backend: str, tmp_path: Path
) -> None:
    """accelerate wraps the reference's forward before `attach` sees it: float32 weights, computed in bfloat16."""
    tiny_model(family, **(HYBRID if family == "lfm2" else {})).save_pretrained(tmp_path / "model")
    handle = attach(make(kind, tmp_path, bf16=True))
    assert handle.backends == (backend, backend) and not handle.stats.unrolled
    handle.detach()


def test_reward_models(tmp_path: Path) -> None:
    def model() -> Any:
        config = tiny_model("llama").config
        config.num_labels = 1
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config)

    runs = [ran(make("reward", tmp_path, model=model()), attached=attached) for attached in (False, True)]
    same(*runs)
    assert runs[1].handle.stats.calls == STEPS and runs[1].handle.stats.shared_tokens > 0


def test_adapters_mixed_precision_and_real_rollouts(tmp_path: Path) -> None:
    """LoRA, whose reference is the model with adapters off; in bfloat16, and by completions that the model itself wrote."""

    both: dict[str, Any] = {"beta": 0.1, "gradient_accumulation_steps": 2}

    def with_adapters() -> Any:
        options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
        trainer = make("grpo", tmp_path, options=options, **both)
        del trainer._generate_single_turn
        return trainer

    runs = [ran(with_adapters(), attached=attached) for attached in (False, True)]
    same(*runs)
    stats = runs[1].handle.stats
    assert list(stats.unchanged) == ["generation with a cache"] and stats.calls >= STEPS
    expected, found = (ran(make("grpo", tmp_path, bf16=True, **both), attached=one) for one in (False, True))
    assert found.losses == pytest.approx(expected.losses, abs=1e-2)
    for theirs, ours in zip(expected.gradients[:2], found.gradients[:2], strict=True):
        assert off(ours, theirs) < 0.05


_ZERO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
_GLOO: dict[str, Any] = {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
_FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
_HYBRID_FSDP = {**_FSDP, "transformer_layer_cls_to_wrap": ["Lfm2DecoderLayer"]}


def by_zero(stage: int) -> dict[str, Any]:
    stages = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {**_GLOO, "deepspeed": {**_ZERO, "zero_allow_untested_optimizer": True, "zero_optimization": stages}}


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"use_cpu": True},
    "zero2": by_zero(2),
    "zero3": by_zero(3),
    "fsdp2": {**_GLOO, "fsdp": True, "fsdp_config": _FSDP},
    "fsdp2 of a hybrid": {**_GLOO, "fsdp": True, "fsdp_config": _HYBRID_FSDP},
    "ddp of a hybrid": {"use_cpu": True},
    "zero2 of a hybrid": by_zero(2),
}
KINDS = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


def train_by(strategy: str, environment: dict[str, str], folder: Path) -> None:
    """One of the processes: the same training without `attach` and with it."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    kind = KINDS[strategy.split()[0]]
    if kind == "FSDP":
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
        if kind != "MULTI_CPU":  # accelerate would not choose gloo by itself, nor FSDP without GPUs
            state = PartialState(backend="gloo")
            state.distributed_type = DistributedType[kind.replace("FSDP", "MULTI_GPU")]
        settings = {"per_device_train_batch_size": 4, "beta": 0.1, "gradient_accumulation_steps": 2}
        trainer = make("grpo", folder, **settings, **STRATEGIES[strategy])
        result = ran(trainer, attached=attached)
        stats = result.handle and result.handle.stats
        results.append((result.losses, result.weights, stats and (stats.calls, stats.shared_tokens, stats.unchanged)))
    assert trainer.accelerator.num_processes == 2 and trainer.accelerator.distributed_type.name == kind
    sharded = [isinstance(p, DTensor) or hasattr(p, "ds_id") for p in trainer.model.parameters()]
    assert all(sharded) == any(sharded) == (kind == "FSDP" or "zero3" in strategy)
    torch.save(results, folder / f"{environment['RANK']}.pt")


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "fsdp2")) for name in STRATEGIES]
)
def test_two_processes(strategy: str, tmp_path: Path) -> None:
    if strategy.startswith("zero") and not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed")
    model = tiny_model("lfm2", **HYBRID) if "hybrid" in strategy else tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
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
