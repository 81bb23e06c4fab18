"""Starting packtrain on every machine of a Slurm job in which it was called once: one srun task for each machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from packtrain.errors import PeerFailed, UserError
from packtrain.launch.exit_status import MOST_TELLING, listening
from packtrain.monitor.channel import SECRET, new_secret

_TIMEOUT_S = 20


def run_srun(argv: Sequence[str]) -> int:
    """Runs srun by `argv`; each of its tasks ends with the exit code of the whole run, which this returns.

    srun does not forward signals: at the first SIGINT it only prints a message, at SIGTERM it kills its tasks; so scancel sends
    the first signal to the tasks. A second one goes to srun. Raises PeerFailed if srun ends with 1: it could not start its tasks.
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
            raise UserError(what, where="PATH", fix="Load Slurm's module; type -a srun shows what is there.") from error
        pass_on()
        code = process.wait()
    if code == 1 and not received:
        raise PeerFailed(
            "srun could not start packtrain on the machines of the job, or it failed on all of them",
            where="Slurm",
            fix="The lines above say which; look at sinfo and squeue: is the job there, and are its machines up?",
        )
    if received and code not in (0, *MOST_TELLING):
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _signal_step(name: str, number: int) -> bool:
    """Sends a signal through Slurm to the tasks of the step `name` of this job; False if that fails."""
    queue = ["squeue", "--steps", "--noheader", f"--jobs={os.environ.get('SLURM_JOB_ID')}", "--format=%i %j"]
    try:
        listing = subprocess.run(queue, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
        steps = [line.split()[0] for line in listing.splitlines() if line.split()[1:] == [name]]
        if steps:
            cancel = ["scancel", f"--signal={signal.Signals(number).name[3:]}", *steps]
            subprocess.run(cancel, capture_output=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return False
    return bool(steps)
