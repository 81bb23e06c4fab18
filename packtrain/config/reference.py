"""Every key in words, from schema.py alone: the text of `packtrain sft -h` and the page docs/config.md.

`python -m packtrain.config.reference > docs/config.md` writes the page anew.
"""

from __future__ import annotations

import textwrap
from typing import Any

from packtrain.config.keys import Key, describe, groups, keys_of
from packtrain.config.schema import DataSource
from packtrain.config.shipped import options

INTRODUCTION = """\
# Config keys

A config is a YAML file, any part of it can be changed on the command line, and what is left out has its default:

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
Relative paths start at the folder where packtrain is started.

This page is generated: `python -m packtrain.config.reference > docs/config.md`.
"""


def help_text(width: int) -> str:
    """All keys for a terminal of `width` columns: a line with type and default, and the sentence under it."""
    parts = textwrap.wrap("Config keys, as `key  type [default]`; `group=choice` selects a file of configs/.", width)
    for group, cls in groups().items():
        parts += ["", *textwrap.wrap(f"{group}: {cls.__doc__}", width), *_choices_line(group)]
        for key in keys_of(cls, f"{group}.").values():
            head = f"{key.path}  {describe(key).replace('|', ' | ')} [{_default(key)}]"  # long ones break at blanks
            parts += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="      ")
            parts += textwrap.wrap(key.doc, width, initial_indent="      ", subsequent_indent="      ")
    parts.append("\nsource: an entry of data.train or data.eval, a mapping of")
    for key in keys_of(DataSource).values():
        head = f"{key.path}  {describe(key)} [{_default(key)}]  {key.doc}"
        parts += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(parts)


def markdown() -> str:
    """docs/config.md."""
    parts = [INTRODUCTION]
    for group, cls in groups().items():
        parts.append(f"## {group}\n\n{cls.__doc__}")
        if names := options(group):
            parts.append(f"Choices (`{group}=…`): {', '.join(f'`{name}`' for name in names)}.")
        parts.append(_table(list(keys_of(cls, f"{group}.").values())))
    parts.append("## source\n\nAn entry of `data.train` and `data.eval`; text alone is its `path`.")
    parts.append(_table(list(keys_of(DataSource).values())))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _choices_line(group: str) -> list[str]:
    names = options(group)
    return [f"  {group}={'|'.join(names)}"] if names else []


def _default(key: Key) -> str:
    value: Any = key.default
    if isinstance(value, bool):
        return str(value).lower()
    return (
        "null" if value is None else f"{value:g}" if isinstance(value, float) else '""' if value == "" else str(value)
    )


def _table(rows: list[Key]) -> str:
    lines = ["| key | takes | default | |", "|---|---|---|---|"]
    for key in rows:
        takes = describe(key).replace("|", " \\| ")
        lines.append(f"| `{key.path}` | {takes} | `{_default(key)}` | {key.doc} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
