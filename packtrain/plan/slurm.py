"""What a Slurm job says of itself in its environment variables. Pure: nothing is asked of Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packtrain.errors import UserError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # numbers from here on are Slurm's own steps: batch, interactive, extern
_PORTS = 15000, 10000  # first, and how many: below those that Linux gives to outgoing connections


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines of a Slurm job (of its step, inside one) and where this process stands in it.

    `place` is a `task` of a step, a `machine` of the job (its batch script, or a shell there), or `outside` (the shell that
    salloc leaves one in on the login machine). `tasks` are those of the step on each machine. `gpus` is what each has of
    the job, None where Slurm does not say. `port` is the same for all tasks of a step, and another for the next.
    """

    job: str
    hosts: tuple[str, ...]
    place: Literal["task", "machine", "outside"]
    node: int
    rank: int
    local_rank: int
    tasks: tuple[int, ...]
    gpus: int | None
    port: int


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """The job that this process is in, None outside one. Raises UserError where its variables cannot be read."""
    job = env.get("SLURM_JOB_ID")
    named = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not job or not named:
        return None
    step = env.get("SLURM_STEP_ID", "")
    in_step = step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    if in_step:
        named = env.get("SLURM_STEP_NODELIST", named)
    place = "task" if in_step else "machine" if "SLURM_NODEID" in env else "outside"
    return Allocation(
        job=job,
        hosts=expand(named),
        place=place,
        node=_number(env, "SLURM_NODEID") or 0,
        rank=(_number(env, "SLURM_PROCID") or 0) if in_step else 0,
        local_rank=(_number(env, "SLURM_LOCALID") or 0) if in_step else 0,
        tasks=repeated(env.get("SLURM_STEP_TASKS_PER_NODE", "1")) if in_step else (),
        gpus=_number(env, "SLURM_GPUS_ON_NODE") or (_asked_gpus(env) if place == "outside" else None),
        port=_PORTS[0] + (int(re.sub(r"\D", "", job) or 0) * 131 + (int(step) if in_step else 0) * 17) % _PORTS[1],
    )


def check_told(env: Mapping[str, str]) -> None:
    """Raises UserError where this is one of several processes or machines of a job that `allocation_of` does not find.

    A container that gets some of Slurm's variables is such a place; without this each process would train by itself.
    """
    missing = [name for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST") if not env.get(name)]
    if not missing or not (env.get("SLURM_JOB_ID") or env.get("SLURM_PROCID")):
        return
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    name, number = max(((name, _number(env, name) or 0) for name in counts), key=lambda one: one[1])
    if number > 1:
        raise UserError(
            f"this is in a Slurm job of several ({name}={number}), of whose variables some are missing here "
            f"({', '.join(missing)}): each process would start its own run",
            where="environment",
            fix="Hand on all of Slurm's variables (to a container, too), or use topology=local for this machine alone.",
        )


def expand(hosts: str) -> tuple[str, ...]:
    """The names that a list of Slurm's means: `n[1-3,07],login` → n1, n2, n3, n07, login. Raises UserError."""
    try:
        if hosts.count("[") != hosts.count("]"):
            raise ValueError(hosts)
        return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts) for name in _expand_one(part))
    except ValueError as error:
        what = f"cannot read {hosts!r} as a list of hosts"
        raise UserError(what, where="environment variable SLURM_JOB_NODELIST") from error


def repeated(counts: str) -> tuple[int, ...]:
    """Slurm's short form of a number for each machine: `4(x2),3` → 4, 4, 3. Raises UserError."""
    numbers: list[int] = []
    for part in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise UserError(
                f"cannot read {counts!r} as numbers of tasks", where="environment variable SLURM_STEP_TASKS_PER_NODE"
            )
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)


def _expand_one(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expand_one(after):
                yield f"{before}{number:0{len(first)}d}{tail}"


def _asked_gpus(env: Mapping[str, str]) -> int | None:
    """Of each machine, as it was asked for (`8`, `a100:8`): all that is known outside of the machines."""
    number = env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return int(number) if number.isdigit() else None


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    if value and not value.isdigit():
        raise UserError(f"found {value!r}, a whole number is needed", where=f"environment variable {name}")
    return int(value) if value else None
