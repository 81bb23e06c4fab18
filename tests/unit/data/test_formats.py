"""Rows of every format and every fault: what is read, what is refused, and what the error names."""

from __future__ import annotations

import copy
import csv
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import prepared
import pytest
from data_tokenizers import SMOLLM, tokenizer_of
from prepared import TOKENIZER, texts, write
from tokenizers import processors

from packtrain.config.schema import Data, DataSource
from packtrain.data.formats.columns import Row
from packtrain.data.formats.examples import read_row
from packtrain.data.prepare import PreparedData, prepare
from packtrain.errors import UserError
from packtrain.train.log.console import _documents

QUESTION, ANSWER = {"role": "user", "content": "Hello there!"}, {"role": "assistant", "content": "How are you?"}
GOOD = {"messages": [QUESTION, ANSWER]}


@pytest.fixture
def ready(tmp_path: Path):
    return partial(prepared.ready, tmp_path)


def trained(data: PreparedData, index: int = 0) -> str:
    document = data.train[index]
    return TOKENIZER.decode(document.input_ids[document.loss_mask])


def turn(role: Any = "assistant", content: Any = "fine") -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": role, "content": content}]}


BAD: dict[str, tuple[Any, str, str]] = {
    "broken json": (b'{"messages": [', "broken JSON", ""),
    "not an object": ([1, 2], "wrong type", ""),
    "not utf-8": (b'{"text": "caf\xe9"}', "not UTF-8", ""),
    "lone surrogate": (turn(content="\ud800"), "not UTF-8", ""),
    "missing column": ({"text": "Hello"}, "missing column", "messages"),
    "messages a number": ({"messages": 7}, "wrong type", "messages"),
    "no messages": ({"messages": []}, "empty", "messages"),
    "message a list": ({"messages": [[]]}, "wrong type", "messages[0]"),
    "no content": ({"messages": [{"role": "user"}]}, "missing field", "messages[0]"),
    "role a number": (turn(role=3), "wrong type", "messages[1].role"),
    "content a number": (turn(content=3), "wrong type", "messages[1].content"),
    "content null": (turn(content=None), "wrong type", "messages[1].content"),
    "empty answer": (turn(content=" "), "empty", "messages[1].content"),
    "an image": (turn(content=[{"type": "image"}]), "not text", "messages[1].content[0]"),
    "videos": (GOOD | {"videos": ["1.mp4"]}, "not text", "videos"),
    "a misspelt role": (turn(role="asistant"), "unknown role", "messages[1].role"),
    "another word for the assistant": (turn(role="model"), "unknown role", "messages[1].role"),
}


@pytest.mark.parametrize("row, reason, field", BAD.values(), ids=BAD.keys())
def test_a_bad_row_is_an_error_that_names_file_line_and_field_or_skipped_and_counted(
    ready, tmp_path, row, reason, field
):
    path = write(tmp_path / "train.jsonl", GOOD, GOOD, row)
    with pytest.raises(UserError) as caught:
        ready(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:3{f', {field}' if field else ''}" and "data.bad_rows=skip" in problem.fix
    report = ready(path, bad_rows="skip").train.report
    assert (report.rows, report.kept, report.dropped) == (3, 2, {reason: 1})


def test_bad_rows_are_named_at_once_but_not_hundreds_and_skipped_ones_are_counted(ready, tmp_path):
    path = write(tmp_path / "train.jsonl", GOOD, *[{"messages": []}] * 300)
    with pytest.raises(UserError) as caught:
        ready(path)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:{line}, messages" for line in range(2, 7)]
    assert str(caught.value).endswith("Later rows may have the same problem.")
    path = write(tmp_path / "train.jsonl", GOOD, {"messages": []}, {"messages": []}, {"messages": 7})
    assert _documents(ready(path, bad_rows="skip").train.report).endswith("dropped 3: 2 empty, 1 wrong type")
    assert _documents(ready(write(tmp_path / "x.jsonl", GOOD)).train.report).endswith("dropped 0")
    path = write(tmp_path / "train.jsonl", {"messages": []}, {"messages": [QUESTION]}, {"messages": [QUESTION]})
    with pytest.raises(UserError, match=r"of 3 rows; dropped: 2 no trained token[^,]*, 1 empty"):
        ready(path, bad_rows="skip")


PAIR = {"prompt": "Hello there!", "completion": " How are you?"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hello there!"}, {"from": "gpt", "value": "How are you?"}]}
SAID = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}
TARGET = "How are you?<|im_end|>"
FORMATS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "text": ({"text": "Hello there!"}, "text", "Hello there!<|im_end|>", " there!<|im_end|>"),
    "pair": (PAIR, "prompt_completion", f"Hello there! {TARGET}", f" {TARGET}"),
    "sharegpt": (SHAREGPT, "sharegpt", "", TARGET),
    "alpaca": ({"instruction": "Hello there!", "input": "", "output": "How?"}, "alpaca", "", "How?<|im_end|>"),
    "messages": (GOOD, "messages", "", TARGET),
    "prompt of messages": (SAID, "prompt_completion", "", TARGET),
    "labels": ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "tokenised", "", TOKENIZER.decode([6, 7])),
    "mask": ({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, "tokenised", "", TOKENIZER.decode([7])),
    "ids alone": ({"input_ids": [5, 6, 7]}, "tokenised", "", TOKENIZER.decode([6, 7])),
}


@pytest.mark.parametrize("row, format, whole, target", FORMATS.values(), ids=FORMATS.keys())
def test_each_format_is_recognised_and_trains_its_targets(ready, tmp_path, row, format, whole, target):
    found = ready(write(tmp_path / "train.jsonl", row))
    assert found.train.report.format == format
    assert trained(found) == target
    if whole:
        assert texts(found) == [whole]


def test_a_pair_and_a_leading_newline_are_tokenised_apart_only_where_a_token_crosses_the_border(ready, tmp_path):
    train = ready(write(tmp_path / "train.jsonl", PAIR, {"prompt": "Hello ", "completion": "there"})).train
    assert train.report.apart == 1
    assert train[0].input_ids.tolist() == TOKENIZER("Hello there! How are you?<|im_end|>")["input_ids"]
    prompt = TOKENIZER("Hello ")["input_ids"]
    assert train[1].input_ids[: len(prompt)].tolist() == prompt
    assert train[1].loss_mask.tolist() == [False] * len(prompt) + [True] * (len(train[1].input_ids) - len(prompt))
    found = ready(write(tmp_path / "train.jsonl", turn(content="\nHow are you?"), GOOD))
    assert [trained(found, row) for row in (0, 1)] == ["\nHow are you?<|im_end|>", "How are you?<|im_end|>"]
    assert texts(found)[0].endswith("<|im_start|>assistant\n\nHow are you?<|im_end|>\n")
    assert found.train.report.apart == 1


@pytest.mark.parametrize("column", ["label", "kto_tag"])
@pytest.mark.parametrize("row", [GOOD, {"prompt": "Hello", "completion": " there!"}], ids=["messages", "strings"])
def test_answers_that_are_marked_as_ones_not_to_give_are_refused_or_left_out_and_never_taught(
    ready, tmp_path, column, row
):
    path = write(tmp_path / "train.jsonl", row | {column: True}, row | {column: False})
    with pytest.raises(UserError, match=f"(?s)jsonl:2, {column}: .*packtrain kto"):
        ready(path)
    report = ready(path, bad_rows="skip").train.report
    assert (report.kept, report.dropped) == (1, {"unwanted answer": 1})
    assert ready(write(tmp_path / "class.jsonl", {"text": "Hello there!", column: False})).train.report.kept == 1


@pytest.mark.parametrize("label", [0, 0.0, "0", "0.0", "False", False, "csv", "parquet"])
def test_sft_refuses_what_kto_reads_as_an_undesirable_answer(ready, tmp_path, label):
    path = write(tmp_path / "train.jsonl", GOOD | {"label": label})
    if label in ("csv", "parquet"):
        path = str(tmp_path / f"train.{label}")
        rows = [{"instruction": "Hello there!", "output": "How are you?", "label": label} for label in (1, None, 0)]
        table: Any = datasets.Dataset.from_list(rows).to_pandas()
        table.to_csv(path, index=False) if label == "csv" else table.to_parquet(path)
    with pytest.raises(UserError, match=r"(?s)label: .*packtrain kto"):
        ready(path)


@pytest.mark.parametrize("label", ["good", 2, -1, 0.5])
def test_a_label_that_nothing_reads_is_named(ready, tmp_path, label):
    report = ready(path := write(tmp_path / "train.jsonl", GOOD | {"label": label})).train.report
    assert [*report.unread[path]] == ["label"]
    assert not ready(write(tmp_path / "true.jsonl", GOOD | {"label": 1.0})).train.report.unread


def test_loss_on_all_trains_every_token_but_the_first_and_a_blank_thought_is_none(ready, tmp_path):
    mask = ready(write(tmp_path / "train.jsonl", GOOD), loss_on="all").train[0].loss_mask
    assert mask.tolist() == [False] + [True] * (len(mask) - 1)
    rows = ALPACA, ALPACA | {"reasoning": " \n "}
    plain, blank = texts(ready(write(tmp_path / "x.jsonl", *rows), chat_template="qwen3"))
    assert plain == blank


ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"


def test_alpaca_is_asked_as_others_ask_it(ready, tmp_path):
    for more, wanted in (
        ({}, "Add.\n1 and 2"),
        ({"input": ""}, "Add."),
        ({"input": None}, "Add."),
        ({"instruction": ""}, "1 and 2"),
        ({"history": [["Hello", "there"]]}, "Hello<|im_end|>\n<|im_start|>assistant\nthere<|im_end|>\n{}Add.\n1 and 2"),
    ):
        row = ALPACA | {"system": "Answer with care."} | more
        (text,) = texts(ready(write(tmp_path / "train.jsonl", row)))
        asked = wanted.format("<|im_start|>user\n")
        assert text == "<|im_start|>system\nAnswer with care.<|im_end|>\n" + ASKED.format(asked)


def test_a_system_column_comes_first_whatever_the_format_and_once(ready, tmp_path):
    system = {"role": "system", "content": "Answer with care."}
    (wanted,) = texts(ready(write(tmp_path / "train.jsonl", {"messages": [system, QUESTION, ANSWER]})))
    for row in (
        GOOD,
        {"messages": [system, QUESTION, ANSWER]},
        SHAREGPT,
        {"conversations": [{"from": "system", "value": system["content"]}, *SHAREGPT["conversations"]]},
        {"prompt": [QUESTION], "completion": [ANSWER]},
    ):
        assert texts(ready(write(tmp_path / "train.jsonl", row | {"system": system["content"]}))) == [wanted]


TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CARE, THOUGHT = "Answer with care.", "Hm, weather."
AS_COLUMNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # template, a row, and the row of messages that it stands for
    "dolly": ("smollm", {"instruction": "Add.", "context": "1 and 2", "response": "3", "category": "qa"}, {"question": "Add.\n1 and 2"}),
    "OpenOrca": ("smollm", {"system_prompt": CARE, "question": "Add.", "response": "3"}, {"system": CARE}),
    "input and output": ("smollm", {"input": "Add.", "output": "3"}, {}),
    "prompt and response": ("smollm", {"prompt": "Add.", "response": "3"}, {}),
    "exchanges": ("smollm", {"conversation": [{"human": "Add.", "assistant": "3"}], "system_message": CARE}, {"system": CARE}),
    "XTuner": ("smollm", {"conversation": [{"system": CARE, "input": "Add.", "output": "3"}]}, {"system": CARE}),
    "tools": ("qwen2_5", {"instruction": "Add.", "output": "3", "available_tools": json.dumps([TOOL])}, {"tools": [TOOL]}),
    "a thought": ("qwen3", {"instruction": "Add.", "reasoning": THOUGHT, "output": "3"}, {"thought": THOUGHT}),
    "a thought beside messages": ("qwen3", {"messages": [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}], "thinking": THOUGHT}, {"thought": THOUGHT}),
    # ms-swift: Template._get_std_messages puts a question without words in front
    "an answer alone": ("smollm", {"response": "3", "id": "a"}, {"question": ""}),
    "an answer alone with system": ("smollm", {"response": "3", "system": CARE}, {"question": "", "system": CARE}),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_COLUMNS)
def test_columns_as_others_spell_them_are_read(ready, tmp_path, name):
    template, row, wanted = AS_COLUMNS[name]
    answer = {"role": "assistant", "content": "3"}
    answer |= {"reasoning_content": wanted["thought"]} if "thought" in wanted else {}
    messages = [{"role": "user", "content": wanted.get("question", "Add.")}, answer]
    same = {"messages": messages} | {key: wanted[key] for key in wanted.keys() & {"tools", "system"}}
    how = {} if template == "smollm" else {"chat_template": template}
    expected = ready(write(tmp_path / "same.jsonl", same), **how)
    as_text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "x.parquet")
    with open(tmp_path / "x.csv", "w", newline="") as file:
        csv.writer(file).writerows([as_text.keys(), as_text.values()])
    for path in (write(tmp_path / "x.jsonl", row), str(tmp_path / "x.parquet"), str(tmp_path / "x.csv")):
        found = ready(path, **how)
        assert (texts(found), trained(found)) == (texts(expected), trained(expected))


UNREAD: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "messages": (GOOD | {"sys": "Be brief.", "functions_json": "[1]"}, {"sys": "system", "functions_json": "tools"}),
    "sharegpt": ({"conversations": [{"human": "Hello", "gpt": "you"}], "persona": "A poet."}, {"persona": "system"}),
    "alpaca": (ALPACA | {"passage": "It is.", "chatHistory": [["a", "b"]]}, {"passage": "", "chatHistory": "history"}),
    "alpaca without input": ({"instruction": "Add.", "facts": "1 and 2", "output": "3"}, {"facts": "input"}),
    "prompt_completion": ({"prompt": "Hello", "completion": " you", "context": "there is"}, {"context": ""}),
    "text": ({"text": "Hello", "title": "A greeting"}, {"title": ""}),
    "xlam": ({"query": "Hello", "answers": [{"name": "weather"}], "tools": [TOOL], "plan": "Ask it."}, {"plan": ""}),
    "tokenised": ({"input_ids": [5, 6], "train_mask": [0, 1]}, {"train_mask": "loss_mask"}),
    "keys of turns": ({"messages": [QUESTION, {**ANSWER, "cot": "Hm."}]}, {"messages[].cot": ""}),
    "the name of a speaker": (
        {"messages": [{**QUESTION, "name": "Ann"}, ANSWER, {"role": "tool", "name": "clock", "content": "9"}, ANSWER]},
        {"messages[].name": ""},
    ),
    "flags and keys of turns that the template only quotes": (
        {"messages": [QUESTION, {**ANSWER, "supervised": False, "think": "Hm."}]},
        {"messages[].supervised": "", "messages[].think": ""},
    ),
    "an answer that was rejected": (ALPACA | {"rejected": "It is not."}, {"rejected": ""}),
    "a thought without a place": ({"instruction": "Add.", "output": "3", "reasoning": "It is."}, {"reasoning": ""}),
}


@pytest.mark.parametrize("row, wanted", UNREAD.values(), ids=UNREAD.keys())
def test_columns_that_nothing_reads_are_named_once_with_the_key_that_would(ready, tmp_path, row, wanted):
    notes = {"id": 3, "source_url": "http://a.b", "score": 0.5, "metadata": {"a": 1}, "__index_level_0__": 1}
    path, how = write(tmp_path / "x.jsonl", row, {**row, **notes, "empty": "", "null": None}), {}
    if row.keys() >= {"query", "answers"} or "messages[].think" in wanted:
        how = {"chat_template": "qwen3"}
    report = ready(path, **how).train.report
    assert report.unread == {path: wanted | dict.fromkeys(notes, "note")}
    advice = [f"{name} (data.columns.{use}={name} reads it)" if use else name for name, use in wanted.items()]
    assert report.decisions()[-2:] == [
        f"{path}: not read: {', '.join(sorted(advice))}",
        f"{path}: not read, about the rows only: {', '.join(sorted(notes))}",
    ]
    for name, use in wanted.items():
        if use and isinstance(row[name], str) and use != "tools":
            assert name not in ready(path, columns={use: name}, **how).train.report.unread[path]


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}, {"loss": False}, {"masked": True}, {"weight": 0.0}])
@pytest.mark.parametrize(
    "row", [ALPACA, {"messages": [QUESTION, ANSWER]}, {"text": "Hello"}], ids=lambda row: next(iter(row))
)
def test_a_row_that_is_marked_as_not_trained_is_dropped_and_counted(ready, tmp_path, row, mark):
    trained = {name: not value for name, value in mark.items()}
    report = ready(write(tmp_path / "x.jsonl", row | mark, row | trained, row)).train.report
    assert (report.kept, report.dropped, report.unread) == (2, {"marked as not trained": 1}, {})


def test_marks_that_are_not_read_are_named_with_what_to_write(ready, tmp_path):
    turns = [QUESTION, {**ANSWER, "learn": False}, QUESTION, {**ANSWER, "ignore": True}]
    marks = {"skip": True, "no_train": 1, "weight": 0.5}
    path = write(tmp_path / "x.jsonl", {"messages": turns, **marks})
    report = ready(path).train.report
    named = dict.fromkeys(("messages[].learn", "messages[].ignore", "skip", "no_train"), "mark")
    assert report.unread == {path: named | {"weight": ""}}
    assert report.decisions()[-1].count("trained all the same: write weight, 0 or 1") == 4


def test_a_blank_thought_of_a_column_is_none(ready, tmp_path):
    rows = ALPACA, ALPACA | {"reasoning": " \n "}
    plain, blank = texts(ready(write(tmp_path / "x.jsonl", *rows), chat_template="qwen3"))
    assert plain == blank


def test_what_is_read_is_not_named_and_our_own_names_go_before_others(ready, tmp_path):
    rows = [GOOD | {"system": "Be brief.", "label": True}, {"messages": [QUESTION, {**ANSWER, "train": False}, ANSWER]}]
    assert ready(write(tmp_path / "x.jsonl", *rows)).train.report.unread == {}
    (tmp_path / "names.jinja").write_text(
        "{% for message in messages %}{{ message.role + (message.name or '') }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    path = write(tmp_path / "x.jsonl", {"messages": [{**QUESTION, "name": "Ann"}, ANSWER]})
    data = ready(path, chat_template=str(tmp_path / "names.jinja"))
    assert "Ann" in texts(data)[0] and data.train.report.unread == {}
    row = GOOD | {"query": "Hello", "response": "you"}
    assert ready(write(tmp_path / "x.jsonl", row)).train.report.format == "messages"
    row = {"messages": [{"role": "system", "content": CARE}, QUESTION, ANSWER]}
    other = ready(write(tmp_path / "y.jsonl", row | {"system_prompt": "Be brief."}))
    assert texts(other) == texts(ready(write(tmp_path / "x.jsonl", row)))
    assert [*other.train.report.unread.values()] == [{"system_prompt": ""}]


@pytest.mark.parametrize("columns", [{}, {"instruction": "q"}])
def test_a_row_that_forgot_its_question_among_rows_that_have_one_is_refused(ready, tmp_path, columns):
    name = columns.get("instruction", "question")
    path = write(tmp_path / "x.jsonl", {name: "Add.", "response": "3"}, {"response": "4"})
    with pytest.raises(UserError, match=r"x\.jsonl:2, "):
        ready(path, columns=columns)
    assert len(texts(ready(path, columns=columns, bad_rows="skip"))) == 1
    ready(write(tmp_path / "alone.jsonl", {"response": "3"}, {"response": "4"}))


def test_the_advice_for_unknown_columns_names_the_chat_first_and_works(ready, tmp_path):
    path = write(tmp_path / "x.jsonl", {"asked": "Add.", "said": "3"})
    with pytest.raises(
        UserError, match=r"(?s)instruction=question data.columns.output=answer for a chat.*plain text"
    ) as raised:
        ready(path)
    assert "chosen=better" not in str(raised.value)
    (text,) = texts(ready(path, columns={"instruction": "asked", "output": "said"}))
    assert "<|im_start|>user\nAdd.<|im_end|>" in text


def test_a_system_prompt_of_the_config_is_for_conversations_without_one(ready, tmp_path):
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    own = {"messages": [{"role": "system", "content": "Answer with care."}, QUESTION, ANSWER]}
    plain = texts(ready(path := write(tmp_path / "train.jsonl", GOOD, own)))  # and cached
    without, with_own = texts(ready(path, system="Be brief."))
    assert without.startswith(system) and with_own == plain[1]
    alpaca = write(tmp_path / "alpaca.jsonl", ALPACA, {**ALPACA, "system": "Answer with care."})
    assert [text.startswith(system) for text in texts(ready(alpaca, system="Be brief."))] == [True, False]
    text = write(tmp_path / "text.jsonl", {"text": "Plain."})
    assert texts(ready(text, system="Be brief.")) == texts(ready(text))


def test_a_system_prompt_that_the_template_leaves_out_is_refused(ready, tmp_path):
    turns = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    (template := tmp_path / "silent.jinja").write_text(turns)
    path = write(tmp_path / "train.jsonl", GOOD)
    ready(path, chat_template=str(template))
    with pytest.raises(UserError, match=r"data\.system: .*\[system-left-out\]"):
        ready(path, chat_template=str(template), system="Be brief.")


@pytest.mark.parametrize("more", [{"system": "Answer with care."}, {"history": [["Hello", "there"]]}])
def test_what_plain_text_has_no_place_for_is_refused_and_the_advice_reads_it(ready, tmp_path, more):
    path = write(tmp_path / "train.jsonl", {"q": "Add.", "completion": "3", **more})
    with pytest.raises(UserError, match=rf"{next(iter(more))}: [\s\S]*data.columns.instruction"):
        ready(path, columns={"prompt": "q"})
    (text,) = texts(ready(path, format="alpaca", columns={"instruction": "q", "output": "completion"}))
    assert all(said in text for said in ("Add.", "3", *np.ravel([*more.values()])))


@pytest.mark.parametrize(
    "row, words",
    [
        ({"question": "a", "answer": "b"}, "fit no known format; found: question, answer"),
        ({"ask": "Why?", "response": "So."}, "fit no known format"),  # no answer alone
        ({"messages": [], "text": "a"}, "fit messages and text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "packtrain dpo"),
    ],
)
def test_columns_that_fit_no_format_or_several_are_an_error(ready, tmp_path, row, words):
    with pytest.raises(UserError) as caught:
        ready(write(tmp_path / "train.jsonl", row))
    assert words in str(caught.value)


def test_columns_are_renamed_and_errors_use_the_files_names(ready, tmp_path):
    path = write(tmp_path / "train.jsonl", {"q": "Hello", "a": " there"}, {"q": "Hello", "a": 5})
    columns = {"prompt": "q", "completion": "a"}
    with pytest.raises(UserError, match=r"train\.jsonl:2, a: expected a string, found a number: 5"):
        ready(path, columns=columns)
    assert trained(ready(path, columns=columns, bad_rows="skip")) == " there<|im_end|>"


def test_conversations_without_a_chat_template_are_an_error(tmp_path):
    bare = tokenizer_of("llama3").__class__(
        tokenizer_object=tokenizer_of("llama3").backend_tokenizer, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )
    data = Data(train=write(tmp_path / "train.jsonl", GOOD), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"\[row-no-chat-template\]"):
        prepare(data, bare, "sft", seed=0)
    assert len(prepare(replace(data, chat_template="llama3"), bare, "sft", seed=0).train) == 1


LONG = {"messages": [QUESTION, {"role": "assistant", "content": "How are you? " * 20}]}


def test_what_is_too_long_is_cut_inside_an_answer_or_dropped_before_it_with_counts(ready, tmp_path):
    path = write(tmp_path / "train.jsonl", LONG)
    whole, cut = ready(path, max_length=None).train, ready(path, max_length=60).train
    assert cut[0].input_ids.tolist() == whole[0].input_ids[:60].tolist()
    assert cut[0].loss_mask.tolist() == whole[0].loss_mask[:60].tolist()
    assert (cut.report.truncated, cut.report.cut_tokens) == (1, len(whole[0].input_ids) - 60)
    limit = int(ready(write(tmp_path / "short.jsonl", GOOD)).train.lengths[0])
    long_question = {"messages": [{**QUESTION, "content": "Hello " * limit}, ANSWER]}
    report = ready(write(tmp_path / "train.jsonl", long_question, LONG), max_length=limit).train.report
    assert (report.kept, report.dropped) == (1, {"no trained token within data.max_length": 1})
    path = write(tmp_path / "train.jsonl", GOOD, LONG)
    report = ready(path, max_length=limit, overlong="drop").train.report
    assert (report.kept, report.dropped) == (1, {"longer than data.max_length": 1})
    with pytest.raises(UserError, match=rf"train.jsonl:2: \d+ tokens, but data.max_length={limit}"):
        ready(path, max_length=limit, overlong="error", bad_rows="skip")


def test_split_gives_consecutive_parts_and_drops_untrained_ones_with_a_count(ready, tmp_path):
    path = write(tmp_path / "train.jsonl", LONG)
    whole, parts = ready(path, max_length=None).train, ready(path, max_length=16, overlong="split").train
    first = int(np.flatnonzero(whole[0].loss_mask)[0]) // 16
    assert first == parts.report.dropped_chunks > 0
    joined = np.concatenate([parts[i].input_ids for i in range(len(parts))])
    np.testing.assert_array_equal(joined, whole[0].input_ids[first * 16 : first * 16 + len(joined)])
    assert (parts.report.rows, parts.report.kept, parts.report.split) == (1, 1, 1)
    assert parts.lengths.max() == 16
    assert parts.report.tokens + parts.report.cut_tokens == len(whole[0].input_ids)


def test_a_split_of_a_saved_dataset_dict_is_read_and_a_wrong_one_named(ready, tmp_path):
    saved = datasets.DatasetDict(train=datasets.Dataset.from_list([GOOD]), test=datasets.Dataset.from_list([GOOD] * 2))
    saved.save_to_disk(tmp_path / "dict")
    assert len(ready([DataSource(path=str(tmp_path / "dict"), split="test")]).train) == 2
    with pytest.raises(UserError, match=r"no split 'dev'[\s\S]*train, test"):
        ready([DataSource(path=str(tmp_path / "dict"), split="dev")])


def test_a_role_that_the_template_names_may_speak(ready, tmp_path):
    critic = "{% if messages[0]['role'] == 'critic' %}{{ '!' }}{% endif %}" + SMOLLM
    (tmp_path / "own.jinja").write_text(critic)
    path = write(tmp_path / "train.jsonl", {"messages": [{"role": "critic", "content": "Well."}, QUESTION, ANSWER]})
    assert len(ready(path, chat_template=str(tmp_path / "own.jinja")).train) == 1
    with pytest.raises(UserError, match="unknown role 'critic'"):
        ready(path)


def test_a_doubled_bos_is_counted_and_said_once(tmp_path):
    """TRL doubles it, too, so the tokens stay and the run says it."""
    tokenizer = copy.deepcopy(tokenizer_of("llama3"))
    bos = str(tokenizer.bos_token)
    adding = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = adding
    rows = [{"text": "Hello"}, {"text": f"{bos}Hello"}, {"text": f"{bos}How are you?"}, {"text": bos}]
    path = write(tmp_path / "texts.jsonl", *rows)
    report = prepare(Data(train=path, cache_dir=str(tmp_path / "cache")), tokenizer, "sft", seed=0).train.report
    assert report.two_bos == 3
    assert [line for line in report.decisions() if "BOS" in line] == [
        line for line in report.decisions() if "3 rows" in line
    ]
    chats = write(tmp_path / "chats.jsonl", GOOD)
    chat = prepare(Data(train=chats, cache_dir=str(tmp_path / "cache")), tokenizer, "sft", seed=0).train
    assert chat.report.two_bos == 0 and chat[0].input_ids.tolist().count(tokenizer.bos_token_id) == 1
    ids = {"input_ids": [tokenizer.bos_token_id] * 2 + [7]}
    data = Data(train=write(tmp_path / "ids.jsonl", ids), cache_dir=str(tmp_path / "cache"))
    assert prepare(data, tokenizer, "sft", seed=0).train.report.two_bos == 1


def test_a_prompt_that_ends_in_the_assistants_turn_is_refused_as_the_template_would_close_it(ready, tmp_path):
    row = {"prompt": [QUESTION, {**ANSWER, "content": "How are"}], "completion": [{**ANSWER, "content": " you?"}]}
    with pytest.raises(UserError, match=r"jsonl:2, completion: .*\[row-closed-turn\]"):
        ready(write(tmp_path / "rows.jsonl", {"prompt": [QUESTION], "completion": [ANSWER]}, row))
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    row = {"prompt": [QUESTION, called], "completion": [{"role": "user", "content": "1"}, ANSWER]}
    assert read_row(Row(row, {}, frozenset(), frozenset()), "prompt_completion")


def test_columns_of_a_source_are_its_own_and_the_others_keep_theirs(ready: Any, tmp_path: Path) -> None:
    """Three shapes stand beside each other. A wrong name is said of its source."""
    plain = write(tmp_path / "plain.jsonl", GOOD)
    dialog = write(tmp_path / "dialog.jsonl", {"dialog": GOOD["messages"], "note": "not read"})
    alpaca = write(tmp_path / "alpaca.jsonl", {"q": "Hello there!", "a": "How are you?"})
    story = write(tmp_path / "story.jsonl", {"story": "Once."})
    own = {dialog: {"messages": "dialog"}, alpaca: {"instruction": "q", "output": "a"}, story: {"text": "story"}}
    given = [plain, *(DataSource(path=path, columns=columns) for path, columns in own.items())]
    found = ready([source for source in given if source != given[1]])
    expected = texts(ready(plain))[0]
    assert sorted(texts(found)) == sorted([expected, expected, f"Once.{TOKENIZER.eos_token}"])
    assert texts(ready(given[1])) == [expected]
    both = ready([DataSource(path=dialog, columns={"messages": "dialog"}), story], columns={"text": "story"})
    assert len(both.train) == 2  # data.columns is of the sources without names of their own
    with pytest.raises(UserError, match="packtrain has no column 'mesages'"):
        ready([plain, DataSource(path=dialog, columns={"mesages": "dialog"})])
    with pytest.raises(UserError, match="'dialog', which is not there"):
        ready(DataSource(path=plain, columns={"messages": "dialog"}))
