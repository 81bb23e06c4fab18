"""`packtrain verify`: the proof on the loaded model that its packed rows are exact, as a report.

Every process loads the model as training would and measures (1) isolation and (2) equality with each document alone
(attention/isolation.py), (3) loss and gradients of the three modes (modes.py). The main process writes the report of the
process with the worst verdict into the folder that it is given, for the command line to show (verify_view.py). Data is not
looked at: the documents are random tokens.

Verdicts: `exact`; `leaks`, something differs by more than rounding; `unsupported`, packed rows cannot be run, or the
positive controls say that a leak would not have shown. Documents that run one at a time (per_document) need no control.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import PER_DOCUMENT
from packtrain.attention.choice import decide, examine, examine_pairs
from packtrain.attention.isolation import Proof, check_as_it_comes
from packtrain.attention.leak import Leak, find_leak
from packtrain.config.schema import RunConfig
from packtrain.errors import CheckFailed
from packtrain.packing.collate import collate_padded
from packtrain.run_folder import RunFolder, write_json
from packtrain.train.forward import Head, add_loss_sum
from packtrain.train.model import base_model, load_model, load_tokenizer
from packtrain.train.modes import Comparison, compare_modes, on_device, random_documents
from packtrain.train.preflight import autocast_of, fit_head

if TYPE_CHECKING:
    from packtrain.train.run import Process

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


def verify(config: RunConfig, process: Process) -> int:
    """Proves, writes the report, and returns the exit code: 0 where the verdict is exact on every process, else 3.

    Raises UserError for what cannot be loaded or is not available, CheckFailed where the proof cannot be made.
    """
    try:
        outcome: Any = _report(config, process)
    except CheckFailed as refusal:
        outcome = refusal
    outcomes = cast(list[Any], gather_object([outcome]))
    for rank, one in enumerate(outcomes):
        if isinstance(one, CheckFailed):
            raise one if len(outcomes) == 1 else CheckFailed([replace(p, where=f"rank {rank}") for p in one.problems])
    report = worst_of(outcomes)
    if process.main:
        write_json(RunFolder.of(config).verification, _finite(report))
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


def _report(config: RunConfig, process: Process) -> dict[str, Any]:
    """What this process measures. Raises CheckFailed also where its memory does not suffice."""
    started = time.perf_counter()
    try:
        model, head, pad_token_id = _load(config, process.device)
        isolation = _isolation(config, base_model(model))
        pairs = _pairs(config, base_model(model), isolation)
        probe = collate_padded(random_documents(model)[-1:], pad_token_id)
        fit_head(config, base_model(model), head, on_device(probe, base_model(model).device))
        comparison = compare_modes(
            model,
            isolation.backend,
            pad_token_id=pad_token_id,
            loss=config.objective.loss,
            autocast=autocast_of(config),
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CheckFailed(
            f"out of memory on {process.device}: {str(error).splitlines()[0]}",
            fix="the proof takes the weights and the trained gradients twice, training more: set peft=lora, or "
            "model.dtype=bfloat16",
        ) from error
    verdict, problem, fix = judge(isolation, comparison)
    if verdict == "exact" and pairs is not None and pairs.problem and config.packing.share_prefix:
        verdict = "leaks" if pairs.proof is not None and pairs.proof.verdict == "leaks" else "unsupported"
        problem, fix = f"prompts cannot be shared: {pairs.problem}", pairs.fix
    base = base_model(model)
    return {
        "model": config.model.path or f"new weights ({base.config.model_type})",
        "architecture": type(base).__name__,
        "dtype": str(base.dtype).removeprefix("torch."),
        "mixed_precision": config.trainer.mixed_precision,
        "peft": config.peft.kind,
        "device": str(process.device),
        "processes": process.world_size,
        "rank": process.rank,
        "head": "fused" if head.fused else "full logits",
        "backend": isolation.backend,
        "why": isolation.why,
        "lacking": [{"backend": name, "why": why} for name, why in isolation.lacking],
        "verdict": verdict,
        "problem": problem,
        "where": asdict(isolation.leak) if isolation.leak else None,
        "fix": fix,
        "controls_see": comparison.sees and (isolation.proof is None or isolation.proof.verdict != "unsupported"),
        "isolation": _figures_of(isolation.proof),
        "pairs": pairs and {**_figures_of(pairs.proof), "prompts_shared": not pairs.problem, "why": pairs.problem},
        **_figures_of_modes(comparison),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _load(config: RunConfig, device: torch.device) -> tuple[PreTrainedModel, Head, int]:
    """The model as training has it when its proofs run, its output head, and the id that padded batches are filled with."""
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
    add_fused_lm_head(base_model(model))
    head = add_loss_sum(base_model(model), loss=config.objective.loss, neftune_alpha=config.objective.neftune_alpha)
    return cast(Any, model).to(device), head, int(cast(Any, tokenizer.pad_token_id) or 0)


def _isolation(config: RunConfig, model: PreTrainedModel) -> Isolation:
    """Decides on the backend as training does, but a named one that is not exact is told of with all that was measured."""
    wanted, autocast = config.model.attention, autocast_of(config)
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
        return Isolation(decision.backend.name, decision.backend.why, decision.lacking, decision.proof)
    decide(wanted, model, model.device, autocast=autocast, prove=False)  # refuses what is not there
    lack, proof = examine(wanted, model, model.device, autocast)
    if not lack:
        return Isolation(wanted, "asked for", proof=proof)
    leak = find_leak(model, wanted) if proof is not None and proof.verdict == "leaks" else None
    fix = _instead(model, autocast)
    return Isolation(wanted, "asked for", proof=proof, problem=lack, leak=leak, fix=fix)


def _pairs(config: RunConfig, model: PreTrainedModel, isolation: Isolation) -> Isolation | None:
    """The proof of preference pairs that share their prompt, where this run would have them do so; else None.

    Where it is not exact, training computes a prompt for each answer, unless packing.share_prefix insists.
    """
    dpo = config.objective.kind == "dpo" and config.packing.mode != "padding"
    if not dpo or config.packing.share_prefix is False or isolation.backend is None or isolation.problem:
        return None
    lack, proof = examine_pairs(isolation.backend, model, autocast_of(config))
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


def judge(isolation: Isolation, comparison: Comparison) -> tuple[str, str, str]:
    """Verdict, what is wrong ("" where nothing is), and what to do about it."""
    proof = isolation.proof
    if isolation.problem:
        leaks = proof is not None and proof.verdict == "leaks"
        return ("leaks" if leaks else "unsupported"), isolation.problem, isolation.fix
    if comparison.off:
        return _judge_off(comparison)
    for mode, figures in comparison.modes.items():
        if figures.problem:
            return "unsupported", f"{mode}: {figures.problem}", "please report this model"
    if not comparison.sees and isolation.backend != PER_DOCUMENT:  # which is exact by construction
        moved = comparison.control.problem or f"moves gradients by {comparison.control.grad_rel_diff:.2g} only"
        return "unsupported", f"the proof cannot see: a row without borders {moved}", "look at the model's weights"
    return "exact", "", ""


def _judge_off(comparison: Comparison) -> tuple[str, str, str]:
    """As `judge`, where documents are kept apart and yet a mode differs from them alone."""
    mode = comparison.off[0]
    figures = comparison.modes[mode]
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
