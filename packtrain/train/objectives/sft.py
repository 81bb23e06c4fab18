"""Supervised fine-tuning: TRL's SFTTrainer over whole steps, with exact normalisation, and its proofs.

The loss is Σ of token losses over the global batch / Σ of its trained tokens, plus the weighted loss of routers if set.
Evaluation is exact over the whole set, without the routers' loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from packtrain.attention.backends import PER_DOCUMENT
from packtrain.config.objective import Objective
from packtrain.config.schema import Packing
from packtrain.data.dataset import Document, TokenDataset
from packtrain.data.prepare import prepare
from packtrain.model.forward import Head, choose_head, patch_forward
from packtrain.model.load import base_model
from packtrain.model.precision import Precision
from packtrain.model.routers import router_loss, without_labels
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import collate_flat, collate_padded
from packtrain.packing.schedule import Schedule
from packtrain.proof.choice import AttentionChoice
from packtrain.proof.isolation import tolerance_of
from packtrain.train.console import Log
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.loop import StepTrainer
from packtrain.train.preflight import FirstStepWatch, choose_together
from packtrain.train.settings import LoopSettings, on_one_gpu, unread_data

_PROBE_TOKENS = 64
_COLUMNS: dict[str, list[Any]] = {"input_ids": [[0]], "labels": [[0]]}


class PackedSFTTrainer(StepTrainer, SFTTrainer):
    """Trains `model` by `settings`. See the module's docstring for what differs from TRL's."""

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
            callbacks=callbacks,
            **unread_data(_COLUMNS, evaluates=settings.evaluation is not None),
        )
        if routers is not None:  # TRL turns them on for its own auxiliary loss, which is not used
            text_config.output_router_logits = routers
        base = base_model(self.model)
        self.routers = router_loss(base, None)
        autocast = self.autocast_of_forward(settings)
        head = patch_forward(base, documents=objective, autocast=autocast, backend=settings.backend)
        self.head = cast(Head, head)
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
        data, padded = cast(TokenDataset, self.steps.data), self.steps.layout == "padding"
        ids = data[int(data.lengths.argmax())].input_ids[:_PROBE_TOKENS]
        document = Document(ids, np.ones(len(ids), dtype=bool))
        inputs = collate_padded([document], self.steps.pad_token_id) if padded else collate_flat([document])
        return self._prepare_inputs(inputs)

    def _run_without_labels(self, batch: MicroBatch) -> None:
        self.model(**self._prepare_inputs(without_labels(batch.inputs)), loss_sum=True)


@dataclass(frozen=True, slots=True)
class SFT:
    """The TrainingObjective of supervised fine-tuning."""

    objective: Objective
    packing: Packing

    prepare_data = staticmethod(prepare)

    def longest_document(self, data: TokenDataset) -> int:
        """Tokens of the longest document."""
        return int(data.lengths.max())

    def take_reference(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: there is no reference."""
        return {}

    def decide_attention(
        self, wanted: str, model: PreTrainedModel, ranks: Ranks, precision: Precision, *, prove: bool
    ) -> AttentionChoice:
        """Which backend serves packed rows of `model`."""
        return choose_together(wanted, model, ranks, precision.autocast, prove=prove)

    def slots(self, data: TokenDataset) -> np.ndarray:
        """int [documents]: token slots of each in a row."""
        return data.lengths

    def steps(self, data: TokenDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks) -> Steps:
        """The optimizer steps over `data`."""
        layout = "padding" if self.packing.mode == "padding" else "flat"
        return Steps(data, schedule, layout, pad_token_id, ranks.rank, ranks.world_size)

    def trainer(
        self, model: PreTrainedModel, arguments: dict[str, Any], tokenizer: PreTrainedTokenizerBase, **given: Any
    ) -> PackedSFTTrainer:
        """The trainer, before its proofs; `given` are its settings and callbacks."""
        args = on_one_gpu(SFTConfig, **arguments, dataset_kwargs={"skip_prepare_dataset": True})
        return PackedSFTTrainer(model, args, tokenizer, objective=self.objective, **given)

    def prove(self, trainer: PackedSFTTrainer, log: Log, attention: str, *, preflight: bool, **_: Any) -> None:
        """Checks the output head and the routers, and has the first steps watched; `attention` is the model's original one."""
        model, autocast = base_model(trainer.model), trainer.settings.autocast
        if preflight and not trainer.settings.sharded and trainer.settings.backend not in (None, PER_DOCUMENT):
            trainer.watch = FirstStepWatch(attention, tolerance_of(trainer.compute_dtype))
        off = choose_head(model, trainer.head, trainer.probe(), autocast=autocast)
        if not trainer.head.fused:
            lack = trainer.head.refusal or f"does not fit {type(model).__name__} (its loss is off by {off:.1g})"
            log.fact("head", f"full logits, which take far more memory: the fused one {lack}")
        if trainer.routers is not None:
            log.fact("routers", f"{trainer.routers.weight:g} × load-balancing loss over the tokens of a step")
            if preflight:
                trainer.routers.check(model, trainer.probe(), autocast=autocast)
