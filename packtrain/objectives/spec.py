"""Declaration of an objective: names, options and rules. It needs no torch."""

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
    """Declaration of an objective.

    A built-in objective is a folder of objectives/: its module `spec` has it as the constant SPEC, its module `run` trains it.
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
    """Whether objective.loss may be a list of losses, which are added up."""
    sorting_losses: tuple[str, ...] = ()
    """Losses that sort all examples of a step. With them a step is one micro-batch of one process."""
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    """Entries of objective.options, by name."""
    rules: Callable[[RunConfig, Set[str]], Iterable[Fault]] = _no_rules
    """Return faults of a config. The set has the keys that are not at their defaults, such as "packing.mode"."""
    reference: bool = False
    """Whether the loss compares the model with a reference (objective.beta, objective.reference)."""
    scores: bool = False
    """Whether the model has a score in place of the output head."""
    margins: bool = False
    """Whether pairs may have a margin (column `margin` of the data)."""
    order: int = 100
    """Objectives with a lower number are listed first."""

    @property
    def pairs(self) -> bool:
        """Whether it trains on preference pairs."""
        return self.examples == "pairs"

    @property
    def documents(self) -> int:
        """Number of documents in an example."""
        return 2 if self.pairs else 1
