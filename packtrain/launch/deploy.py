"""Files that start a run by Kubeflow, SkyPilot or dstack (`packtrain deploy`).

The templates in deploy/ only start the same command on each machine; there packtrain reads the engine's variables
(plan/launchers.py). `--submit` hands the file to the engine's own client.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from packtrain.config.compose import to_yaml
from packtrain.config.yaml_files import shipped
from packtrain.errors import Json, UserError
from packtrain.launch.slurm_jobs import Job, print_unchanged, render
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import Surroundings
from packtrain.system import write_text
from packtrain.wording import clean, counted, speaks_of_secrets

Engine = Literal["kubeflow", "skypilot", "dstack"]
_SUBMIT = {
    "kubeflow": (["kubectl", "apply", "-f"], "https://kubernetes.io/docs/tasks/tools"),
    "skypilot": (["sky", "jobs", "launch", "--detach-run", "--yes"], "pip install skypilot"),
    "dstack": (["dstack", "apply", "--detach", "--yes", "-f"], "pip install dstack"),
}
"""The client of each engine, which takes a file, and how to get the client."""
_GRACE_S = 30  # Kubernetes' default


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines for a run: a container `image` and the engine's name of a `gpu`.

    `gpu` none means CPUs. The cloud may take `spot` machines away.
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
        raise UserError(
            f"{engine} has to know which GPUs to ask for",
            where="--gpu",
            fix="Name one: H100, A100-80GB, none.",
            code="no-gpu-name",
        )
    if engine == "kubeflow" and machines.spot:
        fix = "Leave it out, and add the cluster's own node selector to the file."
        raise UserError(
            "which machines may be taken away is said by each cluster in its own way",
            where="--spot",
            fix=fix,
            code="spot-unsupported",
        )
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


def submit_or_write(engine: Engine, job: Job, machines: Machines, *, submit: bool, file: Path | None) -> int:
    """Submit the file by the engine's client, or write it to `file` or stdout. Returns the exit code.

    Raises UserError if the client is not installed.
    """
    secrets = sorted(name for name in os.environ if speaks_of_secrets(name) and re.match("(HF|WANDB|AWS)_", name))
    text = deployment(engine, job, machines, file.parent if file else Path(), secrets)
    if file is not None:
        write_text(file, text)
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
