"""final/ in the format that was asked for: of adapters, layers trained beside them, and merged models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from running import LLAMA, Run, base_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from packtrain.train.optim.dither import undithered
from packtrain.train.optim.float32_step import MASTER

BF16, MERGED = "model.dtype=bfloat16", {"kind": "lora", "merge": True}
HEAD = {"kind": "lora", "modules_to_save": ["lm_head"]}


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A run that moves weights by less than bfloat16 shows."""
    config = base_config(folder, trainer={"max_steps": 3, **groups.pop("trainer", {})}, **groups)
    config["optim"]["learning_rate"] = 2e-5
    config["model"]["config"] = {**LLAMA, "tie_word_embeddings": False}
    return config


def here(folder: Path, *overrides: str, name: str, **groups: dict[str, Any]) -> Run:
    return run_here(folder, config_of(folder, **groups), *overrides, name=name)


def coarse(weight: torch.Tensor) -> bool:
    return torch.equal(weight.float(), weight.bfloat16().float())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model that has a name."""
    folder = tmp_path_factory.mktemp("base")
    return here(folder, BF16, "optim.learning_rate=0", "trainer.max_steps=1", name="made").folder / "final"


def test_layers_trained_beside_adapters_keep_their_masters(base: Path, tmp_path: Path) -> None:
    named = [f"model.path={base}", "model.init=pretrained", "model.config={}", BF16]
    run = here(
        tmp_path, *named, "optim.bf16_rounding=never", "trainer.checkpoint_every=3", name="run", peft=HEAD | MERGED
    )
    states = torch.load(run.folder / "checkpoints" / "step-000003" / "optimizer.pt", weights_only=True)["state"]
    (master,) = [state[MASTER] for state in states.values() if MASTER in state]
    assert not coarse(master)
    master = undithered(master, 0, "base_model.model.lm_head.modules_to_save.default.weight")
    adapters = load_file(run.folder / "final" / "adapter_model.safetensors")
    (head,) = [one for name, one in adapters.items() if "lm_head" in name]
    assert torch.equal(head, master)
    whole: Any = AutoModelForCausalLM.from_pretrained(run.folder / "final-merged")
    assert whole.dtype == torch.float32 and torch.equal(whole.lm_head.weight, master)
    assert not coarse(whole.model.layers[0].self_attn.q_proj.weight), "merged in bfloat16"
    rounded = here(tmp_path, *named, "optim.bf16_rounding=final", name="rounded", peft=HEAD)
    adapters = load_file(rounded.folder / "final" / "adapter_model.safetensors")
    assert {str(one.dtype) for name, one in adapters.items() if "lm_head" in name} == {"torch.bfloat16"}
    assert {str(one.dtype) for name, one in adapters.items() if "lora" in name} == {"torch.float32"}


@pytest.mark.sample(without=("whole",))
@pytest.mark.parametrize("peft", [{}, MERGED], ids=["whole", "merged"])
def test_in_bfloat16_final_has_the_float32_weights_rounded(tmp_path: Path, peft: dict[str, Any]) -> None:
    given: Any = {"peft": peft} if peft else {}
    exact, coarser = (
        here(tmp_path, "trainer.mixed_precision=bf16", f"optim.bf16_rounding={save}", name=save, **given).weights()
        for save in ("auto", "final")
    )
    assert not all(map(coarse, exact.values()))
    if not peft:
        assert all(torch.equal(weight.bfloat16(), coarser[name]) for name, weight in exact.items())
    for name, weight in exact.items():  # a merged weight is one of two neighbours
        assert ((coarser[name].float() - weight).abs() <= 2**-7 * weight.abs()).all(), name


def test_what_is_small_in_adapters_is_not_lost_in_merging(base: Path, tmp_path: Path) -> None:
    named = [f"model.path={base}", "model.init=pretrained", "model.config={}", BF16, "optim.learning_rate=2e-5"]
    exact, rounded = (
        here(tmp_path, *named, how, name=how[-5:], peft=MERGED).weights("final-merged")
        for how in ("optim.bf16_rounding=never", "optim.bf16_rounding=auto")
    )
    before = {name: weight.float() for name, weight in Run(base.parent).weights().items()}
    learnt = {name: weight - before[name] for name, weight in exact.items()}
    whole = sum(change.square().sum() for change in learnt.values())
    nearest = {name: weight.bfloat16() for name, weight in exact.items()}

    def share(kept: dict[str, torch.Tensor]) -> float:
        return float(
            sum(((kept[name].float() - before[name]) * change).sum() for name, change in learnt.items()) / whole
        )

    assert share(rounded) == pytest.approx(1, abs=0.1) and share(nearest) < 0.85
