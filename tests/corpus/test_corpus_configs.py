"""Configs that nobody would write on purpose: each key with values of every wrong kind, and YAML of every wrong form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_origin

from packtrain.config.keys import Key, keys, members
from tests.corpus.case import Case, command, each_of

GOOD = {"model.path": "owner/model", "data.train": "owner/data"}
GOOD |= {"batch.examples_per_step": "32", "trainer.output_dir": "run"}
"""Enough for a plan, without any file."""


def of_keys(values: dict[str, str]) -> str:
    """YAML of dotted keys, by their groups, one line for each key."""
    groups: dict[str, dict[str, str]] = {}
    for path, value in values.items():
        group, _, name = path.partition(".")
        groups.setdefault(group, {})[name] = value
    lines = [
        f"{group}:\n" + "".join(f"  {name}: {value}\n" for name, value in of.items()) for group, of in groups.items()
    ]
    return "".join(lines)


def broken_values(key: Key) -> Iterator[tuple[str, str]]:
    """(what it is, YAML) of values that a key cannot have, by its type and bounds."""
    kinds = members(key.type)
    simple = {kind for kind in kinds if kind in (bool, int, float, str)}
    holds = {get_origin(kind) for kind in kinds}
    number = bool({int, float} & simple)
    if dict not in holds and key.path not in ("data.train", "data.eval"):
        yield "a mapping", "{a: {b: 1}}"
    if list not in holds:
        yield "a list", "[[1], 2]"
    if type(None) not in kinds:
        yield "null", "null"
    if number and str not in simple:
        yield from {"text": "many", "not a number": ".nan", "without end": "-.inf", "superscript": '"2²"'}.items()
        yield from {"out of its bounds": "-1000000000001", "true": "true"}.items()
    if not number and bool not in simple and dict not in holds:
        yield "a number", "0.5" if key.path != "data.eval" else "1.5"
    if simple == {bool}:
        yield "text", "maybe"


def wrong_values() -> Iterator[Case]:
    """Of each group all keys that can be wrong in one way: every one of them is named, with its line."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in keys().values():
        for what, value in broken_values(key):
            found.setdefault((what, key.path.partition(".")[0]), {})[key.path] = value
    for (what, group), values in found.items():
        files, says = {"c.yaml": of_keys({**GOOD, **values})}, tuple(f", {path}" for path in values)
        yield command(f"each key of {group} is {what}", "plan", "c.yaml", files=files, says=says)


DECAY = "optim: {schedule: warmup_stable_decay"
FORMS = {
    "a number of 5,000 digits": (f"optim:\n  learning_rate: 1{'0' * 5000}\n", "digits"),
    "1:30 is 90 in YAML 1.1": ("topology:\n  time: 1:30\n", "1:30"),
    "010 is 8 in YAML 1.1": ("trainer:\n  max_steps: 010\n", "010"),
    "a list": ("- a\n- b\n", "a mapping of groups"),
    "a doubled key": ("optim:\n  beta1: 0.1\n  beta1: 0.2\n", "duplicate key"),
    "nested a hundred times": ("model: {config: " + "{a: " * 100 + "1" + "}" * 100 + "}\n", "levels"),
    "far too many keys": ("model:\n  config:\n" + "".join(f"    k{n}: 1\n" for n in range(20_000)), "more than"),
    "a Python object": ("optim: !!python/object/apply:os.system ['touch stolen']\n", "c.yaml"),
    "an interpolation in a circle": (
        "trainer: {output_dir: '${trainer.resume}', resume: '${trainer.output_dir}'}\n",
        "circle",
    ),
    "a variable that is not set": ("trainer: {output_dir: '${oc.env:NOT_SET_AT_ALL}'}\n", "NOT_SET_AT_ALL"),
    "keys that are numbers": ("optim: {1: 2, 1.5: 3, true: 4}\n", "c.yaml:1"),
    "a defaults list of a number": ("defaults: [1]\n", "defaults"),
    "a defaults list that leads out": ("defaults: [peft: ../../etc/passwd]\n", "peft"),
    "a split that is a list": ("data: {train: [{path: a/b, split: [train]}]}\n", "split"),
    "negative layers": ("model:\n  config: {model_type: llama, num_hidden_layers: -1}\n", "num_hidden_layers"),
    "min_lr_rate 5": ("optim: {schedule: cosine_with_min_lr, schedule_options: {min_lr_rate: 5}}\n", "min_lr_rate"),
    "a timescale of 0": ("optim: {schedule: inverse_sqrt, schedule_options: {timescale: 0}}\n", "timescale"),
    "a decay of no known form": (
        f"{DECAY}, schedule_options: {{num_decay_steps: 9, decay_type: fast}}}}\n",
        "decay_type",
    ),
    "a key that was removed": ("topology: {memory: '500G'}\n", "topology.memory"),
    "an option of sbatch's with an open quote": ('topology: {sbatch: ["--comment=\'a"]}\n', "topology.sbatch[0]"),
    "a regex that does not compile": ("peft: {kind: lora, target_modules: '('}\n", "peft.target_modules"),
    "a variable with a NUL": ('topology: {environment: {A: "a\\0b"}}\n', "topology.environment"),
    "an address of two machines": ("topology: {kind: manual, nodes: 2, main_address: 'a,b'}\n", "main_address"),
    "a run folder of 256 bytes": (f"trainer: {{output_dir: {'x' * 256}}}\n", "output_dir"),
}
"""What a file holds, and what is said about it."""


TAKEN = {
    "nothing": ("", "owner/model"),
    "a learning rate of 10": ("optim: {learning_rate: 10}\n", "is large for a trained model"),
    "a model of the hub with LoRA on layers of any name": (
        "peft: {kind: lora, target_modules: [w_q]}\n",
        "owner/model",
    ),
}
"""What a file holds that is not refused, and what is said about it."""

CASES = [*wrong_values()]
for forms, code in ((FORMS, 2), (TAKEN, 0)):
    for name, (text, said) in forms.items():
        own = [f"{key}={value}" for key, value in GOOD.items() if f"{key.partition('.')[2]}:" not in text]
        how = {"files": {"c.yaml": text}, "says": (said,), "expect": (code,)}
        CASES.append(command(f"a config: {name}", "plan", "c.yaml", *own, **how))
for verb, key in ((("plan",), "~topology.main_port"), (("sbatch", "sft", "-m", "optim.beta1=0.8,0.9"), "trainer.seed")):
    CASES.append(command(f"a number of 5,000 digits: {verb[0]}", *verb, f"{key}={'9' * 5000}", says=(key,)))
test_case = each_of(CASES, one_in=8)
