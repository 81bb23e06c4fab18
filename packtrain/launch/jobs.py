"""Jobs of Slurm, Kubeflow, SkyPilot and dstack: scripts, files and their submission.

slurm/run.sbatch.j2 explains what a script does and why; `script` computes the values for it. Everything from the user is
quoted, for bash or for sbatch's parsing of `#SBATCH` lines, except topology.command, setup and sbatch, which are code.
The templates in deploy/ only start the same command on each machine; there packtrain reads the engine's variables
(plan/surroundings.py). `--submit` hands the script or file to sbatch, or to the engine's own client.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from packtrain.config.compose import Point, to_yaml
from packtrain.config.rules.slurm import count_gpus, parse_options
from packtrain.config.schema import Topology
from packtrain.config.yaml_files import shipped, shown
from packtrain.errors import Json, PeerFailed, Problem, UserError
from packtrain.launch.attempt import inputs, writing
from packtrain.launch.coordinator import MOST_TELLING
from packtrain.monitor.channel import SECRET, new_secret
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import Surroundings
from packtrain.plan.topology import GPUS_PER_NODE
from packtrain.run_folder import RunFolder
from packtrain.system import listening, write_text
from packtrain.wording import clean, counted, speaks_of_secrets

TEMPLATE = "run.sbatch.j2"
_MADE = "# Made by packtrain sbatch"
_GPUS = {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"}
_MODULE = re.compile(r"\s*(module|ml)\b")  # only a login shell knows these
_ANSWER_S = 120  # for a client of Slurm
_STEP_S = 20  # time for Slurm to name and signal a step
Engine = Literal["kubeflow", "skypilot", "dstack"]
_SUBMIT = {
    "kubeflow": (["kubectl", "apply", "-f"], "https://kubernetes.io/docs/tasks/tools"),
    "skypilot": (["sky", "jobs", "launch", "--detach-run", "--yes"], "pip install skypilot"),
    "dstack": (["dstack", "apply", "--detach", "--yes", "-f"], "pip install dstack"),
}
"""The client of each engine, which takes a file, and how to get the client."""
_GRACE_S = 30  # Kubernetes' default


@dataclass(frozen=True, slots=True)
class Job:
    """`packtrain verb arguments…` as a Slurm job. It starts in `folder`.

    Outside containers the command is `program`. `points` are the runs: one, or a sweep's, which share `arguments`. `invoked_as` is the
    command that asked for the job."""

    verb: str
    invoked_as: tuple[str, ...]
    arguments: tuple[str, ...]
    points: tuple[Point, ...]
    folder: Path
    program: tuple[str, ...]

    @property
    def config(self) -> str | None:
        """The path of the config, or its name; None if all arguments are overrides."""
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
        """The folder of Slurm's logs: logs/ of the run folder. For a sweep: of the folder around its run folders."""
        return RunFolder(Path(os.path.commonpath([self.run_folder(point).root for point in self.points]))).logs

    def run_folder(self, point: Point) -> RunFolder:
        """Return the run folder of a point, with its absolute path."""
        return RunFolder(self.folder / RunFolder.of(point.config.trainer).root)

    def log(self, job: str) -> Path:
        """Return the path of Slurm's log. `job` is a job number, or a pattern of Slurm's."""
        return self.logs / f"slurm-{job}.log"


def plan_job(job: Job) -> LaunchPlan:
    """Plan the start on each machine of the job. Raises UserError if it cannot be planned.

    Machines and GPUs must be known beforehand, numbered by Slurm, and the same for all points of a sweep.
    """
    topology = job.topology
    asked = count_gpus(topology)
    per_node = topology.gpus_per_node or (1 if topology.kind == "single" else asked)
    own = "Slurm names and numbers the machines of a job, when it starts: remove the key"
    unknown = "the number of {} is not set"
    alike = (
        "the points of a sweep are one job array, with the same machines for all of them: submit one for each topology"
    )
    addressed = topology.main_address is not None and "nodelist" not in parse_options(topology.sbatch)
    roots = [str(job.run_folder(point).root) for point in job.points]
    broken = "its path has a line break, which Slurm's options cannot have"
    named = {"kind": topology.kind in ("env", "manual"), "node_rank": topology.node_rank is not None}
    numbered = next((key for key, wrong in {**named, "main_address": addressed}.items() if wrong), "")
    differ = any(point.config.topology != topology for point in job.points)
    for wrong, problem in (
        (numbered, Problem(own, f"topology.{numbered}", code="numbered-by-launcher")),
        (topology.nodes is None, Problem(unknown.format("machines"), "topology.nodes", code="machines-unknown")),
        (not per_node, Problem(unknown.format("GPUs of each machine"), GPUS_PER_NODE, code="gpus-unknown")),
        (differ, Problem(alike, "topology", code="topologies-differ")),
        ("\n" in "".join(roots), Problem(broken, "trainer.output_dir", code="line-break-in-path")),
    ):
        if wrong:
            raise UserError(problem)
    there = Surroundings(gpus=0 if asked == 0 else per_node or 1)
    known = replace(topology, gpus_per_node=per_node)
    plans = [plan_launch(replace(point.config, topology=known), there, job.verb, job.arguments) for point in job.points]
    return plans[0]


def script(job: Job, plan: LaunchPlan) -> str:
    """Return the whole script; `plan` is `plan_job(job)`."""
    topology, given = job.topology, parse_options(job.topology.sbatch)
    points = [
        {"words": shlex.join(point.chosen), "checkpoints": shlex.quote(str(job.run_folder(point).checkpoints))}
        for point in job.points
    ]
    values = {
        "shell": "/bin/bash -l" if any(map(_MODULE.match, topology.setup)) else "/bin/bash",
        "made_by": f"Made by {clean(shlex.join(job.invoked_as))}".replace("\n", "\n# "),
        "summary": summary(job, plan),
        "topology": topology,
        "no_kill": plan.survives_lost_machines,
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
    return render(shipped("slurm") / TEMPLATE, values)


def render(template: Path, values: Json) -> str:
    """Render a jinja template. `values` must have everything that it uses."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    source = FileSystemLoader(template.parent)
    templates = Environment(loader=source, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return templates.get_template(template.name).render(**values) + "\n"


def summary(job: Job, plan: LaunchPlan) -> str:
    """Describe the machines and processes of the job in one line."""
    unit = "processes on CPUs" if count_gpus(job.topology) == 0 else "GPUs"
    machines = f"{counted(plan.nodes, 'machines')} × {plan.gpus_per_node} {unit}"
    words = f"{machines} = {counted(plan.num_processes, 'processes')}"
    return f"{len(job.points)} runs, each on {words}" if job.is_sweep else words


def directive(value: str) -> str:
    """Return a value quoted for a `#SBATCH` line. sbatch splits it at blanks and ends it at a `#`."""
    if re.fullmatch(r"[\w@%+=:,./|&*()\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def submit_or_write(job: Job, *, submit: bool, file: Path | None, as_json: bool) -> int:
    """Plan the job, then submit its script, or write it to `file` or stdout. Returns 0.

    Raises UserError if the job is impossible, if sbatch is missing or refuses, or if a file cannot be written or is not packtrain's.
    """
    plan = plan_job(job)
    text = script(job, plan)
    for point in job.points:
        job.run_folder(point).check_ours(inputs(point.config, job.config))
    if file is not None and file.exists() and not (file.is_file() and _MADE in file.read_text(errors="replace")):
        what = "packtrain did not make this file, and will not overwrite it"
        raise UserError(what, where=str(file), fix="Name another.", code="not-made-by-packtrain")
    with writing():
        job.logs.mkdir(parents=True, exist_ok=True)
    if file is not None:
        try:
            write_text(Path(os.path.realpath(file)), text)
        except (FileNotFoundError, NotADirectoryError) as error:
            what = f"the script cannot be written: {error.strerror}"
            raise UserError(what, where=str(file), code="file-not-writable") from error
    if submit:
        _submit(job, text, f"{summary(job, plan)}; {plan.batch.sentence()}", file, as_json)
    elif as_json:
        document = {"job_id": None, "script": str(file) if file else None, "text": text, **_runs(job, "%j")}
        print_unchanged(json.dumps(document, indent=2) + "\n")
    elif file is not None:
        print(f"{file} is written: sbatch {shlex.quote(str(file))} submits it", file=sys.stderr)
    else:
        print_unchanged(text)
    return 0


def print_unchanged(text: str) -> None:
    """Print a script unredacted: the user's lines of topology.setup must stay unchanged."""
    print(text, end="", file=getattr(sys.stdout, "unchanged", sys.stdout))


def _submit(job: Job, text: str, what: str, file: Path | None, as_json: bool) -> None:
    _sbatch(["--test-only"], text)  # without this a cluster may accept a job that none of its machines can run
    number = _sbatch(["--parsable"], text).partition(";")[0]  # JOB or JOB;CLUSTER
    if not number.isdecimal():
        what = f"sbatch --parsable printed {number[:80]!r} instead of a job number"
        raise UserError(what, where="--submit", code="no-job-number")
    if file is None:
        file = job.logs / f"slurm-{number}.sbatch"
        write_text(file, text)
    state = _state(number)
    if as_json:
        print(json.dumps({"job_id": number, "state": state, "script": str(file), **_runs(job, number)}, indent=2))
        return
    log = shown(job.log(f"{number}_*" if job.is_sweep else number))
    keep_stopped = f"scontrol update JobId={number} Requeue=0 && " if job.topology.requeue else ""
    runs = {f"run {at}": shown(job.run_folder(point).root) for at, point in enumerate(job.points)}
    lines = {
        **(runs if job.is_sweep else {}),
        "job": f"{number}: {what}",
        "script": shown(file),
        "log": log,
        "follow": f"tail -n +1 -F {log if job.is_sweep else shlex.quote(log)}",
        "state": f"squeue -j {number}    (now: {state})",
        "stop": f"{keep_stopped}scancel --signal=TERM {number}    (after a checkpoint)",
        "cancel": f"scancel {number}",
    }
    for name, value in lines.items():
        print(f"{name:<8} {value}")


def _runs(job: Job, number: str) -> dict[str, object]:
    """Return the paths of a job's logs and run folders, for --json."""
    folders = [str(job.run_folder(point).root) for point in job.points]
    if not job.is_sweep:
        return {"log": str(job.log(number)), "output_dir": folders[0]}
    number = "%A" if number == "%j" else number
    runs = [
        {"log": str(job.log(f"{number}_{at}")), "output_dir": folder, "overrides": list(point.chosen)}
        for at, (point, folder) in enumerate(zip(job.points, folders, strict=True))
    ]
    return {"log": str(job.log(f"{number}_%a")), "runs": runs}


def _state(number: str) -> str:
    """Return the state of a job in Slurm's words. "RUNNING", "PENDING (Resources)"; "?" if squeue does not say."""
    try:
        states = _ask("squeue", "--noheader", f"--jobs={number}", "--format=%T (%r)").stdout
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    return next(iter(states.splitlines()), "?").removesuffix(" (None)")


def _ask(*command: str, env: Mapping[str, str] | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    run = partial(subprocess.run, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False)
    return run(command, env=env, input=text)


def _sbatch(arguments: list[str], text: str) -> str:
    """Return sbatch's answer to the script `text`: its stdout, for a test its stderr. Raises UserError if it refuses."""
    # in a shell of salloc, sbatch would take that job's variables as options of the new one
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    try:
        done = _ask("sbatch", *arguments, env=env, text=text)
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "Run this on a login machine of the cluster; without --submit the script is printed, and can be copied there."
        raise UserError(f"sbatch cannot be called: {error}", where="--submit", fix=fix, code="no-sbatch") from error
    if done.returncode:  # its message names the option
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line]
        fix = "See what there is: sinfo -o '%P %D %c %m %G %l %f' (partition, machines, cores, MB, GPUs, time limit, features)."
        raise UserError(f"sbatch refuses the job: {'; '.join(lines)}", where="topology", fix=fix, code="sbatch-refused")
    if not done.stdout:
        return done.stderr.strip()
    print(done.stderr, end="", file=sys.stderr)  # a cluster may print notices for submitted jobs
    return done.stdout.strip()


def run_srun(argv: Sequence[str]) -> int:
    """Run srun by `argv`. Returns the exit code of the run, the same for all tasks.

    srun does not forward signals: at the first SIGINT it only prints a message, at SIGTERM it kills its tasks. So scancel sends
    the first signal to the tasks, and srun gets the second. Raises PeerFailed if srun ends with 1: it could not start its tasks.
    """
    step = f"packtrain-{os.getpid()}"
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(*number: int) -> None:
        received.extend(number)
        if process and received and (len(received) > 1 or not _signal_step(step, received[0])):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    env = {SECRET: new_secret(), **os.environ}  # the same for all tasks, so that no other process can join
    with listening(pass_on):  # before srun starts, so that a signal cannot leave it behind
        try:
            command = [argv[0], f"--job-name={step}", *argv[1:]]
            process = subprocess.Popen(command, env=env, start_new_session=True)
        except OSError as error:
            what = f"srun cannot be started, though this is inside a Slurm job: {error.strerror}"
            fix = "Load Slurm's module; type -a srun shows what is there."
            raise UserError(what, where="PATH", fix=fix, code="no-srun") from error
        pass_on()
        code = process.wait()
    if code == 1 and not received:
        what = "srun could not start packtrain on the machines of the job, or it failed on all of them"
        fix = "The lines above say which; look at sinfo and squeue: is the job there, and are its machines up?"
        raise PeerFailed(what, where="Slurm", fix=fix, code="srun-failed")
    if received and code not in (0, *MOST_TELLING):
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _signal_step(name: str, number: int) -> bool:
    """Send a signal through Slurm to the tasks of this job's step `name`. Return False if that fails."""
    queue = ["squeue", "--steps", "--noheader", f"--jobs={os.environ.get('SLURM_JOB_ID')}", "--format=%i %j"]
    try:
        listing = subprocess.run(queue, capture_output=True, text=True, timeout=_STEP_S, check=True).stdout
        steps = [line.split()[0] for line in listing.splitlines() if line.split()[1:] == [name]]
        if steps:
            cancel = ["scancel", f"--signal={signal.Signals(number).name[3:]}", *steps]
            subprocess.run(cancel, capture_output=True, timeout=_STEP_S, check=True)
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return False
    return bool(steps)


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines for a run, with a container `image`.

    `gpu` is the engine's name of a GPU, or the text "none" for CPUs. The cloud may take `spot` machines away.
    """

    image: str | None = None
    gpu: str | None = None
    spot: bool = False


def deployment(engine: Engine, job: Job, machines: Machines, folder: Path, secrets: list[str]) -> str:
    """Return the file's text, for its `folder`, with the names of `secrets`. Raises UserError for unknown or already numbered machines."""
    config, topology = job.points[0].config, job.topology
    per_node, nodes = topology.gpus_per_node, topology.nodes or 1
    named = [key for key in ("node_rank", "main_address") if getattr(topology, key) is not None]
    if topology.kind != "auto" or named:
        where = f"topology.{named[0] if named else 'kind'}"
        what = f"{engine} names and numbers the machines itself"
        raise UserError(what, where=where, fix="Remove the key.", code="numbered-by-launcher")
    if per_node is None:
        what = "how many GPUs each machine has is not known here"
        fix = "Set it; with --gpu none to processes on CPUs."
        raise UserError(what, where="topology.gpus_per_node", fix=fix, code="gpus-unknown")
    if engine != "kubeflow" and machines.gpu is None:
        what, fix = f"{engine} has to know which GPUs to ask for", "Name one: H100, A100-80GB, none."
        raise UserError(what, where="--gpu", fix=fix, code="no-gpu-name")
    if engine == "kubeflow" and machines.spot:
        what = "each cluster says in its own way which machines may be taken away"
        fix = "Leave it out, and add the cluster's own node selector to the file."
        raise UserError(what, where="--spot", fix=fix, code="spot-unsupported")
    if engine == "kubeflow" and not machines.image:
        fix = "Build one by the Dockerfile, and push it to where the cluster finds it."
        raise UserError("pods need an image with packtrain in it", where="--image", fix=fix, code="no-image")
    if engine != "kubeflow" and job.config and (os.path.isabs(job.config) or ".." in Path(job.config).parts):
        fix = "Copy it into this folder, and name it by its path from here."
        what = f"{engine} copies this folder alone to the machines"
        raise UserError(what, where=job.config, fix=fix, code="outside-job-folder")
    first = replace(topology, kind="manual", nodes=nodes, node_rank=0, main_address="first")
    there = Surroundings(gpus=per_node if machines.gpu != "none" else 0)
    plan = plan_launch(replace(config, topology=first), there, job.verb, job.arguments)
    program = topology.command or "packtrain"
    inside = "/tmp/packtrain.yaml" if engine == "kubeflow" else None
    arguments = [job.verb, inside] if inside else [job.verb, *job.arguments]
    name = re.sub(r"[^a-z0-9]+", "-", Path(config.trainer.output_dir).name.lower()).strip("-")
    values: Json = {
        "made_by": "\n# ".join(f"Made by {clean(shlex.join(job.invoked_as))}".splitlines()),
        "summary": f"{counted(nodes, 'machines')} × {per_node} = {counted(plan.num_processes, 'processes')}",
        "name": (name if re.match("[a-z].", name) else f"run-{name}")[:40].strip("-"),  # valid as a host name
        "here": os.path.relpath(".", folder),
        "nodes": nodes,
        "per_node": per_node,
        "image": machines.image,
        "gpu": machines.gpu if machines.gpu != "none" else None,
        "on_cpus": machines.gpu == "none",
        "spot": machines.spot,
        "restarts": config.trainer.restarts,
        "grace": topology.grace or _GRACE_S,
        "setup": topology.setup,
        "secrets": secrets,
        "config": to_yaml(config).splitlines(),
        "command": f"{program} {shlex.join(arguments)}",
    }
    return render(shipped("deploy") / f"{engine}.yaml.j2", values)


def deploy_or_write(engine: Engine, job: Job, machines: Machines, *, submit: bool, file: Path | None) -> int:
    """Submit the file by the engine's client, or write it to `file` or stdout. Returns the exit code.

    Raises UserError if the client is not installed.
    """
    secrets = sorted(name for name in os.environ if speaks_of_secrets(name) and re.match("(HF|WANDB|AWS)_", name))
    text = deployment(engine, job, machines, file.parent if file else Path(), secrets)
    if file is not None:
        write_text(Path(os.path.realpath(file)), text)
    if submit:
        command, install = _SUBMIT[engine]
        if shutil.which(command[0]) is None:
            what = f"{command[0]}, the client of {engine}, is not installed"
            fix = f"{install}; or write the file with -o, and submit it there."
            raise UserError(what, where="--submit", fix=fix, code="client-missing")
        values = [f"--secret={name}" for name in secrets if engine == "skypilot"]  # it refuses names without them
        with tempfile.NamedTemporaryFile("w", suffix=f"-{engine}.yaml", dir=".") as made:  # dstack copies its folder
            made.write(text)
            made.flush()
            return subprocess.run([*command, *values, str(file or made.name)], check=False).returncode
    if file is None:
        print_unchanged(text)
    else:
        print(f"{file} is written: {shlex.join([*_SUBMIT[engine][0], str(file)])} submits it", file=sys.stderr)
    return 0
