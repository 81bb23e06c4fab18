"""What is certain to go wrong with the keys of Slurm jobs. Pure; what only the cluster knows, sbatch itself refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

from packtrain.config.keys import Fault
from packtrain.config.schema import Topology
from packtrain.wording import shortened, whole

_TAKEN = (  # options that the script has from other keys, or that packtrain relies on
    *("partition", "p", "account", "A", "qos", "q", "time", "t", "gres", "constraint", "C", "cpus-per-task", "c"),
    *("mem", "job-name", "J", "signal", "requeue", "no-requeue", "nodes", "N", "ntasks", "n", "ntasks-per-node"),
    *("output", "o", "open-mode", "chdir", "D", "array", "a", "export"),
)
_MEMORY = re.compile(r"[0-9]{1,12}[KMGT]?", re.ASCII | re.IGNORECASE)


def check(topology: Topology, resume: str) -> list[Fault]:
    """Everything that cannot work as a Slurm job."""
    faults = [*_one_line(topology), *_time(topology), *_memory(topology), *_together(topology, resume)]
    return [*faults, *_options(topology)]


def seconds_of(time: str) -> int | None:
    """A time limit in one of Slurm's forms ([DAYS-]HOURS:MINUTES:SECONDS, …) in seconds; None where it is none, or unlimited."""
    days, dash, clock = time.rpartition("-")
    numbers = clock.split(":")
    if len(numbers) > 3 or any(whole(number) is None for number in [*numbers, days or "0"]):
        return None
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(number) * unit for number, unit in zip(numbers, units, strict=False))


def gpus_of(gres: str) -> int | None:
    """How many GPUs generic resources ask for (`gpu:h100:8,nvme:1` → 8); None where they name no number of them."""
    numbers = [part.split("(")[0].rpartition(":")[2] for part in gres.split(",") if re.match(r"gpu\b", part.strip())]
    found = [whole(number) for number in numbers]
    return None if not found or None in found else sum(one or 0 for one in found)


def _one_line(topology: Topology) -> Iterator[Fault]:
    for name, value in asdict(topology).items():
        texts = value if isinstance(value, list) else [str(value)]
        if name not in ("setup", "environment", "time", "main_address") and any("\n" in text for text in texts):
            yield Fault((f"topology.{name}",), "it has a line break", "Write it in one line.")


def _time(topology: Topology) -> Iterator[Fault]:
    if topology.time is None or topology.time.upper() in ("UNLIMITED", "INFINITE"):
        return
    seconds = seconds_of(topology.time)
    if seconds is None:
        fix = "Write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS."
        yield Fault(("topology.time",), f"{shortened(topology.time)} is no time of Slurm's", fix)
    elif seconds <= topology.signal_before:
        what = f"a run of {seconds} s would be told to stop {topology.signal_before} s before its end, at its start"
        yield Fault(("topology.time", "topology.signal_before"), what, "Give it more time, or lower signal_before.")


def _memory(topology: Topology) -> Iterator[Fault]:
    if topology.memory is not None and not _MEMORY.fullmatch(str(topology.memory)):
        what = f"{shortened(topology.memory)} is no memory of Slurm's"
        yield Fault(("topology.memory",), what, "Write 500G, 64000M, or 0 for all of a machine.")


def _together(topology: Topology, resume: str) -> Iterator[Fault]:
    """Keys that contradict each other, or do nothing without another."""
    asked = gpus_of(topology.gres) if topology.gres else None
    if asked is not None and topology.gpus_per_node is not None and topology.gpus_per_node > asked:
        what = f"{topology.gpus_per_node} processes on a machine, but topology.gres asks for {asked} GPUs"
        yield Fault(("topology.gpus_per_node", "topology.gres"), what, "Take one of the two keys away.")
    if topology.container_mounts and topology.container is None:
        what = "it does nothing without topology.container"
        yield Fault(("topology.container_mounts",), what, "Name an image, or take the key away.")
    if topology.requeue and resume != "auto":
        what = f"a job that comes back would not go on from its checkpoint, but by trainer.resume={resume}"
        yield Fault(("topology.requeue", "trainer.resume"), what, "Use trainer.resume=auto.")


def _options(topology: Topology) -> Iterator[Fault]:
    for at, text in enumerate(topology.sbatch):
        where = f"topology.sbatch[{at}]"
        found = re.match(r"--([\w-]+)|-(\w)", text)
        if found is None:
            fix = "Write it as on its command line: --exclude=n7."
            yield Fault((where,), f"{text!r} is no option of sbatch", fix)
        elif (found[1] or found[2]) in _TAKEN:
            yield Fault((where,), f"the script has {found[0]} already", "Use topology's own key, or take it away.")
