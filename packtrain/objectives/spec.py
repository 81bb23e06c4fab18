"""The declaration of an objective: what others need to know of it. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from packtrain.config.fault import Fault, Option

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig

Examples = Literal["documents", "pairs", "answers"]
"""Kinds of examples: documents, pairs of a chosen and a rejected answer, answers with a label."""


def _no_rules(config: RunConfig, given: Set[str]) -> Iterable[Fault]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An objective.

    It is the constant SPEC of a module `spec` in a folder of its own. The module `run` there trains it.
    """

    name: str
    """The verb, and the value of objective.kind."""
    help: str
    """One sentence for `packtrain --help`."""
    about: str
    """A noun for model cards: "a reward model"."""
    run: str
    """Module with the constant OBJECTIVE, a subclass of train/objectives/training_objective.py::TrainingObjective."""
    examples: Examples
    losses: tuple[str, ...] = ()
    """Values of objective.loss, the default first."""
    adds_losses: bool = False
    """Whether objective.loss may be a list, to add several up."""
    sorting_losses: tuple[str, ...] = ()
    """Losses that sort all examples of a step. With them a step is one micro-batch of one process."""
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    """Entries of objective.options."""
    rules: Callable[[RunConfig, Set[str]], Iterable[Fault]] = _no_rules
    """Return faults of a config whose keys in the set are not at their defaults."""
    reference: bool = False
    """Whether the model is held to a reference (objective.beta, objective.reference)."""
    scores: bool = False
    """Whether the model has a score in place of the output head."""
    margins: bool = False
    """Whether it reads the margins of pairs."""
    order: int = 100
    """Objectives with a lower number are listed first."""

    @property
    def pairs(self) -> bool:
        """Whether it trains on preference pairs."""
        return self.examples == "pairs"

    @property
    def documents(self) -> int:
        """Documents of an example."""
        return 2 if self.pairs else 1
