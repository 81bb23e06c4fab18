"""Which backend serves the packed rows of a model: decided once, by measuring, and carried as a value.

`auto` takes the first of flash, segmented and per_document that is there and proves exact on the loaded model, and says
what each better one lacked. A backend that is asked for by name is never replaced: it is exact, or the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from packtrain.attention import flash
from packtrain.attention.backends import PER_DOCUMENT, Backend
from packtrain.errors import CheckFailed, UserError
from packtrain.proof.isolation import PAIRS, Proof, check_as_it_comes, prove_isolation
from packtrain.proof.leak import find_leak

AUTO = ("flash", "segmented", PER_DOCUMENT)


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend, its proof (None where it was not asked for), and what each better candidate lacked, best first.

    `unshared` is what keeps it from computing the prompt of a preference pair once, "" where nothing does, None where
    that was not looked at.
    """

    backend: Backend
    proof: Proof | None
    lacking: tuple[tuple[str, str], ...] = ()
    unshared: str | None = None


def decide(
    wanted: str,
    model: PreTrainedModel,
    device: torch.device,
    *,
    autocast: torch.dtype | None = None,
    prove: bool = True,
    pairs: bool = False,
) -> Decision:
    """The backend for packed rows of `model` on `device`; `wanted` is model.attention, `autocast` what training computes in.

    With `pairs` it is also found out whether preference pairs can share their prompt, by the same proof where they can.
    `auto` always proves, since that is how it decides; without `prove` a named backend is taken as it is. Raises UserError
    where a named backend is not available here, CheckFailed where it is not exact or nothing is.
    """
    if wanted != "auto":
        if lack := _unavailable(wanted, model, device, autocast):
            raise UserError(
                f"{wanted} attention is not available: {lack}", where="model.attention", fix="set it to auto"
            )
        if not prove:
            return Decision(Backend(wanted, "asked for"), None)
        lack, proof, unshared = _examine_both(wanted, model, device, autocast, pairs=pairs)
        if lack:
            raise CheckFailed(lack, fix="set model.attention=auto")
        return Decision(Backend(wanted, "asked for"), proof, unshared=unshared)
    lacking: list[tuple[str, str]] = []
    for name in AUTO:
        lack, proof, unshared = _examine_both(name, model, device, autocast, pairs=pairs)
        if proof is not None and not lack:
            why = (
                "; ".join(f"no {other}: {what}" for other, what in lacking)
                or flash.available(model, device, autocast)[1]
            )
            return Decision(Backend(name, why), proof, tuple(lacking), unshared)
        lacking.append((name, lack))
    raise CheckFailed(
        f"no way to run packed rows of {type(model).__name__} exactly: {lacking[-1][1]}",
        fix=_instead_of_rows(model, autocast),
    )


def examine(
    name: str, model: PreTrainedModel, device: torch.device, autocast: torch.dtype | None
) -> tuple[str, Proof | None]:
    """What the backend `name` lacks for this model ("" where it is exact), and its proof; None where it cannot run."""
    if lack := _unavailable(name, model, device, autocast):
        return lack, None
    try:
        proof = prove_isolation(model, name, autocast=_precision(name, autocast))
    except CheckFailed as refusal:
        return refusal.problems[0].what, None
    # documents that run apart are exact by construction, also in a model that shows too little of what it sees
    exact = proof.verdict == "exact" or (name == PER_DOCUMENT and proof.verdict != "leaks")
    return ("" if exact else _what_is_wrong(model, proof)), proof


def examine_pairs(name: str, model: PreTrainedModel, autocast: torch.dtype | None) -> tuple[str, Proof | None]:
    """As `examine`, of preference pairs whose prompt is computed once for both answers."""
    if name == PER_DOCUMENT:
        return f"{name} runs every document by itself", None
    try:
        proof = prove_isolation(model, name, autocast=_precision(name, autocast), segments=PAIRS)
    except CheckFailed as refusal:
        return refusal.problems[0].what, None
    off = max(proof.alone, proof.moved_before, proof.moved_after)
    return ("" if proof.verdict == "exact" else f"pairs are off by {off:.2g} (tolerance {proof.tolerance:.1g})"), proof


def _examine_both(
    name: str, model: PreTrainedModel, device: torch.device, autocast: torch.dtype | None, *, pairs: bool
) -> tuple[str, Proof | None, str | None]:
    """As `examine`, and, with `pairs`, as `examine_pairs`: a row of pairs, which has a document in it, proves both at once."""
    unshared = None
    if pairs and not _unavailable(name, model, device, autocast):
        unshared, proof = examine_pairs(name, model, autocast)
        if not unshared:
            return "", proof, ""
    return (*examine(name, model, device, autocast), unshared)


def _unavailable(name: str, model: PreTrainedModel, device: torch.device, autocast: torch.dtype | None) -> str:
    """Why the backend cannot run here at all; "" where it can."""
    if name != "flash":
        return ""
    kernel, line = flash.available(model, device, autocast)
    return "" if kernel else line


def _precision(name: str, autocast: torch.dtype | None) -> torch.dtype | None:
    """What the proof computes in: float32 where it can, see isolation.py."""
    return autocast if name == "flash" else None


def _instead_of_rows(model: PreTrainedModel, autocast: torch.dtype | None) -> str:
    """What to do where nothing runs packed rows: padding, unless that is not exact either."""
    try:
        check_as_it_comes(model, padding=True, autocast=autocast)
    except CheckFailed as refusal:
        return f"take another model: {refusal.problems[0].what}"
    return "set packing.mode=padding"


def _what_is_wrong(model: PreTrainedModel, proof: Proof) -> str:
    """A proof that did not come out exact, in words: how far off, and where."""
    name = type(model).__name__
    if proof.verdict == "unsupported":
        return f"isolation cannot be shown: without it {name} moves by {proof.control:.2g} only (tolerance {proof.tolerance:.1g})"
    if max(proof.moved_before, proof.moved_after) <= proof.tolerance:
        return (
            f"documents come out otherwise than alone, off by {proof.alone:.2g} (tolerance {proof.tolerance:.1g}): nothing "
            "passes between them, so its positions count on along the row, or its attention needs a mask"
        )
    off = max(proof.alone, proof.moved_before, proof.moved_after)
    leak = find_leak(model, proof.backend)
    where = f": {leak.sentence()}" if leak else ""
    return f"documents are not kept apart, off by {off:.2g} (tolerance {proof.tolerance:.1g}){where}"
