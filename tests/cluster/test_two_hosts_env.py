"""`packtrain env --cluster` on two network hosts: what differs, a link that is slow, a machine that is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster.two_hosts import INTERFACE, Running, TwoHosts, both
from tests.train.running import base_config

NO_TORCH = "raise ImportError('torch takes seconds, and is not asked for here')\n"
LIMIT_S = 8
LAST_S = 30  # for the start and for the lines at the end, on a busy machine


@pytest.fixture
def hosts(made: TwoHosts) -> Iterator[TwoHosts]:
    yield made
    if shutil.which("tc"):
        subprocess.run(["tc", "-n", made.space(2), "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True)
    made.assert_empty()


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


def slowed(hosts: TwoHosts) -> None:
    """Lets host 2, which is not asked to measure, send no more than 5 MB a second. Skips the test where the kernel cannot."""
    if shutil.which("tc") is None:
        pytest.skip("there is no tc (iproute2)")
    limit = ["tbf", "rate", "40mbit", "burst", "32kb", "latency", "400ms"]
    command = ["tc", "-n", hosts.space(2), "qdisc", "replace", "dev", INTERFACE, "root", *limit]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no token bucket: {done.stderr.strip()}")


def test_what_differs_and_a_slow_link_are_named_without_any_secret(hosts: TwoHosts, folder: Path) -> None:
    slowed(hosts)
    (folder / "other.jsonl").write_text((folder / "data.jsonl").read_text() * 2)
    second = env(
        hosts, 2, folder, f"data.train={folder / 'other.jsonl'}", NCCL_DEBUG="INFO", HF_TOKEN="hf_pl4ntedpl4nted"
    )
    first = env(hosts, 1, folder, "--json", HF_TOKEN="hf_0ther0ther0ther")
    assert both([first, second]) == [3, 3], first.text
    found = json.loads(first.output.read_text())
    assert list(found["nodes"]) == ["n1", "n2"] and found["missing"] == []
    differences = {one["what"]: one for one in found["differences"]}
    assert differences["data.train"]["status"] == "fail"
    assert [one["value"] for one in differences["NCCL_DEBUG"]["values"]] == ["nothing", "INFO"]
    assert all(one["value"].startswith("*** (") for one in differences["HF_TOKEN"]["values"])
    assert not any(secret in first.text + second.text for secret in ("pl4nted", "0ther0"))
    (link,) = found["links"]
    assert link["status"] == "slow" and 0 < link["mib_per_s"] < 20
    assert any(one["name"] == "link" and one["nodes"] == ["n1", "n2"] for one in found["checks"])
    assert "n1 shows the comparison" in second.text


@contextmanager
def closed(hosts: TwoHosts, host: int, *ports: int) -> Iterator[None]:
    """Has a host drop what comes in for these ports, as a firewall does. Skips the test where the kernel cannot."""
    rule = ["ip", "-n", hosts.space(host), "rule"]
    drops = [["iif", INTERFACE, "ipproto", "tcp", "dport", str(port), "blackhole", "pref", "1"] for port in ports]
    subprocess.run([*rule, "add", "lookup", "local", "pref", "2"], check=True)
    try:
        subprocess.run([*rule, "del", "pref", "0"], check=True)  # what is for this host itself comes first otherwise
        for one in drops:
            done = subprocess.run([*rule, "add", *one], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no rules by port: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run([*rule, "add", "lookup", "local", "pref", "0"], check=False)
        for _ in drops:
            subprocess.run([*rule, "del", "pref", "1"], capture_output=True)
        subprocess.run([*rule, "del", "pref", "2"], check=False)


def test_who_does_not_answer_is_named_in_time_on_each_side_and_the_firewall_between_them(
    hosts: TwoHosts, folder: Path
) -> None:
    with closed(hosts, 1, 29500, 29501):
        first, second = (env(hosts, host, folder, f"topology.join_timeout={LIMIT_S}") for host in (1, 2))
        assert both([first, second]) == [4, 4]
    assert "machine 1: did not connect to n1 (n1:29500)" in first.text and "1 of 2 machines: n1" in first.text
    assert "machine 0 could not be reached at n1:29500 for" in second.text
    assert "while port 22 there answers: a firewall keeps this machine from port 29500" in second.text
    assert "Open TCP port 29500 on machine 0" in second.text
    assert max(first.took(), second.took()) < LIMIT_S + LAST_S


def test_a_firewall_on_the_runs_port_is_told_from_a_dead_link(hosts: TwoHosts, folder: Path) -> None:
    limit = "topology.join_timeout=20"  # half of it is spent at the port that is closed
    with closed(hosts, 1, 29500), closed(hosts, 2, 29500):
        first, second = env(hosts, 1, folder, limit, "--json"), env(hosts, 2, folder, limit)
        assert both([first, second]) == [3, 3], first.text + second.text
    assert "machine 0 gives no answer at port 29500, but at 29501" in second.text
    found = json.loads(first.output.read_text())
    assert list(found["nodes"]) == ["n1", "n2"]
    assert [(one["from"], one["to"], one["port"], one["status"]) for one in found["ports"]] == [
        ("n1", "n2", 29500, "closed"),
        ("n2", "n1", 29500, "closed"),
    ]
    assert [one["status"] in ("ok", "slow") for one in found["links"]] == [True]
    assert found["all_reduce"]["found"] == "port 29500 of n1 is closed to n2"
    to_first, to_second = (
        [one for one in found["checks"] if one["name"] == "port" and one["nodes"][0] == name] for name in ("n1", "n2")
    )
    assert to_first[0]["status"] == "fail" and to_second[0]["status"] == "warn"
    said = "n2 cannot reach n1 at the run's port 29500 (no answer from n1:29500), while port "
    assert to_first[0]["found"].startswith(said) and "Open TCP port 29500 on n1" in to_first[0]["fix"]


def test_an_all_reduce_over_the_wrong_interface_fails_within_a_minute(hosts: TwoHosts, folder: Path) -> None:
    wrong = {
        "PYTHONPATH": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # on one machine alone gloo finds the way by the other's address
    second, first = env(hosts, 2, folder, **wrong), env(hosts, 1, folder, **wrong)
    assert both([first, second]) == [3, 3], first.text
    assert "All-reduce over each pair:\n\nn1 to n2: dead\n" in first.text
    assert "All-reduce over all of them: failed (over gloo: " in first.text
    assert "n1, n2: GLOO_SOCKET_IFNAME=lo, which reaches no other machine" in first.text
    assert max(first.took(), second.took()) < 60 + LAST_S
