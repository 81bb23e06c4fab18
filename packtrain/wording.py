"""Parts of messages: numbers and names in words, one-line errors, visible text."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from packtrain.redact import clean

BUGS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError, NotImplementedError)
"""Exception types that usually mean a bug."""
_NAMELESS = (*BUGS, StopIteration, RecursionError)
"""Exceptions whose text says little without their type: KeyError: 'added_tokens'."""
_MAX_LETTERS = 400
_MAX_NAMES = 6
_MAX_DIGITS = 18  # enough for any count; int() refuses thousands of digits


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
