"""A conversion as YAML: our config with its source keys, then keys without a counterpart."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from packtrain.convert.conversion import Conversion, Note, OriginName, convert_file
from packtrain.convert.counterparts import DIFFERS
from packtrain.convert.foreign_file import Value
from packtrain.errors import boundary
from packtrain.wording import counted, shortened, visible

_WIDTH = 118


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
        with boundary("cannot be written", str(file), "Name another file."):
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
    return "\n".join(lines) + "\n"


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
