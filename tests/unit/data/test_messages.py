"""Tool calls, thoughts and weights, from every way that data sets write them; and what is refused, by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, get_args

import prepared
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizers import shipped, tokenizer_for
from prepared import trained_runs

from packtrain.config.schema import Format
from packtrain.data.formats.messages import WEIGHTS
from packtrain.errors import UserError

TOKENIZER = tokenizer_for(shipped("qwen3_training"))
WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]
ASK = {"role": "user", "content": "What is the weather?"}
END = {"role": "assistant", "content": "It is sunny."}
PARIS = {"name": "weather", "arguments": {"city": "Paris 中"}}
ROME = {"name": "weather", "arguments": {"city": "Rome"}}
TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TWO = f"{TEXT % 'Paris 中'}\n{TEXT % 'Rome'}<|im_end|>"
THOUGHT = "<think>\nHm.\n</think>\n\n"
SUNNY = "It is sunny.<|im_end|>"


def trained(path: str, **keys: Any) -> list[str]:
    """The text of each run of trained tokens of the only row."""
    (document,) = (lambda train: map(train.__getitem__, range(len(train))))(made(path, **keys))
    return trained_runs(TOKENIZER, document.input_ids, document.loss_mask)


def write(folder: Path, *rows: Any) -> str:
    return prepared.write(folder / "train.jsonl", *rows)


def made(path: str, kind: Any = "sft", tokenizer: Any = TOKENIZER, **keys: Any) -> Any:
    """The rows to train, tokenised."""
    return prepared.ready(Path(path).parent, path, kind, tokenizer, **keys).train


def text_of(path: str) -> str:
    """The text of the first row."""
    return TOKENIZER.decode(made(path)[0].input_ids)


def of(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": TOOLS, **more}


def turns(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": said} for speaker, said in pairs], "tools": TOOLS, **more}


def called(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **more}


def parts(role: str, *pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "value": value} for kind, value in pairs]}


def wrapped(call: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}, **more}


def xlam(answers: str) -> dict[str, Any]:
    return {"query": ASK["content"], "answers": answers, "tools": json.dumps([WEATHER])}


def part(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


RESULT = {"role": "tool", "content": "25 degrees"}
ONE = f"{TEXT % 'Paris 中'}<|im_end|>"
HUMAN, GPT = ("human", ASK["content"]), ("gpt", END["content"])
SEEN = ("observation", "25 degrees")
EARLIER = {"role": "assistant", "content": None, "function_call": wrapped(PARIS)["function"]}
SWIFT = [{"role": "tool_call", "content": json.dumps(call)} for call in (PARIS, ROME)]
CALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "objects": (of(ASK, called(PARIS), RESULT, END), [ONE, SUNNY]),
    "OpenAI": (
        of(ASK, called(wrapped(PARIS, id="x"), content=None), {**RESULT, "tool_call_id": "x"}, END),
        [ONE, SUNNY],
    ),
    "parallel": (of(ASK, called(PARIS, ROME), RESULT, RESULT, END), [TWO, SUNNY]),
    "OpenAI's earlier function_call": (
        of(ASK, EARLIER, {**RESULT, "role": "function", "name": "weather"}, END),
        [ONE, SUNNY],
    ),
    "no arguments": (
        of(ASK, called({"name": "weather", "arguments": ""})),
        [ONE.replace('{"city": "Paris 中"}', "{}")],
    ),
    "sharegpt": (turns(HUMAN, ("function_call", json.dumps(PARIS)), SEEN, GPT), [ONE, SUNNY]),
    "sharegpt, parallel": (turns(HUMAN, ("function_call", json.dumps([PARIS, ROME]))), [TWO]),
    "ms-swift": (of(ASK, *SWIFT, *({"role": "tool_response", "content": "25"},) * 2, END), [TWO, SUNNY]),
    "parts": (
        of(
            parts("user", ("text", ASK["content"])),
            parts("assistant", ("reasoning", "Hm."), ("tool_call", json.dumps(PARIS)), ("tool_call", ROME)),
            parts("tool", ("text", "25")),
            parts("assistant", ("reasoning", "Hm."), ("text", "It is"), ("text", " sunny.")),
        ),
        [THOUGHT + TWO, f"{THOUGHT}It is sunny.<|im_end|>"],
    ),
    "xlam": (xlam(json.dumps([PARIS, ROME])), [TWO]),
    "reasoning_content": (of(ASK, {**END, "reasoning_content": "Hm."}), [f"{THOUGHT}It is sunny.<|im_end|>"]),
    "thinking": (of(ASK, {**END, "thinking": "Hm.", "reasoning": None}), [f"{THOUGHT}It is sunny.<|im_end|>"]),
    "weight 0": (of(ASK, {**END, "weight": 0}, {**ASK, "weight": 0}, {**END, "weight": 1}), [SUNNY]),
}


@pytest.mark.parametrize("row, wanted", CALLS.values(), ids=CALLS.keys())
def test_calls_thoughts_and_answers_are_trained_and_results_are_not(tmp_path, row, wanted):
    assert [text.rstrip("\n") for text in trained(write(tmp_path, row))] == wanted


def test_the_tools_are_seen_in_openais_form_whatever_the_file_has(tmp_path):
    """As transformers' get_json_schema writes them for templates."""
    for tools in (TOOLS, [WEATHER], json.dumps([WEATHER]), [{"type": "function", **WEATHER}]):
        text = text_of(write(tmp_path, of(ASK, END, tools=tools)))
        assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    earlier = {"messages": [ASK, END], "functions": [WEATHER]}  # OpenAI's name for them before tool_calls
    assert text_of(write(tmp_path, earlier)) == text


NEWS = {"name": "news", "description": "d", "parameters": {"type": "object", "properties": {"of": {"default": None}}}}
BOTH = [*TOOLS, {"type": "function", "function": NEWS}]
LISTS = {
    "a list": json.dumps(BOTH),
    "bare, in another order, over lines": json.dumps([NEWS, WEATHER], indent=2),
    "an object on each line": "\n".join(map(json.dumps, BOTH)),
    "keys in another order": json.dumps([dict(reversed(tool.items())) for tool in BOTH]),
    "Python": str(BOTH),
    "one of them twice": json.dumps([*BOTH, WEATHER]),
}


def hermes(listed: str, tools: Any = BOTH) -> dict[str, Any]:
    asked = f"Signatures are within <tools></tools> tags. Tools: <tools> {listed} </tools> Answer."
    return turns(("system", asked), HUMAN, GPT) | {"tools": tools}


@pytest.mark.parametrize("tools", [BOTH, [WEATHER, NEWS], json.dumps(BOTH)], ids=["wrapped", "bare", "text"])
@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS.keys())
def test_tools_that_the_system_prompt_lists_already_are_given_once(tmp_path, listed, tools):
    train = made(write(tmp_path, hermes(listed, tools)))
    text = TOKENIZER.decode(train[0].input_ids)
    assert text.count('name": "news') + text.count("name': 'news") == 1 and f"<tools> {listed} </tools>" in text
    assert train.report.tools_in_system == 1 and any("system prompt" in line for line in train.report.decisions())


def test_pairs_and_tables_with_their_nulls_give_such_tools_once_too(tmp_path):
    row = hermes(json.dumps(BOTH))
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "train.parquet")
    assert made(str(tmp_path / "train.parquet")).report.tools_in_system == 2
    prompt = [{"role": "system", "content": f"<tools>{json.dumps(BOTH)}</tools>"}, ASK]
    row = {"prompt": prompt, "chosen": [END], "rejected": [{**END, "content": "No."}], "tools": BOTH}
    train = made(write(tmp_path, row), "dpo")
    assert train.report.tools_in_system == 1
    assert all(TOKENIZER.decode(side.input_ids).count('"news"') == 1 for side in (train[0].chosen, train[0].rejected))


@pytest.mark.parametrize("listed", ["", "and", "[1]", "weather(city)", "[{1: 'a', 'b': 2}]"])
def test_other_words_between_the_tags_are_no_list_of_tools(tmp_path, listed):
    train = made(write(tmp_path, hermes(listed)))
    assert TOKENIZER.decode(train[0].input_ids).count('"news"') == 1 and not train.report.tools_in_system


@pytest.mark.parametrize("tools", [TOOLS, [WEATHER, {**NEWS, "description": "e"}]])
def test_a_system_prompt_with_other_tools_is_refused(tmp_path, tools):
    path = write(tmp_path, turns(HUMAN, GPT), hermes(json.dumps(BOTH), tools))
    with pytest.raises(UserError) as caught:
        trained(path)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2, tools"]


def test_a_template_without_system_prompts_would_lose_the_tools_in_one(tmp_path):
    own = copy.deepcopy(TOKENIZER)
    own.chat_template = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match=r"\[row-tools-left-out\]"):
        made(write(tmp_path, hermes(json.dumps(BOTH))), tokenizer=own, loss_on="all")


@pytest.mark.parametrize("results", [["25 degrees"], ["25 degrees", "30 degrees"]])
def test_tags_around_a_tools_answer_are_there_once_if_the_template_writes_them_too(tmp_path, results):
    """NousResearch/hermes-function-calling-v1 has such rows. Tags in the assistant's turns are text."""
    called = ("gpt", f"<tool_call>\n{json.dumps(PARIS)}\n</tool_call>")
    tagged = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    rows = [
        turns(HUMAN, called, *seen, GPT) for seen in ([("tool", f"{tagged}\n")], [("tool", said) for said in results])
    ]
    texts = [TOKENIZER.decode(document.input_ids) for document in made(write(tmp_path, *rows))]
    assert texts[0] == texts[1] and texts[0].count("<tool_response>") == len(results) and called[1] in texts[0]


PART = ("tool_call", PARIS)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no JSON": (turns(HUMAN, ("function_call", "weather(Paris)")), "conversations[1].value"),
    "no call": (turns(HUMAN, ("function_call", "[]")), "conversations[1].value"),
    "a call without a name": (turns(HUMAN, ("function_call", "{}")), "conversations[1].value[0]"),
    "arguments as a list": (of(ASK, called({**PARIS, "arguments": [1]})), "messages[1].tool_calls[0].arguments"),
    "arguments as a word": (of(ASK, called({**PARIS, "arguments": "Paris"})), "messages[1].tool_calls[0].arguments"),
    "calls as an object": (of(ASK, called() | {"tool_calls": PARIS}), "messages[1].tool_calls"),
    "empty calls": (of(ASK, called(content="")), "messages[1].content"),
    "empty calls alone": (of(ASK, called()), "messages[1]"),
    "tools as an object": (of(ASK, END, tools=WEATHER), "tools"),
    "a tool as a word": (of(ASK, END, tools=["weather"]), "tools[0]"),
    "a tool without a name": (of(ASK, END, tools=[{"type": "function"}]), "tools[0]"),
    "a part of words": (of(ASK, {**END, "content": ["words"]}), "messages[1].content[0]"),
    "a sound": (of(parts("user", ("input_audio", "1.mp3")), END), "messages[0].content[0]"),
    "a user who thinks": (of(parts("user", ("reasoning", "Hm.")), END), "messages[0].content[0]"),
    "a part without a value": (of({**ASK, "content": [{"type": "text"}]}, END), "messages[0].content[0]"),
    "words after a call": (of(ASK, parts("assistant", PART, ("text", "Hm."))), "messages[1].content[1]"),
    "calls twice": (of(ASK, parts("assistant", PART) | {"tool_calls": [PARIS]}), "messages[1].content[0]"),
    "two thoughts": (of(ASK, {**END, "reasoning": "a", "thinking": "b"}), "messages[1].thinking"),
    "a thought of numbers": (of(ASK, {**END, "reasoning": 7}), "messages[1].reasoning"),
    "half a weight": (of(ASK, {**END, "weight": 0.5}), "messages[1].weight"),
    "weights within a turn": (of(ASK, {**END, "train_detail": [{}]}), "messages[1].train_detail"),
    "a part that is not trained": (of(ASK, {**END, "content": [part(train=False), part("b")]}), "messages[1].content"),
    "a thought that is not trained": (
        of(ASK, {**END, "content": [{"type": "thinking", "thinking": "a", "weight": 0}, part("b")]}),
        "messages[1].content",
    ),
    "a part's half weight": (
        of(ASK, {**END, "content": [part(loss_weight=0.5)]}),
        "messages[1].content[0].loss_weight",
    ),
    "a user's part to train": (of({**ASK, "content": [part(train=True)]}, END), "messages[0].content[0].train"),
    "axolotl's spans": (of(ASK, {**END, "training_detail": [{"begin_offset": 0}]}), "messages[1].training_detail"),
    "axolotl's spans of a thought": (
        of(ASK, {**END, "reasoning_training_detail": [{}]}),
        "messages[1].reasoning_training_detail",
    ),
    "ms-swift's scale": (of(ASK, {**END, "loss_scale": 2.0}), "messages[1].loss_scale"),
    "a mask by token": (of(ASK, {**END, "loss_mask": [0, 1]}), "messages[1].loss_mask"),
    "a user that torchtune trains": (of({**ASK, "masked": False}, END), "messages[0].masked"),
    "an unclear mask": (of(ASK, {**END, "mask": 1}), "messages[1].mask"),
    "camels": (of(ASK, {**END, "lossWeight": 0}), "messages[1].lossWeight"),
    "an unknown word": (of(ASK, {**END, "should_train": False}), "messages[1].should_train"),
    "parts and their turn": (of(ASK, {**END, "train": True, "content": [part(weight=0)]}), "messages[1]"),
    "two weights": (of(ASK, {**END, "train": True, "weight": 0}), "messages[1]"),
    "a user to train": (of({**ASK, "weight": 1}, END), "messages[0].weight"),
    "xlam without calls": (xlam("[]"), "answers"),
    "xlam with words": (xlam("It is."), "answers"),
}


@pytest.mark.parametrize("row, field", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_right_is_named_with_its_place(tmp_path, row, field):
    good = xlam(json.dumps([PARIS])) if "query" in row else turns(HUMAN, GPT)
    path = write(tmp_path, of(ASK, END) if "messages" in row else good, row)
    with pytest.raises(UserError) as caught:
        trained(path)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2, {field}"]


def test_a_turn_that_is_not_to_be_trained_contradicts_training_all(tmp_path):
    path = write(tmp_path, of(ASK, {**END, "weight": 0}, ASK, END))
    with pytest.raises(UserError, match=r"messages\[1\]: .*data.loss_on=all"):
        trained(path, loss_on="all")


NOT_TRAINED: list[dict[str, Any]] = [
    *({key: value} for key in WEIGHTS for value in (0, 0.0, False)),
    {"masked": True},
    {"masked": 1, "weight": 0, "train_detail": None, "training_detail": []},
    *({"content": [{"type": "text", "text": "It is", **said}] * 2} for said in ({"train": False}, {"weight": 0})),
    {"weight": 0, "content": [{"type": "text", "text": "It", "train": False}, {"type": "text", "text": " is"}]},
]


TRAINED: list[dict[str, Any]] = [*({key: 1} for key in WEIGHTS), {"masked": False}]


@pytest.mark.parametrize("said", [*NOT_TRAINED, *TRAINED], ids=str)
def test_every_spelling_of_a_turn_that_is_trained_or_not_is_honoured(tmp_path, said):
    """OpenAI, LLaMA-Factory, ms-swift, axolotl and torchtune each have their own."""
    row = of(ASK, {**END, **said}) if said in TRAINED else of(ASK, {**END, **said}, {**ASK, **said}, END)
    (found,) = trained(write(tmp_path, row))
    assert found.rstrip("\n") == SUNNY


def test_pairs_of_parts_under_the_names_of_llamafactory(tmp_path):
    def talk(answer: str) -> list[dict[str, Any]]:
        said = {"system": "Answer.", "user": "Hello", "assistant": answer}
        return [parts(who, ("text", text)) | {"loss_weight": float(who == "assistant")} for who, text in said.items()]

    row = {"chosen_messages": talk("there"), "rejected_messages": talk("you")}
    chosen = made(write(tmp_path, row), "dpo")[0].chosen
    assert TOKENIZER.decode(chosen.input_ids[chosen.loss_mask]) == "<think>\n\n</think>\n\nthere<|im_end|>\n"
    row["rejected_messages"][2]["loss_weight"] = 0.0
    with pytest.raises(UserError, match=r"1, rejected_messages: "):
        made(write(tmp_path, row), "dpo")


def test_qwen3_strips_earlier_thoughts_so_trls_version_for_training_renders_whole_conversations(tmp_path):
    own = tokenizer_for(shipped("qwen3"))
    rows = [of(ASK, END), of(ASK, END, ASK, END), of(ASK, called(PARIS), RESULT, END)]
    train = made(path := write(tmp_path, *rows), tokenizer=own, render="conversation")
    assert (train.report.kept, train.report.retold) == (3, 2)
    found = [own.decode(train[at].input_ids[train[at].loss_mask]).replace("\n<think>", "<think>") for at in range(3)]
    assert [one.rstrip("\n") for one in found] == [SUNNY, SUNNY + SUNNY, ONE + SUNNY]
    last = made(path, tokenizer=own, loss_on="completion")
    assert last.report.retold == 0
    assert all(own.decode(last[at].input_ids[last[at].loss_mask]) == SUNNY for at in range(3))


@pytest.mark.parametrize("role, spoken", [("developer", "system"), ("function", "user"), ("ipython", "user")])
def test_roles_that_a_template_leaves_out_speak_as_the_one_it_has(tmp_path, role, spoken):
    other = {"role": role, "content": "Mind the gap."}
    messages = (other, ASK, END) if role == "developer" else (ASK, called(PARIS), other, END)
    text = text_of(write(tmp_path, {"messages": messages}))
    assert "Mind the gap." in text.split(f"<|im_start|>{spoken}\n")[-1].split("<|im_end|>")[0]


DOCS = Path(__file__).parents[3] / "docs"
LINES = (DOCS / "data.md").read_text(encoding="utf-8").splitlines()
SHOWN = [line for line in LINES if line.startswith('{"') and "image" not in line]  # those are in tests/pictures


def test_the_page_has_a_row_of_each_format_and_each_is_recognised_and_trained(tmp_path):
    found = []
    for number, line in enumerate(SHOWN):
        (path := tmp_path / f"{number}.jsonl").write_text(line)
        report = made(str(path)).report
        assert report.kept == 1 and report.trained_tokens, line
        found.append(report.format)
    assert {*found, "preference"} == {*get_args(Format)}
