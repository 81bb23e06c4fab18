"""Answers with labels: tokens, targets and labels are those of TRL's KTOTrainer, and what has no label is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_tokenizers import tokenizer_of
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from packtrain.config.schema import Data, DataSource
from packtrain.data.dataset import UnpairedDataset
from packtrain.data.prepare import prepare
from packtrain.data.sources import quickstart
from packtrain.errors import UserError

Answers = list[tuple[list[int], list[bool], bool]]
"""Ids, targets and label of each document."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


ASK, GOOD, BAD = user("Hello there!"), said("I am fine, thanks."), said("How are you?")
TALK = [user("What is sunny?"), said("It is the weather."), user("Tell me more.")]
STRINGS = [
    {"prompt": "Hello there!", "completion": " I am fine.", "label": True},
    {"prompt": "Hello the", "completion": "re! How are you?", "label": False},  # a token across the border
    {"prompt": "Question? ", "completion": "\n\nAnswer<|im_end|>", "label": True},
]
CHATS = [
    {"prompt": [ASK], "completion": [GOOD], "label": True},
    {"prompt": TALK, "completion": [said("It is not.")], "label": False},
    {"prompt": TALK[:1], "completion": [GOOD, ASK, BAD], "label": False},
]
PAIRS = [
    {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": TALK, "chosen": [said("It is sunny in Paris.")], "rejected": [said("It is not.")]},
]
TEXT_PAIRS = [{"chosen": "Human: Hello! Assistant: I am fine.", "rejected": "Human: Hello! Assistant: How are you?"}]
SHAPES = {"strings": STRINGS, "chats": CHATS, "pairs": PAIRS, "pairs of text": TEXT_PAIRS}


def tokenizer_named(style: str) -> PreTrainedTokenizerFast:
    return quickstart.tokenizer() if style == "quickstart" else tokenizer_of(style)


def data_of(tmp_path: Path, rows: list[Any], **keys: Any) -> Data:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(train=str(path), **{"max_length": None, "cache_dir": str(tmp_path / "cache"), **keys})


def ours(tmp_path: Path, rows: list[Any], style: str = "smollm", **keys: Any) -> UnpairedDataset:
    return prepare(data_of(tmp_path, rows, **keys), tokenizer_named(style), "kto", seed=0).train


def answers(data: UnpairedDataset) -> Answers:
    made = ((data[at], bool(data.labels[at])) for at in range(len(data)))
    return [(document.input_ids.tolist(), document.loss_mask.tolist(), label) for document, label in made]


def trl(rows: list[Any], style: str, max_length: int | None = None) -> Answers:
    """What TRL's KTOTrainer makes of the rows, prepared and collated by its own code."""
    tokenizer = tokenizer_named(style)
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=max_length)
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0
    )
    made: Answers = []
    for row in KTOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, arguments, "eval"):
        batch = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=max_length)([row])
        targets = [False, *(batch["completion_mask"][0, 1:] == 1).tolist()]  # nothing predicts the first token
        made.append((batch["input_ids"][0].tolist(), targets, bool(batch["label"][0])))
    return made


def by_label(made: Answers) -> Answers:
    """TRL has all chosen answers first, we have them pair by pair."""
    return sorted(made, key=lambda one: not one[2])


@pytest.mark.parametrize("style", ["quickstart", "smollm", "llama3", "qwen3", "mistral", "gemma"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_targets_and_labels_are_those_of_trl(tmp_path, style, shape):
    rows = SHAPES[shape]
    found, expected = answers(ours(tmp_path, rows, style)), trl(rows, style)
    if "chosen" in rows[0]:
        assert [label for *_, label in found] == [True, False] * len(rows)
        found, expected = by_label(found), by_label(expected)
    assert found == expected


def test_truncated_answers_are_those_of_trl_and_prompts_that_fill_the_length_are_dropped_alike(tmp_path):
    for length in (30, 40, 60):
        data = ours(tmp_path, CHATS, "quickstart", max_length=length)
        assert answers(data) == trl(CHATS, "quickstart", length)
        assert len(data) + sum(data.report.dropped.values()) == 3


def test_of_a_pair_with_one_answer_that_is_too_long_the_other_is_kept_with_its_label(tmp_path):
    long = said("I am fine. " * 90)
    for side, label in (("chosen", False), ("rejected", True)):
        row = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], side: [long]}
        data = ours(tmp_path, [row, PAIRS[0]], max_length=150, overlong="drop")
        assert data.labels.tolist() == [label, True, False]


SAME: dict[str, Any] = {
    "LLaMA-Factory, messages": {"messages": [ASK, GOOD], "label": True},
    "LLaMA-Factory, kto_tag": {"messages": [ASK, GOOD], "kto_tag": True},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": GOOD["content"]}],
        "kto_tag": "true",
    },
    "Alpaca": {"instruction": ASK["content"], "output": GOOD["content"], "label": 1},
    "a label as text, as csv has it": {"prompt": [ASK], "completion": [GOOD], "label": "True"},
}


@pytest.mark.parametrize("shape", SAME)
def test_every_shape_of_a_row_is_the_same_answer(tmp_path, shape):
    assert answers(ours(tmp_path, [SAME[shape]])) == answers(ours(tmp_path, CHATS[:1]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**STRINGS[0], "label": "good"}, r"answers.jsonl:2.*label.*expected true \(desirable\) or false"),
        ({**STRINGS[0], "label": 2}, r"expected true \(desirable\) or false"),
        ({**STRINGS[0], "label": 1.0}, r"expected true \(desirable\) or false"),
        ({**STRINGS[0], "label": None}, r"expected true \(desirable\) or false"),
        ({"prompt": "Hello", "completion": "you"}, "no column 'label'"),
        ({**STRINGS[0], "completion": " "}, "the text is empty"),
    ],
)
def test_a_row_without_a_clear_label_prompt_or_answer_is_refused_by_name(tmp_path, row, said):
    with pytest.raises(UserError, match=said):
        ours(tmp_path, [STRINGS[0], row])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"messages": [ASK, GOOD]}], "no column 'label' says which answers are desirable(.|\n)*packtrain sft"),
        ([{"text": "Hello there!", "label": True}], "these are rows of text, and packtrain kto needs"),
        ([{"messages": [ASK, GOOD, ASK], "label": True}], "the answer is what the user says"),
        ([{"messages": [GOOD], "label": True}], "there is nothing that is answered"),
    ],
)
def test_data_of_another_objective_is_told_apart(tmp_path, rows, said):
    with pytest.raises(UserError, match=said):
        ours(tmp_path, rows)


def test_sft_and_dpo_say_that_answers_with_labels_are_for_kto(tmp_path):
    for kind in ("sft", "dpo"):
        with pytest.raises(UserError, match="packtrain kto"):
            prepare(data_of(tmp_path, CHATS), tokenizer_named("smollm"), kind, seed=0)


def test_all_answers_to_a_prompt_are_held_out_together(tmp_path):
    rows = [
        {"prompt": [user(f"Question {number}")], "completion": [said(f"Answer {side}")], "label": bool(side)}
        for number in range(30)
        for side in (0, 1)
    ]
    made = prepare(data_of(tmp_path, rows, eval=0.3), tokenizer_named("smollm"), "kto", seed=0)
    assert made.eval is not None and len(made.eval) == 18 and len(made.train) == 42
    assert made.eval.labels.tolist() == [False, True] * 9
    report = made.train.report.labels
    assert report is not None and (report.desirable, report.undesirable) == (21, 21)


def test_a_label_changes_the_fingerprint_and_a_weight_repeats_it(tmp_path):
    turned = [{**CHATS[0], "label": False}, *CHATS[1:]]
    data, other = ours(tmp_path, CHATS), ours(tmp_path, turned)
    assert data.fingerprint != other.fingerprint
    source: Any = {"path": str(tmp_path / "answers.jsonl"), "weight": 2.0}
    data_twice = Data(train=[DataSource(**source)], max_length=None, cache_dir=str(tmp_path / "cache"))
    twice = prepare(data_twice, tokenizer_named("smollm"), "kto", seed=0).train
    assert twice.labels.tolist() == other.labels.tolist() * 2
