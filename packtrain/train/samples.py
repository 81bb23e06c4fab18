"""Short answers of the model before and after training, so that learning can be read and not only plotted."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.attention.backends import attention_of
from packtrain.monitor.heartbeat import own_pulse


@torch.no_grad()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], *, attention: str, max_tokens: int
) -> list[str]:
    """Greedy answers of at most `max_tokens` tokens, under the attention implementation that the model came with.

    A prompt is a user turn where the tokenizer has a chat template, else plain text to go on from.
    """
    answers = []
    ends = _end_tokens(model, tokenizer)
    training = model.training
    model.eval()
    with attention_of(model, attention):
        for prompt in prompts:
            own_pulse().go_on()
            if tokenizer.chat_template:
                turn = [{"role": "user", "content": prompt}]
                text = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
                inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            else:
                inputs = tokenizer(prompt, return_tensors="pt")
            ids = inputs["input_ids"].to(model.device)
            output = cast(Any, model).generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=ends,
            )
            answers.append(str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip())
    model.train(training)
    return answers


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All tokens that end an answer: the tokenizer's, and those that the model came with."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return sorted({int(cast(Any, end)) for end in ends if end is not None})
