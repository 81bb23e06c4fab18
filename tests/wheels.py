"""A wheel built from the sdist and installed into a new environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path) -> Path:
    """Write the sdist, and a wheel made from it. Return the wheel.

    The build backend is the installed one: nothing is downloaded.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_alone(wheel: Path, venv: Path) -> Path:
    """Install the wheel in a new environment, and return its bin folder.

    A .pth file adds the dependencies of this environment. Its editable packtrain stays out: Python ignores .pth files in folders
    that a .pth file adds.
    """
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or pytest.skip("uv is not installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    given = ("--quiet", "--offline", "--no-deps", "--python", venv / "bin/python", wheel)
    subprocess.run([uv, "pip", "install", *given], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text("\n".join(one for one in sys.path if Path(one).name == "site-packages"))
    return venv / "bin"


def run(bin: Path, *command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `bin` in `folder`, without a GPU or other variables."""
    env = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(folder), "PACKTRAIN_CACHE": str(folder / "cache")}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    words = [str(bin / command[0]), *command[1:]]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)


def place_of_packtrain(bin: Path, folder: Path) -> Path:
    """Return the file of the packtrain that Python of `bin` imports in `folder`."""
    return Path(run(bin, "python", "-c", "import packtrain; print(packtrain.__file__)", folder=folder).stdout.strip())
