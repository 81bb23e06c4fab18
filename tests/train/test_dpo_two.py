"""Every loss on two processes, in steps of several micro-batches and a last one that is not full, is that of one process;
one loss on three, of which the last step leaves one without a pair."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_dpo import LAYOUTS, ours, policy, steps_of

from packtrain.packing.collate import PairRows
from packtrain.train.loop import run_steps
from packtrain.train.objectives.dpo import FIGURES
from tests.train import forked

A_STEP, ROW = 5, 70  # steps of 5 pairs and of 2; of the first each process has two rows, one of them of two pairs
RATE = 0.01
OBJECTIVES: list[dict[str, Any]] = [
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
    {"loss_type": ["sigmoid"], "use_weighting": True, "ld_alpha": 0.5},
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


def _of_many(rank: int, world_size: int, port: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    gc.freeze()  # as conftest.py does
    cases = [(layout, objective) for objective in OBJECTIVES for layout in LAYOUTS]
    made = [trained(folder, *case, tokens=ROW, rank=rank, world_size=world_size) for case in cases]
    torch.save(made, folder / f"rank-{rank}.pt")


@pytest.mark.parametrize("processes", [2, 3])
def test_losses_on_several_processes_are_those_of_one_also_where_one_has_no_pair(
    processes: int, tmp_path: Path
) -> None:
    schedule = steps_of("flat", ROW, a_step=A_STEP, world_size=processes).schedule
    rows_of_last = [sum(map(len, schedule.micro_batches(1, rank, processes))) for rank in range(processes)]
    assert (0 in rows_of_last) == (processes == 3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [forked.begun(_of_many, rank, processes, port, tmp_path) for rank in range(processes)]
    for process in ranks:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * processes
    for rank in range(processes):
        made = iter(torch.load(tmp_path / f"rank-{rank}.pt"))
        for objective in OBJECTIVES:
            lines, moved = trained(tmp_path, "padding", objective, tokens=None)
            assert [line["examples"] for line in lines] == [5, 2]
            for layout in LAYOUTS:
                logged, change = next(made)
                assert ((change - moved).norm() / moved.norm()).item() < 1e-4, (rank, layout)
                for found, expected in zip(logged, lines, strict=True):
                    for name in ("loss", "examples", *FIGURES):
                        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (rank, layout, name)
