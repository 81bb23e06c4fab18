"""Proofs of a loss: the modes, the first answers, and the first loss.

(1) `compare_modes`: loss and gradients of random examples. The definition runs each document or padded pair alone, by the model's own
attention. Documents run with full logits and plain cross-entropy. Pairs and labelled answers run through their own loss; the reference's
log-probabilities are the model's own plus some nats of noise, so no margin is zero. In the positive control the packed row is declared as
ONE document: its gradients must differ by several times the tolerance. Dropout is off, since layouts would draw different numbers.
(2) `check_answer_forward`: answers have the same log-probabilities from packed rows and the fused output head as from padded batches and full
logits.
(3) `measure_first_loss`: if the model starts as its own reference, the first loss has a known value: ln 2 for the sigmoid loss of dpo, half of
the mean weight for kto. For other losses it is computed from the model's log-probabilities on both sides.

Training runs (2) and (3) before step 1, on its first real pairs or answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.attention.backends import attending_by, attention_of, own_attention
from packtrain.attention.over_ranks import sum_over_parts
from packtrain.config.schema import Batch, Packing, Trainer
from packtrain.data.dataset import Document, Preference
from packtrain.errors import CheckFailed, Problem
from packtrain.model.load import base_model
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.objectives.answers import Targets
from packtrain.objectives.spec import CHECKED_LOGITS, COMPARED_PAIRS, Examples
from packtrain.packing.collate import IGNORE, row_arguments
from packtrain.packing.pictures import Sight
from packtrain.packing.prefixes import index_prefixes
from packtrain.packing.schedule import make_schedule
from packtrain.proof.comparison import (
    CONTROL_FACTOR,
    Tolerance,
    check_equal,
    evaluating,
    has_routers,
    model_refusals,
    tolerance_of,
)
from packtrain.proof.isolation import max_positions, vocabulary_size
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import AnswerLoss, Loss, ReferenceLoss, Setup
from packtrain.train.run_state import LoopSettings, StopRequest
from packtrain.train.sight import in_text

if TYPE_CHECKING:  # objectives import this file
    from packtrain.train.objectives.pairs_and_answers import Compared, ComparedSteps
    from packtrain.train.objectives.training_objective import TrainingObjective

MODES = ("padding", "padding_free", "packed")
Pictures = Sequence[Document]
"""Two documents that are a picture each, or none."""
SHARED, SPLIT = "packed with shared prompts", "packed, split over processes"
_LENGTHS = (1, 2, 17, 33, 33, 33, 5, 135)  # a packed row of 259 tokens: some layers have chunks or tables of 256
_ALIKE = ((3, 4, 21), (3, 5, 33), (2, 7, 17))  # numbers of two documents, and how many tokens they begin with in common
_LONGEST_WINDOW = 512  # tokens; a document longer than a larger window would cost more than it shows
_TRAINED = 0.7  # share of the tokens that are trained
_PAIRS = ((10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (18, 6, 11))  # tokens of prompt, chosen, rejected
_SEEING, _SEEING_PAIRS = {3: 1, 4: 1, 5: 1, 6: 0}, {0: 0, 4: 1}
"""Numbers of documents, and of pairs, with a picture, and the number of the picture."""
_OFF = 3.0  # nats, standard deviation of the reference's log-probabilities around the model's
_ENOUGH = 0.45  # a control need not differ by more: without borders gradients differ by 0.5 to 1.7


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean `loss` of a trained token, and relative differences from the definition's loss and gradients.
    The gradients of all trained parameters count as one vector. If the model cannot run it, all are NaN and `problem` says why."""

    loss: float = math.nan
    loss_rel_diff: float = math.nan
    grad_rel_diff: float = math.nan
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measurements by mode on documents of `lengths`.

    The modes are MODES in order, then SHARED and SPLIT if they ran. `reference` is the definition's loss.
    """

    lengths: tuple[int, ...]
    reference: float
    measured: dict[str, Figures]
    control: Figures
    tolerance: Tolerance

    @property
    def off(self) -> list[str]:
        """Return the modes that ran and differ from the definition by more than rounding."""
        ran = {mode: own for mode, own in self.measured.items() if not own.problem}
        loss, gradients = self.tolerance.loss, self.tolerance.gradients  # NaN is within neither
        return [mode for mode, own in ran.items() if not (own.loss_rel_diff <= loss and own.grad_rel_diff <= gradients)]

    @property
    def least_control(self) -> float:
        """Return the least difference of the control's gradients that shows the comparison can see leaks."""
        return min(CONTROL_FACTOR * self.tolerance.gradients, _ENOUGH)

    @property
    def sees(self) -> bool:
        """Return whether the control, which leaks on purpose, differs by `least_control`. If not, the comparison shows nothing."""
        return self.control.grad_rel_diff >= self.least_control


def compare_modes(
    loss: Loss,
    padded: Steps,
    backend: str | None,
    *,
    shares: bool = False,
    split: bool = True,
    part: int = 0,
    ranks_per_row: int = 1,
) -> Comparison:
    """Compare the modes by the loss of `loss_on_random_examples` and its `padded` steps.

    `shares` also compares shared prompts. With `ranks_per_row` > 1 the packed row is also split over that many ranks; `part` is this rank's.
    `backend` runs flattened rows (None: no backend works). `split` is False for a loss that sorts the pairs of a step: every call then takes
    all pairs. Raises CheckFailed if the model cannot run the definition, its loss is not a number, or the output head is not the model's."""
    model, base = loss.model, base_model(loss.model)
    if isinstance(loss, ReferenceLoss):
        loss.reference = None
        padded = with_own_reference(loss, cast("ComparedSteps", padded), off=_OFF)
        check_answer_forward(loss, padded, 0, own_attention(base))
    every = list(range(len(padded.data)))
    flat, shared = replace(padded, layout="flat"), replace(padded, layout="shared")
    layouts = _lay_out(padded, flat, every, split)
    if shares:
        layouts[SHARED] = [shared.collate(every)]
    if ranks_per_row > 1:
        layouts[SPLIT] = [batch.split(part, ranks_per_row) for batch in layouts[SHARED if shares else "packed"]]
    with loss.keeping_metrics():
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if (parts := loss.definition(padded.data)) is not None:
            reference = sum(_backward(model, "a document alone", loss.settings.autocast, part) for part in parts)
        else:
            alone = [padded.collate([number]) for number in every] if split else layouts["padding"]
            reference = _loss_of(loss, padded, alone)
        definition = _take_gradients(trained)
        norm = _norm(definition)
        if not (np.isfinite(reference) and 0 < norm < np.inf):
            of_norm = f"with gradients of norm {norm:.3g} on random documents"
            what = f"{type(base).__name__} has loss {reference:.6g} {of_norm}"
            fix = "check its weights, and model.dtype (float16 overflows early)"
            raise CheckFailed(what, fix=fix, code="definition-not-finite")

        def figures(mode: str) -> Figures:
            try:
                value = _loss_of(loss, padded if mode == "padding" else flat, layouts[mode])
            except CheckFailed as refusal:
                _take_gradients(trained)
                return Figures(problem=refusal.problems[0].what)
            if mode == SPLIT:
                value = _sum_parts(value, trained, ranks_per_row)
            off = abs(value - reference) / max(abs(reference), 1e-8)
            return Figures(value, off, _distance(trained, definition) / norm)

        control = Figures(problem="nothing runs packed rows of this model exactly")
        measured = {"padding": figures("padding")} | dict.fromkeys(MODES[1:], control)
        if backend is not None:
            with attending_by(base, backend):
                measured |= {mode: figures(mode) for mode in layouts if mode != "padding"}
            control = measured.pop("borderless")
    lengths = tuple(len(document.input_ids) for document in padded.data.documents)
    tolerance = tolerance_of(loss.compute_dtype, routed=has_routers(base))
    return Comparison(lengths, reference, measured, control, tolerance)


def _lay_out(padded: Steps, flat: Steps, every: list[int], split: bool) -> dict[str, list[MicroBatch]]:
    """Make the micro-batches of the modes and the control. With `split`, padding and padding_free get two."""
    half = len(every) // 2
    parts = [every[:half], every[half:]] if split else [every]
    return {
        "padding": [padded.collate(part) for part in parts],
        "padding_free": [flat.collate(part) for part in parts],
        "packed": [flat.collate(every)],
        "borderless": [_without_borders(flat.collate(every))],
    }


def _loss_of(loss: Loss, steps: Steps, batches: Sequence[MicroBatch]) -> float:
    """Return the loss of one step of these micro-batches, in the layout of `steps`. Add its gradients to the parameters'."""
    model, autocast = loss.model, loss.settings.autocast
    counts = torch.tensor([batch.counts for batch in batches]).sum(0).to(model.device)
    batches = steps.complete(batches, 0)
    with evaluating(base_model(model), autocast):
        loss.open_step(list(batches))

    def part(batch: MicroBatch) -> torch.Tensor:
        return loss.compute(model, batch, counts) / loss.accelerator.num_processes

    what = "a padded batch" if steps.layout == "padding" else "a flattened row"
    return sum(_backward(model, what, autocast, partial(part, batch)) for batch in batches)


def _sum_parts(loss: float, trained: Sequence[torch.nn.Parameter], parts: int) -> float:
    """Sum the losses and gradients of a row's parts, in place for gradients. Return the row's loss."""
    for parameter in trained:
        if isinstance(parameter.grad, DTensor):  # already averaged over ranks, as if each had the whole row
            parameter.grad *= parts
        else:  # an expert may have seen only tokens of another part
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = sum_over_parts(own.detach(), parts)
    return sum_over_parts(torch.tensor(loss, dtype=torch.float64, device=trained[0].device), parts).item()


def lengths_for(model: PreTrainedModel) -> tuple[int, ...]:
    """Return document lengths within the model's positions. The last exceeds all windows and chunks up to _LONGEST_WINDOW."""
    config = model.config.get_text_config().to_dict()
    local = [value for name, value in config.items() if ("window" in name or "chunk" in name) and type(value) is int]
    longest = max(_LENGTHS[-1], *(value + 7 for value in local if value <= _LONGEST_WINDOW), 0)
    return tuple(min(length, max_positions(model) or longest) for length in (*_LENGTHS[:-1], longest))


class RandomExamples(list[Any]):
    """An in-memory data set of documents, pairs or labelled answers. Pairs have margins; every second answer is desirable."""

    def __init__(self, model: PreTrainedModel, examples: Examples, sight: Sight | None, pictures: Pictures) -> None:
        """Draw uneven lengths, one longer than windows (see `lengths_for`), none longer than the positions.

        Some documents, or prompts, get one of two `pictures`; three documents have it in their common beginning.
        """
        random, vocabulary, lengths = np.random.default_rng(0), vocabulary_size(model), lengths_for(model)

        def tokens(count: int) -> np.ndarray:
            drawn = random.integers(0, vocabulary, count, dtype=np.int32)
            return drawn if sight is None else sight.as_text(drawn).astype(np.int32)

        def seeing(document: Document, number: int, places: Mapping[int, int]) -> Document:
            return in_text(pictures[places[number]], document) if pictures and number in places else document

        if examples == "documents":
            ids = [tokens(length) for length in lengths]
            for one, other, alike in _ALIKE:
                ids[other][:alike] = ids[one][:alike]
            drawn = [Document(own, random.random(len(own)) < _TRAINED) for own in ids]
            super().__init__(seeing(own, number, _SEEING) for number, own in enumerate(drawn))
            self.documents: list[Document] = list(self)
        else:
            every = [*_PAIRS, (lengths[-1] - 20, 20, 9)] if lengths[-1] > 40 else _PAIRS
            for number, (prompt, *answers) in enumerate(every):
                asked, *drawn = (tokens(length) for length in (prompt, *answers))
                sides = [np.concatenate([asked, answer])[: lengths[-1]] for answer in drawn]
                made = (Document(ids, np.arange(len(ids)) >= prompt) for ids in sides)
                chosen, rejected = (seeing(own, number, _SEEING_PAIRS) for own in made)
                longer = len(chosen.input_ids) - len(sides[0])
                self.append(Preference(chosen, rejected, prompt + longer if prompt + longer > 1 else 0))
            self.documents = [side for pair in self for side in (pair.chosen, pair.rejected)]
            if examples == "answers":
                self[:] = self.documents
        each = len(self.documents) // len(self)
        self.lengths = np.array([len(document.input_ids) for document in self.documents], np.int32)
        self.lengths = self.lengths.reshape(-1, each).sum(axis=1, dtype=np.int32)
        self.trained = np.array([document.loss_mask.sum() for document in self.documents], np.int32)
        self.margins = np.linspace(0, 1, len(self), dtype=np.float32)
        if examples == "answers":
            self.labels = np.arange(len(self)) % 2 == 0


def loss_on_random_examples(
    objective: TrainingObjective,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    precision: Precision,
    settings: Trainer,
    sight: Sight | None = None,
    pictures: Pictures = (),
) -> tuple[Loss, Steps]:
    """Return the objective's loss, against its loaded reference, and padded steps of a one-step run.

    The step has all random examples, some with `pictures`. The forward of `model` must not be patched yet.
    """
    examples = objective.objective.spec.examples
    data = RandomExamples(base_model(model), examples, sight, pictures)
    batch = Batch(examples_per_step=len(data), examples_per_device=len(data))
    prefixes = index_prefixes(data) if examples == "documents" else None
    schedule = make_schedule(data.lengths, Packing(mode="padding_free"), batch, max_steps=1)
    schedule = replace(schedule, prefixes=prefixes)
    pad = int(cast(Any, tokenizer.pad_token_id) or 0)
    steps = replace(objective.steps(data, schedule, pad, Ranks(0, 1, model.device)), layout="padding", sight=sight)
    steps = steps.within(max(data.lengths))  # stay within the model's positions
    place, autocast = Path(settings.output_dir), precision.autocast
    loop = LoopSettings(steps, {}, StopRequest(), place, {}, autocast=autocast, trainer=settings)
    return objective.loss(Setup(model, tokenizer, loop)), steps


def start_on_random_pairs(
    loss: ReferenceLoss, steps: ComparedSteps, backend: str | None, *, precomputed: bool
) -> FirstLoss:
    """Measure the FirstLoss on the random examples of `steps`; the model is its own reference.

    `backend` runs the rows (None: padded). `precomputed` computes the examples' log-probabilities here, as a run with precomputed ones does.
    """
    with ExitStack() as stack:
        for model in filter(None, (loss.model, getattr(loss, "reference", None))) if backend is not None else ():
            stack.enter_context(attending_by(base_model(model), cast(str, backend)))
        return measure_first_loss(loss, (with_own_reference(loss, steps) if precomputed else steps).first_batch(0))


def with_own_reference(loss: ReferenceLoss, steps: Compared, *, off: float = 0.0) -> Compared:
    """Return `steps` whose reference log-probabilities are the model's own plus noise of `off` nats."""

    def logps(batch: MicroBatch) -> np.ndarray:
        return torch.stack(loss.policy_logps(batch), dim=1).squeeze(1).float().cpu().numpy()

    with torch.no_grad(), evaluating(base_model(loss.model)):
        return steps.with_reference_by(logps, np.random.default_rng(0), off)


def _without_borders(row: MicroBatch) -> MicroBatch:
    """Return the control: `row` as one document. Only its positions restart at the borders."""
    positions = {"position_ids": row.inputs["position_ids"]}
    segments = row.inputs["segments"]
    whole = replace(segments, lengths=(segments.tokens,), prefixes=())
    return replace(row, inputs={**row.inputs, **row_arguments(whole), **positions})


def _backward(
    model: torch.nn.Module, what: str, autocast: torch.dtype | None, loss_of: Callable[[], torch.Tensor]
) -> float:
    """Return the loss of `what`; add its gradients to the parameters'. Raises CheckFailed if the model cannot run it."""
    name = type(base_model(model)).__name__
    with (
        evaluating(base_model(model), autocast),
        model_refusals(f"{name} cannot run {what}", fix="see what model.config sets"),
    ):
        loss = loss_of()
    with model_refusals(f"{name} has no gradient", fix="report this model"):
        loss.backward()
    return loss.item()


def _take_gradients(trained: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """Take the gradients off the parameters; None for parameters without one."""
    taken = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    return taken


def _distance(trained: Sequence[torch.nn.Parameter], definition: Sequence[torch.Tensor | None]) -> float:
    """Return the norm of the gradients minus `definition`, and drop the gradients."""
    pairs = zip(_take_gradients(trained), definition, strict=True)
    return _norm(ours if theirs is None else theirs if ours is None else ours - theirs for ours, theirs in pairs)


def _norm(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return the norm of all gradients as one vector. Sharded ones count over all processes."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients if gradient is not None]
    norms = [(norm.full_tensor() if isinstance(norm, DTensor) else norm).item() for norm in norms]
    return sum(norm**2 for norm in norms) ** 0.5


@torch.no_grad()
def check_answer_forward(loss: AnswerLoss, steps: Steps, first_step: int, attention: str) -> None:
    """Compare log-probabilities of the first answers with a padded batch and full logits.

    It compares at most COMPARED_PAIRS pairs (or twice as many answers), and for long answers only every n-th token: at most CHECKED_LOGITS
    logits. `attention` is the model's original implementation. Raises CheckFailed if they differ.
    """
    model, base = loss.model, base_model(loss.model)
    numbers, sides = steps.first_examples(first_step), len(loss.answers)
    few = numbers[: 2 * COMPARED_PAIRS // sides]
    batch = steps.collate(numbers).inputs_on(loss.device)
    padded = replace(steps, layout="padding").collate(few).inputs_on(loss.device)
    ids, counts, slots = padded["input_ids"], padded["target_counts"], padded["input_ids"].shape[1]
    columns = (padded["target_places"] % slots).unique()
    max_columns = max(2, CHECKED_LOGITS // (len(ids) * vocabulary_size(base)))
    columns = columns[:: max(1, math.ceil(len(columns) / max_columns))]
    takes = signature(type(base).forward).parameters
    given = {name: value for name, value in padded.items() if name in takes}
    keep = {"logits_to_keep": columns} if "logits_to_keep" in takes else {}
    with evaluating(model), loss.accelerator.autocast():
        log_probs = loss.targets_of(loss.score_tokens(model, batch), batch)
        with (
            attention_of(base, attention),
            model_refusals(f"{type(base).__name__} cannot run padded pairs", fix="please report this model"),
        ):
            logits = model(**given, **keep, use_cache=False).logits
    logits = logits if logits.shape[1] == len(columns) else logits[:, columns]
    labels = padded["shift_labels"][:, columns]
    nll = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="none")
    theirs = -nll.view(labels.shape).sum(dim=1)[: len(counts)]  # a blank picture has no answer
    own = log_probs.split(batch["target_counts"].tolist())
    ours = torch.cat([part for side in range(sides) for part in own[side * len(numbers) :][: len(few)]])
    compared = torch.isin(padded["target_places"] % slots, columns)
    ours = Targets(torch.where(compared, ours, 0).float(), counts).logps

    what = (
        "an answer of the first pairs has log-probability {candidate:.6g}, but {definition:.6g} from padded batches and full "
        f"logits of {type(base).__name__}"
    )
    fix = "its output head or attention is of a kind that packtrain does not know: please report this model"
    check_equal(ours, theirs, tolerance_of(loss.compute_dtype).loss, what, fix=fix, code="answers-differ")


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """First loss, the loss at a zero margin, their tolerance, a problem if they differ."""

    loss: float
    zero_margin: float
    tolerance: float
    problems: tuple[Problem, ...] = ()


def check_first_loss(loss: ReferenceLoss, batch: MicroBatch) -> float:
    """Return the loss of the first pairs or answers. Raises CheckFailed unless it is the one of a zero margin."""
    first = measure_first_loss(loss, batch)
    if first.problems:
        raise CheckFailed(list(first.problems))
    return first.loss


@torch.no_grad()
def measure_first_loss(loss: ReferenceLoss, batch: MicroBatch) -> FirstLoss:
    """Measure the first loss of a model that is its own reference. Called on all processes together."""
    model, training = loss.model, loss.model.training
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        model.eval()  # the value to expect has no dropout
        zero_margin = loss.zero_margin_loss(batch)
        if zero_margin is None:
            zero_margin = loss.standalone_loss(batch, reference=loss.policy_logps(batch))
        model.train()  # dropout that training would have shows as a wrong first loss
        policy, reference = loss.policy_logps(batch), loss.reference_logps(batch)
        first = loss.standalone_loss(batch)
    model.train(training)
    rounding = _rounding(loss, batch, max(part.abs().max().item() for part in (*policy, *reference)))
    tolerance = max(1e-6, rounding * loss.beta) * max(1.0, abs(zero_margin))
    if abs(first - zero_margin) <= tolerance:
        return FirstLoss(first, zero_margin, tolerance)
    ours, theirs = (torch.stack(logps).float() for logps in (policy, reference))  # [answers of an example, examples]
    side, number = divmod(int((ours - theirs).abs().argmax()), ours.shape[1])
    what = (
        f"the first loss is {first:.7g}, but {zero_margin:.7g} while the model is its own reference: {loss.answers[side]} "
        f"{number + 1} of the first micro-batch has log-probability {ours[side, number]:.7g} by the model and "
        f"{theirs[side, number]:.7g} by the reference"
    )
    settings = base_model(model).config.to_dict()
    dropout = [f"model.config.{name}=0" for name, value in settings.items() if "drop" in name and value]
    fix = f"set {', '.join(dropout)}" if dropout else "look for dropout in the model's code"
    if _precomputed(batch):
        fix += "; remove the folder `reference` of the data cache, whose log-probabilities may be stale"
    else:
        fix += "; give both sides the same weights and adapters in the same model.dtype (objective.reference=auto does)"
    problem = Problem(what, "objective.reference", fix, code="first-loss-wrong")
    return FirstLoss(first, zero_margin, tolerance, (problem,))


def _rounding(loss: ReferenceLoss, batch: MicroBatch, largest: float) -> float:
    """Return the tolerance in nats between the two log-probabilities of an answer.

    `largest` is the largest absolute log-probability. In 16 bits, two calls of the model on one row show its noise. A reference whose weights
    have the adapters merged in also rounds each token differently: it gets an allowance of 16 units in the last place times √tokens (measured:
    0.64 nats over 358 tokens of SmolLM2-135M in bfloat16, whose unit is 0.0078). Precomputed values come from the same rows: 1/100 of it.
    """
    rounding = 4 * torch.finfo(torch.float32).eps * largest
    if loss.compute_dtype.itemsize > 2:
        return rounding
    with evaluating(loss.model):
        once, again = (torch.stack(loss.policy_logps(batch)).float() for _ in range(2))
    rounding += 4 * (once - again).abs().max().item()
    tokens = int(batch.inputs["target_counts"].max())
    allowance = 16 * torch.finfo(loss.compute_dtype).eps * math.sqrt(tokens)
    if loss.reference is not None and any("lora_B" in name for name, _ in loss.model.named_parameters()):
        return rounding + allowance
    return rounding + (allowance / 100 if _precomputed(batch) else 0)


def _precomputed(batch: MicroBatch) -> bool:
    """Whether log-probabilities of the reference come with the batch."""
    return any(name.startswith("ref_") for name in batch.inputs)
