"""Reader of other trainers' input: YAML, JSON, or commands in .sh and .md files.

No shell is run. Only the parts of its language that such files use are understood: comments, quotes, lines continued by a backslash,
variables that the file sets itself, `${NAME:-default}`, and sums such as `$((16 / 2))` and `$(expr 16 / $n)`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from packtrain.errors import UserError
from packtrain.wording import whole

_LONGEST, _MOST_VALUES = 2**21, 20_000  # bytes and values of a file
_TOOLS = {"swift", "trl", "llamafactory-cli", "axolotl", "megatron"}
_SCRIPT = re.compile(
    r"(.*/)?(\w*(sft|dpo|kto|orpo|reward|rlhf|grpo|ppo|gkd|pt)\w*|train|run_exp)\.py|axolotl\.cli\.train"
)
_VARIABLE = re.compile(r"'[^']*'|\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(?\s*(?:expr\s+)?(\d+(?:\s*\\?[-+*/]\s*\d+)+)\s*\)?\)")
_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
_COMMENT = re.compile(rf"({_QUOTED})|^[ \t]*#[^\n]*\n?|(?<=\s)#[^\n]*", re.MULTILINE)
_LINE = re.compile(rf"(?:{_QUOTED}|\\.|[^\n'\"\\])+", re.DOTALL)
"""A command: one line, or several if a quoted text has several."""
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_SHELL = (".sh", ".bash", ".md", ".txt", ".slurm", ".sbatch")
_FORMS = "packtrain convert reads YAML, JSON, and commands in .sh or .md files."


Value = Any
"""A value of a foreign file. Code that cannot read its form raises ValueError or its kin."""
Settings = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Foreign:
    """Settings (`values`) of a file. A command also has its `program` ("swift sft", or the path of a script), the options of its launcher,
    its environment, and the number of `more` training commands in the file."""

    path: Path
    values: Mapping[str, Value]
    program: str = ""
    launcher: Mapping[str, Value] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    more: int = 0

    def find(self, name: object) -> Path | None:
        """Find a file that the config names. Looks in the config's folder, the folders around it, and the working folder."""
        here, name = self.path.absolute().parent, str(name) if isinstance(name, (str, Path)) else ""
        paths = [at / name for at in (here, *here.parents, Path())] if name and "\0" not in name else []
        return next(
            (path for path in paths if os.path.isfile(path)), None
        )  # isfile returns False for a name that is too long

    def settings_of(self, name: object) -> Settings:
        """Read the mapping in a YAML or JSON file that the config names, else {}."""
        found = self.find(name)
        try:
            return _parse(found) if found else {}
        except UserError:
            return {}

    @property
    def devices(self) -> int | None:
        """Number of processes asked for by launcher or environment; None if they do not say."""
        asked = {**self.values, **self.settings_of(self.launcher.get("config_file")), **self.launcher}
        each = whole(str(asked.get("nproc_per_node", self.environment.get("NPROC_PER_NODE"))))
        machines = whole(str(asked.get("nnodes", self.environment.get("NNODES")))) or 1
        visible = self.environment.get("CUDA_VISIBLE_DEVICES", "").count(",") + 1
        if self.program.startswith("swift "):  # it spreads one model over them
            visible = 1
        together = whole(str(asked.get("num_processes"))) or machines * (each or visible)
        return together if together > 1 or each else None


def read_foreign(path: Path) -> Foreign:
    """Read the settings of a file. Raises UserError if it cannot be read, or has neither settings nor a training command."""
    if path.suffix.lower() not in _SHELL:
        return Foreign(path, _parse(path))
    text = _text(path)
    if path.suffix.lower() == ".md":
        text = "\n".join(block for language, block in _FENCE.findall(text) if language in ("", "bash", "shell", "sh"))
    found = list(_commands(text, Foreign(path, {})))
    if not found:
        fix = f"{_FORMS} Known commands: swift sft, trl dpo, accelerate launch sft.py …"
        raise UserError("it has no command that trains", where=str(path), fix=fix, code="no-training-command")
    return replace(_with_file(found[0]), more=len(found) - 1)


def _text(path: Path) -> str:
    what, code = "there is no such file", "no-such-config"
    if path.exists():
        what, code = "this is a folder or no regular file, or has more than 2 MiB", "not-a-file"
    try:
        if path.is_file() and path.stat().st_size <= _LONGEST:  # reading a pipe could block
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what, code = f"not UTF-8 text: {error.reason} at byte {error.start}", "not-utf8"
    except OSError as error:
        what, code = f"cannot be read: {error.strerror}", "unreadable-config"
    raise UserError(what, where=str(path), fix=_FORMS, code=code)


def _parse(path: Path) -> Settings:
    text, form = _text(path), "JSON" if path.suffix.lower() == ".json" else "YAML"
    try:
        values = json.loads(text) if form == "JSON" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1 if mark else getattr(error, 'lineno', 1)}"
        code = "broken-json" if form == "JSON" else "not-yaml"
        what = f"not valid {form}: {getattr(error, 'problem', None) or str(error) or 'nested too deeply'}"
        raise UserError(what, where=f"{path}{line}", fix="Correct it there or above.", code=code) from error
    if not isinstance(values, dict):
        raise UserError("it holds no mapping of keys to values", where=str(path), fix=_FORMS, code="not-a-mapping")
    number, inside = 0, [values]
    while inside and (number := number + 1) < _MOST_VALUES:  # aliases make much of little
        item = inside.pop()
        inside += [*item.values()] if isinstance(item, dict) else item if isinstance(item, list) else []
    if inside:
        what = f"more than {_MOST_VALUES:,} values, with aliases (*) written out"
        raise UserError(what, where=str(path), fix="Write fewer, or name a file with the data.", code="too-large")
    return {str(key): value for key, value in values.items()}


def _commands(text: str, empty: Foreign) -> Iterator[Foreign]:
    """Yield the training commands of a shell text, in order."""
    variables: dict[str, str] = {}
    for words in _words(text, variables):
        own: dict[str, str] = {}
        while words and (re.match(r"[A-Za-z_]\w*=", words[0]) or words[0] in ("export", "env", "nohup", "time")):
            name, sign, value = words.pop(0).partition("=")
            own |= {name: value} if sign else {}
        if not words:
            variables |= own
        at = next((at for at in range(len(words)) if _SCRIPT.fullmatch(words[at]) or _is_tool(words[at:])), None)
        if at is not None:
            end = at + 1 + _is_tool(words[at:])
            program = " ".join([Path(words[at]).name, words[at + 1]]) if _is_tool(words[at:]) else words[at]
            launcher, values = _options(words[:at]), _options(words[end:])
            if "config_file" in launcher:  # accelerate's, which may spread the model
                values = {"accelerate_config": launcher["config_file"], **values}
            yield replace(empty, values=values, program=program, launcher=launcher, environment={**variables, **own})


def _is_tool(words: list[str]) -> bool:
    return len(words) > 1 and Path(words[0]).name in _TOOLS and not words[1].startswith("-")


def _words(text: str, variables: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the words of each command. `variables` may grow meanwhile."""
    bare = _COMMENT.sub(lambda match: match[1] or "", text.replace("\r\n", "\n"))
    for line in _LINE.findall(re.sub(r"[ \t]*\\\n", " ", bare)):
        lexer = shlex.shlex(_expanded(line, variables), posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        with suppress(ValueError):  # a quote that is not closed
            for ends, words in groupby([*lexer, ";"], key=lambda word: word != "" and set(word) <= set(";&|<>")):
                yield [] if ends else [*words]


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return match[0] if name is None else variables.get(name, f"${name}" if match[2] is None else match[2])

    def total(match: re.Match[str]) -> str:
        result, *more = re.findall(r"[-+*/]?\d+", re.sub(r"[\s\\]", "", match[1]))
        for sign, number in ((item[0], int(item[1:])) for item in more):
            left = int(result)
            result = {"+": left + number, "-": left - number, "*": left * number, "/": left // (number or 1)}[sign]
        return str(result)

    named = re.sub(r"\$\(\([^)]*\)\)", lambda match: re.sub(r"(?<![$\w])([A-Za-z_]\w*)", r"$\1", match[0]), line)
    kept = _SUM.sub(total, _VARIABLE.sub(value, named))
    return re.sub(r"\$\([^()]*\)", lambda match: re.sub(r"\s", "\u00a0", match[0]), kept)  # one word, like in a shell


def _options(words: list[str]) -> Settings:
    """Map `--key value …`, `--key=value`, `--flag` and `key=value`. "" has the words without a key."""
    found: dict[str, list[Value]] = {"": []}
    key = ""
    for word in words:
        name, sign, value = word.partition("=")
        if re.fullmatch(r"--[A-Za-z][\w.-]*", name) or (sign and name.isidentifier()):
            key = name.lstrip("-").replace("-", "_")
            found[key] = [_typed(value)] if sign else []
        else:
            found[key].append(_typed(word))
    values = {name: items[0] if len(items) == 1 else items or True for name, items in found.items() if name}
    return {**values, **({"": found[""]} if found[""] else {})}


def _typed(word: str) -> Value:
    try:
        value = yaml.safe_load(word)
    except (yaml.YAMLError, ValueError):
        return word
    return value if isinstance(value, (bool, int, float, dict, list)) else word


def _with_file(command: Foreign) -> Foreign:
    """Add the settings of the config file that the command names. The command's own settings win."""
    values = {key: value for key, value in command.values.items() if key not in ("", "config")}
    loose = [str(item) for item in command.values.get("", []) if str(item).endswith((".yaml", ".yml", ".json"))]
    name = command.values.get("config", *loose[:1]) if loose else command.values.get("config")
    if name is None:
        return replace(command, values=values)
    if (found := command.find(name)) is None:
        what = f"its command names the config file {name}, which is not there"
        raise UserError(what, where=str(command.path), fix="Convert that file, or put it there.", code="no-such-config")
    return replace(command, values={**_parse(found), **values})
