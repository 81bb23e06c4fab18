"""Secrets that a config would carry into files: config.yaml in the run folder, Slurm's scripts.

What a secret is says packtrain/redact.py. A text is refused only where it is certain, because a name of a run or a folder must
never be taken for one; in options of sbatch, and for values of a mapping, its name is enough. Lines of topology.setup are the
user's own program: they stay, with a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from packtrain.config.keys import Fault
from packtrain.redact import is_certain, learn, speaks_of_secrets, variable_of

_ASSIGNED = re.compile(r"\b(\w+)=(?![\"']?\$)[\"']?[^\s\"']")
_SAID = re.compile(
    r"--((?:api-?)?key|token|password)\s+(?![\"']?\$)[\"']?[^\s\"'-]|\b(wandb) login\s+\w{20}"
    r"|authorization: *(?:bearer|basic|token) +(?!\$)[^\s\"']",
    re.IGNORECASE,
)
_BARE_KEY = re.compile(r"[0-9a-f]{40}")
_NAMES = ("model.revision", "trainer.output_dir", "data.cache_dir", "tracking.run_name")
"""What may be called by the hash of a commit."""
_SETUP, _CODE = "topology.setup[", ("topology.sbatch[", "topology.command")
_MAPPING = re.compile(r"model\.config\.(?:.*\.)?(\w+)")
_EXPORT = "Export it in the shell that submits{}."


def check(config: dict[str, Any]) -> list[Fault]:
    """Every secret in a text of the config (as plain containers), by its place; the secret itself is not repeated."""
    return [
        item for path, text in _texts(config, "") for item in _secrets_in(path, text) if not path.startswith(_SETUP)
    ]


def notes(setup: list[str]) -> Iterator[str]:
    """Warnings of secrets in lines of topology.setup, which are then hidden on the terminal and in the run folder."""
    for at, line in enumerate(setup):
        if any(_secrets_in(f"{_CODE[0]}{at}]", line)):
            learn(line, names=True)
            yield f"{_SETUP}{at}]: it has a secret, which is in the script as it is; {_EXPORT.format(', and name it: $NAME')}"


def _secrets_in(path: str, text: str) -> Iterator[Fault]:
    code, named = path.startswith(_CODE), _MAPPING.fullmatch(path)
    bare = _BARE_KEY.fullmatch(text) and path not in _NAMES and not os.path.exists(text)
    if is_certain(text) or bare or (code and _SAID.search(text)) or (named and text and speaks_of_secrets(named[1])):
        what = f"it has a secret (a password or token), which would be written into {'the script' if code else 'files'}"
        fix = _EXPORT.format(", and name the variable: $NAME" if code else "")
        if variable := variable_of(text):
            what = f"the value of ${variable} is in it: by its name a secret, which would be written into files"
            fix = f"Where it is none, unset {variable}, or give the variable another name."
        yield Fault((path,), what, fix)
    for variable in _ASSIGNED.findall(text) if code else ():
        if speaks_of_secrets(variable):
            what = f"by its name {variable} is a secret, which would be written into the script"
            fix = f"Export {variable} in the shell that submits, or read it from a file: {variable}=$(cat FILE)."
            yield Fault((path,), what, fix)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a value of mappings and lists, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _texts(item, f"{path}[{at}]")
