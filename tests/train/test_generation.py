"""Batches give every prompt its own answer, in the fastest exact way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from here import ALONE as ONE_RANK
from tiny_models import longrope_model, tiny_model
from transformers import GenerationConfig, PreTrainedModel

from packtrain.data.tokens.cache import Document
from packtrain.model.spread import Ranks
from packtrain.train.measures.due import Deadline
from packtrain.train.measures.generation import ALONE, BATCHED, SHARED, Generator
from packtrain.train.run_state import StopRequest

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 12}
MODELS = {
    "llama": ({}, SHARED),
    "qwen3": ({}, SHARED),
    "gpt2": ({}, SHARED),  # learned positions
    "bloom": ({}, SHARED),  # biases by distance
    "mistral": ({}, BATCHED),  # a window of 8
    "gemma3_text": ({}, BATCHED),
    "gpt_oss": ({}, BATCHED),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, BATCHED),
    "qwen3_next": (LINEAR, BATCHED),
    "rwkv": ({}, ALONE),  # padding reaches its states
}


class Numbers:
    """A tokenizer that writes tokens as numbers."""

    pad_token_id = 0

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(str(int(one)) for one in ids if one > 2)


def prompts(common: int = 15, lengths: Sequence[int] = (3, 20, 7, 1, 30, 12, 5, 5, 9)) -> list[Document]:
    rng = np.random.default_rng(1)
    beginning = rng.integers(3, 97, common)
    rows = [np.concatenate([beginning, rng.integers(3, 97, length)]).astype(np.int32) for length in lengths]
    return [Document(row, np.zeros(len(row), bool)) for row in rows]


def generator(model: PreTrainedModel, most: int = 200, **how: Any) -> Generator:
    tokenizer: Any = Numbers()
    return Generator(model, tokenizer, str(model.config._attn_implementation), None, None, ONE_RANK, most, **how)


def alone(model: PreTrainedModel, asked: Sequence[Document], tokens: int) -> dict[int, str]:
    """The definition: transformers' generation of each prompt by itself."""
    generate: Any = model.generate
    found = dict[int, str]()
    for number, prompt in enumerate(asked):
        ids = torch.from_numpy(prompt.input_ids.astype(np.int64))[None]
        mask = torch.ones_like(ids)
        made = generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        found[number] = Numbers().decode(made[0, ids.shape[1] :])
    return found


@pytest.mark.sample("llama", "lfm2")
@pytest.mark.parametrize("family", MODELS)
def test_answers_equal_those_of_single_prompts(family: str) -> None:
    given, way = MODELS[family]
    model, asked = tiny_model(family, **given), prompts()
    wanted, ours = alone(model, asked, 12), generator(model)
    assert ours.answers(asked, 12) == wanted and len({*wanted.values()}) > 5
    assert ours.way == way
    if way == SHARED:
        assert generator(model, way=BATCHED).answers(asked, 12) == wanted


def test_a_common_beginning_of_any_length_runs_once() -> None:
    model, calls = tiny_model("llama"), list[tuple[int, ...]]()
    model.get_input_embeddings().register_forward_hook(lambda _, given, out: calls.append(tuple(given[0].shape)))  # type: ignore[union-attr]
    cases = [(20, (1, 4, 9)), (7, (1, 4)), (0, (5, 9)), (30, (0, 25, 3)), (12, (0, 0, 0)), (9, (60, 1))]
    for common, lengths in cases:
        asked, ours = prompts(common, lengths), generator(model, most=10_000, way=SHARED)
        calls.clear()
        made = ours.answers(asked, 3)
        first = (1, min(common, common + max(lengths) - 1))
        longest = (len(lengths), common + max(lengths))
        assert calls[0] == (first if common >= 8 else longest), (common, lengths)
        assert made == alone(model, asked, 3)


def test_batches_hold_as_many_tokens_as_allowed_and_leave_no_rank_without_work() -> None:
    model = tiny_model("llama")
    rows = prompts(0, [10] * 6 + [90])
    sizes = [len(batch) for batch in generator(model, most=100, way=BATCHED)._batches(rows, 10)]
    assert sizes == [1, 5, 1]  # 100 slots, 5 × 20, 20
    ours = Generator(model, Numbers(), "sdpa", None, None, Ranks(0, 3, torch.device("cpu")), 10_000, BATCHED)  # type: ignore[arg-type]
    assert [len(batch) for batch in ours._batches(rows, 10)] == [3, 3, 1]


def test_rotary_embeddings_by_length_run_prompts_one_at_a_time() -> None:
    ours, asked = generator(longrope_model(), most=10_000), prompts(0, (90, 120))
    assert ours.answers(asked, 4) == alone(ours.model, asked, 4) and ours.way == ALONE


def test_answers_are_greedy_whatever_the_generation_config_of_the_model_says() -> None:
    model, asked = tiny_model("llama"), prompts()
    plain = alone(model, asked, 6)
    for says in ({"repetition_penalty": 1.5}, {"num_beams": 3, "num_return_sequences": 2}, {"max_time": 0.0}):
        settings = model.generation_config = GenerationConfig(eos_token_id=2, **says)
        assert generator(model).answers(asked, 6) == plain and model.generation_config is settings


def test_nothing_is_returned_when_the_time_is_over_or_a_signal_came_and_the_answer_ends_at_once() -> None:
    model, calls = tiny_model("llama"), list[None]()
    ours = generator(model, way=BATCHED)
    model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(None))  # type: ignore[union-attr]
    (stop := StopRequest()).signal = 15
    for number, over in enumerate((Deadline(torch.device("cpu"), 0.0), Deadline(torch.device("cpu"), stop=stop)), 1):
        assert ours.answers(prompts(), 50, over) is None and len(calls) == number
    state = torch.get_rng_state()
    assert ours.answers([], 5, Deadline(torch.device("cpu"))) == {}
    ours.answers(prompts(), 2)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
