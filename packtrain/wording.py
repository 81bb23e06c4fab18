"""Text for users: numbers and names in words, errors in one line, no secrets.

A secret is `certain` if it has the form of a well-known token, a password in a URL, a signed query or a private key. The values of secret
environment variables and secrets learnt from earlier text (`learn`) are certain, too. A secret is suspected because of the name before a
value, or its form. A config is refused only for certain secrets; messages and reports hide both kinds: a wrong suspicion
costs a word in a report, a missed secret costs an account.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

BUGS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError, NotImplementedError)
"""Exception types that usually mean a bug."""
_NAMELESS = (*BUGS, StopIteration, RecursionError)
"""Exceptions whose text says little without their type: KeyError: 'added_tokens'."""
_MAX_LETTERS = 400
_MAX_NAMES = 6
_MAX_DIGITS = 18  # enough for any count; int() refuses thousands of digits
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
    r"|(?:^|_)(?:add|added|eot|special|stop)_tokens"
    r"|(?:max|min|num|new|sample|trained|total|loss|real|cut|padding|prompt|answer|suppress)_(?:\w*_)?tokens$"
    r"|key_(?:value|head|dim|bias)|key_heads"
    r"|\b(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|start|end)_token$",
    re.IGNORECASE,
)
_learnt: set[str] = set()


def first_line(error: BaseException) -> str:
    """Return an error in one line. Its type is added if the text alone says too little."""
    text = str(error).strip()
    if isinstance(error, SystemExit):
        return f"its code ended the process, by sys.exit({error.code!r})"
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, str | bytes)
        text = f"{error.strerror}: {os.fsdecode(error.filename)}" if named else error.strerror
    if isinstance(error, ImportError) or type(error).__name__.startswith("StrictDataclass"):
        text = " ".join(text.split())  # names the package or the field only further down
    if re.match(r"at \d+:\d+:\n", text):  # Triton's compiler: the place, the kernel's code, the fault
        text = text.rpartition("\n")[2]
    line = visible(text.partition("\n")[0][:_MAX_LETTERS], whitespace=True)
    return f"{type(error).__name__}: {line}".rstrip(": ") if isinstance(error, _NAMELESS) or not line else line


def ranks_in_words(ranks: Iterable[int]) -> str:
    """ "rank 3"; "ranks 0 to 5 and 7"."""
    numbers = sorted(ranks)
    groups = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    words = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"rank{'s' if numbers[1:] else ''} {words}"


def counted(number: float, things: str) -> str:
    """ "1 document", "1,000 documents", "2.5 pairs"; `things` is the plural."""
    single = things.removesuffix("es" if things.endswith(("sses", "shes", "ches", "xes")) else "s")
    return f"{number:,} {single if number == 1 else things}"


def count_dropped(reasons: Mapping[str, int]) -> str:
    """ "dropped 3: 2 empty, 1 wrong type"; "dropped 0"."""
    each = ", ".join(f"{rows:,} {reason}" for reason, rows in reasons.items())
    return f"dropped {sum(reasons.values()):,}{each and f': {each}'}"


def size(number: float | None) -> str:
    """Return bytes in a fitting unit. "512 bytes", "3.2 MiB", "64 GiB"; "not known" for None."""
    if number is None:
        return "not known"
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and units[1:]:
        number, units = number / 1024, units[1:]
    return f"{number:,.{0 if number >= 100 else 1}f}".removesuffix(".0") + f" {units[0]}"


def in_millions(number: int) -> str:
    """Return "135.2 million" or "8.0 billion"; smaller numbers in full."""
    if number >= 10**9:
        return f"{number / 10**9:,.1f} billion"
    return f"{number / 10**6:,.1f} million" if number >= 10**6 else f"{number:,}"


def whole(text: str) -> int | None:
    """Return a whole number ≥ 0 in plain digits, else None. "²" and "1_0" are refused; str.isdigit or int() accept them."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def shortened(value: object, most: int = 60) -> str:
    """Return `repr` of a foreign value, cut to `most` characters."""
    text = clean(repr(value))
    return text if len(text) <= most else f"{text[: most - 3]}…"


def listed(names: Sequence[str]) -> str:
    """ "n1, n2 and n3"; of many only the first."""
    if len(names) > _MAX_NAMES:
        return f"{', '.join(names[:_MAX_NAMES])} and {len(names) - _MAX_NAMES} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def visible(text: str, *, whitespace: bool = False) -> str:
    """Return `text` with symbols for control characters, direction marks and invisible characters.

    A terminal would obey control characters. The caller escapes the text for HTML and rich. A line end is kept after its symbol. With
    `whitespace`, line ends, tabs and all kinds of spaces are kept unchanged.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_symbol(letter, whitespace=whitespace) for letter in text)


def _symbol(letter: str, *, whitespace: bool) -> str:
    space, code = unicodedata.category(letter) == "Zs", ord(letter)
    if letter.isprintable() or letter == "\u3000" or (whitespace and (space or letter in "\n\t")):
        return letter
    if code < 0x20:
        return "⏎\n" if letter == "\n" else chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "⍽" if space else f"⟨U+{code:04X}⟩"


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

    def __init__(self, *environments: Mapping[str, object]) -> None:
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


def say_example_slots(found: Mapping[str, int], why: str = "") -> str:
    """Say what `Schedule.example_slots` (packing/schedule.py) found. `why` rows share nothing, if they do not."""
    each = f"{counted(found['documents'], 'documents')} in {counted(found['examples'], 'examples')}:"
    once = f"about {found['once']:,} if the chat template rendered each row once"
    if found["shared"] == found["repeated"]:
        return f"{each} {found['repeated']:,} token slots, as common beginnings are repeated ({why}); {once}"
    return f"{each} {found['shared']:,} token slots with common beginnings once; {found['repeated']:,} if they were repeated; {once}"
