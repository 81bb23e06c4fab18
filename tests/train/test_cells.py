"""Neither strategy, processes, layout nor any variant changes a training, nor does a stop in its midst: the cells of matrix.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import ALONE, CELLS, CHECKPOINT, ROWS, WORLDS, Cell, Runs, assert_same_training, cut, parameters, sample
from running import assert_same_bits, base_config, train
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from packtrain.objectives.spec import OBJECTIVES
from packtrain.strategies.deepspeed import run as deepspeed
from packtrain.strategies.spec import STRATEGIES
from packtrain.train import engine
from tests.train import forked

LN2 = 0.6931472
SAMPLE = sample(one for one in CELLS if one.variant != "adapted experts")  # test_adapted_experts.py has them
RESUMED = [cell for cell in CELLS if cell.layout == "packed" and cell.world != "zero3_offload"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("cells"))


@pytest.mark.parametrize("cell", parameters(CELLS, SAMPLE))
def test_no_cell_trains_anything_else_than_one_process_on_padded_batches(runs: Runs, cell: Cell) -> None:
    run, expected, variant = runs.of(cell), runs.reference(cell), cell.of
    assert_same_training(run, expected, variant.files, variant.near)
    assert variant.said in run.log and (not variant.said or variant.said not in expected.log)
    kind: Any = AutoModelForSequenceClassification if cell.objective == "reward" else AutoModelForCausalLM
    _, mismatches = kind.from_pretrained(run.folder / variant.loads, output_loading_info=True)
    assert not any(mismatches.values())
    assert (run.folder / "final/model.safetensors").exists() != (variant.loads == "final-merged")
    assert len(run.summary.get("answers", [])) == cell.answers
    if cell.world == ALONE and cell.variant == "plain":  # what a layout wastes is logged
        wasted = [step["padding_fraction"] for step in run.steps]
        assert max(wasted) > 0.01 if cell.layout == "padding" else max(wasted) == 0
    if cell.variant in ("plain", "by document", "unshared prompts"):
        shared = cell.objective in ("dpo", "reward") and cell.layout != "padding" and cell.variant == "plain"
        assert ("computed once for both answers" in run.log) == shared


@pytest.mark.parametrize("objective", OBJECTIVES.all())
def test_the_training_that_all_are_compared_with_shows_what_could_differ(runs: Runs, objective: str) -> None:
    """Clipped gradients, a step that leaves a process without an example, evaluations; and it learns."""
    run = runs.reference(Cell(objective, ALONE))
    assert [line["examples"] for line in run.steps] == [7, 7, 7, 2 if objective == "kto" else 1, 7]
    assert min(line["grad_norm"] for line in run.steps) > 0.5 and [line["step"] for line in run.evals] == [0, 4, 5]
    first, before, after = run.losses[0], run.evals[0]["eval_loss"], run.evals[-1]["eval_loss"]
    assert after < before or objective != "sft"
    if objective == "dpo":
        assert (first, before) == pytest.approx((LN2, LN2), abs=1e-6) and run.steps[-1]["rewards/margins"] > 0.01
    if objective == "kto":
        weights = [0.5 if row["label"] else 0.75 for row in ROWS["kto"][1]]
        assert before == pytest.approx(sum(weights) / len(weights), abs=1e-6) and run.steps[0]["kl"] == 0


def without_names(*arguments: Any) -> None:
    """The command where weights can be read by the files of their strategy alone."""
    engine.Engine.load_by_name = None  # type: ignore[assignment]
    deepspeed.ENGINE.load_by_name = None  # type: ignore[assignment]
    forked.run(*arguments)


@pytest.mark.parametrize(
    "cell",
    parameters(
        RESUMED,
        sample(
            [one for one in SAMPLE if one in RESUMED], lambda one: {one.objective, one.family, one.variant == "hybrid"}
        ),
    ),
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(runs: Runs, cell: Cell) -> None:
    expected = runs.of(cell)
    begin = without_names if cell.variant in ("plain", "lora") else None  # an average goes by name, for one
    run = runs.run(cell, cut(expected, f"{cell}-resumed"), *cell.of.own, begin=begin)
    assert f"resuming from step-{CHECKPOINT:06d}" in run.log
    assert_same_bits(run, expected, file=cell.of.files[-1])


@dataclass(frozen=True)
class Move:
    """A run that stops and goes on in another world, on as many processes."""

    begun: Cell
    world: str
    processes: int = 2

    def __str__(self) -> str:
        return f"{self.begun}-to-{self.processes}-{self.world}".replace(" ", "_")

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return [*self.begun.marks, *Cell("sft", self.world).marks]


def plain(world: str) -> Cell:
    return Cell("sft", world, {ALONE: "padding", "zero2": "padding_free"}.get(world, "packed"))


NAMED = [world for world in WORLDS if world != "zero3_offload"]
SAMPLED_MOVES = [
    Move(plain("zero2"), "fsdp2"),
    Move(plain(ALONE), "zero3"),
    Move(Cell("sft", "fsdp2", variant="dora"), ALONE),
    Move(plain("zero2"), "zero2", 3),
]
MOVES = [
    *SAMPLED_MOVES,
    *(move for one, other in product(NAMED, NAMED) if (move := Move(plain(one), other)) not in SAMPLED_MOVES),
    *(Move(plain(one), one, 3) for one in NAMED if one not in (ALONE, "zero2")),
    *(Move(Cell("dpo", one, variant="lora"), other) for one, other in (("zero2", ALONE), ("ddp", "zero3"))),
    *(Move(Cell("sft", one, variant="masters"), other) for one, other in (("ddp", "zero1"), ("zero1", "fsdp2"))),
    Move(Cell("sft", "ddp", variant="grouped experts"), "zero3"),
    Move(Cell("sft", "fsdp2", variant="adapted experts"), "zero2", 3),
]


@pytest.mark.parametrize("move", parameters(MOVES, SAMPLED_MOVES))
def test_a_run_goes_on_in_another_world(runs: Runs, move: Move) -> None:
    cell = replace(move.begun, world=move.world, layout="padding" if move.begun.layout == "packed" else "packed")
    own = move.begun.world != ALONE != move.world and "any number" in table()[move.begun.world, move.world]
    begin = without_names if own else None
    name = cut(runs.of(move.begun), str(move))
    run = runs.run(cell, name, *cell.of.own, processes=move.processes, begin=begin)
    assert f"resuming from step-{CHECKPOINT:06d}" in run.log
    assert_same_training(run, runs.reference(cell), cell.of.files, cell.of.near)


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


def test_the_table_of_the_documentation_has_the_moves_that_are_tested() -> None:
    said = table()
    assert said.keys() == {pair for pair in product(STRATEGIES.all(), repeat=2) if "zero3_offload" not in pair}
    own = {cell for cell, text in said.items() if "its own files" in text}
    assert own == {(one, other) for one, other in said if one.rstrip("123") == other.rstrip("123")}


def test_the_states_of_the_optimizer_are_what_makes_it_the_same(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_states(_: Any, contents: Any, names: Any, buffers: Any) -> None:
        engine.put_weights(contents, {**names, **buffers})

    monkeypatch.setattr(engine.Engine, "load_by_name", without_states)
    cell = plain(ALONE)
    run = runs.run(cell, cut(runs.of(plain("zero2")), "without-states"))
    assert run.losses[-1] != pytest.approx(runs.reference(cell).losses[-1], rel=1e-5)


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


@pytest.mark.sample("ddp-ddp")
@pytest.mark.parametrize(("before", "after"), [("ddp", "ddp"), ("zero2", "ddp"), ("fsdp2", "zero2")])
def test_what_a_model_keeps_beside_its_weights_goes_along(tmp_path: Path, before: str, after: str) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 4, "checkpoint_every": 2}, packing={"mode": "padding"})
    config |= {"verify": {"preflight": False}, "batch": {"examples_per_step": 8, "examples_per_device": 4}}
    given: Any = [{"processes": 1 if one == "ddp" else 2, "begin": with_a_counter} for one in (before, after)]
    first = train(tmp_path, config, f"strategy={before}", name="first", **given[0])
    then = train(tmp_path, config, f"strategy={after}", first.resume(2), name="then", **given[1])
    passes = [4 if one["processes"] == 1 else 2 for one in given]  # of two steps, in each process
    assert first.weights()["model.seen"] == 2 * passes[0] and then.weights()["model.seen"] == sum(passes)
