"""Loss and gradients of the three modes against the definition: every document alone, by the model's own attention, with its
full logits and plain cross-entropy.

The documents are random tokens of odd lengths. A positive control says whether the measure can see at all: the same row
declared as ONE document must have gradients that are off by many times the tolerance. Dropout and noise are off, since the
layouts would draw different numbers. Beside the model there are two sets of gradients at a time, the definition's and those
of one mode: less than an optimizer needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.attention.segmented_modules import uses_attention_interface
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.model.load import base_model
from packtrain.model.spread import most_of_all
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded, on_device, shifted_labels
from packtrain.proof.isolation import evaluating, positions_of, refusals_of_a_model, unseparated, vocabulary_of

MODES = ("padding", "padding_free", "packed")
SHARED = "packed with shared prompts"
LENGTHS = (1, 2, 17, 33, 33, 33, 5, 71)
LONGEST_WINDOW = 512  # tokens; a document beyond a larger one would cost more than it shows
CONTROL_FACTOR = 5
_FIRST_BATCH = 4  # documents in the first of two micro-batches
_TRAINED = 0.7  # of the tokens
_DISTURBANCES = 4  # one may by chance flip no router
_MARGIN = 1.5  # times what a unit in the last place of the embeddings does, see `compare`

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean `loss` of a trained token, and relative differences from the documents alone: of the loss, and of all trained
    parameters' gradients as one vector. All None, and `problem` says why, where the model cannot run it."""

    loss: float | None
    loss_rel_diff: float | None
    grad_rel_diff: float | None
    problem: str = ""

    def within(self, loss: float, gradients: float) -> bool:
        """Whether both differences are at most these; NaN is not."""
        if self.loss_rel_diff is None or self.grad_rel_diff is None:
            return False
        return self.loss_rel_diff <= loss and self.grad_rel_diff <= gradients


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured on documents of `lengths`: `modes` in the order of MODES; `reference` is the loss of the documents
    alone; `shared` is that of packed pairs whose prompts are computed once. `usual` is the tolerance of gradients before it
    was widened for this model, if it was."""

    lengths: tuple[int, ...]
    reference: float
    modes: dict[str, Figures]
    control: Figures
    loss_tolerance: float
    grad_tolerance: float
    usual: float
    shared: Figures | None = None

    @property
    def measured(self) -> dict[str, Figures]:
        """All that was compared with the documents alone."""
        return self.modes if self.shared is None else {**self.modes, SHARED: self.shared}

    @property
    def off(self) -> list[str]:
        """The modes that ran and differ from the documents alone by more than rounding."""
        return [
            mode
            for mode, figures in self.measured.items()
            if not figures.problem and not figures.within(self.loss_tolerance, self.grad_tolerance)
        ]

    @property
    def least_control(self) -> float:
        """How far off the control's gradients must be for a leak not to hide."""
        return max(CONTROL_FACTOR * self.usual, 2 * self.grad_tolerance)

    @property
    def sees(self) -> bool:
        """Whether the control is off that far."""
        return (self.control.grad_rel_diff or 0.0) >= self.least_control


def tolerances_of(dtype: torch.dtype) -> tuple[float, float]:
    """Relative differences of loss and gradients that rounding alone may cause, by what the model computes in.

    The largest that was measured over tiny models of nine families and SmolLM2-135M (30 layers), padded and flattened,
    is 1e-7 and 4e-6 in float32, 6e-6 and 1.3e-3 in float16, 9e-5 and 1.5e-2 in bfloat16: some units in the last place
    (2^-23, 2^-10, 2^-7 from one value to the next). The tolerances leave gradients three times as much in 16 bits, and the
    loss, which hardly tells a leak, more, for kernels that add up in another order. Without borders gradients are off by
    0.5 to 1.7.
    """
    return {torch.float32: (1e-5, 1e-4), torch.float16: (1e-3, 1e-2)}.get(dtype, (5e-3, 5e-2))


@dataclass(frozen=True, slots=True)
class Layouts:
    """The same examples, with documents of `lengths`, in every layout: batches as `Measure.together` takes them.

    `borderless` is `packed` declared as one document (or as few, see `longest_alone`); `shared` is None where prompts are not shared.
    """

    lengths: tuple[int, ...]
    padding: list[Any]
    padding_free: list[Any]
    packed: list[Any]
    borderless: list[Any]
    shared: list[Any] | None = None


def compare_modes(
    model: PreTrainedModel, backend: str | None, *, pad_token_id: int, loss: str, autocast: torch.dtype | None
) -> Comparison:
    """Compares the modes of supervised fine-tuning on `model`, adapters included, whose forward has `loss_sum` (forward.py).

    `backend` serves flattened rows, None where nothing does; `loss` is objective.loss, `autocast` what training computes in
    where that is not the weights' format. Raises as `compare`.
    """
    documents = random_documents(base_model(model))
    first, second = documents[:_FIRST_BATCH], documents[_FIRST_BATCH:]
    layouts = Layouts(
        lengths=tuple(len(document.input_ids) for document in documents),
        padding=[collate_padded(part, pad_token_id) for part in (first, second)],
        padding_free=[collate_flat(first), collate_flat(second)],
        packed=[collate_flat(documents)],
        borderless=[unseparated(documents, longest_alone(base_model(model)))],
    )
    trained = sum(int(document.loss_mask[1:].sum()) for document in documents)
    return compare(_Documents(model, autocast, documents, loss, trained), layouts, backend)


def compare(measure: Measure, layouts: Layouts, backend: str | None) -> Comparison:
    """Runs the definition and the modes. Raises CheckFailed where the model cannot even run the definition, or where its
    loss is not a number.

    In 16 bits a router may choose another expert for a token whose experts are nearly even, and gradients then differ by up
    to 0.25 without any leak. So where a mode is beyond the usual tolerance in 16 bits, it is measured four times what a unit
    in the last place of the embeddings does to the documents alone, and 1.5 times the largest of that is the tolerance; the
    control must be off by twice as much.
    """
    base = base_model(measure.model)
    reference = measure.alone()
    gradients = measure.take_gradients()
    norm = _norm(gradients)
    if not (np.isfinite(reference) and 0 < norm < np.inf):
        raise CheckFailed(
            f"{type(base).__name__} has loss {reference:.6g} with gradients of norm {norm:.3g} on random documents",
            fix="look at its weights, and at model.dtype (float16 overflows early)",
        )

    def figures(batches: list[dict[str, Any]] | None = None) -> Figures:
        """Of collated batches; of the documents alone, once more, without."""
        try:
            value = measure.alone() if batches is None else measure.together(batches)
        except CheckFailed as refusal:
            measure.take_gradients()
            return Figures(None, None, None, refusal.problems[0].what)
        off = abs(value - reference) / max(abs(reference), 1e-8)
        return Figures(value, off, measure.distance_from(gradients) / norm)

    padded = figures(layouts.padding)
    shared = None
    if backend is None:
        nothing = Figures(None, None, None, "nothing runs packed rows of this model exactly")
        modes, control = {"padding": padded, "padding_free": nothing, "packed": nothing}, nothing
    else:
        with attending_by(base, backend):
            free = figures(layouts.padding_free)
            modes = {"padding": padded, "padding_free": free, "packed": figures(layouts.packed)}
            shared = figures(layouts.shared) if layouts.shared is not None else None
            control = figures(layouts.borderless)
    dtype = measure.autocast or base.dtype
    tolerances = usual = tolerances_of(dtype)
    compared = [*modes.values(), *([shared] if shared else [])]
    beyond = dtype.itemsize < 4 and not all(one.within(*usual) for one in compared if not one.problem)
    if _on_any_process(base, beyond):
        with _last_place_disturbed(base, dtype):
            noise = [figures() for _ in range(_DISTURBANCES)]
        by_loss = _MARGIN * max(one.loss_rel_diff or 0.0 for one in noise)
        by_gradients = _MARGIN * max(one.grad_rel_diff or 0.0 for one in noise)
        tolerances = max(usual[0], by_loss), max(usual[1], by_gradients)
    return Comparison(layouts.lengths, reference, modes, control, *tolerances, usual[1], shared)


def _on_any_process(model: PreTrainedModel, found: bool) -> bool:
    """Whether any process `found` it, where weights are spread and what follows takes all of them; else what this one did."""
    together = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return bool(most_of_all(int(found), model.device)) if together else found


def lengths_for(model: PreTrainedModel) -> tuple[int, ...]:
    """LENGTHS, the last of them longer than every window or chunk of the model up to LONGEST_WINDOW tokens; none longer than
    the positions it has."""
    config = model.config.get_text_config().to_dict()
    local = [value for name, value in config.items() if ("window" in name or "chunk" in name) and type(value) is int]
    longest = max(LENGTHS[-1], *(value + 7 for value in local if value <= LONGEST_WINDOW), 0)
    most = positions_of(model) or longest
    return tuple(min(length, most) for length in (*LENGTHS[:-1], longest))


def longest_alone(model: PreTrainedModel) -> int | None:
    """Tokens of the longest document that `model` can run; None where that is no limit of its attention's own.

    Attention code of a model's own may have tables as long as its positions, which a row declared as one document would leave.
    """
    return None if uses_attention_interface(model) else positions_of(model)


def random_documents(model: PreTrainedModel) -> list[Document]:
    """Documents of `lengths_for(model)`, of whose tokens most are trained."""
    rng, vocabulary = np.random.default_rng(0), vocabulary_of(model)
    return [
        Document(rng.integers(0, vocabulary, length, dtype=np.int32), rng.random(length) < _TRAINED)
        for length in lengths_for(model)
    ]


@dataclass(frozen=True)
class Measure:
    """Losses of a model, adapters included; their gradients are left in the parameters until they are taken or compared."""

    model: Any
    autocast: torch.dtype | None

    def alone(self) -> float:
        """The definition. Raises CheckFailed where the model cannot run it."""
        raise NotImplementedError

    def together(self, batches: Sequence[Any]) -> float:
        """Of batches of Layouts, as training computes it. Raises CheckFailed where the model cannot run it."""
        raise NotImplementedError

    def take_gradients(self) -> Gradients:
        """The gradients of all trained parameters, which lose them; None for those that got none."""
        parameters = self._parameters()
        taken = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return taken

    def distance_from(self, reference: Gradients) -> float:
        """The norm of the gradients minus `reference`, parameter by parameter; the gradients are dropped."""
        square = 0.0
        for parameter, theirs in zip(self._parameters(), reference, strict=True):
            ours, parameter.grad = parameter.grad, None
            square += _norm([ours if theirs is None else theirs if ours is None else ours - theirs]) ** 2
        return square**0.5

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        base = base_model(self.model)
        with (
            evaluating(base, self.autocast),
            refusals_of_a_model(f"{type(base).__name__} {what}", fix="see what model.config sets"),
        ):
            yield

    def backward(self, loss: torch.Tensor) -> float:
        """Its value, once its gradients are added to the parameters'."""
        with refusals_of_a_model(f"{type(base_model(self.model)).__name__} has no gradient", fix="report this model"):
            loss.backward()
        return loss.item()


@dataclass(frozen=True)
class _Documents(Measure):
    """Mean losses over the `trained` tokens of documents."""

    documents: Sequence[Document]
    loss: str
    trained: int

    def alone(self) -> float:
        total = 0.0
        for document in self.documents:
            ids = torch.from_numpy(document.input_ids.astype(np.int64))[None].to(self.model.device)
            with self.running("cannot run a document alone"):
                logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
            labels = shifted_labels(document).to(logits.device)
            losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
            if self.loss == "dft":
                losses = losses * (-losses).exp().detach()
            total += self.backward(losses.sum() / self.trained)
        return total

    def together(self, batches: Sequence[dict[str, Any]]) -> float:
        total = 0.0
        for batch in batches:
            with self.running(f"cannot run a {'flattened row' if 'segments' in batch else 'padded batch'}"):
                loss = self.model(**on_device(batch, self.model.device), loss_sum=True)
            total += self.backward(loss / self.trained)
        return total


@contextmanager
def _last_place_disturbed(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """The embeddings off by up to a unit in the last place of `dtype`, anew in every call, inside the block."""
    random = torch.Generator(model.device).manual_seed(0)

    def disturb(module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        part = torch.rand(embeddings.shape, generator=random, device=embeddings.device)
        return (embeddings * (1 + torch.finfo(dtype).eps * (2 * part - 1))).to(embeddings.dtype)

    handle = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        yield
    finally:
        handle.remove()


def _norm(gradients: Gradients) -> float:
    """Of all of them as one vector; of those that are spread over processes, over all processes."""
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients if one is not None]
    norms = [(norm.full_tensor() if isinstance(norm, DTensor) else norm).item() for norm in norms]
    return sum(norm**2 for norm in norms) ** 0.5
