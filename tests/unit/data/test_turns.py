"""data.render: every answer after the very prompt that asks for it, on the chat templates of real model families."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from data_tokenizers import tokenizer_for
from test_loss_mask import ASK, END, MADE, NAMES, TOOLS, TURNS, call, text_of

from packtrain.config.schema import Data
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.chat_template import CHATML, choose_template
from packtrain.data.tokens.encode import Encoder
from packtrain.data.tokens.tokenizer import plain_tokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
FIRST, SECOND = TURNS[1], TURNS[3]


def think(message: dict[str, Any], thought: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thought}


CALL = {"role": "assistant", "content": "", "tool_calls": [{**call("Paris"), "id": "abcdefghi"}]}
RESULT = {"role": "tool", "content": '"25 degrees"', "name": "weather", "tool_call_id": "abcdefghi"}
DIALOGS: dict[str, list[dict[str, Any]]] = {
    "plain": TURNS,
    "system": [SYSTEM, *TURNS],
    "thoughts": [TURNS[0], think(FIRST, "Greet."), TURNS[2], think(SECOND, "Ask.")],
    "one thought": [TURNS[0], FIRST, TURNS[2], think(SECOND, "Ask.")],
    "tools": [ASK, CALL, RESULT, END, TURNS[0], FIRST],
    "tools and thoughts": [ASK, think(CALL, "Look."), RESULT, think(END, "Sun."), TURNS[0], FIRST],
}


def encoder_of(name: str, render: str = "turns", **keys: Any) -> tuple[Any, Encoder]:
    tokenizer = tokenizer_for(MADE.get(name) or (CHATML if name == "chatml" else text_of(name)))
    data = Data(train="rows", render=render, **keys)  # pyright: ignore[reportArgumentType]
    return tokenizer, Encoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer), data, "sft")


def encoded(name: str, kind: str, render: str = "turns", **keys: Any) -> tuple[list[Any], dict[str, Any]]:
    tokenizer, encoder = encoder_of(name, render, **keys)
    row = {"messages": as_given(tokenizer, DIALOGS[kind]), "tools": tools_of(kind)}
    return encoder.encode_row(row, "messages", {}, {})


def tools_of(kind: str) -> Any:
    return TOOLS if "tools" in kind else None


def as_given(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with thoughts where the template reads them; in the content for templates that look for </think>."""
    text = tokenizer.chat_template
    key = next(
        (key for key in ("reasoning_content", "reasoning", "thinking") if re.search(rf"""[.'"]{key}\b""", text)), ""
    )
    made = []
    for message in messages:
        message = dict(message)
        if thought := message.pop("reasoning_content", None):
            inline = not key and "</think>" in text
            message["content"] = (
                f"<think>\n{thought}\n</think>\n\n{message['content']}" if inline else message["content"]
            )
            message |= {} if inline else {key or "reasoning_content": thought}
        made.append(message)
    return made


def asks(tokenizer: Any, messages: list[dict[str, Any]], thought: str, tools: Any) -> list[int]:
    """The prompt that transformers makes: thinking off for an answer without a thought, on for one with it."""
    how = (
        [{"enable_thinking": False, "thinking": False}]
        if not thought
        else [{}, {"enable_thinking": True, "thinking": True}]
    )
    for switch in how:
        asked = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **switch
        )
        if not thought or not tokenizer.decode(asked).rstrip().endswith("</think>"):
            break
    return asked


ENDS = {"glm4moe": ("<|user|>", "<|observation|>"), "glm4moe_training": ("<|user|>", "<|observation|>")}


@pytest.mark.parametrize("name", [*NAMES, "hermes", "mistral_v3", *MADE])
def test_prompts_are_those_of_transformers_and_answers_go_on_as_a_model_would_write_them(name):
    for kind, dialog in DIALOGS.items():
        tokenizer = encoder_of(name)[0]
        try:
            documents, flags = encoded(name, kind)
        except BadRow as bad:
            assert kind != "plain" or re.match("deepseek(?!.*V3)|hermes", name), bad.what
            continue
        messages, tools = as_given(tokenizer, dialog), tools_of(kind)
        turns = [at for at, message in enumerate(dialog) if message["role"] == "assistant"]
        assert flags["turns"] == 1 and len(documents) == len(turns)
        for turn, document in zip(turns, documents, strict=True):
            ids, mask = document.input_ids.tolist(), document.loss_mask
            thought = dialog[turn].get("reasoning_content", "")
            asked = asks(tokenizer, messages[:turn], thought, tools)
            assert ids[: len(asked)] == asked, (name, kind, turn)
            first = int(np.argmax(mask))
            assert first >= len(asked) and mask[first:].all()
            empty, said = tokenizer.decode(ids[len(asked) : first]), tokenizer.decode(ids[first:])
            assert not empty or re.fullmatch(r"\s*(<think>)?\s*</think>\s*", empty), empty
            assert ids[-1] in plain_tokenizer(tokenizer).special_ids
            content = dialog[turn]["content"] or "Paris"
            assert said.count(content) == 1 and said.index(thought) <= said.index(content)
            prefix, _, end = said.rpartition(content)
            whole = tokenizer.apply_chat_template(messages[: turn + 1], tools=tools, tokenize=False)
            for one in ENDS.get(name, ()):
                said = said.removesuffix(one)
            if "deepseek" in name.lower() and thought:
                assert prefix in (f"{thought}\n</think>\n\n", f"{thought}</think>\n\n") and whole.endswith(
                    content + end
                )
            else:
                assert said in whole, (said, whole)
