"""The changes of packtrain/changes and of other packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.errors import UserError
from packtrain.registry import Registry

CHANGES = Registry(Change, "change", package="packtrain.changes", module="", attribute="CHANGE")
KEY = "model.kernels"


def check_changes(situation: Situation) -> None:
    """Raise UserError or CheckFailed if the run asks for a change that it cannot have."""
    for change in CHANGES.all().values():
        change.check(situation)


def proposals(situation: Situation) -> Iterator[tuple[str, Proposal]]:
    """Yield the changes to try, with their names in the log, in order."""
    asked = situation.config.model.kernels
    for change in CHANGES.all().values():
        if change.kernel and asked not in ("auto", change.name):
            continue
        proposal, required = change.propose(situation), change.kernel and asked == change.name
        if proposal is None and required:
            raise UserError(f"{change.name} cannot change this model", where=KEY, fix="set it to auto")
        if proposal is not None:
            yield change.label or change.name, replace(proposal, key=KEY) if required else proposal
