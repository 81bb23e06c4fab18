"""Starting packtrain on every machine of a Slurm job, where it was called once: one srun task for each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, cast

from packtrain.errors import PeerFailed, UserError
from packtrain.launch.exit_status import MOST_TELLING, heard_by
from packtrain.monitor.channel import SECRET, new_secret

_TIMEOUT_S = 20
_ERROR = re.compile(rb"srun: (?:error|fatal): (.*)")
_OF_A_TASK = re.compile(rb"srun: (?:error: )?\S+: tasks? [\d,-]+: ")


def spread(argv: Sequence[str]) -> int:
    """Runs srun by `argv`; each of its tasks ends with the exit code of the whole run, which this returns.

    srun itself does not lead to its tasks: one SIGINT it only remarks upon, and for SIGTERM it kills them. A second signal is
    for srun. Raises PeerFailed where srun could not start its tasks, which it ends with 1 for.
    """
    step = f"packtrain-{os.getpid()}"
    argv = [argv[0], f"--job-name={step}", *argv[1:]]
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int) -> None:
        received.append(number)
        for srun in started:
            with suppress(ProcessLookupError):
                if len(received) > 1 or not _signal_step(step, number):
                    os.killpg(srun.pid, signal.SIGTERM)

    env = {SECRET: new_secret(), **os.environ}  # of all tasks, so that nobody else can join them
    with heard_by(pass_on):  # before there is an srun that a signal could leave behind
        try:
            srun = subprocess.Popen(argv, env=env, start_new_session=True, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            what = "srun is not found, though this is inside a Slurm job"
            raise UserError(what, where="PATH", fix="Load Slurm's module.") from error
        started.append(srun)
        if received:
            with suppress(ProcessLookupError):
                os.killpg(srun.pid, signal.SIGTERM)
        failure = _failure_in(cast(IO[bytes], srun.stderr))
        code = srun.wait()
    if failure and code == 1 and not received:
        raise PeerFailed(
            f"srun could not start packtrain on the machines of the job: {failure}",
            where="Slurm",
            fix="Look at sinfo and squeue: is the job there, and are its machines up? Then start the same command again.",
        )
    return 128 + received[0] if received and code not in (0, *MOST_TELLING) else code


def _failure_in(said: IO[bytes]) -> str:
    """Passes on what srun and its tasks print on stderr, as it comes; srun's own last error, "" where a task has ended."""
    failure, started, last = "", False, b""
    while piece := os.read(said.fileno(), 2**16):
        sys.stderr.buffer.write(piece)
        sys.stderr.buffer.flush()
        *lines, last = (last + piece).split(b"\n")
        for line in lines:
            started = started or _OF_A_TASK.match(line) is not None
            if error := _ERROR.match(line):
                failure = error[1].decode(errors="replace").strip()
    return "" if started else failure


def _signal_step(name: str, number: int) -> bool:
    """Has Slurm send a signal to the tasks of the step `name` of this job; False where it cannot."""
    asked = ["squeue", "--steps", "--noheader", f"--jobs={os.environ.get('SLURM_JOB_ID')}", "--format=%i %j"]
    try:
        listed = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
        steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [name]]
        command = ["scancel", f"--signal={signal.Signals(number).name[3:]}", *steps]
        if steps:
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(steps)
