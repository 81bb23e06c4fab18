"""All wrappers that packtrain puts around `model.forward`, in order (`patch_forward`): for documents and for pairs.

`model(**batch, loss_sum=True)` returns the sum of the trained tokens' losses of documents. `model(**batch, answer_scores=True)` returns
log-probabilities and other outputs for each token of a batch of answers, [rows, T].

Both run TRL's fused LM head (no full logits) at the labelled places only. The CPU finds these places, and they come with the batch: TRL would
read them from the device, and wait for it. If the head is a plain linear layer, the loss of documents is summed by a head that makes its
gradients in the forward pass (heads.py). Full logits replace the fused heads in models whose head they do not fit (`choose_head`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from packtrain.attention.backends import attend_by
from packtrain.config.objective import Objective
from packtrain.errors import CheckFailed
from packtrain.model.heads import Batch, add_calls, add_scores, compare_gradients, sum_losses
from packtrain.model.precision import compute_in
from packtrain.objectives.losses import TOKEN_LOSSES
from packtrain.packing.collate import IGNORE, label_positions, to_device
from packtrain.packing.segments import own_tokens
from packtrain.proof.comparison import evaluating, model_refusals, tolerance_of

_TOKEN_FACTOR = 20  # tolerance of single tokens, as a multiple of the sum's tolerance; errors cancel in the sum
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


HeadKind = Literal["summed", "by token", "full logits"]
"""How the losses of documents are made: summed (heads.py), by TRL's head for each token, or from all logits at once."""


@dataclass(slots=True)
class Head:
    """Output head of documents. `refusal` says why the head that was tried before does not fit; "" for the first."""

    loss: str
    kind: HeadKind
    refusal: str = ""


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

    1. TRL's fused LM head: TRL's trainers have added it (with the per-token outputs named by `answer_outputs`)
    2. the objective's own call: `loss_sum=True` for `token_objective`, `answer_scores=True` for `answer_outputs`, `every_token=True` for
       `scores` (heads.py)
    3. `autocast`, if the trainer does not apply it (DeepSpeed)
    4. attention by segments, by the chosen `backend` (attention/backends.py); None keeps the model's attention

    Hooks around single calls watch routers (model/routers.py). Returns the output head of documents.
    """
    head = None
    if token_objective is not None:
        noise = token_objective.options.get("neftune_noise_alpha")  # documents of another package may lack it
        head = add_loss_sum(model, loss=token_objective.token_loss, neftune_alpha=noise)
    if answer_outputs:
        add_answer_scores(model, answer_outputs)
    if scores:
        add_scores(model)
    if autocast is not None:
        compute_in(model, autocast)
    if backend is not None:
        attend_by(model, backend)
    return head


def name_backbone(model: PreTrainedModel) -> None:
    """Make `model.base_model` the model without its head."""
    # Llama4ForCausalLM stores its backbone under another prefix
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"


def add_loss_sum(model: PreTrainedModel, *, loss: str = "nll", neftune_alpha: float | None = None) -> Head:
    """Add `loss_sum=True` to the forward of `model`, which already has TRL's `add_fused_lm_head`.

    With it the forward takes a collated batch with `shift_labels` and returns the sum of the losses at all positions whose label is not IGNORE
    (`label_places`; None: read from the labels). The sum is connected to every parameter even without such positions. For proofs,
    `token_losses=True` returns these losses [rows, T], 0 elsewhere; `head_gradients=True` returns how far the gradients of a summed head are
    from the gradients of full logits. `neftune_alpha` adds noise while training (`_embedding_noise`). `choose_head` may change the kind of the
    returned Head.
    """
    name_backbone(model)
    inner_forward = model.forward
    head, labelled = Head(loss, "summed" if _is_linear(model) else "by token"), _LabelledHead(model, ("log_probs",))

    def lose(self: PreTrainedModel, asked: str, labels: torch.Tensor, at: np.ndarray | None, batch: Batch) -> object:
        if getattr(self.config.get_text_config(), "output_router_logits", False):
            batch["output_router_logits"] = False  # skips the model's own router loss, which is not used
        with _embedding_noise(self, neftune_alpha, batch) if neftune_alpha and self.training else nullcontext():
            places = _on_device_of(labels, at)  # a place may occur several times
            if head.kind == "full logits":
                log_probs = _log_probs(inner_forward(**batch, use_cache=False).logits, labels)
            else:
                hidden = self.base_model(**batch, use_cache=False).last_hidden_state
                if head.kind == "summed" and asked != "token_losses":
                    run = compare_gradients if asked == "head_gradients" else sum_losses
                    output = cast(nn.Linear, self.get_output_embeddings())
                    return run(hidden.flatten(0, 1)[places], labels.flatten()[places], output, loss)
                once = _on_device_of(labels, None if at is None else np.unique(at))
                log_probs = cast(torch.Tensor, labelled.run_head(hidden, labels, once).log_probs)
        losses = TOKEN_LOSSES[loss](log_probs)
        return losses if asked == "token_losses" else losses.flatten()[places].sum()

    add_calls(model, ("loss_sum", "token_losses", "head_gradients"), lose)
    return head


@contextmanager
def _embedding_noise(model: PreTrainedModel, alpha: float, batch: Batch) -> Iterator[None]:
    """Add NEFTune noise (arXiv 2310.05914) to embeddings. It is uniform in ±alpha / sqrt(l · d), for a document of l tokens."""
    if (segments := batch.get("segments")) is not None:
        lengths = torch.tensor(segments.lengths).repeat_interleave(torch.tensor(segments.lengths))
        lengths = lengths[None, own_tokens(segments)]
    else:
        lengths = batch["attention_mask"].sum(dim=1, keepdim=True)

    def add_noise(module: nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        magnitude = alpha / torch.sqrt(to_device(lengths, embeddings.device) * embeddings.shape[-1])
        return embeddings + torch.empty_like(embeddings).uniform_(-1, 1) * magnitude[..., None].to(embeddings.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def _on_device_of(labels: torch.Tensor, places: np.ndarray | None) -> torch.Tensor:
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
    with evaluating(model, autocast):
        with model_refusals(f"{name} cannot run a batch", fix="see what model.config sets"):
            log_probs = _log_probs(model(**plain, use_cache=False).logits, labels)
        losses = TOKEN_LOSSES[head.loss](log_probs)
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


def add_answer_scores(model: PreTrainedModel, outputs: tuple[str, ...]) -> None:
    """Add `answer_scores=True` to the forward of `model`, which already has TRL's `add_fused_lm_head` for these `outputs`.

    With it the forward takes a collated batch with `shift_labels` and returns the outputs for each token, [rows, T], 0 without a label.
    """
    name_backbone(model)
    head = _LabelledHead(model, outputs)

    def score(self: PreTrainedModel, asked: str, labels: torch.Tensor, at: np.ndarray | None, batch: Batch) -> object:
        hidden = self.base_model(**{**batch, "use_cache": False}).last_hidden_state
        return head.run_head(hidden, labels, _on_device_of(labels, at))

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
        with _every_position():
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


@contextmanager
def _every_position() -> Iterator[None]:
    """Let TRL's head score all given positions, without a search for labels."""
    before, trl_utils._use_triton = trl_utils._use_triton, lambda device: False
    try:
        yield
    finally:
        trl_utils._use_triton = before
