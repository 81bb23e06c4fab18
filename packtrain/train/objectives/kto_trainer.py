"""Kahneman-Tversky optimisation: TRL's KTOTrainer over whole steps, its loss code unmodified.

TRL computes the loss and its figures for one padded batch on each process. Here a micro-batch is such a batch (the model runs
on a flattened row if packing is on, model/forward.py), and results are combined exactly: the loss is the mean over the answers
of the global step, and each figure is weighted by its own count. The KL estimate of the loss `kto` is that of the global step as
well: it is made before the first micro-batch, over mismatched pairs of prompt and completion (loader.py) and without gradients,
and TRL's code is given it in place of its own. An evaluation is one step over the whole set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import KTOConfig, KTOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import kto_trainer as trl_kto
from trl.trainer.utils import use_adapter

from packtrain.config.objective import Objective
from packtrain.model.compiled import compile_layers, is_compiled
from packtrain.model.forward import patch_forward
from packtrain.model.load import base_model
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import IGNORE
from packtrain.train.loader import MicroBatch, UnpairedSteps
from packtrain.train.objectives.of_examples import ExampleTrainer
from packtrain.train.objectives.of_reference import keep_weights_untouched
from packtrain.train.objectives.weighted_figures import WeightedFigures
from packtrain.train.settings import LoopSettings, unread_data

_COLUMNS: dict[str, list[Any]] = {"prompt_ids": [[0]], "completion_ids": [[0]], "label": [True]}
ANSWERS, CHOSEN, REJECTED, TARGETS, CHOSEN_TARGETS, REJECTED_TARGETS = range(6)
UNITS = {
    "kl": ANSWERS,
    "entropy": TARGETS,
    "logits/chosen": CHOSEN_TARGETS,
    "logits/rejected": REJECTED_TARGETS,
    "rewards/chosen": CHOSEN,
    "rewards/rejected": REJECTED,
    "logps/chosen": CHOSEN,
    "logps/rejected": REJECTED,
}
"""The figures that TRL logs, and the unit that each is a mean over; chosen answers are the desirable ones."""
MARGINS = "rewards/margins"
_NOT_OF_THE_MODEL = ("completion_mask", "label", "ref_logps")


class PackedKTOTrainer(ExampleTrainer, KTOTrainer):
    """Trains `model` by `settings` against `reference`.

    `reference` is a separate model. None means `model` with its adapters off (or replaced by its adapters named `ref`) or,
    with args.precompute_ref_log_probs, log-probabilities that come with the batches.
    """

    examples = "answers"
    answers: tuple[str, ...] = ("answer",)
    """What the first check calls them (verify/dpo_start.py)."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: KTOConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: LoopSettings,
        reference: PreTrainedModel | None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        with keep_weights_untouched(model, trl_kto), _batches_of_two(args):
            super().__init__(
                model=model,
                ref_model=reference,
                args=args,
                processing_class=tokenizer,
                callbacks=callbacks,
                **unread_data(_COLUMNS, evaluates=settings.evaluation is not None),
            )
        patches: Any = {"autocast": self.autocast_of_forward(settings), "backend": settings.backend}
        patch_forward(base_model(self.model), pairs=("log_probs", "entropy", "mean_logits"), **patches)
        if reference is not None:
            if is_compiled(base_model(self.model)):  # else it would round otherwise, and the first rewards not be zero
                compile_layers(reference)
            patch_forward(reference, pairs=("log_probs",), **patches)
        self.noted = self.new_figures()
        self._kl = torch.zeros(1, device=self.args.device)
        live = int(not self.precompute_ref_logps)
        # mismatched pairs are as long together as the answers; by the model and by the reference
        self.more_forwards = live + (1 + live if self.calculate_KL else 0)
        self.open_loop(settings)

    def open_step(self, batches: list[MicroBatch]) -> None:
        """Estimates the divergence of the model from the reference, over the mismatched pairs of the global step."""
        if self.calculate_KL:
            self._kl = self._divergence(batches[0].mismatched)

    def open_evaluation(self) -> None:
        """The same over the mismatched pairs of the evaluation set."""
        if self.calculate_KL:
            self._kl = self._divergence(self.evaluation_batches(UnpairedSteps.mismatched))

    def new_figures(self) -> WeightedFigures:
        """Sums of TRL's figures, of nothing yet."""
        return WeightedFigures(UNITS, derived=(MARGINS,))

    def weighted_loss(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the answers of the step."""
        inputs = self._prepare_inputs(batch.inputs)
        if not batch.examples:
            return self._zero_loss(model, inputs)
        with self.without_gathering(), self.accelerator.autocast():
            loss = self._compute_loss(model, inputs, False)
        self._take_figures(batch)
        return loss * (batch.examples / counts[3])

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """TRL's, after what the reference says: no activations of the model are held meanwhile.

        The mean of TRL's `KL_logps - ref_KL_logps` is the estimate, which TRL clamps.
        """
        given = {"ref_logps": self._by_reference(inputs), "ref_KL_logps": torch.zeros_like(self._kl)}
        known, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            return super()._compute_loss(model, inputs | given, return_outputs)
        finally:
            self.precompute_ref_logps = known

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> torch.Tensor | None:
        """The estimate of the step, in place of log-probabilities of mismatched pairs."""
        return self._kl if self.calculate_KL else None

    @torch.no_grad()
    def _divergence(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """float32 [1]: the mean over mismatched pairs of all processes of log-probability by the model minus by the reference."""
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for number, batch in enumerate(batches, start=1):
            if not (batch.examples or self.settings.sharded):  # sharded weights are called equally often everywhere
                continue
            self.clock.enter("forward" if self.model.training else "eval", micro=number)
            inputs = self._prepare_inputs(batch.inputs)
            off = (self._by_model(inputs) - self._by_reference(inputs)).double()
            total += torch.stack([off.sum(), torch.ones_like(off).sum()]) * bool(batch.examples)
        with waiting("the KL estimate of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        return (total[:1] / total[1:]).float()

    def policy_logps(self, batch: MicroBatch) -> tuple[torch.Tensor]:
        """float32 [answers]: log-probabilities of a micro-batch's answers by the trained model, as TRL sums them."""
        return (self._by_model(self._prepare_inputs(batch.inputs)),)

    def reference_logps(self, batch: MicroBatch) -> tuple[torch.Tensor]:
        """As `policy_logps`, by the reference; precomputed ones are taken from the batch."""
        return (self._by_reference(self._prepare_inputs(batch.inputs)),)

    def loss_alone(self, batch: MicroBatch, *, reference: tuple[torch.Tensor, ...] | None = None) -> float:
        """The loss of one micro-batch as if it were a step, against `reference` log-probabilities if given.

        Its KL estimate is that of the first step, of the run or after a resume; 0 if a reference is given.
        """
        inputs = self._prepare_inputs(batch.inputs)
        self._kl = torch.zeros_like(self._kl)
        if reference is not None:
            inputs |= {"ref_logps": reference[0]}
        elif self.calculate_KL:
            first = self.settings.first_step % len(self.steps)  # a run may be resumed after its last step
            self._kl = self._divergence(cast(UnpairedSteps, self.steps).mismatched()[first])
        try:
            with self.without_gathering(), self.accelerator.autocast():
                return self._compute_loss(self.model, inputs, False).item()
        finally:
            for noted in self._metrics.values():
                noted.clear()

    def loss_of_zero_margin(self, batch: MicroBatch) -> float:
        """The loss of a micro-batch while the model is its own reference: half of the mean weight of its answers."""
        desirable = int(batch.inputs["label"].sum())
        weights = desirable * self.desirable_weight + (batch.examples - desirable) * self.undesirable_weight
        return 0.5 * weights / batch.examples

    def _by_model(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self._logps(self.model, inputs)

    def _by_reference(self, inputs: dict[str, Any]) -> torch.Tensor:
        if "ref_logps" in inputs:
            return inputs["ref_logps"]
        if self.ref_model is not None:
            return self._logps(self.ref_model, inputs)
        adapted: Any = self.accelerator.unwrap_model(self.model)
        with use_adapter(adapted, adapter_name="ref" if "ref" in adapted.peft_config else None):
            return self._logps(self.model, inputs)

    @torch.no_grad()
    def _logps(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
        recomputing = disable_gradient_checkpointing(self.model, cast(Any, self.args.gradient_checkpointing_kwargs))
        with recomputing, self.accelerator.autocast():
            said = model(**_call(inputs), labels=labels, fused_lm_head=True, use_cache=False).log_probs
        return said[:, 1 - labels.shape[1] :].sum(-1)

    def _zero_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """A zero that reaches every parameter, for the filler of an empty micro-batch.

        With sharded weights the reference is called too, and first, since processes with answers call it.
        """
        if self.settings.sharded:
            self._by_reference(inputs)
        labels = torch.full_like(inputs["input_ids"], IGNORE)
        return model(**_call(inputs), labels=labels, fused_lm_head=True, use_cache=False).log_probs.sum() * 0.0

    def _take_figures(self, batch: MicroBatch) -> None:
        """Moves TRL's figures of a micro-batch into our sums."""
        chosen = int(batch.inputs["label"].sum())
        self.noted.take(
            self._metrics["train" if self.model.training else "eval"],
            {
                ANSWERS: batch.examples,
                CHOSEN: chosen,
                REJECTED: batch.examples - chosen,
                TARGETS: batch.trained + batch.rejected,
                CHOSEN_TARGETS: batch.trained,
                REJECTED_TARGETS: batch.rejected,
            },
        )

    def figures(self) -> dict[str, Any]:
        """TRL's figures over the answers and tokens of all processes since the last call."""
        found = super().figures()
        sides = [found.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if None not in sides:
            found[MARGINS] = cast(float, sides[0]) - cast(float, sides[1])
        return found


@contextmanager
def _batches_of_two(args: KTOConfig) -> Iterator[None]:
    """Sets a batch size of 2 while TRL's constructor runs, which refuses 1: TRL estimates KL over one batch, packtrain over the step."""
    kept = args.per_device_train_batch_size
    args.per_device_train_batch_size = max(kept, 2)
    try:
        yield
    finally:
        args.per_device_train_batch_size = kept


def _call(inputs: dict[str, Any]) -> dict[str, Any]:
    """What of a batch is for the model."""
    return {name: value for name, value in inputs.items() if name not in _NOT_OF_THE_MODEL}


def objective_arguments(objective: Objective, *, precomputed: bool) -> dict[str, Any]:
    """The loss as arguments of TRL's KTOConfig; `precomputed`: the reference's log-probabilities come with the batches."""
    return {
        **objective.options,
        "beta": objective.beta,
        "loss_type": objective.losses[0],
        "precompute_ref_log_probs": precomputed,
        "router_aux_loss_coef": 0.0,
    }
