"""Proof that documents in a packed row cannot see each other. Measured on the loaded model.

A row is exact when every document in it has the same outputs as alone. Three documents share a row:
(1) Isolation: each is replaced by other tokens in turn, and the outputs of the others must not move. This runs in training
mode, where some layers run different code, with the same random numbers each time.
(2) Equality: each document must have the same outputs as alone under the model's own attention, in training
mode, or in eval mode if a model draws noise.
(3) A positive control: the same row declared as ONE document must differ from the documents alone by many times the movement
of (1). Its positions still restart per document (otherwise learned positions could make a difference). This excludes
a proof that passes only because it cannot see leaks.

Shared prefixes are proved in the same way. A segment must not move with a segment outside its path; by (2) it sees everything
before it on its path. Weights in float32 are proved in float32 even if
training computes in bfloat16, unless the kernel takes nothing else: isolation does not depend on the precision, and
bfloat16's rounding would hide a small leak.

In 16 bits products round differently when the number of tokens changes. When other documents change, a router may then choose another
expert for single tokens. This is no leak: so all tokens keep their experts. A leak still changes outputs. All shapes stay the same, so without
routers and quantised weights an unchanged document does not move at all: there the limit of movement is float32's.

A leak is found in the innermost module whose output depends on another document although its input does not (module_calls.py). The row runs
twice, the second time with other tokens in its outer documents; every module's inputs and outputs for the middle document are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.attention.over_ranks import sum_over_parts
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.packing.collate import collate_padded, on_device, row_arguments
from packtrain.packing.segments import Segments, own_tokens, split_row
from packtrain.proof.comparison import CONTROL_FACTOR, difference, evaluating, has_routers, model_refusals, tolerance_of
from packtrain.proof.module_calls import ModuleCall, record_calls, where_they_part

LENGTHS = (5, 27, 5)
"""Documents of the proof: 37 tokens, a prime, since few weights have a dimension of that size (module_calls.py recognizes the row by it).
The outer ones are longer than the filters of convolutions, the middle one is longer than small windows."""
DOCUMENTS = Segments(LENGTHS)
MIDDLE = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
"""The tokens of the middle document."""
TREE = Segments((3, 1, 3, 1, 2, 27, 2, 2, 1), (None, 0, 1, 1, 0, None, None, 6, 6))
"""Two prompts with two continuations each (one has two of its own), and between them a document as long as the longest of
DOCUMENTS: one proof serves trees and documents."""
_MASKED = -1e30
"""Logits below this are of tokens that a model never answers with (chameleon's pictures). They have no scale."""
NO_FIGURES: dict[str, None] = dict.fromkeys(
    ("max_abs_diff_before", "max_abs_diff_after", "max_abs_diff_alone", "control", "tolerance", "least_control")
)
"""The figures of a proof that could not run."""
Routing = dict[nn.Module, tuple[torch.Tensor, ...]]
"""By layer of experts: the experts chosen by each token, and their weights."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Measured differences: the largest |a - b| over all outputs, relative to the largest |output|.

    `moved` says for each pair (changed document, unchanged one) how far the unchanged one moved. `alone` compares documents in the row
    with each of them run alone. `control` is the same with isolation switched off on purpose.
    """

    moved: dict[tuple[int, int], float] = field(repr=False)
    alone: float
    control: float
    tolerance: float
    backend: str = ""
    most: float = math.inf
    """Largest movement that is no leak, if it is smaller than the tolerance."""

    def most_moved(self, include: Callable[[int, int], bool] = lambda *_: True) -> float:
        """Return the largest movement of the pairs to `include`."""
        return max((value for pair, value in self.moved.items() if include(*pair)), default=0.0)

    @property
    def max_difference(self) -> float:
        """Return the largest difference measured; only rounding may cause it."""
        return max(self.most_moved(), self.alone)

    @property
    def least_control(self) -> float:
        """Return the least difference that the control must show.

        It is the tolerance or several times the largest movement, whichever is greater. In 16 bits unchanged documents usually do not move at
        all. We then take float32's tolerance as movement: several times the 16-bit tolerance is more than a small model's control reaches.
        """
        unmoved = min(self.tolerance, tolerance_of(torch.float32).outputs)
        return max(self.tolerance, CONTROL_FACTOR * max(self.most_moved(), unmoved))

    @property
    def verdict(self) -> str:
        """Return `exact`, `leaks`, or `unsupported` if the control is too weak to show a leak."""
        if not (self.max_difference <= self.tolerance and self.most_moved() <= self.most):
            return "leaks"
        return "exact" if self.control >= self.least_control else "unsupported"

    def figures(self) -> dict[str, float | None]:
        """Return the figures of `packtrain verify`. Movements are split into documents before and after the changed one."""
        before = self.most_moved(lambda changed, still: still < changed)
        after = self.most_moved(lambda changed, still: still > changed)
        figures = (before, after, self.alone, self.control, self.tolerance, self.least_control)
        return dict(zip(NO_FIGURES, figures, strict=True))

    def to_json(self) -> dict[str, object]:
        """Return plain values for summary.json."""
        figures = self.figures()
        moved = {f"moved_{side}": figures[f"max_abs_diff_{side}"] for side in ("before", "after")}
        others = {name: getattr(self, name) for name in ("alone", "control", "tolerance")}
        return {"verdict": self.verdict, "backend": self.backend, **moved, **others}


@torch.no_grad()
def prove_isolation(
    model: PreTrainedModel,
    backend: str,
    *,
    autocast: torch.dtype | None = None,
    segments: Segments = DOCUMENTS,
    part: int = 0,
    parts: int = 1,
) -> Proof:
    """Run the proof on `model` with this backend. Leaves mode, attention and random state unchanged. With `parts` the
    row is split over as many ranks; this rank has number `part`.

    Costs a forward pass of the row for each segment and two more (three if the model draws noise), and one of each
    document: 8 calls with DOCUMENTS. Raises CheckFailed if the model cannot run this row at all.
    """
    segments = segments.repeated(-(-parts // segments.tokens))  # a token for each part
    ids = random_ids(model, segments)
    with evaluating(model, autocast) as computed_in:
        alone = run_each_alone(model, ids[0], segments)
        with attending_by(model, backend):
            run = partial(logits_in_row, model, segments=segments, part=part, parts=parts)
            control = run(ids[0], separated=False)
            found = measure(model, lambda own: run(np.concatenate(own)), ids, segments, alone, control, computed_in())
    return replace(found, backend=backend)


def measure(
    model: PreTrainedModel,
    run: Callable[[list[np.ndarray]], list[torch.Tensor]],
    ids: np.ndarray,
    segments: Segments,
    alone: list[torch.Tensor],
    control: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    in_order: bool = True,
) -> Proof:
    """Measure a proof: `run` runs documents together, and returns the outputs of each.

    `ids` int64 [2, T]: tokens of the row, and replacements. Each of `segments` is replaced in turn, with the segments that continue it.
    `alone` and `control` are float32 [length, vocabulary] of each segment, computed in `dtype`: each document alone, and a row without
    separation. `in_order`: the documents are in one row, one after the other. Leaves training mode without dropout, or eval mode.
    """
    own, other = (np.split(row, segments.starts[1:]) for row in ids)
    numbers = range(len(own))
    tolerance, is_16_bit = tolerance_of(dtype).outputs, dtype.itemsize < 4
    definition = torch.cat(alone)
    training_mode_without_dropout(model)
    routing: Routing = {}
    with _routed(model, routing):
        unchanged = run(own)
    moved: dict[tuple[int, int], float] = {}
    for first in numbers:
        replaced = {number for number in numbers if first in segments.paths[number]}
        with _routed(model, routing, keep=True) if is_16_bit and in_order else nullcontext():
            outputs = run([other[i] if i in replaced else own[i] for i in numbers])
        for still in set(numbers) - replaced:
            value = difference(outputs[still], unchanged[still])
            for changed in (min(replaced), max(replaced)):
                moved[changed, still] = max(moved.get((changed, still), 0.0), value)
    statistic = torch.mean if is_16_bit else torch.max
    equality = difference(torch.cat(unchanged), definition, statistic=statistic)
    if not equality <= tolerance:  # the noise of training mode is no leak
        model.eval()
        equality = difference(torch.cat(run(own)), definition, statistic=statistic)
    proof = Proof(moved, equality, difference(torch.cat(control), definition), tolerance)
    rounds_alone = in_order and not (has_routers(model) or getattr(model, "is_quantized", False))
    return replace(proof, most=tolerance_of(torch.float32).outputs) if rounds_alone else proof


@contextmanager
def _routed(model: PreTrainedModel, routing: Routing, *, keep: bool = False) -> Iterator[None]:
    """Record the routing of a call. With `keep`, send all tokens to the recorded experts.

    Hooks intercept the layer's call `experts(hidden [T, h], chosen [T, k], weights [T, k])`, as in transformers' models.
    """

    def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(given) != 3 or not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 2 for tensor in given[1:]):
            return None
        if not keep:
            routing[module] = given[1:]
        known = routing.get(module)
        return (given[0], *known) if known is not None and known[0].shape == given[1].shape else None

    experts = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    handles = [module.register_forward_pre_hook(before) for module in experts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def check_causal_and_padding(
    model: PreTrainedModel, *, padding: bool, autocast: torch.dtype | None = None, key: str = "model.path"
) -> None:
    """Raise CheckFailed if `model` is not causal, or, with `padding`, if padding changes its outputs.

    Without causality a token sees the one it must predict (BERT-like models without is_decoder). If padding changes outputs, training is
    inexact. Call it with the model's own attention in place. Uses the documents of the proof. `key` names the model.
    """
    ids, dtype = random_ids(model, DOCUMENTS), autocast or model.dtype
    tolerance, name = tolerance_of(dtype).outputs, type(model).__name__
    with evaluating(model, autocast):
        twice = np.tile(ids[0, : max(LENGTHS)], (2, 1))
        twice[1, -1] = ids[1, 0] if ids[1, 0] != twice[0, -1] else ids[1, 0] - 1
        first, second = _run_unpacked(model, twice)[:, :-1]
        seen = difference(second, first)
        if seen > tolerance:
            raise CheckFailed(
                f"{name} is not causal: a later token changes the outputs of earlier ones by {seen:.2g} (tolerance {tolerance:.1g})",
                where=key,
                fix="take a causal language model; models such as BERT need model.config.is_decoder=true",
                code="not-causal",
            )
        if not padding:
            return
        alone = torch.cat(run_each_alone(model, ids[0], DOCUMENTS))
        documents = [Document(part, np.zeros(len(part), dtype=bool)) for part in np.split(ids[0], DOCUMENTS.starts[1:])]
        padded = logits_of(model, collate_padded(documents, 0))
    beside = torch.cat([padded[number, :length] for number, length in enumerate(LENGTHS)])
    off = difference(beside, alone, statistic=torch.mean if dtype.itemsize < 4 else torch.max)
    if off > tolerance:
        raise CheckFailed(
            f"outputs of padded documents of {name} differ by {off:.2g} from those without padding (tolerance {tolerance:.1g})",
            where="packing.mode",
            fix="set it to packed with model.attention=per_document, which needs no padding, or take another model",
            code="padding-changes-outputs",
        )


def random_ids(model: PreTrainedModel, segments: Segments) -> np.ndarray:
    """Draw random token ids: int64 [2, T]."""
    return np.random.default_rng(0).integers(0, vocabulary_size(model), (2, segments.tokens))


def run_each_alone(model: PreTrainedModel, ids: np.ndarray, segments: Segments) -> list[torch.Tensor]:
    """Return each segment's float32 [length, vocabulary]. Each document runs alone, with the model's own attention.

    Shared tokens have the outputs of the first document that contains them.
    """
    row = segments.unrolled()
    documents = np.split(ids[row.tokens], row.segments.starts[1:])
    outputs = torch.cat([_run_unpacked(model, part[None])[0] for part in documents])
    return list(outputs[torch.from_numpy(row.outputs)].split(segments.lengths))


def _run_unpacked(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """Run documents of equal length, int64 [rows, T]. Return float32 [rows, T, vocabulary]."""
    tokens = torch.from_numpy(ids)
    return logits_of(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def logits_in_row(
    model: PreTrainedModel,
    ids: np.ndarray,
    segments: Segments,
    *,
    separated: bool = True,
    part: int = 0,
    parts: int = 1,
) -> list[torch.Tensor]:
    """Return each segment's float32 [length, vocabulary] in the row. Without `separated`, only the positions restart. A row in several
    `parts` is joined from all of them."""
    row = split_row(segments if separated else Segments((segments.tokens,)), part, parts)
    own = own_tokens(row)
    positions = segments.position_ids()[:, own]
    batch = {"input_ids": torch.from_numpy(ids[own])[None], **row_arguments(row), "position_ids": positions}
    torch.manual_seed(0)  # the noise of training mode
    logits = logits_of(model, batch)[0]
    if parts > 1:
        first, end, _ = own.indices(row.tokens)
        logits = sum_over_parts(F.pad(logits, (0, 0, first, row.tokens - end)), parts)
    return list(logits.split(segments.lengths))


def training_mode_without_dropout(model: PreTrainedModel) -> None:
    """Set training mode except for dropout. In an expert, dropout draws one number per routed token, so the draws would differ."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that `model` embeds."""
    embeddings: Any = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0])


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the longest document that `model` supports, in tokens. None without a limit, or if the config names none."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the second one is MPT's
    sizes = (getattr(config, name, None) for name in names)
    return next((number for number in sizes if type(number) is int and number > 0), None)


def logits_of(model: PreTrainedModel, batch: Mapping[str, object], most: int | None = None) -> torch.Tensor:
    """Return float32 [rows, T, vocabulary] of a collated batch. A model without a head gives hidden states [rows, T, d].

    With `most` only the first ids of a large vocabulary are returned. Raises CheckFailed if the model cannot run the batch.
    """
    batch = on_device({name: value for name, value in batch.items() if name != "shift_labels"}, model.device)
    flat = "segments" in batch
    what = f"{type(model).__name__} cannot run {'a flattened row' if flat else 'at all'}"
    fix = "set model.attention=auto" if flat else "see what model.config sets"
    with model_refusals(what, fix=fix):
        outputs = model(**batch, use_cache=False)
    found = (outputs.logits if "logits" in outputs else outputs.last_hidden_state)[..., :most].float()
    return found.masked_fill(found < _MASKED, 0)


class Leak(NamedTuple):
    """Module that mixes documents: `module` is its dotted name in the model, `kind` its class."""

    module: str
    kind: str


@torch.no_grad()
def find_leak(
    model: PreTrainedModel, backend: str | None, run: Callable[[np.ndarray], object] | None = None
) -> Leak | None:
    """Find the first module that mixes documents of a row under `backend`. Returns None if no module does.

    `backend` None keeps the model's attention. `run` is the caller's way to run the model on a row of the documents, int64 [T].
    """
    run = run or (lambda row: logits_in_row(model, row, DOCUMENTS))
    attention = nullcontext() if backend is None else attending_by(model, backend)
    # hooks do not run in compiled layers (trainer.torch_compile)
    with evaluating(model) as computed_in, attention, torch.compiler.set_stance("force_eager"):
        training_mode_without_dropout(model)  # like the proof
        first, second = record_changed(model, run)
    for name in where_they_part(first, second, tolerance_of(computed_in()).outputs):
        kind = type(model.get_submodule(name)).__name__
        return Leak(name or kind, kind)
    return None


def record_changed(
    model: PreTrainedModel, run: Callable[[np.ndarray], object]
) -> tuple[dict[str, ModuleCall], dict[str, ModuleCall]]:
    """Record the calls for the middle document, then with other outer documents.

    The experts of all tokens stay the same.
    """
    first, second = rows_that_differ(model)
    routing: Routing = {}
    with _routed(model, routing):
        calls = record_calls(model, partial(run, first), LENGTHS, 1)
    with _routed(model, routing, keep=True):
        return calls, record_calls(model, partial(run, second), LENGTHS, 1)


def rows_that_differ(model: PreTrainedModel) -> np.ndarray:
    """Return tokens of DOCUMENTS, int64 [2, T]. The second row has other tokens in its outer documents."""
    rows = random_ids(model, DOCUMENTS)
    rows[1, MIDDLE] = rows[0, MIDDLE]
    return rows
