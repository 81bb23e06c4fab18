"""A conversion as YAML: our config with the keys it was made of, and below it what became nothing."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from packtrain.convert.conversion import Conversion, Note, convert_file
from packtrain.errors import UserError
from packtrain.wording import counted, visible

_WIDTH = 118


def write_conversion(
    path: Path, origin: str | None, devices: int | None, output: Path | None, *, as_json: bool = False
) -> int:
    """Converts the file at `path` and prints it, or writes it to `output`, and a chat template of its own beside that."""
    done = convert_file(path, origin, devices)
    if done.template and output is not None:
        beside = output.with_suffix(".jinja")
        _write(beside, done.template)
        done.config.setdefault("data", {})["chat_template"] = str(beside)
    elif done.template:
        remark = "the chat template is the tokenizer's own: with --output FILE that of the config is written beside it"
        done = replace(done, remarks=(*done.remarks, remark))
    text = json.dumps(done.to_json(), indent=2, default=str) + "\n" if as_json else commented_yaml(done)
    if output is None:
        print(text, end="")
    else:
        _write(output, text)
        listed = len(done.of_kind("no counterpart"))
        print(
            f"{output}: {counted(len(done.of_kind('converted')), 'keys')} converted, {listed} without a counterpart",
            file=sys.stderr,
        )
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(path), fix="Name another file.") from error


def commented_yaml(done: Conversion) -> str:
    """The text of a file that `packtrain plan` takes."""
    own = done.of_kind("converted", "not needed", "no counterpart")
    head = f"Converted from {done.path} ({done.origin}): {counted(len(done.of_kind('converted')), 'keys')} of {len(own)} became these."
    lines = [
        *_comment(head),
        *_comment(f"Train with: packtrain {done.verb} THIS_FILE (first: packtrain plan THIS_FILE)"),
    ]
    for remark in done.remarks:
        lines += _comment(remark)
    for group, values in done.config.items():
        lines += ["", f"{group}:"]
        for name, value in values.items():
            lines += _key(done, f"{group}.{name}", value)
    unset = [note.key for note in done.notes if note.own and note.value is None]
    for title, kind in (
        ("No counterpart, and the training may differ:", "no counterpart"),
        ("Not needed here:", "not needed"),
    ):
        listed = [note for note in done.of_kind(kind) if note.value is not None]  # type: ignore[arg-type]
        lines += ["", *_comment(title)] if listed else []
        for note in listed:
            lines += _comment(f"  {note.key}: {_short(note.value)}: {note.why}")
    lines += ["", *_comment(f"Not set there: {', '.join(unset)}")] if unset else []
    return "\n".join(lines) + "\n"


def _key(done: Conversion, path: str, value: Any) -> list[str]:
    notes = [note for note in done.notes if _made(note, path)]
    lines = [line for note in notes if note.why for line in _comment(f"{note.key}: {note.why}", "  ")]
    given = ", ".join(note.key if note.own else f"{note.key} (default there)" for note in notes)
    written = yaml.safe_dump({path.split(".")[1]: value}, allow_unicode=True, sort_keys=False, width=1000)
    written = written.replace("${", "\\${").rstrip("\n").split("\n")
    first = f"  {written[0]}  # {given}" if given and len(written[0]) + len(given) < _WIDTH - 6 else f"  {written[0]}"
    return [*lines, first, *(f"  {line}" for line in written[1:])]


def _made(note: Note, path: str) -> bool:
    parts = note.became.split(", ")
    return any(part == path or part.startswith(f"{path}.") or part == path.split(".")[0] for part in parts)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"


def _comment(text: str, indent: str = "") -> list[str]:
    wrapped = textwrap.wrap(
        visible(text).replace("\n", " "), _WIDTH - len(indent), subsequent_indent="    ", drop_whitespace=True
    )
    kept = text[: len(text) - len(text.lstrip())]
    return [
        f"{indent}# {kept if at == 0 else ''}{line.strip() if at == 0 else line}" for at, line in enumerate(wrapped)
    ]
