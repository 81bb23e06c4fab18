"""The image: what its locks pin is what pyproject.toml asks for, with hashes, and its steps make an environment that trains."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("deepspeed", "tensorboard", "s3", "quantize", "fp8")


def pinned(name: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by package."""
    blocks = re.split(r"^(?=[a-z0-9])", (ROOT / "deploy" / name).read_text(), flags=re.M)[1:]
    found = [(re.match(r"([\w.-]+)(?:\[.*?\])?==([\w.+]+)", block), block.count("--hash=sha256:")) for block in blocks]
    return {match[1]: (match[2], hashes) for match, hashes in found if match}


def need_pypi() -> None:
    try:
        socket.create_connection(("pypi.org", 443), timeout=5).close()
    except OSError:
        pytest.skip("PyPI is not reachable")


def test_the_locks_pin_what_the_project_asks_for_each_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch, others = pinned("torch-cuda.lock"), pinned("requirements.lock")
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= set(torch) and not set(torch) & set(others)
    assert all(hashes for _, hashes in {**torch, **others}.values())
    asked = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, asked):
        version = {**torch, **others}[requirement.name.lower().replace("_", "-")][0]
        assert requirement.specifier.contains(version), f"{requirement}, and the lock has {version}: deploy/lock.sh"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("lock", ["requirements.lock", "torch-cuda.lock"])
def test_the_locks_can_be_installed(lock: str, python: str, tmp_path: Path) -> None:
    """What they pin is there for these Pythons on Linux; deploy/install.sh, below, also compares the hashes."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or pytest.skip("uv is not installed")
    need_pypi()
    platform = ("--python-version", python, "--python-platform", "x86_64-manylinux_2_28")
    given = ("--require-hashes", "--no-deps", "-r", str(ROOT / "deploy" / lock), "--target", str(tmp_path))
    command = [uv, "pip", "install", "--dry-run", *platform, *given]
    system_certificates = {"UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}  # as pip's; a proxy may have its own
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | system_certificates)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n + ") == len(pinned(lock))


def test_the_dockerfile_runs_these_steps_as_no_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    steps = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    assert steps[:2] == ["ARG", "FROM"] and "FROM ${BASE}" in lines and "USER trainer" in lines
    assert any("deploy/install.sh /opt/venv" in line for line in lines)
    assert any(line.startswith("HEALTHCHECK") and "packtrain env" in line for line in lines)
    kept = (ROOT / ".dockerignore").read_text().split("\n!")
    assert {"packtrain", "configs", "recipes", "slurm", "deploy", "pyproject.toml"} <= {one.strip() for one in kept}


def lend(venv: Path, *packages: str) -> None:
    """Have an environment that will be made in `venv` find packages of this one."""
    import torch

    there = Path(torch.__file__).parents[1]
    lent = venv.with_name("lent")
    lent.mkdir()
    for found in (one for name in packages for one in (there / name, *there.glob(f"{name}-*.dist-info"))):
        (lent / found.name).symlink_to(found)
    site = venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (site / "lent.pth").write_text(f"{lent}\n")


@pytest.mark.timeout(1200)  # as long as an index may take for 300 MB
def test_its_steps_make_an_environment_that_trains(tmp_path: Path) -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("torch for CUDA cannot be lent without the 20 packages it needs")
    need_pypi()
    tree, venv = tmp_path / "tree", tmp_path / "venv"
    tree.mkdir()
    for name in re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.M):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)
    here = f"torch=={torch.__version__.partition('+')[0]}"
    lend(venv, "torch", "torchgen", "functorch")  # a gigabyte that no file of deploy/ pins for CPUs: pip finds it there
    env = {**os.environ, "TORCH": here, "PYTHON": sys.executable, "PIP_NO_COMPILE": "0"}  # which turns compiling off
    try:
        subprocess.run([tree / "deploy/install.sh", venv], env=env, check=True, timeout=1000)
        given = ("sft", str(tree / "recipes/quickstart-sft.yaml"), "trainer.max_steps=2")
        done = subprocess.run([venv / "bin/packtrain", *given], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        shutil.rmtree(venv, ignore_errors=True)  # 1.5 GB
