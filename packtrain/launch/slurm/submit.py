"""Writing a Slurm script to the terminal or a file, or submitting it with sbatch, whose errors become ours."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from packtrain.config.rules.slurm import parse_options
from packtrain.config.yaml_files import shown
from packtrain.durable import followed, write_text
from packtrain.errors import UserError
from packtrain.launch.attempt import inputs
from packtrain.launch.slurm.sbatch import Job, plan_job, script, summary
from packtrain.wording import shortened, whole

_TIMEOUT_S = 120
_CAPTURED: Any = {"capture_output": True, "text": True, "errors": "replace", "timeout": _TIMEOUT_S, "check": False}
_MADE = "# Made by packtrain sbatch"


def this_program() -> tuple[str, ...]:
    """The command of this installation of packtrain, by absolute path: a job may start without this shell's PATH."""
    beside = Path(sys.executable).with_name("packtrain")
    return (str(beside),) if beside.is_file() else (sys.executable, "-m", "packtrain")


def hand_over(job: Job, *, submit: bool, test: bool, file: Path | None, as_json: bool) -> int:
    """Plans the job, then has sbatch `test` its script, `submit`s it, or writes it (to `file`, else to stdout); returns 0.

    Raises UserError where the job is impossible, sbatch is missing or refuses, or a file cannot be written or is another's.
    """
    plan = plan_job(job)
    text = script(job, plan)
    for point in job.points:
        job.run_folder(point).check_ours(inputs(point.config, job.config))
    if file is not None and file.exists():
        if not file.is_file():
            raise UserError("this is no regular file", where=str(file), fix="Without -o the script is printed.")
        if _MADE not in file.read_text(encoding="utf-8", errors="replace"):
            what = "packtrain did not make this file, and would replace it"
            raise UserError(what, where=str(file), fix="Name another.")
    if not {"cpus-per-task", "cpus-per-gpu", "exclusive"} & parse_options(job.topology.sbatch).keys():
        lack = "topology.sbatch has no --cpus-per-task; many clusters then give a job one core of each machine"
        print(f"note: {lack}", file=sys.stderr)
    if test:
        print(_sbatch(["--test-only"], text), file=sys.stderr)
        return 0
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        what = f"the run folder cannot be made: {error.strerror}"
        raise UserError(what, where=f"trainer.output_dir ({job.logs.parent})", fix="Name another folder.") from error
    if file is not None:
        try:
            write_text(followed(file), text)
        except (FileNotFoundError, NotADirectoryError) as error:
            fix = "Name a file that can be written with -o."
            raise UserError(f"the script cannot be written: {error.strerror}", where=str(file), fix=fix) from error
    if submit:
        _submit(job, text, f"{summary(job, plan)}; {plan.batch.sentence()}", file, as_json)
    elif as_json:
        document = {"job_id": None, "script": str(file) if file else None, "text": text, **_runs(job, "%j")}
        _print_unchanged(json.dumps(document, indent=2) + "\n")
    elif file is not None:
        print(f"{file} is written: sbatch {shlex.quote(str(file))} submits it", file=sys.stderr)
    else:
        _print_unchanged(text)
    return 0


def _print_unchanged(text: str) -> None:
    """Prints a script with all that the user's own lines of topology.setup have in them."""
    print(text, end="", file=getattr(sys.stdout, "unchanged", sys.stdout))


def _submit(job: Job, text: str, what: str, file: Path | None, as_json: bool) -> None:
    _sbatch(["--test-only"], text)  # without this a cluster may accept a job that none of its machines can run
    number = _sbatch(["--parsable"], text).partition(";")[0]  # JOB or JOB;CLUSTER
    if whole(number) is None:
        raise UserError(f"sbatch calls the job {shortened(number)}", where="--submit", fix="See squeue --me, and PATH.")
    if file is None:
        file = job.logs / f"slurm-{number}.sbatch"
        write_text(file, text)
    state = _state(number)
    if as_json:
        print(json.dumps({"job_id": number, "state": state, "script": str(file), **_runs(job, number)}, indent=2))
        return
    log = shown(job.log(f"{number}_*" if job.is_sweep else number))
    stay = f"scontrol update JobId={number} Requeue=0 && " if job.topology.requeue else ""
    runs = {f"run {at}": shown(job.run_folder(point).root) for at, point in enumerate(job.points)}
    lines = {
        **(runs if job.is_sweep else {}),
        "job": f"{number}: {what}",
        "script": shown(file),
        "log": log,
        "follow": f"tail -n +1 -F {log if job.is_sweep else shlex.quote(log)}",
        "state": f"squeue -j {number}    (now: {state})",
        "stop": f"{stay}scancel --signal=TERM {number}    (after a checkpoint)",
        "cancel": f"scancel {number}",
    }
    for name, value in lines.items():
        print(f"{name:<8} {value}")


def _runs(job: Job, number: str) -> dict[str, object]:
    """Where logs and run folders of a job are, for --json."""
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
    """The state of a job in Slurm's words: "RUNNING", "PENDING (Resources)"; "?" if squeue does not say."""
    try:
        states = subprocess.run(["squeue", "--noheader", f"--jobs={number}", "--format=%T (%r)"], **_CAPTURED).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    return next(iter(states.splitlines()), "?").removesuffix(" (None)")


def _sbatch(arguments: list[str], text: str) -> str:
    """sbatch's answer to the script `text`: its stdout, for a test its stderr. Raises UserError if it refuses."""
    command = shutil.which("sbatch")
    if command is None:
        fix = "Run this on a login machine of the cluster; without --submit the script is printed, and can be copied there."
        raise UserError("there is no sbatch on this machine", where="--submit", fix=fix)
    # in a shell of salloc sbatch would read that job's variables as options of the new one
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    try:
        done = subprocess.run([command, *arguments], env=env, input=text, **_CAPTURED)
    except OSError as error:
        what = f"sbatch cannot be started: {error.strerror}"
        raise UserError(what, where=command, fix="Mend it, or PATH.") from error
    except subprocess.TimeoutExpired as error:
        fix = "Look whether Slurm is up: sinfo."
        raise UserError(f"sbatch does not answer within {_TIMEOUT_S} s", where="--submit", fix=fix) from error
    if done.returncode:  # its message names the option
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line]
        fix = "See what there is: sinfo -o '%P %D %c %m %G %l %f' (partition, machines, cores, MB, GPUs, time limit, features)."
        raise UserError(f"sbatch refuses the job: {'; '.join(lines)}", where="topology", fix=fix)
    if not done.stdout:
        return done.stderr.strip()
    print(done.stderr, end="", file=sys.stderr)  # a cluster may print notices for submitted jobs
    return done.stdout.strip()
