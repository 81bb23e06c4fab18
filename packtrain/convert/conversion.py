"""Conversion of another trainer's config into ours, with a note for each of its keys.

Rules map keys to keys. The rules of a trainer's table (tables/*.yaml) override the common ones. The size of a step comes from several keys,
so it is computed here. Settings that our own rules refuse are removed, and a note says so. The result is a YAML: our config with its
source keys as comments, then keys without a counterpart.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, get_args

import yaml

from packtrain.config.compose import faults_of
from packtrain.config.keys import keys
from packtrain.config.yaml_files import SCHEMA_LINE
from packtrain.convert import counterparts, foreign_data, foreign_pictures
from packtrain.convert.counterparts import (
    DIFFERS,
    Kind,
    Outcome,
    Rule,
    Theirs,
    count,
    is_off,
    is_text_of_template,
    names,
)
from packtrain.convert.foreign_file import Foreign, Settings, Value, read_foreign
from packtrain.errors import UserError, boundary
from packtrain.objectives.spec import OBJECTIVES
from packtrain.wording import HIDDEN, counted, is_certain, shortened, speaks_of_secrets, visible

OriginName = Literal["axolotl", "llamafactory", "ms-swift", "trl"]
_KEPT = ("model.path", "data.train", "data.max_length", "batch.")
"""Keys that are never removed, even with faults: without them there is no run."""
_WIDTH = 118


@dataclass(frozen=True, slots=True)
class Note:
    """A key of theirs with its value. It `became` a key of ours ("": none); `why` is the reason. `own`: the file sets it, else a default."""

    key: str
    value: Value
    became: str
    why: str
    kind: Kind
    own: bool = True


@dataclass(frozen=True, slots=True)
class Conversion:
    """Our `config` (group → key → value), and notes on each key of theirs.

    `remarks` are about the whole. `template` is the text of a chat template: it needs a file.
    """

    path: Path
    origin: OriginName
    verb: str
    config: dict[str, Settings]
    notes: tuple[Note, ...]
    remarks: tuple[str, ...]
    template: str = ""

    def of_kind(self, *kinds: Kind) -> list[Note]:
        """Return the notes on keys that the file itself sets to something."""
        return [note for note in self.notes if note.own and note.value is not None and note.kind in kinds]

    @property
    def told(self) -> list[Note]:
        """Notes on keys of the file, and on defaults that train differently here."""
        return [note for note in self.notes if note.own or note.kind in ("differs", "no counterpart")]

    def to_json(self) -> Settings:
        """Return plain containers for --json."""
        converted = len(self.of_kind("converted"))
        notes = [{**asdict(note), "became": note.became or None} for note in self.told]
        whole_of = {"origin": self.origin, "verb": self.verb, "config": self.config, "notes": notes}
        whole_of |= {"template": self.template or None, "remarks": self.remarks}
        return {**whole_of, "converted": converted, "listed": len(notes) - converted}


@dataclass(frozen=True, slots=True)
class Table:
    """Content of a file of tables/; common.yaml explains the words."""

    marks: frozenset[str]
    defaults: Mapping[str, Value]
    step: Mapping[str, str]
    templates: Mapping[str, str]
    reasons: Mapping[str, str]
    defaults_when: Sequence[Mapping[str, Value]]
    remarks: Sequence[Mapping[str, str]]
    rules: Mapping[str, Rule]

    def rule(self, key: str) -> Rule:
        """Return the rule of a key."""
        return next(rule for pattern, rule in self.rules.items() if re.fullmatch(pattern, key))


def convert_file(path: Path, origin: OriginName | None = None, devices: int | None = None) -> Conversion:
    """Convert a file. Raises UserError if it cannot be read, its trainer is unknown, or packtrain has no such training."""
    file = read_foreign(path)
    origin = origin or _recognise(file)
    file = foreign_pictures.with_variables(file) if origin == "ms-swift" else file
    verb, guessed = foreign_data.verb_of(origin, file)
    rules, said = table(origin), devices or file.devices
    given = {key: value for key, value in file.values.items() if value is not None}
    lengths = rules.step["longest"].split()
    plain = Theirs({**rules.defaults, **given, "command": file.program}, verb, file)
    defaults = {name: item for row in rules.defaults_when if plain.holds(row) for name, item in row["set"].items()}
    defaults = {**rules.defaults, **defaults, **foreign_data.defaults_of(origin, file, said or 1)}
    empty = (*lengths, "enable_thinking")  # null: no limit; an empty thought is part of the prompt
    unset = {key for key in empty if key in file.values and key not in given}
    kept = {key: value for key, value in defaults.items() if key not in unset}
    theirs = Theirs({**kept, **given}, verb, file, rules.templates)
    notes, values = _apply(rules, theirs, given)
    if not {"model.path", "data.train"} & {*values}:
        what = f"it names neither a model nor data, as configs of {origin} do"
        fix = "Name the file with the settings of the training."
        raise UserError(what, where=str(path), fix=fix, code="nothing-to-convert")
    if theirs.get(*lengths) is None and "data.streaming" not in values:  # a stream must have a longest row
        values["data.max_length"] = None
    step, how = _step(rules, theirs, said or 1)
    values |= {**step, **({} if verb == "sft" else {"objective.kind": verb})}
    if values.get("optim.schedule") == "constant" and values.get("optim.warmup_steps"):
        values["optim.schedule"] = "constant_with_warmup"
    if values.get("optim.schedule") == "cosine" and "optim.schedule_options.min_lr_rate" in values:
        values["optim.schedule"] = "cosine_with_min_lr"
    folder = theirs.get("lora_model_dir", "adapter_name_or_path", "adapters")
    if folder and values.get("peft.kind") == "lora":
        values["model.path"] = str(names(folder)[-1])
    if theirs.get("rl") == "ipo":
        values["objective.loss"] = "ipo"
    is_once = verb != "reward" and values.get("data.loss_on") != "all"
    values |= {"data.render": "conversation"} if is_once else {}
    known = {f"topology.environment.{name}": text for name, text in file.environment.items() if _is_of_a_tracker(name)}
    values = {**known, **values}
    is_template = is_text_of_template(values.get("data.chat_template", ""))
    template = values.pop("data.chat_template") if is_template else ""
    frozen = values.get("peft.kind") == "lora" and "model.dtype" not in values
    values |= {"model.dtype": "bfloat16"} if frozen else {}
    config = _nested(values)
    notes = _without_faults(config, notes)
    remarks = [
        f"Step: {how}{'' if said else ' (the file does not say how many: --devices N)'}; here it is the same on any number of GPUs."
    ]
    remarks += ["Frozen weights are loaded in bfloat16, as there; adapters are float32."] if frozen else []
    remarks += (
        ["Conversations are rendered once, as there; data.render=auto trains answers as asked for."] if is_once else []
    )
    remarks += [row["why"] for row in rules.remarks if theirs.holds(row)]
    remarks += [f"{path} is not set: it has to be." for path in ("model.path", "data.train") if path not in values]
    remarks += [f"Verb: {verb}, {guessed}."] if guessed else []
    remarks += [f"{counted(file.more, 'more commands')} of the file: not converted."] if file.more else []
    config = {group: settings for group, settings in config.items() if settings}
    return Conversion(path, origin, verb, config, tuple(notes), tuple(remarks), template)


def _recognise(file: Foreign) -> OriginName:
    """Recognise the trainer of a config by its program, or by its keys."""
    every: tuple[OriginName, ...] = get_args(OriginName)
    called = re.match(r"(?:.*/)?(trl|swift|megatron|llamafactory|axolotl)\b", file.program)
    marks = {origin: len(table(origin).marks & {*file.values}) for origin in every}
    best: list[OriginName] = [origin for origin in every if marks[origin] == max(marks.values()) > 0]
    if called:
        name = "ms-swift" if called[1] in ("swift", "megatron") else called[1]
        best = [origin for origin in every if origin == name]
    if len(best) == 1:
        return best[0]
    none = "its keys are those of no trainer that packtrain convert knows"
    what = f"it may be of {' or '.join(best)}" if best else none
    fix = f"Say whose it is: --from {'|'.join(best or every)}."
    raise UserError(what, where=str(file.path), fix=fix, code="unknown-trainer")


def _is_of_a_tracker(variable: str) -> bool:
    is_known = variable.startswith(("WANDB_", "MLFLOW_", "COMET_", "SWANLAB_", "TRACKIO_"))
    return is_known and not speaks_of_secrets(variable)


def _apply(rules: Table, theirs: Theirs, given: Settings) -> tuple[list[Note], Settings]:
    """Return a note for each key, and all values. Later values override earlier ones, the file's own override defaults."""
    notes, values, own = [], Settings(), set[str]()
    for key, value in theirs.values.items():
        outcome = _outcome(rules, key, value, theirs)
        for path, item in outcome.values.items():
            if path in ("data.train", "data.eval") and path in own and key in given:
                values[path] = [*counterparts.listed(values[path]), *counterparts.listed(item)]
            elif isinstance(item, dict) and isinstance(values.get(path), dict):
                values[path] = {**values[path], **item}
            elif path == "tracking.report_to":
                values[path] = [*dict.fromkeys([*values.get(path, []), *item])]
            elif path not in own or key in given:
                values[path] = item
            own |= {path} if key in given else set()
        became = ", ".join(outcome.values) or outcome.became or "as without the key"
        hidden = (isinstance(value, str) and speaks_of_secrets(key)) or is_certain(str(value))
        reason = rules.reasons.get(key) or ("" if key in given else rules.reasons.get(f"default {key}"))
        why = "; ".join(filter(None, [reason if outcome.kind == "converted" else "", outcome.why]))
        kind: Kind = "differs" if outcome.kind == "converted" and why.startswith(DIFFERS) else outcome.kind
        made = became if outcome.kind == "converted" else ""
        notes.append(Note(key, HIDDEN if hidden else value, made, why, kind, key in given))
    unset = [Note(key, None, "", "not set", "not needed") for key in theirs.file.values if key not in given]
    return [*notes, *unset], values


def _outcome(rules: Table, key: str, value: Value, theirs: Theirs) -> Outcome:
    try:
        return rules.rule(key)(value, theirs)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
        unset = "the value of a variable that the file does not set"
        why = unset if "$" in str(value) else "its value has another form than expected"
        return Outcome(why=why, kind="no counterpart")


def _step(rules: Table, theirs: Theirs, devices: int) -> tuple[Settings, str]:
    """Return the size of a step, and how it is made. A packed row counts by its length, like in batch.tokens_per_step."""

    def size(*names: str, otherwise: int = 1) -> int:
        return count(theirs.get(*names), otherwise)

    micro, accumulation = size(rules.step["micro"]), size("gradient_accumulation_steps")
    longest = size(*rules.step["longest"].split(), otherwise=0)
    together = size("context_parallel_size", "sequence_parallel_size", "sequence_parallel_degree")
    replicas = max(devices // together, 1)
    room = {"batch.tokens_per_device": micro * longest * OBJECTIVES[theirs.verb].documents} if longest else {}
    how = f"micro-batch of {micro} × {accumulation} accumulated × {counted(replicas, 'devices')}"
    packed = theirs.verb == "sft" and not is_off(theirs.get(rules.step["packed"]))
    if packed and longest and together == 1:
        how += f" × {longest} tokens. A packed row there counts once, whatever it holds, and its learning rate is for such rows"
        return {"batch.tokens_per_step": micro * accumulation * replicas * longest, **room}, how
    how += ", packed rows there and documents here: take as many as such rows hold" if packed else ""
    examples = max(micro * accumulation * replicas, 2 if theirs.verb == "kto" else 1)
    return {"batch.examples_per_step": examples, **room}, how


def _nested(values: Settings) -> dict[str, Settings]:
    config: dict[str, Settings] = {}
    for path in [*(path for path in keys() if path in values), *(path for path in values if path not in keys())]:
        group, name, *inner = path.split(".")
        holder = config.setdefault(group, {})
        (holder.setdefault(name, {}) if inner else holder)[inner[0] if inner else name] = values[path]
    return {name: config[name] for name in dict.fromkeys(path.split(".")[0] for path in keys()) if name in config}


def _without_faults(config: dict[str, Settings], notes: list[Note]) -> list[Note]:
    """Remove values that our own rules refuse, one key at a time. Say so in the notes of their source keys."""
    while True:
        places = [(fault, fault.keys[0].split("[")[0].split(".")) for fault in faults_of(config)]
        for fault, (group, *path) in places:
            holder = config.get(group, {})
            for name in path[:-1]:
                holder = holder.get(name, {})
            kept = fault.keys[0].startswith(_KEPT) and "secret" not in fault.what
            if path and path[-1] in holder and not kept:
                del holder[path[-1]]
                kind: Kind = "not needed" if fault.because else "no counterpart"
                notes = [_taken_away(note, ".".join((group, *path)), fault.what, kind) for note in notes]
                break
        else:
            return notes


def _taken_away(note: Note, path: str, what: str, kind: Kind) -> Note:
    paths = note.became.split(", ")
    left = [item for item in paths if item != path and not (path.startswith(f"{item}.") or item.startswith(f"{path}."))]
    if left == paths:
        return note
    why = "; ".join(filter(None, [note.why, f"{path} is left out: {what}"]))
    return replace(note, became=", ".join(left), why=why, kind=note.kind if left else kind)


@cache
def table(name: OriginName) -> Table:
    """Read the table of a trainer."""
    folder = Path(__file__).with_name("tables")
    own, of_all = (yaml.safe_load((folder / f"{part}.yaml").read_text(encoding="utf-8")) for part in (name, "common"))
    rules = {**dict(_rules(own)), **{keys: rule for keys, rule in _rules(of_all) if keys not in dict(_rules(own))}}
    told = (own.get("templates", {}), own.get("reasons", {}), own.get("defaults when", []), own.get("remarks", []))
    return Table(frozenset(own["marks"].split()), own["defaults"], own["step"], *told, rules)


def _rules(content: Mapping[str, Value]) -> list[tuple[str, Rule]]:
    """Return the rules of a table, by patterns of keys."""
    rows: dict[str, Callable[[str], Settings]] = {
        "parts": lambda text: {"became": text.split()[0], "why": text.partition(" ")[2]},
        "not needed": lambda why: {"why": why, "kind": "not needed"},
        "no counterpart where off": lambda why: {"if": "!value", "why": why, "kind": "no counterpart"},
        "no counterpart": lambda why: {"if": "value", "why": why, "kind": "no counterpart"},
        "not known": lambda why: {"why": why, "kind": "no counterpart"},
    }
    same = [(how, ours, key) for how, rows in content["same"].items() for ours in rows for key in rows[ours].split()]
    rules: list[tuple[str, Rule]] = [
        (key, _cases({"set": {ours.replace("*", key): f"${how}"}})) for how, ours, key in same
    ]
    rules += [(keys, partial(counterparts.case, cases)) for keys, cases in content.get("cases", {}).items()]
    rules += [(keys, _by_name(text)) for keys, text in content.get("rules", {}).items()]
    for pattern, ours in content.get("switches", {}).items():
        values = {path: item for path, item in ours.items() if path != "why"}
        rules.append((pattern, _cases({"if": "value", "set": values, "why": ours.get("why", "")})))
    rules += [(keys, partial(counterparts.chosen, choice)) for keys, choice in content.get("choices", {}).items()]
    for title, row in rows.items():
        rules += [(key, _cases(row(why))) for why, keys in content.get(title, {}).items() for key in keys.split()]
    refused = content.get("refused", {}).items()
    rules += [(key, partial(counterparts.refused, what)) for what, keys in refused for key in keys.split()]
    return rules


def _cases(*rows: Mapping[str, Value]) -> Rule:
    return partial(counterparts.case, rows)


def _by_name(text: str) -> Rule:
    name, *arguments = text.split(" ", 2)
    home = next(module for module in (counterparts, foreign_data, foreign_pictures) if hasattr(module, name))
    return partial(getattr(home, name), *arguments)


def write_conversion(
    path: Path, origin: OriginName | None, devices: int | None, output: Path | None, *, as_json: bool = False
) -> int:
    """Convert the file at `path`; print the result or write it to `output`. A chat template goes into a file beside it."""
    done = convert_file(path, origin, devices)
    files = {output.with_suffix(".jinja"): done.template} if output and done.template else {}
    for beside in files:
        done.config.setdefault("data", {})["chat_template"] = str(beside)
    text = json.dumps(done.to_json(), indent=2, default=str) + "\n" if as_json else commented_yaml(done)
    if output is None:
        print(text, end="")
        return 0
    for file, content in {**files, output: text}.items():
        with boundary("cannot be written", str(file), "Name another file.", code="cannot-write"):
            file.write_text(content, encoding="utf-8")
    others = f"{len(done.of_kind('differs'))} that train otherwise, {len(done.of_kind('no counterpart'))} without a counterpart"
    print(f"{output}: {counted(len(done.of_kind('converted')), 'keys')} converted, {others}", file=sys.stderr)
    return 0


def commented_yaml(done: Conversion) -> str:
    """Return the text of a file that `packtrain plan` takes."""
    lines = list[str]()
    told, own = done.told, done.of_kind("converted", "differs", "not needed", "no counterpart")
    lacks_template = bool(done.template) and "chat_template" not in done.config.get("data", {})
    lost = f"{DIFFERS}data.chat_template is not set: its text is a file, which --output writes beside."
    remarks = [*done.remarks, *([lost] if lacks_template else [])]
    became = [
        note for note in done.of_kind("converted") if not (lacks_template and note.became == "data.chat_template")
    ]
    head = f"Converted from {done.path} ({done.origin}): {counted(len(became), 'keys')} of {len(own)} became these."
    differs = any(DIFFERS in why for why in [*remarks, *(note.why for note in told)])
    head += f" {DIFFERS}marks what trains otherwise than there." if differs else ""
    for line in (head, f"packtrain plan THIS_FILE, then packtrain {done.verb} THIS_FILE", *remarks):
        lines += _comment(line)
    left = list(done.notes)  # notes with reasons not yet written
    for group, values in done.config.items():
        lines += ["", f"{group}:"]
        for name, value in values.items():
            lines += _key(f"{group}.{name}", value, done.notes, left)
    missing = "No counterpart, so the training may differ:"
    titles = {"As our defaults are:": ("converted",), missing: ("differs", "no counterpart")}
    for title, kinds in {**titles, "Not needed here:": ("not needed",)}.items():
        listed = [note for note in told if note.kind in kinds and note in left and note.value is not None]
        lines += ["", *_comment(title)] if listed else []
        for note in listed:
            what = ": ".join(filter(None, [shortened(note.value), note.became, note.why]))
            lines += _comment(f"  {note.key}{'' if note.own else ' (default there)'}: {what}")
    unset = [note.key for note in done.notes if note.value is None]
    lines += ["", *_comment(f"Not set there: {', '.join(unset)}")] if unset else []
    return SCHEMA_LINE + "\n".join(lines) + "\n"


def _key(path: str, value: Value, notes: Sequence[Note], left: list[Note]) -> list[str]:
    """Return the lines of one key. Its notes are taken out of `left`, and reasons are given once."""
    group, name = path.split(".")
    parts = (path, group)
    of_key = [note for note in notes if any(at in parts or at.startswith(f"{path}.") for at in note.became.split(", "))]
    lines = [line for note in of_key if note.why and note in left for line in _comment(f"{note.key}: {note.why}", "  ")]
    for note in of_key:
        if note in left:
            left.remove(note)
    given = ", ".join(note.key if note.own else f"{note.key} (default there)" for note in of_key)
    written = yaml.safe_dump({name: value}, allow_unicode=True, sort_keys=False, width=1000)
    written = written.replace("${", "\\${").rstrip("\n").split("\n")
    beside = len(written[0]) + len(given) < _WIDTH - 6 and (len(written) == 1 or written[0].endswith(":"))
    lines += [] if beside or not given else _comment(given, "  ")
    written[0] += f"  # {given}" if beside and given else ""
    return [*lines, *(f"  {line}" for line in written)]


def _comment(text: str, indent: str = "") -> list[str]:
    start = text[: len(text) - len(text.lstrip())]
    clear = visible(" ".join(text.split()))
    return textwrap.wrap(clear, _WIDTH, initial_indent=f"{indent}# {start}", subsequent_indent=f"{indent}#     ")
