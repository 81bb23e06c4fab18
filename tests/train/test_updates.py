"""Updates of bfloat16 weights are not lost in rounding: by float32 masters or by chance; and final/ has the format that was asked for."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from here import run_here
from running import LLAMA, Run, base_config
from safetensors.torch import load_file
from torch import nn
from transformers import Adafactor, AutoModelForCausalLM, get_scheduler

from packtrain.config.compose import load_config
from packtrain.config.schema import Optim
from packtrain.errors import UserError
from packtrain.train.engine import warmup_of
from packtrain.train.optim import float32_step
from packtrain.train.optim.dither import Dither, undithered
from packtrain.train.optim.float32_step import MASTER, round_by_chance, stepping_in_float32

CHANCE, EXACT = (f"optim.bf16_rounding={how}" for how in ("stochastic", "never"))
PLAIN = "optim.bf16_rounding=undithered"
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 2e-5, "weight_decay": 0.1}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 2e-5, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 2e-3}),
    "adafactor": (Adafactor, {"lr": 2e-5, "scale_parameter": False, "relative_step": False}),
}


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    trainer = {"max_steps": 5, "checkpoint_every": 3, "keep_checkpoints": None}
    config = base_config(folder, trainer=trainer, **groups)
    config["model"]["dtype"] = "bfloat16"
    return config


def here(folder: Path, *overrides: str, name: str, **groups: dict[str, Any]) -> Run:
    """A run of one process in this one."""
    return run_here(folder, config_of(folder, **groups), *overrides, name=name)


class Fitting:
    """A small net that an optimizer fits to another one."""

    def __init__(self, kind: str, dtype: torch.dtype, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
        target = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
        self.inputs = torch.randn(256, 24)
        with torch.no_grad():
            self.wanted = target(self.inputs)
        self.model.to(dtype)  # the float32 one starts at the same weights
        if dtype == torch.float32:
            self.model.to(torch.bfloat16).float()
        made, arguments = OPTIMIZERS[kind]
        names = {weight: name for name, weight in self.model.named_parameters()}
        made = stepping_in_float32(made, seed=1, names=names, dither=Dither(), **how) if how else made
        self.optimizer = made(self.model.parameters(), **arguments)

    def loss(self) -> torch.Tensor:
        dtype = next(self.model.parameters()).dtype
        return ((self.model(self.inputs.to(dtype)).float() - self.wanted) ** 2).mean()

    def train(self, steps: int) -> Fitting:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
        return self

    def kept(self) -> list[torch.Tensor]:
        """Masters, or weights."""
        states = [self.optimizer.state[weight].get(MASTER, weight) for weight in self.model.parameters()]
        return [one.detach().float() for one in states]

    def exact_loss(self) -> float:
        """The loss of `kept`, computed in float32."""
        with torch.no_grad():
            for weight, kept in zip(self.model.parameters(), self.kept(), strict=True):
                weight.data = kept
            return self.loss().item()


@pytest.mark.sample("adamw")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_and_stochastic_rounding_learn_what_float32_does(kind: str) -> None:
    start = Fitting(kind, torch.float32).exact_loss()
    learnt = start - Fitting(kind, torch.float32).train(150).exact_loss()
    assert learnt > 0.01 * start
    plain = start - Fitting(kind, torch.bfloat16).train(150).exact_loss()
    masters = start - Fitting(kind, torch.bfloat16, masters=True).train(150).exact_loss()
    chance = start - Fitting(kind, torch.bfloat16, masters=False).train(150).exact_loss()
    assert masters == pytest.approx(learnt, rel=0.005)
    assert chance == pytest.approx(learnt, rel=0.05)
    assert plain < 0.5 * learnt, "nothing was to be lost"


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", [{"masters": True}, {"masters": False}], ids=str)
def test_a_saved_state_goes_on_bit_for_bit(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    unbroken = Fitting(kind, torch.bfloat16, **how).train(3)
    torch.save([unbroken.model.state_dict(), unbroken.optimizer.state_dict()], tmp_path / "saved.pt")
    weights, states = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = Fitting(kind, torch.bfloat16, **how)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(states)
    for ours, theirs in zip(resumed.train(3).kept(), unbroken.train(3).kept(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_in_parts_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Fitting("adamw", torch.bfloat16, masters=True).train(3).kept()
    monkeypatch.setattr(float32_step, "STEPPED", 100)
    parts = Fitting("adamw", torch.bfloat16, masters=True).train(3).kept()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, whole, strict=True))


def test_a_stochastic_rounding_is_right_in_the_mean_and_takes_a_neighbour() -> None:
    exact = torch.tensor([1.0, -1.0, 1.001, -1.001, 3e-39, torch.inf, -torch.inf, torch.nan, 1e-45, -4e-41, 3.4e38])
    drawn = torch.stack([round_by_chance(exact, seed, "a") for seed in range(2000)])
    assert drawn.dtype == torch.bfloat16
    assert drawn[:, 0].eq(1).all() and drawn[:, 1].eq(-1).all(), "what needs no rounding stays"
    assert set(drawn[:, 2].tolist()) == {1.0, 1.0078125}
    assert drawn[:, 2:4].double().mean(0).tolist() == pytest.approx([1.001, -1.001], abs=3e-4)
    assert drawn[:, 5].eq(torch.inf).all() and drawn[:, 6].eq(-torch.inf).all() and drawn[:, 7].isnan().all()
    assert not drawn[:, 8:].isnan().any(), "numbers near zero, as of moments that decay, and near the largest"
    assert drawn[:, 9].double().mean().item() == pytest.approx(-4e-41, rel=0.1)


def test_final_keeps_what_masters_learned(tmp_path: Path) -> None:
    given: dict[str, Any] = {"optim": {"learning_rate": 1e-5}}
    tied = "model.config.tie_word_embeddings=true"
    made = here(tmp_path, tied, "trainer.max_steps=1", "optim.learning_rate=0", name="made")
    start = [f"model.path={made.folder / 'final'}", "model.init=pretrained", "model.config={}"]
    exact = here(tmp_path, *start, "model.dtype=float32", name="exact", **given)
    first = {name: weight.float() for name, weight in made.weights().items()}
    learnt = {name: weight - first[name] for name, weight in exact.weights().items()}
    whole = sum(change.norm() ** 2 for change in learnt.values())
    off, kept = {}, {}
    for how, dtype in (("auto", torch.bfloat16), ("never", torch.float32), ("stochastic", torch.bfloat16)):
        run = here(tmp_path, *start, f"optim.bf16_rounding={how}", name=how, **given)
        loaded = AutoModelForCausalLM.from_pretrained(run.folder / "final")
        assert loaded.dtype == dtype and loaded.lm_head.weight is loaded.get_input_embeddings().weight
        moved = {name: weight.float() - first[name] for name, weight in run.weights().items()}
        off[how] = (sum((moved[name] - learnt[name]).norm() ** 2 for name in learnt) / whole) ** 0.5
        kept[how] = sum((moved[name] * learnt[name]).sum() for name in learnt) / whole
    assert off["never"] < 0.05 and off["auto"] > 0.5
    assert all(abs(kept[how] - 1) < 0.1 for how in kept), "dither and chance keep the mean"


def test_the_masters_of_the_best_evaluation_are_those_of_final(tmp_path: Path) -> None:
    stops = ("trainer.eval_every=1", "trainer.early_stop_patience=1", "trainer.max_steps=12")
    kept = (PLAIN, "optim.learning_rate=0.05")
    run = here(tmp_path, *stops, *kept, name="best", data={"eval": 0.2})
    best = run.summary["best_step"]
    assert best < run.summary["steps"], "nothing was to be taken back"
    masters = [state[MASTER] for state in run.states(best)["state"].values()]
    for weight in run.weights().values():
        assert any(weight.shape == master.shape and torch.equal(weight, master) for master in masters)


@pytest.mark.parametrize(
    "overrides",
    [
        *([where, how] for where in ("model.dtype=float32", "peft=lora") for how in (EXACT, CHANCE)),
        ["strategy=zero2", CHANCE],
        *([f"optim.bf16_rounding={how}"] for how in ("up", "nearest")),
    ],
)
def test_what_would_do_nothing_is_refused(overrides: list[str]) -> None:
    given = ["model.path=m", "data.train=d", "batch.examples_per_step=1", "model.dtype=bfloat16", *overrides]
    with pytest.raises(UserError, match=r"optim\.bf16_rounding"):
        load_config(None, given)


@pytest.mark.parametrize("schedule", get_args(get_type_hints(Optim)["schedule"]))
def test_no_warm_up_leaves_a_run_without_a_rate_or_ends_in_an_error(schedule):
    options = {"warmup_stable_decay": {"num_decay_steps": 1}, "cosine_with_min_lr": {"min_lr_rate": 0.1}}
    for steps, asked in product((1, 2, 3), range(5)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        warmup = warmup_of(Optim(schedule=schedule, warmup_steps=asked), steps)
        assert warmup == asked or steps == 1 or schedule == "polynomial"
        made = get_scheduler(schedule, optimizer, warmup, steps, options.get(schedule))
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"]), optimizer.step(), made.step()
        assert any(rates), (steps, asked)


def test_a_run_of_one_step_with_a_warm_up_trains(tmp_path):
    groups: Any = {"optim": {"schedule": "cosine", "warmup_steps": 0.1}, "trainer": {"max_steps": 1}}
    run = run_here(tmp_path, base_config(tmp_path, **groups))
    assert [line["lr"] for line in run.steps] == [1e-3]


BF16, MERGED = "model.dtype=bfloat16", {"kind": "lora", "merge": True}
HEAD = {"kind": "lora", "modules_to_save": ["lm_head"]}


def small_updates(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A run that moves weights by less than bfloat16 shows."""
    config = base_config(folder, trainer={"max_steps": 3, **groups.pop("trainer", {})}, **groups)
    config["optim"]["learning_rate"] = 2e-5
    config["model"]["config"] = {**LLAMA, "tie_word_embeddings": False}
    return config


def trained(folder: Path, *overrides: str, name: str, **groups: dict[str, Any]) -> Run:
    return run_here(folder, small_updates(folder, **groups), *overrides, name=name)


def coarse(weight: torch.Tensor) -> bool:
    return torch.equal(weight.float(), weight.bfloat16().float())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model that has a name."""
    folder = tmp_path_factory.mktemp("base")
    return trained(folder, BF16, "optim.learning_rate=0", "trainer.max_steps=1", name="made").folder / "final"


def on(base: Path) -> list[str]:
    return [f"model.path={base}", "model.init=pretrained", "model.config={}", BF16]


def test_layers_trained_beside_adapters_keep_their_masters(base: Path, tmp_path: Path) -> None:
    named = on(base)
    exact = ("optim.bf16_rounding=never", "trainer.checkpoint_every=3")
    run = trained(tmp_path, *named, *exact, name="run", peft=HEAD | MERGED)
    (master,) = [state[MASTER] for state in run.states(3)["state"].values() if MASTER in state]
    assert not coarse(master)
    master = undithered(master, 0, "base_model.model.lm_head.modules_to_save.default.weight")
    adapters = load_file(run.folder / "final" / "adapter_model.safetensors")
    (head,) = [one for name, one in adapters.items() if "lm_head" in name]
    assert torch.equal(head, master)
    whole: Any = AutoModelForCausalLM.from_pretrained(run.folder / "final-merged")
    assert whole.dtype == torch.float32 and torch.equal(whole.lm_head.weight, master)
    assert not coarse(whole.model.layers[0].self_attn.q_proj.weight), "merged in bfloat16"
    rounded = trained(tmp_path, *named, "optim.bf16_rounding=final", name="rounded", peft=HEAD)
    adapters = load_file(rounded.folder / "final" / "adapter_model.safetensors")
    assert {str(one.dtype) for name, one in adapters.items() if "lm_head" in name} == {"torch.bfloat16"}
    assert {str(one.dtype) for name, one in adapters.items() if "lora" in name} == {"torch.float32"}


@pytest.mark.sample(without=("whole",))
@pytest.mark.parametrize("peft", [{}, MERGED], ids=["whole", "merged"])
def test_in_bfloat16_final_has_the_float32_weights_rounded(tmp_path: Path, peft: dict[str, Any]) -> None:
    given: Any = {"peft": peft} if peft else {}
    exact, coarser = (
        trained(tmp_path, "trainer.mixed_precision=bf16", f"optim.bf16_rounding={save}", name=save, **given).weights()
        for save in ("auto", "final")
    )
    assert not all(map(coarse, exact.values()))
    if not peft:
        assert all(torch.equal(weight.bfloat16(), coarser[name]) for name, weight in exact.items())
    for name, weight in exact.items():  # a merged weight is one of two neighbours
        assert ((coarser[name].float() - weight).abs() <= 2**-7 * weight.abs()).all(), name


def test_what_is_small_in_adapters_is_not_lost_in_merging(base: Path, tmp_path: Path) -> None:
    exact, rounded = (
        trained(tmp_path, *on(base), f"optim.bf16_rounding={how}", name=how, peft=MERGED).weights("final-merged")
        for how in ("never", "auto")
    )
    before = {name: weight.float() for name, weight in Run(base.parent).weights().items()}
    learnt = {name: weight - before[name] for name, weight in exact.items()}
    whole = sum(change.square().sum() for change in learnt.values())
    nearest = {name: weight.bfloat16() for name, weight in exact.items()}

    def share(kept: dict[str, torch.Tensor]) -> float:
        along = ((kept[name].float() - before[name]) * change for name, change in learnt.items())
        return float(sum(one.sum() for one in along) / whole)

    assert share(rounded) == pytest.approx(1, abs=0.1) and share(nearest) < 0.85
