"""Every cell of the matrix (cells.py) trains on GPUs as the CPU does: the same losses and gradients, by the kernel that is meant."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from answer_runs import labelled, preferences
from running import Run, base_config, conversations, train, write_jsonl

from tests.standin import cells
from tests.standin.cells import CELLS, Cell, Reference

LOSS_OF_STEP = (1e-3, 5e-3, 2e-2)
"""How far the loss of each step may be from the CPU's, as a part of it: both compute in bfloat16 and add up in another order, and Adam moves
weights apart whose gradients are near 0."""
FIRST_NORM = 2e-2
"""The same of the norm of the first gradient, which is of equal weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def config_of(folder: Path, objective: str, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Steps of 7 examples in several micro-batches; the learning rate is so high that losses tell of every update."""
    slots = 128 if objective in ("sft", "kto") else 192  # a pair needs twice as many
    rows = {"sft": conversations(22), "kto": labelled(22, 0)}.get(objective) or preferences(22, 0)
    data = {"train": str(write_jsonl(folder / f"{objective}.jsonl", rows)), "max_length": 92}
    of_all: dict[str, Any] = {"data": data, "batch": {"tokens_per_device": slots}, "optim": {"learning_rate": 5e-3}}
    of_all |= {**groups, "trainer": {"max_steps": len(LOSS_OF_STEP), **groups["trainer"]}}
    return base_config(folder, **of_all)


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> Any:
    @cache
    def run(reference: Reference) -> Run:
        config, name = config_of(folder, reference.objective, cells.groups_of(reference)), "-".join(reference)
        return train(folder, config, command=reference.objective, name=name.replace(" ", "-"))

    return run


@pytest.mark.sample("dpo-flash-bfloat16-zero3-2")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_trains_as_the_cpu(gpus, folder: Path, on_cpu: Any, cell: Cell) -> None:
    expected, config = on_cpu(cell.reference), config_of(folder, cell.objective, cell.groups)
    how: dict[str, Any] = {"verb": cell.objective, "devices": cell.devices, "ranks": cell.devices}
    run = gpus.train(folder, config, name=str(cell), **how)
    for loss, of_cpu, by in zip(run.losses, expected.losses, LOSS_OF_STEP, strict=True):
        assert loss == pytest.approx(of_cpu, rel=by), (run.losses, expected.losses)
    assert run.steps[0]["grad_norm"] == pytest.approx(expected.steps[0]["grad_norm"], rel=FIRST_NORM)
    assert {rank: set(own) for rank, own in gpus.touched().items()} == {rank: {rank} for rank in range(cell.devices)}
    backend = run.summary["attention"]
    assert (cell.packing == "padding" and backend is None) or backend.startswith(cell.attention), backend
    for rank in range(cell.devices):
        forward, backward = gpus.flash_calls(rank)
        assert bool(forward) == bool(backward) == (cell.attention == "flash")
        assert cell.attention != "flash" or max(backward) > 1


@pytest.mark.sample(
    without=(
        "kto",
        "reward",
    )
)
@pytest.mark.parametrize("objective", cells.OBJECTIVES)
def test_a_wrong_update_would_show(on_cpu: Any, objective: str) -> None:
    """Losses of consecutive steps are further apart than what is allowed for rounding."""
    losses = on_cpu(Reference(objective, cells.PRECISION[0], "packed")).losses
    for (before, after), by in zip(pairwise(losses), LOSS_OF_STEP[1:], strict=True):
        assert abs(after / before - 1) > 1.2 * by, losses
