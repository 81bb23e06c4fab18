"""What heartbeats, clocks and the watchdog cost a training step, with 4 processes over gloo and a launcher that watches them.

    python benchmarks/heartbeat.py [--processes 4] [--micro-batches 4] [--step-seconds 0.1]

Each process goes through the phases of a step as StepTrainer does, without the work in between, and counts its CPU time (not
the clock's: others may keep the machine busy); the launcher's is counted over the same time. The all-reduce of the counts is
timed with and without the ranks' times in it, in turn. `--step-seconds` is the step that the share is of; 0.1 s is a very
short one. On paper, for many ranks: see the end of the output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from packtrain.launch.own_folder import heartbeat_folder
from packtrain.monitor.old.diagnosis import RankState
from packtrain.monitor.old.heartbeat import HEARTBEAT_DIR, Beat
from packtrain.monitor.old.stacks import Collective, Frame
from packtrain.monitor.old.watchdog import Watchdog
from packtrain.train.rank_times import TOLD_EVERY, StepClock

STEPS = 5000
REDUCTIONS = 1500


def rank_main(rank: int, processes: int, micro_batches: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    """One rank: (CPU microseconds a step, extra microseconds of the reduction)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = StepClock(torch.device("cpu"), rank, processes)
    started = time.process_time()
    for step in range(STEPS):
        clock.enter("data", step=step)
        clock.enter("counts")
        torch.tensor([1, 2, 3, 4, 0, 0, *(clock.slots() if step % TOLD_EVERY == 0 else [])])
        for micro in range(micro_batches):
            clock.enter("forward", micro=micro)
            clock.enter("backward", micro=micro)
        clock.enter("optimizer")
        clock.enter("step end")
    spent = time.process_time() - started
    started = time.process_time()
    for _ in range(STEPS):
        torch.tensor([1, 2, 3, 4, 0, 0])
    spent -= time.process_time() - started
    results.put((1e6 * spent / STEPS, extra_of_reduction(clock)))
    dist.barrier()
    dist.destroy_process_group()


def extra_of_reduction(clock: StepClock) -> float:
    """Microseconds a step by which the longer all-reduce, every tenth, is slower; medians of turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * REDUCTIONS):
        longer = bool(number % 2)
        counts = torch.tensor([1, 2, 3, 4, 0, 0, *(clock.slots() if longer else [])])
        started = time.perf_counter()
        dist.all_reduce(counts)
        seconds[longer].append(time.perf_counter() - started)
    return 1e6 * (statistics.median(seconds[True]) - statistics.median(seconds[False])) / TOLD_EVERY


def report_bytes() -> int:
    """Bytes of what a launcher sends of 8 ranks that stand still, with 30 frames each."""
    frames = tuple(
        Frame("/opt/env/lib/python3.11/site-packages/torch/autograd/graph.py", 900, "_engine_run") for _ in range(30)
    )
    beat = Beat(10**6, 10**5, "backward", 10**5, 4, 1e6, 1.5)
    pending = Collective("nccl:all_reduce", 10**6, "0", "Float 4096x4096")
    states = [RankState(rank, "node-0001", beat, stack=frames, pending=pending, told=True) for rank in range(8)]
    return len(json.dumps([one.to_json() for one in states]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--port", type=int, default=29610)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with heartbeat_folder() as folder:
        os.environ[HEARTBEAT_DIR] = str(folder)
        results = context.SimpleQueue()
        ranks = [
            context.Process(
                target=rank_main,
                args=(rank, arguments.processes, arguments.micro_batches, arguments.port, results),
            )
            for rank in range(arguments.processes)
        ]
        for one in ranks:
            one.start()
        watchdog = Watchdog(folder, Path(folder), ranks=range(len(ranks)), host=platform.node(), step_timeout=600)
        looks, in_looks = 0, 0.0
        while any(one.is_alive() for one in ranks):
            started = time.process_time()
            watchdog.look({})
            in_looks += time.process_time() - started
            looks += 1
            time.sleep(0.1)
        found = [results.get() for _ in ranks]
    rank_us, reduction_us = (max(column) for column in zip(*found, strict=True))
    rounds = max(1, round(looks * 0.1))
    launcher_us = 1e6 * in_looks / rounds
    step_us = 1e6 * arguments.step_seconds
    total = rank_us + max(reduction_us, 0) + launcher_us * arguments.step_seconds / len(ranks)
    print(f"records, clocks and slots: {rank_us:.1f} us of CPU time a step (the slowest of {len(ranks)} ranks)")
    print(f"the longer reduction:      {reduction_us:+.1f} us a step")
    print(f"the launcher:              {launcher_us:.0f} us of CPU time a second")
    print(f"together:                  {total / step_us:.3%} of a step of {arguments.step_seconds:g} s")
    kib = report_bytes() / 1024
    print(
        "1,024 ranks on 128 machines: no message of ranks while steps go on (launchers beat every 2 s: 64 lines a second at"
    )
    print(
        f"machine 0); standing still, each machine tells of its 8 ranks every 5 s: {kib:.0f} KiB, {128 * kib / 1024 / 5:.1f} MiB/s at machine 0;"
    )
    print(f"the counts of every tenth step grow by {1024 * 4 * 8 / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
