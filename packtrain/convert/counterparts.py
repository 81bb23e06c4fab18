"""Rules for converting keys of other trainers; the tables (tables/*.yaml) name them.

A rule takes the value and all their settings, and returns an `Outcome`. A value that it cannot understand raises ValueError or its kin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from packtrain.config.rules.paths_and_packages import as_name, template_names
from packtrain.config.schema import Tracker
from packtrain.convert.foreign_file import Foreign, Value
from packtrain.errors import UserError
from packtrain.objectives.spec import OBJECTIVES

Kind = Literal["converted", "differs", "not needed", "no counterpart"]
DIFFERS = "≠ "
"""Beginning of a reason: the key became something here, but the training is not quite the same."""
GUESS = 100
"""Steps between checkpoints or evaluations, if theirs are counted in epochs."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """Settings of a run of theirs with their defaults, our `verb`, and chat `templates`."""

    values: Mapping[str, Value]
    verb: str
    file: Foreign
    templates: Mapping[str, str] = field(default_factory=dict)

    def get(self, *names: str) -> Value:
        """Return the first of these settings that is set."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def holds(self, row: Mapping[str, Value], value: Value = None) -> bool:
        """Return whether a row's `if` holds: NAME (is on), NAME=PATTERN, or !CONDITION. `value` and `verb` are names too."""
        known = {**self.values, "verb": self.verb, "value": value}
        for word in row.get("if", "").split():
            name, sign, pattern = word.removeprefix("!").partition("=")
            found = known.get(name)
            if bool(re.fullmatch(pattern, str(found), re.DOTALL) if sign else not is_off(found)) == word.startswith(
                "!"
            ):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Our `values` by key. If a value is made of several settings, only the key that this one `became` part of."""

    values: Mapping[str, Value] = field(default_factory=dict)
    why: str = ""
    kind: Kind = "converted"
    became: str = ""


_TEMPLATES = {"qwen_25": "qwen2_5", "qwen": "qwen2_5", "phi_3": "phi3", "phi_35": "phi3_5", "phi": "phi3"}
Rule = Callable[[Value, Theirs], Outcome]
AS_HERE = Outcome(why="as without the key", kind="not needed")


def number(value: Value) -> float:
    """Read a number, also written as text ("1e-4")."""
    return float("" if isinstance(value, bool) else value)


def whole(value: Value) -> int:
    """Read a whole number, also written as text or with a point."""
    return int("" if number(value) % 1 else number(value))


def count(value: Value, otherwise: int) -> int:
    """Read a whole number above 0; else return `otherwise`."""
    try:
        return max(whole(value), 0) or otherwise
    except (ValueError, TypeError):
        return otherwise


def is_off(value: Value) -> bool:
    """Return whether a value turns something off."""
    return value in (0, -1, "", [], {}) or str(value).lower() in ("no", "none", "false", "null", "disabled")


def is_on(value: Value) -> bool:
    """Read a switch. Raises LookupError for other values."""
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]


def listed(value: Value) -> list[Value]:
    """Return a list unchanged, and another value in a list."""
    return value if isinstance(value, list) else [value]


def names(value: Value) -> list[Value]:
    """Split names in a list, or in a text with commas. Numbers stay numbers."""
    parts = [item.split(",") if isinstance(item, str) else [item] for item in listed(value)]
    plain = [item.strip() if isinstance(item, str) else item for part in parts for item in part]
    return [item for item in plain if item != ""]


def refuse(what: object, file: Foreign) -> Value:
    """Raise UserError: packtrain does not train this."""
    fix = "Keep that trainer for it: packtrain trains sft, dpo, kto and reward on text and pictures."
    what = f"it is for {what}, which packtrain does not train"
    raise UserError(what, where=str(file.path), fix=fix, code="not-trained-here")


def refused(what: str, value: Value, theirs: Theirs) -> Outcome:
    """Refuse a key that asks for a training that packtrain does not have."""
    return AS_HERE if is_off(value) else refuse(what, theirs.file)


READERS: dict[str, Callable[[Value], Value]] = {
    "number": number,
    "whole": whole,
    "names": names,
    "mapping": dict,
    "text": str,
    "switch": is_on,
    "escaped": lambda value: str(value).replace("\\n", "\n"),
}


def case(rows: Sequence[Mapping[str, Value]], value: Value, theirs: Theirs) -> Outcome:
    """Return the outcome of the first row that holds. In `set`, $READER stands for the value."""

    def filled(item: Value) -> Value:
        if isinstance(item, dict):
            return {name: filled(part) for name, part in item.items()}
        if isinstance(item, list):
            return [filled(part) for part in item]
        return READERS[item[1:]](value) if str(item).startswith("$") else item

    row = next((row for row in rows if theirs.holds(row, value)), {})
    if not {*row} - {"if"}:
        return AS_HERE
    kind: Kind = row.get("kind", "converted" if {"set", "became"} & {*row} else "not needed")
    return Outcome(filled(row.get("set", {})), row.get("why", ""), kind, row.get("became", ""))


def chosen(choice: Mapping[str, str], value: Value, theirs: Theirs) -> Outcome:
    """Convert a choice. A name is the same here, or replaced by one of ours, or has no counterpart."""
    wanted = str(value).lower()
    if wanted in choice.get("here", "").split():
        return AS_HERE
    if wanted in choice.get("same", "").split():
        return Outcome({choice["to"]: wanted})
    for ours, others in choice.items():
        if ours not in ("to", "same", "else", "here") and wanted in others.split():
            name, _, why = ours.partition(" ")
            return Outcome({choice["to"]: {"true": True, "false": False}.get(name, name)}, why)
    return AS_HERE if is_off(value) else Outcome(why=choice["else"], kind="no counterpart")


def losses(value: Value, theirs: Theirs) -> Outcome:
    """Convert one loss or several, by TRL's names."""
    found = [str(name).replace("chunked_nll", "nll") for name in names(value)]
    if not {*found} <= {*OBJECTIVES[theirs.verb].losses}:
        return Outcome(why="packtrain has no such loss", kind="no counterpart")
    return Outcome({"objective.loss": found[0] if len(found) == 1 else found})


def warmup(value: Value, theirs: Theirs) -> Outcome:
    """Convert a warm-up: a share or a number of steps. Below 1 both are a share here. Steps win there, if there are any."""
    wins = next((key for key in ("warmup_steps", "warmup_ratio") if not is_off(theirs.get(key) or 0)), None)
    if wins and value != theirs.get(wins):
        return Outcome(why=f"{wins} wins over it", kind="not needed")
    return Outcome({"optim.warmup_steps": number(value)})


def per_epoch(path: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert a frequency per epoch. It is counted in steps here, and the steps of an epoch depend on the data."""
    epochs = number(theirs.get("num_train_epochs", "num_epochs") or 1)
    if is_off(value) or (number(value) * epochs <= 1 and not theirs.get("max_steps")):
        return AS_HERE if is_off(value) else Outcome(why="once, at the end: a run ends with it anyway", became=path)
    why = f"theirs is {value} an epoch, ours counts steps: {GUESS} is a guess, choose by the steps of an epoch"
    return Outcome({path: GUESS}, why)


def every(path: str, strategy: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert steps between events. Below 1 they are a share of all steps."""
    if (how := theirs.get(strategy)) not in (None, "steps", "best"):
        return Outcome(why=f"{strategy}={how} decides", kind="not needed")
    steps = max(number(theirs.get("max_steps") or 0), 0)
    count = whole(value) if number(value) >= 1 else int(number(value) * steps)
    return Outcome({path: count or GUESS}, "" if count else f"theirs is a share of all steps: {GUESS} is a guess")


def when(path: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert a strategy: never, by steps, or per epoch."""
    return per_epoch(path, 1, theirs) if str(value) == "epoch" else Outcome(became=path)


def sharding(value: Value, theirs: Theirs) -> Outcome:
    """Convert sharding to a strategy: DeepSpeed's config or its name, FSDP's words or settings."""
    settings = value if isinstance(value, dict) else theirs.file.settings_of(value)
    zero = settings.get("zero_optimization") or settings.get("deepspeed_config") or {}
    if "deepspeed_config_file" in zero:
        return sharding(zero["deepspeed_config_file"], theirs)
    stage = zero.get("stage", zero.get("zero_stage"))
    whole_on_each = "distributed_type" in settings and "FSDP" not in str(settings["distributed_type"])
    offload = [f"{key}: {item}" for key, item in {**settings, **zero}.items() if "offload" in key and not is_off(item)]
    text = "zero0" if whole_on_each else "fsdp" if settings else str(value).lower()
    text = text if stage is None else f"zero{stage}"
    offloads = "none" not in "".join(offload).lower() if offload else "offload" in text
    if found := re.search(r"z(?:ero)?[-_]?([0-3])", text):
        name = {"0": "ddp", "3": "zero3_offload" if offloads else "zero3"}.get(found[1], f"zero{found[1]}")
    elif re.search("shard|fsdp", text):
        name = "fsdp2"
    else:
        unknown = Outcome(why="its stage is not known: choose a strategy", kind="no counterpart")
        return AS_HERE if is_off(value) else unknown
    why = "nothing is kept on the host" if offloads and name != "zero3_offload" else ""
    return Outcome({"strategy.name": name}, why)


def is_text_of_template(value: Value) -> bool:
    """Return whether it is a chat template's text, and not its name."""
    return "{%" in str(value) or "{{" in str(value)


def template(value: Value, theirs: Theirs) -> Outcome:
    """Convert a chat template given by name, as a file, or as text."""
    named, mark, why = theirs.templates.get(str(value), "").partition(DIFFERS)
    text = named.strip() or str(value)
    if is_off(theirs.values.get("use_chat_template", True)):
        return Outcome(why="use_chat_template is off", kind="not needed")
    if is_text_of_template(text):
        return Outcome({"data.chat_template": text}, "its text is a file, which --output writes beside")
    if text == "jinja" and theirs.get("chat_template_jinja"):
        return Outcome(became="data.chat_template")
    name = _TEMPLATES.get(as_name(text), as_name(text))
    if text.endswith((".jinja", ".j2")) or name in template_names():
        return Outcome({"data.chat_template": name if name in template_names() else text}, mark + why)
    if text.startswith(("default", "tokenizer_default")) or is_off(text):
        _, has_other, other = text.partition("tokenizer_default_fallback_")
        why = f"; of a tokenizer without one it is {other} there: then set data.chat_template" if has_other else ""
        return Outcome(why=f"the tokenizer's own{why}", became="data.chat_template")
    what = f"packtrain has none of the name {text}: the tokenizer's own is taken, see packtrain inspect"
    return Outcome(why=what, kind="no counterpart")


def trackers(value: Value, theirs: Theirs) -> Outcome:
    """Convert the trackers that packtrain has; name the others."""
    asked = [{"comet_ml": "comet"}.get(name, name) for name in names(value) if name not in ("none", "all")]
    known = [name for name in asked if name in get_args(Tracker)]
    why = f"not to {', '.join(str(name) for name in asked if name not in known)}" if known != asked else ""
    if why and not known:
        return Outcome(why=why, kind="no counterpart")
    return Outcome({"tracking.report_to": known} if known else {}, why, became="tracking.report_to")


def adapters(value: Value, theirs: Theirs) -> Outcome:
    """Convert the layers with adapters: all linear ones, names, or a pattern."""
    found = ["all"] if not is_off(theirs.get("lora_target_linear")) else [str(name).strip() for name in names(value)]
    if {"all", "all-linear", "all_linear"} & {*found}:
        more = ", ".join(name for name in found if not name.startswith("all"))
        return Outcome({"peft.target_modules": "all-linear"}, f"no adapters on {more}" if more else "")
    pattern = isinstance(value, str) and re.search(r"[\\^$*()|\[]", value)
    return Outcome({"peft.target_modules": value if pattern else found})


def unfrozen(value: Value, theirs: Theirs) -> Outcome:
    """Convert patterns of trained weights, which match the beginning of names. All other weights are frozen."""
    if not is_off(theirs.get("adapter")):
        why = "it freezes the adapters there, too, and here they are trained: peft.modules_to_save names layers beside them"
        return Outcome(why=why, kind="no counterpart")
    patterns = [re.sub(r"\[\d*(:\d*)?\]$", "", str(pattern)) for pattern in listed(value)]
    why = f"{DIFFERS}of NAME[0:9] those rows alone are trained there, and all here" if patterns != listed(value) else ""
    trained = [{"match": f"^(?:{pattern})"} for pattern in patterns]
    return Outcome({"optim.groups": [*trained, {"match": ".", "lr_scale": 0}]}, why)


def share(value: Value, theirs: Theirs) -> Outcome:
    """Convert the share of documents to hold out. A number of rows has no counterpart."""
    if theirs.get("val_dataset"):
        return Outcome(why="val_dataset is held out in its place", kind="not needed")
    if theirs.get("cached_val_dataset"):
        return Outcome(why="a share is held out beside cached_val_dataset there", kind="no counterpart")
    if number(value) >= 1:
        return Outcome(why="a number of rows: data.eval takes a share, such as 0.02", kind="no counterpart")
    return Outcome({"data.eval": number(value)} if number(value) else {}, became="data.eval")
