"""Supervised fine-tuning: TRL's SFTTrainer over whole steps, with exact normalisation.

The loss is Σ of token losses over the global batch / Σ of its trained tokens, plus the weighted loss of routers where one is
asked for; evaluation is exact over the set, and of the tokens alone.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from packtrain.config.schema import Objective
from packtrain.data.dataset import Document
from packtrain.model.forward import add_loss_sum
from packtrain.model.load import base_model
from packtrain.model.routers import router_loss, without_labels
from packtrain.monitor.heartbeat import waiting
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.loop import LoopSettings, StepTrainer, placeholder

_PROBE_TOKENS = 64
_COLUMNS: dict[str, list[Any]] = {"input_ids": [[0]], "labels": [[0]]}


class PackedSFTTrainer(StepTrainer, SFTTrainer):
    """Trains `model` along `settings`. See the module's docstring for what differs from TRL's."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: SFTConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: LoopSettings,
        objective: Objective,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        text_config = base_model(model).config.get_text_config()
        routers = getattr(text_config, "output_router_logits", None)
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            data_collator=cast(Any, list),
            train_dataset=placeholder(_COLUMNS),
            eval_dataset=placeholder(_COLUMNS) if settings.evaluation is not None else None,
            callbacks=callbacks,
        )
        if routers is not None:  # TRL turns them on for its auxiliary loss; ours asks for them itself
            text_config.output_router_logits = routers
        self.routers = router_loss(base_model(self.model), objective.router_aux_coef)
        base = base_model(self.model)
        self.head = add_loss_sum(base, loss=objective.loss, neftune_alpha=objective.neftune_alpha)
        self.open_loop(settings)

    def open_step(self, batches: list[MicroBatch]) -> None:
        """Has the routers' load counted over the step."""
        if self.routers is not None:
            self.routers.open_step(batches, self._run_without_labels, self.accelerator)

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Σ of the token losses / trained tokens of the step, and the micro-batch's part of the routers' loss."""
        # DDP averages gradients over ranks; clamped so that a step without trained tokens is a zero and not 0 / 0
        scale = self.accelerator.num_processes / counts[0].clamp(min=1)
        inputs = self._prepare_inputs(batch.inputs)
        if self.routers is None:
            return model(**inputs, loss_sum=True) * scale
        with self.routers.watching(real=batch.examples > 0) as loads:
            loss = model(**inputs, loss_sum=True) * scale
        return loss + self.routers.part(loads) * self.accelerator.num_processes

    def figures(self) -> dict[str, Any]:
        """The routers' loss, unweighted."""
        return {} if self.routers is None else {"router_aux_loss": self.routers.value()}

    def evaluated(self) -> dict[str, float]:
        """Mean loss per trained token."""
        device = self.args.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        trained = torch.zeros((), dtype=torch.float64, device=device)
        for batch in self.evaluation_batches():
            loss_sum += self.model(**self._prepare_inputs(batch.inputs), loss_sum=True).double()
            trained += batch.trained
        with waiting("the loss of all ranks"):
            loss_sum, trained = self.accelerator.reduce(torch.stack([loss_sum, trained]), reduction="sum")
        return {"loss": (loss_sum / trained.clamp(min=1)).item(), "tokens": int(trained.item())}

    def probe(self) -> dict[str, Any]:
        """Inputs of one short real document with every token trained, to check the output head with."""
        steps = cast(Steps, self.steps)
        ids = steps.data[int(steps.data.lengths.argmax())].input_ids[:_PROBE_TOKENS]
        document = Document(ids, np.ones(len(ids), dtype=bool))
        return self._prepare_inputs(steps.collate([document]).inputs)

    def _run_without_labels(self, batch: MicroBatch) -> None:
        self.model(**self._prepare_inputs(without_labels(batch.inputs)), loss_sum=True)
