"""The command line: what is printed where, and what the exit code is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain import __version__
from packtrain.errors import BUG, CheckFailed, PeerFailed, Problem, UserError, exit_code_of
from packtrain.launch.arguments import split_arguments
from packtrain.plan.surroundings import command_of
from tests.unit.command_line import packtrain

COMPLETE = ["model.path=owner/model", "data.train=owner/data", "batch.examples_per_step=32"]


def test_help_lists_the_verbs_and_what_launchers_put_before_the_verb_is_taken(tmp_path: Path) -> None:
    shown = packtrain("-h", folder=tmp_path)
    assert shown.returncode == 0
    assert "sft" in shown.stdout and "plan" in shown.stdout and "--install-completion" in shown.stdout
    assert packtrain("--version", folder=tmp_path).stdout == f"packtrain {__version__}\n"
    shown = packtrain("--local_rank=1", "sft", "bad.yaml", folder=tmp_path)  # DeepSpeed's
    assert shown.returncode == 2 and "bad.yaml" in shown.stderr and "local_rank" not in shown.stderr


@pytest.mark.parametrize("verb", ["sft", "plan"])
def test_the_help_of_a_verb_fits_on_two_screens_and_explains_the_keys_that_are_named(verb: str, tmp_path: Path) -> None:
    shown = packtrain(verb, "--help", folder=tmp_path, COLUMNS="80")
    assert shown.returncode == 0 and "learning_rate=2e-05" in shown.stdout
    assert len(shown.stdout.splitlines()) <= 100
    assert "beta2=0.999" not in shown.stdout and "beta2=0.999" in packtrain(verb, "-h", "all", folder=tmp_path).stdout
    explained = packtrain(verb, "-h", "optim.learning_rate", folder=tmp_path).stdout
    assert "Peak learning rate." in explained and len(explained.splitlines()) <= 5


def test_help_and_refusals_and_plans_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("optim: {lr: 1}\n")
    code = (
        "import contextlib, sys\n"
        "from packtrain.cli import main\n"
        "for start in (['-h'], ['sft', '-h'], ['sft', 'bad.yaml'], *([verb, '-h'] for verb in ('chat', 'merge', 'export')), "
        f"['chat', './no'], ['merge', './no'], ['export', '.', '--to', 'gguf'], ['eval', '-h'], ['plan', *{COMPLETE!r}]):\n"
        "    sys.argv = ['packtrain', *start]\n"
        "    with contextlib.suppress(SystemExit): main()\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, (start, heavy)\n"
        "print('light')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("light\n"), done.stderr


def test_a_bad_config_is_refused_with_all_problems_once_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: {path: owner/model}\noptim:\n  lr: 1\n")
    done = packtrain("sft", "bad.yaml", "trainer.seed=x", "-m", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    for line in (
        "error: 5 problems",
        "  bad.yaml:3, optim.lr: there is no such key [no-such-key]",
        "    → Did you mean optim.learning_rate?",
        "  command line, trainer.seed: found the text 'x' [bad-value]",
        "  command line, -m: no such option [no-such-flag]",
        "  bad.yaml, data.train: there is nothing to train on [no-data]",
    ):
        assert done.stderr.count(f"{line}\n") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [["sft"], ["sft", "none.yaml"], ["train"], ["sft", "--dryrun", *COMPLETE]])
def test_wrong_arguments_end_with_exit_code_2_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    done = packtrain(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr and "Traceback" not in done.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    overrides = [*COMPLETE, "packing.mode=padding", "trainer.samples=[a b]"]
    done = packtrain("sft", *overrides, "--dry-run", folder=tmp_path, COLUMNS="100", HF_HOME=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [name for line in lines if (name := line[:10].strip())]
    assert names == ["model", "data", "processes", "batch", "steps", "precision", "memory", "folder", "run"]
    assert "a step is 32 documents: on 1 process 4 micro-batches of at most 8 documents" in done.stdout
    assert "not known before loading: owner/model is not on this machine yet" in done.stdout
    assert "learning_rate" not in done.stdout
    assert list(tmp_path.iterdir()) == []
    command = shlex.split(next(line for line in lines if line.startswith("run ")))[1:]
    assert command == [*command_of("packtrain"), "sft", *overrides]  # can be pasted as it is


def test_plan_json_is_one_document_on_stdout_and_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    done = packtrain("plan", "--json", *COMPLETE, "topology=local", "topology.gpus_per_node=2", folder=tmp_path)
    document = json.loads(done.stdout)
    assert document["num_processes"] == 2
    assert document["commands"][0]["argv"][1] == "launch"
    assert document["config"]["optim"]["learning_rate"] == 2e-5
    assert document["memory"] is None and "gpus_per_node=2" in document["reason"]
    assert done.stderr == ""
    command = f"'{sys.executable}' -m packtrain plan {' '.join(COMPLETE)} | true"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sft", "ru"], {"run.yaml"}),
        (["plan", "recipes/quickstart-r"], {"recipes/quickstart-reward.yaml"}),
        (["sft", "strategy", "=", "zero1"], {"zero1"}),
        (["sft", "run.yaml", "peft", "="], {"lora", "none"}),
        (["sft", "run.yaml", "packing.mode", "=", "pad"], {"padding", "padding_free"}),
        (["sft", "run.yaml", "optim.be"], {"optim.beta1=", "optim.beta2="}),
        (["sft", "run.yaml", "~optim.be"], {"~optim.beta1", "~optim.beta2"}),
        (["sft", "run.yaml", "verify.preflight", "=", ""], {"true", "false"}),
        (["sft", "run.yaml", "nothing.like"], set()),
    ],
)
def test_bash_is_offered_what_fits(words: list[str], offered: set[str], tmp_path: Path) -> None:
    for file in ("run.yaml", "notes.txt"):
        (tmp_path / file).touch()
    # bash has cut the words at every "=", and replaces only the last piece
    asked = {"COMP_WORDS": "\n".join(("packtrain", *words)), "COMP_CWORD": str(len(words))}
    shown = packtrain(folder=tmp_path, _PACKTRAIN_COMPLETE="complete_bash", **asked).stdout
    assert set(shown.split("\n")) - {""} == offered


def test_the_first_argument_is_the_config_unless_it_is_an_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "run.yaml").touch()
    for arguments, config in (
        (["run.yaml", "a=1"], "run.yaml"),
        (["a=1", "b=2"], None),
        (["~a", "b=2"], None),
        (["+a=1"], None),
        (["lr=1/run.yaml"], "lr=1/run.yaml"),
    ):
        assert split_arguments(arguments) == (config, arguments[config is not None :])


TWO = [Problem("one", "here", "do this"), Problem("two")]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError(TWO), 2, "error: 2 problems\n  here: one\n    → do this\n  two\n"),
        (UserError("found \x1b[31m", where="a\x07\u202e.jsonl"), 2, "error:\n  a␇⟨U+202E⟩.jsonl: found ␛[31m\n"),
        (CheckFailed("no"), 3, "error:\n  no\n"),
        (PeerFailed("gone"), 4, "error:\n  gone\n"),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("oops"), 1, f"RuntimeError: oops\n{BUG}\n"),
    ],
)
def test_every_end_has_its_exit_code_and_its_words(error, code, said, capsys):
    def work() -> int:
        raise error

    assert exit_code_of(work) == code
    stderr = capsys.readouterr().err
    assert stderr.endswith(said) and (code == 1 or stderr == said)
