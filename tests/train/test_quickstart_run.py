"""The newcomer's first commands, as they stand in the README: they learn, and say what to do next."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import forked
import pytest
from running import Run, packtrain, write_jsonl

from packtrain.data.sources.quickstart import conversations
from tests import wheels


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the quickstart of an installed wheel. Return its folder and the finished process."""
    folder, made = tmp_path_factory.mktemp("quickstart"), tmp_path_factory.mktemp("made")
    bin = wheels.install_alone(wheels.build(made), made / "venv")
    assert wheels.place_of_packtrain(bin, folder).is_relative_to(made)
    write_jsonl(folder / "first.jsonl", conversations("train", count=500))
    # a fortieth of its 800 steps: the loss is a third by then; they see 400 rows of its 10,000, which take longer to tokenise
    short = ["trainer.max_steps=20", "data.train=first.jsonl"]
    variables = {"PYTHONPROFILEIMPORTTIME": "1"}  # imports are listed in stderr
    result = wheels.run(bin, "packtrain", "sft", "recipes/quickstart-sft.yaml", *short, folder=folder, **variables)
    return folder, result


@pytest.mark.exhaustive
def test_a_run_imports_nothing_of_what_it_does_not_do(quickstart) -> None:
    others = {"packtrain.objectives.dpo.run", "trl.trainer.dpo_trainer"}
    others |= {"packtrain.train.verify.measure", "packtrain.diagnose.env", "tensorboard", "wandb"}
    log = (quickstart[0] / "runs/quickstart-sft/logs/rank-00000.log").read_text()  # output of imports goes there
    imported = {line.rpartition("|")[2].strip() for line in f"{log}\n{quickstart[1].stderr}".splitlines()}
    assert "packtrain.train.run" in imported and others.isdisjoint(imported)


def test_no_line_of_a_plain_run_is_of_another_library(quickstart) -> None:
    folder, result = quickstart
    assert [line for line in result.stderr.splitlines() if not line.startswith("import time:")] == []
    log = (folder / "runs/quickstart-sft/logs/rank-00000.log").read_text()
    lines = {line[len("2026-01-01 00:00:00 ") :] for line in log[log.index("model   ") - 20 :].splitlines()}
    said = [line for line in result.stdout.splitlines() if line.strip()]
    assert said and [line for line in said if line not in lines] == []


def test_the_quickstart_leaves_a_report_with_its_data_and_answers(quickstart) -> None:
    folder = quickstart[0] / "runs" / "quickstart-sft"
    text, summary = (folder / "report.html").read_text(), json.loads((folder / "summary.json").read_text())
    assert all(one["prompt"] in text and html.escape(one["after"]) in text for one in summary["answers"])


def test_the_quickstart_at_least_halves_the_held_out_loss_and_shows_what_was_learnt(quickstart) -> None:
    tmp_path, result = quickstart
    assert result.returncode == 0, result.stderr
    run = Run(tmp_path / "runs" / "quickstart-sft")
    assert run.summary["eval_loss"] < run.summary["first_eval_loss"] / 2  # halved long before the 800 steps are over
    out = result.stdout
    assert out.count("before ") == out.count("after  ") == 3
    assert str(run.folder.resolve()) in out
    lines = [line for line in out.split("next:")[1].splitlines() if line.strip()]
    assert max(len(line) for line in lines if "#" in line) <= 80  # a command alone may be longer
    bin = Path(result.args[0]).parent
    commands = [arguments_of(line, bin) for line in lines if not line.lstrip().startswith("#")]
    assert [given[0] for given in commands] == ["report", "chat", "eval", "export"]
    report, chat, evaluate, export = commands
    own = {"PACKTRAIN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    (run.folder / "report.html").unlink()
    packtrain(*report, cwd=tmp_path, env=own)
    assert (run.folder / "report.html").exists()
    question, shown = run.summary["answers"][0]["prompt"], run.summary["answers"][0]["after"]
    said = packtrain(*chat, cwd=tmp_path, env=own, begin=partial(forked.piped, f"{question}\n")).stdout
    assert said.startswith(shown)  # the same answer as the run's own, however long
    found = packtrain(*evaluate, "--json", cwd=tmp_path, env=own)
    assert json.loads(found.stdout)["figures"]["eval_loss"] == pytest.approx(run.summary["eval_loss"], rel=1e-5)
    assert "evaluation in " in found.stderr and not re.search(r"optimizer|training|trained\)|data\.train", found.stderr)
    assert export[2:] == ["--to", "hub", "--repo", "YOU/NAME"]  # there is no llama.cpp here


def arguments_of(command: str, bin: Path) -> list[str]:
    """Return the arguments of a command line after packtrain, which lies in `bin`."""
    words = shlex.split(command, comments=True)
    assert shutil.which(words[0], path=str(bin))
    return words[[Path(word).name for word in words].index("packtrain") + 1 :]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("verb", "steps"), [("dpo", 200), ("kto", 60)])
def test_other_quickstarts_rank_held_out_answers_well_above_chance(verb: str, steps: int, tmp_path: Path) -> None:
    """Two fifths of the steps of dpo, a fifth of those of kto, evaluated at the two ends."""
    given = [f"trainer.max_steps={steps}", f"trainer.eval_every={steps}", "trainer.samples=[]"]
    own = {"PACKTRAIN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    packtrain(verb, f"recipes/quickstart-{verb}.yaml", *given, cwd=tmp_path, env=own)
    first, last = Run(tmp_path / "runs" / f"quickstart-{verb}").evals
    if verb == "dpo":
        assert first["eval_rewards/margins"] == 0  # the model is its own reference
        assert last["eval_pairs"] == 200 and last["eval_rewards/accuracies"] > 0.6  # chance is 0.5 ± 0.035
    else:
        assert first["eval_loss"] == pytest.approx(0.5, abs=1e-6)
        assert last["eval_answers"] == 200 and last["eval_loss"] < 0.35
        assert last["eval_rewards/chosen"] > 0.3 and last["eval_rewards/rejected"] < -0.3
