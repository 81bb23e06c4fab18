"""Choose the backend for a model's packed rows, once, by measuring.

`auto` takes the first of its backends (attention/spec.py::tried_by_auto) that is available and proves exact on the loaded model,
and notes why each better one was rejected. A backend set by name is never replaced: if it is not exact, the run ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from packtrain.attention.backends import attention_by, serve
from packtrain.attention.spec import BACKENDS, Backend, tried_by_auto
from packtrain.errors import CheckFailed, Problem, UserError
from packtrain.packing.segments import Segments
from packtrain.proof.exhibits import Exhibits, prove_pictures
from packtrain.proof.isolation import DOCUMENTS, TREE, Leak, Proof, find_leak, prove_isolation


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Chosen backend, `why`, and its proof (None if not asked for). `rejected` has better candidates with reasons, best first.

    `kernel` is the kernel's name, or the modules that `mixers` runs per document; "" if there is neither. `detail`: how the backend runs
    this model, "" if there is nothing to add.
    `pictures` is the proof with documents that have some.
    `why_not_shared`: None if sharing the prompt of a preference pair was not tried, "" if it proved exact, else the reason.
    """

    backend: Backend
    why: str
    kernel: str
    proof: Proof | None
    rejected: tuple[tuple[str, str], ...] = ()
    why_not_shared: str | None = None
    detail: str = ""
    pictures: Proof | None = None


class NotExact(CheckFailed):
    """Error: the backend set by name is not exact. Has its `proof`, and the `leak` if a module mixes documents."""

    def __init__(self, reason: str | Sequence[Problem], proof: Proof | None = None, leak: Leak | None = None) -> None:
        super().__init__(reason, fix="set model.attention=auto", code="not-exact")
        self.proof, self.leak = proof, leak


def choose_attention(
    wanted: str,
    model: PreTrainedModel,
    device: torch.device,
    *,
    autocast: torch.dtype | None = None,
    prove: bool = True,
    pairs: bool = False,
    must_share: bool = False,
    exhibits: Exhibits | None = None,
) -> AttentionChoice:
    """Choose the backend for packed rows of `model` on `device`. `wanted` is model.attention, `autocast` the format of training.

    With `pairs` it also tries to share the prompts of preference pairs: the row TREE holds pairs and a document, and proves
    both at once. With `exhibits` documents with pictures are proved, too. With `must_share`, `auto` prefers an exact backend that shares over a faster one that does not. `auto`
    chooses by proofs, so it always proves; without `prove` a named backend is accepted unproved. Raises UserError if a
    named backend is not available, NotExact if it is not exact, CheckFailed if no backend works.
    """
    named, rejected, proof, leak = wanted != "auto", [], None, None
    unshared: AttentionChoice | None = None
    for backend in [BACKENDS[wanted]] if named else tried_by_auto():
        name, service = backend.name, serve(backend, model, device, autocast)
        reason, kernel = service.why, service.kernel
        if kernel is None and named:
            what, fix = f"{name} attention is not available: {reason}", "set it to auto"
            raise UserError(what, where="model.attention", fix=fix, code="attention-not-available")
        if kernel is not None and named and not prove:
            return AttentionChoice(backend, "asked for", kernel, None, detail=service.detail)
        if kernel is not None:
            why_not_shared, why = None, "asked for" if named else reason
            if pairs:
                why_not_shared, proof = prove_backend(name, model, autocast, TREE)
            if why_not_shared != "":
                reason, proof = prove_backend(name, model, autocast)
            fits, seen = why_not_shared == "" or not reason, None
            if fits and exhibits is not None:
                reason, seen = _prove_pictures(name, model, autocast, exhibits)
                fits, proof = not reason, seen if reason else proof
            if fits:
                why = "; ".join(f"no {other}: {lacking}" for other, lacking in rejected) or why
                choice = AttentionChoice(
                    backend, why, kernel, proof, tuple(rejected), why_not_shared, service.detail, seen
                )
                if named or not (must_share and why_not_shared):
                    return choice
                unshared, reason = unshared or choice, f"it cannot share prefixes: {why_not_shared}"
            elif proof is not None and proof.verdict == "leaks" and (leak := find_leak(model, name)):
                reason = f"{reason}: {leak.module}, a {leak.kind}, mixes them"
        rejected.append((name, reason))
    if unshared is not None:
        return unshared
    if named:
        raise NotExact(rejected[0][1], proof, leak)
    raise CheckFailed(
        f"no way to run packed rows of {type(model).__name__} exactly: {rejected[-1][1]}",
        fix="set packing.mode=padding, or, if no batch runs at all, see what model.config sets; else use another model",
        code="no-exact-attention",
    )


def prove_backend(
    name: str,
    model: PreTrainedModel,
    autocast: torch.dtype | None,
    segments: Segments = DOCUMENTS,
    *,
    part: int = 0,
    parts: int = 1,
) -> tuple[str, Proof | None]:
    """Prove the available backend `name`. Return why it is not exact ("" if it is) and its proof, or None if it cannot run.

    With TREE as `segments`, preference pairs compute their prompt once for both answers. With `parts`, rows are split over as many ranks;
    this rank has number `part`.
    """
    backend = BACKENDS[name]
    if backend.why_not_shared and segments is TREE:
        return f"{name} {backend.why_not_shared}", None
    precision = _precision(name, model, autocast)
    try:
        proof = prove_isolation(model, name, autocast=precision, segments=segments, part=part, parts=parts)
    except CheckFailed as refusal:
        return refusal.problems[0].what, None
    return _verdict(proof, "documents" if segments is DOCUMENTS else "pairs"), proof


def _prove_pictures(
    name: str, model: PreTrainedModel, autocast: torch.dtype | None, exhibits: Exhibits
) -> tuple[str, Proof | None]:
    """Prove the backend `name` on documents with pictures. Return as `prove_backend` does."""
    try:
        proof = prove_pictures(model, name, exhibits, autocast=_precision(name, model, autocast))
    except CheckFailed as refusal:
        return refusal.problems[0].what, None
    return _verdict(proof, "documents with pictures"), proof


def _precision(name: str, model: PreTrainedModel, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the format of a proof. None: float32 if kernel and weights take it, see isolation.py; FSDP2 gathers weights in 16 bits."""
    attending = BACKENDS[attention_by(name).inner_backend(model) or name]
    return autocast if attending.formats or isinstance(model, FSDPModule) else None


def _verdict(proof: Proof, what: str) -> str:
    """Return why the proof's backend is not exact, "" if it is."""
    # a call for each document is exact by construction, even if the positive control is too weak
    if proof.verdict == "exact" or (BACKENDS[proof.backend].by_document and proof.verdict != "leaks"):
        return ""
    limit = proof.tolerance if proof.max_difference > proof.tolerance else min(proof.tolerance, proof.most)
    off, tolerance = f"{proof.max_difference:.2g}", f"(tolerance {limit:.1g})"
    if proof.verdict == "unsupported":
        return (
            f"the proof is inconclusive: even without isolation outputs change by only {proof.control:.2g} {tolerance}"
        )
    return f"outputs of {what} in a row differ from each alone, off by {off} {tolerance}"
