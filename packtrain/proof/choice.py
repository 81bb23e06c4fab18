"""Chooses the backend for the packed rows of a model, once, by measuring.

`auto` takes the first of flash, segmented and per_document that is available and proves exact on the loaded model, and notes
why each better one was rejected. A backend set by name is never replaced: if it is not exact, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from packtrain.attention import flash
from packtrain.attention.backends import OWN_CODE, PER_DOCUMENT, Backend
from packtrain.attention.forwards import uses_attention_interface
from packtrain.errors import CheckFailed, UserError
from packtrain.proof.isolation import TREE, Proof, check_as_it_comes, prove_isolation
from packtrain.proof.leak import find_leak

AUTO = ("flash", "segmented", PER_DOCUMENT)
"""Best first."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend, its proof (None where it was not asked for), and why each better candidate was `rejected`, best first.

    `unshared`: None if sharing the prompt of a preference pair was not tried, "" if it proved exact, else why it cannot.
    """

    backend: Backend
    proof: Proof | None
    rejected: tuple[tuple[str, str], ...] = ()
    unshared: str | None = None


def choose_attention(
    wanted: str,
    model: PreTrainedModel,
    device: torch.device,
    *,
    autocast: torch.dtype | None = None,
    prove: bool = True,
    pairs: bool = False,
) -> AttentionChoice:
    """The backend for packed rows of `model` on `device`; `wanted` is model.attention, `autocast` what training computes in.

    With `pairs` it also tries to share the prompts of preference pairs: a row of pairs, which has a document in it, proves
    both at once. `auto` always proves, since that is how it chooses; without `prove` a named backend is taken as it
    is. Raises UserError where a named backend is not available, CheckFailed where it is not exact or nothing is.
    """
    rejected: list[tuple[str, str]] = []
    for name in AUTO if wanted == "auto" else (wanted,):
        why_not, proof, unshared = _why_unavailable(name, model, device, autocast), None, None
        if why_not and wanted != "auto":
            fix = "set it to auto"
            raise UserError(f"{name} attention is not available: {why_not}", where="model.attention", fix=fix)
        if not prove and wanted != "auto":
            return AttentionChoice(Backend(name, "asked for"), None)
        if pairs and not why_not:
            unshared, proof = prove_pairs(name, model, autocast)
        proved_with_pairs = unshared == ""  # the row of pairs has a document in it
        if not why_not and not proved_with_pairs:
            why_not, proof = prove_backend(name, model, autocast)
        if not why_not:
            why = "; ".join(f"no {other}: {lack}" for other, lack in rejected)
            why = why or (flash.available(model, device, autocast)[1] if wanted == "auto" else "asked for")
            return AttentionChoice(Backend(name, why), proof, tuple(rejected), unshared)
        rejected.append((name, why_not))
    if wanted != "auto":
        raise CheckFailed(rejected[0][1], fix="set model.attention=auto")
    raise CheckFailed(
        f"no way to run packed rows of {type(model).__name__} exactly: {rejected[-1][1]}",
        fix=_instead_of_rows(model, autocast),
    )


def prove_backend(name: str, model: PreTrainedModel, autocast: torch.dtype | None) -> tuple[str, Proof | None]:
    """Why the available backend `name` is not exact for this model ("" where it is), and its proof; None where it cannot run."""
    try:
        proof = prove_isolation(model, name, autocast=_precision(name, model, autocast))
    except CheckFailed as refusal:
        return refusal.problems[0].what, None
    # per_document is exact by construction, even if the positive control is too weak
    exact = proof.verdict == "exact" or (name == PER_DOCUMENT and proof.verdict != "leaks")
    return ("" if exact else _what_is_wrong(model, proof)), proof


def prove_pairs(name: str, model: PreTrainedModel, autocast: torch.dtype | None) -> tuple[str, Proof | None]:
    """As `prove_backend`, of preference pairs whose prompt is computed once for both answers."""
    if name == PER_DOCUMENT:
        return f"{name} runs every document by itself", None
    try:
        proof = prove_isolation(model, name, autocast=_precision(name, model, autocast), segments=TREE)
    except CheckFailed as refusal:
        return refusal.problems[0].what, None
    exact = proof.verdict == "exact"
    return ("" if exact else f"pairs are off by {proof.off:.2g} (tolerance {proof.tolerance:.1g})"), proof


def _why_unavailable(name: str, model: PreTrainedModel, device: torch.device, autocast: torch.dtype | None) -> str:
    """Why the backend cannot run here at all; "" if it can."""
    if name != PER_DOCUMENT and not uses_attention_interface(model):
        return OWN_CODE
    kernel, line = flash.available(model, device, autocast) if name == "flash" else (name, "")
    return "" if kernel else line


def _precision(name: str, model: PreTrainedModel, autocast: torch.dtype | None) -> torch.dtype | None:
    """The autocast format of the proof: none if kernel and weights take float32, see isolation.py. FSDP2's are gathered in 16 bits."""
    return autocast if name == "flash" or isinstance(model, FSDPModule) else None


def _instead_of_rows(model: PreTrainedModel, autocast: torch.dtype | None) -> str:
    """The fix if nothing runs packed rows: padding, unless that is not exact either."""
    try:
        check_as_it_comes(model, padding=True, autocast=autocast)
    except CheckFailed as refusal:
        return f"take another model: {refusal.problems[0].what}"
    return "set packing.mode=padding"


def _what_is_wrong(model: PreTrainedModel, proof: Proof) -> str:
    """One sentence: how far the proof is off, and in which module."""
    name, tolerance = type(model).__name__, f"(tolerance {proof.tolerance:.1g})"
    if proof.verdict == "unsupported":
        return f"isolation cannot be shown: without it {name} moves by {proof.control:.2g} only {tolerance}"
    if max(proof.moved_before, proof.moved_after) <= proof.tolerance:
        return (
            f"documents come out otherwise than alone, off by {proof.alone:.2g} {tolerance}: nothing passes between them, so "
            "its positions count on along the row, or its attention needs a mask"
        )
    leak = find_leak(model, proof.backend)
    where = f": {leak.sentence()}" if leak else ""
    return f"documents are not kept apart, off by {proof.off:.2g} {tolerance}{where}"
