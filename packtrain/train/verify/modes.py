"""Loss and gradients of the modes against the definition: each document or padded pair alone, by the model's own attention.

Documents are random tokens of odd lengths, with full logits and plain cross-entropy alone. Pairs have the losses of the
objective by TRL's own code; their reference is the model itself plus some nats of noise, so that no pair is at a zero margin.
A positive control shows that the comparison can detect a leak: the packed row declared as ONE document must have gradients
that differ by many times the tolerance. Dropout and noise are off, since the layouts would draw different numbers. Two sets
of gradients are in memory at a time, the definition's and those of one mode: less than an optimizer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.attention.backends import attending_by, own_attention
from packtrain.config.schema import Batch, Optim, Packing, Tracking, Trainer
from packtrain.data.dataset import Document, Preference
from packtrain.errors import CheckFailed
from packtrain.model.load import base_model
from packtrain.model.precision import Precision
from packtrain.packing.collate import (
    IGNORE,
    PairRows,
    collate_flat,
    collate_padded,
    on_device,
    row_arguments,
    shifted_labels,
)
from packtrain.packing.schedule import make_schedule
from packtrain.packing.segments import Segments
from packtrain.proof.isolation import evaluating, positions_of, refusals_of_a_model, vocabulary_of
from packtrain.train.loader import MicroBatch, PairSteps, ScoredSteps, UnpairedSteps
from packtrain.train.objectives.dpo import DPO
from packtrain.train.objectives.dpo_loss import DPOLoss
from packtrain.train.objectives.first_loss import Start, check_pair_forward, start_of
from packtrain.train.objectives.kto import KTO
from packtrain.train.objectives.kto_loss import KTOLoss
from packtrain.train.objectives.reward import Reward
from packtrain.train.objectives.reward_loss import RewardLoss
from packtrain.train.settings import LoopSettings, StopRequest, training_arguments

MODES = ("padding", "padding_free", "packed")
SHARED = "packed with shared prompts"
_LENGTHS = (1, 2, 17, 33, 33, 33, 5, 135)  # a packed row of 259 tokens: some layers have chunks or tables of 256
_LONGEST_WINDOW = 512  # tokens; a document beyond a larger one would cost more than it shows
_FIRST_DOCUMENTS = 4  # in the first of two micro-batches
_TRAINED = 0.7  # of the tokens
_PAIRS = ((10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (18, 6, 11))  # tokens of prompt, chosen, rejected
_FIRST_PAIRS = 3
_OFF = 3.0  # nats, standard deviation of the reference's log-probabilities around the model's
_CONTROL_FACTOR, _MOST_CONTROL = 5, 0.45  # without borders gradients are off by 0.5 to 1.7


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean `loss` of a trained token, and relative differences from the definition: of the loss, and of all trained
    parameters' gradients as one vector. All None, with a `problem`, if the model cannot run it."""

    loss: float | None
    loss_rel_diff: float | None
    grad_rel_diff: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measurements on documents of `lengths`, by mode in the order of MODES, then SHARED if prompts are shared.

    `reference` is the definition's loss.
    """

    lengths: tuple[int, ...]
    reference: float
    measured: dict[str, Figures]
    control: Figures
    loss_tolerance: float
    grad_tolerance: float

    @property
    def off(self) -> list[str]:
        """The modes that ran and differ from the definition by more than rounding."""

        def fits(own: Figures) -> bool:  # NaN does not
            loss, gradients = own.loss_rel_diff or 0.0, own.grad_rel_diff or 0.0
            return loss <= self.loss_tolerance and gradients <= self.grad_tolerance

        return [mode for mode, own in self.measured.items() if not own.problem and not fits(own)]

    @property
    def least_control(self) -> float:
        """The least difference of the control's gradients for leaks to be detectable."""
        return min(_CONTROL_FACTOR * self.grad_tolerance, _MOST_CONTROL)

    @property
    def sees(self) -> bool:
        """Whether the control, which leaks on purpose, differs by at least `least_control`: else the comparison shows nothing."""
        return (self.control.grad_rel_diff or 0.0) >= self.least_control


def tolerances_of(dtype: torch.dtype, *, routed: bool) -> tuple[float, float]:
    """Relative differences of loss and gradients that rounding alone may cause, by what the model computes in.

    The largest measured over tiny models of nine families and SmolLM2-135M (30 layers), padded and flattened, are 1e-7 and 4e-6
    in float32, 6e-6 and 1.3e-3 in float16, 9e-5 and 1.5e-2 in bfloat16. In 16 bits gradients get three times as much, and the
    loss, which hardly shows a leak, more, for kernels that add up in another order. `routed`: in 16 bits a router may choose
    another expert where two are nearly even; gradients then differ by up to 0.25 without any leak.
    """
    if routed and dtype.itemsize < 4:
        return 2e-2, 0.3
    return {torch.float32: (1e-5, 1e-4), torch.float16: (1e-3, 1e-2)}.get(dtype, (5e-3, 5e-2))


Layouts = Mapping[str, Sequence[Any]]
"""The same examples as batches, by mode; and `borderless`, the packed row declared as one document."""
Loss = Callable[[Sequence[Any] | None], float]
"""Mean loss of batches, or of the definition (None); adds the gradients to the parameters'."""


def compare_documents(
    model: PreTrainedModel, backend: str | None, *, pad_token_id: int, loss: str, autocast: torch.dtype | None
) -> Comparison:
    """Compares the modes of supervised fine-tuning on `model`, adapters included, whose forward has `loss_sum` (forward.py).

    `backend` runs flattened rows (None: no backend works); `loss` is objective.loss. Raises as `compare`.
    """
    documents = random_documents(base_model(model))
    first, second = documents[:_FIRST_DOCUMENTS], documents[_FIRST_DOCUMENTS:]
    trained = sum(int(document.loss_mask[1:].sum()) for document in documents)

    def alone(document: Document) -> torch.Tensor:
        ids = torch.from_numpy(document.input_ids.astype(np.int64))[None].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        labels = shifted_labels(document).to(logits.device)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        return (losses * (-losses).exp().detach() if loss == "dft" else losses).sum() / trained

    def mean_loss(batch: dict[str, Any]) -> torch.Tensor:
        return cast(Any, model)(**batch, loss_sum=True) / trained

    def loss_of(batches: Sequence[Any] | None) -> float:
        if batches is None:
            return sum(_backward(model, "a document alone", autocast, partial(alone, one)) for one in documents)
        total = 0.0
        for batch in batches:
            what = "a flattened row" if "segments" in batch else "a padded batch"
            total += _backward(model, what, autocast, partial(mean_loss, on_device(batch, model.device)))
        return total

    row = collate_flat(documents)
    layouts = {
        "padding": [collate_padded(part, pad_token_id) for part in (first, second)],
        "padding_free": [collate_flat(first), collate_flat(second)],
        "packed": [row],
        "borderless": [{**row, **row_arguments(_borderless(row["segments"]))}],
    }
    lengths = tuple(len(document.input_ids) for document in documents)
    return compare(model, lengths, layouts, loss_of, backend, autocast)


def compare_examples(
    loss: DPOLoss | RewardLoss | KTOLoss, padded: Any, backend: str | None, *, shares: bool = False, split: bool = True
) -> Comparison:
    """Compares the modes on the loss of `loss_on_random_pairs` and its `padded` steps, by `backend`; `shares` prompts too.

    Not `split`: the loss sorts the pairs of a step, and takes all of them at once everywhere. Raises as `compare`, and
    CheckFailed where the output head is not the model's (`check_pair_forward`).
    """
    if not isinstance(loss, RewardLoss):
        padded = _with_noisy_reference(loss, padded)
        check_pair_forward(loss, padded.first_batch(0), own_attention(base_model(loss.model)))
    sides = [
        side for one in padded.data for side in ((one.chosen, one.rejected) if isinstance(one, Preference) else (one,))
    ]
    lengths = tuple(len(side.input_ids) for side in sides)
    model, autocast = loss.model, loss.settings.autocast
    flat, shared = replace(padded, layout="flat"), replace(padded, layout="shared")
    every = list(range(len(padded.data)))
    parts = [every[:_FIRST_PAIRS], every[_FIRST_PAIRS:]] if split else [every]
    alone = [padded.collate(part) for part in ([[number] for number in every] if split else parts)]

    def part_of_loss(batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        return loss.compute(model, batch, counts) / loss.accelerator.num_processes

    def loss_of(batches: Sequence[Any] | None) -> float:
        batches, total = alone if batches is None else batches, 0.0
        counts = torch.tensor([batch.counts for batch in batches]).sum(0).to(model.device)
        steps = flat if "layout" in batches[0].inputs else padded
        if isinstance(steps, UnpairedSteps):
            batches = steps.with_mismatched(batches, 0)
        with evaluating(base_model(model), autocast):
            loss.open_step(list(batches))
        for batch in batches:
            kind = "a flattened row of pairs" if "layout" in batch.inputs else "a padded batch of pairs"
            total += _backward(model, kind, autocast, partial(part_of_loss, batch, counts))
        return total

    row = flat.collate(every)
    layout = row.inputs["layout"]
    layout = replace(layout, segments=_borderless(layout.segments))
    layouts = {
        "padding": [padded.collate(part) for part in parts],
        "padding_free": [flat.collate(part) for part in parts],
        "packed": [row],
        **({SHARED: [shared.collate(every)]} if shares else {}),
        "borderless": [replace(row, inputs={**row.inputs, "layout": layout})],
    }
    return compare(model, lengths, layouts, loss_of, backend, autocast)


def compare(
    model: PreTrainedModel,
    lengths: tuple[int, ...],
    layouts: Layouts,
    loss_of: Loss,
    backend: str | None,
    autocast: torch.dtype | None,
) -> Comparison:
    """Runs the definition and the modes on documents of `lengths`.

    Raises CheckFailed where the model cannot even run the definition, or where its loss is not a number.
    """
    base = base_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reference = loss_of(None)
    definition = _take_gradients(trained)
    norm = _norm(definition)
    if not (np.isfinite(reference) and 0 < norm < np.inf):
        raise CheckFailed(
            f"{type(base).__name__} has loss {reference:.6g} with gradients of norm {norm:.3g} on random documents",
            fix="look at its weights, and at model.dtype (float16 overflows early)",
        )

    def figures(batches: Sequence[Any]) -> Figures:
        try:
            value = loss_of(batches)
        except CheckFailed as refusal:
            _take_gradients(trained)
            return Figures(None, None, None, refusal.problems[0].what)
        off = abs(value - reference) / max(abs(reference), 1e-8)
        return Figures(value, off, _distance(trained, definition) / norm)

    control = Figures(None, None, None, "nothing runs packed rows of this model exactly")
    measured = {"padding": figures(layouts["padding"])} | dict.fromkeys(MODES[1:], control)
    if backend is not None:
        with attending_by(base, backend):
            measured |= {mode: figures(batches) for mode, batches in layouts.items() if mode != "padding"}
            control = measured.pop("borderless")
    settings = base.config.get_text_config().to_dict()
    routed = any("expert" in name and type(value) is int and value > 1 for name, value in settings.items())
    tolerances = tolerances_of(autocast or base.dtype, routed=routed)
    return Comparison(lengths, reference, measured, control, *tolerances)


def lengths_for(model: PreTrainedModel) -> tuple[int, ...]:
    """Lengths of the documents, within the model's positions; the last exceeds its windows and chunks up to _LONGEST_WINDOW."""
    config = model.config.get_text_config().to_dict()
    local = [value for name, value in config.items() if ("window" in name or "chunk" in name) and type(value) is int]
    longest = max(_LENGTHS[-1], *(value + 7 for value in local if value <= _LONGEST_WINDOW), 0)
    return tuple(min(length, positions_of(model) or longest) for length in (*_LENGTHS[:-1], longest))


def random_documents(model: PreTrainedModel) -> list[Document]:
    """Documents of `lengths_for(model)`, with most of their tokens trained."""
    rng, vocabulary = np.random.default_rng(0), vocabulary_of(model)
    return [
        Document(rng.integers(0, vocabulary, length, dtype=np.int32), rng.random(length) < _TRAINED)
        for length in lengths_for(model)
    ]


class RandomPairs(list[Preference]):
    """As a PairDataset, in memory; with margins."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in self], np.int32)

    @property
    def margins(self) -> np.ndarray:
        return np.linspace(0, 1, len(self), dtype=np.float32)


def random_pairs(model: PreTrainedModel) -> RandomPairs:
    """Pairs of odd lengths, one of them longer than windows (see `lengths_for`), none longer than the positions."""
    rng, vocabulary, longest = np.random.default_rng(0), vocabulary_of(model), max(lengths_for(model))
    pairs = RandomPairs()
    for prompt, *answers in [*_PAIRS, (longest - 20, 20, 9)] if longest > 40 else _PAIRS:
        asked, *drawn = (rng.integers(0, vocabulary, length, dtype=np.int32) for length in (prompt, *answers))
        sides = [np.concatenate([asked, answer])[:longest] for answer in drawn]
        chosen, rejected = (Document(ids, np.arange(len(ids)) >= prompt) for ids in sides)
        pairs.append(Preference(chosen, rejected, prompt if prompt > 1 else 0))
    return pairs


class RandomAnswers:
    """As an UnpairedDataset, of the answers of random pairs: every other one is desirable."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.documents = [side for pair in random_pairs(model) for side in (pair.chosen, pair.rejected)]
        self.labels = np.arange(len(self.documents)) % 2 == 0
        self.lengths = np.array([len(one.input_ids) for one in self.documents], np.int32)
        self.trained = np.array([one.loss_mask.sum() for one in self.documents], np.int32)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> Document:
        return self.documents[number]


def loss_on_random_pairs(
    objective: DPO | KTO | Reward,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    precision: Precision,
    settings: Trainer,
) -> tuple[Any, Any]:
    """The loss of the objective (against the reference that it has loaded), and the padded steps of a run of one step.

    That has all random pairs, of packtrain kto their answers. The forward of `model` must not be patched yet.
    """
    base = base_model(model)
    data: Any = RandomAnswers(base) if isinstance(objective, KTO) else random_pairs(base)
    lengths = data.lengths
    batch = Batch(examples_per_step=len(data), examples_per_device=len(data))
    schedule = make_schedule(lengths, Packing(mode="padding_free"), batch, max_steps=1)
    kind: Any = (
        UnpairedSteps if isinstance(objective, KTO) else ScoredSteps if isinstance(objective, Reward) else PairSteps
    )
    steps: Any = kind(data, schedule, "padding", int(cast(Any, tokenizer.pad_token_id) or 0))
    if isinstance(objective, KTO):
        steps = replace(steps, max_length=max(lengths))  # within the model's positions
    loop = LoopSettings(steps, None, StopRequest(), Path(settings.output_dir), {}, autocast=precision.autocast)
    once = replace(settings, checkpoint_every=None, eval_every=None)
    arguments = training_arguments(once, Optim(), Tracking(), precision, loop)
    return objective.loss(model, arguments, tokenizer, loop), steps


def start_on_random_pairs(
    loss: DPOLoss | KTOLoss, steps: Any, backend: str | None, layout: PairRows, *, precomputed: bool
) -> Start:
    """The Start on random pairs of a run whose model is its own reference, in its `layout` and by its `backend`.

    With `precomputed` log-probabilities, those of the random pairs are computed here.
    """
    steps = replace(steps, layout=layout)

    def attending(model: Any) -> AbstractContextManager[Any]:
        packs = model is not None and backend is not None and layout != "padding"
        return attending_by(base_model(cast(Any, model)), cast(str, backend)) if packs else nullcontext()

    with attending(loss.model), attending(loss.trl.ref_model):
        if precomputed:
            steps = _with_own_reference(loss, steps)
        return start_of(loss, steps.first_batch(0))


def _with_own_reference(loss: DPOLoss | KTOLoss, steps: Any) -> Any:
    """`steps` with the log-probabilities of the model itself as the reference's."""
    with torch.no_grad(), evaluating(base_model(loss.model)):
        logps = loss.policy_logps(steps.collate(range(len(steps.data))))
        own = torch.stack(logps, dim=1).float().cpu().numpy()
        if not isinstance(steps, UnpairedSteps):
            return replace(steps, reference=own)
        (order,), (pairs,) = steps.mismatched().layout(0)[0], steps.mismatched()[0]
        mismatched = np.empty(len(steps.data), np.float32)
        mismatched[order] = loss.policy_logps(pairs)[0].float().cpu().numpy()
    return replace(steps, reference=own[:, 0], reference_mismatched=mismatched)


def _with_noisy_reference(loss: DPOLoss | KTOLoss, steps: Any) -> Any:
    """`steps` with a reference that is the model and some nats of noise; of kto it keeps each mode's estimate of KL above 0."""
    loss.trl.ref_model = None
    steps, random = _with_own_reference(loss, steps), np.random.default_rng(0)
    noisy = steps.reference + random.normal(0, _OFF, steps.reference.shape).astype(np.float32)
    if not isinstance(steps, UnpairedSteps):
        return replace(steps, reference=noisy)
    lower = np.abs(random.normal(0, _OFF, len(steps.data))).astype(np.float32)
    return replace(steps, reference=noisy, reference_mismatched=cast(np.ndarray, steps.reference_mismatched) - lower)


@dataclass(frozen=True)
class _Borderless(Segments):
    """A row declared as one document, in which only the positions restart at the borders."""

    positions: tuple[int, ...] = ()

    def position_ids(self) -> torch.Tensor:
        return torch.tensor(self.positions)[None]


def _borderless(row: Segments) -> Segments:
    return _Borderless((row.tokens,), positions=tuple(row.position_ids()[0].tolist()))


def _backward(model: Any, what: str, autocast: torch.dtype | None, loss_of: Callable[[], torch.Tensor]) -> float:
    """The loss of `what`; adds its gradients to the parameters'. Raises CheckFailed if the model cannot run it."""
    name = type(base_model(model)).__name__
    with (
        evaluating(base_model(model), autocast),
        refusals_of_a_model(f"{name} cannot run {what}", fix="see what model.config sets"),
    ):
        loss = loss_of()
    with refusals_of_a_model(f"{name} has no gradient", fix="report this model"):
        loss.backward()
    return loss.item()


def _take_gradients(trained: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """Takes the gradients off the parameters; None for those without."""
    taken = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    return taken


def _distance(trained: Sequence[torch.nn.Parameter], definition: Sequence[torch.Tensor | None]) -> float:
    """The norm of the gradients minus `definition`, one parameter after the other; the gradients are dropped."""
    square = 0.0
    for parameter, theirs in zip(trained, definition, strict=True):
        ours, parameter.grad = parameter.grad, None
        square += _norm([ours if theirs is None else theirs if ours is None else ours - theirs]) ** 2
    return square**0.5


def _norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """The norm of all gradients as one vector; sharded ones count over all processes."""
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients if one is not None]
    norms = [(norm.full_tensor() if isinstance(norm, DTensor) else norm).item() for norm in norms]
    return sum(norm**2 for norm in norms) ** 0.5
