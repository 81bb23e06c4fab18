"""The JSON Schema takes what the loader takes, and refuses what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.parsers.yaml import construct_yaml_implementation  # YAML 1.2, as editors read it
from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError
from omegaconf import OmegaConf

from packtrain.config.compose import load_config, to_yaml
from packtrain.config.keys import Key, choices, keys, keys_of
from packtrain.config.schema import DataSource, Stage, WeightGroup, groups
from packtrain.config.validate import build
from packtrain.config.yaml_files import SCHEMA_LINE, shipped
from packtrain.errors import UserError
from tests.unit.command_line import packtrain

PUBLISHED = shipped("configs").parent / "docs" / "packtrain.schema.json"
RECIPES = sorted(shipped("recipes").glob("*.yaml"))
CHECK = Draft7Validator(json.loads(PUBLISHED.read_text()))
COMPLETE = {"model.path": "owner/model", "data.train": "owner/data", "batch.examples_per_step": "32"}
ENTRIES = {"data.train": DataSource, "data.stages": Stage, "optim.groups": WeightGroup}
WRONG = {  # YAML → the key that is refused
    "optim: {lr: 2e-5}": "optim.lr",  # names of other tools, or of another group
    "trainer: {learning_rate: 2e-5}": "trainer.learning_rate",
    "trainer: {num_train_epochs: 3}": "trainer.num_train_epochs",
    "learning_rate: 2e-5": "learning_rate",
    "lora: {r: 16}": "lora",
    "batch: {per_device_train_batch_size: 4}": "batch.per_device_train_batch_size",
    "topology: {partition: gpu}": "topology.partition",
    "model: {attention: flash_attention_2}": "model.attention",
    "optim: {name: adamw}": "optim.name",
    "strategy: {name: deepspeed}": "strategy.name",
    "objective: {kind: sftt}": "objective.kind",  # typing errors
    "data: {trian: a.jsonl}": "data.trian",
    "packing: {mode: pack}": "packing.mode",
    "tracking: {report_to: [wandbb]}": "tracking.report_to",
    "optim: {learning_rate: fast}": "optim.learning_rate",  # values of another type
    'batch: {examples_per_step: "32"}': "batch.examples_per_step",
    "trainer: {max_steps: 1.5}": "trainer.max_steps",
    "trainer: {seed: true}": "trainer.seed",
    "trainer: {ledger: 1}": "trainer.ledger",
    "trainer: {gradient_checkpointing: true}": "trainer.gradient_checkpointing",
    "trainer: {epochs: null}": "trainer.epochs",
    "trainer: {output_dir: 5}": "trainer.output_dir",
    "tracking: {report_to: wandb}": "tracking.report_to",
    "data: {columns: {prompt: 1}}": "data.columns",
    "peft: {r: 0}": "peft.r",  # values out of bounds
    "optim: {beta2: 1.0}": "optim.beta2",
    "optim: {learning_rate: -1e-4}": "optim.learning_rate",
    "trainer: {epochs: 0}": "trainer.epochs",
    "topology: {main_port: 70000}": "topology.main_port",
    "optim.learning_rate: 2e-5": "optim.learning_rate",  # in the wrong place
    "model: {path: {name: owner/model}}": "model.path",
    "data: {train: [{path: a.jsonl, wieght: 2}]}": "data.train",
    "data: {train: [[a.jsonl]]}": "data.train",
    "optim: {groups: {match: lora_B}}": "optim.groups",
    "optim: {groups: [{match: lora_B, lr: 2}]}": "optim.groups",
    "optim: {defaults: [sgd]}": "optim.defaults",
    "peft: [lora]": "peft",
    "packing: 3": "packing",
    "defaults: {peft: lora}": "defaults",
    "defaults: [{peft: true}]": "peft",
    "defaults: [{lora: r16}]": "lora",
    'defaults: ["${peft}"]': "defaults",
}
RIGHT = (
    "defaults: [peft: lora, /optim: sgd, strategy/ddp, _self_, packing: null]",
    "optim: sgd\npeft:\nstrategy: {}",
    "optim: {learning_rate: 2e-5, warmup_steps: 1E-1, weight_decay: .1}",
    'optim: {learning_rate: "2e-5"}',
    "trainer: {max_steps: 10_000, ledger: yes, deterministic: off, mixed_precision: no}",
    "trainer: {mixed_precision: false, seed: '${oc.decode:${oc.env:SEED,1}}', log_every: '${trainer.seed}'}",
    "trainer: {max_steps: '${trainer.log_every}'}\nmodel: {dtype: '${oc.env:DTYPE,bfloat16}'}",
    "data: {eval: {math: a/b, chat: [c/d, {path: e/f, samples: 5}]}}",
    "data: {eval: {path: a/b, weight: 2}}",
    "data: {eval: 0.05, train: [a/b, {path: c/d, weight: 0.5, columns: {prompt: question}}]}",
    "model: {config: {anything: [1, {deep: null}]}}",
    "topology: {environment: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: 8}}",
)


def errors(text: str) -> list[list[ValidationError]]:
    """The schema's errors in a text, read as YAML 1.1 and as YAML 1.2."""
    return [[*CHECK.iter_errors(read(text))] for read in (yaml.safe_load, construct_yaml_implementation().load)]


def refused(text: str, folder: Path) -> list[str]:
    """The places of the loader's errors."""
    (folder / "run.yaml").write_text(text)
    given = OmegaConf.create(text)
    rest = [f"{key}={value}" for key, value in COMPLETE.items() if OmegaConf.select(given, key) is None]
    try:
        load_config(str(folder / "run.yaml"), rest, packages=False)
    except UserError as error:
        return [problem.where for problem in error.problems]
    return []


def test_the_published_schema_is_what_the_command_writes_and_is_one_of_draft_7(tmp_path: Path) -> None:
    Draft7Validator.check_schema(CHECK.schema)
    assert packtrain("schema", folder=tmp_path).stdout == PUBLISHED.read_text(), (
        "packtrain schema > docs/packtrain.schema.json"
    )


def test_every_recipe_begins_with_the_published_address_and_passes_check_jsonschema() -> None:
    assert RECIPES and CHECK.schema["$id"] in SCHEMA_LINE
    assert [file.name for file in RECIPES if not file.read_text().startswith(SCHEMA_LINE)] == []
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", PUBLISHED]
    done = subprocess.run([*command, *RECIPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_choice_and_a_config_with_every_key_pass() -> None:
    for file in shipped("configs").glob("*/*.yaml"):
        values = yaml.safe_load(file.read_text())
        assert [*CHECK.iter_errors({file.parent.name: values})] == [], file
        assert file.stem in CHECK.schema["properties"][file.parent.name]["examples"]
    written = to_yaml(load_config("recipes/quickstart-sft.yaml", []))
    assert yaml.safe_load(written).keys() == groups().keys() and errors(written) == [[], []]


@pytest.mark.parametrize(("text", "key"), WRONG.items())
def test_a_mistake_is_refused_by_the_schema_and_by_the_loader(text: str, key: str, tmp_path: Path) -> None:
    assert any(key in where for where in refused(text, tmp_path))
    for found in errors(text):
        [error] = found
        assert key.rpartition(".")[2] in [*error.absolute_path] or key.rpartition(".")[2] in error.message


@pytest.mark.parametrize("text", RIGHT)
def test_what_the_loader_takes_is_taken_by_the_schema_in_both_versions_of_yaml(text: str, tmp_path: Path) -> None:
    assert refused(text, tmp_path) == []
    assert errors(text) == [[], []]


def samples(key: Key) -> Iterator[Any]:
    bounds = [bound for bound in (key.minimum, key.above, key.below, key.maximum) if bound is not None]
    words = [
        *choices(key.type)[:2],
        "text",
        *(["no"] if "no" in choices(key.type) else []),
        "15e-1" if key.above else "5e-1",
    ]
    plain = [None, True, False, -1, 0, 1, 1.5, float("inf"), *words]
    plain += [value for bound in bounds for value in (int(bound) - 1, int(bound), int(bound) + 1)]
    few = [None, 1, *words]
    yield from (key.default, *plain, [], {}, *([value] for value in few), *({"a": value} for value in few))
    yield from ({"path": "a"}, [{"path": "a"}], {"path": 1}, [{"path": 1}], {"a": [{"path": "a"}]}, {"until": 1})


@pytest.mark.parametrize("of", [*groups(), *ENTRIES])
def test_schema_and_loader_take_the_same_values_of_every_key(of: str) -> None:
    group, _, name = of.partition(".")
    own = keys_of(ENTRIES[of]) if name else keys_of(groups()[of], f"{of}.")
    inside = CHECK.schema["definitions"][ENTRIES[of].__name__] if name else CHECK.schema["properties"][of]
    assert inside["properties"].keys() == own.keys()
    for key_name, key in own.items():
        check = CHECK.evolve(schema={**inside["properties"][key_name], "definitions": CHECK.schema["definitions"]})
        assert key.doc in check.schema["description"] and check.schema["default"] == key.default
        assert check.schema.get("x-advanced", False) == key.advanced
        for value in samples(key):
            _, faults = build({group: {name: [{key_name: value}]} if name else {key_name: value}})
            assert check.is_valid(value) == (not faults), (of, key_name, value)


def test_any_key_may_be_interpolated_whole() -> None:
    given = {group: dict.fromkeys(keys_of(cls), "${oc.env:HERE}") for group, cls in groups().items()}
    assert sum(map(len, given.values())) == len(keys()) and [*CHECK.iter_errors(given)] == []
