"""The wheel is all that a user needs; .ci/run runs the command of the README."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from io import StringIO
from pathlib import Path

import pytest
import yaml
from readme_renderer import markdown

from packtrain import __version__
from tests import wheels

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("configs", "recipes", "slurm", "deploy")


def git_files(*folders: str) -> set[str]:
    """Files of the checkout that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, in a folder with the sdist that it was made from."""
    return wheels.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built)


def test_the_sdist_has_what_builds_and_runs_and_no_tests(built: Path) -> None:
    with tarfile.open(built.with_name(f"packtrain-{__version__}.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"}
    assert names == git_files("packtrain", *SHIPPED) | files | {"PKG-INFO"}


def test_the_wheel_has_every_module_config_and_recipe_nothing_else_and_the_version_the_command_and_the_licence(wheel):
    wanted = git_files("packtrain") | {f"packtrain/_shipped/{name}" for name in git_files(*SHIPPED)}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted
    info = f"packtrain-{__version__}.dist-info"
    assert "packtrain = packtrain.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


def test_pypi_shows_the_readme_and_each_of_its_links_leads_to_a_file_of_this_release(wheel) -> None:
    metadata = BytesParser().parsebytes(wheel.read(f"packtrain-{__version__}.dist-info/METADATA"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    warnings = StringIO()
    text = wheel.read(f"packtrain-{__version__}.dist-info/METADATA").decode().partition("\n\n")[2]
    page = markdown.render(text, stream=warnings)
    assert page is not None and not warnings.getvalue()
    assert "<table>" in page and "<pre" in page
    assert "pip install packtrain " in text and "install -e .  " not in text
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert len(links) > 30 and all(link.startswith(("https://", "#user-content-")) for link in links), links
    ours = [
        re.fullmatch(r"https://[\w.]+/packtrain/packtrain/(?:blob/)?v([\d.]+)/([^#]*)(?:#.*)?", one) for one in links
    ]
    found = [(one[1], one[2]) for one in ours if one]
    assert len(found) > 30
    assert [one for one in found if one[0] != __version__ or not (ROOT / one[1]).is_file()] == []


def test_every_place_that_names_the_version_has_the_same() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released[0] == (__version__, str(citation["date-released"])) and citation["version"] == __version__


def test_an_installed_wheel_plans_a_recipe_in_an_empty_folder(built: Path, tmp_path: Path) -> None:
    """tests/train/test_quickstart_run.py trains with it."""
    bin, folder = wheels.install_alone(built, tmp_path / "venv"), tmp_path / "empty"
    folder.mkdir()
    assert wheels.place_of_packtrain(bin, folder).is_relative_to(tmp_path)
    assert wheels.run(bin, "packtrain", "--version", folder=folder).stdout == f"packtrain {__version__}\n"
    planned = wheels.run(bin, "packtrain", "plan", "recipes/quickstart-sft.yaml", "peft=lora", folder=folder)
    assert planned.returncode == 0 and "quickstart" in planned.stdout, planned.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_an_empty_environment_takes_all_it_needs_from_the_registry_and_trains(built, kind, tmp_path) -> None:
    faulthandler.cancel_dump_traceback_later()  # pyproject.toml ends pytest before the limit above
    (file,) = built.parent.glob(f"*.{kind}")
    bin, folder = tmp_path / "venv/bin", tmp_path / "empty"
    folder.mkdir()
    try:
        subprocess.run([sys.executable, "-m", "venv", bin.parent], check=True)
        subprocess.run([bin / "pip", "install", "--quiet", file], check=True)
        assert wheels.place_of_packtrain(bin, folder).is_relative_to(tmp_path)
        ran = wheels.run(bin, "packtrain", "sft", "recipes/quickstart-sft.yaml", "trainer.max_steps=2", folder=folder)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert (folder / "runs/quickstart-sft/final/model.safetensors").is_file()
    finally:
        shutil.rmtree(bin.parent, ignore_errors=True)  # gigabytes


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
