"""The loss of Kahneman-Tversky optimisation: that of TRL's KTOTrainer, unmodified, over the answers of a whole step.

The KL estimate of the loss `kto` is that of the global step as well: it is made before the first micro-batch, over mismatched pairs
of prompt and completion (loader.py) and without gradients, and TRL's code is given it in place of its own. An evaluation is one
step over the whole set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import KTOConfig, KTOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from packtrain.config.objective import Objective
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import IGNORE
from packtrain.train.loader import MicroBatch, UnpairedSteps
from packtrain.train.objectives.loss import EvaluationBatches, HeldLoss, Logps, WeightedFigures
from packtrain.train.patches import hold_trainer
from packtrain.train.settings import LoopSettings

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


class KTOLoss(HeldLoss):
    """The loss of answers with labels on `model`, held to `reference`."""

    examples = "answers"
    answers = ("answer",)
    reference_names = ("ref_logps",)

    def __init__(
        self,
        model: PreTrainedModel,
        args: KTOConfig,
        tokenizer: PreTrainedTokenizerBase,
        settings: LoopSettings,
        reference: PreTrainedModel | None,
    ) -> None:
        trl = hold_trainer(KTOTrainer, model, args, tokenizer, _COLUMNS, ref_model=reference)
        super().__init__(trl, settings, ("log_probs", "entropy", "mean_logits"))
        self._kl = torch.zeros(1, device=self.device)
        self.estimates: bool = trl.calculate_KL
        # the mean of TRL's `KL_logps - ref_KL_logps`, which TRL clamps, is the estimate
        trl._compute_kl_logps = lambda *_: self._kl if self.estimates else None
        if self.estimates:  # mismatched pairs are as long together as the answers; by the model and by the reference
            self.extra_forwards = 1 + 2 * self.extra_forwards

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """Estimates the divergence of the model from the reference, over the mismatched pairs of the global step."""
        if self.estimates:
            self._kl = self._divergence(batches[0].mismatched)

    def open_evaluation(self, batches: EvaluationBatches) -> None:
        """The same over the mismatched pairs of the evaluation set."""
        if self.estimates:
            self._kl = self._divergence(batches(UnpairedSteps.mismatched))

    def prepare_alone(self, batch: MicroBatch, *, estimated: bool) -> None:
        """The same over the mismatched pairs that come with the batch; 0 if not `estimated`."""
        self._kl = torch.zeros_like(self._kl)
        if estimated:
            self.open_step([batch])

    def new_figures(self) -> WeightedFigures:
        """Sums of TRL's figures, of nothing yet."""
        return WeightedFigures(UNITS, derived=(MARGINS,))

    def part(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the answers of the step."""
        inputs = self.inputs(batch)
        if not batch.examples:
            return self.zero(model, inputs)
        loss = self.by_trl(model, inputs)
        chosen = int(batch.inputs["label"].sum())
        self.add_figures(
            {
                ANSWERS: batch.examples,
                CHOSEN: chosen,
                REJECTED: batch.examples - chosen,
                TARGETS: batch.trained + batch.rejected,
                CHOSEN_TARGETS: batch.trained,
                REJECTED_TARGETS: batch.rejected,
            }
        )
        return loss * (batch.examples / counts[3])

    def of_zero_margin(self, batch: MicroBatch) -> float:
        """Half of the mean weight of the answers."""
        desirable = int(batch.inputs["label"].sum())
        weights = desirable * self.trl.desirable_weight + (batch.examples - desirable) * self.trl.undesirable_weight
        return 0.5 * weights / batch.examples

    def figures(self) -> dict[str, Any]:
        """TRL's figures over the answers and tokens of all processes since the last call."""
        figures = super().figures()
        sides = [figures.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if None not in sides:
            figures[MARGINS] = cast(float, sides[0]) - cast(float, sides[1])
        return figures

    @torch.no_grad()
    def logps(self, model: Any, inputs: dict[str, Any]) -> Logps:
        """As TRL sums them."""
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
        how = cast(Any, self.trl.args.gradient_checkpointing_kwargs)
        with disable_gradient_checkpointing(self.model, how), self.accelerator.autocast():
            logps = model(**self.call(inputs), labels=labels, fused_lm_head=True, use_cache=False).log_probs
        return (logps[:, 1 - labels.shape[1] :].sum(-1),)

    def with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As of HeldLoss; TRL is told that the estimate is made."""
        inputs = inputs | {"ref_KL_logps": torch.zeros_like(self._kl)}
        if "ref_logps" in inputs:
            return inputs
        if self.trl.ref_model is not None:
            return inputs | {"ref_logps": self.logps(self.trl.ref_model, inputs)[0]}
        adapted: Any = self.accelerator.unwrap_model(self.model)
        with use_adapter(adapted, adapter_name="ref" if "ref" in adapted.peft_config else None):
            return inputs | {"ref_logps": self.logps(self.model, inputs)[0]}

    @torch.no_grad()
    def _divergence(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """float32 [1]: the mean over mismatched pairs of all processes of log-probability by the model minus by the reference."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            if not (batch.examples or self.settings.sharded):  # sharded weights are called equally often everywhere
                continue
            self.enter("forward" if self.model.training else "eval", micro=number)
            (policy,), (reference,) = self.policy_logps(batch), self.reference_logps(batch)
            off = (policy - reference).double()
            total += torch.stack([off.sum(), torch.ones_like(off).sum()]) * bool(batch.examples)
        with waiting("the KL estimate of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        return (total[:1] / total[1:]).float()


def objective_arguments(objective: Objective, *, precomputed: bool) -> dict[str, Any]:
    """The loss as arguments of TRL's KTOConfig; `precomputed`: the reference's log-probabilities come with the batches."""
    return {
        **objective.options,
        "beta": objective.beta,
        "loss_type": objective.losses[0],
        "precompute_ref_log_probs": precomputed,
        "router_aux_loss_coef": 0.0,
    }
