"""Direct preference optimisation: TRL's DPOTrainer over whole steps, its loss code unmodified.

TRL computes the loss and its figures for one padded batch on each process. Here a micro-batch is such a batch (the model
runs on a flattened row if packing is on, model/forward.py), and results are combined exactly: losses of pairs are means over
the pairs of the global step, `sft` is a mean over its trained tokens, and each figure is weighted by its own count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer as trl_dpo

from packtrain.config.objective import Objective
from packtrain.model.compiled import compile_layers, is_compiled
from packtrain.model.forward import patch_forward
from packtrain.model.load import base_model
from packtrain.train.loader import MicroBatch
from packtrain.train.objectives.of_examples import ExampleTrainer
from packtrain.train.objectives.of_reference import keep_weights_untouched
from packtrain.train.objectives.weighted_figures import WeightedFigures
from packtrain.train.settings import LoopSettings, unread_data

_COLUMNS: dict[str, list[Any]] = {"prompt_ids": [[0]], "chosen_ids": [[0]], "rejected_ids": [[0]]}
TOKEN_LOSSES = ("sft",)
"""Losses that are a mean over the trained tokens of the chosen answers."""
PAIRS, CHOSEN, REJECTED, ANSWERS = range(4)
FIGURES = {
    "entropy": ANSWERS,
    "logits/chosen": CHOSEN,
    "logits/rejected": REJECTED,
    "mean_token_accuracy": CHOSEN,
    "rewards/chosen": PAIRS,
    "rewards/rejected": PAIRS,
    "rewards/accuracies": PAIRS,
    "rewards/margins": PAIRS,
    "logps/chosen": PAIRS,
    "logps/rejected": PAIRS,
}
"""The figures that TRL logs, and the unit that each is a mean over."""


class PackedDPOTrainer(ExampleTrainer, DPOTrainer):
    """Trains `model` by `settings` against `reference`.

    `reference` is a separate model. None means `model` with its adapters off (or replaced by its adapters named `ref`) or,
    with args.precompute_ref_log_probs, log-probabilities that come with the batches.
    """

    answers: tuple[str, ...] = ("the chosen answer of pair", "the rejected answer of pair")
    """What the first check calls them (verify/dpo_start.py)."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: DPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: LoopSettings,
        reference: PreTrainedModel | None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        with keep_weights_untouched(model, trl_dpo):
            super().__init__(
                model=model,
                ref_model=reference,
                args=args,
                processing_class=tokenizer,
                callbacks=callbacks,
                **unread_data(_COLUMNS, evaluates=settings.evaluation is not None),
            )
        outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        outputs = (*outputs, "log_sum_sq_probs") if self.use_weighting else outputs
        patches: Any = {"autocast": self.autocast_of_forward(settings), "backend": settings.backend}
        patch_forward(base_model(self.model), pairs=outputs, **patches)
        if reference is not None:
            if is_compiled(base_model(self.model)):  # else it would round otherwise, and the first margins not be zero
                compile_layers(reference)
            patch_forward(reference, pairs=("log_probs",), **patches)
        self.all_loss_weights = list(self.loss_weights)
        self.noted = self.new_figures()
        self.more_forwards = int(not self.precompute_ref_logps)
        self.open_loop(settings)

    def new_figures(self) -> WeightedFigures:
        """Sums of TRL's figures, of nothing yet."""
        return WeightedFigures(FIGURES)

    def weighted_loss(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the pairs of the step."""
        inputs = self._prepare_inputs(batch.inputs)
        if not batch.examples:
            return self._zero_loss(model, inputs)
        pairs = batch.examples / counts[3]
        tokens = batch.trained / counts[0].clamp(min=1)
        # TRL means each loss over this micro-batch; weighted by its share of the step's pairs or tokens
        self.loss_weights = [
            weight * (tokens if name in TOKEN_LOSSES else pairs)
            for name, weight in zip(self.loss_types, self.all_loss_weights, strict=True)
        ]
        with self.without_gathering(), self.accelerator.autocast():
            loss = self._compute_loss(model, inputs, False)
        self._take_figures(batch)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """TRL's, after what the reference says: no activations of the model are held meanwhile.

        TRL alone would run the reference later, and look up installed packages each time to know that there is one.
        """
        if self.precompute_ref_logps:
            return super()._compute_loss(model, inputs, return_outputs)
        chosen, rejected = self._of_reference(inputs)
        self.precompute_ref_logps = True
        try:
            known = {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
            return super()._compute_loss(model, inputs | known, return_outputs)
        finally:
            self.precompute_ref_logps = False

    def _of_reference(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the reference, which is not precomputed, says of a micro-batch."""
        return self.compute_ref_log_probs(self.model if self.ref_model is None else self.ref_model, inputs)

    def loss_alone(self, batch: MicroBatch, *, reference: tuple[torch.Tensor, ...] | None = None) -> float:
        """The loss of one micro-batch as if it were a step, against `reference` log-probabilities if given."""
        inputs = self._prepare_inputs(batch.inputs)
        known = self.precompute_ref_logps
        if reference is not None:
            self.precompute_ref_logps = True
            inputs |= {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
        self.loss_weights = self.all_loss_weights
        try:
            with self.without_gathering(), self.accelerator.autocast():
                return self._compute_loss(self.model, inputs, False).item()
        finally:
            self.precompute_ref_logps = known
            for noted in self._metrics.values():
                noted.clear()

    def loss_of_zero_margin(self, batch: MicroBatch) -> float | None:
        """The sigmoid loss of a micro-batch while the model is its own reference; of other losses it is not said here."""
        plain = self.all_loss_weights == [1.0] and not self.use_weighting
        return math.log(2) if self.loss_types == ["sigmoid"] and plain else None

    def policy_logps(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [pairs] of the chosen and the rejected answers, by the trained model, as TRL sums them."""
        reference, self.ref_model = self.ref_model, self.model  # else TRL turns adapters off
        try:
            return self.compute_ref_log_probs(self.model, self._prepare_inputs(batch.inputs))
        finally:
            self.ref_model = reference

    def reference_logps(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `policy_logps`, by the reference; precomputed ones are taken from the batch."""
        inputs = self._prepare_inputs(batch.inputs)
        if "ref_chosen_logps" in inputs:
            return inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        return self._of_reference(inputs)

    def _zero_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """A zero that reaches every parameter, for the filler of an empty micro-batch.

        With sharded weights the reference is called too, and first, since processes with pairs call it.
        """
        if self.settings.sharded and not self.precompute_ref_logps:
            self._of_reference(inputs)
        apart = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")
        call = {name: value for name, value in inputs.items() if name not in apart}
        labels = torch.full_like(call["input_ids"], -100)
        return model(**call, labels=labels, fused_lm_head=True, use_cache=False).log_probs.sum() * 0.0

    def _take_figures(self, batch: MicroBatch) -> None:
        """Moves TRL's figures of a micro-batch into our sums, weighted by the unit that each is a mean over."""
        chosen, rejected = batch.trained, batch.rejected
        over = {PAIRS: batch.examples, CHOSEN: chosen, REJECTED: rejected, ANSWERS: chosen + rejected}
        self.noted.take(self._metrics["train" if self.model.training else "eval"], over)


def objective_arguments(objective: Objective, *, precomputed: bool) -> dict[str, Any]:
    """The loss as arguments of TRL's DPOConfig; `precomputed`: the reference's log-probabilities come with the batches."""
    return {
        **objective.options,
        "beta": objective.beta,
        "precompute_ref_log_probs": precomputed,
        "loss_type": list(objective.losses),
        "router_aux_loss_coef": 0.0,
    }
