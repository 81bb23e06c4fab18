"""The loss mask of conversations, calls and thoughts, token by token, on the chat templates of real model families."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import STYLES, shipped, tokenizer_for, tokenizer_of
from prepared import trained_runs
from tokenizers import normalizers
from transformers import AutoTokenizer, CanineTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from packtrain.config.rules.paths_and_packages import template_names
from packtrain.config.schema import Data
from packtrain.data.formats.examples import Conversation
from packtrain.data.prepare import prepare
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.chat_template import (
    CHATML,
    Template,
    choose_template,
    give_template,
    has_marks,
    rewrite_for_template,
)
from packtrain.data.tokens.encode import Encoder
from packtrain.data.tokens.loss_mask import UNVERIFIED, ChatEncoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import UserError

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
TURNS = [
    {"role": "user", "content": "Hello there!"},
    {"role": "assistant", "content": "How are you? é 中"},
    {"role": "user", "content": "I am fine."},
    {"role": "assistant", "content": "Tell me more about it."},
]
WRITTEN = Path(__file__).parents[1] / "chat_templates"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}]
ASK = {"role": "user", "content": "What is the weather in Paris?"}
END = {"role": "assistant", "content": "It is sunny."}


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def calls(*cities: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(city) for city in cities], **more}


def result(content: str = '"25 degrees"') -> dict[str, Any]:
    return {"role": "tool", "content": content}


def text_of(name: str) -> str:
    file = WRITTEN / f"{name}.jinja"
    return file.read_text() if file.exists() else shipped(name)


def encoder(style: str, template: Template | None = None) -> ChatEncoder:
    return encoder_by(tokenizer_of(style), template)


def encoder_by(tokenizer: Any, template: Template | None = None, name: str | None = None) -> ChatEncoder:
    chosen = template or choose_template(name, tokenizer)
    assert chosen is not None
    return ChatEncoder(plain_tokenizer(tokenizer), chosen)


def runs_of(chat: ChatEncoder, tokenizer: Any, conversation: Conversation, loss_on: Any = "assistant") -> list[str]:
    """The text of each run of trained tokens."""
    document, _ = chat.encode(conversation, loss_on)
    return trained_runs(tokenizer, document.input_ids, document.loss_mask)


def trained(
    style: str, conversation: Conversation, template: Template | None = None, loss_on: Any = "assistant"
) -> list[str]:
    return runs_of(encoder(style, template), tokenizer_of(style), conversation, loss_on)


def trained_by(name: str, messages: list[dict[str, Any]], loss_on: Any = "assistant") -> list[str]:
    """As `trained`, with TOOLS and the template of that name, white space at the ends cut off."""
    tokenizer = tokenizer_for(text_of(name))
    found = runs_of(encoder_by(tokenizer), tokenizer, Conversation(messages, TOOLS), loss_on)
    return [text.rstrip() for text in found]


def trained_by_text(text: str, messages: list[dict[str, Any]], **variables: Any) -> list[str]:
    tokenizer = tokenizer_for(text)
    return runs_of(encoder_by(tokenizer, Template(text, None)), tokenizer, Conversation(messages, variables=variables))


def refusal(how: Callable[..., Any], *given: Any) -> BadRow:
    with pytest.raises(BadRow) as caught:
        how(*given)
    return caught.value


FIRST, SECOND = TURNS[1]["content"], TURNS[3]["content"]
WANTED = {
    "llama3": [f"{FIRST}<|eot_id|>", f"{SECOND}<|eot_id|>"],
    "qwen2_5": [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"],
    "mistral": [f" {FIRST}</s>", f" {SECOND}</s>"],
    "gemma": [f"{FIRST}<end_of_turn>", f"{SECOND}<end_of_turn>"],
    "smollm": [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"],
}
HAS_SYSTEM = ("llama3", "qwen2_5", "smollm")


@pytest.mark.parametrize("style", WANTED)
def test_every_assistant_turn_is_trained_through_its_end_token_and_nothing_else(style):
    messages = [SYSTEM, *TURNS] if style in HAS_SYSTEM else TURNS
    assert trained(style, Conversation(messages)) == WANTED[style]
    document, _ = encoder(style).encode(Conversation(TURNS[:3]), "assistant")
    assert document.input_ids.tolist() == tokenizer_of(style).apply_chat_template(TURNS[:3], return_dict=False)


@pytest.mark.parametrize("style", [*WANTED, "qwen3"])
def test_completion_trains_only_the_last_answer(style):
    lead = " " if style == "mistral" else ""
    assert trained(style, Conversation(TURNS), loss_on="completion") == [f"{lead}{SECOND}{STYLES[style].end}"]


@pytest.mark.parametrize("style", ["llama3", "qwen2_5", "gemma"])
def test_marks_of_the_twin_own_marks_and_prefixes_agree_but_for_header_and_white_space(style):
    """Gemma's mark holds the newline after the turn, Qwen's also the one in front of the answer."""
    own = choose_template(None, tokenizer_of(style))
    assert own is not None and own.marked is not None
    by_twin, _ = encoder(style, own).encode(Conversation(TURNS), "assistant")
    by_prefix, _ = encoder(style, Template(STYLES[style].template, None)).encode(Conversation(TURNS), "assistant")
    assert by_twin.loss_mask.any()
    np.testing.assert_array_equal(by_twin.loss_mask, by_prefix.loss_mask)
    marked = shipped(f"{style}_training")
    document, _ = encoder(style, Template(marked, None)).encode(Conversation(TURNS), "assistant")
    ids, mask = document.input_ids, document.loss_mask
    wanted = tokenizer_of(style).apply_chat_template(
        TURNS, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == wanted["input_ids"]
    off = np.flatnonzero(mask != np.array(wanted["assistant_masks"], dtype=bool))
    assert {tokenizer_of(style).decode(ids[at]) for at in off} <= {"\n"}
    assert trained(style, Conversation(TURNS), Template(marked, None)) == WANTED[style]


NAMES = [name for name in template_names() if not name.startswith(("idefics3", "llava_next", "smolvlm"))]  # of images
REFUSED_NAMES = {"diffusion_gemma", "diffusion_gemma_training"} | {  # no end token; rewritten history
    *("glm4moe", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")
}
SPOKEN = ("<|channel|>", " to=user", "\n")  # a model says these before its answer


@pytest.mark.parametrize("name", NAMES)
def test_no_template_there_is_trains_the_role_header(name):
    tokenizer = tokenizer_for(CHATML if name == "chatml" else shipped(name))
    chat = encoder_by(tokenizer, name=name)
    if name in REFUSED_NAMES:
        assert refusal(chat.encode, Conversation(TURNS), "assistant").reason == UNVERIFIED
        return
    found = runs_of(chat, tokenizer, Conversation(TURNS))
    assert len(found) == 2 + name.startswith("phi3")  # Phi-3 ends the whole in EOS
    for text, answer in zip(found, (FIRST, SECOND), strict=False):
        before, after = text.split(answer)
        assert not before or before.startswith(SPOKEN)
        assert not re.search(r"assistant|model|chatbot", before.lower())
        end = tokenizer(after, add_special_tokens=False)["input_ids"]
        assert end and set(end) <= chat.tokenizer.special_ids


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
@pytest.mark.parametrize("messages", [TURNS[:2], TURNS], ids=["one turn", "two turns"])
def test_marks_around_what_everybody_says_never_train_the_user(messages, loss_on):
    every = "{% for m in messages %}{% generation %}{{ m.role + m.content + eos_token }}{% endgeneration %}{% endfor %}"
    try:
        found = trained("smollm", Conversation(messages), Template(every, None, name="own.jinja"), loss_on)
    except BadRow as bad:
        assert "the generation marks of the chat template (own.jinja) cover what the user says" in bad.what
    else:  # all marks are of no use, so the last turn is found without them
        assert loss_on == "completion" and found == [f"assistant{SECOND}<|im_end|>"]


def test_tools_and_answers_that_the_template_leaves_out_are_refused():
    caught = refusal(trained, "smollm", Conversation(TURNS, tools=TOOLS))
    assert caught.reason == "tools left out" and "the tokenizer's own" in caught.what
    deaf = "{% for m in messages %}{{ m.role }}{{ m.content if m.role == 'user' }}{{ eos_token }}{% endfor %}"
    caught = refusal(trained, "smollm", Conversation(TURNS), Template(deaf, None))
    assert "leaves out or rewrites the answer 'How are you" in caught.what


BEGIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'user' %}{{ m.content }}{% else %}"
MARKS = "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        BEGIN + MARKS + "{% endfor %}",
        BEGIN + MARKS + "{{ '<|im_end|>\n' }}{% endfor %}",
    ],
    ids=["no end", "no end behind marks", "an end outside the marks"],
)
def test_a_template_that_trains_no_end_of_turn_is_refused(template):
    assert "would not learn to stop" in refusal(trained, "smollm", Conversation(TURNS), Template(template, None)).what


@pytest.mark.parametrize("messages", [TURNS, [ASK, calls("Paris"), result(), END]], ids=["turns", "tools"])
def test_a_template_that_rewrites_history_is_refused_with_advice(messages):
    caught = refusal(trained, "qwen3", Conversation(messages))
    assert (caught.reason, caught.field) == (UNVERIFIED, "messages[1]") and "data.loss_on=completion" in caught.fix


@pytest.mark.parametrize("style", ["smollm", "qwen2_5"])
@pytest.mark.parametrize("white", ["\n", "\n\n", " \n", "  "])
def test_an_answer_that_begins_with_white_space_is_tokenised_apart_from_the_header(style, white):
    """ "\n" of the header and "\n" of the answer would be one token, which the model never sees when it is asked."""
    messages = [TURNS[0], {"role": "assistant", "content": f"{white}Hello"}, *TURNS[2:]]
    wanted = [f"{white}Hello<|im_end|>", f"{SECOND}<|im_end|>"]
    tokenizer = tokenizer_of(style)
    whole, asked = (
        tokenizer.apply_chat_template(messages[:turns], return_dict=False, add_generation_prompt=turns == 1)
        for turns in (4, 1)
    )
    for template in (None, Template(STYLES[style].template, None), Template(CHATML, None)):
        document, apart = encoder(style, template).encode(Conversation(messages), "assistant")
        ids, mask = document.input_ids, document.loss_mask
        assert trained(style, Conversation(messages), template) == wanted
        if template is None or template.text != CHATML:
            assert tokenizer.decode(ids) == tokenizer.decode(whole)
            assert ids[: len(asked)].tolist() == asked and mask[len(asked)] and not mask[: len(asked)].any()
            assert apart == (ids.tolist() != whole) and (apart or white != "\n")


COLONS = """{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def test_a_border_inside_a_token_is_refused_by_name_where_the_tokenizer_puts_a_space_before_each_text():
    tokenizer = copy.deepcopy(tokenizer_of("mistral"))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(spaces)
    messages = [*TURNS[:3], {"role": "assistant", "content": "in Paris."}]
    chat = encoder_by(tokenizer, Template(COLONS, None))
    caught = refusal(chat.encode, Conversation(messages), "completion")
    assert re.search(r"inside a token, in '>assistant: in Paris.</s', .*a space before each text", caught.what)
    assert "Trim the white space" in caught.fix


def test_white_space_that_a_tokenizer_leaves_out_of_its_offsets_is_not_overlooked():
    """Byte-level tokenizers that trim offsets hide that " Hello" is one token across the border."""
    chat = encoder("qwen2_5", Template(COLONS, None))
    document, apart = chat.encode(Conversation([TURNS[0], TURNS[3]]), "assistant")
    assert apart and tokenizer_of("qwen2_5").decode(document.input_ids[document.loss_mask]) == f"{SECOND}<|im_end|>"


def test_a_template_of_an_unknown_name_and_a_tokenizer_written_in_python_are_refused():
    with pytest.raises(UserError, match="llama3"):
        choose_template("lama3", tokenizer_of("llama3"))
    with pytest.raises(UserError, match=r"CanineTokenizer .*\[python-tokenizer\]") as caught:
        plain_tokenizer(CanineTokenizer())
    assert caught.value.problems[0].where == "model.tokenizer"


@pytest.mark.parametrize("name", ["qwen3_training", "chatml", "gptoss_training"])
def test_a_template_that_data_names_goes_with_the_model_without_its_marks(name):
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    template = choose_template(name, tokenizer)
    give_template(tokenizer, name)
    assert template is not None and has_marks(template.text) and not has_marks(str(tokenizer.chat_template))
    marked = tokenizer.apply_chat_template(TURNS, chat_template=template.text, tokenize=False)
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == marked


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
COMMENTARY = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "%s"}<|call|>'
MISTRAL = '{"name": "weather", "arguments": {"city": "%s"}, "id": "call0000%d"}'
BY_HERMES = [HERMES % "Paris" + "<|im_end|>", "It is sunny.<|im_end|>"]
ONE_CALL = {
    **dict.fromkeys(("qwen2_5", "qwen3_instruct_2507", "qwen3_training", "hermes"), BY_HERMES),
    "llama3_1": ['{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', "It is sunny.<|eot_id|>"],
    "gptoss": [COMMENTARY % "Paris", "<|channel|>final<|message|>It is sunny.<|return|>"],
    "mistral_v3": [f"[TOOL_CALLS] [{MISTRAL % ('Paris', 1)}]<EOS>", " It is sunny.<EOS>"],
}


@pytest.mark.parametrize("name", ONE_CALL)
@pytest.mark.parametrize("begin", [[ASK], [SYSTEM, ASK]], ids=["", "system"])
def test_a_call_and_the_answer_are_trained_through_their_end_tokens_and_nothing_else(name, begin):
    messages = [*begin, calls("Paris"), result(), END]
    assert trained_by(name, messages) == ONE_CALL[name]
    assert trained_by(name, messages, "completion") == ONE_CALL[name][1:]


BY_HERMES_TWO = f"{HERMES % 'Paris'}\n{HERMES % 'Rome'}<|im_end|>"
BY_MISTRAL_TWO = f"[TOOL_CALLS] [{MISTRAL % ('Paris', 1)}, {MISTRAL % ('Rome', 2)}]<EOS>"
TWO = dict.fromkeys(("qwen2_5", "qwen3_training", "hermes"), BY_HERMES_TWO) | {"mistral_v3": BY_MISTRAL_TWO}


@pytest.mark.parametrize("name", TWO)
def test_parallel_calls_are_one_turn_and_their_results_are_not_trained(name):
    messages = [ASK, calls("Paris", "Rome"), result(), result('"30"'), END]
    assert trained_by(name, messages) == [TWO[name], ONE_CALL[name][1]]


TWICE, ASIDE = [ASK, calls("Paris", "Paris"), result(), result(), END], [ASK, calls("Paris", content="Let me see.")]
REFUSED_CALLS = [("llama3_1", TWICE, "refuses the conversation"), ("gptoss", TWICE, "leaves out the call of 'weather'")]
REFUSED_CALLS += [(name, ASIDE, "rewrites the answer 'Let me see.'") for name in ("llama3_1", "hermes", "mistral_v3")]


@pytest.mark.parametrize("name, messages, words", REFUSED_CALLS)
def test_two_calls_for_a_template_of_one_and_words_beside_a_call_that_it_leaves_out_are_refused(name, messages, words):
    assert words in refusal(trained_by, name, messages).what


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "hermes", "llama3_1"])
def test_turns_of_the_assistant_that_follow_each_other_are_trained_each(name):
    call, answer = ONE_CALL[name]
    messages = [ASK, calls("Paris"), END, ASK, calls("Paris"), result(), calls("Paris"), result(), END]
    assert trained_by(name, messages) == [call, answer, call, call, answer]


THOUGHT = "<think>\nHm, Paris.\n</think>\n\n"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training"])
def test_thoughts_are_trained_where_the_template_has_them(name):
    thought = {"reasoning_content": "Hm, Paris."}
    messages = [ASK, calls("Paris", **thought), result(), {**END, **thought}]
    wanted = [THOUGHT + text for text in ONE_CALL["qwen3_training"]]
    assert [text.replace("\n\n\n", "\n\n") for text in trained_by(name, messages)] == wanted


def test_gpt_oss_reads_thinking_and_its_template_drops_what_was_thought_before_an_answer():
    thought = {"reasoning_content": "Hm."}
    found = trained_by("gptoss", [ASK, calls("Paris", **thought)])
    assert "".join(found) == "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + COMMENTARY % "Paris"
    caught = refusal(trained_by, "gptoss", [ASK, calls("Paris", **thought), result(), {**END, **thought}])
    assert "leaves out the thought 'Hm.'" in caught.what and "data.loss_on=completion" in caught.fix


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "hermes", "mistral_v3", "qwen3_instruct_2507"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_thoughts_that_the_template_leaves_out_are_refused(name, loss_on):
    caught = refusal(trained_by, name, [ASK, {**END, "reasoning_content": "Hm, Paris."}], loss_on)
    assert "leaves out the thought 'Hm, Paris.'" in caught.what
    assert caught.field == "messages[1].reasoning_content" and "qwen3_training" in caught.fix


def test_ids_of_the_data_stay_but_where_the_template_wants_nine_characters():
    given = [{**call("Paris"), "id": "call_longer_than_nine"}, call("Rome"), {**call("Oslo"), "id": "abcdefghi"}]
    answers = [{**result(), "tool_call_id": name} for name in ("abcdefghi", "call_longer_than_nine")]
    answers.append(result())
    conversation = Conversation([ASK, {**calls(), "tool_calls": given}, *answers, END], TOOLS)
    for name, first in (("mistral_v3", "call00001"), ("qwen2_5", "call_longer_than_nine")):
        _, asked, *said, _ = rewrite_for_template(text_of(name), conversation).messages
        assert [one["id"] for one in asked["tool_calls"]] == [first, "call00002", "abcdefghi"]
        assert [one["tool_call_id"] for one in said] == ["abcdefghi", first, "call00002"]
        assert {one["name"] for one in said} == {"weather"}


def test_thoughts_go_where_the_template_looks_for_them():
    """DeepSeek-like: <think> in the content, by the template's own words."""
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set c = m.content %}"
        "{% if '</think>' in c and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ c + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    conversation = Conversation([ASK, {**END, "reasoning_content": "Hm."}])
    assert trained("smollm", conversation, Template(text, None)) == ["<think>\nHm.\n</think>\n\nIt is sunny.<|im_end|>"]
    thinking = "{%- if m.content and '</think>' in m.content %}{{ '' }}{% endif %}"
    text = PRINTS.replace("{%- for call", f"{thinking}{{%- for call", 1)
    (said,) = trained_by_text(text, [ASK, calls("Paris", reasoning_content="Hm.")])
    assert said == '<think>\nHm.\n</think>\n\nweather {"city": "Paris"}<|im_end|>'


SWITCHED = """{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif -%}
{{ '<|im_start|>system\n' + ('/think' if enable_thinking else '/no_think') + '<|im_end|>\n' }}
{%- for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' }}
{{- ('' if enable_thinking else '<think>\n\n</think>\n') + m.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n') }}{% endif %}"""
DEEPSEEK = """{%- if not thinking is defined %}{% set thinking = false %}{% endif -%}{{ bos_token }}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}
{{- '<｜Assistant｜></think>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"""
ALWAYS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
LEFT_OUT = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"""
MADE = {"as SmolLM3": SWITCHED, "as DeepSeek V3.1": DEEPSEEK, "no switch": ALWAYS}
CLOSES = {"no switch": "\n</think>\n\n"}
ENDS = {"as DeepSeek V3.1": "<｜end▁of▁sentence｜>"}
THINKERS = [name for name in template_names() if name.startswith(("qwen3", "glm", "nemotron")) and "_vl" not in name]


def test_the_empty_thought_belongs_to_the_prompt_as_the_template_asks_with_thinking_off():
    """The words of such an answer and its end are trained, no more."""
    assert len(THINKERS) >= 20
    for name in [*THINKERS, *MADE]:
        tokenizer = tokenizer_for(MADE.get(name) or shipped(name))
        prepared = Encoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer), Data(train="rows"), "sft")
        rows: Any = {("messages", 1): {"messages": TURNS[:2]}}
        rows["prompt_completion", 3] = {"prompt": TURNS[:3], "completion": TURNS[3:]}
        for (kind, turn), row in rows.items():
            for variables in ({}, {"enable_thinking": False}):
                [document], _ = prepared.encode_row({**row, "chat_template_kwargs": variables}, kind, {}, {})
                ids, mask = document.input_ids, document.loss_mask
                asked = tokenizer.apply_chat_template(
                    TURNS[:turn], add_generation_prompt=True, enable_thinking=False, tokenize=False
                )
                assert isinstance(asked, str)
                start = int(np.argmax(mask))
                assert mask[start:].nonzero()[0].tolist() == [*range(mask.sum())]
                assert tokenizer.decode(ids[:start].tolist()) == asked + CLOSES.get(name, ""), name
                lead, end = ("\n", "<|user|>") if name.startswith("glm") else ("", ENDS.get(name, "<|im_end|>"))
                assert tokenizer.decode(ids[mask].tolist()) == f"{lead}{TURNS[turn]['content']}{end}", name


def test_a_template_that_writes_a_token_without_counterpart_is_refused_once_by_its_key(tmp_path):
    file, rows = tmp_path / "with_bos.jinja", tmp_path / "x.jsonl"
    file.write_text("{{ bos_token + '' }}" + CHATML)
    rows.write_text(2 * (json.dumps({"messages": TURNS}) + "\n"))
    data = Data(train=str(rows), chat_template=str(file), bad_rows="skip", cache_dir=str(tmp_path))
    with pytest.raises(UserError) as refused:
        prepare(data, tokenizer_of("qwen2_5"), "sft", seed=0)
    (problem,) = pickle.loads(pickle.dumps(refused.value)).problems  # it may come from another process
    assert (problem.where, problem.code) == ("data.chat_template", "template-needs-token")
    assert "bos_token" in problem.what and "Fix the row" not in problem.fix


@pytest.mark.parametrize("name", ["qwen3_8", "qwen3_8_training", "glm4moe", "as SmolLM3", "no switch"])
def test_a_thought_in_the_content_stands_in_the_text_once(name):
    tokenizer = tokenizer_for(MADE.get(name) or shipped(name))
    encoder = Encoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer), Data(train="rows"), "sft")

    def encoded(*messages):
        [document], _ = encoder.encode_row({"messages": [*messages]}, "messages", {}, {})
        ids, mask = document.input_ids, document.loss_mask
        return ids.tolist(), mask.tolist()

    content = TURNS[1]["content"]
    empty = {**TURNS[1], "content": f"<think>\n\n</think>\n\n{content}"}
    assert encoded(TURNS[0], empty) == encoded(*TURNS[:2])
    if name.startswith("qwen3_8"):
        thinking = {**TURNS[1], "content": f"<think>\nHm.\n</think>\n\n{content}"}
        assert encoded(TURNS[0], thinking) == encoded(TURNS[0], {**TURNS[1], "reasoning_content": "Hm."})


def test_a_template_that_leaves_the_empty_thought_out_of_answers_is_asked_with_thinking_on_or_refused():
    assert trained("smollm", Conversation(TURNS[:2]), Template(LEFT_OUT, None)) == [f"{FIRST}<|im_end|>"]
    off = Conversation(TURNS[:2], variables={"enable_thinking": False})
    assert refusal(trained, "smollm", off, Template(LEFT_OUT, None)).reason == UNVERIFIED


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3_6_training"])
def test_of_turns_with_and_without_thoughts_only_thoughts_are_trained(name):
    """A row that asks for thinking trains the empty thought: the model itself says it."""
    thinking = [TURNS[0], {**TURNS[1], "reasoning_content": "Hm."}, *TURNS[2:]]
    first, second = trained_by_text(shipped(name), thinking)
    assert first.startswith("<think>") and "Hm." in first and second == f"{SECOND}<|im_end|>"
    both = trained_by_text(shipped(name), TURNS, enable_thinking=True)
    assert all(re.match(r"<think>\s*</think>", said) for said in both) and len(both) == 2


AS_TEXT = [name for name in template_names() if name.startswith("deepseek") and name != "deepseekv3_training"]
PRINTS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls %}{{ call.function.name }} {{ call.function.arguments }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("name", [*AS_TEXT, "prints"])
def test_arguments_are_text_for_a_template_that_takes_text(name):
    tokenizer = tokenizer_for(PRINTS if name == "prints" else shipped(name))
    prepared = Encoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer), Data(train="rows"), "sft")
    as_text = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    given = [ASK, {"role": "assistant", "content": None, "tool_calls": [as_text]}, result(), END]
    for arguments in ({"city": "Zürich"}, '{"city": "Zürich"}'):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        row = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result(), END]}
        [document], _ = prepared.encode_row(row, "messages", {}, {})
        ids, mask = document.input_ids, document.loss_mask
        (text,), _ = render_jinja_template([given], chat_template=tokenizer.chat_template, bos_token="<BOS>")
        assert tokenizer.decode(ids.tolist()) == text
        said = tokenizer.decode(ids[mask].tolist())
        assert '{"city": "Zürich"}' in said and "It is sunny." in said and "25 degrees" not in said


def test_rows_with_tools_take_the_template_that_the_tokenizer_names_for_them(tmp_path):
    """transformers' apply_chat_template chooses alike."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = {"default": STYLES["smollm"].template, "tool_use": STYLES["qwen2_5"].template}
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    template = choose_template(None, loaded)
    assert template is not None and template.content != replace(template, for_tools="").content
    prepared = Encoder(plain_tokenizer(loaded), template, Data(train="rows"), "sft")
    messages = [ASK, calls("Paris"), result(), END]
    for tools in (TOOLS, None):
        turns = messages if tools else [ASK, END]
        [document], _ = prepared.encode_row({"messages": turns, "tools": tools}, "messages", {}, {})
        ids, mask = document.input_ids, document.loss_mask
        assert ids.tolist() == loaded.apply_chat_template(turns, tools=tools, return_dict=False)
        assert loaded.decode(ids[mask].tolist()).endswith("It is sunny.<|im_end|>")
    pair = {"prompt": [ASK], "chosen": messages[1:], "rejected": [END], "tools": TOOLS}
    [document, _], _ = replace(prepared, objective="dpo").encode_row(pair, "preference", {}, {})
    assert document.input_ids.tolist() == loaded.apply_chat_template(messages, tools=TOOLS, return_dict=False)


DATED = "{{ '<|im_start|>system\\n' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + CHATML


class Clock(datetime):
    """A clock that strikes midnight between two looks at it."""

    looks = 0

    @classmethod
    def now(cls, tz: Any = None) -> Clock:
        cls.looks += 1
        return cls(2026, 12, 31) + timedelta(days=cls.looks)


def test_all_rows_of_a_run_have_the_same_date_and_another_day_is_another_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    tokenizer = tokenizer_for(DATED)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n" * 3)
    data = Data(train=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))

    def rendered(day: str) -> list[str]:
        train = prepare(data, tokenizer, "sft", seed=0, day=day).train
        return [tokenizer.decode(train[at].input_ids.tolist()) for at in range(3)]

    for day, shown in (("2026-11-28", "28 Nov 2026"), ("2026-11-29", "29 Nov 2026"), ("2026-11-28", "28 Nov 2026")):
        texts = rendered(day)
        assert len({*texts}) == 1 and f"system\n{shown}<|im_end|>" in texts[0]
    assert f"system\n{date.today():%d %b %Y}<|im_end|>" in rendered("")[0]
    spelt = Template("{%- set how = '%d' %}{{ strftime_now(how) }}", None)
    assert spelt.on(date(2026, 11, 28)).content != spelt.on(date(2026, 11, 29)).content  # for its own cache
    plain = choose_template(None, tokenizer_of("smollm"))
    assert plain is not None and plain == plain.on(date(2026, 11, 28))
