"""A name server that does not answer, on a network host whose /etc/resolv.conf names an address where nobody is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.small_launch import ROOT
from tests.cluster.two_hosts import INTERFACE, Running, TwoHosts

NOBODY = "10.88.0.99"
SILENT = "the name server does not answer for 127.0.0.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "resolv.conf").write_text(f"nameserver {NOBODY}\n")
    return tmp_path


def run(hosts: TwoHosts, folder: Path, *argv: str, host: int = 1, **env: str) -> Running:
    """Python with `argv` on a host, with the folder's resolv.conf; frames to the server's address go to a machine that is not there."""
    nobody = ["neigh", "replace", NOBODY, "lladdr", "02:00:00:00:00:99", "dev", INTERFACE]
    subprocess.run(["ip", "-n", hosts.space(host), *nobody], check=True)
    inside = 'mount --bind resolv.conf /etc/resolv.conf && exec "$@"'
    paths = {"PYTHONPATH": str(ROOT), **env}
    return hosts.start(host, "bash", "-c", inside, "_", sys.executable, *argv, cwd=folder, env=paths, python=False)


def test_env_warns_of_it(made: TwoHosts, folder: Path) -> None:
    script = "from packtrain.diagnose import env; env.TORCH_S = 60; "  # a busy machine is slow to ask
    script += "print(env.check_all(*env.gather(lambda: None)))"
    ran = run(made, folder, "-c", script)
    assert ran.wait() == 0, ran.text
    assert f"name='name-server', status='warn', found='{SILENT}" in ran.text
