"""The page docs/architectures.md, from the sweep alone: `python tests/architectures/page.py > docs/architectures.md`.

It takes a minute. The tests compare every line of it with what they measure.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import transformers
from sweep import Outcome, outcome_of, quietly_on_one_thread
from tiny import model_types

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
MADE_WITH = f"Measured with transformers {transformers.__version__}"
_OPTIONAL = ("causal_conv1d", "fla", "mamba_ssm", "timm", "xlstm")

_PATHS = {
    "segmented": "packed rows are flattened, attention runs once per document",
    "per_document": "packed rows are planned and counted as any other, the model runs once per document",
    "padding only": "packed rows are refused, `packing.mode=padding` trains",
    "refused": "does not train as it is: the run ends before step 1, and names the package that is missing, the key of `model.config` to look at, or that another model has to be taken",
}
_INTRODUCTION = """\
# Architectures

What packtrain does with every causal language model that transformers registers, when `model.attention` is `auto` and there
is no GPU (on one, `flash` comes before `segmented`). Each line is measured on a tiny random model: its losses and gradients
in `padding`, `padding_free` and `packed` are those of every document alone, to 1e-5 and 1e-4, or the type is refused.
No list of names is behind it: the same proof runs on the loaded model before step 1, so a model that is not here, remote
code too, is treated by what it does.

{made_with} and none of {optional}. This page is generated:
`python tests/architectures/page.py > docs/architectures.md`.
"""


def is_comparable() -> bool:
    """Whether what is measured here is what the page is about: the same transformers, and no kernels that change the path."""
    return MADE_WITH in PAGE.read_text() and not any(find_spec(package) for package in _OPTIONAL)


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page: counts, then a line for each type."""
    counts = Counter(outcome.path for outcome in outcomes)
    lines = [
        _INTRODUCTION.format(made_with=MADE_WITH, optional=", ".join(_OPTIONAL)),
        "| path | types | what it means |",
        "|---|---|---|",
    ]
    lines += [f"| {path} | {counts[path]} | {meaning} |" for path, meaning in _PATHS.items()]
    lines += [f"| all | {len(outcomes)} | |", "", "| type | path | why not the one before |", "|---|---|---|"]
    return "\n".join([*lines, *map(line, outcomes)]) + "\n"


def line(outcome: Outcome) -> str:
    """The page's line for one type."""
    return f"| {outcome.model_type} | {outcome.path} | {outcome.why.replace('|', '/')} |"


if __name__ == "__main__":
    with quietly_on_one_thread():
        sys.stdout.write(page([outcome_of(model_type) for model_type in model_types()]))
