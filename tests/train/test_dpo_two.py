"""Every loss on two processes, in steps of several micro-batches and a last one that is not full, is that of one process;
one loss on three, of which the last step leaves one without a pair."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tiny_dpo import LAYOUTS, ours, policy, steps_of

from packtrain.config.objective import SORTING_LOSSES, LossType
from packtrain.packing.collate import PairRows
from packtrain.train.loop import run_steps
from packtrain.train.objectives.dpo import FIGURES
from tests.train import forked

A_STEP, ROW = 5, 70  # steps of 5 pairs and of 2; of the first each process has two rows, one of them of two pairs
RATE = 0.01
ALONE = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}
OBJECTIVES: list[dict[str, Any]] = [
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
    {"loss_type": ["sigmoid"], "use_weighting": True, "ld_alpha": 0.5},
    *({"loss_type": [name], **ALONE.get(name, {})} for name in get_args(LossType) if name not in SORTING_LOSSES),
]
Trained = tuple[list[dict[str, float]], torch.Tensor]
"""What was logged of each step, and the change of all weights, in units of the learning rate: a sum of gradients."""


def trained(
    folder: Path, layout: PairRows, objective: dict[str, Any], *, tokens: int | None, rank: int = 0, world_size: int = 1
) -> Trained:
    """A run of two steps by gradients alone."""
    plain = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer = ours(
        folder,
        layout,
        steps=steps_of(layout, tokens, a_step=A_STEP, rank=rank, world_size=world_size),
        **{**plain, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", **objective},
    )
    run_steps(trainer, None)
    moved = [
        (after - before).flatten()
        for after, before in zip(trainer.model.parameters(), policy().parameters(), strict=True)
    ]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return lines, torch.cat(moved).detach() / RATE


def _of_many(rank: int, world_size: int, port: int, folder: Path, objectives: list[dict[str, Any]]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    gc.freeze()  # as conftest.py does
    found = [
        {
            layout: trained(folder, layout, one, tokens=ROW, rank=rank, world_size=world_size)
            for layout in (LAYOUTS if number < 2 else LAYOUTS[number % 3 :][:1])  # test_dpo.py has each loss in each
        }
        for number, one in enumerate(objectives)
    ]
    torch.save(found, folder / f"rank-{rank}.pt")


def by_objective(folder: Path, objectives: list[dict[str, Any]], processes: int) -> list[list[dict[PairRows, Trained]]]:
    """By objective what each of the processes had in the end, which share one start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [forked.begun(_of_many, rank, processes, port, folder, objectives) for rank in range(processes)]
    for one in ranks:
        one.join(300)
        one.kill()
    assert [one.exitcode for one in ranks] == [0] * processes
    return list(zip(*(torch.load(folder / f"rank-{rank}.pt") for rank in range(processes)), strict=True))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[PairRows, Trained]]]:
    assert steps_of("flat", ROW, a_step=A_STEP, world_size=2).schedule.summary(2).micro_batches_max == 2
    return by_objective(tmp_path_factory.mktemp("two"), OBJECTIVES, 2)


@pytest.mark.parametrize("number", range(len(OBJECTIVES)), ids=["-".join(one["loss_type"]) for one in OBJECTIVES])
def test_every_loss_on_two_processes_is_that_of_one(number: int, of_two: Any, tmp_path: Path) -> None:
    assert_as_one(of_two[number], OBJECTIVES[number], tmp_path)


def test_every_mode_on_three_processes_is_that_of_one_also_where_one_has_no_pair(tmp_path: Path) -> None:
    last = steps_of("flat", ROW, a_step=A_STEP, world_size=3).schedule
    assert sorted(sum(map(len, last.micro_batches(1, rank, 3))) for rank in range(3)) == [0, 1, 1]
    (found,) = by_objective(tmp_path, OBJECTIVES[:1], 3)
    assert_as_one(found, OBJECTIVES[0], tmp_path)


def assert_as_one(of_many: Any, objective: dict[str, Any], folder: Path) -> None:
    lines, moved = trained(folder, "padding", objective, tokens=None)
    assert [line["examples"] for line in lines] == [5, 2]
    for rank, by_layout in enumerate(of_many):
        for layout, (logged, change) in by_layout.items():
            assert ((change - moved).norm() / moved.norm()).item() < 1e-4, (rank, layout)
            for found, expected in zip(logged, lines, strict=True):
                for name in ("loss", "examples", *FIGURES):
                    assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (rank, layout, name)
