"""A run that goes on in another world, with the optimizer's state: the losses and weights are those of the unbroken run."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import preferences
from here import train_here
from running import LLAMA, Run, base_config, train, write_jsonl
from safetensors.torch import load_file

from packtrain.config.compose import load_config
from packtrain.strategies.deepspeed import run as deepspeed
from packtrain.train import engine
from tests.train import forked

MODEL = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}  # weights that ZeRO-3 does not keep whole
World = tuple[str, int, tuple[str, ...]]
"""Strategy, processes, and what else is another."""
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """22 documents, 7 a step: the second step of each world is within an epoch, or its end."""
    groups["trainer"] = {"checkpoint_every": 2, "keep_checkpoints": None, **groups.get("trainer", {})}
    config = base_config(folder, **groups)
    config["model"]["config"] = MODEL
    config["optim"] |= {"schedule": "constant_with_warmup", "warmup_steps": 3, "weight_decay": 0.1}
    return config


def through(folder: Path, config: dict[str, Any], *worlds: World, name: str, command: str = "sft") -> Run:
    """A run that is interrupted after two steps in each of the worlds."""
    run = Run(folder / name)
    for number, (strategy, processes, others) in enumerate(worlds, start=1):
        (folder / name / "summary.json").unlink(missing_ok=True)  # as if it had been killed
        overrides = [f"strategy={strategy}", f"trainer.max_steps={2 * number}", *others]
        run = train(folder, config, *overrides, name=name, processes=processes, command=command)
    return run


def differences(
    run: Run, expected: Run, file: str = "final/model.safetensors", expected_file: str = ""
) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a weight of `file`; `run` may be the shorter one."""
    steps = expected.steps[: len(run.steps)]
    assert [line["examples"] for line in run.steps] == [line["examples"] for line in steps]
    losses = [
        abs(one["loss"] - other["loss"]) / abs(other["loss"]) for one, other in zip(run.steps, steps, strict=True)
    ]
    ours, theirs = load_file(run.folder / file), load_file(expected.folder / (expected_file or file))
    assert ours.keys() == theirs.keys()
    weights = [float((ours[name] - one).norm() / one.norm()) for name, one in theirs.items()]
    return max(losses), max(weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


WORLDS: list[World] = [
    ("ddp", 1, ()),
    ("fsdp2", 2, ()),
    ("zero3", 2, ("packing=padding",)),
    ("zero1", 3, ("packing=padding_free", "batch.examples_per_device=1")),
]
"""The others are among the cells of the table."""


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Run:
    return train(folder, config_of(folder), f"trainer.max_steps={2 * len(WORLDS)}", name="unbroken")


@pytest.fixture(scope="module")
def broken(folder: Path) -> Run:
    return through(folder, config_of(folder), *WORLDS, name="broken")


def test_a_run_goes_on_from_world_to_world(unbroken: Run, broken: Run) -> None:
    loss, weight = differences(broken, unbroken)
    assert loss < 1e-5 and weight < 1e-4
    assert [line["lr"] for line in broken.steps] == [line["lr"] for line in unbroken.steps]
    log = (broken.folder / "logs" / "rank-00000.log").read_text()
    assert log.count("resuming from step-0000") == len(WORLDS) - 1


def table() -> dict[tuple[str, str], str]:
    """What docs/resume.md's table says of each pair of strategies, before and after."""
    lines = (Path(__file__).parents[2] / "docs/resume.md").read_text().partition("| from ")[2].partition("\n\n")[0]
    head, _, *rows = (line.split("|") for line in lines.splitlines())
    names = re.compile(r"`(\w+)`").findall
    return {
        (one, other): text
        for row in rows
        for column, text in zip(head[1:], row[2:], strict=True)
        for one in names(row[1])
        for other in names(column)
    }


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
CELLS = [(one, other, 2) for one in STRATEGIES for other in STRATEGIES] + [(one, one, 3) for one in STRATEGIES]
"""From, to, and on how many processes; before they were 2."""
OTHERWISE = {
    "ddp": ("packing=padding", "batch.examples_per_device=2"),
    "zero1": ("packing=padding_free", "batch.examples_per_device=1"),
    "zero2": ("batch.tokens_per_device=400",),
    "zero3": ("packing=padding",),
    "fsdp2": ("batch.tokens_per_device=300",),
}


def without_names(*arguments: Any) -> None:
    """The command where weights can be read by the files of their strategy alone."""
    engine.Engine.load_by_name = None  # type: ignore[assignment]
    deepspeed.ENGINE.load_by_name = None  # type: ignore[assignment]
    forked.run(*arguments)


@pytest.fixture(scope="module")
def begun(folder: Path) -> Callable[[str], Path]:
    """A run by a strategy that has been interrupted within its first pass over the data."""

    @cache
    def begin(strategy: str) -> Path:
        given = (f"strategy={strategy}", "trainer.max_steps=3", "trainer.checkpoint_every=3")
        run = train(folder, config_of(folder), *given, name=f"from-{strategy}", processes=2)
        shutil.rmtree(run.folder / "final")
        (run.folder / "summary.json").unlink()
        return run.folder

    return begin


@pytest.mark.exhaustive
@pytest.mark.parametrize(("one", "other", "processes"), CELLS)
def test_each_cell_of_the_table(
    folder: Path,
    unbroken: Run,
    begun: Callable[[str], Path],
    one: str,
    other: str,
    processes: int,
) -> None:
    name = f"{one}-{other}-{processes}"
    shutil.copytree(begun(one), folder / name)
    given = (f"strategy={other}", *OTHERWISE[other], "trainer.max_steps=6", "trainer.checkpoint_every=3")
    own = "any number" in table()[one, other] or (one == other and processes == 2)
    begin = without_names if own else None
    run = train(folder, config_of(folder), *given, name=name, processes=processes, begin=begin)
    assert "resuming from step-000003" in (run.folder / "logs" / "rank-00000.log").read_text()
    loss, weight = differences(run, unbroken, expected_file="checkpoints/step-000006/model.safetensors")
    print(f"losses {loss:.1e}, weights {weight:.1e}")  # pytest -rP
    assert loss < 1e-5 and weight < 1e-4
    shutil.rmtree(run.folder)


def test_the_table_of_the_documentation_has_the_cells_that_are_tested() -> None:
    said = table()
    assert said.keys() == {(one, other) for one, other, _ in CELLS}
    own = {cell for cell, text in said.items() if "its own files" in text}
    assert own == {(one, other) for one, other in said if one.rstrip("123") == other.rstrip("123")}


def test_the_states_of_the_optimizer_are_what_makes_it_the_same(
    folder: Path, unbroken: Run, broken: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / "without-states"
    shutil.copytree(
        broken.folder, place, ignore=shutil.ignore_patterns("final", "summary.json", f"step-{2 * len(WORLDS):06}")
    )
    monkeypatch.setattr(engine, "put_into_torch", lambda *_: None)
    config = load_config(str(folder / "unbroken.yaml"), [f"trainer.max_steps={2 * len(WORLDS)}"])
    loss, _ = differences(train_here(config, place), unbroken)
    assert loss > 1e-5


@pytest.mark.exhaustive
def test_adapters_of_preferences_go_on_from_world_to_world(folder: Path) -> None:
    write_jsonl(folder / "pairs.jsonl", preferences(12, 0))
    config = config_of(folder, peft={"kind": "lora"}, batch={"examples_per_step": 5, "tokens_per_device": 190})
    config["data"] |= {"train": str(folder / "pairs.jsonl"), "max_length": 92}
    worlds: list[World] = [("zero2", 2, ()), ("ddp", 1, ()), ("zero3", 2, ())]
    assert_equal_to_unbroken(folder, config, worlds, "dpo", "final-adapters/adapter_model.safetensors")


@pytest.mark.exhaustive
def test_float32_masters_of_bfloat16_weights_go_along(folder: Path) -> None:
    config = config_of(folder, model={"dtype": "bfloat16"})
    never = ("optim.bf16_rounding=never",)
    worlds: list[World] = [("ddp", 1, never), ("zero1", 2, ()), ("fsdp2", 2, never)]
    # bfloat16 rounds activations and gradients as it comes
    assert_equal_to_unbroken(folder, config, worlds, "sft", within=(1e-3, 1e-3))


def assert_equal_to_unbroken(
    folder: Path,
    config: dict[str, Any],
    worlds: list[World],
    verb: str,
    file: str = "final/model.safetensors",
    within: tuple[float, float] = (1e-5, 1e-4),
) -> None:
    name = f"{verb}-of-{worlds[0][0]}"
    expected = train(folder, config, "trainer.max_steps=6", *worlds[0][2], name=name, command=verb)
    loss, weight = differences(through(folder, config, *worlds, name=f"broken-{name}", command=verb), expected, file)
    assert loss < within[0] and weight < within[1]


@pytest.mark.exhaustive
def test_experts_that_are_saved_one_by_one_go_on_under_ddp_bit_for_bit_and_elsewhere(folder: Path) -> None:
    config = config_of(folder)
    config["model"]["config"] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    expected = train(folder, config, "trainer.max_steps=6", name="experts")
    run = through(folder, config, ("ddp", 1, ()), ("ddp", 1, ()), ("zero3", 2, ()), name="broken-experts")
    loss, weight = differences(run, expected)
    assert loss < 1e-5 and weight < 1e-4
    _, weight = differences(run, expected, "checkpoints/step-000004/model.safetensors")
    assert run.losses[:4] == expected.losses[:4] and weight == 0


def with_a_counter(*given: Any) -> None:
    """The command, whose model counts its forward passes in a saved buffer that the loss depends on."""
    from transformers.models.llama.modeling_llama import LlamaModel

    init, forward = LlamaModel.__init__, LlamaModel.forward

    def made(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.register_buffer("seen", torch.zeros(()))

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        found = forward(self, *given, **named)
        self.seen += self.training and torch.is_grad_enabled()
        found.last_hidden_state = found.last_hidden_state * (1 + self.seen / 100)
        return found

    LlamaModel.__init__, LlamaModel.forward = made, counted
    forked.run(*given)


@pytest.mark.parametrize(
    "worlds",
    [
        ("ddp", "ddp"),
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (("zero2", "ddp"), ("fsdp2", "zero2"))),
    ],
)
def test_what_a_model_keeps_beside_its_weights_goes_along(tmp_path: Path, worlds: tuple[str, str]) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 4, "checkpoint_every": 2}, packing={"mode": "padding"})
    config |= {"verify": {"preflight": False}, "batch": {"examples_per_step": 8, "examples_per_device": 4}}
    given: Any = [{"processes": 1 if one == "ddp" else 2, "begin": with_a_counter} for one in worlds]
    train(tmp_path, config, f"strategy={worlds[0]}", name="first", **given[0])
    checkpoint = tmp_path / "first" / "checkpoints" / "step-000002"
    train(tmp_path, config, f"strategy={worlds[1]}", f"trainer.resume={checkpoint}", name="then", **given[1])
    passes = [4 if one["processes"] == 1 else 2 for one in given]  # of two steps, in each process
    assert Run(tmp_path / "first").weights()["model.seen"] == 2 * passes[0]
    assert Run(tmp_path / "then").weights()["model.seen"] == passes[0] + passes[1]
