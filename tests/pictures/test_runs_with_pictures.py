"""Runs on data with pictures: cells of the matrix of trainings, whose towers are trained and whose rows see, or do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eyes import picture
from here import loaded, train_here
from matrix import ALONE, CHECKPOINT, ROWS, STRATEGIES, VARIANTS, Cell, Runs, assert_same_training, cut, parameters
from running import Run, assert_same_bits, config_on, joined, packtrain, write_jsonl, written
from test_cells import Move
from test_trl_pictures import seeing_checkpoint

SEEN = {"first": (56, 84), "second": (112, 40)}
"""Heights and widths of the pictures."""
TRAINED = (
    "plain",
    "average",
    "bf16",
    "recomputed",
    "partly recomputed",
    "by document",
    "unshared prompts",
    "known reference",
)
"""Variants with trained towers."""
TOWERS = (
    "model.towers=trained",
    r"optim.groups=[{match: 'k_proj\.bias', lr_scale: 0}]",
)  # it gets rounding for a gradient
ASKED, ASKS_NOTHING = ("trainer.samples=[0]",), "trainer.samples=[]"
CELLS = [
    cell
    for objective in ROWS
    for variant in (*TRAINED, "lora", "dora")
    for world in VARIANTS[variant].worlds
    for layout in ("packed", "padding_free", "padding")
    if (cell := Cell(objective, world, layout, variant)).exists
]
SAMPLE = [
    Cell("sft", "fsdp2"),
    Cell("dpo", "zero3"),
    Cell("reward", ALONE),
]
MOVES = [
    Move(Cell("sft", one), other)
    for one in (ALONE, "ddp", "fsdp2")
    for other in (ALONE, "ddp", "fsdp2")
    if one != other
]


def seeing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, of which every third has a picture in its question, and every ninth two."""
    made = []
    for number, row in enumerate(rows):
        name = "messages" if "messages" in row else "prompt"
        asked, *rest = row[name]
        shown = ["first", "second"][: 2 - (number % 9 > 0)] if number % 3 == 0 else []
        text = {"type": "text", "text": asked["content"][:60]}
        parts = [*({"type": "image", "path": f"{one}.png"} for one in shown), text]
        made.append({**row, name: [{**asked, "content": parts}, *rest[:1]]})
    return made


class SeeingRuns(Runs):
    """The runs of cells, of a model that sees."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, {}
        for objective, parts in ROWS.items():
            for rows, end in zip(parts, ("", "-eval"), strict=True):
                write_jsonl(folder / f"{objective}{end}.jsonl", seeing(rows))
        for name, size in SEEN.items():
            picture(*size).save(folder / f"{name}.png")
        seeing_checkpoint(folder / "start", "gemma3")

    def run(self, cell: Cell, name: str, *overrides: str, **how: Any) -> Run:
        more = (*(TOWERS if cell.variant in TRAINED else ()), *(ASKED if cell.objective == "sft" else ()))
        return super().run(cell, name, *more, *overrides, **how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return SeeingRuns(tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize("cell", parameters(CELLS, SAMPLE))
def test_no_cell_trains_anything_else_than_one_process_on_padded_batches(runs: Runs, cell: Cell) -> None:
    run, expected = runs.of(cell), runs.reference(cell)
    assert_same_training(run, expected, cell.of.files, cell.of.near)
    assert f"towers {'trained' if cell.variant in TRAINED else 'frozen'}" in run.log


@pytest.mark.parametrize("cell", parameters([Cell("sft", one) for one in (ALONE, *STRATEGIES.all())], SAMPLE[:1]))
def test_a_run_that_was_stopped_goes_on_bit_for_bit(runs: Runs, cell: Cell) -> None:
    expected = runs.of(cell)
    run = runs.run(cell, cut(expected, f"{cell}-resumed"), ASKS_NOTHING)
    assert f"resuming from step-{CHECKPOINT:06d}" in run.log
    assert_same_bits(run, expected)


@pytest.mark.parametrize("move", parameters(MOVES, [Move(Cell("sft", "fsdp2"), ALONE)]))
def test_a_run_goes_on_on_another_number_of_processes(runs: Runs, move: Move) -> None:
    begun, cell = runs.of(move.begun), replace(move.begun, world=move.world)
    run = runs.run(cell, cut(begun, str(move)), ASKS_NOTHING)
    assert f"resuming from step-{CHECKPOINT:06d}" in run.log
    assert run.losses == pytest.approx(begun.losses, rel=1e-6)
    assert_same_training(run, begun)


@pytest.mark.parametrize("cell", parameters([Cell("sft", "fsdp2"), Cell("sft", "zero3")], SAMPLE))
def test_processes_that_share_weights_answer_questions_about_pictures(runs: Runs, cell: Cell) -> None:
    answers, expected = (run.summary["answers"] for run in (runs.of(cell), runs.reference(cell)))
    assert answers[0]["prompt"].startswith("[picture 84×56] [picture 40×112] Say backwards") and answers[0]["pictures"]
    assert [one["before"] for one in answers] == [one["before"] for one in expected]


def test_documents_with_pictures_are_not_split_over_processes(runs: Runs) -> None:
    split = ("strategy=ddp", "strategy.sequence_parallel=auto", "batch.tokens_per_device=104")
    said = joined(2, "sft", written(runs.folder, runs.config_of("sft", answers=0), "split"), *split, expect=2)
    assert (
        "[split-pictures]" in said[0].stderr and not Run(runs.folder / "run").folder.joinpath("metrics.jsonl").exists()
    )


@pytest.mark.parametrize("mode", ["packed", "padding"])
def test_a_picture_longer_than_the_documents_of_the_proof_joins_those_without_one(tmp_path: Path, mode: str) -> None:
    seeing_checkpoint(tmp_path / "model", "llava")
    picture(56, 56).save(tmp_path / "first.png")
    rows = write_jsonl(tmp_path / "rows.jsonl", seeing(ROWS["sft"][0])[1:5])
    config = config_on(tmp_path / "model", tmp_path, data={"train": str(rows)}, trainer={"max_steps": 1})
    config = loaded(tmp_path, config, "model.towers=trained", f"packing.mode={mode}", "batch.examples_per_step=3")
    run = train_here(config, tmp_path / "run")
    assert len(run.losses) == 1


def test_eval_shows_pictures_to_adapters(tmp_path: Path) -> None:
    """Positions of this family come from its pictures."""
    seeing_checkpoint(tmp_path / "model", "qwen2_vl")
    picture(56, 56).save(tmp_path / "first.png")
    rows = str(write_jsonl(tmp_path / "rows.jsonl", seeing(ROWS["sft"][0])[3:6]))
    config = config_on(tmp_path / "model", tmp_path, data={"train": rows, "eval": rows}, trainer={"max_steps": 1})
    (tmp_path / "picture_scores.py").write_text("def first(answer, *_):\n    return sum(map(ord, answer)) % 97 / 96\n")
    score = f"{tmp_path}/picture_scores.py:first"
    given = ("peft=lora", "trainer.samples=[0]", f"trainer.answers={score}", "trainer.answer_tokens=64")
    run = train_here(loaded(tmp_path, config, *given, "batch.examples_per_step=3"), tmp_path / "run")
    asked = ("--generate", "3", "--max-tokens", "64", "--score", score)
    report = json.loads(packtrain("eval", str(run.folder), *asked, "--json").stdout)
    assert report["generated"]["share"] == pytest.approx(run.evals[-1]["eval_right"])
    assert report["figures"]["eval_loss"] == pytest.approx(run.evals[-1]["eval_loss"], rel=1e-5)
    assert report["generated"]["answers"][0]["answer"].strip().startswith(run.summary["answers"][0]["after"])
