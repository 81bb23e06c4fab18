"""Backends of another package do everything that packtrain's own do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from running import base_config, packtrain

from packtrain import registry
from packtrain.config import keys
from tests.train import forked

HANDBOOK = [Path(page).read_text() for page in sorted(Path(__file__).parents[2].glob("docs/extending*.md"))]
MORE_BACKENDS = """
from packtrain.attention.spec import Backend

LEAKY = Backend(name="leaky", run="looped.leaky")
UNREADY = Backend(name="unready", run="looped.not_there")
"""
LEAKY = """
from looped.run import attend
from packtrain.attention.backends import AttentionFunction
from packtrain.attention.flattened import registered
from packtrain.packing.segments import Segments


@registered("leaky")
def attend_to_all(module, query, key, value, segments, window, **given):
    return attend(module, query, key, value, None, segments=Segments((segments.tokens,)), **given)[0]


ATTENTION = AttentionFunction("leaky")
"""


def from_handbook(package: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Read a package of docs/extending.md: its modules by file, its entry points by group."""
    pages = "\n".join(HANDBOOK)
    modules = dict(re.findall(rf"```python\n# ({package}/\w+\.py)\n(.*?)```", pages, re.S))
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", pages, re.S)]
    groups = [block["project"]["entry-points"] for block in blocks]
    return modules, next(group for group in groups if f'"{package}.' in json.dumps(group))


def install(folder: Path, modules: dict[str, str], entry_points: dict[str, dict[str, str]]) -> dict[str, str]:
    """Leave a package in `folder` as pip would. Returns the variables by which Python finds it."""
    info = folder / "made_up-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 0.1\n")
    lines = [
        line
        for group, entries in entry_points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, code in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    return {"PYTHONPATH": str(folder)}


def beside_it(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """Run the command in a process that has read PYTHONPATH.

    It is forked from one that has already looked for things: it forgets them.
    """
    sys.path.insert(0, environment["PYTHONPATH"])
    for remembered in (registry._find, keys.keys_of, keys.keys):
        remembered.cache_clear()
    forked.run(arguments, environment, *rest)


def from_nothing(*arguments: str, cwd: Path, env: dict[str, str]) -> str:
    """Return the output of `packtrain ARGUMENTS` in a process that Python starts."""
    command = [sys.executable, "-m", "packtrain", *arguments]
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with run.yaml, and the variables that let Python find the package of backends."""
    folder = tmp_path_factory.mktemp("backends")
    modules, entry_points = from_handbook("looped")
    modules |= {"looped/more.py": MORE_BACKENDS, "looped/leaky.py": LEAKY}
    more = {name: f"looped.more:{name.upper()}" for name in ("leaky", "unready")}
    entry_points["packtrain.attention"].update(more)
    config = base_config(folder, trainer={"max_steps": 2, "checkpoint_every": 2})
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder, install(folder / "site", modules, entry_points)


def test_a_backend_of_another_package_plans_proves_trains_and_resumes(backends: tuple[Path, dict[str, str]]) -> None:
    folder, env = backends
    asked = ("run.yaml", "model.attention=looped")
    assert "run.yaml model.attention=looped" in from_nothing("plan", *asked, cwd=folder, env=env)
    listed = json.loads(from_nothing("env", "--json", cwd=folder, env=env))["attention"]
    assert listed["looped"] == {"available": True, "why": "it needs no kernel"}
    report = json.loads(packtrain("verify", *asked, "--json", cwd=folder, env=env, begin=beside_it).stdout)
    assert report["verdict"] == "exact" and report["backend"] == "looped"
    packtrain("sft", *asked, cwd=folder, env=env, begin=beside_it)
    resumed = ("trainer.max_steps=3", "trainer.resume=run/checkpoints/step-000002", "trainer.output_dir=longer")
    said = packtrain("sft", *asked, *resumed, cwd=folder, env=env, begin=beside_it).stdout
    assert "resuming from step-000002" in said
    summary = json.loads((folder / "longer/summary.json").read_text())
    assert summary["steps"] == 3 and summary["attention"] == "looped (asked for)"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("leaky", 3, "differ from each alone"), ("unready", 2, "No module named 'looped.not_there'")],
)
def test_a_backend_that_leaks_or_cannot_be_imported_does_not_train(
    name: str, code: int, words: str, backends: tuple[Path, dict[str, str]]
) -> None:
    folder, env = backends
    asked = (f"model.attention={name}", f"trainer.output_dir={name}")
    result = packtrain("sft", "run.yaml", *asked, expect=code, cwd=folder, env=env, begin=beside_it)
    assert words in " ".join(result.stderr.split()) and not (folder / name / "final").exists()
