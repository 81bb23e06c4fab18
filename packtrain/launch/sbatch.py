"""RunConfig → the text of a Slurm script, made from slurm/run.sbatch.j2. Pure: nothing is asked of Slurm, nothing written.

The template says what a script does and why; here is only what it is filled with. Everything that comes from the user is
quoted, for bash or for sbatch's own reading of `#SBATCH` lines, except topology.setup and topology.sbatch, which are code.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from packtrain.config.rules.slurm import gpus_of
from packtrain.config.schema import Topology
from packtrain.config.sweep import Point
from packtrain.config.yaml_files import shipped
from packtrain.errors import UserError
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import Surroundings
from packtrain.run_folder import RunFolder

TEMPLATE = "run.sbatch.j2"
_LINE = 112  # characters of the command on one line


@dataclass(frozen=True, slots=True)
class Job:
    """`packtrain verb arguments…` as a Slurm job that starts in `folder`, by the command `program` outside containers.

    `points` are the runs: one, or those of a sweep, which share `arguments`. `called` is the command that asked for the job.
    """

    verb: str
    called: tuple[str, ...]
    arguments: tuple[str, ...]
    points: tuple[Point, ...]
    folder: Path
    program: tuple[str, ...]

    @property
    def is_sweep(self) -> bool:
        """Whether it is a job array."""
        return bool(self.points[0].chosen)

    @property
    def topology(self) -> Topology:
        """That of every point."""
        return self.points[0].config.topology

    @property
    def logs(self) -> Path:
        """The folder of Slurm's logs: that of the run folder, or of the folder that all run folders of a sweep are in."""
        return RunFolder(Path(os.path.commonpath([self.run_folder(point).root for point in self.points]))).logs

    def run_folder(self, point: Point) -> RunFolder:
        """The run folder of a point, by its absolute path."""
        return RunFolder(self.folder / RunFolder.of(point.config.trainer).root)

    def log(self, job: str) -> Path:
        """Slurm's log of `job`: its number, or a pattern of Slurm's."""
        return self.logs / f"slurm-{job}.log"


def plan_job(job: Job) -> LaunchPlan:
    """What the job's runs will be on its machines: the plan of the first one, after all have been planned.

    Raises UserError where the config does not say what to ask Slurm for, or where a run would be impossible.
    """
    topology = job.topology
    if any(point.config.topology != topology for point in job.points):
        what = "the points of a sweep are one job array, which has the same machines for all of them"
        raise UserError(
            what, where="topology", fix="Sweep over keys of other groups, and submit one array for each topology."
        )
    if topology.kind in ("env", "manual"):
        what = f"topology={topology.kind} is not for Slurm jobs, whose machines Slurm names"
        raise UserError(what, where="topology.kind", fix="Use topology=auto.")
    if topology.node_rank is not None:
        what = "inside a Slurm job every machine knows its number"
        raise UserError(what, where="topology.node_rank", fix="Take the key away.")
    if topology.main_address is not None and not any(one.startswith(("--nodelist", "-w")) for one in topology.sbatch):
        what = "which machine is the first, Slurm decides when the job starts"
        raise UserError(what, where="topology.main_address", fix="Take the key away: inside a Slurm job it is known.")
    if topology.nodes is None:
        fix = "Set it, e.g. topology.nodes=1."
        raise UserError("how many machines the job wants is not known", where="topology.nodes", fix=fix)
    per_node = topology.gpus_per_node or (1 if topology.kind == "single" else gpus_of(topology.gres or ""))
    if not per_node:
        fix = "Set it, e.g. topology.gpus_per_node=8."
        raise UserError(
            "how many GPUs of a machine the job wants is not known", where="topology.gpus_per_node", fix=fix
        )
    there = Surroundings(gpus=0 if topology.gres == "" else per_node, cpus=topology.cpus_per_node or 1)
    known = replace(topology, gpus_per_node=per_node)
    for point in job.points:
        if "\n" in str(job.run_folder(point).root):
            what = f"the path {str(job.run_folder(point).root)!r} has a line break, which Slurm's options cannot have"
            raise UserError(what, where="trainer.output_dir", fix="Name another folder.")
        _check_visible(job, point)
    plans = [plan_launch(replace(point.config, topology=known), there, job.verb, job.arguments) for point in job.points]
    return plans[0]


def script(job: Job, plan: LaunchPlan) -> str:
    """The whole script; `plan` is `plan_job(job)`."""
    source = FileSystemLoader(shipped("slurm"))
    made = Environment(loader=source, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(TEMPLATE).render(**_directives(job, plan), **_body(job)) + "\n"


def summary(job: Job, plan: LaunchPlan) -> str:
    """What the job is, in one line."""
    topology = job.topology
    unit = "processes on CPUs" if topology.gres == "" else "GPUs"
    machines = f"{plan.nodes} machine{'s' if plan.nodes > 1 else ''} × {plan.gpus_per_node} {unit}"
    words = f"{machines} = {plan.num_processes} process{'es' if plan.num_processes > 1 else ''}"
    return f"{len(job.points)} runs, each on {words}" if job.is_sweep else words


def _directives(job: Job, plan: LaunchPlan) -> dict[str, Any]:
    topology = job.topology
    name = topology.job_name or job.logs.parent.name
    log = job.logs / ("slurm-%A_%a.log" if job.is_sweep else "slurm-%j.log")
    return {
        "shebang": "#!/bin/bash -l" if topology.modules else "#!/bin/bash",  # a login shell knows `module`
        "made_by": f"Made by {shlex.join(job.called)}".replace("\n", "\n# "),
        "summary": summary(job, plan),
        "job_name": directive(name),
        "nodes": topology.nodes,
        "asked": list(_asked(topology, plan)),
        "folder": directive(str(job.folder)),
        "log": directive(str(log.parent).replace("%", "%%") + f"/{log.name}"),
        "signal_before": topology.signal_before,
        "requeue": topology.requeue,
    }


def _asked(topology: Topology, plan: LaunchPlan) -> Iterator[str]:
    """The options that are there only if the config says something."""
    gpus = f"gpu:{plan.gpus_per_node}" if topology.gres is None else topology.gres
    for option, value in (
        ("gres", gpus or None),
        ("cpus-per-task", topology.cpus_per_node),
        ("mem", topology.memory),
        ("partition", topology.partition),
        ("account", topology.account),
        ("qos", topology.qos),
        ("time", topology.time),
        ("constraint", topology.constraint),
    ):
        if value is not None:
            yield f"--{option}={directive(str(value))}"
    yield from topology.sbatch


def _body(job: Job) -> dict[str, Any]:
    topology = job.topology
    inside = topology.container is not None
    points = [
        {"words": shlex.join(point.chosen), "checkpoints": shlex.quote(str(job.run_folder(point).checkpoints))}
        for point in job.points
    ]
    return {
        "points": points if job.is_sweep else [],
        "checkpoints": points[0]["checkpoints"],
        "modules": shlex.join(topology.modules),
        "activate": None if inside or topology.venv is None else shlex.quote(f"{_host(topology.venv)}/bin/activate"),
        "setup": topology.setup,
        "command": _wrapped([*_container(topology), *_command(job)]),
        # the number of the array would bring all of its tasks back
        "requeued": "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.is_sweep else "$SLURM_JOB_ID",
    }


def _command(job: Job) -> list[str]:
    topology = job.topology
    if topology.venv is None:
        program = ("packtrain",) if topology.container else job.program
    else:
        program = (f"{topology.venv}/bin/packtrain",) if topology.container else ("packtrain",)
    words = [shlex.quote(word) for word in (*program, job.verb, *job.arguments)]
    return [*words, '"${point[@]}"'] if job.is_sweep else words


def _container(topology: Topology) -> list[str]:
    """What comes before the command to have it in a container, with the folder that the job starts in."""
    if topology.container is None:
        return []
    image, mounts = (
        shlex.quote(_host(topology.container)),
        [shlex.quote(_host(one)) for one in topology.container_mounts],
    )
    if topology.container_runtime == "pyxis":
        seen = ",".join(['"$PWD:$PWD"', *(one if ":" in one else f"{one}:{one}" for one in mounts)])
        return [f"--container-image={image}", f"--container-mounts={seen}", '--container-workdir="$PWD"']
    gpus = [] if topology.gres == "" else ["--nv"]
    binds = [f"--bind={one}" for one in ('"$PWD"', *mounts)]
    return ["apptainer", "exec", *gpus, *binds, '--pwd="$PWD"', image]


def _check_visible(job: Job, point: Point) -> None:
    """Raises UserError where a container would not see the run folder, under the path where Slurm's log goes too."""
    root = job.run_folder(point).root
    if job.topology.container is None or root.is_relative_to(job.folder):
        return
    mounts = [(_host(mount).split(":") * 2)[:2] for mount in job.topology.container_mounts]  # HOST, or HOST:INSIDE
    same = [Path(host) for host, inside in mounts if host == inside]
    if not any(root.is_relative_to(one) and root != one for one in same):
        fix = f"Add {root.parent} to topology.container_mounts."
        moved = any(root.is_relative_to(one) for mount in mounts for one in mount)
        what = f"the container does not see {root}{', by the path that it has outside' if moved else ''}"
        raise UserError(what, where="trainer.output_dir", fix=fix)


def directive(value: str) -> str:
    """A value as sbatch reads it on a `#SBATCH` line, which it splits at blanks and ends at a `#`."""
    if re.fullmatch(r"[\w@%+=:,./|&*()\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _host(path: str) -> str:
    """A path of the machines: ~ stands for the home folder, which quotes would keep bash from seeing."""
    return os.path.expanduser(path)


def _wrapped(words: Sequence[str]) -> list[str]:
    """The words of a command as lines."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < _LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return lines
