"""`packtrain env` as a process: what is printed where, exit codes, and tools that are missing, broken or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import packtrain

CONFIG = "model: {path: owner/model}\ndata: {train: owner/data}\nbatch: {examples_per_step: 32}\n"
SECRETS = ("pl4nted-token", "pl4nted-pw", "hf_pl4ntedpl4nted42", "pl4nted-jwt", "pl4nted-key")
NO_TORCH = "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
TORCH = """
import types
from torch import cuda
__version__, version = "2.13.0", types.SimpleNamespace(cuda="12.8")
print("noise on stdout")
"""
CUDA = """
import time
def device_count():
    open("cuda-asked", "w").close()
    time.sleep(250)
"""
PATIENT = """
import sys
from packtrain.diagnose import env
env.TORCH_S = env.DRIVER_S = env.FOLDER_S = 100.0
from packtrain.cli import main
sys.argv[0] = "packtrain"
main()
"""


def env(
    folder: Path, *arguments: str, cuda: str = "", patient: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`packtrain env` in `folder`, with a torch that cannot be imported (the real one takes seconds), or one that says
    what a torch for CUDA does, with `cuda` as its torch.cuda. Unless `patient`, no more time is given than to users:
    a machine that has other things to do then says less."""
    broken = folder / "without"
    (broken / "torch/cuda").mkdir(parents=True, exist_ok=True)
    (broken / "torch/__init__.py").write_text(TORCH if cuda else NO_TORCH)
    (broken / "torch/cuda/__init__.py").write_text(cuda)
    hidden = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "NCCL_IB_HCA")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = os.pathsep.join((str(broken), str(Path(packtrain.__file__).parents[1])))
    places = {"PYTHONPATH": paths, "HF_HOME": str(folder / "hf"), "PATH": f"{broken}:{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, *(["-c", PATIENT] if patient else ["-m", "packtrain"]), "env", *arguments],
        cwd=folder,
        env={**environment, **places, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """The report's checks by name; stdout must be one JSON document."""
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def driver(folder: Path, script: str) -> None:
    """Has nvidia-smi do what the shell script says."""
    (folder / "without").mkdir(exist_ok=True)
    (program := folder / "without/nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_the_report_is_a_list_to_paste_then_checks_and_a_failed_one_ends_with_exit_code_3(tmp_path: Path) -> None:
    done = env(tmp_path, COLUMNS="80")
    assert (done.returncode, done.stderr) == (3, "")
    facts, checked = done.stdout.split("\nChecks:\n")
    for line in ("  platform: ", "    trl: ", "folders:"):
        assert f"\n{line}" in facts
    pasted = facts.partition("\n\nhost:")[0].splitlines()  # the block of `trl env` first
    assert [line.partition(":")[0] for line in (pasted[3], pasted[-1])] == ["- Platform", "- vLLM version"]
    assert "\nfail  torch " in checked and "libcudart.so.13" in checked and "→ pip install" in checked
    assert [line for line in checked.splitlines() if len(line) > 80 and " " in line[26:].strip()] == []
    assert "1 failed" in checked.splitlines()[-1] and "Traceback" not in done.stdout


def test_without_any_tool_the_report_is_one_json_document_with_the_promised_keys(tmp_path: Path) -> None:
    done = env(tmp_path, "--json", PATH=str(tmp_path / "nothing"))
    report = json.loads(done.stdout)
    assert {"versions", "devices", "attention", "checks"} <= set(report) and done.stderr == ""
    assert report["versions"]["transformers"] and "torch" in report["versions"] and report["devices"] == []
    assert set(report["attention"]) >= {"flash", "segmented", "per_document"}
    assert all({"available", "why"} <= set(backend) for backend in report["attention"].values())
    for check in report["checks"]:
        assert set(check) == {"name", "status", "found", "fix"}
        assert check["status"] in ("ok", "warn", "fail") and check["found"]
        assert bool(check["fix"]) == (check["status"] != "ok"), check


def test_planted_secrets_are_nowhere(tmp_path: Path) -> None:
    token, password, form, jwt, key = SECRETS
    (tmp_path / "run.yaml").write_text(CONFIG)
    variables = {
        "HF_TOKEN": token,
        "http_proxy": f"http://joe:{password}@proxy:3128",
        "PIP_INDEX_URL": f"https://joe:{password}@pypi.example/simple",
        "NCCL_DEBUG_FILE": f"/tmp/{token}/{form}",
        "SLURM_JWT": jwt,
        "SLURM_JOB_ID": "7",
        "GLOO_SOCKET_IFNAME": f"http://joe:{key}@h",
    }
    for arguments in (["run.yaml"], ["run.yaml", "--json"]):
        done = env(tmp_path, *arguments, **variables)
        assert done.returncode == 3 and "NCCL_DEBUG_FILE" in done.stdout and "http://***@proxy:3128" in done.stdout
        assert not any(secret in done.stdout + done.stderr for secret in SECRETS)


def test_a_machine_whose_driver_hangs_in_every_way_is_described_in_ten_seconds(tmp_path: Path) -> None:
    driver(tmp_path, "exec sleep 250")
    began = time.monotonic()
    done = env(tmp_path, "--json", cuda=CUDA, patient=False)
    taken = time.monotonic() - began
    found = checks(done)
    assert found["gpu-driver"]["status"] == "fail" and "no answer" in found["torch"]["found"]
    if (tmp_path / "cuda-asked").exists():  # it had said all else before
        assert "torch 2.13.0 for CUDA 12.8" in found["torch"]["found"]
    assert taken < 10 + 30  # ten, and what a machine with other things to do may need for them


def test_a_config_is_checked_as_everywhere_and_its_folder_looked_at(tmp_path: Path) -> None:
    bad = env(tmp_path, "trainer.output_dir=x", "optim.lr=1")
    assert (bad.returncode, bad.stdout) == (2, "") and "optim.lr" in bad.stderr
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = env(tmp_path, "run.yaml", "trainer.output_dir=/proc/run", "strategy=zero2", "--json")
    found = checks(done)
    assert done.returncode == 3 and found["output-folder"]["status"] == "fail"
    assert "/proc/run" in found["output-folder"]["found"]
    assert "strategy=zero2" in found["run"]["found"] and "data.cache_dir" in done.stdout
