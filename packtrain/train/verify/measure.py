"""`packtrain verify`: prove on the loaded model that its packed rows are exact, and report it.

Every process loads the model as training would and measures on random documents (1) isolation (proof/isolation.py), and in loss_proofs.py
(2) loss and gradients of the three modes, and for preferences (3) the first loss against the reference.
A sharded model is proved in its shards. Under ZeRO-3 weights have no gradients before there is an optimizer, so (2) and (3) run on
a whole model in each process. The main process writes the worst report into the run folder.

Verdicts: `exact`; `leaks`: something differs by more than rounding; `unsupported`: packed rows cannot run, the positive controls
are too weak to show a leak, or the first loss is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import cast

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from packtrain.attention.over_ranks import KEY, open_group
from packtrain.attention.spec import BACKENDS
from packtrain.config.schema import RunConfig
from packtrain.errors import CheckFailed, Disagreement, Json, Problem
from packtrain.model.forward import Head, outputs_of_tokens
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, loading_whole
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.balance import choose_ranks_per_row
from packtrain.proof.choice import NotExact, choose_attention, prove_backend
from packtrain.proof.exhibits import Exhibits, check_pictures, reach_of_gradients
from packtrain.proof.isolation import NO_FIGURES, TREE, Leak, Proof, check_causal_and_padding
from packtrain.run_folder import RunFolder, write_json
from packtrain.strategies.spec import DEFAULT
from packtrain.train.objectives.loss import ReferenceLoss
from packtrain.train.objectives.pairs_and_answers import ComparedSteps
from packtrain.train.objectives.training_objective import ReferenceObjective
from packtrain.train.optim.dither import FEW, expected_share
from packtrain.train.preflight import why_not_split, why_not_together
from packtrain.train.preparation import Prepared, begin, load, masters_of, settle_precision, spread_model
from packtrain.train.sight import drawn_pictures, exhibits_of, take_sight
from packtrain.train.sync import Peers
from packtrain.train.verify.command import finite
from packtrain.train.verify.loss_proofs import (
    MODES,
    SHARED,
    SPLIT,
    Comparison,
    FirstLoss,
    compare_modes,
    loss_on_random_examples,
    start_on_random_pairs,
)
from packtrain.wording import first_line

_BADNESS = ("exact", "unsupported", "leaks")
_REPORT = "please report this model"


@dataclass(frozen=True, slots=True)
class Isolation:
    """The backend of packed rows, why it was chosen, the rejected candidates, its proof.

    `pictures`: the proof of documents with pictures, of a model that sees. `backend` is None if none works. `problem` is None if it is exact. `leak` is the module that mixes documents, if any.
    """

    backend: str | None
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    proof: Proof | None = None
    problem: Problem | None = None
    leak: Leak | None = None
    pictures: Proof | None = None


def verify(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Prove, write the report, and return the exit code.

    The code is 0 if every process finds `exact`, else 3. Raises UserError if something cannot be loaded or is not available, CheckFailed
    if the proof cannot run."""
    outcome: Json | CheckFailed
    try:
        outcome = _measure(config, ranks, peers)
    except Disagreement:  # raised on all processes
        raise
    except CheckFailed as refusal:
        outcome = refusal
    except torch.OutOfMemoryError as error:
        fix = "the proof takes the weights and the trained gradients twice, training more: set peft=lora, or model.dtype=bfloat16"
        outcome = CheckFailed(
            f"out of memory on {ranks.device}: {first_line(error)}", fix=fix, code="proof-out-of-memory"
        )
    with waiting("the reports of all ranks"):
        outcomes = cast(list[Json | CheckFailed], gather_object([outcome]))
    for refusal in (found for found in outcomes if isinstance(found, CheckFailed)):
        raise refusal
    worst = max(cast(list[Json], outcomes), key=lambda report: _BADNESS.index(report["verdict"]))
    if ranks.main:
        write_json(RunFolder.of(config.trainer).verification, finite(worst))
    return 0 if worst["verdict"] == "exact" else CheckFailed.exit_code


def _measure(config: RunConfig, ranks: Ranks, peers: Peers | None) -> Json:
    """Return the report, in plain values."""
    started, share = time.perf_counter(), config.packing.share_prefix
    run = _load(begin(config, ranks, peers))
    base, autocast = base_model(run.model), run.precision.autocast
    with outputs_of_tokens(base):
        exhibits = exhibits_of(run)
        isolation = isolation_of(config, ranks, base, autocast, exhibits)
        packs = config.packing.mode != "padding" and isolation.backend is not None and not isolation.problem
        pairs = None  # why prompts are not shared, and the proof
        turns = run.may_turn and not run.objective.why_repeated(run)
        shares = share is not False if config.objective.spec.pairs else share or turns
        if shares and packs:
            pairs = prove_backend(cast(str, isolation.backend), base, autocast, TREE)
        reach = None
        if packs and exhibits and config.model.towers == "trained" and not ranks.sharded:
            reach = reach_of_gradients(base, cast(str, isolation.backend), exhibits)
    run.close_proofs()
    # without masters, updates are rounded at random and are right on average
    seen = expected_share(masters_of(run), config.optim.learning_rate) if config.optim.keeps_masters else None
    if ranks.spec.gathers_by_engine:  # all ranks agreed before
        run = _load(replace(run, ranks=replace(ranks, strategy=DEFAULT), peers=None))
    head, comparison, start = _modes(run, isolation, shares=pairs is not None and not pairs[0])
    losses_by = "full logits" if head and head.kind == "full logits" else "fused"
    # if prompts cannot be shared, training computes them for each answer; this is a finding only with share_prefix=true
    findings = _findings(isolation, comparison, pairs if share else None, start, reach)
    verdict, problem, fix = next(findings, ("exact", "", ""))
    measured = {mode: asdict(figures) for mode, figures in comparison.measured.items()}
    return {
        "model": config.model.path or f"new weights ({base.config.model_type})",
        "architecture": type(base).__name__,
        "dtype": str(base.dtype).removeprefix("torch."),
        "mixed_precision": run.precision.mixed,
        "peft": config.peft.kind,
        "device": str(ranks.device),
        "processes": ranks.world_size,
        "strategy": ranks.strategy,
        "modes_on": "spread" if ranks.sharded and not ranks.spec.gathers_by_engine else "whole",
        "rank": ranks.rank,
        "head": "score" if config.objective.spec.scores else losses_by,
        "backend": isolation.backend,
        "why": isolation.why,
        "lacking": [{"backend": name, "why": why} for name, why in isolation.rejected],
        "verdict": verdict,
        "problem": problem,
        "where": isolation.leak and isolation.leak._asdict(),
        "fix": fix,
        "controls_see": comparison.sees and (isolation.proof is None or isolation.proof.verdict != "unsupported"),
        "isolation": isolation.proof.figures() if isolation.proof else NO_FIGURES,
        "pictures": isolation.pictures and {**isolation.pictures.figures(), "gradients_of_others": reach and reach[0]},
        "objective": config.objective.kind,
        "pairs": pairs
        and {**(pairs[1].figures() if pairs[1] else NO_FIGURES), "prompts_shared": not pairs[0], "why": pairs[0]},
        "start": start and asdict(start),
        "updates_seen": seen,
        "modes": {mode: measured[mode] for mode in MODES},
        "prefix_shared": measured.get(SHARED),
        "split": measured.get(SPLIT),
        "reference": {"loss": comparison.reference, "documents": list(comparison.lengths)},
        "control": asdict(comparison.control),
        "tolerances": {
            "loss": comparison.tolerance.loss,
            "grad_rel_diff": comparison.tolerance.gradients,
            "control": comparison.least_control,
            "updates_seen": FEW,
        },
        "seconds": round(time.perf_counter() - started, 1),
    }


def _load(run: Prepared) -> Prepared:
    """Load and spread the model as training does, with its reference."""
    with loading_whole():  # ZeRO-3 loads it a second time
        load(run)
        take_sight(run)
        settle_precision(run, {})
    spread_model(run)
    return run


def _modes(run: Prepared, isolation: Isolation, *, shares: bool) -> tuple[Head | None, Comparison, FirstLoss | None]:
    """Compare the modes by the objective's loss. Return the documents' output head, the comparison, and preference training's FirstLoss."""
    objective, backend = run.objective, isolation.backend
    parts = 1 if isolation.problem else _ranks_per_row(run.config, run.ranks)
    pictures = drawn_pictures(run) if parts == 1 else []  # a row with pictures is never split
    trainer, sight = run.config.trainer, run.sight
    loss, steps = loss_on_random_examples(objective, run.model, run.tokenizer, run.precision, trainer, sight, pictures)
    start = None
    head = loss.choose_head(steps)
    if isinstance(objective, ReferenceObjective) and objective.reference.at_start:
        packed = None if run.config.packing.mode == "padding" else backend
        own = replace(
            cast(ComparedSteps, steps), layout="padding" if packed is None else "shared" if shares else "flat"
        )
        precomputed = objective.reference.kind == "precomputed"
        start = start_on_random_pairs(cast(ReferenceLoss, loss), own, packed, precomputed=precomputed)
    split = not run.config.objective.sorting_losses
    part = run.ranks.rank % parts
    compared = compare_modes(loss, steps, backend, shares=shares, split=split, part=part, ranks_per_row=parts)
    return head, compared, start


def _ranks_per_row(config: RunConfig, ranks: Ranks) -> int:
    """Return the ranks per row that the config asks for. For auto, take two, or the fewest that divide the number of ranks."""
    return choose_ranks_per_row(config.strategy.sequence_parallel, min(2, ranks.world_size), 1, ranks.world_size)


def isolation_of(
    config: RunConfig,
    ranks: Ranks,
    model: PreTrainedModel,
    autocast: torch.dtype | None,
    exhibits: Exhibits | None = None,
) -> Isolation:
    """Choose the backend as training does, and prove rows that are split over ranks. Keep all measurements of a named backend that is not exact."""
    try:
        check_causal_and_padding(model, padding=False, autocast=autocast)
        if exhibits:
            check_pictures(model, exhibits, padding=False, autocast=autocast)
        choice = choose_attention(config.model.attention, model, model.device, autocast=autocast, exhibits=exhibits)
    except NotExact as refusal:
        problem = refusal.problems[0]
        return Isolation(config.model.attention, "asked for", (), refusal.proof, problem, refusal.leak)
    except CheckFailed as refusal:
        problem = refusal.problems[0]
        return Isolation(None, problem.what, problem=problem)
    problem = why_not_together(ranks, choice.backend.name, model) if config.packing.mode != "padding" else None
    name, proof, parts = choice.backend.name, choice.proof, _ranks_per_row(config, ranks)
    if not problem and parts > 1:
        open_group(parts)
        if not (reason := why_not_split(model, name)):
            reason, split = prove_backend(name, model, autocast, part=ranks.rank % parts, parts=parts)
            proof = split or proof
        if reason:
            what = f"rows split over {parts} processes: {reason}"
            problem = Problem(what, KEY, f"set {KEY}=1", code="split-rows-differ")
    return Isolation(name, choice.why, choice.rejected, proof, problem, pictures=choice.pictures)


def _findings(
    isolation: Isolation,
    comparison: Comparison,
    pairs: tuple[str, Proof | None] | None,
    start: FirstLoss | None,
    reach: tuple[float, float] | None = None,
) -> Iterator[tuple[str, str, str]]:
    """Yield verdict, problem and fix of each finding, the most important first.

    Nothing if all is exact. `pairs` is given only with packing.share_prefix=true. `reach`: gradients that reach pictures of other documents, and,
    as a control, their own.
    """
    if isolation.problem:
        yield _verdict(isolation.proof), isolation.problem.what, isolation.problem.fix
    if reach is not None and isolation.pictures is not None and not reach[0] <= isolation.pictures.tolerance:
        what = f"gradients of a document reach pictures of others ({reach[0]:.2g} times the gradients at its own)"
        yield "leaks", what, f"set model.towers=frozen, and {_REPORT}"
    if reach is not None and not reach[1] > 0:
        yield "unsupported", "no gradient reaches a picture, so the proof of gradients shows nothing", _REPORT
    exact = [mode for mode in ("padding", "packed", "padding_free") if mode not in comparison.off]
    for mode, figures in comparison.measured.items():
        if figures.problem:
            yield "unsupported", f"{mode}: {figures.problem}", _REPORT
        elif mode in comparison.off:
            what = (
                f"isolation is exact, but {mode} has loss {figures.loss:.6g} where the documents alone have "
                f"{comparison.reference:.6g}, and gradients off by {figures.grad_rel_diff:.2g} "
                f"(tolerance {comparison.tolerance.gradients:.2g})"
            )
            fix = f"set packing.mode={exact[0]}, and {_REPORT}" if exact else _REPORT
            yield "unsupported" if mode == "padding" else "leaks", what, fix
    by_construction = isolation.backend is not None and BACKENDS[isolation.backend].by_document
    if not comparison.sees and not by_construction:
        cause = f"the control changes gradients by only {comparison.control.grad_rel_diff:.2g}"
        what = f"inconclusive, since a row without borders may look exact: {comparison.control.problem or cause}"
        yield "unsupported", what, "check the model's weights"
    if pairs is not None and pairs[0]:
        yield _verdict(pairs[1]), f"prompts cannot be shared: {pairs[0]}", "set packing.share_prefix=false"
    for problem in start.problems if start is not None else ():
        yield "unsupported", problem.what, problem.fix


def _verdict(proof: Proof | None) -> str:
    """Return the verdict of a proof that is not exact."""
    return "leaks" if proof is not None and proof.verdict == "leaks" else "unsupported"
