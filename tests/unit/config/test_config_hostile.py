"""Configs that nobody would write on purpose: always a list of problems, never a traceback, and nothing is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.config.compose import load_config
from packtrain.errors import Problem, UserError

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
COMPLETE = ["model.path=owner/model", "data.train=owner/data", "batch.examples_per_step=32"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def problems(text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        load_config(write(text), [*COMPLETE, *overrides])
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("optim: &x {beta1: *x}\n", "run.yaml", "aliases (*) written out"),
        ("trainer: {samples: &x [*x]}\n", "run.yaml", "aliases (*) written out"),
        (BOMB, "run.yaml:", "aliases (*) written out"),
        ("? [a, b]\n: 2\n", "run.yaml:1", "unhashable key"),
        ("optim: !foo {beta1: 1}\n", "run.yaml:1", "'!foo'"),
        ("optim:\n  null: 2\n", "run.yaml:1", "Incompatible key"),
        ('optim:\n  beta1: !!int "x"\n', "run.yaml", "invalid literal for int"),
        ("trainer: {output_dir: !!bool x}\n", "run.yaml", "not valid YAML"),
        ("optim: !!map [1]\n", "run.yaml", "not valid YAML"),
        ("1.5: 2\n", "run.yaml:1, 1.5", "no such key"),
        ("optim: ???\n", "run.yaml:1, optim", "Missing mandatory value"),
        ("optim:\n  beta1: ???\n", "run.yaml:2, optim.beta1", "Missing mandatory value"),
        ("data:\n  columns:\n    text: ???\n", "run.yaml:3, data.columns.text", "Missing mandatory value"),
        ("trainer: {samples: ['${nope}']}\n", "run.yaml:1, trainer.samples[0]", "Interpolation key 'nope' not found"),
        ('trainer: {output_dir: "a\\0b"}\n', "run.yaml:1, trainer.output_dir", "the text 'a\\x00b'"),
        (f"model: {{config: {'{a: ' * 200}1{'}' * 200}}}\n", "run.yaml", "40 levels"),
        (f"model: {{config: {'{a: ' * 2000}1{'}' * 2000}}}\n", "run.yaml", "nested too deeply"),
        ("\ndefaults: [peft: lora, peft: none]\n", "run.yaml:2, defaults", "two choices for peft"),
        ("\ndefaults: [3]\n", "run.yaml:2, defaults", "3 is no entry of a defaults list"),
        ("\ndefaults: ['${x}']\n", "run.yaml:2, defaults", "takes no interpolation"),
        ("trainer: {samples: !!set {a, b}}\n", "run.yaml", "'set'"),
        ("optim: [beta1]\n", "run.yaml:1, optim", "the list ['beta1'] where a group of keys belongs"),
        ("optim: {schedule_options: [a]}\n", "run.yaml:1, optim.schedule_options", "the list ['a']"),
        ("trainer: {samples: {a: b}}\n", "run.yaml:1, trainer.samples", "the mapping"),
        ("tracking: {report_to: {a: b}}\n", "run.yaml:1, tracking.report_to", "the mapping"),
        ("optim: {1: 2}\n", "run.yaml:1, optim.1", "no such key"),
        ("optim: {on: 2}\n", "run.yaml:1, optim", "no such key"),
        (f"trainer: {{seed: 1{'0' * 400}}}\n", "run.yaml:1, trainer.seed", "the whole number 1000"),
        (f"optim: {{learning_rate: 1{'0' * 400}}}\n", "run.yaml:1, optim.learning_rate", "the whole number 1000"),
        ("trainer: {seed: 4294967296}\n", "run.yaml:1, trainer.seed", "4294967296"),
        ("optim: {schedule_options: {num_cycles: many}}\n", "run.yaml:1, optim.schedule_options.num_cycles", "'many'"),
        ("data: {eval: 5%}\n", "run.yaml:1, data.eval", "the text '5%'"),
        ("trainer: {output_dir: ''}\n", "run.yaml:1, trainer.output_dir", "the run folder has no name"),
        ('trainer: {output_dir: "a\\nb"}\n', "run.yaml:1, trainer.output_dir", "it has a line break"),
        ('topology: {command: "a\\nb"}\n', "run.yaml:1, topology.command", "it has a line break"),
        ('topology: {sbatch: ["--mem=0\\n-N 2"]}\n', "run.yaml:1, topology.sbatch[0]", "no option of sbatch"),
        ("\ndefaults: [run, _self_]\n", "run.yaml", "leads back to the file"),
        ("\ndefaults: peft\n", "run.yaml:2, defaults", "must be a list"),
        ("trainer: {resume: ~nobody-here/run}\n", "run.yaml:1, trainer.resume", "no checkpoint folder"),
        ("data: {cache_dir: run.yaml}\n", "run.yaml:1, data.cache_dir", "run.yaml is a file"),
    ],
)
def test_a_hostile_file_is_refused_at_its_line(text: str, place: str, what: str) -> None:
    found = problems(text)
    assert len(found) == 1, [str(one) for one in found]
    assert found[0].where.startswith(place)
    assert what in found[0].what


def test_keys_that_are_written_twice_are_all_reported_with_both_lines() -> None:
    found = problems("optim:\n  beta1: 0.5\n  beta1: 0.6\ndata: {eval: 0.1}\noptim: {name: sgd}\n")
    assert [(one.where, one.fix) for one in found] == [
        ("run.yaml:3, optim.beta1", "Keep one of them."),
        ("run.yaml:5, optim", "Keep one of them."),
    ]
    assert found[1].what == "the key is written twice, on lines 1 and 5"


@pytest.mark.parametrize(
    "path", ["~nobody-here/x.jsonl", f"./{'x' * 3000}.jsonl", "none-here-*.jsonl", "/none/**/*.csv"]
)
def test_a_path_that_cannot_be_there_is_refused_like_one_that_is_not(path: str) -> None:
    (problem,) = problems("", f"data.train='{path}'")
    assert problem.where == "command line, data.train"
    assert "there is no file" in problem.what


@pytest.mark.parametrize("name", ["~nobody-here/run.yaml", f"{'x' * 3000}.yaml"])
def test_a_config_that_cannot_be_there_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no such config file"):
        load_config(name, [])


@pytest.mark.parametrize(
    "name", ["a=1.yaml", "${x}.yaml", "~a @b.yaml", "it's/[x] #1/run.v2.yaml", "a\\b/é.yaml", "null.yaml"]
)
def test_a_config_may_have_any_name(name: str) -> None:
    assert load_config(write("optim: {beta1: 0.5}\n", name), [*COMPLETE, "peft=lora"]).optim.beta1 == 0.5


def test_a_group_given_as_text_keeps_its_choice_when_the_command_line_sets_one_of_its_keys() -> None:
    run = write("packing: padding\noptim: adafactor\n")
    config = load_config(run, [*COMPLETE, "packing.strategy=in_order", "optim.learning_rate=0.5"])
    assert (config.packing.mode, config.packing.strategy) == ("padding", "in_order")
    assert (config.optim.name, config.optim.learning_rate) == ("adafactor", 0.5)


def test_a_group_given_as_text_may_be_a_file_of_the_user_with_a_defaults_list() -> None:
    write("defaults: [lora, _self_]\nr: 3\n", "peft/mine.yaml")
    config = load_config(write("peft: mine\n"), COMPLETE)
    assert (config.peft.kind, config.peft.r) == ("lora", 3)


@pytest.mark.parametrize(
    ("text", "place"), [("kind: [\n", "peft/mine.yaml:2"), ("kimd: lora\n", "peft/mine.yaml:1, peft.kimd")]
)
def test_the_fault_of_a_file_that_a_group_names_as_text_is_found_there(text: str, place: str) -> None:
    write(text, "peft/mine.yaml")
    assert [problem.where for problem in problems("peft: mine\n")] == [place]


def test_the_fault_of_a_shipped_choice_given_as_text_is_placed_at_its_line() -> None:
    assert [problem.where for problem in problems("\noptim: adafactor\nstrategy: {name: zero3}\n")] == [
        "run.yaml:2, optim.name; run.yaml:3, strategy.name"
    ]


def test_arguments_that_hydra_refuses_hide_no_other_problem() -> None:
    found = problems("optim: {lr: 1}\n", "~optim.beta1", "peft={r: 3}", "trainer.seed=x")
    assert sorted(problem.where for problem in found) == [
        "command line, peft={r: 3}",
        "command line, trainer.seed",
        "command line, ~optim.beta1",
        "run.yaml:1, optim.lr",
    ]


@pytest.mark.parametrize(
    ("override", "where", "words"),
    [
        ("nothing.at.all=1", "command line, nothing", "no such key"),
        ("optim.beta1.x=1", "command line, optim.beta1", "the mapping {'x': 1}"),
        ("lora.r=3", "command line, lora", "Choose peft=lora"),
        ("tracking.report_to=wandb", "command line, tracking.report_to", "Write [wandb]."),
        ("data.columns={text: 3}", "command line, data.columns", "mapping to text"),
    ],
)
def test_a_hostile_override_is_named_with_what_to_do(override: str, where: str, words: str) -> None:
    (problem,) = problems("", override)
    assert problem.where == where
    assert words in f"{problem.what} {problem.fix}"
