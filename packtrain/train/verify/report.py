"""`packtrain verify`: the proof on the loaded model that its packed rows are exact, as a report.

Every process loads the model as training would and measures (1) isolation and (2) equality with each document alone
(attention/isolation.py), once more in a row that is longer than the proof's, and (3) loss and gradients of the three modes,
those of the objective (modes.py, pair_modes.py); of preference pairs (4) also the first loss, against the reference of the
config (pair_start.py). Where the strategy spreads weights over processes the model is proved as it
is spread, by all of them together; (3) and (4) are measured on a whole model in each under ZeRO-3, whose weights have no
gradients before there is an optimizer. The main process writes the report of the process with the worst verdict
into the folder that it is given, for the command line to show (verify/command.py). Data is not looked at: the documents
are random tokens.

Verdicts: `exact`; `leaks`, something differs by more than rounding; `unsupported`, packed rows cannot be run, or the
positive controls say that a leak would not have shown, or the first loss is not what it must be. Documents that run one at a time (per_document) need no control.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import PER_DOCUMENT
from packtrain.config.schema import SHARDED_WEIGHTS, RunConfig, Strategy
from packtrain.errors import CheckFailed, Disagreement
from packtrain.model.forward import Head, add_loss_sum
from packtrain.model.load import base_model, load_model, load_tokenizer
from packtrain.model.precision import autocast_of
from packtrain.model.spread import Ranks, loading_whole, open_proofs, spread
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import collate_padded, on_device
from packtrain.proof.choice import decide, examine, examine_pairs
from packtrain.proof.isolation import LongRow, Proof, check_as_it_comes, try_long_row
from packtrain.proof.leak import Leak, find_leak
from packtrain.run_folder import RunFolder, write_json
from packtrain.train.console import without_future_warnings
from packtrain.train.dpo_start import Start
from packtrain.train.preflight import check_together, fit_head
from packtrain.train.sync.checks import agree_on_model
from packtrain.train.sync.store import preparing_s
from packtrain.train.verify.modes import Comparison, compare_modes, random_documents
from packtrain.train.verify.pair_modes import compare_pair_modes
from packtrain.train.verify.pair_start import prove_start, trainer_at_start

if TYPE_CHECKING:
    from packtrain.train.sync.store import Peers

_BADNESS = ("exact", "unsupported", "leaks")
PADDING_ONLY = "set packing.mode=padding"


@dataclass(frozen=True, slots=True)
class Isolation:
    """The backend that serves packed rows (None: nothing does) and why, what better candidates lacked, and its proof.

    `problem` is "" where it is exact; `leak` is where documents meet, if they do, and `fix` what to set instead.
    """

    backend: str | None
    why: str
    lacking: tuple[tuple[str, str], ...] = ()
    proof: Proof | None = None
    problem: str = ""
    leak: Leak | None = None
    fix: str = ""


def verify(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Proves, writes the report, and returns the exit code: 0 where the verdict is exact on every process, else 3.

    Raises UserError for what cannot be loaded or is not available, CheckFailed where the proof cannot be made.
    """
    try:
        with without_future_warnings():
            outcome: Any = _report(config, ranks, peers)
    except Disagreement:
        raise
    except CheckFailed as refusal:
        outcome = refusal
    with waiting("the reports of all ranks"):
        outcomes = cast(list[Any], gather_object([outcome]))
    for rank, one in enumerate(outcomes):
        if isinstance(one, CheckFailed):
            raise one if len(outcomes) == 1 else CheckFailed([replace(p, where=f"rank {rank}") for p in one.problems])
    report = worst_of(outcomes)
    if ranks.main:
        write_json(RunFolder.of(config.trainer).verification, _finite(report))
    return 0 if report["verdict"] == "exact" else CheckFailed.exit_code


def worst_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of the process, by rank, with the worst verdict; processes that differ in their backend are not exact."""
    worst = max(reports, key=lambda one: _BADNESS.index(one["verdict"]))
    if worst["verdict"] == "exact" and len({one["backend"] for one in reports}) > 1:
        ranks = ", ".join(f"rank {one['rank']}: {one['backend']}" for one in reports)
        return {
            **worst,
            "verdict": "unsupported",
            "problem": f"the processes would not use the same attention ({ranks})",
            "fix": "install the same packages everywhere, or name one backend in model.attention",
        }
    return worst


@dataclass(frozen=True, slots=True)
class _Found:
    """What was measured. `whole`: modes and start on a model that is not spread, though training spreads it."""

    isolation: Isolation
    long_row: LongRow | None
    pairs: Isolation | None
    head: Head
    comparison: Comparison
    start: Start | None
    whole: bool

    def judged(self, *, share_prefix: bool | None) -> tuple[str, str, str]:
        """Verdict, what is wrong, and what to do about it, as `judge` has it; of preference pairs too."""
        verdict, problem, fix = judge(self.isolation, self.comparison, self.long_row)
        if verdict != "exact":
            return verdict, problem, fix
        if (pairs := self.pairs) is not None and pairs.problem and share_prefix:
            leaks = pairs.proof is not None and pairs.proof.verdict == "leaks"
            return "leaks" if leaks else "unsupported", f"prompts cannot be shared: {pairs.problem}", pairs.fix
        if self.start is not None and self.start.problems:
            causes = self.start.problems
            return "unsupported", "; ".join(one.what for one in causes), "; ".join(one.fix for one in causes if one.fix)
        return verdict, problem, fix


def _report(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> dict[str, Any]:
    """What this process measures. Raises CheckFailed also where its memory does not suffice."""
    started = time.perf_counter()
    try:
        model, found = _measure(config, ranks, peers)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CheckFailed(
            f"out of memory on {ranks.device}: {str(error).splitlines()[0]}",
            fix="the proof takes the weights and the trained gradients twice, training more: set peft=lora, or "
            "model.dtype=bfloat16",
        ) from error
    return {**_told(config, ranks, base_model(model), found), "seconds": round(time.perf_counter() - started, 1)}


def _measure(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> tuple[PreTrainedModel, _Found]:
    model, tokenizer = _load(config, ranks, peers)
    close_proofs = open_proofs(model, ranks)
    isolation = _isolation(config, base_model(model))
    long_row = _long_row(config, base_model(model), isolation)
    pairs = _pairs(config, base_model(model), isolation)
    close_proofs()
    if whole := ranks.gathers_by_engine:
        model, _ = _load(config, ranks, whole=True)
        config = replace(config, strategy=Strategy())
    head, comparison, start = _modes(config, model, tokenizer, isolation.backend, pairs)
    return model, _Found(isolation, long_row, pairs, head, comparison, start, whole)


def _told(config: RunConfig, ranks: Ranks, base: PreTrainedModel, found: _Found) -> dict[str, Any]:
    """The report, in plain values."""
    isolation, pairs, comparison = found.isolation, found.pairs, found.comparison
    verdict, problem, fix = found.judged(share_prefix=config.packing.share_prefix)
    return {
        "model": config.model.path or f"new weights ({base.config.model_type})",
        "architecture": type(base).__name__,
        "dtype": str(base.dtype).removeprefix("torch."),
        "mixed_precision": config.trainer.mixed_precision,
        "peft": config.peft.kind,
        "device": str(ranks.device),
        "processes": ranks.world_size,
        "strategy": config.strategy.name,
        "modes_on": "whole" if found.whole or config.strategy.name not in SHARDED_WEIGHTS else "spread",
        "rank": ranks.rank,
        "head": "fused" if found.head.fused else "full logits",
        "backend": isolation.backend,
        "why": isolation.why,
        "lacking": [{"backend": name, "why": why} for name, why in isolation.lacking],
        "verdict": verdict,
        "problem": problem,
        "where": asdict(isolation.leak) if isolation.leak else None,
        "fix": fix,
        "controls_see": comparison.sees and (isolation.proof is None or isolation.proof.verdict != "unsupported"),
        "isolation": _figures_of(isolation.proof),
        "long_row": found.long_row and asdict(found.long_row),
        "objective": config.objective.kind,
        "pairs": pairs and {**_figures_of(pairs.proof), "prompts_shared": not pairs.problem, "why": pairs.problem},
        "start": found.start and asdict(found.start),
        **_figures_of_modes(comparison),
    }


def _load(
    config: RunConfig, ranks: Ranks, peers: Peers | None = None, *, whole: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model as training has it when its proofs run, spread over the processes as the strategy has it, or `whole` in each;
    and its tokenizer."""
    tokenizer = load_tokenizer(config.model)
    with loading_whole():
        model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
    if not whole:
        agree_on_model(peers, model, timeout_s=preparing_s(config.topology.step_timeout))
    spread(model, replace(ranks, strategy="ddp") if whole else ranks)
    return model, tokenizer


def _modes(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    backend: str | None,
    pairs: Isolation | None,
) -> tuple[Head, Comparison, Start | None]:
    """The modes with the loss of the objective, the output head that they run, and where preference training starts."""
    base, objective = base_model(model), config.objective
    if objective.kind == "dpo":
        shares = pairs is not None and not pairs.problem
        trainer = trainer_at_start(config, model, tokenizer)
        start = prove_start(config, trainer, backend, shares=shares)
        return Head(objective.loss), compare_pair_modes(config, trainer, backend, shares=shares), start
    add_fused_lm_head(base)
    head = add_loss_sum(base, loss=objective.loss, neftune_alpha=objective.neftune_alpha)
    pad_token_id = int(cast(Any, tokenizer.pad_token_id) or 0)
    probe = collate_padded(random_documents(model)[-1:], pad_token_id)
    fit_head(base, head, on_device(probe, base.device), autocast_of(config.trainer.mixed_precision))
    comparison = compare_modes(
        model,
        backend,
        pad_token_id=pad_token_id,
        loss=objective.loss,
        autocast=autocast_of(config.trainer.mixed_precision),
    )
    return head, comparison, None


def _long_row(config: RunConfig, model: PreTrainedModel, isolation: Isolation) -> LongRow | None:
    """A row longer than the proof's where documents are flattened exactly, as far as the proof can tell; else None."""
    if isolation.backend in (None, PER_DOCUMENT) or isolation.problem:
        return None
    try:
        return try_long_row(model, cast(str, isolation.backend), autocast=autocast_of(config.trainer.mixed_precision))
    except CheckFailed as refusal:
        raise CheckFailed(refusal.problems[0].what, fix="set model.attention=per_document") from refusal


def _isolation(config: RunConfig, model: PreTrainedModel) -> Isolation:
    """Decides on the backend as training does, but a named one that is not exact is told of with all that was measured."""
    wanted, autocast = config.model.attention, autocast_of(config.trainer.mixed_precision)
    try:
        check_as_it_comes(model, padding=False, autocast=autocast)
    except CheckFailed as refusal:
        problem = refusal.problems[0]
        return Isolation(None, problem.what, problem=problem.what, fix=problem.fix)
    if wanted == "auto":
        try:
            decision = decide(wanted, model, model.device, autocast=autocast)
        except CheckFailed as refusal:
            problem = refusal.problems[0]
            return Isolation(None, problem.what, problem=problem.what, fix=problem.fix)
        found = Isolation(decision.backend.name, decision.backend.why, decision.lacking, decision.proof)
        return _called_together(config, model, found)
    decide(wanted, model, model.device, autocast=autocast, prove=False)  # refuses what is not there
    lack, proof = examine(wanted, model, model.device, autocast)
    if not lack:
        return _called_together(config, model, Isolation(wanted, "asked for", proof=proof))
    leak = find_leak(model, wanted) if proof is not None and proof.verdict == "leaks" else None
    fix = _instead(model, autocast)
    return Isolation(wanted, "asked for", proof=proof, problem=lack, leak=leak, fix=fix)


def _called_together(config: RunConfig, model: PreTrainedModel, found: Isolation) -> Isolation:
    """`found`, with the reason why training would refuse it where processes would call the model a different number of times."""
    if config.packing.mode == "padding":
        return found
    try:
        check_together(config.strategy.name, cast(str, found.backend), model)
    except CheckFailed as refusal:
        problem = refusal.problems[0]
        return replace(found, problem=problem.what, fix=problem.fix)
    return found


def _pairs(config: RunConfig, model: PreTrainedModel, isolation: Isolation) -> Isolation | None:
    """The proof of preference pairs that share their prompt, where this run would have them do so; else None.

    Where it is not exact, training computes a prompt for each answer, unless packing.share_prefix insists.
    """
    dpo = config.objective.kind == "dpo" and config.packing.mode != "padding"
    if not dpo or config.packing.share_prefix is False or isolation.backend is None or isolation.problem:
        return None
    lack, proof = examine_pairs(isolation.backend, model, autocast_of(config.trainer.mixed_precision))
    return Isolation(
        isolation.backend, "", proof=proof, problem=lack, fix="set packing.share_prefix=false" if lack else ""
    )


def _instead(model: PreTrainedModel, autocast: torch.dtype | None) -> str:
    """What to set in place of a backend that is not exact."""
    try:
        return (
            f"set model.attention=auto (it takes {decide('auto', model, model.device, autocast=autocast).backend.name})"
        )
    except CheckFailed:
        return PADDING_ONLY


def judge(isolation: Isolation, comparison: Comparison, long_row: LongRow | None = None) -> tuple[str, str, str]:
    """Verdict, what is wrong ("" where nothing is), and what to do about it."""
    proof = isolation.proof
    if isolation.problem:
        leaks = proof is not None and proof.verdict == "leaks"
        return ("leaks" if leaks else "unsupported"), isolation.problem, isolation.fix
    if long_row is not None and not long_row.exact:
        what = f"documents of {', '.join(map(str, long_row.documents))} tokens in a row are off by {long_row.off:.2g}"
        fix = "set model.attention=per_document, and please report this model"
        return "leaks", f"{what} (tolerance {long_row.tolerance:.1g}), shorter ones are exact", fix
    if comparison.off:
        return _judge_off(comparison)
    for mode, figures in comparison.measured.items():
        if figures.problem:
            return "unsupported", f"{mode}: {figures.problem}", "please report this model"
    if not comparison.sees and isolation.backend != PER_DOCUMENT:  # which is exact by construction
        moved = comparison.control.problem or f"moves gradients by {comparison.control.grad_rel_diff:.2g} only"
        return "unsupported", f"the proof cannot see: a row without borders {moved}", "look at the model's weights"
    return "exact", "", ""


def _judge_off(comparison: Comparison) -> tuple[str, str, str]:
    """As `judge`, where documents are kept apart and yet a mode differs from them alone."""
    mode = comparison.off[0]
    figures = comparison.measured[mode]
    what = (
        f"isolation is exact, but {mode} has loss {figures.loss:.6g} where the documents alone have "
        f"{comparison.reference:.6g}, and gradients off by {figures.grad_rel_diff:.2g} "
        f"(tolerance {comparison.grad_tolerance:.2g})"
    )
    report = "please report this model"
    if mode != "padding":
        return "leaks", what, f"{PADDING_ONLY}, and {report}"
    others = [one for one in comparison.modes if one not in comparison.off]
    return "unsupported", what, f"set packing.mode={others[-1]}, and {report}" if others else report


def _figures_of(proof: Proof | None) -> dict[str, float | None]:
    """The largest difference of any output, relative to the largest output."""
    return {
        "max_abs_diff_before": proof.moved_before if proof else None,
        "max_abs_diff_after": proof.moved_after if proof else None,
        "max_abs_diff_alone": proof.alone if proof else None,
        "control": proof.control if proof else None,
        "tolerance": proof.tolerance if proof else None,
    }


def _figures_of_modes(comparison: Comparison) -> dict[str, Any]:
    return {
        "modes": {mode: asdict(figures) for mode, figures in comparison.modes.items()},
        "prefix_shared": comparison.shared and asdict(comparison.shared),
        "reference": {"loss": comparison.reference, "documents": list(comparison.lengths)},
        "control": asdict(comparison.control),
        "tolerances": {
            "loss": comparison.loss_tolerance,
            "grad_rel_diff": comparison.grad_tolerance,
            "control": comparison.least_control,
        },
    }


def _finite(value: Any) -> Any:
    """`value` with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
