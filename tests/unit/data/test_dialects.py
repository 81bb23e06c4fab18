"""Calls, thoughts and answers in the templates of seven families: what is trained is what the assistant says, to the token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import shipped, tokenizer_for

from packtrain.data.formats.conversations import Conversation
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.chat_template import Template, choose_template, in_dialect_of
from packtrain.data.tokens.loss_mask import ChatEncoder
from packtrain.data.tokens.tokenizer import plain_tokenizer

WRITTEN = Path(__file__).parents[1] / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Answer with care."}
ASK = {"role": "user", "content": "What is the weather in Paris?"}
END = {"role": "assistant", "content": "It is sunny."}


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def calls(*cities: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(city) for city in cities], **more}


def result(content: str = '"25 degrees"') -> dict[str, Any]:
    return {"role": "tool", "content": content}


def text_of(template: str) -> str:
    file = WRITTEN / f"{template}.jinja"
    return file.read_text() if file.exists() else shipped(template)


def encoder(name: str) -> ChatEncoder:
    text = text_of(name)
    tokenizer = tokenizer_for(text)
    template = choose_template(None, tokenizer)
    assert template is not None
    return ChatEncoder(plain_tokenizer(tokenizer), template)


def trained(name: str, conversation: Conversation, loss_on: Any = "assistant") -> list[str]:
    """The text of each run of trained tokens, white space at its end cut off."""
    chat = encoder(name)
    ids, mask, _ = chat.encode(conversation, loss_on)
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    return [tokenizer_for(text_of(name)).decode(ids[start:end]).rstrip() for start, end in borders]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
NO_THOUGHT = "<think>\n\n</think>\n\n"
COMMENTARY = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "%s"}<|call|>'
MISTRAL = '{"name": "weather", "arguments": {"city": "%s"}, "id": "call0000%d"}'
ONE_CALL = {
    "qwen2_5": [HERMES % "Paris" + "<|im_end|>", "It is sunny.<|im_end|>"],
    "qwen3_instruct_2507": [HERMES % "Paris" + "<|im_end|>", "It is sunny.<|im_end|>"],
    "qwen3_training": [NO_THOUGHT + HERMES % "Paris" + "<|im_end|>", NO_THOUGHT + "It is sunny.<|im_end|>"],
    "llama3_1": ['{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', "It is sunny.<|eot_id|>"],
    "hermes": [HERMES % "Paris" + "<|im_end|>", "It is sunny.<|im_end|>"],
    "gptoss": [COMMENTARY % "Paris", "<|channel|>final<|message|>It is sunny.<|return|>"],
    "mistral_v3": [f"[TOOL_CALLS] [{MISTRAL % ('Paris', 1)}]<EOS>", " It is sunny.<EOS>"],
}


@pytest.mark.parametrize("name", ONE_CALL)
@pytest.mark.parametrize("begin", [[ASK], [SYSTEM, ASK]], ids=["", "system"])
def test_a_call_and_the_answer_are_trained_through_their_end_tokens_and_nothing_else(name, begin):
    conversation = Conversation([*begin, calls("Paris"), result(), END], TOOLS)
    assert trained(name, conversation) == ONE_CALL[name]
    assert trained(name, conversation, "completion") == ONE_CALL[name][1:]


TWO = {
    "qwen2_5": f"{HERMES % 'Paris'}\n{HERMES % 'Rome'}<|im_end|>",
    "qwen3_training": f"{NO_THOUGHT}{HERMES % 'Paris'}\n{HERMES % 'Rome'}<|im_end|>",
    "hermes": f"{HERMES % 'Paris'}\n{HERMES % 'Rome'}<|im_end|>",
    "mistral_v3": f"[TOOL_CALLS] [{MISTRAL % ('Paris', 1)}, {MISTRAL % ('Rome', 2)}]<EOS>",
}


@pytest.mark.parametrize("name", TWO)
def test_parallel_calls_are_one_turn_and_their_results_are_not_trained(name):
    conversation = Conversation([ASK, calls("Paris", "Rome"), result(), result('"30"'), END], TOOLS)
    assert trained(name, conversation) == [TWO[name], ONE_CALL[name][1]]


@pytest.mark.parametrize(
    "name, words",
    [
        ("llama3_1", "refuses the conversation: This model only supports single tool-calls at once!"),
        ("gptoss", r"chat template \(the tokenizer's own\) leaves out the call of 'weather'"),
    ],
)
def test_a_template_for_one_call_refuses_two(name, words):
    with pytest.raises(BadRow, match=words):
        trained(name, Conversation([ASK, calls("Paris", "Paris"), result(), result(), END], TOOLS))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "hermes", "llama3_1"])
def test_turns_of_the_assistant_that_follow_each_other_are_trained_each(name):
    call, answer = ONE_CALL[name]
    messages = [ASK, calls("Paris"), END, ASK, calls("Paris"), result(), calls("Paris"), result(), END]
    assert trained(name, Conversation(messages, TOOLS)) == [call, answer, call, call, answer]


THOUGHT = "<think>\nHm, Paris.\n</think>\n\n"
THINKING = {
    "qwen3": [THOUGHT + one.removeprefix(NO_THOUGHT) for one in ONE_CALL["qwen3_training"]],
    "qwen3_training": [THOUGHT + one.removeprefix(NO_THOUGHT) for one in ONE_CALL["qwen3_training"]],
}


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_are_trained_where_the_template_has_them(name):
    thought = {"reasoning_content": "Hm, Paris."}
    messages = [ASK, calls("Paris", **thought), result(), {**END, **thought}]
    found = trained(name, Conversation(messages, TOOLS))
    assert [one.replace("\n\n\n", "\n\n") for one in found] == THINKING[name]


def test_gpt_oss_reads_thinking_and_its_template_drops_what_was_thought_before_an_answer():
    thought = {"reasoning_content": "Hm."}
    found = trained("gptoss", Conversation([ASK, calls("Paris", **thought)], TOOLS))
    assert "".join(found) == "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + COMMENTARY % "Paris"
    with pytest.raises(BadRow, match=r"leaves out the thought 'Hm.'") as caught:
        trained("gptoss", Conversation([ASK, calls("Paris", **thought), result(), {**END, **thought}], TOOLS))
    assert "data.loss_on=completion" in caught.value.fix


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "hermes", "mistral_v3", "qwen3_instruct_2507"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_thoughts_that_the_template_leaves_out_are_refused(name, loss_on):
    with pytest.raises(BadRow, match=r"leaves out the thought 'Hm, Paris.'") as caught:
        trained(name, Conversation([ASK, {**END, "reasoning_content": "Hm, Paris."}], TOOLS), loss_on)
    assert caught.value.field == "messages[1].reasoning_content"
    assert "qwen3_training" in caught.value.fix


@pytest.mark.parametrize("name", ["llama3_1", "hermes", "mistral_v3"])
def test_words_beside_a_call_that_the_template_leaves_out_are_refused(name):
    with pytest.raises(BadRow, match=r"leaves out or rewrites the answer 'Let me see.'"):
        trained(name, Conversation([ASK, calls("Paris", content="Let me see.")], TOOLS))


def test_ids_of_the_data_stay_but_where_the_template_wants_nine_characters():
    given = [{**call("Paris"), "id": "call_longer_than_nine"}, call("Rome"), {**call("Oslo"), "id": "abcdefghi"}]
    answers = [
        {**result(), "tool_call_id": "abcdefghi"},
        {**result(), "tool_call_id": "call_longer_than_nine"},
        result(),
    ]
    conversation = Conversation([ASK, {**calls(), "tool_calls": given}, *answers, END], TOOLS)
    for name, first in (("mistral_v3", "call00001"), ("qwen2_5", "call_longer_than_nine")):
        _, asked, *said, _ = in_dialect_of(text_of(name), conversation).messages
        assert [one["id"] for one in asked["tool_calls"]] == [first, "call00002", "abcdefghi"]
        assert [one["tool_call_id"] for one in said] == ["abcdefghi", first, "call00002"]
        assert {one["name"] for one in said} == {"weather"}


def trained_by(text: str, answer: dict) -> str:
    """What is trained of an answer to ASK with the template `text`."""
    words = tokenizer_for(text)
    ids, mask, _ = ChatEncoder(plain_tokenizer(words), Template(text, None)).encode(
        Conversation([ASK, answer]), "assistant"
    )
    return words.decode(ids[mask])


def test_what_a_template_marks_itself_is_adapted_alike():
    """DeepSeek-like: <think> in the content, by the template's own words."""
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set c = m.content %}"
        "{% if '</think>' in c and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ c + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert trained_by(text, {**END, "reasoning_content": "Hm."}) == "<think>\nHm.\n</think>\n\nIt is sunny.<|im_end|>"
