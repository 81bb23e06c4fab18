"""Other adapters than plain LoRA, groups of weights, Muon and other optimizers: the same training on any number of processes, and after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from matrix import DORA as OPTIONS
from matrix import GROUPS as FROZEN
from matrix import needs
from peft import PeftModel
from running import Run, assert_same_bits, config_on, packtrain, written
from safetensors.torch import load_file
from tiny_models import save_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from packtrain.config.schema import Optim
from packtrain.errors import UserError
from packtrain.optimizers import OPTIMIZERS
from packtrain.train.optim.weight_groups import MuonAndAdamW, group_weights

DORA = ("peft=lora", "peft.r=4", OPTIONS)
GROUPS = (FROZEN, "optim.weight_decay=0.1")
EMA = ("trainer.ema=0.75", "trainer.checkpoint_every=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitting")
    save_model(folder / "base")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Run]:
    """The runs of one process, once they are made."""
    return {}


def config_of(folder: Path) -> dict[str, Any]:
    trainer = {"max_steps": 4, "checkpoint_every": 2, "keep_checkpoints": None}
    return config_on(folder / "base", folder, trainer=trainer)


def weights_of(run: Run, place: str = "final") -> dict[str, torch.Tensor]:
    return {
        name: value for file in (run.folder / place).glob("*.safetensors") for name, value in load_file(file).items()
    }


def run_alone(folder: Path, alone: dict[str, Run], name: str, options: tuple[str, ...]) -> Run:
    if name not in alone:
        alone[name] = run_here(folder, config_of(folder), *options, name=name)
    return alone[name]


def test_adapters_are_trained_on_with_their_options_only(folder: Path, alone: dict[str, Run]) -> None:
    made = run_alone(folder, alone, "dora", DORA)
    config = {**config_of(folder), "model": {"path": str(made.folder / "final")}}
    with pytest.raises(UserError, match=r"use_dora True, not False \[adapter-settings-differ\]") as error:
        run_here(folder, config, "peft=lora", "peft.r=4", "trainer.max_steps=1", name="other")
    assert error.value.problems[0].fix.startswith("set peft.options.use_dora=true")
    assert run_here(folder, config, *DORA, "trainer.max_steps=1", name="further").losses[0] < made.losses[0]


def test_options_of_peft_choose_layers_and_ranks(folder: Path) -> None:
    options = "peft.options={layers_to_transform: [1], rank_pattern: {v_proj: 2}, init_lora_weights: gaussian}"
    given = ("peft=lora", "peft.r=4", "peft.target_modules=[q_proj, v_proj]", options, "trainer.max_steps=1")
    saved = weights_of(run_here(folder, config_of(folder), *given, name="chosen"))
    ranks = {tuple(name.split(".")[4:7:2]): len(value) for name, value in saved.items() if "_A" in name}
    assert ranks == {("1", "q_proj"): 4, ("1", "v_proj"): 2}


def test_a_group_has_its_share_of_the_learning_rate_and_frozen_weights_stay(
    folder: Path, alone: dict[str, Run]
) -> None:
    run, begin = run_alone(folder, alone, "groups", GROUPS), load_file(folder / "base" / "model.safetensors")
    assert {line["lr"] for line in run.steps} == {1e-3}  # that of the weights in no group
    moved = {name: (value - begin[name]).abs().max() for name, value in run.weights("checkpoints/step-000002").items()}
    assert moved["model.embed_tokens.weight"] == 0
    first, second = (moved[f"model.layers.{at}.mlp.up_proj.weight"] for at in (0, 1))
    assert first > 2 * second > 0
    assert "model.embed_tokens.weight" not in run.states(2)["order"]


def test_checkpoints_have_what_groups_freeze_of_adapters(folder: Path) -> None:
    lora = ("peft=lora", "peft.r=4", "peft.modules_to_save=[lm_head]")
    run = run_here(folder, config_of(folder), *lora, "optim.groups=[{match: lora_A|lm_head, lr_scale: 0}]", name="fa")
    saved, final = weights_of(run, "checkpoints/step-000004"), weights_of(run)
    assert saved.keys() == final.keys() and any("lora_A" in name for name in final)
    assert all(torch.equal(value, final[name]) for name, value in saved.items())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), str(run.folder / "final"))


def test_layers_without_adapters_that_no_model_has_are_refused(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        options = "peft.options={exclude_modules: [q_proj, v_porj]}"
        run_here(folder, config_of(folder), "peft=lora", options, "trainer.max_steps=1", name="refused")
    (problem,) = error.value.problems
    assert (problem.where, problem.fix) == ("peft.options.exclude_modules", "Did you mean v_proj?")


def test_groups_that_match_nothing_are_refused_before_any_step(folder: Path) -> None:
    groups = "optim.groups=[{match: q_proj, lr_scale: 0}, {match: q_porj}, {match: 0.self_attn.q_proj}]"
    with pytest.raises(UserError) as error:
        run_here(folder, config_of(folder), groups, name="refused")
    nothing, earlier = error.value.problems
    assert (nothing.where, nothing.fix) == ("optim.groups[1].match", "Did you mean q_proj?")
    assert earlier.code == "group-shadowed"
    with pytest.raises(UserError, match=r"\[nothing-to-train\]"):
        run_here(folder, config_of(folder), "optim.groups=[{match: '.', lr_scale: 0}]", name="refused")


@pytest.mark.sample(without=("8 bits", "muon"))
@pytest.mark.parametrize(
    "options",
    [
        ("optim.name=muon",),
        ("optim.name=muon", "model.dtype=bfloat16"),
        ("optim.name=rmsprop",),
        ("optim.name=adagrad",),
        pytest.param(("optim.name=adamw_torch_8bit",), marks=needs("torchao")),
        pytest.param(("optim.name=adamw_8bit", "model.dtype=bfloat16", *EMA), marks=needs("bitsandbytes")),
    ],
    ids=["muon", "muon, bfloat16", "rmsprop", "adagrad", "8 bits", "bitsandbytes, bfloat16, average"],
)
def test_a_run_goes_on_bit_for_bit(options: tuple[str, ...], folder: Path) -> None:
    name = "-".join(options).replace("=", "-")
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its optimizer, for half a minute
        whole = run_here(folder, config_of(folder), *options, name=name)
        on = run_here(folder, config_of(folder), *options, whole.resume(2), name=f"{name}-on")
    assert_same_bits(on, whole, after=2)
    assert whole.losses[-1] < whole.losses[0]


def test_muon_steps_matrices_of_layers_as_torch_does_and_all_else_by_adamw(folder: Path) -> None:
    run = run_here(folder, config_of(folder), "optim.name=muon", "trainer.max_steps=2", name="muon-groups")
    state = run.states(2)
    kept = {name: sorted(state["state"][number]) for number, name in enumerate(state["order"])}
    for name, states in kept.items():
        muon = "layers" in name and "norm" not in name
        assert states == (["momentum_buffer"] if muon else ["exp_avg", "exp_avg_sq", "step"]), name
    torch.manual_seed(0)
    mine, theirs = (torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2))
    theirs.data.copy_(mine)
    ours = MuonAndAdamW([{"params": [mine], "muon": True, "weight_decay": 0.1}], lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    plain = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        mine.grad = theirs.grad = torch.randn(6, 4)
        ours.step()
        plain.step()
    assert torch.equal(mine, theirs)


def test_a_plan_counts_what_is_trained(folder: Path) -> None:
    path = written(folder, config_of(folder), "plan")

    def trained(*options: str) -> int:
        return json.loads(packtrain("plan", path, "--json", *options).stdout)["memory"]["trained"]

    every, frozen = trained(), trained(*GROUPS)
    embedding = load_file(folder / "base" / "model.safetensors")["model.embed_tokens.weight"]
    assert every - frozen == embedding.numel()
    assert "trained (LoRA)" not in packtrain("plan", path, *GROUPS).stdout
    lora = ("peft=lora", "peft.r=4")
    assert trained(*lora) < trained(*DORA)
    half = trained(*lora, "peft.target_modules=[q_proj]", "peft.options={layers_to_transform: [1]}")
    assert trained(*lora, "peft.target_modules=[q_proj]") == 2 * half


def test_the_average_is_that_of_the_weights_after_each_step(folder: Path, alone: dict[str, Run]) -> None:
    run = run_alone(folder, alone, "ema", EMA)
    average = weights_of(run, "checkpoints/step-000001")
    for step in (2, 3, 4):
        weights = weights_of(run, f"checkpoints/step-{step:06d}")
        average = {name: 0.75 * value + 0.25 * weights[name] for name, value in average.items()}
    found = weights_of(run, "final-ema")
    assert found.keys() == weights_of(run).keys()
    for name, value in found.items():
        # of each step two products and a sum, of numbers up to the largest
        assert (value - average[name]).abs().max() <= 9 * torch.finfo(torch.float32).eps * max(
            1.0, value.abs().max().item()
        ), name
        assert not torch.equal(value, weights_of(run)[name])
    AutoModelForCausalLM.from_pretrained(run.folder / "final-ema")


def test_an_average_ends_where_a_run_goes_on_without_it_and_begins_anew(folder: Path, alone: dict[str, Run]) -> None:
    averaged = run_alone(folder, alone, "ema", EMA)
    without = run_here(folder, config_of(folder), averaged.resume(2), name="ema-off")
    assert without.losses == averaged.losses[2:]
    assert not any("average" in states for states in without.states(4)["state"].values())
    again = run_here(folder, config_of(folder), *EMA, without.resume(4), "trainer.max_steps=5", name="ema-on")
    assert all(torch.equal(value, weights_of(again)[name]) for name, value in weights_of(again, "final-ema").items())


def test_an_average_of_what_deepspeed_keeps_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"\[zero-averages-weights\]"):
        run_here(folder, config_of(folder), "trainer.ema=0.9", "strategy=zero2", name="refused")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"muon"}))
def test_an_optimizer_has_class_and_arguments_of_transformers(name: str, tmp_path: Path) -> None:
    spec = OPTIMIZERS[name]
    if spec.package:
        pytest.importorskip(spec.package)
    theirs = {"optim": name, "learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "report_to": "none"}
    kind, arguments = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(str(tmp_path), use_cpu=True, **theirs))
    assert spec.load() is kind
    assert {"lr": 3e-4, **spec.arguments(0.8, 0.95)} == arguments


def test_weights_decay_as_transformers_decides(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    model.extra = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, others = group_weights(model, Optim(weight_decay=0.1))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    trainer: Any = Trainer
    assert {names[id(weight)] for weight in decayed["params"]} == {*trainer.get_decay_parameter_names(None, model)}
    assert len(names) == len(decayed["params"]) + len(others["params"])
