"""`packtrain env --cluster` on two network hosts: what differs, a pair that is slow, a machine that is missing; and a name server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.small_launch import ROOT
from tests.cluster.two_hosts import INTERFACE, Running, TwoHosts, both
from tests.train.running import base_config

NO_TORCH = "raise ImportError('torch takes seconds, and is not asked for here')\n"
NOBODY = "10.88.0.99"
LIMIT_S = 8
LAST_S = 30  # for the start and for the lines at the end, on a busy machine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the config of two machines, and a torch that cannot be imported."""
    (tmp_path / "without/torch").mkdir(parents=True)
    (tmp_path / "without/torch/__init__.py").write_text(NO_TORCH)
    topology = {"kind": "manual", "nodes": 2, "gpus_per_node": 1, "main_address": "n1", "main_port": 29500}
    config = base_config(tmp_path, topology=topology)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def env(hosts: TwoHosts, host: int, folder: Path, *arguments: str, **variables: str) -> Running:
    given = ("env", "run.yaml", f"topology.node_rank={host - 1}", "--cluster", *arguments)
    variables = {"PYTHONPATH": str(folder / "without"), **variables}
    return hosts.start(host, "-m", "packtrain", *given, cwd=folder, env=variables)


@pytest.fixture
def slow_link(hosts: TwoHosts) -> Iterator[None]:
    """Lets host 2 send no more than 15 MB a second. Skips the test where the kernel cannot."""
    if shutil.which("tc") is None:
        pytest.skip("there is no tc (iproute2)")
    limit = ["tbf", "rate", "120mbit", "burst", "32kb", "latency", "400ms"]
    queue = ["tc", "-n", hosts.space(2), "qdisc"]
    done = subprocess.run([*queue, "replace", "dev", INTERFACE, "root", *limit], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no token bucket: {done.stderr.strip()}")
    yield
    subprocess.run([*queue, "del", "dev", INTERFACE, "root"], check=True)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("slow_link")
def test_what_differs_and_a_slow_pair_are_named_without_any_secret(hosts: TwoHosts, folder: Path) -> None:
    (folder / "other.jsonl").write_text((folder / "data.jsonl").read_text() * 2)
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_pl4ntedpl4nted42", "PYTHONPATH": ""}
    second = env(hosts, 2, folder, f"data.train={folder / 'other.jsonl'}", **given)
    first = env(hosts, 1, folder, "--json", HF_TOKEN="hf_0ther0ther0ther42", PYTHONPATH="")
    assert both([first, second]) == [3, 3], first.text
    found = json.loads(first.output.read_text())
    assert list(found["nodes"]) == ["n1", "n2"] and found["missing"] == []
    differences = {one["what"]: one for one in found["differences"]}
    assert differences["data.train"]["status"] == "fail"
    assert [one["value"] for one in differences["NCCL_DEBUG"]["values"]] == ["nothing", "INFO"]
    assert "HF_TOKEN" not in differences
    assert not any(secret in first.text + second.text for secret in ("pl4nted", "0ther0"))
    (pair,) = found["all_reduce"]["pairs"]
    assert pair["status"] == "slow" and 0 < pair["mib_per_s"] < 20, found["all_reduce"]
    assert all(one["mib_64_ms"] > 0 for one in found["all_reduce"]["nodes"].values()), found["all_reduce"]  # together
    assert any(one["name"] == "all-reduce" and one["nodes"] == ["n1", "n2"] for one in found["checks"])
    assert "n1 shows the comparison" in second.text


def test_an_address_that_leads_nowhere_is_named_in_time_on_each_side(hosts: TwoHosts, folder: Path) -> None:
    hosts.name_resolves(2, "n1", NOBODY)
    first, second = (env(hosts, host, folder, f"topology.join_timeout={LIMIT_S}") for host in (1, 2))
    assert both([first, second]) == [4, 4]
    assert "machine 1: did not connect to n1 (n1:29500)" in first.text and "1 of 2 machines: n1" in first.text
    assert "machine 0 could not be reached at n1:29500 for" in second.text
    assert "does a firewall let the port through?" in second.text
    assert max(first.took(), second.took()) < LIMIT_S + LAST_S


def test_an_all_reduce_over_the_wrong_interface_fails_within_a_minute(hosts: TwoHosts, folder: Path) -> None:
    # on one machine alone gloo finds the way by the other's address
    wrong = {"PYTHONPATH": "", "GLOO_SOCKET_IFNAME": "lo"}
    second, first = env(hosts, 2, folder, **wrong), env(hosts, 1, folder, **wrong)
    assert both([first, second]) == [3, 3], first.text
    assert "All-reduce: failed (over gloo: n1 and n2: " in first.text and "n1 and n2: dead\n" in first.text
    assert max(first.took(), second.took()) < 60 + LAST_S


def test_a_name_server_that_does_not_answer_is_warned_of(hosts: TwoHosts, folder: Path) -> None:
    """Frames to its address go to a machine that is not there."""
    (folder / "resolv.conf").write_text(f"nameserver {NOBODY}\n")
    nobody = ["neigh", "replace", NOBODY, "lladdr", "02:00:00:00:00:99", "dev", INTERFACE]
    subprocess.run(["ip", "-n", hosts.space(1), *nobody], check=True)
    script = "from packtrain.diagnose import env; print(env.check_all(*env.gather(lambda: None)))"
    inside = f'mount --bind resolv.conf /etc/resolv.conf && exec {sys.executable} -c "{script}"'
    given = {"PYTHONPATH": f"{folder / 'without'}:{ROOT}"}
    asked = hosts.start(1, "bash", "-c", inside, cwd=folder, env=given, python=False)
    assert asked.wait() == 0, asked.text
    assert "name='name-server', status='warn'" in asked.text
