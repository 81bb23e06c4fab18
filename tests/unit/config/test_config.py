"""Configs from the outside: what composes, what is refused, and what each refusal says."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from packtrain.config import help as key_help
from packtrain.config.compose import changes, load_config, to_yaml
from packtrain.config.keys import ELSEWHERE, choices, keys, members
from packtrain.config.rules.table import Rule, rules
from packtrain.config.schema import Batch, Optim, RunConfig, groups
from packtrain.config.yaml_files import shipped
from packtrain.errors import Problem, UserError
from packtrain.optimizers import OPTIMIZERS, OptimizerSpec

COMPLETE = ["model.path=owner/model", "data.train=owner/data", "batch.examples_per_step=32"]
MEASURED = ["data.eval=0.1", "trainer.eval_every=4", "trainer.answers=exact"]
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
CHOICES = sorted(shipped("configs").glob("*/*.yaml"))
RECIPES = sorted(shipped("recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def problems(path: str | None, *overrides: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        load_config(path, list(overrides))
    return list(caught.value.problems)


def only(path: str | None, *overrides: str) -> Problem:
    (problem,) = problems(path, *overrides)
    return problem


def test_keys_that_are_not_given_have_the_defaults_and_each_can_be_set_on_the_command_line() -> None:
    config = load_config(None, COMPLETE)
    assert config == replace(
        RunConfig(),
        model=replace(RunConfig().model, path="owner/model"),
        data=replace(RunConfig().data, train="owner/data"),
        batch=Batch(examples_per_step=32),
    )
    overrides = []
    for path, key in keys().items():
        if not isinstance(key.default, (dict, list)):
            overrides.append(f"{path}={'null' if key.default is None else str(key.default).lower()}")
    assert load_config(None, [*overrides, *COMPLETE]) == load_config(None, COMPLETE)


@pytest.mark.parametrize("file", CHOICES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_shipped_choice_composes_on_the_command_line_and_in_a_defaults_list(file: Path) -> None:
    group, choice = file.parent.name, file.stem
    assert group in groups()
    rest = COMPLETE if group != "batch" else COMPLETE[:2]
    rest = [*rest, *(["objective.options.teacher=owner/name"] if choice == "distill" else [])]
    listed = write(f"defaults:\n  - {group}: {choice}\n  - _self_\n")
    for path, overrides in ((None, [f"{group}={choice}", *rest]), (listed, rest)):
        try:
            config = load_config(path, overrides)
            assert asdict(config)[group] is not None
        except UserError as error:
            assert {problem.code for problem in error.problems} == {"package-missing"}, error


@pytest.mark.parametrize(
    ("override", "key", "package"),
    [
        ("tracking=wandb", "tracking.report_to", "wandb"),
        ("tracking=trackio", "tracking.report_to", "trackio"),
        ("tracking=swanlab", "tracking.report_to", "swanlab"),
        ("tracking=comet", "tracking.report_to", "comet_ml"),
        ("optim.name=adamw_8bit", "optim.name", "bitsandbytes"),
        ("optim.name=adamw_torch_8bit", "optim.name", "torchao"),
    ],
)
def test_a_package_that_is_not_installed_is_named_before_anything_is_loaded(override, key, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = only(None, override, *COMPLETE)
    assert key in problem.where
    assert package in problem.what and problem.code == "package-missing"
    assert "pip install" in problem.fix


def test_yaml_and_choices_and_command_line_win_in_this_order() -> None:
    write("trainer: {seed: 1, log_every: 1, epochs: 1}\n", "base.yaml")
    write("learning_rate: 0.5\nbeta1: 0.5\n", "optim/mine.yaml")
    run = write("defaults: [base, optim: mine, _self_]\ntrainer: {log_every: 2, epochs: 2}\noptim: {beta1: 0.6}\n")
    config = load_config(run, [*COMPLETE, "trainer.epochs=3"])
    assert (config.trainer.seed, config.trainer.log_every, config.trainer.epochs) == (1, 2, 3)
    assert (config.optim.learning_rate, config.optim.beta1) == (0.5, 0.6)
    write("defaults: [optim: sgd, _self_]\n", "base.yaml")
    run = write("defaults: [base, optim: adafactor, peft: null, _self_]\n")
    assert load_config(run, COMPLETE).optim.name == "adafactor"
    assert load_config(run, [*COMPLETE, "optim=adamw"]).optim.name == "adamw_torch_fused"
    assert only(write("defaults: [base, override optim: adafactor, _self_]\n"), *COMPLETE).code == "bad-defaults-entry"
    run = write("packing: padding\noptim: adafactor\n")
    config = load_config(run, [*COMPLETE, "packing.strategy=in_order", "optim.learning_rate=0.5"])
    assert (config.packing.mode, config.packing.strategy) == ("padding", "in_order")
    assert (config.optim.name, config.optim.learning_rate) == ("adafactor", 0.5)


def test_the_whole_override_grammar_works_and_interpolations_see_the_environment(monkeypatch):
    run = write("data: {eval: 0.1, max_length: 64}\n")
    grammar = ["~data.eval", "+model.config.vocab_size=7", "++optim.beta1=0.5", "data.max_length=32", "+peft=lora"]
    config = load_config(run, [*COMPLETE, *grammar])
    assert (config.data.eval, config.data.max_length, config.model.config) == (None, 32, {"vocab_size": 7})
    assert (config.optim.beta1, config.peft.kind) == (0.5, "lora")
    monkeypatch.setenv("WHO", "me")
    run = write(
        "trainer: {output_dir: 'runs/${oc.env:WHO}-${trainer.seed}-${now:%Y}'}\ndata: {max_length: '${batch.tokens_per_device}'}\n"
    )
    config = load_config(run, [*COMPLETE, "batch.tokens_per_device=99", "trainer.seed=7"])
    assert config.trainer.output_dir.startswith("runs/me-7-20")
    assert config.data.max_length == 99


@pytest.mark.parametrize("text", ["${x}", r"\${x}", r"a\\${b}", "2e-5", "no", "null", "é: #", "  ", "a\nb", "07"])
def test_the_resolved_yaml_is_read_back_to_an_equal_config(text: str) -> None:
    config = load_config(None, COMPLETE)
    trainer = replace(config.trainer, samples=[text], max_steps=3)
    config = replace(config, trainer=trainer, optim=Optim(learning_rate=1e-9))
    assert load_config(write(to_yaml(config)), []) == config
    for word in ("no", "off"):  # unquoted
        assert load_config(write(f"trainer: {{mixed_precision: {word}}}\n"), COMPLETE).trainer.mixed_precision == "no"


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("optim: {learning_rte: 1}", "[no-such-key]", "Did you mean optim.learning_rate?"),
        ("trainer: {per_device_train_batch_size: 1}", "[no-such-key]", "batch.examples_per_device"),
        ("num_train_epochs: 3", "[no-such-key]", "trainer.epochs"),
        ("optim.learning_rate: 1", "[no-such-key]", "Nest it: optim: {learning_rate"),
        ("zzz: 1", "[no-such-key]", "The groups are model, data"),
        ("data: {train: [{path: a/b, wieght: 1}]}", "[no-such-key]", "Did you mean weight?"),
        ("optim: 3", "the whole number 3 where a group", "Write optim: {name"),
        ("packing: {mode: paked}", "the text 'paked'", "Allowed: padding|padding_free|packed. Did you mean packed?"),
        ("trainer: {max_steps: yes}", "found true", "whole number ≥ 1, or null"),
        ("data: {max_length: none}", "the text 'none'", "Write null for none."),
        ("model: {revision: 12}", "the whole number 12", "Quote it"),
        ("tracking: {report_to: [wandb, tensorbord]}", "the text 'tensorbord'", "tensorboard"),
        ("peft: lor", "no choice 'lor'", "Did you mean lora?"),
        ("trainer: {output_dir: '${oc.env:NOT_SET_ANYWHERE}'}", "'NOT_SET_ANYWHERE' not found", "oc.env"),
        ("trainer: {output_dir: '${nowhere}'}", "'nowhere' not found", "full path"),
    ],
)
def test_a_wrong_value_is_named_with_line_key_and_remedy(line: str, what: str, fix: str) -> None:
    found = problems(
        write(f"# a comment\n{line}\n"), *COMPLETE[:1], *([] if "train:" in line else COMPLETE[1:2]), "batch=small"
    )
    assert found[0].where.startswith("run.yaml:2, ")
    assert what in str(found[0])
    assert fix in found[0].fix


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("a: [1\nb: 2", "run.yaml:2", "[not-yaml]"),
        ("a:\n\tb: 1", "run.yaml:2", "[not-yaml]"),
        ("optim: {beta1: 0.5}\ndata:\n  train: a\n  train: b\n", "run.yaml:4", "duplicate key train"),
        ("- 1\n", "run.yaml:1", "mapping"),
        ("\ntrainer: {output_dir: '${'}", "run.yaml:2", "at input '${'"),
        ("trainer: {seed: 1}\ndefaults:\n  - peft: lra\n", "run.yaml:3", "no choice 'lra'"),
        ("defaults: [nothing_here]\n", "run.yaml:1", "nothing_here"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_line(text: str, place: str, what: str) -> None:
    found = only(write(text), *COMPLETE)
    assert found.where.startswith(place)
    assert what in str(found)


def test_files_that_are_missing_and_faults_of_a_shipped_choice_are_placed_where_they_were_named() -> None:
    write("", "my-run.yaml")
    assert "my-run.yaml" in only("my-rum.yaml").fix
    write("", "recipes/quickstart-sft.yaml")  # as in a checkout, where our recipes are found twice
    (recipe,) = problems("recipes/quickstart-sft")
    assert recipe.fix.startswith("Did you mean recipes/quickstart-sft.yaml or recipes/quickstart-")
    assert only(".").code == "not-a-file"
    run = write("trainer: {seed: 1}\nstrategy: {name: zero3}\ndefaults:\n  - optim: adafactor\n")
    assert only(run, *COMPLETE).where.startswith("run.yaml:4, defaults, optim.name")
    spread = ("strategy.name=zero3", "optim=adafactor")
    assert only(None, *COMPLETE, *spread).where.startswith("command line, optim=adafactor, optim.name")


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("optim.learning_rate=1e-4,1e-5", "sweeps", "packtrain sbatch"),
        ("--dryrun", "[no-such-flag]", "key=value"),
        ("--gpus=8", "[no-such-flag]", "Did you mean topology.gpus_per_node?"),
        ("topology.account=lab", "[no-such-key]", "a line to topology.sbatch: --account=…"),
        ("run2.yaml", "not of the form key=value", "Example"),
        ("a=[", "[unreadable-argument]", "Quote the value"),
        ("topology.sbatch=[--mem=0, -p x]", "[unreadable-argument]", "\"topology.sbatch=['--mem=0','-p x']\""),
        ("topology=loca", "no choice 'loca'", "Did you mean local?"),
        ("data.train[0]=x", "[not-a-key]", "lists are set whole"),
        ("optim..beta1=1", "[not-a-key]", "GROUP.NAME"),
        ("optim=null", "[group-needs-choice]", "optim=CHOICE"),
        ("~peft=lora", "no peft to take away", ""),
        ("optim.BETA1=0.5", "[no-such-key]", "optim.beta1"),
        ("peft.r=many", "the text 'many'", "whole number"),
        ("~optim.beta1", "no optim.beta1 to take away", ""),
        ("optim.beta1.x=1", "the mapping {'x': 1}", ""),
        ("lora.r=3", "[no-such-key]", "Choose peft=lora"),
        ("tracking.report_to=wandb", "the text 'wandb'", "Write [wandb]."),
    ],
)
def test_a_wrong_override_is_named_as_such(override: str, what: str, fix: str) -> None:
    found = only(None, override, *COMPLETE)
    assert found.where.startswith("command line, ")
    assert what in str(found)
    assert fix in found.fix


def test_all_problems_are_reported_at_once_and_each_at_its_own_place() -> None:
    run = write("model: {path: ./gone}\noptim:\n  lr: 1\n  beta2: 2\ndata: {train: ./gone.jsonl, eval: 1.5}\n")
    places = {problem.where for problem in problems(run, "-m", "peft=lor", "trainer.seed=x")}
    assert places == {
        "command line, -m",
        "command line, peft=lor",
        "command line, trainer.seed",
        "run.yaml:1, model.path",
        "run.yaml:3, optim.lr",
        "run.yaml:4, optim.beta2",
        "run.yaml:5, data.train",
        "run.yaml:5, data.eval",
        "run.yaml, batch.examples_per_step",
    }


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["data.train={split: x}"], "data.train", "[no-source-path]"),
        (["data.train=./none.jsonl"], "data.train", "no file or folder ./none.jsonl"),
        (["data.train=[a/b,/none/at/all]"], "data.train[1]", "no file or folder /none/at/all"),
        (["data.chat_template=mine.jinja"], "data.chat_template", "[no-such-path]"),
        (["model.path=gone.gguf"], "model.path", "[no-such-path]"),
        (["batch.examples_per_step=null", "batch.tokens_per_step=20000"], "batch.tokens_per_step", "16384 or 24576"),
        (["peft.r=4"], "peft.r", "[no-adapters]"),
        (["strategy=fsdp2", "optim=adafactor"], "optim.name", "[optimizer-needs-whole-weights]"),
        (["strategy=zero3_offload", "optim=sgd"], "optim.name", "[offload-needs-adamw]"),
        (["strategy=zero2", "optim.name=muon"], "optim.name", "needs whole matrices, to make them orthogonal"),
        (["optim.name=lomo"], "optim.name", "updates in the backward pass"),
        (["optim.groups=[{match: '('}]"], "optim.groups[0].match", "[not-a-pattern]"),
        (["peft=lora", "peft.options={use_dorra: true}"], "peft.options.use_dorra", "[no-such-option]"),
        (["peft=lora", "peft.options={use_dora: 1}"], "peft.options.use_dora", "found 1"),
        (["peft=lora", "peft.options={init_lora_weights: pissa}"], "peft.options.init_lora_weights", "found 'pissa'"),
        (
            ["peft=lora", "peft.options={layers_to_transform: [0]}"],
            "peft.options.layers_to_transform",
            "[layers-need-names]",
        ),
        (["strategy=zero1", "model.dtype=float16", "peft=lora"], "model.dtype", "cannot be spread by zero1"),
        (["+topology.environment.A=[1]"], "topology.environment.A", "found [1]"),
        (["+topology.environment.WORLD_SIZE=2"], "topology.environment.WORLD_SIZE", "[variable-of-launcher]"),
        (["+topology.environment={A B: x}"], "topology.environment.A B", "[not-a-variable]"),
        (["topology.main_address='n1 n2'"], "topology.main_address", "[not-a-host]"),
        (["trainer.output_dir="], "trainer.output_dir", "[no-run-folder]"),
        (["objective.kind=dpo", "objective.loss=[]"], "objective.loss", "[no-loss]"),
        (["+topology.environment.WANDB_API_KEY=x"], "topology.environment.WANDB_API_KEY", "[has-secret]"),
        (["topology.main_address=n1:29500"], "topology.main_address", "its port is topology.main_port"),
        (["data.eval=1.0"], "data.eval", "between 0 and 1"),
        (["trainer.resume=nevr"], "trainer.resume", "Did you mean never?"),
        (["trainer.resume=/"], "trainer.resume", "RUN/checkpoints/step-N"),
        (["trainer.resume_despite=all"], "trainer.resume_despite", "Write [all]."),
        (["data.overlong=keep_end"], "data.overlong", "truncate"),
        (["objective.kind=dpo", "objective.loss=[ipo,sfft]"], "objective.loss[1]", "Did you mean sft?"),
        (["objective.kind=dpo", "objective.options.loss_weights=[1,2]"], "options.loss_weights", "2 weights for 1"),
        (["objective.kind=dpo", "objective.loss=kto"], "objective.loss", "use packtrain kto (objective.kind=kto)"),
        (["objective.kind=kto", "objective.loss=[hinge]"], "objective.loss", "hinge is no loss of packtrain kto"),
        (["objective.kind=reward", "objective.loss=nll"], "objective.loss", "[no-such-loss]"),
        (["objective.kind=dpo", "objective.options.ld_alfa=1"], "objective.options.ld_alfa", "Did you mean ld_alpha?"),
        (["objective.options.label_smoothing=0.1"], "objective.options.label_smoothing", "Use packtrain dpo"),
        (["+objective.ref_model=a/b"], "objective.ref_model", "Did you mean objective.reference?"),
        (["objective.beta=0.2"], "objective.beta", "or use packtrain dpo (objective.kind=dpo)"),
        (["objective.kind=dpo", "objective.options.neftune_noise_alpha=5"], "neftune_noise_alpha", "Use packtrain sft"),
        (["objective.kind=dpo", "objective.reference=modle"], "objective.reference", "Did you mean model?"),
        (["objective.kind=dpo", "objective.reference=/none/at/all"], "objective.reference", "[no-such-path]"),
        (
            ["objective.kind=kto", "objective.options={desirable_weight: 0, undesirable_weight: 0}"],
            "objective.options",
            "[weights-all-zero]",
        ),
        (["+optim.schedule_options.min_lr=1"], "optim.schedule_options.min_lr", "[no-such-option]"),
        (["optim.schedule=polynomial", "+optim.schedule_options.power=0"], "schedule_options.power", "number > 0"),
        (["optim.schedule=polynomial", "+optim.schedule_options.power=true"], "schedule_options.power", "number > 0"),
        (["data.eval=5%"], "data.eval", "0.05"),
        (["data.eval=null", "trainer.samples=[0, Why?]"], "trainer.samples", "[sample-without-eval]"),
        (["data.eval=0.1", "trainer.samples=[-1]"], "trainer.samples", "[no-such-example]"),
        ([*MEASURED, "trainer.measure_every=6"], "trainer.measure_every", "Set it to 4 or 8"),
        (["trainer.measured_rows=5"], "trainer.measured_rows", "[no-measures]"),
        (["trainer.mixed_precision=fp8", "strategy=zero2"], "trainer.mixed_precision", "[zero-multiplies-fp8]"),
        (["trainer.torch_compile=true", "strategy=zero3"], "trainer.torch_compile", "zero3 gathers the weights"),
        (["optim.beta1=1"], "optim.beta1", "below 1"),
        (["objective.kind=dpo", "objective.options.ld_alpha=1.5"], "objective.options.ld_alpha", "from 0 to 1"),
        (["data.train=[a/b,{path: c/d, weight: 1e9}]"], "data.train[1].weight", "at most 10000"),
        (["data.chat_template=chatmll"], "data.chat_template", "Did you mean chatml?"),
    ],
)
def test_an_impossible_combination_is_refused(overrides: list[str], key: str, said: str) -> None:
    found = only(None, *COMPLETE, *overrides)
    assert key in found.where
    assert said in str(found)


SET = {
    "data.stages": "data.stages=[{weights: {owner/data: 1}}]",
    "!model.config.model_type": "model.tokenizer=null",
    "model.config.model_type": "model.config.model_type=llama",
    "trainer.samples": "trainer.samples=[hi]",
    r"!trainer.best_by~(lowest|highest)\s\S+": "trainer.best_by=loss",
    "trainer.best_by:given": "trainer.best_by=highest eval_loss",
    "trainer.answers": "trainer.answers=exact",
    "trainer.tasks": "trainer.tasks=[words]",
    "!trainer.resume=auto": "trainer.resume=never",
    "!topology.main_address=null": "topology.main_address=n1",
    "peft.dropout": "peft.dropout=0.1",
    "peft.options.use_dora": "peft.options={use_dora: true}",
    "model.backend.by_document": "model.attention=per_document",
    "model.backend.why_not_split": "model.attention=per_document",
    "!model.is_base_for_adapters": "model.path=gone.gguf",
    "strategy.spec.shards_weights": "strategy.name=zero3",
    "!strategy.spec.shards_within_machines": "strategy.name=ddp",
    "objective.spec.reference": "objective.kind=dpo",
    "objective.spec.scores": "objective.kind=reward",
    "objective.spec.examples=documents": "objective.kind=sft",
    "!objective.spec.examples=documents": "objective.kind=dpo",
    "objective.spec.examples=pairs": "objective.kind=dpo",
    "objective.spec.examples=answers": "objective.kind=kto",
    r"trainer.output_dir~\s*": "trainer.output_dir=' '",
    r"trainer.output_dir~[^\n]*\n[\s\S]*": "trainer.output_dir='a\nb'",
    r"topology.command~[^\n]*\n[\s\S]*": "topology.command='a\nb'",
    r"!topology.main_address~[\w.%-]+|[\w.%-]*:[\w.%-]*:[\w.:%-]*": "topology.main_address=n1:80",
}
"""Word of a rule → override that makes it hold, where the word does not say it itself."""


def made_true(word: str) -> str:
    """The override that makes a word of a rule hold."""
    if (word := word.strip("()")) in SET:
        return SET[word]
    path, _, wanted = word.removeprefix("!").removesuffix(":given").partition("=")
    kind, negated = keys()[path].type, word.startswith("!")
    if wanted and not negated:
        return f"{path}={wanted.split('|')[0]}"
    if negated and not wanted:
        return f"{path}={'false' if kind is bool else 0}"
    values = [*choices(kind)[1:], *(["true"] if bool in members(kind) else []), "2"]
    return f"{path}={next(value for value in values if value not in wanted.split('|'))}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: "-".join(rule.keys))
def test_a_rule_is_reached_and_names_its_keys(rule: Rule) -> None:
    given = [made_true(word) for word in rule.words]
    assert {*rule.keys} <= {*keys()}
    found = problems(None, *COMPLETE, *given)
    start = re.split("[{]", rule.what)[0]
    assert any(problem.what.startswith(start) and rule.keys[0] in problem.where for problem in found), (given, found)


EVALUATED = "data: {eval: 0.1}\ntrainer: {eval_every: 5, early_stop_patience: 2}\n"
BY_ACCURACY = "trainer.best_by=highest eval_rewards/accuracies"
BEST = f"objective: {{kind: dpo}}\n{EVALUATED[:-2]}, best_by: {BY_ACCURACY.partition('=')[2]}}}\n"
SHARED = "objective: {kind: dpo}\npacking: {share_prefix: true}\n"
ADAPTED = "defaults: [peft: lora, _self_]\npeft: {r: 4}\n"


@pytest.mark.parametrize(
    ("text", "override", "dropped"),
    [
        (EVALUATED, "data.eval=null", ["trainer.eval_every=5", "trainer.early_stop_patience=2"]),
        (EVALUATED, "~data.eval", ["trainer.eval_every=5", "trainer.early_stop_patience=2"]),
        (EVALUATED, "trainer.eval_every=null", ["trainer.early_stop_patience=2"]),
        (BEST, "data.eval=null", ["trainer.eval_every=5", "trainer.early_stop_patience=2", BY_ACCURACY]),
        (BEST, "trainer.early_stop_patience=null", [BY_ACCURACY]),
        (ADAPTED, "peft=none", ["peft.r=4"]),
        (ADAPTED, "peft.kind=none", ["peft.r=4"]),
        ("data: {overlong: drop}\n", "data.max_length=null", ["data.overlong=drop"]),
        ("trainer: {epochs: 3}\n", "trainer.max_steps=5", ["trainer.epochs=3"]),
        ("trainer: {epochs: 3}\n", "trainer=short", ["trainer.epochs=3"]),
        (SHARED, "packing.mode=padding", ["packing.share_prefix=True"]),
    ],
)
def test_what_the_command_line_leaves_with_nothing_to_act_on_is_dropped_and_said(text, override, dropped):
    lines: list[str] = []
    config = load_config(write(text), [*COMPLETE, override], lines.append)
    assert len(lines) == len(dropped)
    for line, key in zip(lines, dropped, strict=True):
        path = key.partition("=")[0]
        assert line.startswith("run.yaml:") and f", {key}: dropped, as " in line
        assert path.partition(".")[2] not in changes(config).get(path.partition(".")[0], {})
    again: list[str] = []
    assert load_config(write(to_yaml(config), "resolved.yaml"), [], again.append) == config and not again


@pytest.mark.parametrize(
    ("text", "overrides", "key"),
    [
        ("trainer: {eval_every: 5}\n", [], "trainer.eval_every"),
        (EVALUATED, ["data.eval=null", "trainer.eval_every=3", "~trainer.early_stop_patience"], "trainer.eval_every"),
        (ADAPTED, ["peft=none", "peft.r=8"], "peft.r"),
        ("trainer: {epochs: 3, max_steps: 5}\n", ["data.eval=null"], "trainer.epochs"),
    ],
)
def test_what_a_config_or_the_command_line_itself_contradicts_is_refused(text, overrides, key):
    assert key in only(write(text), *COMPLETE, *overrides).where


@pytest.mark.parametrize("key", ["optim.bf16_rounding=stochastic", "optim.bf16_rounding=final"])
def test_the_head_of_a_reward_model_is_rounded_though_adapters_are_not(key: str) -> None:
    adapters = [*COMPLETE, "peft=lora", "model.dtype=bfloat16", key]
    assert only(None, *adapters).where
    load_config(None, [*adapters, "objective.kind=reward"])


@pytest.mark.parametrize(("path", "advice"), ELSEWHERE.items())
def test_a_key_of_other_tools_is_refused_with_its_place_here(path: str, advice: str) -> None:
    group, _, name = path.partition(".")
    found = only(write(f"{group}: {{{name}: x}}\n"), *COMPLETE)
    assert (found.where, found.code, found.fix) == (f"run.yaml:1, {path}", "no-such-key", advice)
    named = re.findall(rf"\b(?:{'|'.join(groups())})\.\w+", advice)
    assert path not in keys() and set(named) <= keys().keys()


def test_docs_config_md_is_what_the_dataclasses_say() -> None:
    page = shipped("configs").parent / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == key_help.markdown(), "python -m packtrain.config.help > docs/config.md"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_help_has_sixty_keys_or_all_and_explains_those_that_are_named(width: int) -> None:
    lines, every = (key_help.help_text(width, asked).splitlines() for asked in ([], ["all"]))
    short, named = (re.findall(r"(?<=[ (])([a-z_0-9]+)=", " ".join(shown)) for shown in (lines, every))
    assert {path.rpartition(".")[2] for path in keys()} <= {*named} and len(every) <= 80
    heads = {"group", *(name for name in groups() if key_help.options(name))}
    assert len(short) - len(heads) <= 60
    assert f"-h all shows {len(named) - len(short)} more" in " ".join(lines)
    assert "learning_rate" in short and "beta2" not in short
    asked = key_help.help_text(width, ["optim", "trainer.max_steps"]).splitlines()
    assert [key for key in keys() if any(line.startswith(f"{key} ") for line in asked)] == [
        *(key for key in keys() if key.startswith("optim.")),
        "trainer.max_steps",
    ]
    for line in (*lines, *asked):
        assert len(line) <= max(width, *(len(word) + 8 for word in line.split()), 0)


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("optim: &x {beta1: *x}\n", "run.yaml", "aliases (*) written out"),
        (BOMB, "run.yaml:", "aliases (*) written out"),
        ("optim: !foo {beta1: 1}\n", "run.yaml:1", "'!foo'"),
        ("optim: ???\n", "run.yaml:1, optim", "[unresolved-value]"),
        ("optim:\n  beta1: ???\n", "run.yaml:2, optim.beta1", "[unresolved-value]"),
        ("trainer: {samples: ['${nope}']}\n", "run.yaml:1, trainer.samples[0]", "Interpolation key 'nope' not found"),
        (f"model: {{config: {'{a: ' * 200}1{'}' * 200}}}\n", "run.yaml", "40 levels"),
        (f"model: {{config: {'{a: ' * 2000}1{'}' * 2000}}}\n", "run.yaml", "[too-deep]"),
        ("\ndefaults: [peft: lora, peft: none]\n", "run.yaml:2, defaults", "[two-choices]"),
        ("\ndefaults: ['${x}']\n", "run.yaml:2, defaults", "[bad-defaults-entry]"),
        ("defaults: [{peft: lora, optim: sgd}]\n", "run.yaml:1, defaults", "[bad-defaults-entry]"),
        ("defaults: [{peft: null, optim: sgd}]\n", "run.yaml:1, defaults", "[bad-defaults-entry]"),
        (f"optim: {{learning_rate: 1{'0' * 400}}}\n", "run.yaml:1, optim.learning_rate", "the whole number 1000"),
        ("optim: {schedule_options: {num_cycles: many}}\n", "run.yaml:1, optim.schedule_options.num_cycles", "'many'"),
        ('trainer: {output_dir: "a\\nb"}\n', "run.yaml:1, trainer.output_dir", "[line-break]"),
        ('topology: {command: "a\\n~/b"}\n', "run.yaml:1, topology.command", "[line-break]"),
        (
            "data: {eval: 1.5e-05, streaming: true, max_length: 9}\ntrainer: {max_steps: 3}\n",
            "run.yaml:1, data.eval",
            "[fraction-of-stream]",
        ),
        ('topology: {sbatch: ["--mem=0\\n-N 2"]}\n', "run.yaml:1, topology.sbatch[0]", "[not-an-sbatch-option]"),
        ("\ndefaults: [run, _self_]\n", "run.yaml", "[circular-defaults]"),
        ("\ndefaults: peft\n", "run.yaml:2, defaults", "[defaults-not-a-list]"),
        ("trainer: {resume: ~nobody-here/run}\n", "run.yaml:1, trainer.resume", "[no-such-checkpoint]"),
        ("data: {cache_dir: run.yaml}\n", "run.yaml:1, data.cache_dir", "run.yaml is a file"),
    ],
)
def test_a_hostile_file_is_refused_at_its_line(text: str, place: str, what: str) -> None:
    found = problems(write(text), *COMPLETE)
    assert len(found) == 1, [str(one) for one in found]
    assert found[0].where.startswith(place)
    assert what in str(found[0])


@pytest.mark.parametrize(
    ("text", "place"), [("kind: [\n", "peft/mine.yaml:2"), ("kimd: lora\n", "peft/mine.yaml:1, peft.kimd")]
)
def test_the_fault_of_a_file_that_a_group_names_as_text_is_found_there(text: str, place: str) -> None:
    write(text, "peft/mine.yaml")
    assert [problem.where for problem in problems(write("peft: mine\n"), *COMPLETE)] == [place]


def test_the_page_has_every_optimizer_with_its_states_package_and_strategies() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/fitting.md").read_text()
    table = page.partition("## Optimizers")[2].partition("**Muon**")[0]
    known = dict[str, OptimizerSpec]()
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[0]) if len(cells) == 4 and cells[0] != "`optim.name`" else ():
            known[name] = spec = OPTIMIZERS[name]
            assert (cells[1][0] == str(spec.states)) == (spec.states > 0) and cells[2] == spec.package, name
            assert cells[3] == ("all" if spec.on_host else "`ddp`" if spec.whole else "all but `zero3_offload`"), name
    assert known == OPTIMIZERS
