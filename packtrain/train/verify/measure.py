"""`packtrain verify`: the proof on the loaded model that its packed rows are exact, as a report.

Every process loads the model as training would and measures (1) isolation and (2) equality with each document alone
(proof/isolation.py), (3) loss and gradients of the three modes with the loss of the objective (modes.py), and of preference
pairs (4) the first loss against the reference of the config (objectives/first_loss.py). A sharded model is proved as it is
sharded, by all processes together; under ZeRO-3, whose weights have no gradients before there is an optimizer, (3) and (4) run on a whole
model in each process. The main process writes the worst report into the run folder. All documents are random tokens.

Verdicts: `exact`; `leaks`: something differs by more than rounding; `unsupported`: packed rows cannot run, or the positive
controls are too weak to show a leak, or the first loss is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import PER_DOCUMENT
from packtrain.config.schema import RunConfig
from packtrain.errors import CheckFailed, Disagreement
from packtrain.model.forward import Head, add_loss_sum, choose_head
from packtrain.model.load import base_model
from packtrain.model.score_head import outputs_of_tokens
from packtrain.model.spread import Ranks, loading_whole
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import collate_padded, on_device
from packtrain.proof.choice import choose_attention, prove_backend, prove_pairs
from packtrain.proof.isolation import Proof, check_as_it_comes, least_control
from packtrain.proof.leak import Leak, find_leak
from packtrain.run_folder import RunFolder, write_json
from packtrain.train.objectives.dpo import DPO
from packtrain.train.objectives.first_loss import Start
from packtrain.train.objectives.kto import KTO
from packtrain.train.objectives.reward import Reward
from packtrain.train.preflight import why_not_together
from packtrain.train.preparation import Prepared, begin, load, settle_precision, spread_model
from packtrain.train.sync.checks import Peers
from packtrain.train.verify.command import finite
from packtrain.train.verify.modes import (
    MODES,
    SHARED,
    Comparison,
    compare_documents,
    compare_examples,
    loss_on_random_pairs,
    random_documents,
    start_on_random_pairs,
)
from packtrain.wording import first_line

_BADNESS = ("exact", "unsupported", "leaks")
_REPORT = "please report this model"


@dataclass(frozen=True, slots=True)
class Isolation:
    """The backend of packed rows (None: none works) and why it was chosen, the rejected candidates, and its proof.

    `problem` is "" if it is exact; `leak` is the module that mixes documents, if any, and `fix` what to set instead.
    """

    backend: str | None
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    proof: Proof | None = None
    problem: str = ""
    leak: Leak | None = None
    fix: str = ""

    @property
    def verdict(self) -> str:
        """The verdict if there is a problem."""
        return "leaks" if self.proof is not None and self.proof.verdict == "leaks" else "unsupported"


def verify(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Proves, writes the report, and returns the exit code: 0 if the verdict is exact on every process, else 3.

    Raises UserError if something cannot be loaded or is not available, CheckFailed if the proof cannot run.
    """
    outcome: Any
    try:
        outcome = _measure(config, ranks, peers)
    except Disagreement:  # on all processes
        raise
    except CheckFailed as refusal:
        outcome = refusal
    except torch.OutOfMemoryError as error:
        outcome = CheckFailed(
            f"out of memory on {ranks.device}: {first_line(error)}",
            fix="the proof takes the weights and the trained gradients twice, training more: set peft=lora, or "
            "model.dtype=bfloat16",
        )
    with waiting("the reports of all ranks"):
        outcomes = cast(list[Any], gather_object([outcome]))
    for one in outcomes:
        if isinstance(one, CheckFailed):
            raise one
    worst = max(outcomes, key=lambda one: _BADNESS.index(one["verdict"]))
    if ranks.main:
        write_json(RunFolder.of(config.trainer).verification, finite(worst))
    return 0 if worst["verdict"] == "exact" else CheckFailed.exit_code


def _measure(config: RunConfig, ranks: Ranks, peers: Peers | None) -> dict[str, Any]:
    """The report, in plain values."""
    started, share = time.perf_counter(), config.packing.share_prefix
    run = _load(begin(config, ranks, peers))
    base, autocast = base_model(run.model), run.precision.autocast
    with outputs_of_tokens(base):
        isolation = isolation_of(config, ranks, base, autocast)
        packs = config.packing.mode != "padding" and isolation.backend is not None and not isolation.problem
        pairs = None
        if config.objective.traits.pairs and share is not False and packs:
            # if not exact, training computes the prompt for each answer, unless packing.share_prefix=true
            lack, proof = prove_pairs(cast(str, isolation.backend), base, autocast)
            pairs = Isolation(isolation.backend, "", proof=proof, problem=lack, fix="set packing.share_prefix=false")
    run.close_proofs()
    if ranks.gathers_by_engine:  # agreed on before
        run = _load(replace(run, ranks=replace(ranks, strategy="ddp"), peers=None))
    shares = pairs is not None and not pairs.problem
    head, comparison, start = _modes(run, isolation.backend, shares=shares)
    findings = _findings(isolation, comparison, pairs if share else None, start)
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
        "modes_on": "spread" if ranks.sharded and not ranks.gathers_by_engine else "whole",
        "rank": ranks.rank,
        "head": "score" if config.objective.traits.scores else "fused" if head.fused else "full logits",
        "backend": isolation.backend,
        "why": isolation.why,
        "lacking": [{"backend": name, "why": why} for name, why in isolation.rejected],
        "verdict": verdict,
        "problem": problem,
        "where": asdict(isolation.leak) if isolation.leak else None,
        "fix": fix,
        "controls_see": comparison.sees and (isolation.proof is None or isolation.proof.verdict != "unsupported"),
        "isolation": _figures_of(isolation.proof),
        "objective": config.objective.kind,
        "pairs": pairs and {**_figures_of(pairs.proof), "prompts_shared": not pairs.problem, "why": pairs.problem},
        "start": start and asdict(start),
        "modes": {mode: measured[mode] for mode in MODES},
        "prefix_shared": measured.get(SHARED),
        "reference": {"loss": comparison.reference, "documents": list(comparison.lengths)},
        "control": asdict(comparison.control),
        "tolerances": {
            "loss": comparison.loss_tolerance,
            "grad_rel_diff": comparison.grad_tolerance,
            "control": comparison.least_control,
        },
        "seconds": round(time.perf_counter() - started, 1),
    }


def _load(run: Prepared) -> Prepared:
    """The model as training loads and spreads it, with its reference."""
    with loading_whole():  # a second time after ZeRO-3
        load(run)
        settle_precision(run)
    spread_model(run)
    return run


def _modes(run: Prepared, backend: str | None, *, shares: bool) -> tuple[Head, Comparison, Start | None]:
    """The output head that ran, the modes with the loss of the objective, and the Start of preference training."""
    objective, held = run.config.objective, run.objective
    if not isinstance(held, DPO | KTO | Reward):
        base, pad, autocast = base_model(run.model), int(run.tokenizer.pad_token_id or 0), run.precision.autocast
        kind = objective.token_loss
        add_fused_lm_head(base)
        head = add_loss_sum(base, loss=kind, neftune_alpha=objective.option("neftune_noise_alpha"))
        probe = collate_padded(random_documents(base)[-1:], pad)
        choose_head(base, head, on_device(probe, base.device), autocast=autocast)
        return head, compare_documents(run.model, backend, pad_token_id=pad, loss=kind, autocast=autocast), None
    loss, steps = loss_on_random_pairs(held, run.model, run.tokenizer, run.precision, run.config.trainer)
    start = None
    if not isinstance(held, Reward) and held.reference.at_start:
        padded = backend is None or run.config.packing.mode == "padding"
        layout = "padding" if padded else "shared" if shares else "flat"
        start = start_on_random_pairs(loss, steps, backend, layout, precomputed=held.reference.kind == "precomputed")
    split = isinstance(held, KTO) or not objective.sorting_losses
    return Head(objective.token_loss), compare_examples(loss, steps, backend, shares=shares, split=split), start


def isolation_of(config: RunConfig, ranks: Ranks, model: PreTrainedModel, autocast: torch.dtype | None) -> Isolation:
    """Chooses the backend as training does, but keeps all measurements of a named backend that is not exact."""
    wanted, proof = config.model.attention, None
    try:
        check_as_it_comes(model, padding=False, autocast=autocast)
        choice = choose_attention(wanted, model, model.device, autocast=autocast, prove=wanted == "auto")
        if wanted != "auto":
            lack, proof = prove_backend(wanted, model, autocast)
            if lack:
                leak = find_leak(model, wanted) if proof is not None and proof.verdict == "leaks" else None
                fix = "set model.attention=auto: it takes per_document where nothing faster is exact"
                return Isolation(wanted, "asked for", proof=proof, problem=lack, leak=leak, fix=fix)
    except CheckFailed as refusal:
        problem = refusal.problems[0]
        return Isolation(None, problem.what, problem=problem.what, fix=problem.fix)
    isolation = Isolation(choice.backend.name, choice.backend.why, choice.rejected, proof or choice.proof)
    problem = why_not_together(ranks, choice.backend.name, model) if config.packing.mode != "padding" else None
    return replace(isolation, problem=problem.what, fix=problem.fix) if problem else isolation


def _findings(
    isolation: Isolation, comparison: Comparison, pairs: Isolation | None, start: Start | None
) -> Iterator[tuple[str, str, str]]:
    """Verdict, problem and fix of each finding, the most important first; nothing if all is exact.

    `pairs` is given only with packing.share_prefix=true.
    """
    if isolation.problem:
        yield isolation.verdict, isolation.problem, isolation.fix
    exact = [mode for mode in ("padding", "packed", "padding_free") if mode not in comparison.off]
    for mode, figures in comparison.measured.items():
        if figures.problem:
            yield "unsupported", f"{mode}: {figures.problem}", _REPORT
        elif mode in comparison.off:
            what = (
                f"isolation is exact, but {mode} has loss {figures.loss:.6g} where the documents alone have "
                f"{comparison.reference:.6g}, and gradients off by {figures.grad_rel_diff:.2g} "
                f"(tolerance {comparison.grad_tolerance:.2g})"
            )
            fix = f"set packing.mode={exact[0]}, and {_REPORT}" if exact else _REPORT
            yield "unsupported" if mode == "padding" else "leaks", what, fix
    if not comparison.sees and isolation.backend != PER_DOCUMENT:  # which is exact by construction
        cause = f"the control changes gradients by only {comparison.control.grad_rel_diff or 0.0:.2g}"
        what = f"inconclusive, since a row without borders may look exact: {comparison.control.problem or cause}"
        yield "unsupported", what, "look at the model's weights"
    if pairs is not None and pairs.problem:
        yield pairs.verdict, f"prompts cannot be shared: {pairs.problem}", pairs.fix
    if start is not None and start.problems:
        fixes = "; ".join(one.fix for one in start.problems if one.fix)
        yield "unsupported", "; ".join(one.what for one in start.problems), fixes


def _figures_of(proof: Proof | None) -> dict[str, float | None]:
    """The largest difference of any output, relative to the largest output."""
    names = {"before": "moved_before", "after": "moved_after", "alone": "alone"}
    figures = {f"max_abs_diff_{what}": getattr(proof, name, None) for what, name in names.items()}
    least = proof and least_control(max(proof.moved_before, proof.moved_after), proof.tolerance)
    figures |= {name: getattr(proof, name, None) for name in ("control", "tolerance")}
    return {**figures, "least_control": least}
