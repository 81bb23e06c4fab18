"""Distillation: its loss, figures, and objective. The teacher runs each row beside the student (teacher.py).

The loss is Σ of token losses over the step / Σ of its trained tokens, as in sft, and the weighted loss of routers if set.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.objective import Objective
from packtrain.config.rules.paths_and_packages import frozen_of
from packtrain.config.schema import Model
from packtrain.errors import CheckFailed
from packtrain.model.forward import Head, TokenLoss
from packtrain.model.load import base_model
from packtrain.model.save import gathered
from packtrain.model.spread import placement_of, spread
from packtrain.model.weights import weights_hash
from packtrain.objectives.answers import Inputs
from packtrain.objectives.distill.divergence import Divergence, Readout, TaughtTokens
from packtrain.objectives.distill.spec import TEACHER
from packtrain.objectives.distill.teacher import Teacher, check_tokenizer
from packtrain.objectives.sft.run import SFT, SFTLoss
from packtrain.packing.collate import IGNORE
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
        """See SFTLoss."""
        head, readout = super().add_head(base), Readout.of(base.config)
        head.kind = "summed" if type(base.get_output_embeddings()) is nn.Linear else "full logits"

        def tokens(targets: torch.Tensor, at: torch.Tensor, note: Callable[[torch.Tensor], object]) -> TokenLoss:
            def add(losses: torch.Tensor, figures: torch.Tensor | None) -> None:
                note(-losses)
                if figures is not None:
                    self.figures[1:] += figures.sum(dim=1)

            own = Readout() if head.kind == "full logits" else readout
            teacher = (lambda part: self.teacher.logits(at[part])) if self.taught else None
            return TaughtTokens(self.divergence, own, targets, teacher, add)

        head.tokens = tokens
        return head

    def sum_losses(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """See SFTLoss; the teacher runs the rows first."""
        if self.taught:
            with self.accelerator.autocast():
                self.teacher.see(inputs)
        ids = inputs["input_ids"]
        return super().sum_losses(model, inputs | {"labels": torch.arange(ids.numel(), device=ids.device).view_as(ids)})

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

    def losses_of(self, logits: torch.Tensor, labels: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """See SFTLoss: the divergence of full logits of both models."""
        at, words = labels != IGNORE, self.teacher.words
        with torch.no_grad():
            teacher = self.teacher.called(**inputs, use_cache=False).logits[0, at, :words].float()
        return self.divergence.loss(logits[at, :words], teacher, labels[at])


class Distill(SFT):
    """The objective of documents with a teacher."""

    loss_class = DistillLoss
    teacher: Teacher
    _run: Prepared
    _close: Callable[[], None] = staticmethod(lambda: None)

    def take_reference(self, run: Prepared) -> dict[str, str]:
        """See TrainingObjective. Raises UserError for a teacher with another tokenizer."""
        _, model = cast("tuple[str, Model]", frozen_of(run.config))  # spec.py refuses a config without
        check_tokenizer(run.tokenizer, model)
        loaded, self._run = load_frozen(run, model, TEACHER), run
        weights, output = weights_hash(loaded), cast(nn.Linear, loaded.get_output_embeddings())
        rows, head = cast(nn.Linear, base_model(run.model).get_output_embeddings()).out_features, None
        if run.ranks.sharded:
            parts = (output.weight, output.bias)
            parts = (one if one is None else gathered(one)[:rows].to(run.ranks.device, copy=True) for one in parts)
            head = cast("tuple[torch.Tensor, torch.Tensor | None]", tuple(parts))
        spread(loaded, run.ranks, run.precision.autocast)
        self.teacher = Teacher(loaded.eval(), head, rows)
        return {"model.frozen": f"one of weights with hash {weights[:12]}"}

    def decide_attention(self, run: Prepared) -> AttentionChoice:
        """See TrainingObjective; the teacher's attention is proved too. Raises CheckFailed if it cannot share what must be shared."""
        choice = super().decide_attention(run)
        reason = self._choose(shared=self.layout == "shared").why_not_shared
        if reason:
            self.layout, self.why_not_shared = "flat", f"the teacher cannot share them: {reason}"
        if reason and self.packing.share_prefix:
            fix = "set it to false"
            raise CheckFailed(self.why_not_shared, where="packing.share_prefix", fix=fix, code="sharing-inexact")
        return choice

    def _choose(self, *, shared: bool) -> AttentionChoice:
        """Choose the attention of the teacher's packed rows by proof."""
        run, model = self._run, self.teacher.model
        self._close = placement_of(run.ranks.spec).open_proofs(model, run.ranks)
        choice = choose_on_all_ranks(
            "auto", model, run.ranks, run.precision.autocast, prove=True, pairs=shared, must_share=shared
        )
        self.others = ((model, choice.backend.name),)
        return choice

    def loss(self, setup: Setup) -> DistillLoss:
        """See TrainingObjective. `packtrain verify` has decided no attention before."""
        if not self.others:
            with suppress(CheckFailed):  # padded batches need none
                self._choose(shared=True)
        self._close()
        return DistillLoss(setup, self.objective, self.teacher, self.others[0][1] if self.others else None)

    def prove(self, start: Start) -> None:
        """See TrainingObjective; says what the student learns from."""
        super().prove(start)
        divergence, teacher = cast(DistillLoss, start.trainer.loss).divergence, self.teacher
        share = f", {divergence.nll_share:g} of the loss is -log p" if divergence.nll_share else ""
        path = self.objective.option("teacher")
        start.log.fact("loss", f"{divergence.kind} at temperature {divergence.temperature:g}{share}, from {path}")
        start.log.fact("teacher", f"{type(teacher.model).__name__}, {teacher.words:,} words in common")


OBJECTIVE = Distill
