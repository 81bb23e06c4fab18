"""Distillation: its loss, figures, and objective. The teacher runs each row beside the student (teacher.py), or once (teacher_cache.py).

The loss is Σ of token losses over the step / Σ of its trained tokens, as in sft, and the weighted loss of routers if set.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.objective import Objective
from packtrain.config.rules.paths_and_packages import frozen_of
from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.cache import cache_folder
from packtrain.errors import CheckFailed
from packtrain.model.forward import Head, TokenLoss, places_on
from packtrain.model.load import base_model
from packtrain.model.save import gathered
from packtrain.model.spread import placement_of, spread
from packtrain.model.weights import weights_hash
from packtrain.objectives.answers import Inputs
from packtrain.objectives.distill.divergence import SLICE, Divergence, Readout, Taught, TaughtTokens, pick
from packtrain.objectives.distill.spec import TEACHER
from packtrain.objectives.distill.teacher import Teacher, check_tokenizer
from packtrain.objectives.distill.teacher_cache import TaughtSteps
from packtrain.objectives.sft.run import SFT, SFTLoss
from packtrain.packing.collate import IGNORE, to_device
from packtrain.proof.choice import AttentionChoice
from packtrain.proof.isolation import check_causal_and_padding
from packtrain.system import holding
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import Setup
from packtrain.train.objectives.training_objective import Start, identity_of_reference, load_frozen
from packtrain.train.preflight import choose_on_all_ranks

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared


class DistillLoss(SFTLoss):
    """The loss of documents on `model` by the distributions of a `teacher`."""

    def __init__(self, setup: Setup, objective: Objective, teacher: Teacher, backend: str | None) -> None:
        option, self.teacher, self.words = objective.option, teacher, teacher.words
        self.divergence = Divergence(
            objective.losses[0], option("temperature"), option("jsd_beta"), option("nll_share")
        )
        k, self._records = option("teacher_top_k"), cast(torch.Tensor | None, None)
        self.pick = k and partial(pick, k=k, temperature=option("temperature"))
        self.extra_forwards = int(k is None)
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
            teacher = (lambda part: self._teach(at[part], targets[part])) if self.taught else None
            return TaughtTokens(self.divergence, own, targets, teacher, add)

        head.tokens = tokens
        return head

    def sum_losses(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """See SFTLoss; the teacher runs the rows first."""
        ids, self._records = inputs["input_ids"], inputs.get("label_records")
        tokens = np.arange(ids.numel())
        if self._records is not None:
            tokens[inputs["label_places"]] = np.arange(len(self._records))
        elif self.taught:
            with self.accelerator.autocast():
                self.teacher.see(inputs)
        numbers = to_device(torch.from_numpy(tokens), ids.device).view_as(ids)
        return super().sum_losses(model, inputs | {"labels": numbers})

    def _teach(self, tokens: torch.Tensor, targets: torch.Tensor) -> Taught:
        """Return the teacher's distributions of `targets` int64 [n].

        `tokens` int64 [n]: the numbers of the tokens before them in the micro-batch, or of their records.
        """
        if self._records is not None:
            return Taught.coarse(self._records[tokens], self.words)
        return self._seen(self.teacher.logits(tokens), targets)

    def _seen(self, logits: torch.Tensor, targets: torch.Tensor) -> Taught:
        """Return as much of the teacher's distributions as the student sees."""
        return Taught.coarse(self.pick(logits, targets), self.words) if self.pick else Taught.whole(logits)

    @torch.no_grad()
    def record(self, batch: MicroBatch) -> np.ndarray:
        """Run the teacher. Return the records of a micro-batch's targets: int32 [n, 2m + 2]."""
        inputs = batch.inputs_on(self.device)
        with self.accelerator.autocast():
            self.teacher.see(inputs)
        places = places_on(inputs["shift_labels"], inputs["label_places"])
        parts = zip(places.split(SLICE), inputs["shift_labels"].flatten()[places].split(SLICE), strict=True)
        return torch.cat([self.pick(self.teacher.logits(some), targets) for some, targets in parts]).cpu().numpy()

    def of_rows(self, batch: MicroBatch) -> torch.Tensor:
        """See Loss; this one is the mean -log p. The divergence of a student that equals its teacher is 0."""
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
        at = labels != IGNORE
        with torch.no_grad():
            teacher = self.teacher.called(**inputs, use_cache=False).logits[0, at, : self.words].float()
        return self.divergence.loss(logits[at, : self.words], self._seen(teacher, labels[at]), labels[at])


class Distill(SFT):
    """The objective of documents with a teacher."""

    loss_class = DistillLoss
    steps_class = TaughtSteps
    teacher: Teacher
    identity: str
    """The teacher in keys of the cache."""
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
        self.identity = identity_of_reference(loaded, Peft(), weights)
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
        run, padding = self._run, self.packing.mode == "padding"
        if run.config.verify.preflight:
            check_causal_and_padding(self.teacher.model, padding=padding, autocast=run.precision.autocast, key=TEACHER)
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
        if self.objective.option("teacher_top_k") and not start.log.evaluates:
            self._keep_records(start)

    def _keep_records(self, start: Start) -> None:
        """Have the teacher's records of all data made, then free it."""
        trainer, loss = start.trainer, cast(DistillLoss, start.trainer.loss)
        k, heat, words = (*map(self.objective.option, ("teacher_top_k", "temperature")), self.teacher.words)
        if loss.divergence.kind == "reverse_kl":
            start.log.warn("reverse_kl learns little from the teacher_top_k tokens alone: see docs/distill.md")
        folder = cache_folder(self._run.config.data.cache_dir) / "teacher"
        width, formats = 2 * min(k + 1, words) + 2, (start.precision.weights, start.precision.autocast)

        def taught(steps: Steps) -> Steps:
            # 1 is the version of the records
            known = repr((1, self.identity, steps.data.fingerprint, formats, k, heat, words))
            file = folder / f"{hashlib.blake2b(known.encode(), digest_size=16).hexdigest()}.bin"
            return cast(TaughtSteps, steps).with_records(start, file, width, loss.record)

        trainer.steps = taught(trainer.steps)
        trainer.evaluation.update({name: taught(steps) for name, steps in trainer.evaluation.items()})
        models = loss.accelerator._models
        models[:] = [model for model in models if model is not self.teacher.called]
        for weight in self.teacher.model.parameters():
            if (part := getattr(weight, "ds_tensor", None)) is not None:  # DeepSpeed keeps a list of models
                part.data = part.new_empty(0)
        vars(self.teacher).clear()
        self.others, self._close = (), lambda: None
        del self.teacher, loss.teacher
        gc.collect()
        torch.cuda.empty_cache()


OBJECTIVE = Distill
