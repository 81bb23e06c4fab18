"""Declaration of an objective: names, figures, options and rules. It needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from packtrain.config import Fault, Option
from packtrain.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from packtrain.config.schema import Model, RunConfig

_CHUNKS = (8192, 4096, 2048)
_LOGITS = 0.02  # most of a GPU's memory for the logits of a chunk
COMPARED_PAIRS = 4
CHECKED_LOGITS = 2**27
"""dpo and kto compare the answers of so many first pairs before step 1. CHECKED_LOGITS bounds their logits (train/verify/loss_proofs.py)."""
Examples = Literal["documents", "pairs", "answers"]
"""Kinds of examples: documents, pairs of a chosen and a rejected answer, answers with a label."""
_TAKEN = {
    *("step", "epoch", "lr", "learning_rate", "grad_norm", "tokens", "examples", "seconds", "memory_bytes", "mfu"),
    *("tokens_per_second", "padding_fraction", "data_fraction", *get_args(Examples)),
}
"""Names that figures cannot have: metrics.jsonl uses them, and names that end in `loss`, for other values."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of an objective, under its `name` in metrics.jsonl. Evaluations have it as `eval_NAME`.

    Figures with the same `title` (by default the name) share a drawing of the report, where `label` names the curve.
    A `headline` is shown for each evaluation, at the end of a run, and on top of its report, with the remark `note`.
    A figure is a mean, unless it is an `extreme` or the `difference` of two earlier figures.
    """

    name: str
    title: str = ""
    label: str = ""
    unit: Literal["number", "percent"] = "number"
    headline: bool = False
    note: str = ""
    extreme: Literal["", "least", "greatest"] = ""
    difference: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return f"{self.title or self.name} {self.label}".strip().lower()

    def written(self, value: float) -> str:
        """Return a value in its unit."""
        return f"{value:.1%}" if self.unit == "percent" else f"{value:.2f}"

    def moved(self, first: float, last: float) -> str:
        """Return its change in words. A percentage shows only `last`: it starts at 0, as the model equals its reference."""
        note = f" ({self.note})" if self.note else ""
        return f"{self.words} {'' if self.unit == 'percent' else f'{self.written(first)} → '}{self.written(last)}{note}"


RIGHT_ANSWERS = Figure("right", "right answers", unit="percent", headline=True)
"""The figure of trainer.answers, in evaluations of any objective."""


def task_figures(keys: Iterable[str], known: Iterable[Figure]) -> list[Figure]:
    """Return the figures TASK/METRIC of tasks among `keys` of metrics.jsonl, without `known` ones."""
    others, shares = tuple(figure.name for figure in known), re.compile("/(acc|exact_match|pass@)")
    names = [key[5:] for key in keys if re.match("eval_.+/", key) and not key.endswith(others)]
    figures = [Figure(name, name.replace("/", " "), headline=True) for name in names]
    return [replace(figure, unit="percent") if shares.search(figure.name) else figure for figure in figures]


def head_chunk(vocabulary: int, width: int, device_bytes: int) -> int:
    """Return the number of tokens whose logits exist at once on a GPU.

    Each logit takes `width` bytes (model/forward.py). The float32 gradient of the head is read and written once for each chunk.
    """
    return next((n for n in _CHUNKS if n * vocabulary * width <= _LOGITS * device_bytes), _CHUNKS[-1])


TokenWeights = Callable[["Tensor"], "Tensor"]
"""Return the weights of tokens in a loss of documents, from their log-probabilities. A token's loss is its weight times -log p."""


def equal_weights(log_probs: Tensor) -> Tensor:
    """Weigh all tokens equally, as the negative log-likelihood does."""
    return log_probs.new_ones(log_probs.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Declaration of an objective. Raises ValueError if a field is wrong.

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
    figures: tuple[Figure, ...] = ()
    """All figures that the loss logs besides its value, in the order of a logged line."""
    losses: tuple[str, ...] = ()
    """Values of objective.loss, the default first."""
    losses_help: str = ""
    """The losses in words for the help of objective.loss; by default their names."""
    token_weights: Mapping[str, TokenWeights] = field(default_factory=dict[str, TokenWeights])
    """How losses of documents weigh their tokens. Others weigh them equally."""
    adds_losses: bool = False
    """Whether objective.loss may be a list of losses, which are added up."""
    sorting_losses: tuple[str, ...] = ()
    """Losses that sort all examples of a step. With them a step is one micro-batch of one process."""
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    """Entries of objective.options, by name."""
    rules: Callable[[RunConfig, Set[str]], Iterable[Fault]] = lambda config, given: ()
    """Return faults of a config. The set has the keys that are not at their defaults, such as "packing.mode"."""
    reference: bool = False
    """Whether the loss compares the model with a reference (objective.beta, objective.reference)."""
    frozen: Callable[[RunConfig], tuple[str, Model] | None] = lambda config: None
    """Return another model that the loss needs without updates, such as a teacher, and the config key of its path."""
    frees_frozen: Callable[[RunConfig], bool] = lambda config: False
    """Whether that model is needed only before step 1."""
    scores: bool = False
    """Whether the model has a head for scores in place of the output head."""
    margins: bool = False
    """Whether pairs may have a margin (column `margin` of the data)."""
    order: int = 100
    """Objectives with a lower number are listed first."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", self.name):
            raise ValueError(f"name={self.name!r} is no verb of small letters, digits, _ and -")
        if self.examples not in get_args(Examples):
            raise ValueError(f"examples={self.examples!r} is none of {', '.join(get_args(Examples))}")
        if wrong := [figure.name for figure in self.figures if figure.name in _TAKEN or figure.name.endswith("loss")]:
            raise ValueError(f"figures: metrics.jsonl has {', '.join(wrong)} already")

    @property
    def pairs(self) -> bool:
        """Whether it trains on preference pairs."""
        return self.examples == "pairs"

    @property
    def documents(self) -> int:
        """Number of documents in an example."""
        return 2 if self.pairs else 1

    @property
    def headlines(self) -> list[Figure]:
        """The figures that sum up an evaluation."""
        return [figure for figure in self.figures if figure.headline]


OBJECTIVES = Registry(Spec, "objective", package="packtrain.objectives", module="spec", attribute="SPEC")
"""All objectives, ours and other packages'."""


def objective_for(examples: Examples) -> Spec:
    """Return the first objective that trains on these `examples`."""
    return next(spec for spec in OBJECTIVES.all().values() if spec.examples == examples)


def losses() -> tuple[str, ...]:
    """Return the losses of all objectives."""
    return tuple(dict.fromkeys(name for spec in OBJECTIVES.all().values() for name in spec.losses))


def losses_in_words() -> str:
    """Return a sentence on the losses of each objective."""
    choosing = [spec for spec in OBJECTIVES.all().values() if spec.losses]
    own = (f"{spec.name}: {spec.losses_help or ', '.join(spec.losses)}" for spec in choosing)
    return f"Loss of the kind, by default its first. {'; '.join(own)}."


def names_of_figures() -> set[str]:
    """Return the first parts of figures' names: "loss", "tokens", "rewards" from "rewards/margins"."""
    figures = (figure.name for spec in OBJECTIVES.all().values() for figure in spec.figures)
    return {"loss", "tokens", *get_args(Examples), *(name.partition("/")[0] for name in figures)}
