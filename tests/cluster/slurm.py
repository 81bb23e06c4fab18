"""A real Slurm on the two hosts of two_hosts.py: slurmctld, two slurmd and munge, eight pretended GPUs a machine.

What is missing of it is installed with apt-get where there is one. Everything is in a folder of its own, and ports are those
of the hosts' own networks, so that several of these can be up at the same time.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster import two_hosts

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux")
GPUS = 8
LONG_S = 400
"""For a job that takes half a minute: only what hangs takes longer, on however busy a machine."""
CONFIG = """
ClusterName=two
SlurmctldHost=n1
AuthType=auth/munge
# a job that is requeued waits for its credential to expire: 120 s by default
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=15
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
# a busy machine may take longer than the usual 10 s
MessageTimeout=100
BatchStartTimeout=100
GresTypes=gpu
NodeName=n[1-2] CPUs=8 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=1:00:00 State=UP
"""


class Slurm:
    """A cluster that is up: commands on its login machine (n1), and its jobs."""

    def __init__(self, folder: Path, hosts: two_hosts.TwoHosts) -> None:
        self.folder = folder
        self._hosts = hosts

    def start(self, *command: str, cwd: Path | None = None, host: int = 1) -> two_hosts.Running:
        """Starts `command` on a host."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
        env = {**mine, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        return self._hosts.start(host, *command, cwd=cwd or self.folder, env=env, python=False)

    def run(self, *command: str, cwd: Path | None = None, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs `command` on n1 to its end; asserts its exit code."""
        running = self.start(*command, cwd=cwd)
        code = running.wait()
        assert expect is None or code == expect, f"exit {code}\n{running.text}"
        return subprocess.CompletedProcess(command, code, running.output.read_text(), running.errors.read_text())

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, or of a task of an array."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, number: str, limit_s: float = LONG_S) -> dict[str, str]:
        """The job at its end."""
        return self.until(number, lambda job: job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), limit_s)

    def until(self, number: str, reached: Callable[[dict[str, str]], bool], limit_s: float = LONG_S) -> dict[str, str]:
        """The job as soon as it is `reached`."""
        end = time.monotonic() + limit_s
        while not reached(job := self.job(number)):
            assert time.monotonic() < end, f"{job}\n{tail(Path(job['StdOut']))}"
            time.sleep(1)  # each look costs what a tenth of a second of training does
        return job

    def lose(self, host: int) -> None:
        """A host whose power is gone: all that runs there, but for the cluster's own controller, is killed, and Slurm has noticed."""
        for pid in self._hosts.processes(host):
            with suppress(ProcessLookupError, psutil.Error):
                if psutil.Process(pid).name() not in ("slurmctld", "munged"):
                    os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"NodeName=n{host}", "State=DOWN", "Reason=lost")

    def give_back(self, host: int) -> None:
        """Has a lost host again."""
        self.start("slurmd", "-D", "-N", f"n{host}", host=host)
        self.run("scontrol", "update", f"NodeName=n{host}", "State=RESUME", expect=None)


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else f"no {log}"


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster that keeps its files in `folder`; at the end nothing of it is left. Skips the test where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts.two_hosts(folder) as hosts:
        cluster = Slurm(folder, hosts)
        _write_config(folder)
        _start(cluster)
        try:
            yield cluster
        finally:
            _end_jobs(cluster)


def why_not() -> str | None:
    """Why there can be no cluster on this machine; None where there can."""
    if os.geteuid() != 0:
        return "a test cluster of network namespaces needs root"
    probe = subprocess.run(["unshare", "-n", "-m", "-u", "hostname", "n1"], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces: {probe.stderr.strip()}"
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing and not _installed():
        return f"Slurm cannot be installed here (apt-get), and there is no {', '.join(missing)}"
    return two_hosts.why_not()


def _installed() -> bool:
    if shutil.which("apt-get") is None:
        return False
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    patience = ["-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=0"]  # there may be no network
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        try:
            given = ["apt-get", "-q", *patience, *command]
            subprocess.run(given, env=env, capture_output=True, timeout=180, check=True)
        except subprocess.SubprocessError:
            return False
    return all(shutil.which(command) for command in COMMANDS)


def _write_config(folder: Path) -> None:
    for name in ("munge", "state", "dev", "spool-n1", "spool-n2"):
        (folder / name).mkdir(mode=0o700)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, gpus=GPUS))
    for number in range(GPUS):  # Slurm wants a device for each GPU; these are /dev/null
        os.mknod(folder / "dev" / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
    version = re.search(r"(\d+)\.(\d+)", subprocess.run(["slurmd", "-V"], capture_output=True, text=True).stdout)
    if version and (int(version[1]), int(version[2])) >= (23, 11):
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    key = folder / "munge" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _start(cluster: Slurm) -> None:
    munge = cluster.folder / "munge"
    places = [f"--{name}-file={munge}/munged.{name}" for name in ("pid", "log", "seed")]
    files = [f"--key-file={munge}/munge.key", f"--socket={munge}/munge.socket", *places]
    cluster.start("munged", "--force", "--foreground", *files)
    end = time.monotonic() + LONG_S
    while not (munge / "munge.socket").exists() and time.monotonic() < end:
        time.sleep(0.05)
    daemons = [cluster.start("slurmctld", "-D")]
    daemons += [cluster.start("slurmd", "-D", "-N", f"n{host}", host=host) for host in (1, 2)]
    while time.monotonic() < end:
        if len(cluster.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", expect=None).stdout.split()) == 2:
            return
        time.sleep(0.2)
    pytest.fail("\n".join(daemon.text for daemon in daemons))


def _end_jobs(cluster: Slurm) -> None:
    """Cancels all jobs and waits for them: what they started would otherwise go on without Slurm."""
    cluster.run("scancel", "--user=root", expect=None)
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        if not cluster.run("squeue", "-h", expect=None).stdout.strip():
            return
        time.sleep(0.2)
