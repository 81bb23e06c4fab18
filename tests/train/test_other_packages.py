"""Things of packtrain that another package brings, by entry points: they do all that packtrain's own do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import base_config, packtrain

from packtrain import registry
from packtrain.config import keys
from tests.train import forked

BACKENDS = """
from packtrain.attention.spec import Backend

LOOPED = Backend(name="looped", run="looped_run", why_not_shared="attends to each document by itself")
LEAKY = Backend(name="leaky", run="leaky_run")
UNREADY = Backend(name="unready", run="not_there")
"""
LOOPED = """
import torch
from torch.nn.functional import scaled_dot_product_attention

from packtrain.attention.backends import AttentionFunction
from packtrain.attention.flattened import registered


@registered("looped")
def attend(module, query, key, value, segments, window, *, scaling=None, dropout=0.0, **_):
    documents = zip(*(tensor.split(segments.lengths, dim=2) for tensor in (query, key, value)))
    how = {"is_causal": True, "scale": scaling, "dropout_p": dropout, "enable_gqa": True}
    outputs = [scaled_dot_product_attention(q, k, v, **how) for q, k, v in documents]
    return torch.cat(outputs, dim=2).transpose(1, 2)


ATTENTION = AttentionFunction("looped")
"""
LEAKY = """
from looped_run import attend
from packtrain.attention.backends import AttentionFunction
from packtrain.attention.flattened import registered
from packtrain.packing.segments import Segments


@registered("leaky")
def attend_to_all(module, query, key, value, segments, window, **given):
    return attend(module, query, key, value, None, segments=Segments((segments.tokens,)), **given)[0]


ATTENTION = AttentionFunction("leaky")
"""


def install(folder: Path, group: str, entries: dict[str, str], modules: dict[str, str]) -> dict[str, str]:
    """Make a package of these modules, as pip would leave it in `folder`; returns the variables that let Python find it."""
    info = folder / "made_up-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 0.1\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def beside_it(arguments: Any, environment: dict[str, str], *rest: Any) -> None:
    """The command in a process that begins where Python has read PYTHONPATH and packtrain has looked for nothing yet."""
    sys.path.insert(0, environment["PYTHONPATH"])
    for remembered in (registry._find, keys.keys_of, keys.keys):
        remembered.cache_clear()
    forked.run(arguments, environment, *rest)


def from_nothing(*arguments: str, cwd: Path, env: dict[str, str]) -> str:
    """What `packtrain ARGUMENTS` prints, in a process that Python starts."""
    command = [sys.executable, "-m", "packtrain", *arguments]
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with run.yaml, and the variables that let Python find the package of backends."""
    folder = tmp_path_factory.mktemp("backends")
    entries = {name: f"looped:{name.upper()}" for name in ("looped", "leaky", "unready")}
    modules = {"looped": BACKENDS, "looped_run": LOOPED, "leaky_run": LEAKY}
    (folder / "run.yaml").write_text(yaml.safe_dump(base_config(folder, trainer={"max_steps": 2})))
    return folder, install(folder / "site", "packtrain.attention", entries, modules)


def test_a_backend_of_another_package_plans_proves_and_trains(backends: tuple[Path, dict[str, str]]) -> None:
    folder, env = backends
    asked = ("run.yaml", "model.attention=looped")
    assert "run.yaml model.attention=looped" in from_nothing("plan", *asked, cwd=folder, env=env)
    listed = json.loads(from_nothing("env", "--json", cwd=folder, env=env))["attention"]
    assert listed["looped"] == {"available": True, "why": "it needs no kernel"}
    report = json.loads(packtrain("verify", *asked, "--json", cwd=folder, env=env, begin=beside_it).stdout)
    assert report["verdict"] == "exact" and report["backend"] == "looped"
    packtrain("sft", *asked, cwd=folder, env=env, begin=beside_it)
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["steps"] == 2 and summary["attention"] == "looped (asked for)"


@pytest.mark.parametrize(
    ("name", "code", "words"), [("leaky", 3, "differ from each alone"), ("unready", 2, "No module named 'not_there'")]
)
def test_a_backend_that_leaks_or_cannot_be_imported_does_not_train(
    name: str, code: int, words: str, backends: tuple[Path, dict[str, str]]
) -> None:
    folder, env = backends
    asked = (f"model.attention={name}", f"trainer.output_dir={name}")
    result = packtrain("sft", "run.yaml", *asked, expect=code, cwd=folder, env=env, begin=beside_it)
    assert words in " ".join(result.stderr.split()) and not (folder / name / "final").exists()
