"""The page docs/architectures.md: `python tests/architectures/page.py` measures all types and writes it.

It takes five minutes. The tests measure every line again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from padded_call import AS_IT_COMES, PACKED, REFUSED, SHARED, Attachment, attachment_of
from sweep import Outcome, outcome_of, quietly_on_one_thread
from tiny import model_types, whole_types

from packtrain.proof.choice import choose_attention
from packtrain.proof.exhibits import Exhibits

sys.path.append(str(Path(__file__).parents[1] / "pictures"))
from packed import seeing
from tiny_seeing import FAMILIES as SEEING

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
MADE_WITH = f"Measured with transformers {transformers.__version__}"
_OPTIONAL = ("causal_conv1d", "fla", "mamba_ssm", "timm", "xlstm")

_PATHS = {
    "segmented": "packed rows are flattened, attention runs once per document",
    "mixers": "packed rows are flattened, the modules that mix tokens get their documents as a batch",
    "per_document": "packed rows are planned and counted as any other, the model runs once per document",
    "padding only": "packed rows are refused, `packing.mode=padding` trains",
    "refused": "does not train: the run ends before step 1, and names the missing package, the key of `model.config` to change, or says to take another model",
}
_ATTACHMENTS = {
    SHARED: "padded calls run as rows, which compute common beginnings once",
    PACKED: "padded calls run as rows, and each document computes its own beginning",
    AS_IT_COMES: "padded calls run as without `attach`",
    REFUSED: "`attach` raises, and says why",
}
_INTRODUCTION = """\
# Architectures

This page says how packtrain runs every language model that transformers registers, if `model.attention` is `auto` and there
is no GPU. (On a GPU, `flash` comes before `segmented`.) Models that see or hear have a table of their own: they are loaded whole, with
their towers, and trained on text. Each line is measured on a tiny random model: its losses and gradients
in `padding`, `padding_free` and `packed` equal every document alone, to 1e-5 and 1e-4, or the type is refused.
packtrain has no list of models that train: the same proof runs on the loaded model before step 1. So a model that is not in this table, also
from remote code, is treated by its behaviour.

The third column names the modules that a row runs once per document under `mixers`; they were found by measurement. If it does not
say "attention by segments", the model's own attention is among them, or there is none.

The column "with pictures" names the path of rows with pictures. It is proved exact: one document's picture is changed, and no output of another
document moves. It is measured for {seeing} types. Their losses and gradients with pictures equal each document alone, too
(tests/pictures). An empty cell: not measured here; the proof runs before step 1 of any run with pictures.

The last column says how `packtrain.attach` runs padded calls of the type. It is measured with a call of GRPO: prompts padded on the
left, answers on the right, in groups with a common prompt. If that is not packed, it is measured with a call padded only on the
right. Outputs and gradients equal the padded call, to 1e-5 and 1e-4.

{made_with} and none of {optional}. This page is generated:
`python tests/architectures/page.py`.
"""


def is_comparable() -> bool:
    """Whether what is measured here is what the page is about: the same transformers, and no kernels that change the path."""
    return MADE_WITH in PAGE.read_text() and not any(find_spec(package) for package in _OPTIONAL)


def page(outcomes: Sequence[Outcome], attachments: Sequence[Attachment]) -> str:
    """The whole page: counts, then a line for each type."""
    whole = {*whole_types()}
    text, towers = (
        [pair for pair in zip(outcomes, attachments, strict=True) if (pair[0].model_type in whole) is has_towers]
        for has_towers in (False, True)
    )
    paths = [Counter(outcome.path for outcome, _ in kind) for kind in (text, towers)]
    attached = [Counter(attachment.path for _, attachment in kind) for kind in (text, towers)]
    lines = [
        _INTRODUCTION.format(made_with=MADE_WITH, optional=", ".join(_OPTIONAL), seeing=len(SEEING)),
        "| path | types | of text | with towers | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [row(path, [count[path] for count in paths], meaning) for path, meaning in _PATHS.items()]
    lines += [row("all", [len(text), len(towers)], ""), ""]
    lines += ["| `attach` | types | of text | with towers | meaning |", "|---|---|---|---|---|"]
    lines += [row(way, [count[way] for count in attached], meaning) for way, meaning in _ATTACHMENTS.items()]
    for title, kind in (("Models of text", text), ("Models that see or hear, on text", towers)):
        lines += ["", f"## {title}", ""]
        more = "with pictures | " if kind is towers else ""
        lines += [f"| type | path | {more}once per document | why not the one before | `attach` |"]
        lines += ["|---|---|---|---|---|" + "---|" * bool(more)]
        lines += [line(*pair) for pair in kind]
    return "\n".join(lines) + "\n"


def row(name: str, counts: Sequence[int], meaning: str) -> str:
    """A row of counts, their sum first."""
    return f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} | {meaning} |".replace("|  |", "| |")


def line(outcome: Outcome, attachment: Attachment) -> str:
    """The page's line for one type."""
    said = f"{attachment.path}: {attachment.why}" if attachment.why else attachment.path
    if outcome.path == attachment.path == REFUSED and outcome.why == attachment.why:
        said = REFUSED
    seen = (path_with_pictures(outcome.model_type),) if outcome.model_type in whole_types() else ()
    cells = (outcome.model_type, outcome.path, *seen, outcome.by_document, outcome.why, said)
    return " | ".join(["", *(cell.replace("|", "/") for cell in cells), ""]).strip()


@cache
def path_with_pictures(model_type: str) -> str:
    """The exact path of documents with pictures, or "" if none is measured."""
    if model_type not in SEEING:
        return ""
    model, sight, documents = seeing(model_type)
    exhibits = Exhibits(sight, documents[3], documents[0])
    return choose_attention("auto", model, torch.device("cpu"), exhibits=exhibits).backend.name


if __name__ == "__main__":
    with quietly_on_one_thread():
        types = model_types()
        PAGE.write_text(page([*map(outcome_of, types)], [*map(attachment_of, types)]))
