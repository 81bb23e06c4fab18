"""`packtrain verify --collator`: the proof of isolation on a collator and a model that are not packtrain's.

Three documents of random tokens go through the collator, and the model is called, as it is, with what comes out. Each document is
replaced by other tokens in turn: none of the others may move. Each must say what it says alone. As in proof/isolation.py a
control shows that a leak would be seen: the same row with nothing to keep its documents apart.
"""

from __future__ import annotations

import importlib
import importlib.util
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
from transformers import PreTrainedModel

from packtrain.attention.backends import own_attention
from packtrain.boundary import TRACEBACK, boundary
from packtrain.config.keys import suggest
from packtrain.config.schema import Model, Peft, Trainer
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed, PacktrainError, UserError
from packtrain.library.attach import attach
from packtrain.model.load import base_model, load_model
from packtrain.model.precision import decide_precision
from packtrain.model.spread import Ranks
from packtrain.packing.collate import IGNORE, on_device
from packtrain.proof.isolation import (
    DOCUMENTS,
    LENGTHS,
    ProofInputs,
    evaluating,
    least_control,
    measure,
    refusals_of_a_model,
    vocabulary_of,
)
from packtrain.proof.leak import find_leak
from packtrain.wording import first_line

_OPTION = "--collator"
_FEATURES = "input_ids, labels and attention_mask (lists of a document's tokens, their labels, and ones)"


@dataclass(frozen=True, slots=True)
class Collated:
    """A `batch` of the collator; `places` are row and first column of each document in its input_ids."""

    batch: dict[str, Any]
    places: tuple[tuple[int, int], ...]

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """[length, …] of each document, of what is per token: [rows, T, …]."""
        return [values[row, at : at + n] for (row, at), n in zip(self.places, LENGTHS, strict=True)]

    def positions(self) -> str:
        """What the batch says of positions: whether they `restart` with each document, `run on`, or are `not given`."""
        given = self.batch.get("position_ids")
        if not isinstance(given, torch.Tensor) or given.shape != self.batch["input_ids"].shape:
            return "not given"
        documents = [own.cpu() for own in self.split(given)]
        start = int(documents[0][0])
        restarts = all(torch.equal(own, torch.arange(start, start + len(own))) for own in documents)
        return "restart" if restarts else "run on"

    def trained_across(self) -> list[int]:
        """Documents, from 1, whose first token is a label: what is before it in the row is trained to predict it."""
        labels = self.batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.shape != self.batch["input_ids"].shape:
            return []
        first = [int(own[0]) for own in self.split(labels)]
        begins = {row: min(at for other, at in self.places if other == row) for row, _ in self.places}
        behind = [at > begins[row] for row, at in self.places]
        return [number for number in range(1, len(first) + 1) if first[number - 1] != IGNORE and behind[number - 1]]


@torch.no_grad()
def verify_collator(
    model: Model, peft: Peft, trainer: Trainer, spec: str, *, attention: str | None = None, attached: bool = False
) -> tuple[int, dict[str, Any]]:
    """The exit code (0 exact, 3 not) and the report of the collator that `spec` names, on the model of a config.

    `attention` is transformers' name of an implementation, its own choice if None; `attached`: after `packtrain.attach(model)`.
    Raises UserError for a collator that cannot be had, called or understood.
    """
    thing, tokenizer = _import(spec), load_tokenizer(model)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    whole = load_model(model, peft, tokenizer, seed=trainer.seed).to(cast(Any, device))
    autocast = decide_precision(whole, trainer.mixed_precision, Ranks(0, 1, device)).autocast
    base = base_model(whole)
    if attention is not None:
        with boundary(f"{type(base).__name__} has no attention {attention}", where="--attention"):
            base.set_attn_implementation(attention)
    known = {"tokenizer": tokenizer, "model": base, "pad_token_id": tokenizer.pad_token_id}
    known["processing_class"] = tokenizer
    collator = _collator_of(thing, spec, known)
    backend = f"{attach(base).backends[0]}, by packtrain.attach" if attached else own_attention(base)
    report = {
        "model": model.path or f"new weights ({base.config.model_type})",
        "architecture": type(base).__name__,
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": str(device),
        "backend": backend,
        "collator": spec,
        **_measured(base, spec, collator, _ids(base, tokenizer), autocast),
    }
    return 0 if report["verdict"] == "exact" else CheckFailed.exit_code, report


@contextmanager
def _blaming(spec: str, what: str, fix: str = "") -> Iterator[None]:
    """An exception inside the block becomes a UserError in its own words."""
    try:
        yield
    except PacktrainError:
        raise
    except (Exception, SystemExit) as error:
        kind = f"{type(error).__name__}: "
        said = first_line(error).removeprefix(kind)
        advice = f"{fix} {TRACEBACK}=1 shows its traceback.".strip()
        raise UserError(f"{spec} {what}: {kind}{said}", where=_OPTION, fix=advice) from error


def _import(spec: str) -> Any:
    """What MODULE:NAME or FILE.py:NAME names; the file may import what is beside it, modules may be in the working folder.

    Raises UserError where there is no such thing, or importing it fails.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UserError(f"{spec!r} names no function", where=_OPTION, fix="Give MODULE:NAME or FILE.py:NAME.")
    file = Path(os.path.expanduser(place)).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UserError(f"there is no file {place}", where=_OPTION, fix="Name a file, or a module without .py.")
    sys.path.insert(0, str(file.parent if file else Path.cwd()))
    with _blaming(spec, "cannot be imported"):
        if file is None:
            thing = importlib.import_module(place)
        else:
            described: Any = importlib.util.spec_from_file_location(file.stem, file)
            thing = importlib.util.module_from_spec(described)
            sys.modules.setdefault(file.stem, thing)  # where pickle looks its classes up
            described.loader.exec_module(thing)
    if not hasattr(thing, name):
        raise UserError(f"{place} has no {name}", where=_OPTION, fix=suggest(name, dir(thing)))
    return getattr(thing, name)


def _collator_of(thing: Any, spec: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """The collator: `thing` itself, or what it makes.

    A class, and a function that requires nothing but `known` arguments, are called with these. Raises UserError where that is
    not enough.
    """
    made = thing
    if isinstance(thing, type) or inspect.isfunction(thing):
        parameters = inspect.signature(thing).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [one.name for one in parameters if one.default is one.empty and one.kind not in variable]
        unknown = [name for name in required if name not in known]
        if isinstance(thing, type) and unknown:
            what = f"{spec} needs {', '.join(unknown)}, which packtrain does not know"
            raise UserError(what, where=_OPTION, fix=f"Name a function that makes it; it may take {', '.join(known)}.")
        if not unknown:
            with _blaming(spec, "cannot be made"):
                made = thing(**{name: known[name] for name in required})
    if not callable(made):
        raise UserError(f"{spec} is {type(made).__name__}, which cannot be called", where=_OPTION)
    return made


def _ids(model: PreTrainedModel, tokenizer: Any) -> np.ndarray:
    """int64 [2, T]: random tokens, none of them special."""
    ordinary = np.setdiff1d(np.arange(min(vocabulary_of(model), len(tokenizer))), tokenizer.all_special_ids)
    if len(ordinary) < 2:
        raise UserError("the tokenizer has special tokens alone", where="model.tokenizer")
    return np.random.default_rng(0).choice(ordinary, (2, sum(LENGTHS)))


def _measured(
    model: PreTrainedModel, spec: str, collator: Callable[..., Any], ids: np.ndarray, autocast: torch.dtype | None
) -> dict[str, Any]:
    """The figures and the verdict."""
    own, other = (np.split(row, DOCUMENTS.starts[1:]) for row in ids)

    def run(documents: list[np.ndarray]) -> list[torch.Tensor]:
        made = _collate(spec, collator, documents)
        return made.split(_logits(model, made.batch, spec))

    with evaluating(model, autocast):
        alone = [_logits(model, _plain(model, [document]), None)[0] for document in own]
        control = list(_logits(model, _plain(model, own), None)[0].split(LENGTHS))
        collated = _collate(spec, collator, own)
        given = ProofInputs(own, other, alone, control)
        measured = measure(model, run, given, [{number} for number in range(len(own))], autocast, in_order=False)
    place, tolerance = collated.places, measured.tolerance
    leaks = [
        {"changed": changed + 1, "moved": still + 1, "by": by}
        for (changed, still), by in sorted(measured.moved.items())
        if not by <= tolerance
    ]
    where = None
    if leaks and tuple(collated.batch["input_ids"].shape) == (1, sum(LENGTHS)) and sorted(place) == list(place):
        where = find_leak(model, None, run=lambda row: run(np.split(row, DOCUMENTS.starts[1:])))
    report = {
        "rows": list(collated.batch["input_ids"].shape),
        "documents": list(LENGTHS),
        "positions": collated.positions(),
        "labels_across": collated.trained_across(),
        "isolation": {
            "max_abs_diff_before": measured.most(lambda changed, still: place[changed] > place[still]),
            "max_abs_diff_after": measured.most(lambda changed, still: place[changed] < place[still]),
            "max_abs_diff_alone": measured.alone,
            "control": measured.control,
            "tolerance": tolerance,
            "least_control": least_control(measured.most(lambda *_: True), tolerance),
        },
        "leaks": leaks,
        "where": {"module": where.module, "kind": where.kind} if where else None,
    }
    verdict, problem, fix = _finding(report, seen=measured.sees)
    return {**report, "verdict": verdict, "problem": problem, "fix": fix}


def _finding(report: Mapping[str, Any], *, seen: bool) -> tuple[str, str, str]:
    """Verdict, problem and fix; the last two "" if all is exact."""
    alone, tolerance = report["isolation"]["max_abs_diff_alone"], report["isolation"]["tolerance"]
    ours = "use packtrain's attach and PackedCollator (docs/library.md); --attach shows this collator with it"
    if report["leaks"]:
        worst = max(report["leaks"], key=lambda one: one["by"])
        what = f"a change of document {worst['changed']} reaches document {worst['moved']}, whose outputs move by {worst['by']:.2g}"
        where = f" ({report['where']['module']}: {report['where']['kind']})" if report["where"] else ""
        return "leaks", what + where, ours
    if not alone <= tolerance:
        why = {"run on": "positions run on along the row", "not given": "the batch has no position_ids"}
        cause = why.get(report["positions"], "the model treats the row otherwise")
        return "leaks", f"documents come out otherwise than alone, off by {alone:.2g}: {cause}", ours
    if report["labels_across"]:
        number = report["labels_across"][0]
        what = f"the first token of document {number} is trained, predicted by the document before it"
        return "leaks", what, f"set its label to {IGNORE}"
    if not seen:
        return "unsupported", "isolation cannot be shown: the model's outputs hardly depend on its context", ""
    return "exact", "", ""


def _collate(spec: str, collator: Callable[..., Any], documents: list[np.ndarray]) -> Collated:
    """What the collator makes of documents, and where they are in it. Raises UserError if they are not."""
    features = [
        {"input_ids": one.tolist(), "labels": one.tolist(), "attention_mask": [1] * len(one)} for one in documents
    ]
    with _blaming(spec, "cannot collate", f"It is given features of {_FEATURES}."):
        made = collator(features)
    if not isinstance(made, Mapping) or not isinstance(made.get("input_ids"), torch.Tensor):
        keys = f"one with {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
        raise UserError(f"{spec} returns no batch with a tensor input_ids, but {keys}", where=_OPTION)
    batch: dict[str, Any] = dict(made)
    rows = batch["input_ids"].cpu().numpy()
    if rows.ndim != 2:
        raise UserError(f"{spec} returns input_ids {list(rows.shape)}, not [rows, tokens]", where=_OPTION)
    return Collated(batch, tuple(_place_of(one, rows, number, spec) for number, one in enumerate(documents, 1)))


def _place_of(document: np.ndarray, rows: np.ndarray, number: int, spec: str) -> tuple[int, int]:
    """Row and first column at which the tokens of a document stand."""
    if rows.shape[1] >= len(document):
        windows = np.lib.stride_tricks.sliding_window_view(rows, len(document), axis=1)
        for row, at in np.argwhere((windows == document).all(axis=-1)).tolist():
            return row, at
    lost = f"the {len(document)} tokens of document {number} are not in its batch"
    what = f"{spec} does not leave documents whole: {lost}"
    raise UserError(what, where=_OPTION, fix="Give one that neither cuts nor changes tokens.")


def _plain(model: PreTrainedModel, documents: list[np.ndarray]) -> dict[str, Any]:
    """One row [1, T] of documents that nothing keeps apart; of a single one, as it is alone."""
    ids = torch.from_numpy(np.concatenate(documents))[None]
    positions = {}
    if len(documents) > 1 and "position_ids" in inspect.signature(type(model).forward).parameters:
        positions = {"position_ids": torch.cat([torch.arange(len(one)) for one in documents])[None]}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **positions}


def _logits(model: PreTrainedModel, batch: dict[str, Any], spec: str | None) -> torch.Tensor:
    """float32 [rows, T, vocabulary], by the call that trainers make: without a cache."""
    torch.manual_seed(0)  # for the noise of training mode
    call = {"use_cache": False, **on_device(batch, model.device)}
    name, shape = type(model).__name__, batch["input_ids"].shape
    alone = refusals_of_a_model(f"{name} cannot run a document alone", fix="")
    with _blaming(spec, f"made a batch that {name} cannot run") if spec else alone:
        logits = model(**call).logits.float()
    if logits.shape[:2] != shape:
        raise UserError(f"{name} returns logits {list(logits.shape)} for {list(shape)}")
    return logits
