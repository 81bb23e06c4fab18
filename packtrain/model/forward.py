"""All additions to `model.forward`: losses of documents, scores of answers and of tokens.

`model(**batch, loss_sum=True)` returns the sum of the trained tokens' losses of documents. `model(**batch, answer_scores=True)` returns
log-probabilities and other outputs for each token of a batch of answers, [rows, T]. Both run at the labelled places only. The CPU finds these
places, and they come with the batch: TRL would read them from the device, and wait for it.

There are three heads for documents, and `choose_head` takes the first that fits the model. `sum_losses` is for plain linear layers. It makes the
gradients in the forward pass, some thousand tokens at a time. TRL's fused head, which gives single tokens, computes all logits again in its backward
pass: four products of tokens × hidden × vocabulary instead of three. The last one makes all logits at once.

With Triton, TRL's kernels turn logits into gradients in `sum_losses` too, in place. They are private to TRL: if a version has others, this head is
refused on the first rows. torch's `linear_cross_entropy` and Liger's head also take three products. But in bfloat16 they add up the weight's
gradient in bfloat16 over pieces of a few hundred tokens, and torch adds up the loss in bfloat16 as well. Here both are float32.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head, maybe_gather_lm_head_ctx

from packtrain.attention.backends import attend_by
from packtrain.config.objective import Objective
from packtrain.errors import CheckFailed
from packtrain.model.load import SCORE_HEAD
from packtrain.model.precision import compute_in
from packtrain.objectives.spec import TokenWeights, equal_weights, head_chunk
from packtrain.packing.collate import IGNORE, label_positions, to_device
from packtrain.packing.segments import own_tokens
from packtrain.proof.comparison import evaluating, model_refusals, tolerance_of
from packtrain.system import holding

Batch = dict[str, Any]
"""Arguments of a model's forward by name: the tensors of a collated micro-batch, and more."""
Places = np.ndarray | None
_CPU_CHUNK = 512
_SLICE = 128  # number of tokens with float32 log-probabilities at a time, without Triton
_ALIGNED = 64  # rows of logits are padded to a multiple of it: products are then fast for any vocabulary
_PLAIN = {"logit_scale": 1.0, "softcap": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}  # for TRL's kernels
_TOKEN_FACTOR = 20  # tolerance of single tokens, as a multiple of the sum's tolerance; errors cancel in the sum
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
HeadKind = Literal["summed", "by token", "full logits"]
"""How the losses of documents are made: by `sum_losses`, by TRL's head for each token, or from all logits at once."""


@dataclass(slots=True)
class Head:
    """Output head of documents. `refusal` says why the head that was tried before does not fit; "" for the first."""

    weigh: TokenWeights
    kind: HeadKind
    refusal: str = ""
    tokens: Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], object]], TokenLoss] | None = None
    """Makes a loss from targets and the numbers of their tokens in the row, int64 [n] each, and a function. The loss gives the function minus
    the losses of tokens, part by part. None: ChosenTokens."""
    record: list[tuple[np.ndarray, list[torch.Tensor]]] | None = None
    """Unless None, each call of `loss_sum` adds the document of each target, int64 [n] (`label_owners`), and minus their losses in parts."""

    @torch.no_grad()
    def losses_of(self, documents: int) -> torch.Tensor:
        """Return the sum of the recorded losses by document, float64 [documents]."""
        owners, parts = zip(*self.record or (), strict=True)
        negative = torch.cat([part.flatten() for own in parts for part in own]).double()
        places = to_device(torch.from_numpy(np.concatenate(owners)), negative.device)
        return negative.new_zeros(documents).index_add_(0, places, negative, alpha=-1)


def patch_forward(
    model: PreTrainedModel,
    *,
    token_objective: Objective | None = None,
    answer_outputs: tuple[str, ...] = (),
    scores: bool = False,
    autocast: torch.dtype | None = None,
    backend: str | None = None,
) -> Head | None:
    """Wrap the forward of `model`, innermost first.

    1. TRL's fused LM head, with the per-token outputs named by `answer_outputs`
    2. the objective's own call: `loss_sum=True` for `token_objective`, `answer_scores=True` for `answer_outputs`, `every_token=True` for
       `scores`
    3. `autocast`, if the trainer does not apply it (DeepSpeed)
    4. attention by segments, by the chosen `backend` (attention/backends.py); None keeps the model's attention

    Hooks around single calls watch routers (model/routers.py). Returns the output head of documents.
    """
    head = None
    if token_objective is not None:
        noise = token_objective.options.get("neftune_noise_alpha") or 0  # documents of another package may lack it
        head = add_loss_sum(model, weigh=token_objective.token_weights, neftune_alpha=noise)
    if answer_outputs:
        add_answer_scores(model, answer_outputs)
    if scores:
        add_scores(model)
    if autocast is not None:
        compute_in(model, autocast)
    if backend is not None:
        attend_by(model, backend)
    return head


def add_calls(model: PreTrainedModel, names: tuple[str, ...], run: Callable[..., object]) -> None:
    """Let `model(**batch, name=True)` return `run(model, name, labels, places, owners, batch)`, for each of `names`.

    `labels` are the `shift_labels` of a collated batch, `places` its `label_places`, `owners` its `label_owners`; None if it has none.
    """
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: object, **batch: object) -> object:
        asked = [name for name in names if batch.pop(name, False)]
        places, owners, _ = (batch.pop(f"label_{name}", None) for name in ("places", "owners", "records"))
        if not asked:
            return inner(*args, **batch)
        return run(self, asked[0], batch.pop("shift_labels", None), places, owners, batch)

    model.forward = types.MethodType(forward, model)


def name_backbone(model: PreTrainedModel) -> None:
    """Make `model.base_model` the model without its head."""
    # Llama4ForCausalLM stores its backbone under another prefix
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"


def add_loss_sum(model: PreTrainedModel, *, weigh: TokenWeights = equal_weights, neftune_alpha: float = 0) -> Head:
    """Add `loss_sum=True` to the forward of `model`.

    With it the forward takes a collated batch with `shift_labels` and returns the sum of the losses at all positions whose label is not IGNORE
    (`label_places`; None: read from the labels). The sum is connected to every parameter even without such positions. For proofs,
    `token_losses=True` returns these losses [rows, T], 0 elsewhere; `head_gradients=True` returns how far the gradients of a summed head are
    from the gradients of full logits. `neftune_alpha` adds noise while training (`_embedding_noise`). `choose_head` may change the kind of the
    returned Head.
    """
    name_backbone(model)
    inner_forward = model.forward
    head, labelled = Head(weigh, "summed" if _is_linear(model) else "by token"), _LabelledHead(model, ("log_probs",))

    def lose(
        self: PreTrainedModel, asked: str, labels: torch.Tensor, at: Places, owners: Places, batch: Batch
    ) -> object:
        if getattr(self.config.get_text_config(), "output_router_logits", False):
            batch["output_router_logits"] = False  # skips the model's own router loss, which is not used
        with _embedding_noise(self, neftune_alpha, batch) if neftune_alpha and self.training else nullcontext():
            places = places_on(labels, at)  # a place may occur several times
            parts = list[torch.Tensor]()
            targets, numbers = labels.flatten()[places], batch.pop("labels", None)
            loss: TokenLoss = ChosenTokens(targets, partial(_weigh_and_note, weigh, parts))
            if head.tokens:  # documents may run one by one: `labels` then has the numbers of tokens in the whole row
                loss = head.tokens(targets, places if numbers is None else numbers.flatten()[places], parts.append)
            if head.record is not None and owners is not None and len(owners):
                head.record.append((owners, parts))
            if head.kind == "full logits":
                logits = inner_forward(**batch, use_cache=False).logits
                if head.tokens and asked == "loss_sum":
                    return _sum_of_logits(logits.flatten(0, 1)[places], loss)
                log_probs = _log_probs(logits, labels)
            else:
                hidden = self.base_model(**batch, use_cache=False).last_hidden_state
                if head.kind == "summed" and asked != "token_losses":
                    run = compare_gradients if asked == "head_gradients" else sum_losses
                    return run(hidden.flatten(0, 1)[places], cast(nn.Linear, self.get_output_embeddings()), loss)
                once = places_on(labels, None if at is None else np.unique(at))
                log_probs = cast(torch.Tensor, labelled.run_head(hidden, labels, once).log_probs)
        losses = -weigh(log_probs) * log_probs
        if asked == "token_losses":
            return losses
        own = losses.flatten()[places]
        parts.append(-own.detach())
        return own.sum()

    add_calls(model, ("loss_sum", "token_losses", "head_gradients"), lose)
    return head


def _weigh_and_note(weigh: TokenWeights, losses: list[torch.Tensor], log_probs: torch.Tensor) -> torch.Tensor:
    """Return the weights of tokens. Add minus their losses to `losses`."""
    weights = weigh(log_probs)
    losses.append(log_probs if weigh is equal_weights else weights * log_probs)
    return weights


def _embedding_noise(model: PreTrainedModel, alpha: float, batch: Batch) -> AbstractContextManager[object]:
    """Add NEFTune noise (arXiv 2310.05914) to embeddings. It is uniform in ±alpha / sqrt(l · d), for a document of l tokens."""
    if (segments := batch.get("segments")) is not None:
        lengths = torch.tensor(segments.lengths).repeat_interleave(torch.tensor(segments.lengths))
        lengths = lengths[None, own_tokens(segments)]
    else:
        lengths = batch["attention_mask"].sum(dim=1, keepdim=True)

    def add_noise(module: nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        magnitude = alpha / torch.sqrt(to_device(lengths, embeddings.device) * embeddings.shape[-1])
        return embeddings + torch.empty_like(embeddings).uniform_(-1, 1) * magnitude[..., None].to(embeddings.dtype)

    return model.get_input_embeddings().register_forward_hook(add_noise)


def places_on(labels: torch.Tensor, places: np.ndarray | None) -> torch.Tensor:
    """Return the places, int64 [n], on the device of `labels`. None: read them from the labels, which waits for the device."""
    return to_device(torch.from_numpy(label_positions(labels) if places is None else places), labels.device)


def _log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, float32 [rows, T], of `labels` [rows, T]. `logits`: [rows, T, vocabulary]; 0 without a label."""
    nll = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return -nll.view(labels.shape)


@torch.no_grad()
def choose_head(
    model: PreTrainedModel,
    head: Head,
    batch: Batch,
    *,
    autocast: torch.dtype | None = None,
    tolerance: float | None = None,
) -> float:
    """Choose the first kind of head with the full logits' losses on one micro-batch. A model may have steps that a fused head lacks (a
    transform before the head, a cap under another name). A summed head must also have the right gradients.

    Sums could agree by chance, so single tokens are compared as well. Returns the relative difference of the losses, infinite if no fused head
    can run. Raises CheckFailed if the model cannot run the batch.
    """
    name, labels = type(model).__name__, batch["shift_labels"]
    plain = {name: value for name, value in batch.items() if name not in ("shift_labels", "label_places")}
    allowed, difference = tolerance_of(autocast or model.dtype), math.inf
    kinds: tuple[HeadKind, ...] = ("summed", "by token") if head.kind == "summed" else ("by token",)
    kinds = kinds if head.tokens is None else (head.kind,)
    with evaluating(model, autocast):
        with model_refusals(f"{name} cannot run a batch", fix="see what model.config sets"):
            log_probs = _log_probs(model(**plain, use_cache=False).logits, labels)
        losses = -head.weigh(log_probs) * log_probs
        for kind in kinds:
            head.kind = kind
            try:
                with model_refusals("cannot run", fix=""):
                    difference = _loss_difference(model, batch, losses)
                    gradients = model(**batch, head_gradients=True).item() if kind == "summed" else 0.0
            except CheckFailed as refusal:
                difference, head.refusal = math.inf, refusal.problems[0].what
                continue
            # False for NaN, too
            if difference <= (tolerance or allowed.loss) and gradients <= (tolerance or allowed.gradients):
                return difference
            head.refusal = f"does not fit {name} (its loss is off by {difference:.1g}, gradients by {gradients:.1g})"
    head.kind = "full logits"
    return difference


def _loss_difference(model: PreTrainedModel, batch: Batch, losses: torch.Tensor) -> float:
    """Return how far the head's losses are from these, relative to their sum. Both the sum and single tokens count."""
    off_sum = (model(**batch, loss_sum=True) - losses.sum()).abs()
    off_tokens = (model(**batch, token_losses=True) - losses).abs().sum() / _TOKEN_FACTOR
    return (off_sum.maximum(off_tokens) / losses.sum().abs().clamp(min=1e-8)).item()


def _is_linear(model: PreTrainedModel) -> bool:
    """Return whether the logits are a plain linear map of the last hidden state."""
    config = model.config.get_text_config()
    plain = all(getattr(config, name, None) in (None, 1, 1.0) for name in _HEAD_EXTRAS)
    return plain and type(model.get_output_embeddings()) is nn.Linear


class TokenLoss(Protocol):
    """A loss of tokens by their logits [n, vocabulary]."""

    def in_place(self, logits: torch.Tensor, part: slice, *, trains: bool) -> torch.Tensor:
        """Sum the losses of the tokens in a slice, a float32 scalar. If it `trains`, `logits` become the gradients of that sum."""
        ...

    def definition(self, logits: torch.Tensor) -> torch.Tensor:
        """Sum the losses of all tokens, for autograd."""
        ...


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The loss of `targets` int64 [n]: minus their log-probabilities, weighed."""

    targets: torch.Tensor
    weigh: TokenWeights

    def in_place(self, logits: torch.Tensor, part: slice, *, trains: bool) -> torch.Tensor:
        """See TokenLoss."""
        by = _by_triton if _kernels()._use_triton(logits.device) else _by_torch
        return by(logits, self.targets[part], self.weigh, trains=trains)

    def definition(self, logits: torch.Tensor) -> torch.Tensor:
        """See TokenLoss."""
        log_probs = -F.cross_entropy(logits.float(), self.targets, reduction="none")
        return -(self.weigh(log_probs) * log_probs).sum()


def sum_losses(hidden: torch.Tensor, head: nn.Linear, loss: TokenLoss) -> torch.Tensor:
    """Sum the losses of tokens after `hidden` [n, d]: a float32 scalar. Its backward pass runs only once.

    The products of `head` are in float32 on a CPU, elsewhere in autocast's format or the format of `hidden`.
    """
    with maybe_gather_lm_head_ctx(head.weight, head.bias):  # type: ignore[arg-type]
        return _SummedLoss.apply(hidden, head.weight, head.bias, loss, torch.is_grad_enabled())  # type: ignore[return-value]


@torch.enable_grad()
def compare_gradients(hidden: torch.Tensor, head: nn.Linear, loss: TokenLoss) -> torch.Tensor:
    """Compare the gradients of `sum_losses` with full logits. Returns the largest relative difference, a scalar, over `hidden` [n, d]
    and the trained weights of `head`."""
    with maybe_gather_lm_head_ctx(head.weight, head.bias):  # type: ignore[arg-type]
        rows, weight = hidden.detach().requires_grad_(), head.weight.detach().requires_grad_(head.weight.requires_grad)
        bias = None if head.bias is None else head.bias.detach().requires_grad_(head.bias.requires_grad)
        inputs = [tensor for tensor in (rows, weight, bias) if tensor is not None and tensor.requires_grad]
        own = _SummedLoss.apply(rows, weight, bias, loss, True)
        definition = loss.definition(F.linear(rows, weight, bias))
        pairs = zip(torch.autograd.grad(own, inputs), torch.autograd.grad(definition, inputs), strict=True)
        floats = [(one.float(), other.float()) for one, other in pairs]
        return torch.stack([(one - other).norm() / other.norm().clamp(min=1e-30) for one, other in floats]).max()


def _sum_of_logits(logits: torch.Tensor, loss: TokenLoss) -> torch.Tensor:
    """Sum the losses of tokens with all their logits [n, vocabulary]."""
    made, trains = logits.detach().clone(), torch.is_grad_enabled()
    total = loss.in_place(made, slice(0, len(made)), trains=trains)
    return total + ((logits - logits.detach()) * made).sum() if trains else total  # adds 0, with the gradients `made`


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        loss: TokenLoss,
        trains: bool,
    ) -> torch.Tensor:
        device, words, dtype = hidden.device, len(weight), compute_dtype(hidden)
        rows, matrix = hidden.to(dtype), weight.to(dtype)
        needed = [trains and needs for needs in ctx.needs_input_grad[:3]]
        chunk = _CPU_CHUNK
        if device.type == "cuda":
            chunk = head_chunk(words, dtype.itemsize, torch.cuda.get_device_properties(device).total_memory)
        buffer = rows.new_empty(min(len(rows), chunk), -(-words // _ALIGNED) * _ALIGNED)
        total = torch.zeros((), device=device)
        of_hidden = torch.empty_like(rows) if needed[0] else None
        of_weight = torch.zeros(weight.shape, device=device) if needed[1] else None
        of_bias = torch.zeros(words, device=device) if needed[2] else None
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            logits = buffer[: len(part), :words]
            torch.mm(part, matrix.t(), out=logits)
            if bias is not None:
                logits.add_(bias.to(dtype))
            total += loss.in_place(logits, slice(start, start + len(part)), trains=any(needed))
            if of_hidden is not None:
                torch.mm(logits, matrix, out=of_hidden[start : start + chunk])
            if of_weight is not None:
                _kernels()._addmm_fp32(of_weight, logits.t(), part)
            if of_bias is not None:
                of_bias += logits.sum(dim=0, dtype=torch.float32)
        ctx.gradients = (of_hidden, hidden.dtype), (of_weight, weight.dtype), (of_bias, bias is not None and bias.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [made if made is None else made.mul_(gradient).to(dtype) for made, dtype in gradients]
        return *scaled, None, None


def _kernels() -> ModuleType:
    from trl.kernels import chunked_logprob

    return chunked_logprob


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the format of products with an output head.

    It is float32 on a CPU, elsewhere autocast's format, or without autocast the format of `hidden`.
    """
    kind = hidden.device.type
    if kind == "cpu":
        return torch.float32
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _by_torch(logits: torch.Tensor, targets: torch.Tensor, weigh: TokenWeights, *, trains: bool) -> torch.Tensor:
    """Sum the losses of `targets` as `in_place` does, some rows at a time in float32."""
    total = torch.zeros((), device=logits.device)
    for part, goals in zip(logits.split(_SLICE), targets[:, None].split(_SLICE), strict=True):
        log_probs = part.log_softmax(dim=-1, dtype=torch.float32)
        own = log_probs.gather(1, goals)
        weights = weigh(own)
        total -= (weights * own).sum()
        if trains:
            part.copy_(log_probs.exp_().scatter_add_(1, goals, -torch.ones_like(own)).mul_(weights))
    return total


def _by_triton(logits: torch.Tensor, targets: torch.Tensor, weigh: TokenWeights, *, trains: bool) -> torch.Tensor:
    """Sum the losses of `targets` as `in_place` does, by TRL's kernels. They read `logits` once for the loss and once for the gradients."""
    kernels, (count, words) = _kernels(), logits.shape
    block, no_figures = kernels._BLOCK_SIZE, {f"HAS_{name.upper()}": False for name in kernels.OPTIONAL_OUTPUTS}
    highest = torch.full((count,), -math.inf, device=logits.device)
    exps, own = torch.zeros(2, count, device=logits.device)
    unused, given = exps, (logits, logits.stride(0), targets)
    kernels._forward_kernel[(count,)](
        *given, highest, exps, unused, unused, unused, unused, own, 0, words, **no_figures, **_PLAIN, BLOCK_SIZE=block
    )
    log_sums = highest + exps.log()
    own -= log_sums
    weights = weigh(own)
    if trains:
        flags = {**_PLAIN, "HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False, "BLOCK_SIZE": block}
        kernels._backward_kernel[(count, -(-words // block))](
            *given, log_sums, unused, -weights, unused, 0, words, **flags
        )
    return -(weights * own).sum()


def add_answer_scores(model: PreTrainedModel, outputs: tuple[str, ...]) -> None:
    """Add `answer_scores=True` to the forward of `model`, which already has TRL's `add_fused_lm_head` for these `outputs`.

    With it the forward takes a collated batch with `shift_labels` and returns the outputs for each token, [rows, T], 0 without a label.
    """
    name_backbone(model)
    head = _LabelledHead(model, outputs)

    def score(
        self: PreTrainedModel, asked: str, labels: torch.Tensor, at: Places, owners: Places, batch: Batch
    ) -> object:
        hidden = self.base_model(**{**batch, "use_cache": False}).last_hidden_state
        return head.run_head(hidden, labels, places_on(labels, at))

    add_calls(model, ("answer_scores",), score)


class _LabelledHead:
    """TRL's fused output head of `model`, for given hidden states and places."""

    def __init__(self, model: PreTrainedModel, outputs: tuple[str, ...]) -> None:
        self.config, self._model = model.config, model
        # stands in for a model: TRL replaces `forward`, which uses only config, base_model and get_output_embeddings
        add_fused_lm_head(cast(PreTrainedModel, self), outputs=outputs)

    def base_model(self, hidden: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self) -> nn.Module | None:
        return self._model.get_output_embeddings()

    def forward(self, *_: object, **__: object) -> FusedCausalLMOutput:
        """Does nothing: TRL's head replaces it."""
        raise NotImplementedError

    def run_head(self, hidden: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> FusedCausalLMOutput:
        """Return per-token outputs [rows, T] of `hidden` [rows, T, d]. They are 0 outside `places`."""
        with holding(trl_utils, _use_triton=lambda device: False):  # it scores all places, without a search for labels
            scored = self.forward(
                hidden.flatten(0, 1)[places][None],
                shift_labels=labels.flatten()[places][None],
                fused_lm_head=True,
                output_router_logits=False,
            )
        figures = {
            name: value.new_zeros(labels.numel()).index_put((places,), value[0]).view(labels.shape)
            for name, value in scored.items()
            if value.dim() > 0
        }
        if not len(places):  # connected to every parameter even without labels, as DDP's reducer needs
            figures["log_probs"] = figures["log_probs"] + (hidden.sum() + scored["log_probs"].sum()) * 0.0
        return FusedCausalLMOutput(**figures)


def add_scores(model: PreTrainedModel) -> None:
    """Add `every_token=True` to the forward of a reward model. It then returns the scores of all tokens of a row, `logits` [1, T, 1].

    The loss takes the scores of last tokens. On a padded batch the model's own call is the definition.
    """
    add_calls(model, ("every_token",), lambda self, asked, labels, places, owners, batch: _scores(self, batch))


def outputs_of_tokens(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Make `model` return `logits` [rows, T, n] of every token inside the block. A reward model returns scores [rows, T, 1]."""
    if not hasattr(model, SCORE_HEAD):
        return nullcontext()
    return holding(model, forward=types.MethodType(lambda self, **kwargs: _scores(self, kwargs), model))


def _scores(model: PreTrainedModel, call: Batch) -> SequenceClassifierOutputWithPast:
    hidden = model.base_model(**{**call, "use_cache": False}).last_hidden_state
    return SequenceClassifierOutputWithPast(logits=getattr(model, SCORE_HEAD)(hidden))
