"""Output heads: the summed loss of documents, and the score of a reward model.

`sum_losses` sums the losses of tokens, and makes the gradients in the forward pass, some thousand tokens at a time. TRL's fused head, which gives
single tokens, computes all logits again in its backward pass: four products of tokens × hidden × vocabulary instead of three. With Triton, TRL's
kernels turn logits into gradients here too, in place. They are private to TRL: if a version has others, this head is refused on the first rows,
and TRL's own is used (`choose_head`). torch's `linear_cross_entropy` and Liger's head also take three products. But in bfloat16 they add up the
weight's gradient in bfloat16 over pieces of a few hundred tokens, and torch adds up the loss in bfloat16 as well. Here both are float32.

A reward model gives one number for a document, from a linear layer `score` over its last token. These are transformers'
...ForSequenceClassification of decoders with num_labels=1. On a padded batch the model's own call is the definition. On a flattened row `score`
is applied to every token, and the loss takes the scores of last tokens.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl.trainer.utils import maybe_gather_lm_head_ctx

from packtrain.errors import UserError
from packtrain.objectives.losses import TOKEN_LOSSES
from packtrain.objectives.spec import HEAD_CHUNK

_CPU_CHUNK = 512
_SLICE = 128  # number of tokens with float32 log-probabilities at a time, without Triton
_ALIGNED = 64  # rows of logits are padded to a multiple of it: products are then fast for any vocabulary
_PLAIN = {"logit_scale": 1.0, "softcap": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}  # for TRL's kernels


def token_weights(log_probs: torch.Tensor, loss: str) -> torch.Tensor:
    """Return the weight of each token in `loss`, from its log-probability. The token's loss is its weight times -log_prob."""
    return log_probs.exp().detach() if loss == "dft" else torch.ones_like(log_probs)


def sum_losses(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Linear, loss: str) -> torch.Tensor:
    """Sum the losses of `targets` int64 [n] after `hidden` [n, d]: a float32 scalar. Its backward pass runs only once.

    The products of `head` are in float32 on a CPU, elsewhere in autocast's format or the format of `hidden`.
    """
    with maybe_gather_lm_head_ctx(head.weight, head.bias):  # type: ignore[arg-type]
        return _SummedLoss.apply(hidden, head.weight, head.bias, targets, loss, torch.is_grad_enabled())  # type: ignore[return-value]


@torch.enable_grad()
def compare_gradients(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Linear, loss: str) -> torch.Tensor:
    """Compare the gradients of `sum_losses` with full logits. Returns the largest relative difference, a scalar, over `hidden` [n, d]
    and the trained weights of `head`."""
    with maybe_gather_lm_head_ctx(head.weight, head.bias):  # type: ignore[arg-type]
        rows, weight = hidden.detach().requires_grad_(), head.weight.detach().requires_grad_(head.weight.requires_grad)
        bias = None if head.bias is None else head.bias.detach().requires_grad_(head.bias.requires_grad)
        inputs = [tensor for tensor in (rows, weight, bias) if tensor is not None and tensor.requires_grad]
        own = _SummedLoss.apply(rows, weight, bias, targets, loss, True)
        log_probs = -F.cross_entropy(F.linear(rows, weight, bias).float(), targets, reduction="none")
        definition = TOKEN_LOSSES[loss](log_probs).sum()
        pairs = zip(torch.autograd.grad(own, inputs), torch.autograd.grad(definition, inputs), strict=True)
        floats = [(one.float(), other.float()) for one, other in pairs]
        return torch.stack([(one - other).norm() / other.norm().clamp(min=1e-30) for one, other in floats]).max()


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        loss: str,
        trains: bool,
    ) -> torch.Tensor:
        device, words, dtype = hidden.device, len(weight), _compute_dtype(hidden)
        rows, matrix = hidden.to(dtype), weight.to(dtype)
        needed = [trains and needs for needs in ctx.needs_input_grad[:3]]
        chunk = _CPU_CHUNK if device.type == "cpu" else HEAD_CHUNK
        buffer = rows.new_empty(min(len(rows), chunk), -(-words // _ALIGNED) * _ALIGNED)
        total = torch.zeros((), device=device)
        of_hidden = torch.empty_like(rows) if needed[0] else None
        of_weight = torch.zeros(weight.shape, device=device) if needed[1] else None
        of_bias = torch.zeros(words, device=device) if needed[2] else None
        for start in range(0, len(rows), chunk):
            part, goals = rows[start : start + chunk], targets[start : start + chunk]
            logits = buffer[: len(part), :words]
            torch.mm(part, matrix.t(), out=logits)
            if bias is not None:
                logits.add_(bias.to(dtype))
            total += _loss_in_place(logits, goals, loss, trains=any(needed))
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
        return *scaled, None, None, None


def _kernels() -> ModuleType:
    from trl.kernels import chunked_logprob

    return chunked_logprob


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    if kind == "cpu":
        return torch.float32
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _loss_in_place(logits: torch.Tensor, targets: torch.Tensor, loss: str, *, trains: bool) -> torch.Tensor:
    """Sum the losses of `targets` [n]: a float32 scalar. If it `trains`, `logits` [n, words] become the gradients of that sum."""
    by = _by_triton if _kernels()._use_triton(logits.device) else _by_torch
    return by(logits, targets, loss, trains=trains)


def _by_torch(logits: torch.Tensor, targets: torch.Tensor, loss: str, *, trains: bool) -> torch.Tensor:
    """Do `_loss_in_place` some rows at a time, in float32."""
    total = torch.zeros((), device=logits.device)
    for part, goals in zip(logits.split(_SLICE), targets[:, None].split(_SLICE), strict=True):
        log_probs = part.log_softmax(dim=-1, dtype=torch.float32)
        own = log_probs.gather(1, goals)
        weights = token_weights(own, loss)
        total -= (weights * own).sum()
        if trains:
            part.copy_(log_probs.exp_().scatter_add_(1, goals, -torch.ones_like(own)).mul_(weights))
    return total


def _by_triton(logits: torch.Tensor, targets: torch.Tensor, loss: str, *, trains: bool) -> torch.Tensor:
    """Do `_loss_in_place` by TRL's kernels. They read `logits` once for the loss and once for the gradients."""
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
    weights = token_weights(own, loss)
    if trains:
        flags = {**_PLAIN, "HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False, "BLOCK_SIZE": block}
        kernels._backward_kernel[(count, -(-words // block))](
            *given, log_sums, unused, -weights, unused, 0, words, **flags
        )
    return -(weights * own).sum()


HEAD = "score"
Batch = dict[str, Any]
"""Arguments of a model's forward by name: the tensors of a collated micro-batch, and more."""


def is_reward_model(config: PreTrainedConfig) -> bool:
    """Return whether the saved model already has a classification head."""
    names = config.architectures if isinstance(config.architectures, list) else ()  # may be anything in the file
    return any("ForSequenceClassification" in str(name) for name in names)


def with_one_score(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set `config` to one score, and return it. Raises UserError if the saved model has another number of scores."""
    if is_reward_model(config) and config.num_labels != 1:
        what = f"this model was trained to give {config.num_labels} scores (num_labels), a reward model gives one"
        fix = "name a reward model, or a causal language model: it gets a new head"
        raise UserError(what, where="model.path", fix=fix)
    config.num_labels = 1
    return config


def new_score(model: PreTrainedModel, seed: int) -> None:
    """Draw the weights of a new head from `seed`. They are the same on all processes, and independent of earlier draws."""
    torch.manual_seed(seed)
    head = getattr(model, HEAD)
    for one in (head, *head.parameters()):
        one._is_hf_initialized = False
    model._init_weights(head)


def check_score_head(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the padding token; `model` finds the last token of a document by it. Raises UserError if there is none, or unless
    `model` scores the last token by one linear layer, as decoders do."""
    linear = isinstance(getattr(model, HEAD, None), nn.Linear)
    if not linear or model.base_model is model or model.config.is_encoder_decoder:
        what = f"{type(model).__name__} has no linear layer `{HEAD}` over the last token of a document"
        fix = "take a decoder such as Llama, Qwen, Mistral, Gemma or GPT-2 (docs/reward.md)"
        raise UserError(f"{what}: it pools or classifies in another way", where="model.path", fix=fix)
    if tokenizer.pad_token_id is None:
        what = "the tokenizer has neither a padding token nor EOS: a reward model finds the end of a document by it"
        raise UserError(what, where="model.tokenizer", fix="set pad_token on the tokenizer")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def add_calls(model: PreTrainedModel, names: tuple[str, ...], run: Callable[..., object]) -> None:
    """Let `model(**batch, name=True)` return `run(model, name, labels, places, batch)`, for each of `names`.

    `labels` are the `shift_labels` of a collated batch, `places` its `label_places`; None if it has none.
    """
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: object, label_places: object = None, **batch: object) -> object:
        asked = [name for name in names if batch.pop(name, False)]
        if not asked:
            return inner(*args, **batch)
        return run(self, asked[0], batch.pop("shift_labels", None), label_places, batch)

    model.forward = types.MethodType(forward, model)


def add_scores(model: PreTrainedModel) -> None:
    """Add `every_token=True` to the forward of `model`.

    It then returns the scores of all tokens of a row, `logits` [1, T, 1]."""
    add_calls(model, ("every_token",), lambda self, asked, labels, places, batch: _scores(self, batch))


@contextmanager
def outputs_of_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` return `logits` [rows, T, n] of every token inside the block. A reward model returns scores [rows, T, 1]."""
    inner = model.forward
    if hasattr(model, HEAD):
        model.forward = types.MethodType(lambda self, **kwargs: _scores(self, kwargs), model)
    try:
        yield
    finally:
        model.forward = inner


def _scores(model: PreTrainedModel, call: Batch) -> SequenceClassifierOutputWithPast:
    hidden = model.base_model(**{**call, "use_cache": False}).last_hidden_state
    return SequenceClassifierOutputWithPast(logits=getattr(model, HEAD)(hidden))
