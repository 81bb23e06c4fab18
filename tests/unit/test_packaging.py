"""The wheel is all that a user needs, and .ci/run runs what the README says."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from packtrain import __version__

ROOT = Path(__file__).resolve().parents[2]


def git_files(*folders: str) -> set[str]:
    """Files of the checkout that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built with the build backend of this environment (no download)."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_has_every_module_config_and_recipe_nothing_else_and_the_version_the_command_and_the_licence(wheel):
    shipped = git_files("configs", "recipes", "slurm", "deploy")
    wanted = git_files("packtrain") | {f"packtrain/_shipped/{name}" for name in shipped}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted
    info = f"packtrain-{__version__}.dist-info"
    assert "packtrain = packtrain.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


def test_an_unpacked_wheel_finds_its_recipes_from_any_folder(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    code = (
        "import packtrain; from packtrain.config.compose import load_config\n"
        "print(packtrain.__file__); print(load_config('recipes/quickstart-sft.yaml', ['peft=lora']).peft.kind)"
    )
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{code}"]
    ran = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=True)
    file, kind = ran.stdout.split()
    assert Path(file).is_relative_to(tmp_path) and kind == "lora"


def test_ci_runs_the_test_command_of_the_readme_word_for_word(tmp_path):
    """With a README of its own beside it, .ci/run runs that README's test command, and fails with its exit code."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    readme = (
        "<!-- train -->\n```bash\necho no\n```\n<!-- test -->\n```bash\necho one &&\n  exit 7 && echo never\n```\nend\n"
    )
    (tmp_path / "README.md").write_text(readme)
    ran = subprocess.run(["bash", str(tmp_path / ".ci" / "run")], capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("one\n", 7), ran.stderr


@pytest.mark.parametrize("failing", ["", "ruff", "pyright", "pytest"])
def test_the_check_of_the_code_fails_with_any_of_its_parts(tmp_path, failing):
    (tmp_path / ".ci").mkdir()
    for name in (".ci/run", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    tools = tmp_path / ".venv-test" / "bin"
    tools.mkdir(parents=True)
    for name in ("python3", "pip", "ruff", "pyright", "python"):
        part = "pytest" if name == "python" else name
        (tools / name).write_text(f"#!/bin/sh\nexit {7 if part == failing else 0}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(["bash", str(tmp_path / ".ci" / "run")], env={**os.environ, "PATH": path})
    assert ran.returncode == (7 if failing else 0)


@pytest.mark.parametrize(
    "mark, ends",
    [
        ("train", "packtrain sft recipes/quickstart-sft.yaml"),
        ("test", "pytest -n 4 --dist loadfile && wait $!"),  # for the types, which are checked meanwhile
    ],
)
def test_the_readmes_two_commands_each_make_their_own_environment(mark, ends):
    block = (ROOT / "README.md").read_text().split(f"<!-- {mark} -->")[1].split("```")[1].removeprefix("bash\n").strip()
    assert block.startswith("python3 -m venv .venv") and block.endswith(ends)
    environment = block.split()[3]
    assert f"{environment}/bin/pip install " in block and " torch==" in block
