"""Help for every key, from schema.py: `packtrain sft -h`, docs/config.md, and completion in the shell.

`python -m packtrain.config.help > docs/config.md` writes the page anew. bash cuts words at `=` and replaces only the part after it.
A value is therefore offered there without its key.
"""

from __future__ import annotations

import glob
import os
import textwrap
from collections.abc import Iterator, Sequence

from packtrain.config.keys import Key, choices, describe, keys, keys_of
from packtrain.config.schema import DataSource, Stage, WeightGroup, groups
from packtrain.config.yaml_files import SUFFIX, options, shipped

PREFIXES = "+~"
INTRODUCTION = """\
# Config keys

A config is a YAML file. The command line can change any part of it. Keys that are left out have their defaults:

```yaml
defaults: [peft: lora, _self_]   # files of configs/, by group; also YAML files beside this one
model: {path: HuggingFaceTB/SmolLM2-135M-Instruct}
data: {train: chats.jsonl, eval: 0.05}
batch: {examples_per_step: 32}
```

```
packtrain sft run.yaml optim.learning_rate=1e-4 peft.r=64 '~data.eval' strategy=ddp
```

The grammar is Hydra's: `key=value` sets, `+group=choice` adds, `~key` takes away, `group=choice` selects a file of
`configs/group/`. `${optim.learning_rate}`, `${oc.env:HOME}` and `${now:%Y-%m-%d}` are filled in. `null` means none.
Relative paths start at the folder where packtrain is started. If a change on the command line makes a key of the file
useless, the key is dropped, and a line says so: `data.eval=null` takes `trainer.eval_every` with it.

Editors (VS Code with its YAML extension; JetBrains IDEs with the address under JSON Schema Mappings) complete, explain and check a file that
begins as the recipes do; in CI, `check-jsonschema --schemafile URL FILE` checks it. `packtrain schema` knows [your packages](extending.md) too.

The tables of advanced keys hold what `packtrain sft -h` leaves out; `packtrain sft -h all` shows these too.

This page is generated: `python -m packtrain.config.help > docs/config.md`.
"""


ALL = "all"
"""Word after -h for the advanced keys too."""


def help_text(width: int, asked: Sequence[str] = ()) -> str:
    """Return keys with defaults, for a terminal of `width` columns. Groups and keys `asked` for get every sentence."""
    lead = "Config keys by group, with their defaults; group=choice selects a file of configs/."
    if ALL not in asked:
        hidden = sum(key.advanced for _, _, _, rows in _sections() for key in rows)
        lead += f" packtrain sft -h {ALL} shows {hidden} more."
    lead += " packtrain sft -h GROUP or -h GROUP.KEY explains them, and docs/config.md all."
    explained = {*asked} - {ALL}
    lines = [] if explained else textwrap.wrap(lead, width)
    for group, doc, names, rows in _sections():
        if explained:
            for key in [key for key in rows if group in explained or key.path in explained]:
                takes = describe(key).replace("|", " | ")
                lines += textwrap.wrap(f"{key.path}  {takes} [{_default(key.default)}]", width)
                lines += textwrap.wrap(key.doc, width, initial_indent="    ", subsequent_indent="    ")
            continue
        rows = [key for key in rows if ALL in asked or not key.advanced]
        if not rows:
            continue
        head = f"{group}: {doc.rstrip('.')}"
        lines += textwrap.wrap(head + (f"; {group}={'|'.join(names)}" if names else ""), width, subsequent_indent="  ")
        values = (f"{key.path.removeprefix(f'{group}.')}={_default(key.default).replace(' ', '')}" for key in rows)
        lines += textwrap.wrap(
            " ".join(values), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
    return "\n".join(lines)


def markdown() -> str:
    """Return the text of docs/config.md."""
    parts = [INTRODUCTION]
    for group, doc, names, rows in _sections():
        parts.append(f"## {group}\n\n{doc}")
        if names:
            parts.append(f"Choices (`{group}=…`): {', '.join(f'`{name}`' for name in names)}.")
        for advanced in (False, True):
            if own := [key for key in rows if key.advanced == advanced]:
                lines = [f"| {'advanced ' * advanced}key | takes | default | |", "|---|---|---|---|"]
                for key in own:
                    takes = describe(key).replace("|", " \\| ")
                    lines.append(f"| `{key.path}` | {takes} | `{_default(key.default)}` | {key.doc} |")
                parts.append("\n".join(lines))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _sections() -> Iterator[tuple[str, str, list[str], list[Key]]]:
    """Yield name, sentence, choices and keys of each group, and of a source."""
    for group, cls in groups().items():
        yield group, cls.__doc__ or "", options(group), list(keys_of(cls, f"{group}.").values())
    doc = "An entry of `data.train` and `data.eval`; text alone is its `path`."
    yield "source", doc, [], list(keys_of(DataSource).values())
    yield "stage", "An entry of `data.stages`.", [], list(keys_of(Stage).values())
    yield "group of weights", "An entry of `optim.groups`.", [], list(keys_of(WeightGroup).values())


def _default(value: object) -> str:
    if value is None or value == "":
        return "null" if value is None else '""'
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def complete_config(incomplete: str) -> list[tuple[str, str]]:
    """Return (word, help) pairs for the first argument. They are YAML files and recipes or, if none fits, overrides."""
    recipes = [f"recipes/{file.name}" for file in shipped("recipes").glob(f"*{SUFFIX}")]
    files = {name for name in recipes if name.startswith(incomplete)}
    files |= {*glob.glob(f"{glob.escape(incomplete)}*{SUFFIX}")}
    return [(file, "config") for file in sorted(files)] or complete_override(incomplete)


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Return (`key=value`, help) words that begin with `incomplete`. It may end within the key or the value."""
    word = _word_at_cursor(incomplete)
    sign = word[: len(word) - len(word.lstrip(PREFIXES))]
    name, given, value = word.removeprefix(sign).partition("=")
    if not given:
        docs = {group: cls.__doc__ or "" for group, cls in groups().items() if options(group)}
        docs |= {path: key.doc for path, key in keys().items()}
        return [(f"{sign}{path}{'' if sign == '~' else '='}", docs[path]) for path in docs if path.startswith(name)]
    start = "" if len(incomplete) < len(word) else f"{sign}{name}="
    key = keys().get(name)
    known = options(name) if key is None else choices(key.type) or (("true", "false") if key.type is bool else ())
    doc = key.doc if key else (groups()[name].__doc__ or "" if name in groups() else "")
    return [(f"{start}{item}", doc) for item in known if item.startswith(value)]


def _word_at_cursor(incomplete: str) -> str:
    """Return the whole word. In bash `incomplete` may be only the part after its `=`."""
    before = os.environ.get("COMP_WORDS", "").split()[: int(os.environ.get("COMP_CWORD") or 0) + 1]
    if before[-1:] == ["="]:  # the cursor is behind the `=` of `key=`
        return "".join(before[-2:])
    return "".join(before[-3:-1]) + incomplete if before[-2:-1] == ["="] else incomplete


if __name__ == "__main__":
    print(markdown(), end="")
