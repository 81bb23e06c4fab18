"""Distillation: its loss, figures, and objective. The teacher runs each row beside the student (teacher.py).

The loss is Σ of token losses over the step / Σ of its trained tokens, as in sft, and the weighted loss of routers if set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.objective import Objective
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.model.forward import (
    Batch,
    Head,
    Places,
    add_calls,
    compare_gradients,
    name_backbone,
    patch_forward,
    places_on,
    sum_losses,
)
from packtrain.model.load import base_model
from packtrain.model.save import gathered
from packtrain.model.spread import placement_of, spread
from packtrain.model.weights import weights_hash
from packtrain.objectives.answers import Inputs
from packtrain.objectives.distill.divergence import Divergence, Readout, TaughtTokens
from packtrain.objectives.distill.teacher import TEACHER, Teacher, check_tokenizer
from packtrain.objectives.sft.run import SFT, SFTLoss
from packtrain.objectives.spec import equal_weights
from packtrain.packing.collate import IGNORE, collate_padded, on_device
from packtrain.proof.choice import AttentionChoice
from packtrain.system import holding
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import Setup
from packtrain.train.objectives.training_objective import Start, load_frozen
from packtrain.train.preflight import choose_on_all_ranks

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared


class DistillLoss(SFTLoss):
    """The loss of documents on `model` by the distributions of a `teacher`."""

    extra_forwards = 1

    def __init__(self, setup: Setup, objective: Objective, teacher: Teacher, backend: str | None) -> None:
        option, self.teacher = objective.option, teacher
        self.divergence = Divergence(
            objective.losses[0], option("temperature"), option("jsd_beta"), option("nll_share")
        )
        self.taught = True
        """False inside proofs of the model alone: the loss is then plain -log p."""
        super().__init__(setup, objective)
        teacher.called = placement_of(self.strategy).wrap_frozen(teacher.model, self.accelerator)
        teacher.patch(backend, self.autocast)

    def add_head(self, base: PreTrainedModel) -> Head:
        """See SFTLoss: the head that `_add_divergences` adds."""
        is_plain = type(base.get_output_embeddings()) is nn.Linear
        head = Head(equal_weights, "summed" if is_plain else "full logits", otherwise=())
        name_backbone(base)
        inner, readout = base.forward, Readout.of(base.config)

        def lose(
            own: PreTrainedModel, asked: str, labels: torch.Tensor, at: Places, owners: Places, batch: Batch
        ) -> object:
            if getattr(own.config.get_text_config(), "output_router_logits", False):
                batch["output_router_logits"] = False
            places, parts = places_on(labels, at), list[torch.Tensor]()
            if head.record is not None and owners is not None and len(owners):
                head.record.append((owners, parts))
            whole, plain = head.kind == "full logits", asked != "loss_sum" or not self.taught
            tokens = TaughtTokens(
                self.divergence,
                Readout() if whole else readout,
                labels.flatten()[places],
                None if plain else self.teacher.logits,
                partial(self._note, parts),
            )
            if whole:
                logits = inner(**batch, use_cache=False).logits.flatten(0, 1)[places]
                made = logits.detach().clone()
                total = tokens.in_place(made, slice(0, len(made)), trains=torch.is_grad_enabled())
                total = total + ((logits - logits.detach()) * made).sum() if torch.is_grad_enabled() else total
            else:
                hidden = own.base_model(**batch, use_cache=False).last_hidden_state.flatten(0, 1)[places]
                run = compare_gradients if asked == "head_gradients" else sum_losses
                total = run(hidden, cast(nn.Linear, own.get_output_embeddings()), tokens)
            if asked != "token_losses":
                return total
            losses = -torch.cat([*parts, total.new_zeros(0)])
            return losses.new_zeros(labels.numel()).index_put((places,), losses).view(labels.shape)

        add_calls(base, ("loss_sum", "token_losses", "head_gradients"), lose)
        patch_forward(base, autocast=self.autocast, backend=self.settings.backend)
        return head

    def _note(self, parts: list[torch.Tensor], losses: torch.Tensor, figures: torch.Tensor | None) -> None:
        parts.append(-losses)
        if figures is not None:
            self.figures += figures.sum(dim=1)

    def sum_losses(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """See SFTLoss; the teacher runs the rows first."""
        if self.taught:
            with self.accelerator.autocast():
                self.teacher.see(inputs)
        return super().sum_losses(model, inputs)

    def of_rows(self, batch: MicroBatch) -> torch.Tensor:
        """See Loss; this one is the mean -log p: a divergence is near 0 where the student equals its teacher."""
        with holding(self, taught=False):
            return super().of_rows(batch)

    def choose_head(self, steps: Steps) -> Head:
        """See Loss; the teacher's head is checked too."""
        refusal = self.teacher.check_head(self.probe(steps), self.settings.autocast)
        if refusal:
            self.settings.fact("teacher", f"full logits, which take far more memory: {refusal}")
        with holding(self, taught=False):
            return super().choose_head(steps)

    def definition(self, documents: Sequence[Document]) -> Iterator[Callable[[], torch.Tensor]]:
        """See Loss: the divergence of full logits of both models on each document alone."""
        trained = sum(int(document.loss_mask[1:].sum()) for document in documents)

        def part(document: Document) -> torch.Tensor:
            inputs = on_device(collate_padded([document], 0, self.settings.steps.sight), self.device)
            labels = inputs.pop("shift_labels")[0]
            at, words = labels != IGNORE, self.teacher.words
            with torch.no_grad():
                teacher = self.teacher.called(**inputs, use_cache=False).logits[0, at, :words].float()
            own = self.model(**inputs, use_cache=False).logits[0, at, :words].float()
            return self.divergence.loss(own, teacher, labels[at]).sum() / trained

        return (partial(part, document) for document in documents)


class Distill(SFT):
    """The objective of documents with a teacher."""

    loss_class = DistillLoss
    teacher: Teacher
    backend: str | None = None
    """The attention backend of the teacher's packed rows."""

    def take_reference(self, run: Prepared) -> dict[str, str]:
        """See TrainingObjective. Raises UserError for a teacher with another tokenizer."""
        model = self.objective.spec.frozen(run.config)
        assert model is not None  # spec.py refuses a config without
        check_tokenizer(run.tokenizer, model)
        loaded = load_frozen(run, model, TEACHER)
        weights, head = weights_hash(loaded), None
        if run.ranks.sharded:
            output = cast(nn.Linear, loaded.get_output_embeddings())
            head = gathered(output.weight).to(run.ranks.device, copy=True)
        spread(loaded, run.ranks, run.precision.autocast)
        embeddings = cast(nn.Linear, base_model(run.model).get_output_embeddings())
        self.teacher = Teacher(loaded.eval(), head, embeddings.out_features)
        return {TEACHER: f"one of weights with hash {weights[:12]}"}

    def decide_attention(self, run: Prepared) -> AttentionChoice:
        """See TrainingObjective; the teacher's attention is proved too. Raises CheckFailed if it cannot share what must be shared."""
        choice, model, ranks = super().decide_attention(run), run.config.model, run.ranks
        end = placement_of(ranks.spec).open_proofs(self.teacher.model, ranks)
        shared = self.layout == "shared"
        own = choose_on_all_ranks(
            model.attention,
            self.teacher.model,
            ranks,
            run.precision.autocast,
            prove=True,
            pairs=shared,
            must_share=shared,
        )
        end()
        if shared and own.why_not_shared:
            self.layout, self.why_not_shared = "flat", f"the teacher cannot share them: {own.why_not_shared}"
            if self.packing.share_prefix:
                raise CheckFailed(
                    self.why_not_shared, where="packing.share_prefix", fix="set it to false", code="sharing-inexact"
                )
        self.backend = own.backend.name
        return choice

    def loss(self, setup: Setup) -> DistillLoss:
        """See TrainingObjective."""
        return DistillLoss(setup, self.objective, self.teacher, self.backend)

    def prove(self, start: Start) -> None:
        """See TrainingObjective; says what the student learns from."""
        super().prove(start)
        divergence, teacher = cast(DistillLoss, start.trainer.loss).divergence, self.teacher
        share = f", {divergence.nll_share:g} of the loss is -log p" if divergence.nll_share else ""
        path = self.objective.option("teacher")
        start.log.fact("loss", f"{divergence.kind} at temperature {divergence.temperature:g}{share}, from {path}")
        start.log.fact("teacher", f"{type(teacher.model).__name__}, {teacher.words:,} words in common")


OBJECTIVE = Distill
