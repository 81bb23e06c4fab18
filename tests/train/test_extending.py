"""The packages of docs/extending.md train, plan, verify, resume and report."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
import yaml
from running import Run, base_config, packtrain, write_jsonl

from packtrain.config.keys import keys, keys_of
from packtrain.data.sources.quickstart import preferences
from packtrain.registry import _find
from tests.train import forked

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, CHANGES = DOCS / "extending.md", DOCS / "extending-changes.part.md"


def installed(page: Path, folder: Path) -> Path:
    """The folder with the page's package, as pip would install it."""
    (declared,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    project = tomllib.loads(declared)["project"]
    (info := folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n{name} = {value}" for group, points in groups for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for path, code in re.findall(r"```python\n# ([\w/.]+)\n(.*?)```", page.read_text(), re.DOTALL):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(code)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(PAGE, tmp_path_factory.mktemp("site"))


def with_package(folder: Path, *given: Any) -> None:
    """The command, as if the package had been installed before it began."""
    sys.path.insert(0, str(folder))
    for known in (_find, keys, keys_of):
        known.cache_clear()
    sys.modules.pop("packtrain.cli")
    forked.run(*given)


def fresh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`packtrain ARGUMENTS` from nothing, with the package installed."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-m", "packtrain", *arguments], env=env, capture_output=True, text=True)


def config_in(folder: Path) -> str:
    rows = "".join(json.dumps(row) + "\n" for row in preferences("train", 0, 24))
    (folder / "pairs.jsonl").write_text(rows)
    config = base_config(
        folder,
        data={"train": str(folder / "pairs.jsonl"), "eval": 0.25},
        objective={"kind": "orpo", "options": {"weight": 0.2}},
        batch={"tokens_per_device": 512},
        trainer={"max_steps": 4, "checkpoint_every": 2, "eval_every": 2},
    )
    (path := folder / "run.yaml").write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def trained(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("orpo")
    packtrain("orpo", config_in(folder), begin=partial(with_package, package))
    return Run(folder / "run")


def test_help_and_plan_know_an_objective_of_another_package(package: Path, tmp_path: Path) -> None:
    assert re.search(r"^  orpo +Train on preference pairs by odds", fresh(package, "--help").stdout, re.MULTILINE)
    plan = fresh(package, "plan", config_in(tmp_path), "--json")
    assert json.loads(plan.stdout)["batch"]["examples_per_step"] == 7, plan.stderr
    refused = fresh(package, "plan", config_in(tmp_path), "objective.options.weight=-1", "objective.loss=ipo")
    assert refused.returncode == 2
    assert "objective.options.weight" in refused.stderr and "packtrain orpo" in refused.stderr


def test_its_losses_and_weights_are_alike_in_all_modes_and_on_two_processes(
    package: Path, trained: Run, tmp_path: Path
) -> None:
    begin = partial(with_package, package)
    assert {"nll", "log_odds", "ranked_right"} < {*trained.steps[0]} and "eval_log_odds" in trained.evals[-1]
    chosen, weight = trained.steps[0]["nll"], 0.2
    # at the start both answers are about as likely, so the second term is about λ ln 2
    assert trained.losses[0] == pytest.approx(chosen + weight * math.log(2), rel=0.02)
    packtrain("orpo", config_in(tmp_path), "packing.mode=padding", begin=begin)
    padded = Run(tmp_path / "run")
    assert padded.losses == pytest.approx(trained.losses, rel=1e-5)
    assert [line["eval_log_odds"] for line in padded.evals] == pytest.approx(
        [line["eval_log_odds"] for line in trained.evals], abs=1e-5
    )
    (two := tmp_path / "two").mkdir()
    ends = forked.joined(2, "orpo", config_in(two), begin=begin)
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    assert Run(two / "run").losses == pytest.approx(trained.losses, rel=1e-5)


def test_it_resumes_to_the_same_bits_is_proved_and_reported(package: Path, trained: Run, tmp_path: Path) -> None:
    begin = partial(with_package, package)
    start = trained.folder / "checkpoints" / "step-000002"
    changes = [f"trainer.resume={start}", f"trainer.output_dir={tmp_path / 'resumed'}"]
    packtrain("orpo", str(trained.folder.parent / "run.yaml"), *changes, begin=begin)
    resumed = Run(tmp_path / "resumed")
    assert resumed.losses == trained.losses[2:]
    theirs = trained.weights()
    assert all(torch.equal(weight, theirs[name]) for name, weight in resumed.weights().items())
    proof = json.loads(packtrain("verify", config_in(tmp_path), "--json", begin=begin).stdout)
    assert proof["verdict"] == "exact" and proof["objective"] == "orpo"
    assert all(mode["grad_rel_diff"] <= 1e-4 for mode in proof["modes"].values())
    packtrain("report", str(trained.folder), begin=begin)
    assert "log_odds" in (trained.folder / "report.html").read_text()


@pytest.mark.parametrize("fault", ["import nothing_like_this", "SPEC = None"])
def test_a_package_that_is_broken_is_named(package: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(package, tmp_path / "site")
    (tmp_path / "site/orpo/spec.py").write_text(fault)
    ran = fresh(tmp_path / "site", "--help")
    assert ran.returncode == 2 and "packtrain-orpo" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("weight", ["norm.weight", "norm.weight * 1.01"], ids=["right", "off by 1 %"])
def test_a_change_of_another_package_stays_if_it_is_proved(tmp_path: Path, weight: str) -> None:
    (site := tmp_path / "site").mkdir()
    code = (file := installed(CHANGES, site) / "acme/norms.py").read_text()
    file.write_text(code.replace("shape, norm.weight,", f"shape, {weight},"))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a young cow is a calf"}] * 20)
    given = ["recipes/quickstart-sft.yaml", f"data.train={rows}", "data.eval=null", "trainer.eval_every=null"]
    given += ["trainer.max_steps=1", "trainer.samples=[]", f"trainer.output_dir={tmp_path / 'run'}"]
    ran = packtrain("sft", *given, begin=partial(with_package, site))
    said = Run(tmp_path / "run").summary["changes"]["acme"]
    assert f"acme       {said}" in ran.stdout
    if weight == "norm.weight":
        assert said.startswith("norms by torch's fused function (loss off by ")
        unknown = fresh(site, "plan", *given, "model.kernels=acne")
        assert unknown.returncode == 2 and "auto|liger|none|acme" in unknown.stderr
        return
    assert said.startswith("as the model comes; norms by torch's fused function: the loss of the first rows is off by")
    required = packtrain("sft", *given, "model.kernels=acme", expect=3, begin=partial(with_package, site))
    assert "would not train as the model itself does" in required.stderr
