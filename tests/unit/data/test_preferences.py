"""Preference rows of every shape: tokens and targets are TRL's, and what cannot be a pair is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_tokenizers import tokenizer_of
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from packtrain.config.schema import Data
from packtrain.data.dataset import PairDataset
from packtrain.data.prepare import prepare
from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer
from packtrain.errors import UserError

Pairs = list[tuple[list[int], list[int]]]
"""Ids and targets of each document, chosen and rejected in turn."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


ASK, GOOD, BAD = user("Hello there!"), said("I am fine, thanks."), said("How are you?")
TALK = [user("What is sunny?"), said("It is the weather."), user("Tell me more.")]
SYSTEM = {"role": "system", "content": "Answer with care."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
}
STRINGS = [
    {"prompt": "Hello there!", "chosen": " I am fine.", "rejected": " How are you? Tell me more."},
    {"prompt": "Hello the", "chosen": "re! How are you?", "rejected": "n? I am fine."},
    {"prompt": "Hello ", "chosen": "there", "rejected": "you"},
    {"prompt": "Question? ", "chosen": "\n\nAnswer<|im_end|>", "rejected": "Answer</s><|eot_id|>"},
]
IMPLICIT_STRINGS = [
    {"chosen": "Human: Hello! Assistant: I am fine.", "rejected": "Human: Hello! Assistant: How are you?"},
    {"chosen": "How are you? I am fine.", "rejected": "How are you? I am"},
]
MESSAGES = [
    {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": TALK, "chosen": [said("It is sunny in Paris, 25 degrees.")], "rejected": [said("It is not.")]},
    {"prompt": [*TALK[:2], ASK], "chosen": [GOOD, ASK, BAD], "rejected": [BAD]},
]
IMPLICIT_MESSAGES = [
    {"chosen": [*row["prompt"], *row["chosen"]], "rejected": [*row["prompt"], *row["rejected"]]} for row in MESSAGES
]
SHAPES = {
    "strings": STRINGS,
    "implicit strings": IMPLICIT_STRINGS,
    "messages": MESSAGES,
    "implicit messages": IMPLICIT_MESSAGES,
}
STYLES = ("quickstart", "smollm", "llama3", "qwen3", "mistral", "gemma")


def tokenizer_named(style: str) -> PreTrainedTokenizerFast:
    return quickstart_tokenizer() if style == "quickstart" else tokenizer_of(style)


def ours(tmp_path: Path, rows: list[Any], style: str = "smollm", **keys: Any) -> PairDataset:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"max_length": None, "cache_dir": str(tmp_path / "cache"), **keys}
    return prepare(Data(train=str(path), **keys), tokenizer_named(style), "dpo", seed=0).train


def documents(pairs: PairDataset) -> Pairs:
    found = [document for at in range(len(pairs)) for document in (pairs[at].chosen, pairs[at].rejected)]
    return [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in found]


def trl(rows: list[Any], style: str, max_length: int | None = None) -> Pairs:
    """What TRL's DPOTrainer makes of the rows, prepared and collated by its own code."""
    tokenizer = tokenizer_named(style)
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start")
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    prepared = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, arguments, "train")
    made: Pairs = []
    for row in prepared:
        batch = DataCollatorForPreference(pad_token_id=0, max_length=max_length)([row])
        for ids, attention, mask in zip(
            *(batch[k] for k in ("input_ids", "attention_mask", "completion_mask")), strict=True
        ):
            length = int(attention.sum())
            targets = [False, *(mask[1:length] == 1).tolist()]  # nothing predicts the first token
            made.append((ids[:length].tolist(), targets))
    return made


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_targets_are_those_of_trl(tmp_path, style, shape):
    rows = SHAPES[shape]
    assert documents(ours(tmp_path, rows, style)) == trl(rows, style)


def test_truncated_pairs_are_those_of_trl_and_prompts_that_fill_the_length_are_dropped_alike(tmp_path):
    for length in (12, 20, 30):
        pairs = ours(tmp_path, STRINGS[:3], max_length=length)
        assert documents(pairs) == trl(STRINGS[:3], "smollm", length)
    pairs = ours(tmp_path, MESSAGES, "quickstart", max_length=27)
    assert documents(pairs) == trl(MESSAGES, "quickstart", 27)
    assert pairs.report.dropped == {"no trained token within data.max_length": 2} and pairs.report.truncated == 1


def test_tools_reach_the_template_as_with_trl(tmp_path):
    row = {"prompt": [ASK], "chosen": [CALL], "rejected": [BAD], "tools": TOOLS}
    pairs = ours(tmp_path, [row], "qwen2_5")
    assert documents(pairs) == trl([row], "qwen2_5")
    text = tokenizer_of("qwen2_5").decode(pairs[0].chosen.input_ids)
    assert "# Tools" in text and text.count('"name": "weather"') == 2
    with pytest.raises(UserError, match="leaves out the tools"):
        ours(tmp_path, [row], "smollm")


SAME_PAIR: dict[str, Any] = {
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASK["content"]}],
        "chosen": {"from": "gpt", "value": GOOD["content"]},
        "rejected": {"from": "gpt", "value": BAD["content"]},
    },
    "sharegpt, lists": {
        "conversations": [{"from": "human", "value": ASK["content"]}],
        "chosen": [{"from": "gpt", "value": GOOD["content"]}],
        "rejected": [{"from": "gpt", "value": BAD["content"]}],
    },
    "sharegpt, implicit": {
        "chosen": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": GOOD["content"]}],
        "rejected": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": BAD["content"]}],
    },
    "answers as strings": {"prompt": [ASK], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "a string and conversations": {"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "a string and answers": {"prompt": ASK["content"], "chosen": [GOOD], "rejected": [BAD]},
    "the prompt twice": {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "the prompt twice, chosen thrice": {
        "prompt": "?",
        "chosen": [ASK, GOOD],
        "rejected": [ASK, BAD],
        "messages": [ASK],
    },
    "messages in strings": {"prompt": [ASK], "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    "other columns": {"q": [ASK], "chosen": [GOOD], "rejected": [BAD], "score": 3, "messages": [ASK, GOOD]},
}


@pytest.mark.parametrize("row", SAME_PAIR.values(), ids=SAME_PAIR.keys())
def test_every_way_to_write_a_pair_gives_the_same_tokens(tmp_path, row):
    columns = {"prompt": "q"} if "q" in row else {}
    pairs = ours(tmp_path, [row], columns=columns)
    assert documents(pairs) == trl(MESSAGES[:1], "smollm")
    assert pairs.report.format == "preference"


def test_a_system_column_comes_before_the_turns(tmp_path):
    expected = documents(ours(tmp_path, [{"prompt": [SYSTEM, ASK], "chosen": [GOOD], "rejected": [BAD]}]))
    for name in ("sharegpt", "answers as strings", "sharegpt, implicit"):
        assert documents(ours(tmp_path, [{**SAME_PAIR[name], "system": SYSTEM["content"]}])) == expected
    for asked in ("prompt", "question"):  # plain text has no place for it; the advice makes a conversation of the row
        row = {
            "system": SYSTEM["content"],
            asked: ASK["content"],
            "chosen": GOOD["content"],
            "rejected": BAD["content"],
        }
        for columns in ({}, {"prompt": asked}):
            with pytest.raises(
                UserError, match=rf"system: the row is read as plain text[\s\S]*columns.instruction={asked}"
            ):
                ours(tmp_path, [row], columns=columns)
        assert documents(ours(tmp_path, [row], columns={"instruction": asked})) == expected


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no rejected": ({"prompt": [ASK], "chosen": [GOOD]}, "missing column", "no column 'rejected'"),
    "chosen empty": ({"prompt": "Hello", "chosen": "", "rejected": "I"}, "empty", "chosen: the text is empty"),
    "rejected empty": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [said(" ")]}, "empty", "rejected[0].content"),
    "rejected no turn": ({"prompt": [ASK], "chosen": [GOOD], "rejected": []}, "empty", "rejected: there are no messages"),
    "prompt null": ({"prompt": None, "chosen": "I", "rejected": "you"}, "wrong type", "prompt: expected a list, found null"),
    "prompt a number": ({"prompt": 3, "chosen": "I", "rejected": "you"}, "wrong type", "prompt: expected a list"),
    "rejected null": ({"prompt": "Hello", "chosen": "I", "rejected": None}, "wrong type", "rejected: expected a list"),
    "nothing in common": ({"chosen": [ASK, GOOD], "rejected": [user("Who?"), BAD]}, "no common prompt", "different messages"),
    "strings apart": ({"chosen": "Hello", "rejected": "Who?"}, "no common prompt", "begin differently"),
    "prompt elsewhere": ({"question": "Why?", "chosen": "It is", "rejected": "It was"}, "no prompt", "data.columns.prompt=question"),
    "another question": (
        {"chosen": [ASK, GOOD, TALK[0], BAD], "rejected": [ASK, GOOD, TALK[2], BAD]},
        "not an answer",
        "chosen: the answer begins with what the user says",
    ),
    "unknown role": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [{**BAD, "role": "asistant"}]}, "unknown role", "assistant"),
    "a surrogate": ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "not UTF-8", "lone surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("row, reason, words", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_pair_is_named_with_its_line_or_skipped_and_counted(tmp_path, row, reason, words):
    rows = [MESSAGES[0], row, MESSAGES[1]]
    with pytest.raises(UserError) as caught:
        ours(tmp_path, rows)
    assert "pairs.jsonl:2" in str(caught.value) and words in str(caught.value)
    report = ours(tmp_path, rows, bad_rows="skip").report
    assert (report.rows, report.kept, report.dropped) == (3, 2, {reason: 1})


PAGE = (Path(__file__).parents[3] / "docs/preferences.md").read_text(encoding="utf-8")
SHOWN = PAGE.split("```json\n")[1].split("```")[0].splitlines()


@pytest.mark.parametrize("line", SHOWN)
def test_the_rows_that_the_documentation_shows_are_read(tmp_path, line):
    pair = ours(tmp_path, [json.loads(line)])[0]
    sides = [tokenizer_of("smollm").decode(side.input_ids[side.loss_mask]) for side in (pair.chosen, pair.rejected)]
    assert "4." in sides[0] and "4." not in sides[1]


def test_prompts_in_the_columns_of_alpaca_are_what_a_user_asks_and_keep_their_input(tmp_path):
    answers = {"chosen": GOOD["content"], "rejected": BAD["content"]}
    rows = [{"instruction": "Hello", "input": "there!", **answers}, {"instruction": "Hello", "input": "", **answers}]
    asked = [{"prompt": [user(text)], "chosen": [GOOD], "rejected": [BAD]} for text in ("Hello\nthere!", "Hello")]
    assert documents(ours(tmp_path, rows)) == trl(asked, "smollm")
    whole = {"instruction": "Hello", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert documents(ours(tmp_path, [whole])) == trl(MESSAGES[:1], "smollm")


def test_each_verb_refuses_the_rows_of_the_other(tmp_path):
    with pytest.raises(UserError, match=r"these are rows of messages(.|\n)*packtrain sft"):
        ours(tmp_path, [{"messages": [ASK, GOOD]}])
    with pytest.raises(UserError, match=r"no known format(.|\n)*chosen, rejected"):
        ours(tmp_path, [{"question": "Hello", "better": "I", "worse": "you"}])
    assert len(ours(tmp_path, MESSAGES)) == 3
    keys: Any = {"train": str(tmp_path / "pairs.jsonl"), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(
        UserError, match=r"rows of preference(.|\n)*packtrain dpo"
    ):  # though the cache has them as pairs
        prepare(Data(**keys), tokenizer_of("smollm"), seed=0)


def test_a_pair_without_a_chat_template_or_eos_is_refused(tmp_path):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("smollm").backend_tokenizer)
    path = tmp_path / "x.jsonl"
    for row, words in ((MESSAGES[0], "chat template"), (STRINGS[0], "no EOS token")):
        path.write_text(json.dumps(row))
        with pytest.raises(UserError, match=words):
            prepare(Data(train=str(path), cache_dir=str(tmp_path / "cache")), bare, "dpo", seed=0)
