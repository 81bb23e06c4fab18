"""packtrain's other commands on a machine with GPUs: what it is, the proof on a loaded model, and how fast each mode is."""

from __future__ import annotations

import json

import pytest
import yaml
from running import base_config

from tests.standin import checks

FLASH = "torch's varlen_attn"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a config."""
    folder = tmp_path_factory.mktemp("commands")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base_config(folder)))
    return str(path)


def env(gpus, *arguments: str) -> str:
    """What `packtrain env` prints on a machine with two GPUs."""
    return gpus.call(checks.takes_its_time_over_env, devices=2, env={"ARGUMENTS": " ".join(arguments)}).stdout


def test_env_shows_the_gpus_and_the_kernel_that_attends(gpus, run: str) -> None:
    report = json.loads(env(gpus, run, "--json"))
    assert [device["index"] for device in report["devices"]] == [0, 1] and "H100" in report["devices"][0]["name"]
    assert report["attention"]["flash"]["available"] and FLASH in report["attention"]["flash"]["why"]
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert {found[name] for name in ("gpu-driver", "torch", "gpus", "gpu-health", "gpu-use", "attention")} == {"ok"}
    assert "fail" not in found.values(), report["checks"]


@pytest.mark.exhaustive
def test_env_in_words(gpus, run: str) -> None:
    said = env(gpus, run)
    assert FLASH in said and "0 failed" in said and said.count("H100 80GB") >= 2


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_verify_proves_flash(gpus, run: str, devices: int) -> None:
    changes = ["strategy=fsdp2"] if devices > 1 else []
    report = json.loads(gpus.packtrain("verify", run, *changes, "--json", devices=devices, ranks=devices).stdout)
    assert (report["verdict"], report["backend"]) == ("exact", "flash")
    isolation = report["isolation"]
    assert max(isolation["max_abs_diff_before"], isolation["max_abs_diff_after"]) <= isolation["tolerance"]


@pytest.mark.exhaustive  # it measures for seconds on end
def test_bench_measures_each_mode_with_flash(gpus, run: str) -> None:
    report = json.loads(gpus.packtrain("bench", run, "--seconds", "5", "--json").stdout)
    measured = [trial for trial in report["trials"] if trial["tokens_per_second"]]
    assert {trial["mode"] for trial in measured} == {"padding", "padding_free", "packed"}
    assert all(trial["mfu"] > 0 and trial["peak_memory"] > 0 for trial in measured)
    assert report["attention"].startswith("flash") and "H100" in report["device"] and report["precision"]
    assert set(gpus.touched()[0]) == {0} and gpus.flash_calls(0)[1]
