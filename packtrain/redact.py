"""Redaction: how to recognise secrets, and how to hide them in all output.

A secret is `certain` if it has the form of a well-known token, a password in a URL, a signed query or a private key. The values of secret
environment variables and secrets learnt from earlier text (`learn`) are certain, too. A secret is suspected because of the name before a
value, or its form. A config is refused only for certain secrets; messages and reports hide both kinds: a wrong suspicion
costs a word in a report, a missed secret costs an account.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_LEAST = 6  # shortest value that is hidden everywhere; shorter ones would match innocent text
_TOKEN = re.compile(  # strict, since hf_datasets and sk-en.jsonl are file names
    r"\bhf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}|\bsk-(?:[A-Za-z0-9]{20,}|(?:ant|lf|or|proj|svcacct)-[\w\-]{16,})"
    r"|\bgh[opsur]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w\-]{16,}|\bxox[abeprs]-[\w\-]{10,}"
    r"|\bA[KS]IA[0-9A-Z]{12,}|\bAIza[\w\-]{30,}|\beyJ[\w\-]{8,}\.[\w\-.]+|\bpypi-Ag[\w\-]{16,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END).)*(?:-----END [A-Z ]*-----)?",
    re.DOTALL,
)
_PASSWORD = re.compile(r"(://[^\s'\"/:@$]*:)((?!\$)[^\s'\"@]{1,500})(?=@)")
_QUERY = re.compile(r"([?&]([A-Za-z_][\w.\-]*)=)((?!\$)[^\s&'\"#]+)")
_USER = re.compile(r"://([^\s'\"/:@]*(?::[^\s'\"]{0,2000})?)@")  # a password may have a slash, or an @
_BEARER = re.compile(r"(?<=Bearer )\S+|(?<=Basic )[\w+/=]{8,}")
_SCHEME = re.compile(r"^['\" ]*((Bearer|Basic) +)?", re.IGNORECASE)  # the scheme is no secret itself
_HEX = re.compile(
    r"(\b(?:revision|commit|sha\w*|\w*hash|digest)\b\W{1,4})?(?<![\w/])([0-9a-f]{40}|[0-9a-f]{64})(?![\w/])"
)
"""An API key of wandb and others. After a word such as `commit` it is a commit hash."""
_ASSIGNMENT = re.compile(r"(?<![\w.\-])(-{0,2}[A-Za-z_][\w.\-]*)['\"]?\s*[=:]\s*")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s'\",;&]+")
_OPTION = re.compile(r"(?<![\w\-])(--?[A-Za-z][\w\-]*)(\s+)([^\s\-]\S*)")
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|api[_-]?key|access[_-]?key|private[_-]?key|authorization|bearer"
    r"|(?:^|[_.\-])(?:key(?:$|[_.\-])|(?:pass|auth|jwt|pat|cookie|dsn|sig|sas|signature|pw)$)|[_.\-]pwd$",
    re.IGNORECASE,
)
_INNOCENT_NAME = re.compile(
    r"tokeni[sz]|tokens?_(?:per|type|id|index)|^tokens$|per_token"
    r"|(?:max|min|num|new|sample|trained|total|loss|real|cut|padding|prompt|suppress)_(?:\w*_)?tokens$"
    r"|key_(?:value|head|dim|bias)|key_heads"
    r"|\b(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|start|end)_token$",
    re.IGNORECASE,
)
_learnt: set[str] = set()


@lru_cache(4096)  # each text of a config is compared with each variable
def speaks_of_secrets(name: str) -> bool:
    """Return whether a variable, key or option of this name holds a secret. HF_TOKEN does, MAX_TOKENS does not."""
    return _SECRET_NAME.search(_INNOCENT_NAME.sub("", name)) is not None


def learn(text: str, *, names: bool = False) -> None:
    """Remember the secrets in a text of the user, to hide them everywhere. With `names`, suspected ones, too."""
    _learnt.update(secret for secret in _within(text, names=names) if len(secret) >= 4)


def is_certain(text: str) -> bool:
    """Return whether a text certainly holds a secret."""
    return Redactor(os.environ).certain(text) != text


def variable_of(text: str) -> str:
    """Return the environment variable whose secret value is in a text, or ""."""
    named = (item for item in os.environ.items() if speaks_of_secrets(item[0]))
    return next((name for name, value in named if any(secret in text for secret in _secrets(name, value))), "")


def clean(text: str) -> str:
    """Return a message without secrets: from the environment, learnt, or suspected."""
    return Redactor(os.environ).text(text)


class Redactor:
    """Filter that hides secret values of `environments`, learnt secrets, and text like a secret.

    `environments` are values by variable; existing paths and values shorter than _LEAST are not hidden.
    """

    def __init__(self, *environments: Mapping[str, Any]) -> None:
        variables = [variable for environment in environments for variable in environment.items()]
        secrets = {secret for name, value in variables for secret in _secrets(name, str(value))}
        self._known = sorted(secrets | _learnt, key=len, reverse=True)

    def certain(self, text: str) -> str:
        """Return the text without certain secrets."""
        text = _PASSWORD.sub(rf"\g<1>{HIDDEN}", _TOKEN.sub(HIDDEN, text))
        text = _QUERY.sub(lambda match: f"{match[1]}{HIDDEN}" if speaks_of_secrets(match[2]) else match[0], text)
        for secret in self._known:
            text = text.replace(secret, HIDDEN)
        return text

    def text(self, text: str) -> str:
        """Return the text without certain and suspected secrets."""
        text = _HEX.sub(lambda match: match[0] if match[1] else HIDDEN, text)
        text = _without_assigned(_USER.sub(f"://{HIDDEN}@", _BEARER.sub(HIDDEN, self.certain(text))))
        return _OPTION.sub(
            lambda match: f"{match[1]}{match[2]}{HIDDEN}" if speaks_of_secrets(match[1]) else match[0], text
        )

    def plain(self, value: Any, name: str = "", *, hide: bool = False) -> Any:
        """Return plain containers without secrets. `hide` hides all values; it is set below a key with a secret name."""
        if isinstance(value, Mapping):
            items = [(str(key), inner) for key, inner in value.items()]
            return {key: self.plain(inner, key, hide=hide or speaks_of_secrets(key)) for key, inner in items}
        if isinstance(value, (list, tuple)):
            return [self.plain(inner, hide=hide) for inner in value]
        if hide:
            return value if value is None or isinstance(value, bool) or value == "" else HIDDEN
        if isinstance(value, str):
            return self.certain(value) if name == "revision" else self.text(value)
        return value


class CleanStream:
    """A stream that hides certain secrets. Text that must not change goes to `unchanged`, the stream below."""

    def __init__(self, stream: Any) -> None:
        self.unchanged, self._redactor, self._learnt = stream, Redactor(os.environ), len(_learnt)

    def write(self, text: str) -> int:
        """Write the text without certain secrets; return the length of `text`, as callers expect."""
        if len(_learnt) != self._learnt:
            self._redactor, self._learnt = Redactor(os.environ), len(_learnt)
        self.unchanged.write(self._redactor.certain(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unchanged, name)


def _within(text: str, *, names: bool) -> Iterable[str]:
    """Yield the secrets in a text. Error messages may quote parts of a password, so these are yielded, too."""
    yield from _TOKEN.findall(text)
    for match in _PASSWORD.finditer(text):
        user, password = match[1].removeprefix("://"), match[2]
        yield from (password, f"{user}{password.split('/')[0]}")
    yield from (match[3] for match in _QUERY.finditer(text) if speaks_of_secrets(match[2]))
    if names:
        named = [(match[1], text[match.end() :]) for match in _ASSIGNMENT.finditer(text)]
        named += [(match[1], match[3]) for match in _OPTION.finditer(text)]
        for rest in (rest for name, rest in named if speaks_of_secrets(name)):
            value = next(iter(_SCHEME.sub("", rest).split(maxsplit=1)), "")
            yield from (part for part in re.split(r"[,;&'\"\[\]{}]+", value) if len(part) >= _LEAST)


def _secrets(name: str, value: str) -> Iterable[str]:
    if len(value) >= _LEAST and speaks_of_secrets(name) and not os.path.exists(value):
        yield value
        yield from (line for line in value.splitlines() if len(line) >= _LEAST)
    for user in _USER.findall(value):
        yield from (part for part in (user, user.partition(":")[2]) if len(part) >= 4)


def _without_assigned(text: str) -> str:
    """Hide values after `NAME=` and `NAME:` of secret names. Another name's value may itself be an assignment."""
    pieces, at = [], 0
    while name := _ASSIGNMENT.search(text, at):
        pieces.append(text[at : name.end()])
        at = name.end()
        if speaks_of_secrets(name[1]) and (value := _VALUE.match(text, at)):
            pieces.append(HIDDEN)
            at = value.end()
    return "".join([*pieces, text[at:]])
