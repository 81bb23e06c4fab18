"""The declaration of a change to the loaded model's computation, and all changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from packtrain.config.schema import RunConfig
from packtrain.errors import UserError
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.proof.comparison import Tolerance
from packtrain.registry import Registry

Make = Callable[[PreTrainedModel], Callable[[], object]]
"""Changes a model and returns the function that undoes it. If it raises an exception, nothing is changed."""

NO_GRADIENTS = "computes no gradients before step 1, and the proof needs them"
"""Said of a strategy under which nothing can be proved."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The run that a change is for. `model` is the loaded model, without adapters around it."""

    config: RunConfig
    model: PreTrainedModel
    ranks: Ranks
    precision: Precision

    @property
    def on_gpu(self) -> bool:
        """Whether the model computes on a GPU."""
        return self.ranks.device.type == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A change as a run could make it."""

    what: str
    """The changed computation in words, for the log: "norms by a fused kernel"."""
    make: Make
    """It also changes the reference of preferences. Otherwise the two round differently, and first margins are not zero."""
    lacks: str = ""
    """Why it cannot be made here; "" if it can."""
    key: str | None = None
    """Config key that requires it: if it is not available or not exact, the run ends. None: the run goes on without it."""
    tolerance: Tolerance | None = None
    """Differences that are allowed. None: rounding in the format of the computation."""
    unproved: str = ""
    """Why it is made without a proof on the first documents; "" if it is proved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to the computation.

    It is the constant CHANGE of a file in packtrain/changes, or an entry point of another package.
    """

    name: str
    """Its name in the log, and the value of model.kernels that requires it."""
    propose: Callable[[Situation], Proposal | None]
    """Return the change for this run. None leaves the model unchanged, and logs nothing."""
    kernel: bool = True
    """Whether model.kernels chooses it: auto tries it, its name requires it. False: `propose` reads another key."""
    check: Callable[[Situation], object] = lambda situation: None
    """Raise UserError early if the config asks for it and it is impossible. Called before the model is spread."""
    label: str = ""
    """Its name in the log, if that is another."""
    order: int = 100
    """Changes with a lower number are made first."""


CHANGES = Registry(Change, "change", package="packtrain.changes", attribute="CHANGE")
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
            what = f"{change.name} cannot change this model"
            raise UserError(what, where=KEY, fix="set it to auto", code="change-unavailable")
        if proposal is not None:
            yield change.label or change.name, replace(proposal, key=KEY) if required else proposal
