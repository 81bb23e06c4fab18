"""Secrets that a config would carry into files: config.yaml in the run folder, Slurm's scripts; and names that speak of any.

A text is refused only where it is certain (forms of well-known tokens, passwords in URLs; in lines of shell and sbatch the
name of what is set), because a name of a run or a folder must never be taken for one. Names are suspected easily: one wrongly
suspected costs a word in a report, or a line in a config; one that is missed costs an account.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from packtrain.config.keys import Fault

_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-(?:proj-|ant-)[\w\-]{16,}|\bgh[opsur]_\w{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w\-]{20,}"
    r"|\bxox[abeprs]-[\w\-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w\-]{35}|\beyJ[\w\-]{8,}\.eyJ[\w\-.]+"
)
_WITH_PASSWORD = re.compile(r"\w://[^/\s@:$]*:(?!\$)[^/\s@]+@")
_ASSIGNED = re.compile(r"\b(\w+)=(?![\"']?\$)[\"']?[^\s\"']")
_SAID = re.compile(
    r"--((?:api-?)?key|token|password)\s+(?![\"']?\$)[\"']?[^\s\"'-]|\b(wandb) login\s+\w{20}"
    r"|authorization: *(?:bearer|basic|token) +(?!\$)[^\s\"']",
    re.IGNORECASE,
)
_CODE = re.compile(r"topology\.(?:setup|sbatch)\[")
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|api[_-]?key|access[_-]?key|private[_-]?key|authorization|bearer"
    r"|(?:^|[_.\-])(?:key(?:$|[_.\-])|(?:pass|auth|jwt|pat|cookie|dsn|sig|sas|signature|pw)$)|[_.\-]pwd$",
    re.IGNORECASE,
)
_INNOCENT_NAME = re.compile(
    r"tokeni[sz]|tokens?_(?:per|type|id)|^tokens$|(?:max|min|num|new|sample|trained)_(?:\w*_)?tokens$", re.IGNORECASE
)


def speaks_of_secrets(name: str) -> bool:
    """Whether a variable, key or option of this name holds something to hide: HF_TOKEN does, MAX_TOKENS does not."""
    return _SECRET_NAME.search(_INNOCENT_NAME.sub("", name)) is not None


def check(config: dict[str, Any]) -> list[Fault]:
    """Every secret in a text of the config (as plain containers), by its place; the secret itself is not repeated."""
    return [one for path, text in _texts(config, "") for one in _found(path, text)]


def _found(path: str, text: str) -> Iterator[Fault]:
    code = _CODE.match(path) is not None
    if _TOKEN.search(text) or _WITH_PASSWORD.search(text) or (code and _SAID.search(text)):
        what = f"it has a secret (a password or token), which would be written into {'the script' if code else 'files'}"
        fix = f"Export it in the shell that submits{', and name the variable: $NAME' if code else ''}."
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
        for name, one in value.items():
            yield from _texts(one, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from _texts(one, f"{path}[{at}]")
