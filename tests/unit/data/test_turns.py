"""data.render: every answer after its own prompt, on the chat templates of model families."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import prepared
import pytest
from data_tokenizers import shipped, tokenizer_for
from test_loss_mask import ASK, DEEPSEEK, END, LEFT_OUT, MADE, NAMES, TOOLS, TURNS, call, text_of

from packtrain.config.compose import faults_of
from packtrain.config.schema import Data
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.chat_template import CHATML, choose_template
from packtrain.data.tokens.encode import Encoder
from packtrain.data.tokens.loss_mask import UNVERIFIED
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import UserError

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
FIRST, SECOND = TURNS[1], TURNS[3]


def think(message: dict[str, Any], thought: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thought}


CALL = {"role": "assistant", "content": "", "tool_calls": [{**call("Paris"), "id": "abcdefghi"}]}
RESULT = {"role": "tool", "content": '"25 degrees"', "name": "weather", "tool_call_id": "abcdefghi"}
WRITTEN = MADE | {
    "as InternLM2": CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    + "{%- if not add_generation_prompt %}{{ eos_token }}{%- endif %}",
    "as DeepSeek V3.1 again": DEEPSEEK.replace("</think>' +", "<think></think>' +").replace("else '", "else '<think>"),
    "an empty thought left out": LEFT_OUT,
    "as Gemma 4": LEFT_OUT.replace("<think></think>", "<|channel>thought\n<channel|>"),
}
DIALOGS: dict[str, list[dict[str, Any]]] = {
    "plain": TURNS,
    "system": [SYSTEM, *TURNS],
    "thoughts": [TURNS[0], think(FIRST, "Greet."), TURNS[2], think(SECOND, "Ask.")],
    "one thought": [TURNS[0], FIRST, TURNS[2], think(SECOND, "Ask.")],
    "tools": [ASK, CALL, RESULT, END, TURNS[0], FIRST],
    "tools and thoughts": [ASK, think(CALL, "Look."), RESULT, think(END, "Sun."), TURNS[0], FIRST],
}


@cache
def encoder_of(name: str, render: str = "turns", **keys: Any) -> tuple[Any, Encoder]:
    tokenizer = tokenizer_for(WRITTEN.get(name) or (CHATML if name == "chatml" else text_of(name)))
    data = Data(train="rows", render=render, **keys)  # pyright: ignore[reportArgumentType]
    return tokenizer, Encoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer), data, "sft")


def encoded(name: str, kind: str, render: str = "turns", **keys: Any) -> tuple[list[Any], dict[str, Any]]:
    tokenizer, encoder = encoder_of(name, render, **keys)
    row = {"messages": as_given(tokenizer, DIALOGS[kind]), "tools": tools_of(kind)}
    return encoder.encode_row(row, "messages", {}, {})


def tools_of(kind: str) -> Any:
    return TOOLS if "tools" in kind else None


def as_given(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with thoughts where the template reads them: in a key, or before </think>."""
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
    """The prompt by transformers, with thinking on only for an answer with a thought."""
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


EVERY = [
    pytest.param(name, marks=[pytest.mark.exhaustive] if name.endswith("_training") else [])
    for name in (*NAMES, "hermes", "mistral_v3", *WRITTEN)
]
ENDS = {"glm4moe": ("<|user|>", "<|observation|>"), "glm4moe_training": ("<|user|>", "<|observation|>")}


@pytest.mark.parametrize("name", EVERY)
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
                assert re.match(rf"{thought}\s*</think>", prefix) and whole.endswith(content + end)
            else:
                assert said in whole, (said, whole)


def ids_of(documents: list[Any]) -> list[tuple[list[int], list[bool]]]:
    return [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in documents]


AUTO = {  # 2: thoughts of earlier answers are left out; 3: a prompt or an answer is written differently
    "qwen3": {"plain": 3, "system": 3, "thoughts": 2, "one thought": 3, "tools": 3, "tools and thoughts": 2},
    "gptoss": {"plain": 3, "thoughts": 2, "tools": 3, "tools and thoughts": 2},
    "glm4moe": {"plain": 0, "system": 0, "thoughts": 2, "tools": 0, "tools and thoughts": 2},
    "nemotron_3_nano": {"plain": 0, "thoughts": 2, "tools": 0},
    "deepseek_r1_distill": {"plain": 0, "thoughts": 2},
    "as DeepSeek V3.1": {"plain": 0, "thoughts": 2},
    "mistral_v3": {"plain": 0, "system": 3, "tools": 3},
    **{name: {"plain": 0, "system": 0} for name in ("chatml", "qwen2_5", "llama3", "phi3", "gemma3", "lfm2")},
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_takes_turns_exactly_where_a_conversation_is_shown_differently(name):
    for kind, reason in AUTO[name].items():
        documents, flags = encoded(name, kind, "auto")
        assert flags.get("turns", 0) == reason, kind
        wanted, _ = encoded(name, kind, "turns" if reason else "conversation")
        assert ids_of(documents) == ids_of(wanted)


def outcome(name: str, kind: str, render: str, **keys: Any) -> tuple[int, Any]:
    """The reason for turns, and the documents; or the error."""
    try:
        documents, flags = encoded(name, kind, render, **keys)
    except BadRow as bad:
        return 0, (bad.reason, bad.what)
    return flags.get("turns", 0), ids_of(documents)


@pytest.mark.parametrize("name", EVERY)
def test_a_conversation_that_is_shown_alike_stays_as_it_was(name):
    for kind in DIALOGS:
        auto, once = (outcome(name, kind, render) for render in ("auto", "conversation"))
        assert auto[0] or auto == once or (name.startswith("diffusion_gemma") and once[1][0] == UNVERIFIED), kind


@pytest.mark.parametrize(
    "name, kind, loss_on", [("qwen3_5_nothink", "thoughts", "completion"), ("as InternLM2", "plain", "assistant")]
)
def test_auto_takes_turns_rather_than_a_version_that_tells_another_text_or_no_text(name, kind, loss_on):
    once, turns, auto = (outcome(name, kind, render, loss_on=loss_on) for render in ("conversation", "turns", "auto"))
    assert once != turns and auto == (3, turns[1])


@pytest.mark.parametrize("loss_on, answers", [("completion", 1), ("assistant", 2)])
def test_turns_are_those_that_are_trained(loss_on, answers):
    documents, _ = encoded("qwen3", "plain", loss_on=loss_on)
    assert len(documents) == answers
    _, encoder = encoder_of("qwen3")
    [document], _ = encoder.encode_row({"messages": [*TURNS[:3], {**SECOND, "weight": 0}]}, "messages", {}, {})
    assert ids_of([document]) == ids_of(encoded("qwen3", "plain")[0][:1])


def test_kinds_of_rows_that_change_by_turns_are_counted_with_the_reason_and_each_way_has_its_cache(tmp_path):
    tokenizer = tokenizer_for(shipped("qwen3"))
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}, {"messages": DIALOGS["thoughts"]}]
    path = prepared.write(tmp_path / "rows.jsonl", *rows)

    def made(**keys: Any) -> Any:
        return prepared.ready(tmp_path, path, "sft", tokenizer, **keys).train

    report = made().report
    assert (report.documents, report.kept, report.retold) == (5, 3, 0)
    assert (report.turns_asked, report.turns_thoughts, report.turns_answers) == (0, 1, 1)
    said = [line for line in report.decisions() if "as it will be asked for" in line]
    assert len(said) == 2 and said[0].startswith("1 row ") and "thoughts" in said[0] and "data.render" in said[0]
    once = made(render="conversation").report
    assert (once.documents, once.retold, once.turns_thoughts) == (3, 2, 0)
    assert made(render="turns").report.turns_asked == 3


@pytest.mark.parametrize(
    "path, value, code",
    [
        ("data.loss_on", "all", "turns-train-answers"),
        ("data.format", "text", "no-turns"),
        ("objective.kind", "reward", "turns-of-scores"),
    ],
)
def test_turns_are_refused_where_there_are_none(path, value, code):
    group, name = path.split(".")
    values: dict[str, dict[str, Any]] = {"data": {"train": "rows.jsonl", "render": "turns"}, "model": {"path": "m"}}
    values.setdefault(group, {})[name] = value
    assert [fault.code for fault in faults_of({**values, "batch": {"examples_per_step": 1}})] == [code]


@pytest.mark.parametrize("render", ["auto", "turns"])
def test_tools_that_a_template_leaves_out_are_refused(render):
    _, encoder = encoder_of("phi3", render)
    with pytest.raises(BadRow, match="leaves out the tools"):
        encoder.encode_row({"messages": TURNS, "tools": TOOLS}, "messages", {}, {})


def test_turns_of_rows_that_turn_out_to_be_text_are_refused(tmp_path):
    path = prepared.write(tmp_path / "rows.jsonl", {"text": "Two and two is four."})
    with pytest.raises(UserError, match=r"have no turns.*\[no-turns\]"):
        prepared.ready(tmp_path, path, "sft", tokenizer_for(shipped("qwen3")), render="turns")


def test_a_prompt_whose_end_would_be_one_token_with_the_answer_is_tokenised_apart():
    """ "\n" of the header and of the answer: the prompt's tokens stay as asked."""
    tokenizer, encoder = encoder_of("qwen2_5")
    messages = [TURNS[0], {"role": "assistant", "content": "\nHello"}]
    [document], flags = encoder.encode_row({"messages": messages}, "messages", {}, {})
    asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    ids = document.input_ids.tolist()
    assert flags["apart"] and ids[: len(asked)] == asked and tokenizer.decode(ids[len(asked) :]) == "\nHello<|im_end|>"
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(asked)] != asked


def test_an_answer_that_a_template_cannot_show_is_named_and_rendered_as_before_by_auto():
    with pytest.raises(BadRow) as caught:
        encoded("deepseek_r1_distill", "one thought")
    assert caught.value.field == "messages[1]" and "<think>" in caught.value.what and "data.render" in caught.value.fix
    documents, flags = encoded("deepseek_r1_distill", "one thought", "auto", loss_on="completion")
    assert len(documents) == 1 and flags["turns"] == 2


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_answers_of_a_template_that_rewrites_their_prompt_are_as_before_by_auto_and_refused_by_turns(objective):
    pair = {"prompt": TURNS[:1], "chosen": [FIRST], "rejected": [SECOND]}
    found = []
    for render in ("conversation", "auto", "turns"):
        _, encoder = encoder_of("deepseek_r1_distill", render)
        encoder = replace(encoder, objective=objective)
        if render == "turns":
            with pytest.raises(BadRow, match="rewrites the prompt"):
                encoder.encode_row(pair, "preference", {}, {})
        else:
            documents, flags = encoder.encode_row(pair, "preference", {}, {})
            found.append((ids_of(documents), flags["apart"]))
    assert found[0] == found[1] and found[0][1]


def test_answers_whose_prompt_fills_the_length_are_left_out_and_counted(tmp_path):
    tokenizer = tokenizer_for(shipped("qwen3"))
    first, second = (len(document.input_ids) for document in encoded("qwen3", "plain")[0])
    path = prepared.write(tmp_path / "rows.jsonl", {"messages": TURNS})
    for length, lengths, dropped, truncated in ((first, [first], 1, 0), (second - 2, [first, second - 2], 0, 1)):
        train: Any = prepared.ready(tmp_path, path, "sft", tokenizer, max_length=length).train
        assert [len(train[at].input_ids) for at in range(len(train))] == lengths
        assert (train.report.dropped_chunks, train.report.truncated, train.report.turns_answers) == (
            dropped,
            truncated,
            1,
        )
