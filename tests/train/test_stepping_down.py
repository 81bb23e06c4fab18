"""Where the largest micro-batch lacks memory, `auto` recomputes more: together on all ranks, without a trace of the failed tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from matrix import needs
from running import after, assert_same_bits, base_config, train
from test_faults import as_on_a_gpu, config_of

from packtrain.errors import UserError
from packtrain.objectives.sft.run import SFTLoss
from packtrain.plan.fit import Memory
from packtrain.plan.memory import CHECKPOINTING, Found, estimate
from packtrain.train import preflight, preparation
from packtrain.train import run as run_module
from packtrain.train.engine import Engine

ASKED = "trainer.gradient_checkpointing"
Lack = Callable[[Engine], bool]


def plant(lacks: Lack) -> None:
    """In the middle of the second backward pass of a try, where gradients exist, memory is out if `lacks` says so."""
    own = preflight._run_twice

    def run_twice(trainer: Any, batch: Any) -> None:
        engine, seen = trainer.engine, []

        def fail(gradient: torch.Tensor) -> None:
            seen.append(None)
            if len(seen) > 1 and lacks(engine):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        trained = [weight for weight in engine.model.parameters() if weight.requires_grad]
        hook = trained[len(trained) // 2].register_hook(fail)
        try:
            own(trainer, batch)
        finally:
            hook.remove()

    preflight._run_twice = run_twice


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "tries_largest", lambda *_: True)
    monkeypatch.setattr(preflight, "_run_twice", preflight._run_twice)  # as it was, after `plant`


@pytest.mark.sample("selective-lora")
@pytest.mark.parametrize("peft", ["none", "lora"])
@pytest.mark.parametrize("fits", ["every_4", "selective", "full"])
def test_a_run_that_stepped_down_trains_as_one_that_was_told_to(tmp_path: Path, peft: str, fits: str) -> None:
    config = config_of(tmp_path)
    config["model"]["config"] |= {"num_hidden_layers": 3}
    told = run_here(tmp_path, config, f"peft={peft}", f"{ASKED}={fits}", name="told")
    plant(lambda engine: CHECKPOINTING.index(engine.checkpointing) < CHECKPOINTING.index(fits))
    run = run_here(tmp_path, config, f"peft={peft}", name="stepped")
    assert_same_bits(run, told)
    assert run.norms == told.norms
    assert run.summary["changes"]["recompute"].startswith(f"{fits} (auto: with ")
    assert "recompute" not in told.summary["changes"]


def on_rank_1(*given: Any) -> None:
    """Only rank 1 lacks memory, until every third layer recomputes."""
    plant(lambda engine: engine.accelerator.process_index == 1 and engine.checkpointing in ("none", "every_4"))
    as_on_a_gpu(*given)


def test_all_ranks_step_down_where_one_lacks_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    told = train(tmp_path, config, f"{ASKED}=every_3", name="told", processes=2)
    run = train(tmp_path, config, name="stepped", processes=2, begin=on_rank_1)
    assert_same_bits(run, told)
    assert "lacked memory: on another process" in run.summary["changes"]["recompute"]
    logs = [(run.folder / f"logs/rank-{rank:05d}.log").read_text() for rank in range(2)]
    assert "Tried to allocate 2.00 GiB" in logs[1] and "Tried to allocate" not in logs[0]


@pytest.mark.parametrize(
    ("overrides", "tries"), [([f"{ASKED}=none"], 1), ([f"{ASKED}=every_2"], 1), ([], len(CHECKPOINTING))]
)
def test_it_remains_an_error_where_nothing_else_can_be_done(tmp_path: Path, overrides: list[str], tries: int) -> None:
    """A policy that was asked for stays, and after the last one there is none."""
    seen: list[str] = []
    plant(lambda engine: not seen.append(engine.checkpointing))
    with pytest.raises(UserError, match=r"\[out-of-memory\]") as raised:
        run_here(tmp_path, base_config(tmp_path), *overrides)
    assert (f"{ASKED}=full" in str(raised.value.problems[0].fix)) == (tries == 1)
    assert len(seen) == tries and len({*seen}) == tries
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def always(*given: Any) -> None:
    def lack(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    preflight._run_twice = lack
    as_on_a_gpu(*given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero2", marks=needs("deepspeed"))])
def test_where_ranks_exchange_within_a_pass_the_error_remains(tmp_path: Path, strategy: str) -> None:
    run = train(tmp_path, config_of(tmp_path), f"strategy={strategy}", processes=2, begin=always, expect=2)
    log = (run.folder / "logs/rank-00000.log").read_text()
    assert f"stays none: under {strategy} a process that lacks memory within an exchange cannot reach the others" in log
    assert "recompute" not in log.partition("stays none")[2]


def test_auto_steps_down_where_no_plan_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "estimate", lambda *_: "not known before loading: no sizes")
    plant(lambda engine: engine.checkpointing != "every_2")
    run = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 1}))
    assert run.summary["changes"]["recompute"].startswith("every_2 (auto: with selective ")
    with pytest.raises(UserError, match=r"\[out-of-memory\]"):
        run_here(tmp_path, base_config(tmp_path), f"{ASKED}=full", name="asked")


@pytest.mark.parametrize(("mode", "peft"), [("packed", "none"), ("padding", "lora")])
def test_auto_goes_by_the_largest_micro_batch_and_by_the_changes_that_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, peft: str
) -> None:
    """Here a plan without Liger's kernels lacks memory, and a plan with them does not."""
    asked: list[Found] = []
    taken: list[str] = []
    slots: list[int] = []

    def planned(*given: Any) -> Memory | str:
        asked.append(given[-1])
        memory = estimate(*given)
        assert isinstance(memory, Memory)
        policy = "none" if given[-1].fused else "every_2"
        return replace(memory, checkpointing=policy, fallbacks=("full",))

    def make_changes(loss: Any, *_: Any) -> dict[str, str]:
        loss.changes.append("kernels")
        return {}

    def note(_: Any, model: Any, batch: Any, counts: Any) -> None:
        slots.extend([batch.slots] * torch.is_grad_enabled())

    monkeypatch.setattr(preparation, "estimate", planned)
    monkeypatch.setattr(run_module, "make_changes", make_changes)
    monkeypatch.setattr(Engine, "recompute", after(lambda _, policy: taken.append(policy), Engine.recompute))
    monkeypatch.setattr(SFTLoss, "compute", after(note, SFTLoss.compute))
    config = config_of(tmp_path)
    run = run_here(tmp_path, config, f"packing.mode={mode}", "batch.tokens_per_device=4096", f"peft={peft}")
    assert asked == [Found(max(slots), fused=False), Found(max(slots), fused=True)]
    assert max(slots) < 4096 and taken == ["every_2", "none"]
    monkeypatch.undo()
    plain = run_here(
        tmp_path, config, f"packing.mode={mode}", "batch.tokens_per_device=4096", f"peft={peft}", name="plain"
    )
    assert_same_bits(run, plain)
