"""Nothing secret leaves in a report, whichever fact it came with.

Everything that is printed goes through here last. Hidden are values of variables and keys whose names speak of secrets
(and those values wherever else they turn up), user and password in URLs, and texts in the form of well-known tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from packtrain.config.rules.secrets import speaks_of_secrets

HIDDEN = "***"
_LEAST = 6  # letters of a value that is looked for everywhere; shorter ones would hit innocent text
_URL = re.compile(r"://([^\s'\"/:@]*(?::[^\s'\"]{0,2000})?)@")  # a password may have a slash, or an @
_ASSIGNMENT = re.compile(r"(?<![\w.\-])(-{0,2}[A-Za-z_][\w.\-]*)['\"]?\s*[=:]\s*")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s'\",;&]+")
_OPTION = re.compile(r"(?<![\w\-])(--?[A-Za-z][\w\-]*)(\s+)([^\s\-]\S*)")
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[\w\-]{16,}|\bgh[opsur]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w\-]{16,}|\bxox[abeprs]-[\w\-]{10,}"
    r"|\bAKIA[0-9A-Z]{12,}|\bAIza[\w\-]{30,}|\beyJ[\w\-]{8,}\.[\w\-.]+|\bpypi-[\w\-]{16,}|\bnpm_\w{16,}"
    r"|(?<=Bearer )\S+|(?<=Basic )[\w+/=]{8,}|(?<![\w/])[0-9a-f]{40}(?![\w/])|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*"
)


class Redactor:
    """Hides the secret values of `environments` (variables by name) wherever they turn up, and what looks like a secret.

    Not looked for elsewhere are values of less than _LEAST letters and paths that are there.
    """

    def __init__(self, *environments: Mapping[str, Any]) -> None:
        found = {value for one in environments for name, value in one.items() for value in _secrets(name, str(value))}
        self._known = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._known:
            text = text.replace(secret, HIDDEN)
        text = _FORMS.sub(HIDDEN, _URL.sub(f"://{HIDDEN}@", text))
        return _OPTION.sub(_hide_option, _without_assigned(text))

    def plain(self, value: Any) -> Any:
        """Plain containers without secrets, down to the last."""
        if isinstance(value, Mapping):
            return {
                str(name): _all_hidden(inner) if speaks_of_secrets(str(name)) else self.plain(inner)
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.plain(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value


def _secrets(name: str, value: str) -> Iterable[str]:
    if len(value) >= _LEAST and speaks_of_secrets(name) and not os.path.exists(value):
        yield value
        yield from (line for line in value.splitlines() if len(line) >= _LEAST)
    for user in _URL.findall(value):
        yield from (part for part in (user, user.partition(":")[2]) if len(part) >= 4)


def _without_assigned(text: str) -> str:
    """Hides what stands behind `NAME=` and `NAME:` of a secret; the value of another name may be an assignment itself."""
    pieces, at = [], 0
    while name := _ASSIGNMENT.search(text, at):
        pieces.append(text[at : name.end()])
        at = name.end()
        if speaks_of_secrets(name[1]) and (value := _VALUE.match(text, at)):
            pieces.append(HIDDEN)
            at = value.end()
    return "".join([*pieces, text[at:]])


def _hide_option(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{HIDDEN}" if speaks_of_secrets(match[1]) else match[0]


def _all_hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _all_hidden(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_hidden(inner) for inner in value]
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN
