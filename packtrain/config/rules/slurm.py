"""What is certain to go wrong with the keys of Slurm jobs. Pure; what only the cluster knows, sbatch itself refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from packtrain.config.keys import Fault
from packtrain.config.schema import Topology

# Options that the script has already, by the key that sets them ("" where packtrain must know them).
_OPTIONS = {
    "partition": ("partition", "p"),
    "account": ("account", "A"),
    "qos": ("qos", "q"),
    "time": ("time", "t"),
    "gres": ("gres",),
    "constraint": ("constraint", "C"),
    "cpus_per_node": ("cpus-per-task", "c"),
    "memory": ("mem",),
    "job_name": ("job-name", "J"),
    "signal_before": ("signal",),
    "requeue": ("requeue",),
    "nodes": ("nodes", "N"),
    "": ("ntasks", "n", "ntasks-per-node", "output", "o", "open-mode", "chdir", "D", "array", "a", "export"),
}
_KEY_OF_OPTION = {option: key for key, options in _OPTIONS.items() for option in options}
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
# Slurm's six forms of a time limit.
_TIMES = tuple(
    re.compile(form)
    for form in (
        r"(?P<minutes>\d+)",
        r"(?P<minutes>\d+):(?P<seconds>\d+)",
        r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
        r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
    )
)


def check(topology: Topology, resume: str, given: Set[str]) -> list[Fault]:
    """Everything that cannot work as a Slurm job, for the keys `given` with a value that is not their default."""
    return [*_one_line(topology), *_time(topology), *_together(topology, resume, given), *_options(topology)]


def seconds_of(time: str) -> int | None:
    """A time limit of Slurm's in seconds; None where it is none, or unlimited."""
    found = next((found for form in _TIMES if (found := form.fullmatch(time))), None)
    return found and sum(int(number or 0) * _UNITS[unit] for unit, number in found.groupdict().items())


def gpus_of(gres: str) -> int | None:
    """How many GPUs generic resources ask for (`gpu:h100:8,nvme:1` → 8); None where they name no number of them."""
    numbers = [part.split("(")[0].rpartition(":")[2] for part in gres.split(",") if re.match(r"gpu\b", part.strip())]
    return sum(map(int, numbers)) if numbers and all(number.isdigit() for number in numbers) else None


def _one_line(topology: Topology) -> Iterator[Fault]:
    names = ("partition", "account", "qos", "time", "gres", "constraint", "memory", "job_name", "container", "venv")
    values = {name: str(getattr(topology, name) or "") for name in names}
    for name in ("container_mounts", "modules", "sbatch"):
        values |= {f"{name}[{at}]": one for at, one in enumerate(getattr(topology, name))}
    for name, value in values.items():
        if "\n" in value:
            yield Fault((f"topology.{name}",), "it has a line break", "Write it in one line.")


def _time(topology: Topology) -> Iterator[Fault]:
    if topology.time is None or topology.time.upper() in ("UNLIMITED", "INFINITE"):
        return
    seconds = seconds_of(topology.time)
    if seconds is None:
        fix = "Write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS."
        yield Fault(("topology.time",), f"{topology.time!r} is no time of Slurm's", fix)
    elif seconds <= topology.signal_before:
        what = f"a run of {seconds} s would be told to stop {topology.signal_before} s before its end, at its start"
        yield Fault(("topology.time", "topology.signal_before"), what, "Give it more time, or lower signal_before.")


def _together(topology: Topology, resume: str, given: Set[str]) -> Iterator[Fault]:
    """Keys that contradict each other, or do nothing without another."""
    asked = gpus_of(topology.gres) if topology.gres else None
    if asked is not None and topology.gpus_per_node is not None and topology.gpus_per_node > asked:
        what = f"{topology.gpus_per_node} processes on a machine, but topology.gres asks for {asked} GPUs"
        yield Fault(("topology.gpus_per_node", "topology.gres"), what, "Take one of the two keys away.")
    for name in ("container_runtime", "container_mounts"):
        if topology.container is None and f"topology.{name}" in given:
            what = "it does nothing without topology.container"
            yield Fault((f"topology.{name}",), what, "Name an image, or take the key away.")
    if topology.requeue and resume != "auto":
        what = f"a job that comes back would not go on from its checkpoint, but by trainer.resume={resume}"
        yield Fault(("topology.requeue", "trainer.resume"), what, "Use trainer.resume=auto.")


def _options(topology: Topology) -> Iterator[Fault]:
    for at, text in enumerate(topology.sbatch):
        where = f"topology.sbatch[{at}]"
        found = re.match(r"--(?:no-)?([\w-]+)|-(\w)", text)
        if found is None:
            fix = "Write it as on its command line: --exclude=n7."
            yield Fault((where,), f"{text!r} is no option of sbatch", fix)
        elif (option := found[1] or found[2]) in _KEY_OF_OPTION:
            key = _KEY_OF_OPTION[option]
            fix = f"Use topology.{key}." if key else "Take it away: packtrain sets it, and what follows relies on it."
            yield Fault((where,), f"the script has {found[0]} already", fix)
