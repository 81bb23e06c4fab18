"""Surroundings in which nothing is as it should be: variables, the user, the terminal, the folder, files that are no files."""

from __future__ import annotations

import os
import pwd
import sys
from functools import partial
from pathlib import Path

from tests.corpus.case import Make, command, each_of
from tests.corpus.tiny_run import link

RUN = ("model.path=owner/model", "data.train=owner/data", "batch.examples_per_step=32", "trainer.output_dir=run")
PLAN = ("plan", *RUN)
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
NO_NUMBERS = {"a superscript": "2²", "5,000 digits": "1" * 5000}
NUMBERS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"), LAUNCHED),
    "SLURM_NODEID": JOB,
    "SLURM_GPUS_ON_NODE": JOB,
    "SLURM_STEP_ID": STEP,
    "SLURM_STEP_TASKS_PER_NODE": STEP,
    "OMPI_COMM_WORLD_SIZE": {"OMPI_COMM_WORLD_RANK": "0"},
    "PMI_SIZE": {"PMI_RANK": "0"},
    "PET_NODE_RANK": {"PET_NNODES": "2"},
    "PET_MASTER_PORT": {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
}
TASKS = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "0"}
PODS = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29500"}
BEYOND = {
    "SLURM_NODEID": (STEP, "1"),
    "SLURM_PROCID": (TASKS, "2"),
    "SLURM_LOCALID": (TASKS, "2"),
    "SLURM_STEP_NODELIST": ({**STEP, "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, "n1"),
    "RANK": (LAUNCHED, "1"),
    "LOCAL_RANK": (LAUNCHED, "1"),
    "PET_NODE_RANK": (PODS, "2"),
}
"""Variables that contradict the others of the same launcher: a number beyond what there is, a list that is too short."""
NAMES_OF = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK", "SLURM_STEP_NODELIST": "SLURM_NODEID"}
HOSTS = {"an open bracket": "n[1-3", "5,000 digits": f"n[{'1' * 5000}]"}
HARMLESS = {
    "TERM": ("nonsense", "", "dumb"),
    "PYTHONIOENCODING": ("ascii", "latin-1"),
    "CUDA_VISIBLE_DEVICES": ("²", "-1", ",", "9" * 5000, "GPU-x", "0,0"),
    "HOME": ("", "/none", "/dev/null", "relative"),
    "PACKTRAIN_CACHE": ("/dev/null/x", "~nobody-here/x"),
    "DS_ACCELERATOR": ("nonsense",),
    "SLURM_JOB_ID": ("²", "x", "1" * 5000),
}


def leave_the_folder() -> None:
    """The current folder is deleted."""
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def be_nobody() -> None:
    """A user of whom nothing is known, without HOME, as in a container under a foreign number."""
    os.environ.pop("HOME")
    pwd.getpwuid = nobody  # type: ignore[assignment]


def nobody(number: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {number}")


def no_reader() -> None:
    """stdout is a pipe whose reader has left, as after `| head -1`."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def sparse(at: Path) -> None:
    with at.open("wb") as file:
        file.truncate(2**30)


KINDS: dict[str, Make] = {
    "a FIFO": os.mkfifo,
    "a folder": lambda at: at.mkdir(),
    "/dev/zero": link("/dev/zero"),
    "1 GB": sparse,
}
PLACES = {"model.path": "m", "data.chat_template": "t.jinja", "trainer.resume": "r", "trainer.output_dir": "run"}
CASES = [
    *(
        command(f"no reader: {one[0]}", *one, *RUN, begin=no_reader, expect=(141,))
        for one in (("plan",), ("plan", "--json"))
    ),
    command("RANK alone, a text", *PLAN, env={"RANK": "x"}, says=("RANK",)),
    *(
        command(f"{name} is {what}", *PLAN, env={**others, name: value}, says=(name,))
        for name, others in NUMBERS.items()
        for what, value in NO_NUMBERS.items()
    ),
    *(
        command(
            f"{' '.join(verb)}: {name} beyond",
            *verb,
            *RUN,
            env={**others, name: value},
            says=(NAMES_OF.get(name, name),),
        )
        for name, (others, value) in BEYOND.items()
        for verb in (("plan", "--json"), ("sft",), ("verify",), ("inspect",))
    ),
    *(
        command(f"hosts: {what}", *PLAN, env={**JOB, "SLURM_JOB_NODELIST": hosts}, says=("SLURM_JOB_NODELIST",))
        for what, hosts in HOSTS.items()
    ),
    *(
        command(f"{name}={value[:12]!r} plans all the same", *PLAN, env={name: value}, expect=(0,))
        for name, values in HARMLESS.items()
        for value in values
    ),
    *(
        command(f"a config that is {kind}", "plan", "c.yaml", *RUN, files={"c.yaml": make}, says=("c.yaml",))
        for kind, make in KINDS.items()
        if make is not sparse
    ),
]
for key, path in PLACES.items():
    others = [one for one in PLAN if not one.startswith(f"{key}=")]
    for kind, make in KINDS.items():
        CASES.append(command(f"{key} is {kind}", *others, f"{key}={path}", files={path: make}, expect=(0, 2)))
CASES += [
    command("no current folder", *PLAN, begin=leave_the_folder, expect=(0, 2)),
    command("nobody, nowhere", *PLAN, begin=be_nobody, expect=(0,)),
    command("no stdin", *PLAN, begin=partial(os.close, 0), expect=(0,)),
]
test_case = each_of(CASES, one_in=4)
