"""Reward models: one number for a document, from a linear layer `score`.

It reads the document's last token. These are transformers' ...ForSequenceClassification of decoders with num_labels=1. On a padded batch the
model's own call is the definition. On a flattened row `score` is applied to every token, and the loss takes the scores of last tokens.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.errors import UserError

HEAD = "score"


def is_reward_model(config: PreTrainedConfig) -> bool:
    """Return whether the saved model already has a classification head."""
    names = config.architectures if isinstance(config.architectures, list) else ()  # may be anything in the file
    return any("ForSequenceClassification" in str(name) for name in names)


def with_one_score(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set `config` to one score, and return it. Raises UserError if the saved model has another number of scores."""
    if is_reward_model(config) and config.num_labels != 1:
        raise UserError(
            f"this model was trained to give {config.num_labels} scores (num_labels), a reward model gives one",
            where="model.path",
            fix="name a reward model, or a causal language model: it gets a new head",
        )
    config.num_labels = 1
    return config


def new_score(model: PreTrainedModel, seed: int) -> None:
    """Draw the weights of a new head from `seed`. They are the same on all processes, and independent of earlier draws."""
    torch.manual_seed(seed)
    head: Any = getattr(model, HEAD)
    head._is_hf_initialized = False
    for weight in head.parameters():
        weight._is_hf_initialized = False
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
    cast(Any, model.config.get_text_config()).pad_token_id = tokenizer.pad_token_id


def add_scores(model: PreTrainedModel) -> None:
    """Add `every_token=True` to the forward of `model`.

    It then returns the scores of all tokens of a row, `logits` [1, T, 1]."""
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, every_token: bool = False, **kwargs: Any) -> Any:
        return _scores(self, kwargs) if every_token else inner(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


@contextmanager
def outputs_of_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` return `logits` [rows, T, n] of every token inside the block. A reward model returns scores [rows, T, 1]."""
    if not hasattr(model, HEAD):
        yield
        return
    inner = model.forward

    model.forward = types.MethodType(lambda self, **kwargs: _scores(self, kwargs), model)
    try:
        yield
    finally:
        model.forward = inner


def _scores(model: PreTrainedModel, call: dict[str, Any]) -> SequenceClassifierOutputWithPast:
    hidden = model.base_model(**{**call, "use_cache": False}).last_hidden_state
    return SequenceClassifierOutputWithPast(logits=cast(Any, getattr(model, HEAD))(hidden))
