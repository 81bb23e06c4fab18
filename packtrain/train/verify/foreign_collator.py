"""`packtrain verify --collator`: the proof of isolation for a foreign collator and model.

Three documents of random tokens go through the collator, and the unchanged model is called with the batch. proof/isolation.py
proves that the documents do not see each other. Their labels show whether one document is trained to predict another.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import disable_progress_bars
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from packtrain.attention.backends import own_attention
from packtrain.config.keys import suggest
from packtrain.config.schema import Model, Peft, Trainer
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import TRACEBACK, CheckFailed, Json, PacktrainError, UserError, boundary
from packtrain.library.attach import attach
from packtrain.model.load import base_model, load_model
from packtrain.model.precision import decide_precision
from packtrain.model.spread import Ranks
from packtrain.objectives.answers import Inputs
from packtrain.packing.collate import IGNORE, on_device
from packtrain.proof.comparison import evaluating
from packtrain.proof.isolation import DOCUMENTS, LENGTHS, find_leak, logits_of, measure, run_each_alone, vocabulary_size
from packtrain.wording import first_line

Collator = Callable[..., Any]
_OPTION = "--collator"
_FEATURES = "input_ids, labels and attention_mask (lists of a document's tokens, their labels, and ones)"


@dataclass(frozen=True, slots=True)
class Collated:
    """A `batch` of the collator. `places` has row and first column of each document in its input_ids."""

    batch: Inputs
    places: tuple[tuple[int, int], ...]

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split `values`, [rows, T, …], into [length, …] for each document."""
        return [values[row, at : at + n] for (row, at), n in zip(self.places, LENGTHS, strict=True)]

    def like_ids(self, name: str) -> list[torch.Tensor]:
        """Split the entry `name` by document, [length] each. Returns [] unless it has the shape of input_ids."""
        given = self.batch.get(name)
        alike = isinstance(given, torch.Tensor) and given.shape == self.batch["input_ids"].shape
        return self.split(cast(torch.Tensor, given).cpu()) if alike else []

    def positions(self) -> str:
        """Tell whether the batch's positions `restart` with each document, `run on`, or are `not given`."""
        documents = self.like_ids("position_ids")
        restarts = all(torch.equal(own - documents[0][0], torch.arange(len(own))) for own in documents)
        return "not given" if not documents else "restart" if restarts else "run on"

    def trained_across(self) -> list[int]:
        """Number (from 1) the documents whose first token is a label. The document before in the row is trained to predict it."""
        trained = [bool(own[0] != IGNORE) for own in self.like_ids("labels")]
        behind = [any(row == other and at > start for other, start in self.places) for row, at in self.places]
        return [number for number, across in enumerate(map(all, zip(trained, behind, strict=False)), 1) if across]


@torch.no_grad()
def verify_collator(
    model: Model, peft: Peft, trainer: Trainer, spec: str, *, attention: str | None = None, attached: bool = False
) -> tuple[int, Json]:
    """Prove the collator `spec` on the model of a config; return exit code and report.

    The exit code is 0 for exact, else 3. `attention` is transformers' name of an implementation (None: its default). `attached` proves it
    after `packtrain.attach(model)`. Raises UserError for a collator that cannot be imported or called, or returns no readable batch.
    """
    disable_progress_bars()  # of packing by TRL, and others that map rows
    thing, tokenizer = import_named(spec), load_tokenizer(model)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    whole = load_model(model, peft, tokenizer, seed=trainer.seed).to(cast(Any, device))
    autocast = decide_precision(whole, trainer.mixed_precision, Ranks(0, 1, device)).autocast
    base = base_model(whole)
    if attention is not None:
        what = f"{type(base).__name__} has no attention {attention}"
        with boundary(what, where="--attention", code="no-such-attention"):
            base.set_attn_implementation(attention)
    known = {"tokenizer": tokenizer, "processing_class": tokenizer, "model": base}
    collator = _collator_of(thing, spec, {**known, "pad_token_id": tokenizer.pad_token_id})
    backend = f"{attach(base).backends[0]}, by packtrain.attach" if attached else own_attention(base)
    report = {
        "model": model.path or f"new weights ({base.config.model_type})",
        "architecture": type(base).__name__,
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": str(device),
        "backend": backend,
        "collator": spec,
        **_measure_isolation(base, spec, collator, _ids(base, tokenizer), autocast),
    }
    return 0 if report["verdict"] == "exact" else CheckFailed.exit_code, report


@contextmanager
def _blaming(spec: str, what: str, code: str, *, fix: str = "", where: str = _OPTION) -> Iterator[None]:
    """Turn an exception inside the block into a UserError with the exception's message."""
    try:
        yield
    except PacktrainError:
        raise
    except (Exception, SystemExit) as error:
        said = first_line(error).removeprefix(f"{type(error).__name__}: ")
        advice = f"{fix} {TRACEBACK}=1 shows its traceback.".strip()
        raise UserError(f"{spec} {what}: {type(error).__name__}: {said}", where=where, fix=advice, code=code) from error


def import_named(spec: str, option: str = _OPTION) -> Any:
    """Import the object that MODULE:NAME or FILE.py:NAME names. The file's folder or the working folder joins sys.path.

    Raises UserError if there is no such object, or if its import fails.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        fix = "Give MODULE:NAME or FILE.py:NAME."
        raise UserError(f"{spec!r} names no function", where=option, fix=fix, code="no-function-named")
    file = Path(os.path.expanduser(place)).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        fix = "Name a file, or a module without .py."
        raise UserError(f"there is no file {place}", where=option, fix=fix, code="no-function-file")
    sys.path.insert(0, str(file.parent if file else Path.cwd()))
    with _blaming(spec, "cannot be imported", code="function-import-fails", where=option):
        module = importlib.import_module(file.stem if file else place)
    if not hasattr(module, name):
        raise UserError(f"{place} has no {name}", where=option, fix=suggest(name, dir(module)), code="no-such-function")
    return getattr(module, name)


def _collator_of(thing: Collator, spec: str, known: Mapping[str, object]) -> Collator:
    """Return `thing`. Call it first if it is a class or function that requires only `known` arguments."""
    if not isinstance(thing, type) and not inspect.isfunction(thing):
        return thing
    parameters = inspect.signature(thing).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [given.name for given in parameters if given.default is given.empty and given.kind not in variable]
    if not set(required) <= set(known):
        return thing
    with _blaming(spec, "cannot be made", code="collator-not-made"):
        return thing(**{name: known[name] for name in required})


def _ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Draw random tokens, none of them special, as int64 [2, T]."""
    ordinary = np.setdiff1d(np.arange(min(vocabulary_size(model), len(tokenizer))), tokenizer.all_special_ids)
    return np.random.default_rng(0).choice(ordinary, (2, sum(LENGTHS)))


def _measure_isolation(
    model: PreTrainedModel, spec: str, collator: Collator, ids: np.ndarray, autocast: torch.dtype | None
) -> Json:
    """Return the figures and the verdict."""
    own = np.split(ids[0], DOCUMENTS.starts[1:])

    def run(documents: list[np.ndarray]) -> list[torch.Tensor]:
        made, name = _collate(spec, collator, documents), type(model).__name__
        torch.manual_seed(0)  # for the noise of training mode
        with _blaming(spec, f"made a batch that {name} cannot run", code="collator-batch-refused"):
            return made.split(model(use_cache=False, **on_device(made.batch, model.device)).logits.float())

    row = {"input_ids": torch.from_numpy(ids[:1]), "attention_mask": torch.ones(1, DOCUMENTS.tokens, dtype=torch.int64)}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        row["position_ids"] = DOCUMENTS.position_ids()
    with evaluating(model, autocast):
        alone = run_each_alone(model, ids[0], DOCUMENTS)
        control = list(logits_of(model, row)[0].split(LENGTHS))
        collated = _collate(spec, collator, own)
        proof = measure(model, run, ids, DOCUMENTS, alone, control, autocast or model.dtype, in_order=False)
    place, rows = collated.places, list(collated.batch["input_ids"].shape)
    leaks = [
        {"changed": changed + 1, "moved": still + 1, "by": by}
        for (changed, still), by in sorted(proof.moved.items())
        if not by <= proof.tolerance
    ]
    where = None
    if leaks and rows == [1, sum(LENGTHS)] and sorted(place) == list(place):
        where = find_leak(model, None, run=lambda row: run(np.split(row, DOCUMENTS.starts[1:])))
    report = {
        "rows": rows,
        "documents": list(LENGTHS),
        "positions": collated.positions(),
        "labels_across": collated.trained_across(),
        "isolation": {
            **proof.figures(),
            "max_abs_diff_before": proof.most_moved(lambda changed, still: place[changed] > place[still]),
            "max_abs_diff_after": proof.most_moved(lambda changed, still: place[changed] < place[still]),
        },
        "leaks": leaks,
        "where": where and where._asdict(),
    }
    verdict, problem, fix = _finding(report, proof.verdict)
    return {**report, "verdict": verdict, "problem": problem, "fix": fix}


def _finding(report: Json, verdict: str) -> tuple[str, str, str]:
    """Return verdict, problem and fix; problem and fix are "" if all is exact."""
    ours = "use packtrain's attach and PackedCollator (docs/library.md); --attach shows this collator with it"
    if report["leaks"]:
        worst = max(report["leaks"], key=lambda leak: leak["by"])
        what = f"a change of document {worst['changed']} reaches document {worst['moved']}, whose outputs move by {worst['by']:.2g}"
        return verdict, what + (" ({module}: {kind})".format(**report["where"]) if report["where"] else ""), ours
    if verdict == "leaks":
        cause = {"run on": "positions run on along the row", "not given": "the batch has no position_ids"}
        why = cause.get(report["positions"], "the model treats the row otherwise")
        off = report["isolation"]["max_abs_diff_alone"]
        return verdict, f"outputs of documents differ by {off:.2g} from those of each alone: {why}", ours
    if report["labels_across"]:
        number = report["labels_across"][0]
        what = f"the first token of document {number} is trained, predicted by the document before it"
        return "leaks", what, f"set its label to {IGNORE}"
    if verdict == "unsupported":
        return verdict, "isolation cannot be shown: the model's outputs hardly depend on its context", ""
    return verdict, "", ""


def _collate(spec: str, collator: Collator, documents: list[np.ndarray]) -> Collated:
    """Collate the documents and find their places. Raises UserError if a document is not whole in the batch."""
    lists = [document.tolist() for document in documents]
    features = [{"input_ids": ids, "labels": list(ids), "attention_mask": [1] * len(ids)} for ids in lists]
    with _blaming(spec, "cannot collate", code="collator-fails", fix=f"It is given features of {_FEATURES}."):
        made = collator(features)
    ids = made.get("input_ids") if isinstance(made, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        keys = f"one with {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
        what = f"{spec} returns no batch with a tensor input_ids [rows, tokens], but {keys}"
        raise UserError(what, where=_OPTION, code="collator-no-batch")
    rows, places = ids.cpu(), []
    for number, document in enumerate(documents, 1):
        windows = rows.unfold(1, min(len(document), rows.shape[1]), 1)
        fits = windows.shape[-1] == len(document)
        starts = (windows == torch.from_numpy(document)).all(dim=-1).nonzero().tolist() if fits else []
        if not starts:
            lost = f"the {len(document)} tokens of document {number} are not in its batch"
            what = f"{spec} does not leave documents whole: {lost}"
            fix = "Give one that neither cuts nor changes tokens."
            raise UserError(what, where=_OPTION, fix=fix, code="collator-cuts-documents")
        places.append(tuple(starts[0]))
    return Collated(dict(made), tuple(places))
