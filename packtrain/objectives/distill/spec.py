"""Declaration of distillation: a student learns a teacher's distributions over the answers of the data."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from packtrain.config import Fault, Option, is_number
from packtrain.objectives.spec import Figure, Spec

if TYPE_CHECKING:
    from packtrain.config.schema import Model, RunConfig

TEACHER = "objective.options.teacher"
_QUANTIZED = ("no", "nf4", "int8", "fp8")
_OPTIONS = {
    "teacher": Option(None, "hub id, or path of a model", lambda value: isinstance(value, str) and bool(value)),
    "teacher_quantize": Option("no", "|".join(_QUANTIZED), lambda value: value in _QUANTIZED),
    "teacher_top_k": Option(None, "whole number ≥ 1", lambda value: type(value) is int and value >= 1),
    "temperature": Option(1.0, "number > 0", lambda value: is_number(value) and value > 0),
    "jsd_beta": Option(0.5, "number above 0, below 1", lambda value: is_number(value) and 0 < value < 1),
    "nll_share": Option(0.0, "number from 0, below 1", lambda value: is_number(value) and 0 <= value < 1),
}
_FIGURES = (
    Figure("kl", "KL from the teacher", headline=True, note="at temperature 1"),
    Figure("nll", "-log p", "student", headline=True),
    Figure("teacher_nll", "-log p", "teacher"),
    Figure("agreement", "Same first choice as the teacher", unit="percent", headline=True),
)


def _teacher(config: RunConfig) -> tuple[str, Model] | None:
    path, quantize = map(config.objective.option, ("teacher", "teacher_quantize"))
    own = replace(config.model, path=path, quantize=quantize, init="pretrained", experts="auto", towers="frozen")
    return (TEACHER, replace(own, config={}, tokenizer=None, revision=None)) if isinstance(path, str) else None


def _rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    objective = config.objective
    if not objective.option("teacher"):
        fix = f"Name a model with the student's tokenizer: {TEACHER}=owner/name."
        yield Fault((TEACHER,), "distillation needs a teacher", fix, code="no-teacher")
    if objective.option("teacher_top_k") and (config.data.streaming or config.data.stages):
        keys = ("objective.options.teacher_top_k", "data.streaming" if config.data.streaming else "data.stages")
        what, fix = "it is computed for an epoch before step 1, and these data have none", "Remove one of them."
        yield Fault(keys, what, fix, code="top-k-without-epochs")
    if "jsd_beta" in objective.options and objective.losses != ["jsd"]:
        what, fix = f"{objective.losses[0]} has no jsd_beta", "Remove it, or set objective.loss=jsd."
        yield Fault(("objective.options.jsd_beta",), what, fix, code="jsd-beta-unused")


SPEC = Spec(
    name="distill",
    order=4,
    help="Train a student on a teacher's distributions over the answers of conversations, completions, or text.",
    about="distillation from a teacher",
    run=f"{__package__}.run",
    examples="documents",
    figures=_FIGURES,
    losses=("forward_kl", "reverse_kl", "jsd"),
    options=_OPTIONS,
    rules=_rules,
    frozen=_teacher,
    frees_frozen=lambda config: bool(config.objective.option("teacher_top_k")),
)
