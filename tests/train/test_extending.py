"""The packages of docs/extending.md train, plan, verify, resume and report."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import Run, assert_same_bits, base_config, joined, packtrain, train, write_jsonl, written

from packtrain.config.keys import keys, keys_of
from packtrain.data.sources.quickstart import preferences
from packtrain.registry import _find
from tests.train import forked

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("extending*.md"))
LEAKY = """
from looped.run import attend
from packtrain.attention.backends import AttentionFunction
from packtrain.attention.flattened import registered
from packtrain.packing.segments import Segments


@registered("looped_over_borders")
def attend_to_all(module, query, key, value, segments, window, **given):
    return attend(module, query, key, value, None, segments=Segments((segments.tokens,)), **given)[0]


ATTENTION = AttentionFunction("looped_over_borders")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's objectives, as pip would install them (in one package)."""
    folder = tmp_path_factory.mktemp("site")
    pages = "\n".join(page.read_text() for page in PAGES)
    projects = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", pages, re.DOTALL)]
    groups = [item for project in projects for item in project["project"]["entry-points"].items()]
    (info := folder / "packtrain_orpo-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packtrain-orpo\nVersion: 0.1.0\n")
    lines = [f"[{group}]\n{name} = {value}" for group, points in groups for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for path, code in re.findall(r"```python\n# ([\w/.]+)\n(.*?)```", pages, re.DOTALL):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(code)
    return folder


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
    return written(folder, config)


@pytest.fixture(scope="module")
def trained(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("orpo")
    ran = packtrain("orpo", config_in(folder), begin=partial(with_package, package))
    (folder / "screen").write_text(ran.stdout)
    return Run(folder / "run")


def test_help_and_plan_know_an_objective_of_another_package(package: Path, tmp_path: Path) -> None:
    assert re.search(r"^  orpo +Train on preference pairs by odds", fresh(package, "--help").stdout, re.MULTILINE)
    plan = fresh(package, "plan", config_in(tmp_path), "--json")
    assert json.loads(plan.stdout)["batch"]["examples_per_step"] == 7, plan.stderr
    refused = fresh(package, "plan", config_in(tmp_path), "objective.options.weight=-1", "objective.loss=ipo")
    assert refused.returncode == 2
    assert "objective.options.weight" in refused.stderr and "packtrain orpo" in refused.stderr
    a_figure = fresh(package, "plan", config_in(tmp_path), "~data.eval", "+data.eval.ranked_right=pairs.jsonl")
    assert a_figure.returncode == 2 and "data.eval.ranked_right" in a_figure.stderr


def test_its_losses_and_weights_are_alike_in_all_modes_and_on_two_processes(
    package: Path, trained: Run, tmp_path: Path
) -> None:
    begin = partial(with_package, package)
    assert {"nll", "log_odds", "ranked_right"} < {*trained.steps[0]} and "eval_log_odds" in trained.evals[-1]
    # at the start both answers are about as likely, so the second term is about λ ln 2
    assert trained.losses[0] == pytest.approx(trained.steps[0]["nll"] + 0.2 * math.log(2), rel=0.02)
    packtrain("orpo", config_in(tmp_path), "packing.mode=padding", begin=begin)
    padded = Run(tmp_path / "run")
    assert padded.losses == pytest.approx(trained.losses, rel=1e-5)
    odds, expected = ([line["eval_log_odds"] for line in run.evals] for run in (padded, trained))
    assert odds == pytest.approx(expected, abs=1e-5)
    (two := tmp_path / "two").mkdir()
    joined(2, "orpo", config_in(two), begin=begin)
    assert Run(two / "run").losses == pytest.approx(trained.losses, rel=1e-5)


def test_it_resumes_to_the_same_bits_is_proved_and_reported(package: Path, trained: Run, tmp_path: Path) -> None:
    begin = partial(with_package, package)
    changes = [trained.resume(2), f"trainer.output_dir={tmp_path / 'resumed'}"]
    packtrain("orpo", str(trained.folder.parent / "run.yaml"), *changes, begin=begin)
    assert [*trained.ledger[0]][-2:] == ["loss", "margin"]
    assert_same_bits(Run(tmp_path / "resumed"), trained, after=2)
    proof = json.loads(packtrain("verify", config_in(tmp_path), "--json", begin=begin).stdout)
    assert proof["verdict"] == "exact" and proof["objective"] == "orpo"
    assert all(mode["grad_rel_diff"] <= 1e-4 for mode in proof["modes"].values())


def test_its_figures_are_on_the_screen_and_in_the_report_as_declared(package: Path, trained: Run) -> None:
    right, screen = trained.evals[-1]["eval_ranked_right"], (trained.folder.parent / "screen").read_text()
    assert f"pairs ranked right {right:.1%}" in screen
    shown = f"of {trained.evals[-1]['eval_pairs']} held-out pairs: pairs ranked right {right:.1%} (chance: 50%)"
    assert shown in " ".join(screen.split())
    packtrain("report", str(trained.folder), begin=partial(with_package, package))
    page = (trained.folder / "report.html").read_text()
    assert "Held-out pairs ranked right" in page and "Log odds ratio" in page


def config_of_equal(folder: Path, examples: str) -> str:
    """A run on documents or answers with labels, two a step."""
    if examples == "answers":
        rows = preferences("train", 0, 12)
        sides = [(row["prompt"], row[side], side == "chosen") for row in rows for side in ("chosen", "rejected")]
        labelled = [dict(zip(("prompt", "completion", "label"), side, strict=True)) for side in sides]
        write_jsonl(folder / "data.jsonl", labelled)
    trainer = {"max_steps": 2, "eval_every": 2}
    config = base_config(folder, data={"eval": 0.25}, objective={"kind": "equal"}, trainer=trainer)
    config["batch"]["examples_per_step"] = 2
    return written(folder, config)


@pytest.mark.parametrize("examples", ["documents", "answers"])
def test_single_documents_and_answers_train_alike_in_padded_rows_and_on_three_processes(
    package: Path, tmp_path: Path, examples: str
) -> None:
    shutil.copytree(package, site := tmp_path / "site")
    spec = site / "equal/spec.py"
    spec.write_text(spec.read_text().replace('"documents"', f'"{examples}"'))
    begin, config = partial(with_package, site), config_of_equal(tmp_path, examples)
    packtrain("equal", config, begin=begin)
    packed = Run(tmp_path / "run")
    share = {"documents": 1, "answers": 0.5}[examples]
    assert packed.evals[-1][f"eval_{examples}"] > 0 and packed.evals[-1]["eval_labelled_true"] == share
    changes = ["packing.mode=padding", f"trainer.output_dir={tmp_path / 'three'}"]
    joined(3, "equal", config, *changes, begin=begin)
    assert Run(tmp_path / "three").losses == pytest.approx(packed.losses, rel=1e-5)
    refused = packtrain("equal", config, "packing.share_prefix=true", expect=2, begin=begin)
    assert "packing.share_prefix" in refused.stderr


def test_a_subclass_of_sft_needs_none_of_its_options_and_figures_may_have_names_of_others(
    package: Path, tmp_path: Path
) -> None:
    shutil.copytree(package, site := tmp_path / "site")
    run, spec = site / "equal/run.py", site / "equal/spec.py"
    for file in (run, spec):  # a reward model has such a figure
        file.write_text(file.read_text().replace('"labelled_true"', '"margin"'))
    begin, config = partial(with_package, site), config_of_equal(tmp_path, "documents")
    assert "done" in packtrain("equal", config, begin=begin).stdout
    run.write_text("from packtrain.objectives.sft.run import SFT as OBJECTIVE\n")
    packtrain("equal", config, begin=begin)


@pytest.mark.parametrize(
    ("verb", "file", "old", "new"),
    [
        ("--help", "orpo/spec.py", "from ", "import nothing_like_this\nfrom "),
        ("--help", "orpo/spec.py", "SPEC = ", "OTHER = "),
        ("--help", "orpo/spec.py", 'examples="pairs"', 'examples="triples"'),
        ("--help", "orpo/spec.py", '"log_odds"', '"tokens"'),
        ("orpo", "orpo/run.py", "OBJECTIVE = ", "OTHER = "),
        ("orpo", "orpo/run.py", "OBJECTIVE = ORPO", "OBJECTIVE = ORPOLoss"),
        ("orpo", "orpo/run.py", "import torch\n", "import nothing_like_this\n"),
        ("sft", "acme/norms.py", "CHANGE = ", "OTHER = "),
    ],
)
def test_a_package_that_is_broken_is_named(
    package: Path, tmp_path: Path, verb: str, file: str, old: str, new: str
) -> None:
    shutil.copytree(package, site := tmp_path / "site")
    (path := site / file).write_text(path.read_text().replace(old, new, 1))
    if verb == "--help":
        ran = fresh(site, verb)
    else:
        config = config_in(tmp_path) if verb == "orpo" else written(tmp_path, base_config(tmp_path))
        overrides = ("trainer.max_steps=1", f"trainer.output_dir={tmp_path / 'run'}")
        ran = packtrain(verb, config, *overrides, begin=partial(with_package, site), expect=None)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert f"packtrain-orpo, packtrain.{'changes: acme' if verb == 'sft' else 'objectives: orpo'} = " in ran.stderr


@pytest.mark.parametrize("name", ["sft", "plan"])
def test_an_objective_cannot_take_the_name_of_another_verb(package: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(package, site := tmp_path / "site")
    for file in (site / "packtrain_orpo-0.1.0.dist-info/entry_points.txt", site / "equal/spec.py"):
        file.write_text(file.read_text().replace("equal =", f"{name} =").replace('"equal"', f'"{name}"'))
    ran = fresh(site, "--help")
    assert ran.returncode == 2 and name in ran.stderr and "packtrain.objectives" in ran.stderr


def test_a_backend_of_another_package_plans_proves_trains_and_resumes(package: Path, tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2, "checkpoint_every": 2}, model={"attention": "looped"})
    path, begin = written(tmp_path, config), partial(with_package, package)
    assert fresh(package, "plan", path).returncode == 0
    listed = json.loads(fresh(package, "env", "--json").stdout)["attention"]
    assert listed["looped"] == {"available": True, "why": "it needs no kernel"}
    report = json.loads(packtrain("verify", path, "--json", begin=begin).stdout)
    assert report["verdict"] == "exact" and report["backend"] == "looped"
    run = train(tmp_path, config, begin=begin)
    longer = train(tmp_path, config, run.resume(2), "trainer.max_steps=3", name="longer", begin=begin)
    assert [line["step"] for line in longer.steps] == [3]
    assert {one.summary["attention"] for one in (run, longer)} == {"looped (asked for)"}


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(LEAKY, 3, "[not-exact]"), ("import nothing_like_this", 2, "[plugin-unusable]")],
)
def test_a_backend_that_leaks_or_cannot_be_imported_does_not_train(
    package: Path, tmp_path: Path, code: str, exit_code: int, words: str
) -> None:
    shutil.copytree(package, tmp_path / "site")
    spec = tmp_path / "site/looped/spec.py"
    spec.write_text(spec.read_text().replace("looped.run", "looped.other"))
    (tmp_path / "site/looped/other.py").write_text(code)
    path = written(tmp_path, base_config(tmp_path, model={"attention": "looped"}))
    result = packtrain("sft", path, expect=exit_code, begin=partial(with_package, tmp_path / "site"))
    assert words in result.stderr and not (tmp_path / "run/final").exists()


@pytest.mark.parametrize("weight", ["norm.weight", "norm.weight * 1.01"], ids=["right", "off by 1 %"])
def test_a_change_of_another_package_stays_if_it_is_proved(package: Path, tmp_path: Path, weight: str) -> None:
    shutil.copytree(package, site := tmp_path / "site")
    (file := site / "acme/norms.py").write_text(file.read_text().replace("shape, norm.weight,", f"shape, {weight},"))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a young cow is a calf"}] * 20)
    given = ["recipes/quickstart-sft.yaml", f"data.train={rows}", "data.eval=null", "trainer.eval_every=null"]
    given += ["trainer.max_steps=1", "trainer.samples=[]", f"trainer.output_dir={tmp_path / 'run'}"]
    ran = packtrain("sft", *given, begin=partial(with_package, site))
    said = Run(tmp_path / "run").summary["changes"]["acme"]
    assert f"acme       {said}" in ran.stdout
    if weight == "norm.weight":
        assert said.startswith("norms by torch's fused function (loss off by ")
        unknown = fresh(site, "plan", *given, "model.kernels=acne")
        assert unknown.returncode == 2 and "auto|liger|lora|none|acme" in unknown.stderr
        return
    assert said.startswith("as the model comes; norms by torch's fused function: the loss of the first rows is off by")
    required = packtrain("sft", *given, "model.kernels=acme", expect=3, begin=partial(with_package, site))
    assert "[change-inexact]" in required.stderr
