"""Which format the rows of a source have, from their columns and from what is trained on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from packtrain.data.formats.conversations import OPTIONAL, READ_TOO, REQUIRED, Format, Objective
from packtrain.data.formats.ranked import LISTS, list_column
from packtrain.errors import UserError

OF_PAIRS = ("preference", "ranked")


def recognise(
    first: list[str], names: list[str], wanted: str, columns: Mapping[str, str], where: str, objective: Objective
) -> Format:
    """The format of a source; raises UserError unless exactly one fits, and it is one for the objective.

    `auto` goes by the columns of the `first` row, so that a stray row is a bad row and not another format; `names` are
    the columns of all rows seen.
    """
    every = (REQUIRED, READ_TOO)
    known = {*OPTIONAL, *(name for kind in every for needed in kind.values() for name in needed)}
    if strange := sorted(set(columns) - known):
        raise UserError(
            f"{strange[0]!r} is not a column of ours", where="data.columns", fix=f"Ours: {', '.join(sorted(known))}."
        )
    if absent := sorted(set(columns.values()) - set(names)):
        raise UserError(
            f"data.columns names the column {absent[0]!r}, which is not there; found: {', '.join(names)}", where=where
        )
    fits = _fitting(first, columns, objective) if wanted == "auto" else [wanted]
    shown = OF_PAIRS if objective == "dpo" else [name for name in REQUIRED if name not in OF_PAIRS]
    needs = "; ".join(f"{name}: {', '.join(REQUIRED[name])}" for name in shown)
    found = f"found: {', '.join(names)}"
    if objective == "dpo" and not set(fits) & set(OF_PAIRS):
        seen = f"these are {' or '.join(fits)}" if fits else "the columns are not those of preference pairs"
        fix = f"Rename with data.columns, or train on them with packtrain sft. Needed are {needs}; prompt if any."
        raise UserError(f"{seen}; {found}", where=where, fix=fix)
    if len(fits) != 1:
        what = f"the columns fit {' and '.join(fits)}" if fits else "the columns fit no known format"
        fix = f"Set data.format to {' or '.join(fits)}." if fits else f"Rename with data.columns. Needed are {needs}."
        raise UserError(f"{what}; {found}", where=where, fix=fix)
    if fits[0] in OF_PAIRS and objective == "sft":
        raise UserError("these are preference pairs", where=where, fix="Train on them with packtrain dpo.")
    missing = _missing(fits[0], names, columns)
    if missing:
        what = f"data.format={fits[0]} needs the column {missing[0]!r}; {found}"
        raise UserError(what, where=where, fix=f"Rename with data.columns, or set data.format. Needed are {needs}.")
    return cast(Format, fits[0])


def _fitting(first: list[str], columns: Mapping[str, str], objective: Objective) -> list[str]:
    """The formats whose columns are all there. Pairs go before what else their rows could be, and before lists."""
    fits = [name for name in REQUIRED if name != "ranked" and not _missing(name, first, columns)]
    if objective == "dpo" and "preference" in fits:
        return ["preference"]  # other columns may hold the prompt, or the chosen answer once more
    # `answers` of documents to train on are many things
    return ["ranked"] if objective == "dpo" and not _missing("ranked", first, columns) else fits


def _missing(format: str, names: list[str], columns: Mapping[str, str]) -> list[str]:
    """The columns that rows of the format need and that are not there, by the file's names."""
    if format == "ranked":
        return [] if list_column(names, columns) else [columns.get("answers", " or ".join(LISTS))]
    return [columns.get(need, need) for need in REQUIRED[format] if columns.get(need, need) not in names]
