"""The tests that need a CUDA device (tests/gpu) hold on a stand-in, and a machine with two GPUs trains from the command on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from running import Run, base_config

from tests.standin import checks
from tests.standin import gpus as standin

ROOT = Path(__file__).resolve().parents[2]


def on_gpus(
    devices: int, *command: str, cwd: Path = ROOT, report: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command on a machine with so many devices, from nothing."""
    try:
        environment = {**os.environ, **standin.variables(devices, report), "OMP_NUM_THREADS": "1"}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    environment.pop("DS_ACCELERATOR", None)
    return subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(["test_waits.py"], id="waits", marks=pytest.mark.exhaustive),
        # layers are compiled for real devices alone
        pytest.param(["test_models.py", "test_kernels.py", "-k", "not compiled"], marks=pytest.mark.exhaustive),
    ],
)
def test_what_holds_on_a_gpu_holds_here(tests: list[str]) -> None:
    files = [f"tests/gpu/{one}" if one.endswith(".py") else one for one in tests]
    result = on_gpus(1, "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_step_waits_for_nothing(gpus) -> None:
    """Of all cases that of the recipes."""
    said = gpus.call(checks.passes_tests, env={"ARGUMENTS": "tests/gpu/test_waits.py -k packed-sft"}).stdout
    assert "1 passed" in said, said


@pytest.mark.exhaustive
def test_a_launch_takes_every_gpu_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base_config(tmp_path)))
    touches = tmp_path / "touches.jsonl"
    result = on_gpus(2, "packtrain", "sft", "run.yaml", cwd=tmp_path, report=touches)
    assert result.returncode == 0, result.stdout + result.stderr
    run = Run(tmp_path / "run")
    assert "on 2 processes" in (run.folder / "logs" / "rank-00000.log").read_text()
    assert run.summary["attention"].startswith("flash")
    lines = [line for line in map(json.loads, touches.read_text().splitlines()) if "device" in line]
    assert {(line["rank"], line["device"]) for line in lines} == {(0, 0), (1, 1)}
