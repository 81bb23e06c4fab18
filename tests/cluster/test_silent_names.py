"""A name server that does not answer, on a network host whose /etc/resolv.conf names an address where nobody is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.small_launch import ROOT, SMALL
from tests.cluster.two_hosts import INTERFACE, Running, TwoHosts
from tests.train.running import base_config

NOBODY = "10.88.0.99"
SILENT = "the name server does not answer for 127.0.0.1"
WORKER = """
import os
from packtrain.launch.worker import run_worker
from tests.cluster.small_group import Group

def work():
    Group().all_reduce(1.0)
    print("RES_OPTIONS", os.environ.get("RES_OPTIONS"), flush=True)
    return 0

run_worker(work)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "resolv.conf").write_text(f"nameserver {NOBODY}\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base_config(tmp_path, topology={"gpus_per_node": 2})))
    return tmp_path


def run(hosts: TwoHosts, folder: Path, *argv: str, host: int = 1, **env: str) -> Running:
    """Python with `argv` on a host, with the folder's resolv.conf; frames to the server's address go to a machine that is not there."""
    nobody = ["neigh", "replace", NOBODY, "lladdr", "02:00:00:00:00:99", "dev", INTERFACE]
    subprocess.run(["ip", "-n", hosts.space(host), *nobody], check=True)
    inside = 'mount --bind resolv.conf /etc/resolv.conf && exec "$@"'
    paths = {"PYTHONPATH": str(ROOT), **env}
    return hosts.start(host, "bash", "-c", inside, "_", sys.executable, *argv, cwd=folder, env=paths, python=False)


def test_a_silent_name_server_is_told_and_the_processes_wait_less_for_it(made: TwoHosts, folder: Path) -> None:
    ran = run(made, folder, *SMALL)
    assert ran.wait() == 0, ran.text
    assert f"{SILENT}, and torch asks it at each connection: it waits only 1 s from now on" in ran.text
    assert "/etc/resolv.conf" in ran.text
    assert "RES_OPTIONS timeout:1 attempts:1" in ran.text


def test_env_warns_of_it(made: TwoHosts, folder: Path) -> None:
    script = "from packtrain.diagnose import env; env.TORCH_S = 60; "  # a busy machine is slow to ask
    script += "print(env.check_all(*env.gather(lambda: None)))"
    ran = run(made, folder, "-c", script)
    assert ran.wait() == 0, ran.text
    assert f"name='name-server', status='warn', found='{SILENT}" in ran.text
