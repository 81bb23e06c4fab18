"""What heartbeats, clocks and the watchdog cost a training step, with 4 processes over gloo and a watchdog that hears them.

    python benchmarks/heartbeat.py [--processes 4] [--micro-batches 4] [--step-seconds 0.1]

Each process goes through the phases of a step as StepTrainer does, without the work in between, and counts its CPU time (not
the clock's: others may keep the machine busy); then it does nothing for a while but send beats. The all-reduce of the counts
is timed with and without the ranks' times in it, in turn. `--step-seconds` is the step that the share is of; 0.1 s is a very
short one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from packtrain.monitor.channel import ADDRESS, SECRET, Server
from packtrain.monitor.heartbeat import TimeLimits, own_heartbeat, waiting
from packtrain.monitor.watchdog import POLL_S, Watchdog
from packtrain.train.log.metrics import EXCHANGE_EVERY, StepClock

STEPS = 5000
REDUCTIONS = 1500
BEATING_S = 20


def rank_main(rank: int, processes: int, micro_batches: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    """One rank: (CPU microseconds a step, extra microseconds of the reduction, CPU microseconds of beats a second)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = StepClock(torch.device("cpu"), rank, processes)
    started = time.process_time()
    for step in range(STEPS):
        clock.enter("data", step=step)
        clock.enter("counts")
        with waiting("the counts of all ranks"):
            torch.tensor([1, 2, 3, 4, 0, 0, *(clock.reduction_values() if step % EXCHANGE_EVERY == 0 else [])])
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
    extra = extra_of_reduction(clock)
    dist.barrier()
    beats = cores_in(BEATING_S)
    own_heartbeat().close()
    results.put((1e6 * spent / STEPS, extra, 1e6 * (beats - cores_in(BEATING_S))))
    dist.destroy_process_group()


def cores_in(seconds: float) -> float:
    """What this process uses while its main thread sleeps."""
    started, begun = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - started) / (time.monotonic() - begun)


def extra_of_reduction(clock: StepClock) -> float:
    """Microseconds a step by which the longer all-reduce, every tenth, is slower; medians of turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * REDUCTIONS):
        longer = bool(number % 2)
        counts = torch.tensor([1, 2, 3, 4, 0, 0, *(clock.reduction_values() if longer else [])])
        started = time.perf_counter()
        dist.all_reduce(counts)
        seconds[longer].append(time.perf_counter() - started)
    return 1e6 * (statistics.median(seconds[True]) - statistics.median(seconds[False])) / EXCHANGE_EVERY


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--port", type=int, default=29610)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    server = Server(secret="secret", host="127.0.0.1")
    os.environ.update({ADDRESS: f"127.0.0.1:{server.port}", SECRET: server.secret})
    results = context.SimpleQueue()
    about = (arguments.processes, arguments.micro_batches, arguments.port, results)
    ranks = [context.Process(target=rank_main, args=(rank, *about)) for rank in range(arguments.processes)]
    with TemporaryDirectory() as logs:
        watchdog = Watchdog([("n0", range(len(ranks)))], TimeLimits(), Path(logs))
        watchdog.attach(server)
        for one in ranks:
            one.start()
        begun, started = time.monotonic(), time.process_time()
        while any(one.is_alive() for one in ranks):
            assert watchdog.look() is None
            time.sleep(POLL_S)
        server_us = 1e6 * (time.process_time() - started) / (time.monotonic() - begun)
        found = [results.get() for _ in ranks]
        server.close()
    rank_us, reduction_us, beats_us = (max(column) for column in zip(*found, strict=True))
    of_a_step = rank_us + max(reduction_us, 0) + beats_us * arguments.step_seconds
    print(f"phases, waits, clocks and slots: {rank_us:.1f} us of CPU time a step (the slowest of {len(ranks)} ranks)")
    print(f"the longer reduction:            {reduction_us:+.1f} us a step")
    print(f"beats of a rank:                 {beats_us:.0f} us of CPU time a second")
    print(f"the watchdog and its channel:    {server_us:.0f} us of CPU time a second, in the launcher")
    print(
        f"together, of a rank:             {of_a_step / 1e6 / arguments.step_seconds:.3%} of a step of {arguments.step_seconds:g} s"
    )
    print(f"1,024 ranks: the counts of every tenth step grow by {1024 * 4 * 8 / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
