"""Bases of losses, each built on the one before: `Loss`, `ExampleLoss`, `AnswerLoss`, `ReferenceLoss`.

`ExampleLoss` is a mean over the examples of a step, `AnswerLoss` reads log-probabilities of answers, `ReferenceLoss` compares them with a
reference. Losses are means over the global step: all ranks, all micro-batches. Formulas are in packtrain/objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import ModelOutput
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, use_adapter

from packtrain.attention.backends import attention_by
from packtrain.attention.over_ranks import sum_over_parts
from packtrain.config.objective import Objective
from packtrain.data.dataset import Document
from packtrain.errors import UserError
from packtrain.model.forward import Head, patch_forward
from packtrain.model.layers import compile_layers, is_compiled
from packtrain.model.load import base_model
from packtrain.model.spread import placement_of
from packtrain.monitor.heartbeat import waiting
from packtrain.objectives.answers import Figures, Inputs, Sum, Targets
from packtrain.objectives.spec import Figure
from packtrain.packing.segments import SplitSegments
from packtrain.strategies.spec import STRATEGIES
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.run_state import LoopSettings

_NOT_FOR_MODEL = ("target_places", "target_counts", "label", "ref_logps", "ref_chosen_logps", "ref_rejected_logps")
"""Inputs of a micro-batch that the loss reads and the model does not take."""
Logps = tuple[torch.Tensor, ...]
"""Log-probabilities, float32. Pairs: two tensors [pairs], chosen and rejected. Answers with labels: one tensor [answers]."""
EvaluationBatches = Callable[..., Iterator[MicroBatch]]
"""Yields this rank's micro-batches of an evaluation set. An optional function of its Steps chooses others (kto: mismatched pairs)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a loss is made from: the model, the tokenizer, settings."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    settings: LoopSettings


class Loss:
    """The loss of a micro-batch on `model`.

    A subclass defines `compute` and `evaluate`. Its `__init__` patches the forward of the model (model/forward.py).
    """

    document_figures: tuple[str, ...] = ()
    """Figures of each example for ledger.jsonl (train/log/ledger.py); without any there is none. `loss_sum` is a sum over trained tokens."""
    by_document: tuple[torch.Tensor, ...] = ()
    """These figures of the last micro-batch, without gradients: [examples] each, or none."""
    extra_forwards = 0
    """Further forward passes of a step, for the count of FLOPs: by the reference, and for kto's KL estimate."""

    def __init__(self, setup: Setup, objective: Objective) -> None:
        self.settings, self.model, self.tokenizer = setup.settings, setup.model, setup.tokenizer
        base, self.strategy = base_model(self.model), STRATEGIES[self.settings.strategy]
        self.compute_dtype: torch.dtype = self.settings.autocast or base.dtype
        """Number format that the model computes in."""
        set_seed(self.settings.trainer.seed)
        base.config.use_cache = False
        self.accelerator = self._open_accelerator(base.dtype)
        self.device = self.accelerator.device
        if self.device.type == "cuda":  # accelerate gives no index to one process
            self.device = torch.device("cuda", torch.cuda.current_device())
        # accelerate puts autocast around the forward, but not in DeepSpeed's engine: there patch_forward does it
        self.autocast = self.settings.autocast if self.strategy.steps_in_backward else None
        self.changes: list[str] = []
        """Names of the changes made to how the model computes (packtrain/changes)."""
        self.objective = objective
        """The group `objective` of the config: option("…"), beta, losses, spec."""
        self.report_phase: Callable[..., object] = lambda phase, **_: None
        """Losses that run the model more than once call it with each phase, for the heartbeat (loop.py sets it)."""

    def _open_accelerator(self, weights: torch.dtype) -> Accelerator:
        AcceleratorState._reset_state()  # a proof in this process may have opened another
        settings = self.settings
        return placement_of(self.strategy).open_accelerator(
            self.strategy,
            weights,
            settings.autocast,
            max_norm=settings.optim.max_grad_norm,
            # else DDP reorders its buckets after the first step of each start, which changes sums over three or more ranks
            unused=settings.trainer.deterministic or settings.unused_at_times,
        )

    def compute(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Return a scalar: the micro-batch's share of the step's loss, times the number of processes.

        The factor makes up for the averaging of gradients over processes. `counts` int64 [4] cover the whole step: trained targets, tokens,
        slots, examples.
        """
        raise NotImplementedError

    def of_rows(self, batch: MicroBatch) -> torch.Tensor:
        """Return a scalar loss of a micro-batch alone, without a reference. Proofs of changes to the model use it."""
        return self.compute(self.model, batch, torch.tensor(batch.counts, device=self.device))

    def choose_head(self, steps: Steps) -> Head | None:
        """Choose the output head of documents by proof, before step 1. None: the loss has no choice."""
        return None

    def definition(self, documents: Sequence[Document]) -> Iterator[Callable[[], torch.Tensor]] | None:
        """Return the loss of `documents` in parts: a function for each document.

        It runs the document alone, by the model's own forward. `packtrain verify` compares the packing modes with the sum of the parts. None:
        it compares them with padded micro-batches of one example.
        """
        return None

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """Prepare for the micro-batches of a step, before the first one."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the objective's own metrics since the last call, and reset them. Every rank calls it."""
        return {}

    def mark_metrics(self) -> Callable[[], None]:
        """Return a function that sets the metrics back to their values at this call."""
        return lambda: None

    def evaluate(self, sets: Mapping[str, EvaluationBatches]) -> dict[str, float]:
        """Return metrics over all evaluation `sets` (`loss`, …), and of each named one (`NAME_loss`, …).

        Every rank calls it, with the model in eval mode. The set without a name is "".
        """
        raise NotImplementedError

    def keeping_metrics(self) -> AbstractContextManager[object]:
        """Keep the metrics of the training steps unchanged by the forward passes inside the block."""
        (block := ExitStack()).callback(self.mark_metrics())
        return block


class ExampleLoss(Loss):
    """A loss averaged over the examples of a step: pairs, answers with labels, or documents.

    A subclass defines `measure` and `zero`. The declaration of the objective names the figures.
    """

    def __init__(self, setup: Setup, objective: Objective) -> None:
        super().__init__(setup, objective)
        disable_dropout_in_model(setup.model)  # as TRL's trainers do
        self._metrics = self.new_metrics()

    def new_metrics(self) -> FigureSums:
        """Return empty sums of the figures."""
        return FigureSums.none(self.objective.spec.figures, self.device)

    def measure(self, model: torch.nn.Module, inputs: Inputs, counts: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        """Return the micro-batch's share of the loss, and its figures by name.

        `counts` as in `Loss.compute`. In an evaluation they are int64 [4, 2], for all sets together and for this set; the loss then has two
        values, [2].
        """
        raise NotImplementedError

    def zero(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """Return a zero that reaches every parameter, for the filler of an empty micro-batch."""
        raise NotImplementedError

    def part(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Return the micro-batch's share of the loss, and add up its figures. `counts` as in `measure`."""
        inputs, self.by_document = batch.inputs_on(self.device), ()
        if not batch.examples:
            return self.zero(model, inputs)
        with self.accelerator.autocast():
            loss, figures = self.measure(model, inputs, counts)
        # each rank of a split row gets here: count the row once
        self._metrics = self._metrics.plus(figures, counted=batch.part == 0)
        self.by_document = self.by_document if batch.part == 0 else ()
        return loss

    def open_evaluation(self, batches: EvaluationBatches) -> None:
        """Prepare for the losses of one evaluation set."""

    def compute(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """See Loss."""
        # each rank of a split row has the loss of the whole row
        return self.part(model, batch, counts) * (self.accelerator.num_processes / batch.parts)

    def pop_metrics(self) -> dict[str, float]:
        """Return the means of the figures since the last call, over all processes."""
        metrics, self._metrics = self._metrics, self.new_metrics()
        return metrics.values(self.accelerator)

    def mark_metrics(self) -> Callable[[], None]:
        """See Loss."""
        kept = self._metrics

        def set_back() -> None:
            self._metrics = kept

        return set_back

    def evaluate(self, sets: Mapping[str, EvaluationBatches]) -> dict[str, float]:
        """See Loss; adds the number of examples."""
        counts = torch.zeros(4, len(sets), dtype=torch.int64, device=self.device)
        for set_counts, batches in zip(counts.T, sets.values(), strict=True):
            for batch in batches():
                set_counts += torch.tensor(batch.own_counts, device=counts.device)
        with waiting("the counts of all ranks"):
            counts = cast(torch.Tensor, self.accelerator.reduce(counts, reduction="sum"))
        # [sets, 2]: each set's share of the loss over all sets, and its own loss; one forward pass gives both
        losses = torch.zeros(len(sets), 2, dtype=torch.float64, device=self.device)
        figures = list[FigureSums]()
        with self.keeping_metrics():
            for set_losses, set_counts, batches in zip(losses, counts.T, sets.values(), strict=True):
                self._metrics = self.new_metrics()
                self.open_evaluation(batches)
                all_and_own = torch.stack([counts.sum(dim=1), set_counts], dim=1)
                for batch in batches():
                    set_losses += self.part(self.model, batch, all_and_own).double() / batch.parts
                figures.append(self._metrics)
        sums = torch.stack([one.sums for one in figures]).sum(dim=0)
        ends = torch.stack([one.ends for one in figures]).amax(dim=0)
        combined = replace(figures[0], sums=sums, ends=ends)
        with waiting("the loss of all ranks"):
            losses = cast(torch.Tensor, self.accelerator.reduce(losses, reduction="sum"))
        values, numbers = [losses[:, 0].sum(), *losses[:, 1]], [counts[3].sum(), *counts[3]]
        found = zip(values, numbers, [combined, *figures], strict=True)
        unit = self.objective.spec.examples
        return by_name(
            sets,
            [{"loss": loss.item(), unit: int(n.item()), **one.values(self.accelerator)} for loss, n, one in found],
        )


class AnswerLoss(ExampleLoss):
    """A loss of log-probabilities of answers: in pairs, with labels, or documents as answers.

    A subclass defines `measure`, and the per-token `outputs` that it reads from the output head (the names of TRL's add_fused_lm_head).
    """

    outputs: tuple[str, ...] = ("log_probs",)
    answers: tuple[str, ...] = ("the chosen answer of pair", "the rejected answer of pair")
    """Names of answers in messages (loss_proofs.py): in the first half of a batch and in the second, or in all of it."""

    def __init__(self, setup: Setup, objective: Objective) -> None:
        super().__init__(setup, objective)
        base = base_model(self.model)
        add_fused_lm_head(base, outputs=self.outputs)
        patch_forward(base, answer_outputs=self.outputs, autocast=self.autocast, backend=self.settings.backend)

    def score_tokens(self, model: torch.nn.Module, inputs: Inputs) -> ModelOutput:
        """Return the head's outputs for each token of a batch, [rows, T]."""
        return model(
            **{name: value for name, value in inputs.items() if name not in _NOT_FOR_MODEL}, answer_scores=True
        )

    def targets_of(self, outputs: ModelOutput, inputs: Inputs, name: str = "log_probs") -> torch.Tensor:
        """Return the output `name` at the targets, answer by answer: [targets]."""
        return at_places(getattr(outputs, name), inputs, "target_places")

    def targets(self, outputs: ModelOutput, inputs: Inputs) -> Targets:
        """Return the targets of a micro-batch's answers."""
        has_squares = getattr(outputs, "log_sum_sq_probs", None) is not None
        squares = self.targets_of(outputs, inputs, "log_sum_sq_probs") if has_squares else None
        return Targets(self.targets_of(outputs, inputs), inputs["target_counts"], squares)

    def of_rows(self, batch: MicroBatch) -> torch.Tensor:
        """See Loss; this one is minus the mean log-probability of the answers' tokens."""
        inputs = batch.inputs_on(self.device)
        log_probs = self.targets_of(self.score_tokens(self.model, inputs), inputs)
        return -log_probs.sum() / max(1, batch.trained + batch.rejected)

    def zero(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """See ExampleLoss; fillers have no targets."""
        return 0.0 * self.score_tokens(model, inputs)["log_probs"].sum()


class ReferenceLoss(AnswerLoss):
    """A loss of answers that compares the model with a reference.

    The reference is one of these: another model, `model` with its adapters off, `model` with the adapters named `ref`, or log-probabilities
    that were precomputed and come with the batches. A subclass defines `measure`, `logps_of` and `zero_margin_loss`.
    """

    reference_names: tuple[str, ...]
    """Names of precomputed log-probabilities among the inputs of a batch, in the order of Logps."""

    def __init__(self, setup: Setup, objective: Objective, reference: PreTrainedModel | None) -> None:
        super().__init__(setup, objective)
        self.reference = reference and self._prepare_reference(reference)
        """The reference, ready to be called, if it is another model. Otherwise None."""
        if reference is not None:
            # a reference that rounds differently would have first margins other than 0
            if is_compiled(base_model(self.model)):
                compile_layers(reference)
            if backend := self.settings.backend:
                attention_by(backend).run_alike(reference, base_model(self.model))
            patch_forward(reference, answer_outputs=("log_probs",), autocast=self.autocast, backend=backend)
        self.beta = objective.beta
        self.extra_forwards = int(objective.reference != "precomputed")

    def _prepare_reference(self, reference: PreTrainedModel) -> torch.nn.Module:
        """Give the reference its output head. Place and shard it as the strategy does for models without updates."""
        add_fused_lm_head(reference)
        disable_dropout_in_model(reference)
        return placement_of(self.strategy).wrap_frozen(reference, self.accelerator)

    def policy_logps(self, batch: MicroBatch) -> Logps:
        """Return log-probabilities of a micro-batch's answers by the trained model."""
        return self.logps(self.model, batch.inputs_on(self.device))

    def reference_logps(self, batch: MicroBatch) -> Logps:
        """Return log-probabilities of a micro-batch's answers by the reference."""
        return self.compared_with(batch.inputs_on(self.device))

    def logps_of(self, outputs: ModelOutput, inputs: Inputs) -> Logps:
        """Sum the head's `outputs` of each token to log-probabilities of answers."""
        raise NotImplementedError

    @torch.no_grad()
    def logps(self, model: torch.nn.Module, inputs: Inputs) -> Logps:
        """Return log-probabilities of answers by `model`, without gradients."""
        with disable_gradient_checkpointing(self.model), self.accelerator.autocast():
            return self.logps_of(self.score_tokens(model, inputs), inputs)

    def compared_with(self, inputs: Inputs) -> Logps:
        """Return the reference's log-probabilities of answers. Compute them unless they come with the `inputs`."""
        if self.reference_names[0] in inputs:
            return tuple(inputs[name] for name in self.reference_names)
        if self.reference is not None:
            return self.logps(self.reference, inputs)
        adapted: Any = self.accelerator.unwrap_model(self.model)
        with use_adapter(adapted, adapter_name="ref" if "ref" in adapted.peft_config else None):
            return self.logps(self.model, inputs)

    def zero_margin_loss(self, batch: MicroBatch) -> float | None:
        """Return the loss of a micro-batch if the model equals the reference, by a formula.

        None: loss_proofs.py computes it, with the model's log-probabilities on both sides.
        """
        raise NotImplementedError

    def prepare_standalone(self, batch: MicroBatch, *, estimated: bool) -> None:
        """Prepare for `standalone_loss`, as `open_step` does. If `estimated`, make the estimates that the loss needs; else set them to 0."""

    def standalone_loss(self, batch: MicroBatch, *, reference: Logps | None = None) -> float:
        """Return the loss of one micro-batch as if it were a step. Given log-probabilities replace the reference's."""
        inputs = batch.inputs_on(self.device)
        if reference is not None:
            inputs |= dict(zip(self.reference_names, reference, strict=True))
        self.prepare_standalone(batch, estimated=reference is None)
        with self.accelerator.autocast():
            return self.measure(self.model, inputs, torch.tensor(batch.counts, device=self.device))[0].item()

    def zero(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """See ExampleLoss.

        With sharded weights call the reference first, because processes with examples do.
        """
        if self.settings.sharded:
            self.compared_with(inputs)
        return super().zero(model, inputs)


def at_places(values: torch.Tensor, inputs: Inputs, places: str) -> torch.Tensor:
    """Return `values` [rows, T, …] at the positions inputs[places] of the flattened batch.

    Each rank has its part of a split row, and gets the values of the whole row.
    """
    segments, flat = inputs.get("segments"), values.flatten(0, 1)
    if isinstance(segments, SplitSegments):
        own = segments.own
        before, after = (flat.new_zeros(number, *flat.shape[1:]) for number in (own.start, segments.tokens - own.stop))
        flat = sum_over_parts(torch.cat([before, flat, after]), segments.parts)
    return flat[inputs[places]]


def by_name(sets: Iterable[str], figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge `figures`: first those over all `sets` together, then a mapping for each set.

    A set's name comes before its keys. The set "" has no name, and is left out.
    """
    whole, *own = figures
    return {
        **whole,
        **{f"{name}_{key}": of_set[key] for name, of_set in zip(sets, own, strict=True) if name for key in of_set},
    }


@dataclass(frozen=True)
class FigureSums:
    """Sums of logged figures over micro-batches. They stay on the device until a line is logged, so no step waits.

    `sums` float64 [figures, 2] of totals and weights, `ends` float64 [figures] of extremes, the least ones negated.
    """

    figures: Sequence[Figure]
    sums: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def none(figures: Sequence[Figure], device: torch.device) -> FigureSums:
        """Return the sums over no micro-batch."""
        sums = torch.zeros(len(figures), 2, dtype=torch.float64, device=device)
        return FigureSums(figures, sums, torch.full_like(sums[:, 0], -torch.inf))

    def plus(self, found: Figures, *, counted: bool) -> FigureSums:
        """Add the figures of a micro-batch. If not `counted`, add zeros: another rank adds the same row.

        Raises UserError unless `found` has exactly the declared figures.
        """
        if (declared := {one.name for one in self.figures if not one.difference}) != found.keys():
            what = f"measure returns the figures {', '.join(sorted(found)) or 'none'}, the spec declares others"
            fix = f"Return {', '.join(sorted(declared)) or 'none'}."
            raise UserError(what, where="objective.kind", fix=fix, code="figures-undeclared")
        if not self.figures:
            return self
        nothing = FigureSums.none(self.figures[:1], self.sums.device)
        values = [found.get(one.name) for one in self.figures]
        sums = [torch.stack(value) if isinstance(value, Sum) else nothing.sums[0] for value in values]
        ends = [value.double() if isinstance(value, torch.Tensor) else nothing.ends[0] for value in values]
        ends = [-end if one.extreme == "least" else end for one, end in zip(self.figures, ends, strict=True)]
        sums = self.sums + torch.stack(sums) * counted
        return FigureSums(self.figures, sums, self.ends.maximum(torch.stack(ends)))

    def values(self, accelerator: Accelerator) -> dict[str, float]:
        """Return each figure over all processes. Figures without values are left out."""
        if not self.figures:
            return {}
        with waiting("the metrics of all ranks"):
            totals = cast(torch.Tensor, accelerator.reduce(self.sums, reduction="sum")).tolist()
            ends = cast(torch.Tensor, accelerator.gather(self.ends)).view(-1, len(self.ends)).amax(dim=0).tolist()
        found = dict[str, float]()
        for one, (total, weight), end in zip(self.figures, totals, ends, strict=True):
            if one.extreme and end != -math.inf:
                found[one.name] = -end if one.extreme == "least" else end
            elif weight:
                found[one.name] = total / weight
            elif one.difference and {*one.difference} <= found.keys():
                found[one.name] = found[one.difference[0]] - found[one.difference[1]]
        return found
