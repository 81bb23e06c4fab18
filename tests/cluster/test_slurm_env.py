"""`packtrain env --cluster` in a job of a real Slurm: it starts itself on every machine of the allocation."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.slurm import Slurm, slurm
from tests.cluster.test_two_hosts_env import NO_TORCH
from tests.train.running import base_config

pytestmark = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="the pretended GPUs would be taken for real ones"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as up:
        yield up


def test_one_command_in_an_allocation_compares_all_of_its_machines(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(NO_TORCH)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base_config(tmp_path, topology={"gpus_per_node": 1})))
    command = [sys.executable, "-m", "packtrain", "env", "run.yaml", "--cluster", "--json"]
    with_paths = ["env", f"PYTHONPATH={tmp_path}", *command]
    done = cluster.run("salloc", "--nodes=2", "--cpus-per-task=2", *with_paths, cwd=tmp_path, expect=None)
    found = json.loads(done.stdout)
    assert set(found["nodes"]) == {"n1", "n2"} and found["missing"] == [], done.stderr
    assert found["all_reduce"]["status"] == "skipped" and "torch takes seconds" in found["all_reduce"]["found"]
    assert not [one for one in found["differences"] if one["status"] == "fail"], found["differences"]
    failed = [one["name"] for one in found["checks"] if one["status"] == "fail"]
    assert done.returncode == (3 if failed else 0), (failed, done.stderr)
