"""The group `objective`, and `key`, the declaration of a config field."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from packtrain.objectives.spec import OBJECTIVES, Spec, TokenWeights, equal_weights, losses, losses_in_words

Resume = Literal["free", "decisive", "fixed"]
"""Whether a resumed run may change a key: unasked (documents and losses stay the same), if trainer.resume_despite names it, or never (the
checkpoint's weights or optimizer states would not fit)."""


def key(
    default: Any,
    doc: str | Callable[[], str],
    *,
    resume: Resume | None = "free",
    advanced: bool = False,
    of: Callable[[Spec], bool] | None = None,
    among: Callable[[], Iterable[str]] | None = None,
    **bounds: float,
) -> Any:
    """Declare a config field: its default and a sentence.

    `resume` says whether a resumed run may change it; None: checkpoints do not record the key. `packtrain sft -h` leaves out `advanced` keys.
    Only objectives that `of` accepts use it (None: all). Text has to be one of `among`. Bounds are minimum, above, below and maximum, as in
    config/keys.py::Key.
    """
    metadata = {"doc": doc, "resume": resume, "advanced": advanced, "of": of, "among": among, **bounds}
    if type(default) in (list, dict):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


advanced = partial(key, advanced=True)
"""Declare a config field that `packtrain sft -h` leaves out."""
REFERENCES = ("auto", "model", "adapters_off", "precomputed")
"""Values of objective.reference that are not paths."""


def _has_reference(spec: Spec) -> bool:
    return spec.reference


@dataclass(kw_only=True, slots=True, frozen=True)
class Objective:
    """The loss."""

    kind: str = key("sft", "Training method; each is a verb (packtrain dpo).", among=OBJECTIVES.all, resume="fixed")
    loss: str | list[str] | None = key(None, losses_in_words, among=losses, resume="decisive")
    options: dict[str, Any] = key(
        {}, "Rare arguments of TRL's config (docs/preferences.md, kto.md, …).", resume="decisive", advanced=True
    )
    beta: float = key(0.1, "strength of the tie to the reference.", above=0, of=_has_reference, resume="decisive")
    reference: str = key(
        "auto",
        "model (a second copy of model.path), adapters_off (LoRA), precomputed (its log-probabilities, once), or the "
        "path of another model or of earlier adapters (with LoRA on the same base, no second copy of it); auto is the start "
        "of training: adapters_off with new adapters, the same adapters if model.path names adapters, else model.",
        of=_has_reference,
        resume="decisive",
    )

    @property
    def spec(self) -> Spec:
        """The declaration of this kind."""
        return OBJECTIVES[self.kind]

    @property
    def losses(self) -> list[str]:
        """The losses by name, one or several."""
        if self.loss is None:
            return [*self.spec.losses[:1]]
        return self.loss if isinstance(self.loss, list) else [self.loss]

    @property
    def token_weights(self) -> TokenWeights:
        """The weights of tokens in the loss of documents."""
        return self.spec.token_weights.get(next(iter(self.losses), ""), equal_weights)

    def option(self, name: str) -> Any:
        """Return the value of an option, by default TRL's."""
        return self.options.get(name, self.spec.options[name].default)

    @property
    def sorting_losses(self) -> list[str]:
        """The losses that sort all pairs of a step. With them a step is one micro-batch of one process."""
        return [name for name in self.losses if name in self.spec.sorting_losses]
