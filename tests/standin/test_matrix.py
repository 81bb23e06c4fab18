"""Every cell of the matrix  trains on GPUs as the CPU does: the same losses and gradients, by the kernel that is meant."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from answer_runs import of_objective
from running import Run, train

OBJECTIVES = ("sft", "dpo", "kto", "reward")
ATTENTION = ("flash", "segmented", "padding")
PRECISION = ("float32 weights", "bfloat16 weights")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
DEVICES = (1, 2)
LOSS_OF_STEP = (1e-3, 5e-3, 2e-2)
"""How far the loss of each step may be from the CPU's, as a part of it: both compute in bfloat16 and add up in another order, and Adam moves
weights apart whose gradients are near 0."""
FIRST_NORM = 2e-2
"""The same of the norm of the first gradient, which is of equal weights."""


class Reference(NamedTuple):
    """What the CPU's run that a cell is compared with depends on."""

    objective: str
    precision: str
    packing: str


@dataclass(frozen=True)
class Cell:
    objective: str
    attention: str
    precision: str
    strategy: str
    devices: int

    def __str__(self) -> str:
        return "-".join(str(value).replace(" weights", "") for value in astuple(self))

    @property
    def packing(self) -> str:
        return "padding" if self.attention == "padding" else "packed"

    @property
    def reference(self) -> Reference:
        return Reference(self.objective, self.precision, self.packing)

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """The keys of the config that make the cell; flash is what `auto` is to choose, so it is not asked for."""
        groups = groups_of(self.reference)
        backend = "segmented" if self.attention == "segmented" else "auto"
        return {**groups, "strategy": {"name": self.strategy}, "model": {**groups["model"], "attention": backend}}


def groups_of(reference: Reference) -> dict[str, dict[str, Any]]:
    """Weights in float32 are computed with in bfloat16 everywhere, so that a CPU rounds as a GPU does."""
    dtype = reference.precision.removesuffix(" weights")
    packing = {"mode": reference.packing}
    return {"model": {"dtype": dtype}, "trainer": {"mixed_precision": "bf16"}, "packing": packing}


CELLS = [Cell(*values) for values in product(OBJECTIVES, ATTENTION, PRECISION, STRATEGIES, DEVICES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def config_of(folder: Path, objective: str, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Steps of 7 examples in several micro-batches; the learning rate is so high that losses tell of every update."""
    slots = 128 if objective in ("sft", "kto") else 192  # a pair needs twice as many
    of_all: dict[str, Any] = {"batch": {"tokens_per_device": slots}, "optim": {"learning_rate": 5e-3}}
    of_all |= {**groups, "trainer": {"max_steps": len(LOSS_OF_STEP), **groups["trainer"]}}
    return of_objective(folder, objective, 22, **of_all)


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> Any:
    @cache
    def run(reference: Reference) -> Run:
        config, name = config_of(folder, reference.objective, groups_of(reference)), "-".join(reference)
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


@pytest.mark.sample("sft", "dpo")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_wrong_update_would_show(on_cpu: Any, objective: str) -> None:
    """Losses of consecutive steps are further apart than what is allowed for rounding."""
    losses = on_cpu(Reference(objective, PRECISION[0], "packed")).losses
    for (before, after), by in zip(pairwise(losses), LOSS_OF_STEP[1:], strict=True):
        assert abs(after / before - 1) > 1.2 * by, losses
