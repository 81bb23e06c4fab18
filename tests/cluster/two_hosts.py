"""Two hosts on this machine: network namespaces with names, addresses and temporary folders of their own, and one link.

Processes are real, and so is the network between them; only the disk is shared. Names have this process' id in them, so that
two test runs do not meet. Needs root, iproute2 and util-linux; tests are skipped with the reason where these are not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ADDRESSES = ("10.88.0.1", "10.88.0.2")
INTERFACE = "link0"
LONG_S = 180
"""For what takes seconds: only what hangs takes longer, on however busy a machine."""
ENDED_S = 10 + 30
"""From a failure to the end of everything: what is promised, and what a busy machine may need besides."""
_LOCALHOST = "127.0.0.1 localhost\n"
_INSIDE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


@dataclass(slots=True)
class Running:
    """A command on a host, started at `begun`; its output is in files, so that nobody has to read it meanwhile."""

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path
    begun: float = field(default_factory=time.time)

    def took(self) -> float:
        """Seconds until it ended; what it last wrote tells when."""
        return max(one.stat().st_mtime for one in (self.output, self.errors)) - self.begun

    @property
    def text(self) -> str:
        """What it has said so far, stdout first."""
        return self.output.read_text(errors="replace") + self.errors.read_text(errors="replace")

    def wait(self, limit_s: float = LONG_S) -> int:
        """Its exit code; fails the test with what it said where it is still there after `limit_s`."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {limit_s} s: {self.text}")

    def until(self, said: str, limit_s: float = LONG_S) -> None:
        """Waits for a text in what it says."""
        end = time.monotonic() + limit_s
        while said not in self.text:
            assert self.process.poll() is None, f"ended ({self.process.returncode}) without {said!r}: {self.text}"
            assert time.monotonic() < end, f"no {said!r} after {limit_s} s: {self.text}"
            time.sleep(0.05)


class TwoHosts:
    """Hosts 1 and 2, called n1 and n2; see `two_hosts`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spaces = [f"packtrain-{os.getpid()}-{number}" for number in (1, 2)]
        self._started = 0
        self._hosts = {host: {"n1": ADDRESSES[0], "n2": ADDRESSES[1]} for host in (1, 2)}

    def up(self) -> None:
        """Makes the hosts and their link."""
        for space in self._spaces:
            _ip("netns", "add", space)
        one, two = self._spaces
        _ip("link", "add", INTERFACE, "netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", two)
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", INTERFACE, "up")

    def down(self) -> None:
        """Ends what still runs there, and takes the hosts away."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def space(self, host: int) -> str:
        """The network namespace of a host, for `ip -n` and `tc -n`."""
        return self._spaces[host - 1]

    def name_resolves(self, host: int, name: str, address: str) -> None:
        """Changes /etc/hosts of a host, for commands that are started after this."""
        self._hosts[host][name] = address

    def start(self, host: int, *argv: str, cwd: Path, env: dict | None = None, python: bool = True) -> Running:
        """Starts `python argv…` (or `argv…`) on a host."""
        self._started += 1
        own = self._folder / f"tmp{host}"
        own.mkdir(exist_ok=True)
        hosts = self._folder / f"hosts-{self._started}"
        hosts.write_text(_LOCALHOST + "".join(f"{address} {name}\n" for name, address in self._hosts[host].items()))
        # not `ip netns exec`, which remounts /sys
        enter = ["nsenter", f"--net=/run/netns/{self._spaces[host - 1]}"]
        enter += ["unshare", "-m", "-u", "--propagation", "private", "bash", "-c", _INSIDE, str(hosts), f"n{host}"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "WORLD_", "RANK"))}
        given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive", "TMPDIR": str(own)}
        output, errors = (self._folder / f"{self._started}.{kind}" for kind in ("out", "err"))
        command = [*enter, *([sys.executable] if python else []), *argv]
        place = {"cwd": cwd, "env": {**clean, **given, **(env or {})}, "start_new_session": True}
        with output.open("wb") as out, errors.open("wb") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            return Running(subprocess.Popen(command, **place, **streams), output, errors)

    def processes(self, host: int | None = None) -> list[int]:
        """What runs on a host, or on both; without those that only wait to be buried."""
        spaces = self._spaces if host is None else [self._spaces[host - 1]]
        found = [subprocess.run(["ip", "netns", "pids", one], capture_output=True, text=True).stdout for one in spaces]
        return [int(pid) for text in found for pid in text.split() if _lives(int(pid))]

    def assert_empty(self, limit_s: float = ENDED_S) -> None:
        """Nothing of a run is left on any host."""
        end = time.monotonic() + limit_s
        while left := self.processes():
            if time.monotonic() > end:
                commands = [" ".join(psutil.Process(pid).cmdline()) for pid in left]
                pytest.fail(f"left behind: {commands}")
            time.sleep(0.05)

    def cut(self) -> None:
        """Takes the link down; `heal` brings it back."""
        _ip("-n", self._spaces[1], "link", "set", INTERFACE, "down")

    def heal(self) -> None:
        """Brings the link up again, and every name back to its address."""
        _ip("-n", self._spaces[1], "link", "set", INTERFACE, "up")
        _ip("-n", self._spaces[1], "addr", "replace", f"{ADDRESSES[1]}/24", "dev", INTERFACE)
        for names in self._hosts.values():
            names.update(n1=ADDRESSES[0], n2=ADDRESSES[1])


def why_not() -> str | None:
    """Why there can be no two hosts on this machine; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts of network namespaces need root on Linux"
    missing = [command for command in ("ip", "nsenter", "unshare", "bash") if shutil.which(command) is None]
    if missing:
        return f"there is no {', '.join(missing)} (iproute2, util-linux)"
    probe = subprocess.run(["unshare", "-n", "-m", "-u", "hostname", "n1"], capture_output=True, text=True)
    return f"no network namespaces: {probe.stderr.strip()}" if probe.returncode else None


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts that keep their files in `folder`. Skips the test where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    hosts = TwoHosts(folder)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def both(ended: Sequence[Running], limit_s: float = LONG_S) -> list[int]:
    """Exit codes of all."""
    return [one.wait(limit_s) for one in ended]
