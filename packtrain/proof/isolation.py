"""The proof that documents in a packed row cannot see each other, measured on the loaded model.

A row is exact when every document in it has the outputs that it has alone. Three documents share a row:
(1) Isolation: each is replaced by other tokens in turn, and the outputs of the others must not move. This runs in training
mode, where some layers run different code, with the same random numbers each time.
(2) Equality: the outputs of each document must be those of the document alone under the model's own attention, in training
mode, or in eval mode where a model draws noise.
(3) A positive control: the same row declared as ONE document, with positions still restarting per document (else a
difference could come from learned positions), must differ from the documents alone by many times what (1) allows for no
movement. So the proof cannot pass because it is blind to leaks.

Shared prefixes are proved in the same way: a segment must not move with one that is not before it on its path, an answer not
with the other one; that it sees all that is before it follows from (2). Weights in float32 are proved in float32 also where
training computes in bfloat16, unless the kernel takes nothing else: isolation does not depend on the precision, and
bfloat16's rounding would hide a small leak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from packtrain.attention.backends import NEEDED, PER_DOCUMENT, attending_by
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.packing.collate import collate_padded, on_device, row_arguments
from packtrain.packing.segments import Segments
from packtrain.proof.routing import Routing
from packtrain.wording import first_line

LENGTHS = (5, 27, 5)
"""Documents of the proof: 37 tokens, a prime, since few weights have a dimension of that size (proof/leak.py looks for it).
The outer ones are longer than the filters of convolutions, the middle one is longer than small windows."""
DOCUMENTS = Segments(LENGTHS)
TREE = Segments((3, 1, 3, 1, 2, 27, 2, 2, 1), (None, 0, 1, 1, 0, None, None, 6, 6))
"""Two prompts that are continued twice, one of these continuations twice again, and between them a document as long as the
longest of DOCUMENTS: so that one proof serves trees and documents."""
_CONTROL_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured; differences are the largest of |a - b| over all outputs, relative to the largest |output|.

    `moved_before` / `moved_after`: outputs of documents before / after the perturbed one; `alone`: against the document by
    itself; `control`: `alone` with isolation switched off on purpose.
    """

    verdict: str
    backend: str
    moved_before: float
    moved_after: float
    alone: float
    control: float
    tolerance: float

    @property
    def off(self) -> float:
        """The largest difference that has to be rounding alone."""
        return max(self.moved_before, self.moved_after, self.alone)

    def to_json(self) -> dict:
        """As plain values, for summary.json."""
        return asdict(self)


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative difference that rounding alone may cause through a whole model.

    Each operation is off by up to half a unit in the last place (2^-24 in fp32, 2^-11 in fp16, 2^-8 in bf16), and what a
    deep stack adds up, relative to its largest output, is some units: 2e-4 leaves room for reductions in another order
    in fp32, 1e-2 and 5e-2 in fp16 and bf16. A leak moves outputs by the order of 1.
    """
    return {torch.float32: 2e-4, torch.float64: 1e-8, torch.float16: 1e-2}.get(dtype, 5e-2)


def least_control(moved: float, tolerance: float) -> float:
    """The smallest difference that the control, which runs without isolation, must show; `moved` is the difference with isolation.

    Five times `moved`, and at least the tolerance. In 16 bits `moved` is mostly 0, and then float32's tolerance is taken for it: five
    times the tolerance of 16 bits, which allows for another row's rounding, is more than the control of a small model shows.
    """
    return max(tolerance, _CONTROL_FACTOR * max(moved, min(tolerance, tolerance_of(torch.float32))))


def loss_tolerance_of(dtype: torch.dtype) -> float:
    """Relative difference of a mean loss that rounding may cause: errors of many tokens cancel (measured: 1e-7, 6e-6, 9e-5)."""
    return {torch.float32: 1e-5, torch.float64: 1e-9, torch.float16: 1e-3}.get(dtype, 5e-3)


@torch.no_grad()
def prove_isolation(
    model: PreTrainedModel, backend: str, *, autocast: torch.dtype | None = None, segments: Segments = DOCUMENTS
) -> Proof:
    """Runs the proof on `model` as it is, by the backend of that name; leaves mode, attention and random state as they were.

    Costs a forward pass of the row for each of `_replacements` and two more (three where the model draws noise), and one of
    each document: 8 calls with DOCUMENTS. In 16 bits a document of experts that has moved is run again with the routing that
    it had (routing.py). Raises CheckFailed where the model cannot run such a row at all.
    """
    ids = random_ids(model, segments)
    own, other = (np.split(row, segments.starts[1:]) for row in ids)
    with evaluating(model, autocast):
        alone = _alone(model, ids[0], segments)
        with attending_by(model, backend):
            control = logits_in_row(model, ids[0], segments, separated=False)
            measured = measure(
                model,
                lambda documents: logits_in_row(model, np.concatenate(documents), segments),
                ProofInputs(own, other, alone, control),
                _replacements(segments),
                autocast,
            )
    before, after = (measured.most(lambda changed, still, sign=sign: sign * (changed - still) > 0) for sign in (1, -1))
    verdict = "exact" if measured.sees else "unsupported"
    if not max(before, after, measured.alone) <= measured.tolerance:
        verdict = "leaks"
    return Proof(verdict, backend, before, after, measured.alone, measured.control, measured.tolerance)


@dataclass(frozen=True, slots=True)
class ProofInputs:
    """What is proved on: the tokens of documents and `other` ones for each, and float32 outputs [length, vocabulary] of each `alone`, and
    with nothing to keep them apart (`control`)."""

    own: list[np.ndarray]
    other: list[np.ndarray]
    alone: list[torch.Tensor]
    control: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Differences as of Proof. `moved` has for each pair (changed document, unchanged one) how far the latter moved."""

    moved: dict[tuple[int, int], float]
    alone: float
    control: float
    tolerance: float

    def most(self, counts: Callable[[int, int], bool]) -> float:
        """The largest movement of the pairs that count."""
        return max((value for pair, value in self.moved.items() if counts(*pair)), default=0.0)

    @property
    def sees(self) -> bool:
        """Whether the control shows that a leak would be seen."""
        return self.control >= least_control(self.most(lambda *_: True), self.tolerance)


def measure(
    model: PreTrainedModel,
    run: Callable[[list[np.ndarray]], list[torch.Tensor]],
    documents: ProofInputs,
    replacements: list[set[int]],
    autocast: torch.dtype | None,
    *,
    in_order: bool = True,
) -> Measurement:
    """The engine of the proofs: `run` has the model run documents together, and gives the outputs of each.

    Each set of documents is replaced in turn; `in_order`: they stand in one row, one after the other. Leaves the model in training mode, without dropout, or in eval mode.
    """
    own, other, alone, computed = documents.own, documents.other, documents.alone, autocast or model.dtype
    tolerance, coarse = tolerance_of(computed), computed.itemsize < 4
    control = difference(documents.control, alone)
    train_without_dropout(model)
    routing = Routing(model)
    with routing.recorded():
        unchanged = run(own)

    def movements(replaced: set[int]) -> dict[int, float]:
        outputs = run([other[i] if i in replaced else own[i] for i in range(len(own))])
        return {i: difference([outputs[i]], [unchanged[i]]) for i in range(len(own)) if i not in replaced}

    moved: dict[tuple[int, int], float] = {}
    for replaced in replacements:
        by = movements(replaced)
        if in_order and routing.known and coarse and max(by.values()) > tolerance:
            still = [torch.full((len(part),), i in by) for i, part in enumerate(own)]
            with routing.kept(torch.cat(still)):
                by = movements(replaced)
        for pair, value in {(at, i): by[i] for i in by for at in (min(replaced), max(replaced))}.items():
            moved[pair] = max(moved.get(pair, 0.0), value)
    # in 16 bits a router may choose another expert for single tokens: that is no leak
    equality = difference(unchanged, alone, typical=coarse)
    if not equality <= tolerance:  # noise of training mode is no leak either
        model.eval()
        equality = difference(run(own), alone, typical=coarse)
    return Measurement(moved, equality, control, tolerance)


@torch.no_grad()
def check_as_it_comes(model: PreTrainedModel, *, padding: bool, autocast: torch.dtype | None = None) -> None:
    """Raises CheckFailed where `model` is not causal, or, if `padding`, gives other outputs beside padding than alone.

    In the first case a token sees the one it must predict (BERT-like models without is_decoder); in the second, training is
    inexact. Call it with the model's own attention in place; with the documents of the proof.
    """
    ids = random_ids(model, DOCUMENTS)
    tolerance, name = tolerance_of(autocast or model.dtype), type(model).__name__
    with evaluating(model, autocast):
        twice = np.tile(ids[0, : max(LENGTHS)], (2, 1))
        twice[1, -1] = ids[1, 0] if ids[1, 0] != twice[0, -1] else ids[1, 0] - 1
        first, second = _whole(model, twice)[:, :-1]
        seen = difference([second], [first])
        if seen > tolerance:
            raise CheckFailed(
                f"{name} is not causal: a later token moves the outputs before it by {seen:.2g} (tolerance {tolerance:.1g})",
                where="model.path",
                fix="take a causal language model; models such as BERT need model.config.is_decoder=true",
            )
        if not padding:
            return
        alone = _alone(model, ids[0], DOCUMENTS)
        documents = [Document(part, np.zeros(len(part), dtype=bool)) for part in np.split(ids[0], DOCUMENTS.starts[1:])]
        padded = logits_of(model, collate_padded(documents, 0))
    beside = [padded[number, :length] for number, length in enumerate(LENGTHS)]
    off = difference(beside, alone, typical=(autocast or model.dtype).itemsize < 4)
    if off > tolerance:
        what = f"padded documents of {name} come out otherwise than alone, off by {off:.2g} (tolerance {tolerance:.1g})"
        fix = "take another model"
        with suppress(CheckFailed):
            if prove_isolation(model, PER_DOCUMENT, autocast=autocast).verdict != "leaks":
                fix = f"set it to packed: its backend {PER_DOCUMENT} needs no padding"
        raise CheckFailed(what, where="packing.mode", fix=fix)


def random_ids(model: PreTrainedModel, segments: Segments) -> np.ndarray:
    """int64 [2, T]."""
    return np.random.default_rng(0).integers(0, vocabulary_of(model), (2, segments.tokens))


def _replacements(segments: Segments) -> list[set[int]]:
    """Sets of segments to replace together: each segment is in one that has nothing of a path on which it is not.

    One set for each root, with all that continues it; then all that continues the first continuation of every root, the
    second of every root, and so on, level by level.
    """
    addresses: list[tuple[int, ...]] = []  # which continuation of the one before, from the root on
    children: dict[int | None, int] = {}
    for prefix in segments.shared:
        children[prefix] = children.get(prefix, -1) + 1
        addresses.append((*(() if prefix is None else addresses[prefix]), children[prefix]))
    sets: dict[tuple[int, int], set[int]] = {}
    for number, address in enumerate(addresses):
        for branch in enumerate(address):
            sets.setdefault(branch, set()).add(number)
    return list(sets.values())


def _alone(model: PreTrainedModel, ids: np.ndarray, segments: Segments) -> list[torch.Tensor]:
    """float32 [length, vocabulary] of each segment; each document runs by itself, by the model's own attention.

    The outputs of what documents share come from the first of them.
    """
    row = segments.unrolled()
    documents = np.split(ids[row.tokens], row.segments.starts[1:])
    outputs = torch.cat([_whole(model, part[None])[0] for part in documents])
    return list(outputs[torch.from_numpy(row.outputs)].split(segments.lengths))


def _whole(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """float32 [rows, T, vocabulary] of documents of equal length, int64 [rows, T]."""
    tokens = torch.from_numpy(ids)
    return logits_of(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def logits_in_row(
    model: PreTrainedModel, ids: np.ndarray, segments: Segments, *, separated: bool = True
) -> list[torch.Tensor]:
    """float32 [length, vocabulary] of each segment in the row; not `separated`: only the positions restart."""
    arguments = row_arguments(segments if separated else Segments((segments.tokens,)))
    batch = {"input_ids": torch.from_numpy(ids)[None], **arguments, "position_ids": segments.position_ids()}
    torch.manual_seed(0)  # for the noise of training mode
    return list(logits_of(model, batch)[0].split(segments.lengths))


def train_without_dropout(model: PreTrainedModel) -> None:
    """Training mode, except dropout modules: in an expert they draw one number per routed token, so the draws would differ."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()


@contextmanager
def evaluating(model: PreTrainedModel, autocast: torch.dtype | None = None) -> Iterator[None]:
    """The model in eval mode inside the block, computing in `autocast`, with the random state restored afterwards.

    float32 is IEEE's inside, whatever training takes: TF32 keeps 10 bits of 23, which tolerances of float32 would call a leak.
    """
    training, tf32 = model.training, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    model.eval()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.autocast(model.device.type, autocast, enabled=autocast is not None),
        ):
            yield
    finally:
        model.train(training)
        torch.set_float32_matmul_precision(tf32[0])
        torch.backends.cudnn.allow_tf32 = tf32[1]


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of token ids that `model` embeds."""
    embeddings: Any = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0])


def positions_of(model: PreTrainedModel) -> int | None:
    """The longest document that `model` supports, in tokens; None if it has no limit, or its config does not name one."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the second one is MPT's
    sizes = (getattr(config, name, None) for name in names)
    return next((number for number in sizes if type(number) is int and number > 0), None)


def logits_of(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """float32 [rows, T, vocabulary] of a collated batch, of a model without a head its hidden states [rows, T, d].

    Raises CheckFailed where the model cannot run it.
    """
    batch = on_device({name: value for name, value in batch.items() if name != "shift_labels"}, model.device)
    flat = "segments" in batch
    what = f"{type(model).__name__} cannot run {'a flattened row' if flat else 'at all'}"
    fix = "set model.attention=auto" if flat else "see what model.config sets"
    with refusals_of_a_model(what, fix=fix):
        outputs = model(**batch, use_cache=False)
    return (outputs.logits if "logits" in outputs else outputs.last_hidden_state).float()


@contextmanager
def refusals_of_a_model(what: str, *, fix: str) -> Iterator[None]:
    """Turns any exception of a model's own code inside the block into CheckFailed: `what`, and the first line of the exception.

    Models refuse unsupported calls (packed rows without some kernel, unknown arguments) with exceptions of every type, so no
    list of types is complete. Running out of memory is not a refusal.
    """
    try:
        yield
    except (PacktrainError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if NEEDED in str(error):  # refused by trainer.deterministic, not by the model
            raise
        raise CheckFailed(f"{what}: {first_line(error)}", fix=fix) from error


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor], *, typical: bool = False) -> float:
    """Largest |a - b| over all tokens (or, `typical`, the mean over tokens of a token's largest) / the largest |b|.

    Infinite instead of NaN.
    """
    a, b = torch.cat(ours), torch.cat(theirs)
    of_tokens = (a - b).abs().amax(dim=-1)
    return ((of_tokens.mean() if typical else of_tokens.max()) / b.abs().max()).nan_to_num(torch.inf).item()
