"""What is certain to go wrong with the keys of Slurm jobs. Pure; what only the cluster knows, sbatch itself refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress

from packtrain.config.keys import Fault
from packtrain.config.schema import Topology
from packtrain.wording import shortened, whole

_FIXED = {  # options that are packtrain's own or would break the script, and what to do instead
    "array": "A sweep makes one: packtrain sbatch VERB CONFIG -m …",
    "chdir": "The job starts in the folder in which packtrain sbatch is called.",
    "container-image": "The script would run in the image, which has no srun: write it in topology.command.",
    "export": "The job gets all variables of the shell that submits; set others in topology.environment.",
    "no-requeue": "Set topology.requeue.",
    "nodes": "Set topology.nodes.",
    "ntasks": "Each machine has one task: set topology.nodes.",
    "ntasks-per-node": "Each machine has one task, which starts its processes: set topology.gpus_per_node.",
    "open-mode": "A job that comes back goes on in its log.",
    "output": "The log is in the run folder: set trainer.output_dir.",
    "requeue": "Set topology.requeue.",
    "signal": "Set topology.signal_before.",
    "time": "Set topology.time.",
}
_SHORT = {"a": "array", "c": "cpus-per-task", "D": "chdir", "G": "gpus", "J": "job-name", "N": "nodes", "n": "ntasks"}
_SHORT |= {"o": "output", "t": "time", "w": "nodelist"}


def check(topology: Topology, resume: str) -> Iterator[Fault]:
    """Everything that cannot work as a Slurm job."""
    time, before = topology.time, topology.signal_before
    if time is not None and time.upper() not in ("UNLIMITED", "INFINITE"):
        seconds = seconds_of(time)
        if seconds is None:
            fix = "Write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS."
            yield Fault(("topology.time",), f"{shortened(time)} is no time of Slurm's", fix)
        elif seconds <= before:
            what = f"a run of {seconds} s would have to stop {before} s before its end, at its start"
            yield Fault(("topology.time", "topology.signal_before"), what, "Give it more time, or lower signal_before.")
    asked = count_gpus(topology)
    if asked and topology.gpus_per_node is not None and topology.gpus_per_node > asked:
        what = f"{topology.gpus_per_node} processes on a machine, but topology.sbatch asks for {asked} GPUs"
        yield Fault(("topology.gpus_per_node", "topology.sbatch"), what, "Take one of the two away.")
    if topology.requeue and resume != "auto":
        what = f"a job that comes back would not go on from its checkpoint, but by trainer.resume={resume}"
        yield Fault(("topology.requeue", "trainer.resume"), what, "Use trainer.resume=auto.")
    for at, line in enumerate(topology.sbatch):
        where, options = (f"topology.sbatch[{at}]",), parse_options([line])
        if not options or "\n" in line or not line.startswith("-"):
            yield Fault(where, f"{line!r} is no option of sbatch", "Write it as on its command line: --exclude=n7.")
            continue
        for name in sorted(_FIXED.keys() & options):
            yield Fault(where, f"--{name} cannot be set here", _FIXED[name])
    if "\n" in (topology.command or ""):
        yield Fault(("topology.command",), "it has a line break", "Write it in one line.")


def seconds_of(time: str) -> int | None:
    """A time limit in one of Slurm's forms ([DAYS-]HOURS:MINUTES:SECONDS, …) in seconds; None where it is none, or unlimited."""
    days, dash, clock = time.rpartition("-")
    numbers = clock.split(":")
    if len(numbers) > 3 or any(whole(number) is None for number in [*numbers, days or "0"]):
        return None
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(number) * unit for number, unit in zip(numbers, units, strict=False))


def parse_options(lines: list[str]) -> dict[str, str]:
    """The options in lines of topology.sbatch by their long names, with their values; a line with an open quote has none."""
    options: dict[str, str] = {}
    name = ""
    for line in lines:
        with suppress(ValueError):
            for word in shlex.split(line, comments=True):
                if option := re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?|-(\w)(.*)", word, re.DOTALL):
                    name = option[1] or _SHORT.get(option[3], option[3])
                    options[name] = option[2] or option[4] or ""
                elif name:
                    options[name] = word
    return options


def count_gpus(topology: Topology) -> int | None:
    """How many GPUs of a machine topology.sbatch asks for (`--gres=gpu:h100:8,nvme:1` → 8); None where it names no number."""
    given = parse_options(topology.sbatch)
    gres = f"gpu:{given['gpus-per-node']}" if "gpus-per-node" in given else given.get("gres", "")
    if gres == "none":
        return 0
    numbers = [whole(part.split("(")[0].rpartition(":")[2]) for part in gres.split(",") if re.match(r"gpu\b", part)]
    return None if not numbers or None in numbers else sum(number or 0 for number in numbers)
