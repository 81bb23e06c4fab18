"""A conversion as YAML: our config with the keys it was made of, and below it what became nothing."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from packtrain.boundary import boundary
from packtrain.convert.conversion import Conversion, Note, OriginName, convert_file
from packtrain.convert.counterparts import is_text_of_template
from packtrain.wording import counted, shortened, visible

_WIDTH = 118


def write_conversion(
    path: Path, origin: OriginName | None, devices: int | None, output: Path | None, *, as_json: bool = False
) -> int:
    """Converts the file at `path` and prints it, or writes it to `output`, and a chat template of its own beside that."""
    done = convert_file(path, origin, devices)
    own = [note.value for note in done.notes if note.became == "data.chat_template" and is_text_of_template(note.value)]
    files = {output.with_suffix(".jinja"): str(text) for text in own} if output else {}
    for beside in files:
        done.config.setdefault("data", {})["chat_template"] = str(beside)
    text = json.dumps(done.to_json(), indent=2, default=str) + "\n" if as_json else commented_yaml(done)
    if output is None:
        print(text, end="")
        return 0
    for file, content in {**files, output: text}.items():
        with boundary("cannot be written", str(file), "Name another file."):
            file.write_text(content, encoding="utf-8")
    listed = f"{len(done.of_kind('no counterpart'))} without a counterpart"
    print(f"{output}: {counted(len(done.of_kind('converted')), 'keys')} converted, {listed}", file=sys.stderr)
    return 0


def commented_yaml(done: Conversion) -> str:
    """The text of a file that `packtrain plan` takes."""
    own = done.of_kind("converted", "not needed", "no counterpart")
    head = f"Converted from {done.path} ({done.origin}): {counted(len(done.of_kind('converted')), 'keys')} of {len(own)} became these."
    lines = [*_comment(head), *_comment(f"packtrain plan THIS_FILE, then packtrain {done.verb} THIS_FILE")]
    for remark in done.remarks:
        lines += _comment(remark)
    left = list(done.notes)  # whose reason was not yet written
    for group, values in done.config.items():
        lines += ["", f"{group}:"]
        for name, value in values.items():
            lines += _key(f"{group}.{name}", value, done.notes, left)
    titles = {"converted": "As our defaults are:", "no counterpart": "No counterpart, so the training may differ:"}
    for kind, title in {**titles, "not needed": "Not needed here:"}.items():
        listed = [note for note in own if note.kind == kind and note in left]
        lines += ["", *_comment(title)] if listed else []
        for note in listed:
            what = ": ".join(filter(None, [shortened(note.value), note.became, note.why]))
            lines += _comment(f"  {note.key}: {what}")
    unset = [note.key for note in done.notes if note.value is None]
    lines += ["", *_comment(f"Not set there: {', '.join(unset)}")] if unset else []
    return "\n".join(lines) + "\n"


def _key(path: str, value: Any, notes: Sequence[Note], left: list[Note]) -> list[str]:
    """The lines of one key; the notes on it are taken out of `left`, and reasons are given once."""
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
