"""CI on GitHub: valid workflows over the cells of .ci/matrix, and a release whose tag, version and notes agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from packtrain import __version__

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS: dict[str, dict[Any, Any]] = {file.stem: yaml.safe_load(file.read_text()) for file in FOLDER.glob("*.yml")}
JOBS = {(name, job): body for name, workflow in WORKFLOWS.items() for job, body in workflow["jobs"].items()}
STEPS = [step for job in JOBS.values() for step in job.get("steps", [])]


def test_ci_has_the_cells_of_the_matrix_and_runs_each() -> None:
    cell = WORKFLOWS["ci"]["jobs"]["cell"]
    cells = subprocess.run([sys.executable, str(ROOT / ".ci" / "matrix"), "--list"], capture_output=True, text=True)
    assert cell["strategy"]["matrix"]["cell"] == cells.stdout.split() != []
    assert cell["strategy"]["fail-fast"] is False
    assert cell["steps"][-1]["run"] == ".ci/matrix ${{ matrix.cell }}"
    assert ".ci/run" in [step.get("run") for step in WORKFLOWS["ci"]["jobs"]["readme"]["steps"]]


def test_github_accepts_the_workflows() -> None:
    pytest.importorskip("check_jsonschema")
    files = [str(file) for file in FOLDER.glob("*.yml")]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_jobs_may_read_end_in_time_and_use_released_actions() -> None:
    assert {"ci", "docs", "release"} <= {*WORKFLOWS}
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert [job for job, body in JOBS.items() if "uses" not in body and "timeout-minutes" not in body] == []
    assert [
        used
        for step in STEPS
        if (used := step.get("uses")) and not re.search(r"@((release/)?v\d+|[0-9a-f]{40})$", used)
    ] == []
    may_write = {job: {*body.get("permissions", {})} - {"contents"} for job, body in JOBS.items()}
    assert (
        may_write["release", "publish"] == {"id-token"} and JOBS["release", "publish"]["environment"]["name"] == "pypi"
    )


@pytest.mark.parametrize(
    "tag, heading, code",
    [
        (f"v{__version__}", f"## {__version__} (1 December 2026)", 0),
        (f"v{__version__}", f"## {__version__} (not yet released)", 1),
        (f"v{__version__}", "## 0.0.1", 1),
        ("v9.9.9", f"## {__version__}", 1),
    ],
)
def test_a_release_has_the_tag_of_its_version_and_notes(tmp_path: Path, tag: str, heading: str, code: int) -> None:
    step = next(one for one in JOBS["release", "build"]["steps"] if "GITHUB_REF_NAME" in one.get("run", ""))
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- New.\n\n## 0.0.0\n\n- Old.\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho {__version__}\n")
    python.chmod(0o755)
    env = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    if not code:
        assert (tmp_path / "notes.md").read_text().split() == ["-", "New."]


@pytest.mark.parametrize(
    "uv, pytest_says, ends",
    [
        ("exit 2", "", "NOT run: no Python 3.12"),
        ("", "exit 1", "pytest failed: 1 failed, 2 passed"),
        ("", "", "passed: 2 passed"),
    ],
)
def test_a_cell_that_fails_or_has_no_interpreter_fails_the_matrix(
    tmp_path: Path, uv: str, pytest_says: str, ends: str
) -> None:
    (tmp_path / ".ci").mkdir()
    for name in (".ci/matrix", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    counts = "1 failed, 2 passed" if pytest_says else "2 passed"
    tools = {
        "venv-3.12/bin/python": f'[ "$1" = -m ] || exec {sys.executable} "$@"\necho "== {counts} in 0.1s =="\n{pytest_says}'
    }
    for name, script in (tools | {"bin/uv": uv}).items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    command = [sys.executable, str(tmp_path / ".ci" / "matrix"), "--venvs", f"{tmp_path}/venv-", "3.12"]
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert f"| {ends} |" in ran.stdout.splitlines()[-1]
    assert ran.returncode == (0 if ends.startswith("passed") else 1)
