"""Supervised fine-tuning: its loss, with exact normalisation, and the objective with its proofs.

The loss is Σ of token losses over the step / Σ of its trained tokens, plus the weighted loss of routers if set.
Evaluation is exact over the whole set, without the routers' loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from packtrain.attention.spec import BACKENDS
from packtrain.config.objective import Objective
from packtrain.data.dataset import Document, TokenDataset
from packtrain.errors import UserError
from packtrain.model.forward import Head, choose_head, patch_forward
from packtrain.model.load import base_model
from packtrain.model.routers import router_loss, without_labels
from packtrain.monitor.heartbeat import waiting
from packtrain.objectives.answers import Inputs
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded, on_device
from packtrain.proof.choice import AttentionChoice
from packtrain.proof.comparison import tolerance_of
from packtrain.system import holding
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import EvaluationBatches, Loss, Setup, by_name
from packtrain.train.objectives.training_objective import Start, TrainingObjective
from packtrain.train.preflight import FirstStepWatch

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared

_PROBE_TOKENS = 64


class SFTLoss(Loss):
    """Loss of documents on `model`: Σ of token losses / trained tokens, and the routers' loss."""

    document_figures = ("loss_sum",)

    def __init__(self, setup: Setup, objective: Objective) -> None:
        super().__init__(setup, objective)
        base = base_model(self.model)
        self.routers = router_loss(base)
        self.head = self.add_head(base)
        self.figures = torch.zeros(1 + len(objective.spec.figures), dtype=torch.float64, device=self.device)
        """Number of trained tokens since figures were last logged, and the figures' sums over them."""

    def add_head(self, base: PreTrainedModel) -> Head:
        """Patch the forward of the model, and return its output head."""
        settings = self.settings
        head = patch_forward(base, token_objective=self.objective, autocast=self.autocast, backend=settings.backend)
        return cast(Head, head)

    def sum_losses(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """Sum the losses of a micro-batch, and add up its figures."""
        return model(**inputs, loss_sum=True)

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """Counts the routers' load over the step."""
        if self.routers is not None:
            self.routers.open_step(batches, self._run_without_labels, self.accelerator)

    def compute(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Σ of the token losses / trained tokens of the step, and the micro-batch's part of the routers' loss."""
        # DDP averages gradients over ranks; clamped so that a step without trained tokens is a zero and not 0 / 0
        scale = self.accelerator.num_processes / counts[0].clamp(min=1)
        inputs = batch.inputs_on(self.device)
        self.head.record = [] if self.settings.trainer.ledger and "label_owners" in inputs else None
        with nullcontext([]) if self.routers is None else self.routers.watching(real=batch.examples > 0) as loads:
            loss = self.sum_losses(model, inputs) * scale
        if len(self.figures) > 1:
            self.figures[0] += batch.own_counts[0]
        self.by_document = (self.head.losses_of(batch.examples),) if self.head.record else ()
        self.head.record = None
        if self.routers is None:
            return loss
        return loss + self.routers.part(loads) * self.accelerator.num_processes

    def pop_metrics(self) -> dict[str, float]:
        """The figures by token, and the routers' loss, unweighted."""
        loss = None if self.routers is None else self.routers.value()
        found = {} if loss is None else {"router_aux_loss": loss}
        if len(self.figures) > 1:
            with waiting("the metrics of all ranks"):
                sums = cast(torch.Tensor, self.accelerator.reduce(self.figures, reduction="sum")).tolist()
            found |= self._means(sums) if sums[0] else {}
        self.figures = torch.zeros_like(self.figures)
        return found

    def _means(self, sums: Sequence[float]) -> dict[str, float]:
        pairs = zip(self.objective.spec.figures, sums[1:], strict=True)
        return {figure.name: value / max(sums[0], 1) for figure, value in pairs}

    def mark_metrics(self) -> Callable[[], None]:
        """See Loss."""
        routers = (lambda: None) if self.routers is None else self.routers.mark()
        if len(self.figures) == 1:
            return routers
        kept = self.figures.clone()

        def set_back() -> None:
            routers()
            self.figures = kept.clone()

        return set_back

    @contextmanager
    def keeping_metrics(self) -> Iterator[None]:
        """See Loss: the routers are not watched."""
        with holding(self, routers=None, figures=self.figures.clone()):
            yield

    def evaluate(self, sets: Mapping[str, EvaluationBatches]) -> dict[str, float]:
        """Mean loss and figures per trained token."""
        sums = torch.zeros(len(sets), 1 + len(self.figures), dtype=torch.float64, device=self.device)
        with self.keeping_metrics():
            for own, batches in zip(sums, sets.values(), strict=True):
                self.figures = own[1:]
                for batch in batches():
                    loss = self.sum_losses(self.model, batch.inputs_on(self.device)).double()
                    own[:2] += torch.stack([loss, torch.full_like(loss, batch.own_counts[0])])
        with waiting("the loss of all ranks"):
            sums = cast(torch.Tensor, self.accelerator.reduce(sums, reduction="sum"))
        found = [sums.sum(dim=0).tolist(), *sums.tolist()]
        own = [{"loss": one[0] / max(one[1], 1), "tokens": int(one[1]), **self._means(one[1:])} for one in found]
        return by_name(sets, own)

    def choose_head(self, steps: Steps) -> Head:
        """See Loss; the head is checked on one short real document with every token trained."""
        choose_head(base_model(self.model), self.head, self.probe(steps), autocast=self.settings.autocast)
        return self.head

    def probe(self, steps: Steps) -> Inputs:
        """Inputs of one short real document with every token trained, to check the output head with."""
        data = cast(TokenDataset, steps.data)
        ids = data[int(data.lengths.argmax())].input_ids[:_PROBE_TOKENS]
        document = Document(ids, np.ones(len(ids), dtype=bool))
        padded = steps.layout == "padding"
        return on_device(
            collate_padded([document], steps.pad_token_id) if padded else collate_flat([document]), self.device
        )

    def definition(self, documents: Sequence[Document]) -> Iterator[Callable[[], torch.Tensor]]:
        """See Loss: cross-entropy of the logits of each document alone."""
        trained = sum(int(document.loss_mask[1:].sum()) for document in documents)

        def part(document: Document) -> torch.Tensor:
            inputs = on_device(collate_padded([document], 0, self.settings.steps.sight), self.device)
            labels = inputs.pop("shift_labels")[0]
            logits = self.model(**inputs, use_cache=False).logits[0].float()
            return self.losses_of(logits, labels, inputs).sum() / trained

        return (partial(part, document) for document in documents)

    def losses_of(self, logits: torch.Tensor, labels: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the losses of a document's tokens, by its logits [tokens, vocabulary]."""
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        return self.head.weigh(-losses) * losses

    def _run_without_labels(self, batch: MicroBatch) -> None:
        self.model(**on_device(without_labels(batch.inputs), self.device), loss_sum=True)


class SFT(TrainingObjective):
    """The objective of documents."""

    loss_class = SFTLoss

    def why_repeated(self, run: Prepared) -> str:
        """See TrainingObjective."""
        if self.objective.options.get("neftune_noise_alpha"):
            return "the noise on embeddings depends on the length of a document"
        return "the loss of routers counts by document" if router_loss(base_model(run.model)) is not None else ""

    def decide_attention(self, run: Prepared) -> AttentionChoice:
        """See TrainingObjective. Raises UserError if rows would share tokens that a loss of routers counts by document."""
        if self.packing.share_prefix and router_loss(base_model(run.model)) is not None:
            what = "the load-balancing loss of routers counts a token in every document that has it"
            fix = "set it, or model.config.output_router_logits, to false"
            raise UserError(what, where="packing.share_prefix", fix=fix, code="routers-share-tokens")
        return super().decide_attention(run)

    def prove(self, start: Start) -> None:
        """Check the output head and the routers, and have the first steps watched."""
        trainer, log = start.trainer, start.log
        loss, settings = cast(SFTLoss, trainer.loss), trainer.settings
        flattened = settings.backend is not None and not BACKENDS[settings.backend].by_document
        if start.preflight and not settings.sharded and flattened:
            trainer.first_step_watch = FirstStepWatch(start.attention, tolerance_of(loss.compute_dtype).outputs)
        loss.choose_head(trainer.steps)
        if loss.head.kind == "full logits":
            log.fact("head", f"full logits, which take far more memory: the fused one {loss.head.refusal}")
        elif loss.head.refusal:
            log.fact("head", f"makes logits a second time in the backward pass: the summed one {loss.head.refusal}")
        if loss.routers is not None:
            log.fact("routers", f"{loss.routers.weight:g} × load-balancing loss over the tokens of a step")
            if start.preflight:
                loss.routers.check(base_model(loss.model), loss.probe(trainer.steps), autocast=settings.autocast)


OBJECTIVE = SFT
