"""A config → the text of a Slurm script, made from slurm/run.sbatch.j2. Pure: it neither calls Slurm nor writes a file.

The template explains what a script does and why; this file computes the values for it. Everything that comes from the user is
quoted, for bash or for sbatch's parsing of `#SBATCH` lines, except topology.command, setup and sbatch, which are code.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from packtrain.config.compose import Point
from packtrain.config.rules.slurm import count_gpus, parse_options
from packtrain.config.schema import Topology
from packtrain.config.yaml_files import shipped
from packtrain.errors import UserError
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import Surroundings
from packtrain.plan.topology import GPUS_PER_NODE
from packtrain.redact import clean
from packtrain.run_folder import RunFolder
from packtrain.wording import counted

TEMPLATE = "run.sbatch.j2"
_GPUS = {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"}
_MODULE = re.compile(r"\s*(module|ml)\b")  # which only a login shell knows


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
    def config(self) -> str | None:
        """The path of the config, or its name; None where the arguments are all overrides."""
        return next((first for first in self.arguments[:1] if "=" not in first or Path(first).is_file()), None)

    @property
    def is_sweep(self) -> bool:
        """Whether it is a job array."""
        return bool(self.points[0].chosen)

    @property
    def topology(self) -> Topology:
        """The topology, the same for every point."""
        return self.points[0].config.topology

    @property
    def logs(self) -> Path:
        """The folder of Slurm's logs: logs/ of the run folder, or of the folder that contains all run folders of a sweep."""
        return RunFolder(Path(os.path.commonpath([self.run_folder(point).root for point in self.points]))).logs

    def run_folder(self, point: Point) -> RunFolder:
        """The run folder of a point, by its absolute path."""
        return RunFolder(self.folder / RunFolder.of(point.config.trainer).root)

    def log(self, job: str) -> Path:
        """Slurm's log of `job`: its number, or a pattern of Slurm's."""
        return self.logs / f"slurm-{job}.log"


def plan_job(job: Job) -> LaunchPlan:
    """The plan of the job's first run on its machines, after all runs have been planned, for their errors.

    Raises UserError if the config does not say what to request from Slurm, or if a run would be impossible.
    """
    topology = job.topology
    asked = count_gpus(topology)
    per_node = topology.gpus_per_node or (1 if topology.kind == "single" else asked)
    own = "Slurm names and numbers the machines of a job, when it starts: take the key away"
    problems = [(topology.kind in ("env", "manual"), "topology.kind", own)]
    problems += [(topology.node_rank is not None, "topology.node_rank", own)]
    named = "nodelist" in parse_options(topology.sbatch)
    problems += [(topology.main_address is not None and not named, "topology.main_address", own)]
    unknown = "how many {} the job wants is not known: set it"
    problems += [(topology.nodes is None, "topology.nodes", unknown.format("machines"))]
    problems += [(not per_node, GPUS_PER_NODE, unknown.format("GPUs of a machine"))]
    differ = (
        "the points of a sweep are one job array, with the same machines for all of them: submit one for each topology"
    )
    problems += [(any(point.config.topology != topology for point in job.points), "topology", differ)]
    for root in (str(job.run_folder(point).root) for point in job.points):
        broken = f"the path {root!r} has a line break, which Slurm's options cannot have"
        problems += [("\n" in root, "trainer.output_dir", broken)]
    for wrong, key, what in problems:
        if wrong:
            raise UserError(what, where=key)
    there = Surroundings(gpus=0 if asked == 0 else per_node or 1)
    known = replace(topology, gpus_per_node=per_node)
    plans = [plan_launch(replace(point.config, topology=known), there, job.verb, job.arguments) for point in job.points]
    return plans[0]


def script(job: Job, plan: LaunchPlan) -> str:
    """The whole script; `plan` is `plan_job(job)`."""
    topology, given = job.topology, parse_options(job.topology.sbatch)
    points = [
        {"words": shlex.join(point.chosen), "checkpoints": shlex.quote(str(job.run_folder(point).checkpoints))}
        for point in job.points
    ]
    values = {
        "shell": "/bin/bash -l" if any(map(_MODULE.match, topology.setup)) else "/bin/bash",
        "made_by": f"Made by {clean(shlex.join(job.called))}".replace("\n", "\n# "),
        "summary": summary(job, plan),
        "topology": topology,
        "no_kill": plan.makes_do,
        "job_name": None if "job-name" in given else directive(job.logs.parent.name),
        "gpus": None if _GPUS & given.keys() else plan.gpus_per_node,
        "folder": directive(str(job.folder)),
        "log": directive(str(job.logs).replace("%", "%%") + f"/slurm-{'%A_%a' if job.is_sweep else '%j'}.log"),
        "points": points if job.is_sweep else [],
        "checkpoints": points[0]["checkpoints"],
        "command": topology.command or shlex.join(job.program),
        "arguments": shlex.join([job.verb, *job.arguments]),
        # the array's number would requeue all of its tasks
        "requeued": "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.is_sweep else "$SLURM_JOB_ID",
    }
    source = FileSystemLoader(shipped("slurm"))
    templates = Environment(loader=source, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return templates.get_template(TEMPLATE).render(**values) + "\n"


def summary(job: Job, plan: LaunchPlan) -> str:
    """Machines and processes of the job, in one line."""
    unit = "processes on CPUs" if count_gpus(job.topology) == 0 else "GPUs"
    machines = f"{counted(plan.nodes, 'machines')} × {plan.gpus_per_node} {unit}"
    words = f"{machines} = {counted(plan.num_processes, 'processes')}"
    return f"{len(job.points)} runs, each on {words}" if job.is_sweep else words


def directive(value: str) -> str:
    """A value as sbatch reads it on a `#SBATCH` line, which it splits at blanks and ends at a `#`."""
    if re.fullmatch(r"[\w@%+=:,./|&*()\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
