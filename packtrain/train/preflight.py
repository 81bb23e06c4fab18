"""Proofs on the loaded model: attention, changes, first rows, memory of the largest row."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from packtrain.attention.backends import attention_by, attention_of, documents_alone
from packtrain.attention.forwards import rotates_by_length
from packtrain.attention.spec import BACKENDS
from packtrain.changes.spec import NO_GRADIENTS, Make, Proposal
from packtrain.errors import CheckFailed, Problem, UserError
from packtrain.model.layers import recompute_in_eval
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, max_over_ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.objectives.answers import Inputs
from packtrain.packing.balance import parts_of_rank
from packtrain.packing.collate import IGNORE
from packtrain.plan.memory import Found, optimizer_bytes
from packtrain.proof.choice import AttentionChoice, choose_attention
from packtrain.proof.comparison import (
    ChangeProof,
    check_equal,
    evaluating,
    has_routers,
    model_refusals,
    prove_change,
    tolerance_of,
)
from packtrain.proof.exhibits import Exhibits
from packtrain.train.engine import Engine
from packtrain.train.library_errors import shortly
from packtrain.train.loader import MicroBatch, Steps, first_documents
from packtrain.train.log.console import Log
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.dither import local
from packtrain.train.run_state import LoopSettings
from packtrain.wording import size

if TYPE_CHECKING:
    from packtrain.train.loop import StepTrainer

WATCHED_STEPS = 3
_CANDIDATES = 16
"""Number of steps with the longest documents, and of steps with the most tokens: one of them has the fullest micro-batch."""
_FEWEST = 16  # trained tokens; rounding errors average out over them
_ROW_TOO_LONG = "set model.attention=per_document: the row may be longer than position tables of the model"


def choose_on_all_ranks(
    wanted: str,
    model: PreTrainedModel,
    ranks: Ranks,
    autocast: torch.dtype | None,
    *,
    prove: bool,
    pairs: bool = False,
    must_share: bool = False,
    exhibits: Exhibits | None = None,
) -> AttentionChoice:
    """Choose the attention of packed rows by proof, with the same kernel on all ranks.

    Arguments as for `choose_attention`. Raises UserError or CheckFailed if `wanted` is not available or not exact, or if ranks would differ.
    """
    choice = choose_attention(
        wanted,
        model,
        model.device,
        autocast=autocast,
        prove=prove,
        pairs=pairs,
        must_share=must_share,
        exhibits=exhibits,
    )
    by = f" by {choice.kernel}" if choice.kernel else ""
    same_everywhere(f"{choice.backend.name}{by}", "attention", "model.attention", ranks.world_size)
    if problem := why_not_together(ranks, choice.backend.name, model):
        raise CheckFailed(problem)
    return choice


def why_not_together(ranks: Ranks, backend: str, model: PreTrainedModel) -> Problem | None:
    """Return a problem if ranks would gather weights a different number of times, which hangs. Else None."""
    by_document = BACKENDS[backend].by_document
    if ranks.sharded and (by_document or attention_by(backend).gathers_unevenly(model)):
        what = "packed rows" if by_document else "modules with sharded parts"
        return Problem(
            f"{what} of {type(model).__name__} run per document, so processes would gather weights a different number of times; "
            f"under {ranks.strategy} all must gather together",
            "strategy.name",
            "set packing.mode=padding, or strategy=zero2",
            code="calls-differ-by-rank",
        )
    return None


def why_not_split(model: PreTrainedModel, backend: str) -> str:
    """Return why rows of `model` cannot be split over ranks, "" if they can. Looks at the layers only, before any proof."""
    name = type(model).__name__
    if not backend:
        return f"no backend serves packed rows of {name}"
    if why := BACKENDS[backend].why_not_split:
        return f"{name} runs packed rows by {backend}, which {why}"
    if rotates_by_length(model):
        return f"the rotary embeddings of {name} depend on the length of a document"
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        return f"{name} scales attention by the place in what a process has (model.config.attn_temperature_tuning)"
    return ""


def same_everywhere(choice: str, what: str, where: str, world_size: int) -> None:
    """Raise CheckFailed on all ranks unless all made the same `choice`."""
    with waiting("the choices of all ranks"):
        choices = gather_object([choice]) if world_size > 1 else [choice]
    if len(set(choices)) > 1:
        ranks = ", ".join(f"rank {rank}: {own}" for rank, own in enumerate(choices))
        fix = "install the same packages everywhere, or name what to use"
        what = f"the processes would not use the same {what} ({ranks})"
        raise CheckFailed(what, where=where, fix=fix, code="choices-differ-by-rank")


def make_changes(loss: Loss, ranks: Ranks, found: Iterable[tuple[str, Proposal]], log: Log) -> dict[str, str]:
    """Make the changes of the `loss`'s model that prove exact, one on top of another. Return and log what was decided, by their names.

    They are made before the objective's proofs and before the reference's log-probabilities are precomputed, so both use the model that
    trains. A resumed run proves again, with the first documents of the data and the weights that the run began with. On a machine with
    the same packages it makes the same changes. All ranks call it together. Raises UserError if a required change is not available,
    CheckFailed if it is not exact.
    """
    decided = dict[str, str]()
    for name, proposal in found:
        what, lacks, proof = proposal.what, proposal.lacks, None
        if not lacks and ranks.spec.gathers_by_engine and not proposal.unproved:
            lacks = f"{ranks.strategy} {NO_GRADIENTS}"
        if lacks and proposal.key:
            what = f"{what}: not available, {lacks}"
            raise UserError(what, where=proposal.key, fix="set it to auto", code="change-unavailable")
        if proposal.unproved:
            _on_all(loss, proposal.make)()
        elif not lacks:
            proof = _prove(loss, proposal)
            lacks = proof.refusal
        if proof and lacks and proposal.key:
            why = f"{what} would not train as the model itself does: {lacks}"
            raise CheckFailed(why, where=proposal.key, fix="set it to auto", code="change-inexact")
        said = f"as the model comes; {what}: {lacks}" if lacks else what
        figures = "" if lacks else f" ({proof.figures() if proof else proposal.unproved})"
        decided[name] = said + figures
        if not lacks:
            loss.changes.append(name)
        log.fact(name, decided[name])
    return decided


def _on_all(loss: Loss, make: Make) -> Callable[[], Callable[[], object]]:
    """Make the change in the reference too. Otherwise the reference rounds differently, and first margins are not zero."""

    def make_on_all() -> Callable[[], object]:
        with ExitStack() as undo:
            for model in filter(None, [loss.model, getattr(loss, "reference", None)]):
                whole = cast("torch.nn.Module", loss.accelerator.unwrap_model(model))
                undo.callback(make(base_model(whole)))
            return undo.pop_all().close

    return make_on_all


def _prove(loss: Loss, proposal: Proposal) -> ChangeProof:
    """Make the change if it is exact on the first documents. The proof runs in eval mode, where nothing is random."""
    base, batch = base_model(loss.model), first_documents(loss.settings.steps)

    def loss_of_rows() -> torch.Tensor:
        with evaluating(base, loss.settings.autocast), loss.keeping_metrics():
            recompute_in_eval(base)
            return loss.of_rows(batch)

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        with waiting("the proofs of all ranks"):
            return cast(torch.Tensor, loss.accelerator.reduce(values, reduction="sum"))

    weights = {name: weight for name, weight in loss.model.named_parameters() if weight.requires_grad}
    make, dtype = _on_all(loss, proposal.make), loss.compute_dtype
    if proposal.tolerance:  # it allows more than rounding, so the unchanged results are the definition
        return prove_change(make, loss_of_rows, weights, proposal.tolerance, sum_over_ranks)
    tolerance = tolerance_of(dtype, routed=has_routers(base))
    return prove_change(make, loss_of_rows, weights, tolerance, sum_over_ranks, base, dtype)


@dataclass(frozen=True, slots=True)
class FirstStepWatch:
    """Comparison of packed rows with their documents run alone, on real rows at real lengths. Checked is the first row of each of the
    first WATCHED_STEPS steps, since state kept between steps may be wrong too. (Not with sharded weights: processes would
    call the model a different number of times.)

    `attention` is the model's original implementation, which runs the documents alone; `tolerance` is the outputs' tolerance. Losses are
    compared by document: a missing border changes one or two of them, too little to show in the sum.
    """

    attention: str
    tolerance: float

    @torch.no_grad()
    def check(self, model: Any, row: Inputs, *, step: int) -> float:
        """Return the largest difference of a document's loss packed and alone. It is relative to the largest of: its loss, one nat for
        each of its trained tokens, and 16 nats (rounding errors of few tokens do not average out).

        `row` is a flattened micro-batch of `step`. Costs a forward pass of the row and of its documents. Raises CheckFailed above
        the tolerance, and if a row this long cannot run.
        """
        base, tokens = base_model(model), row["segments"].tokens
        with evaluating(model):
            with model_refusals(f"{type(base).__name__} cannot run a row of {tokens} tokens", fix=_ROW_TOO_LONG):
                packed = _sums(model(**row, token_losses=True), row)
            with attention_of(base, self.attention), documents_alone(base):
                alone = _sums(model(**row, token_losses=True), row)
        trained = _sums(row["shift_labels"] != IGNORE, row)
        both_diverged = ~packed.isfinite() & ~alone.isfinite()  # the learning rate is too high: not an error of packing
        count = trained.clamp(min=1)
        thing = "segment" if row["segments"].prefixes else "document"
        packed, alone = (sums.masked_fill(both_diverged, 0.0) / count for sums in (packed, alone))
        return check_equal(
            packed,
            alone,
            self.tolerance,
            f"{thing} {{number}} of the first row of step {step} has loss {{candidate:.6g}} packed and {{definition:.6g}} alone",
            fix="packed rows are not computed right, padded ones are: set model.attention=per_document or "
            "packing.mode=padding, and please report this model",
            code="losses-differ",
            scale=alone.maximum(trained / count).maximum(_FEWEST / count),
        )


def _sums(values: torch.Tensor, row: Inputs) -> torch.Tensor:
    """Sum `values` [1, T] over each document of `row`: float64 [documents] on the CPU."""
    return torch.stack([part.sum() for part in values[0].double().cpu().split(row["segments"].lengths)])


def largest_row(steps: Steps, first_step: int) -> tuple[np.ndarray, bool]:
    """Return the micro-batch with the most token slots of any rank. Returned are its examples, int [n], and whether ranks split it.
    Searched are the steps from `first_step` to the end of the first pass."""
    schedule = steps.schedule
    end = min(len(steps), max(first_step + 1, schedule.steps_per_epoch(0)))
    lengths = {step: schedule.lengths[schedule.documents(step)] for step in range(min(first_step, end - 1), end)}

    def slots(row: tuple[np.ndarray, bool]) -> float:
        return schedule.slots(row[0]) / (schedule.ranks_per_row if row[1] else 1)

    longest = nlargest(_CANDIDATES, lengths, key=lambda step: lengths[step].max(initial=0))
    fullest = nlargest(_CANDIDATES, lengths, key=lambda step: lengths[step].sum())
    layouts = [schedule.layout(step, steps.world_size) for step in sorted({*longest, *fullest})]
    return max(
        (row for layout in layouts for rank in range(len(layout)) for row in parts_of_rank(layout, rank)), key=slots
    )


def find_largest(steps: Steps, first_step: int) -> Found:
    """Measure the largest micro-batch of a process. A stream's is unknown: later rows may be larger."""
    if steps.feed:
        return Found()
    (numbers, is_split), schedule = largest_row(steps, first_step), steps.schedule
    slots, parts = schedule.slots(numbers), schedule.ranks_per_row if is_split else 1
    return Found(math.ceil(slots / parts), max(1, schedule.lengths[numbers].sum() / slots))


def try_largest(trainer: StepTrainer) -> None:
    """Run the largest micro-batch forward and backward, on every rank, and measure its memory.

    If memory fails on a rank and trainer.gradient_checkpointing is `auto`, all ranks recompute more, and try again. A failed try leaves no
    trace. If ranks exchange within the pass, the others would wait for a rank that fails: then its error ends the run.
    """
    steps, engine, device, settings = trainer.steps, trainer.engine, trainer.loss.device, trainer.settings
    numbers, is_split = largest_row(steps, settings.first_step)
    batch = steps.collate_part(numbers, is_split)
    buffers = [(buffer, buffer.detach().clone()) for buffer in engine.model.buffers()]
    exchanges = is_split or engine.spec.shards_weights or engine.spec.steps_in_backward
    while True:
        lack = ""
        trainer.work.begin(settings.first_step, 1, batch, numbers)
        try:
            _run_twice(trainer, batch)
        except torch.OutOfMemoryError as error:
            if exchanges and engine.fallbacks:
                why = "a process that lacks memory within an exchange cannot reach the others"
                settings.say(f"recompute  stays {engine.checkpointing}: under {settings.strategy} {why}")
            if exchanges or not engine.fallbacks:
                raise
            lack = shortly(error)
        engine.wrapped.zero_grad()
        for buffer, before in buffers:
            buffer.copy_(before)
        if exchanges or not engine.fallbacks or not max_over_ranks(bool(lack), device):
            break
        why = f"with {engine.checkpointing} a micro-batch of {batch.slots:,} token slots lacked memory: {lack or 'on another process'}"
        gc.collect()  # frames of the failed pass hold tensors
        torch.cuda.empty_cache()
        engine.recompute(engine.fallbacks.pop(0))
        trainer.changes["recompute"] = f"{engine.checkpointing} (auto: {why})"
        settings.fact("recompute", trainer.changes["recompute"])
    trainer.work.end()
    if device.type == "cuda":
        peak = size(torch.cuda.max_memory_allocated(device))
        settings.fact("tried", f"the largest micro-batch, {batch.slots:,} token slots: {peak} at most until here")


def _run_twice(trainer: StepTrainer, batch: MicroBatch) -> None:
    """Run `batch` twice: the second time gradients exist. Memory for the optimizer's states is held meanwhile.

    An engine that steps in the backward pass takes it for a step; `ask_before_update` must refuse the update.
    """
    engine, loss, device = trainer.engine, trainer.loss, trainer.loss.device
    counts = torch.tensor(batch.counts, device=device)
    engine.wrapped.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), loss.keeping_metrics(), engine.trying():
        held = torch.empty(_states_to_come(engine, trainer.settings), dtype=torch.uint8, device=device)
        for again in (False, True):
            last = engine.spec.steps_in_backward or (engine.exchanges_once and again)
            with engine.casting_once(), engine.exchanging_gradients(last=last):
                engine.accelerator.backward(loss.compute(engine.wrapped, batch, counts))
        del held


def _states_to_come(engine: Engine, settings: LoopSettings) -> int:
    """Return the bytes of this process's optimizer states that do not exist yet."""
    if engine.spec.steps_in_backward or engine.plain_optimizer.state:
        return 0
    trained = [weight for weight in engine.model.parameters() if weight.requires_grad]
    number, width = sum(local(weight).numel() for weight in trained), trained[0].itemsize
    return optimizer_bytes(settings.optim, engine.spec, number, width)
