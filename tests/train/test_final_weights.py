"""final/ in the format that was asked for: of adapters, layers trained beside them, shards; and what rounding it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from here import train_here
from running import LLAMA, Run, base_config, train
from safetensors.torch import load_file
from test_strategies import NEEDS_DEEPSPEED
from transformers import AutoModelForCausalLM

from packtrain.config.compose import load_config
from packtrain.train.loop import StepTrainer
from packtrain.train.optim.float32_step import MASTER
from packtrain.train.optim.rounding_cost import RoundingCost

BF16, MERGED = "model.dtype=bfloat16", {"kind": "lora", "merge": True}
HEAD = {"kind": "lora", "modules_to_save": ["lm_head"]}


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A run that moves weights by less than bfloat16 shows."""
    config = base_config(folder, trainer={"max_steps": 3, **groups.pop("trainer", {})}, **groups)
    config["optim"]["learning_rate"] = 2e-5
    config["model"]["config"] = {**LLAMA, "tie_word_embeddings": False}
    return config


def here(folder: Path, *overrides: str, name: str, **groups: dict[str, Any]) -> Run:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config_of(folder, **groups)))
    return train_here(load_config(str(path), list(overrides)), folder / name)


def coarse(weight: torch.Tensor) -> bool:
    return torch.equal(weight.float(), weight.bfloat16().float())


def said(run: Run) -> str:
    return (run.folder / "logs" / "rank-00000.log").read_text()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model that has a name."""
    folder = tmp_path_factory.mktemp("base")
    return here(folder, BF16, "optim.learning_rate=0", "trainer.max_steps=1", name="made").folder / "final"


def test_layers_trained_beside_adapters_keep_their_masters(base: Path, tmp_path: Path) -> None:
    named = [f"model.path={base}", "model.init=pretrained", "model.config={}", BF16]
    run = here(
        tmp_path, *named, "trainer.save_dtype=float32", "trainer.checkpoint_every=3", name="run", peft=HEAD | MERGED
    )
    states = torch.load(run.folder / "checkpoints" / "step-000003" / "optimizer.pt", weights_only=True)["state"]
    (master,) = [state[MASTER] for state in states.values() if MASTER in state]
    assert not coarse(master)
    adapters = load_file(run.folder / "final" / "adapter_model.safetensors")
    (head,) = [one for name, one in adapters.items() if "lm_head" in name]
    assert torch.equal(head, master)
    whole: Any = AutoModelForCausalLM.from_pretrained(run.folder / "final-merged")
    assert whole.dtype == torch.float32 and torch.equal(whole.lm_head.weight, master)
    assert not coarse(whole.model.layers[0].self_attn.q_proj.weight), "merged in bfloat16"
    rounded = here(tmp_path, *named, "trainer.save_dtype=bfloat16", name="rounded", peft=HEAD)
    adapters = load_file(rounded.folder / "final" / "adapter_model.safetensors")
    assert {str(one.dtype) for name, one in adapters.items() if "lm_head" in name} == {"torch.bfloat16"}
    assert {str(one.dtype) for name, one in adapters.items() if "lora" in name} == {"torch.float32"}
    assert rounded.summary["rounding"]["exact"] != rounded.summary["rounding"]["saved"]


def held_out_loss(folder: Path, model: Path, name: str) -> float:
    """Of a saved model, computed in float32."""
    load = [f"model.path={model}", "model.init=pretrained", "model.config={}", "model.dtype=float32"]
    run = here(folder, *load, "optim.learning_rate=0", "trainer.max_steps=1", name=name, data={"eval": 0.2})
    return run.summary["first_eval_loss"]


@pytest.mark.parametrize(("name", "overrides", "peft"), [
    ("autocast", ["trainer.mixed_precision=bf16"], {}),
    ("merged", [BF16], MERGED),
    ("merged-autocast", ["trainer.mixed_precision=bf16"], MERGED),
])  # fmt: skip
def test_the_cost_of_rounding_is_that_of_the_files(
    tmp_path: Path, name: str, overrides: list[str], peft: dict[str, Any]
) -> None:
    given: Any = {"data": {"eval": 0.2}, **({"peft": peft} if peft else {})}
    exact, run = (
        here(tmp_path, *overrides, f"trainer.save_dtype={save}", name=f"{name}-{save}", **given)
        for save in ("float32", "bfloat16")
    )
    cost = run.summary["rounding"]
    assert exact.summary["rounding"] is None
    for which, one in (("exact", exact), ("saved", run)):
        loss = held_out_loss(tmp_path, one.folder / "final", f"{name}-{which}-again")
        assert cost[which] == pytest.approx(loss, rel=1e-6)
    assert cost["exact"] != cost["saved"] and cost["held_out"]
    assert "rounded to bfloat16 for final/" in said(run)


def test_without_held_out_documents_the_last_step_tells_the_cost(tmp_path: Path) -> None:
    run = here(tmp_path, BF16, name="run")
    cost = run.summary["rounding"]
    assert not cost["held_out"] and abs(cost["saved"] - cost["exact"]) < 0.01 * cost["exact"]
    assert "on the last step's documents" in said(run)


def test_a_cost_that_no_figure_shows_needs_no_advice() -> None:
    assert "save_dtype" not in RoundingCost(exact=6.82374, saved=6.823743, held_out=True).sentence()
    assert "save_dtype" in RoundingCost(exact=6.8237, saved=6.8239, held_out=True).sentence()


def test_want_of_memory_for_the_cost_of_rounding_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(trainer: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 36.00 GiB.")

    monkeypatch.setattr(StepTrainer, "compared_loss", hungry)
    run = here(tmp_path, BF16, name="run", peft=MERGED)
    assert run.summary["rounding"] is None and "was not measured: there was no memory for float32" in said(run)
    for place in ("final", "final-merged"):
        AutoModelForCausalLM.from_pretrained(run.folder / place)


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp2",
        pytest.param("zero2", marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]),
        pytest.param("zero3", marks=NEEDS_DEEPSPEED),
    ],
)
def test_strategies_tell_what_rounding_costs(tmp_path: Path, strategy: str) -> None:
    given: Any = {"data": {"eval": 0.2}}
    run = train(tmp_path, config_of(tmp_path, **given), f"strategy={strategy}", BF16, name=strategy, processes=2)
    if strategy == "zero3":
        assert run.summary["rounding"] is None and "was not measured: zero3" in said(run)
        return
    alone = here(tmp_path, BF16, name="alone", **given)
    for one in ("exact", "saved"):
        assert run.summary["rounding"][one] == pytest.approx(alone.summary["rounding"][one], rel=1e-4)
    assert run.summary["rounding"]["saved"] != run.summary["rounding"]["exact"]
