"""The built-in preference pairs: one mistake in each wrong answer, nothing that tells it from outside, eval kept apart."""

from __future__ import annotations

import json

import numpy as np

from packtrain.config.schema import Data
from packtrain.data.prepare import prepare_pairs
from packtrain.data.sources.quickstart import (
    ANIMALS,
    COUNTRIES,
    ITEM,
    SPELT,
    Split,
    conversations,
    preferences,
    tokenizer,
)

ROWS = preferences("train", count=2_000)


def answers(row: dict) -> tuple[str, str]:
    return row["chosen"][0]["content"], row["rejected"][0]["content"]


def questions(split: Split) -> set[str]:
    """All that users say in conversations and pairs of a split, but for questions that refer to an earlier one."""
    said = [row["messages"] for row in conversations(split)] + [row["prompt"] for row in preferences(split)]
    texts = {message["content"] for messages in said for message in messages if message["role"] == "user"}
    return {text for text in texts if not text.startswith("And the ")}


def test_a_wrong_answer_differs_from_the_right_one_in_one_item_of_the_same_kind():
    for row in ROWS:
        right, wrong = answers(row)
        assert right != wrong
        if SPELT.fullmatch(right):
            assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
            continue
        assert ITEM.sub("…", right) == ITEM.sub("…", wrong)
        changed = [pair for pair in zip(ITEM.findall(right), ITEM.findall(wrong), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1 and changed[0][0].isdigit() == changed[0][1].isdigit()


def test_a_wrong_answer_is_wrong():
    for row in ROWS:
        question, (right, wrong) = row["prompt"][-1]["content"], answers(row)
        if right.startswith("A young "):
            name = right.split()[2]
            assert wrong != f"A young {name} is called a {ANIMALS[name][0]}."
        if right.startswith("The capital of "):
            name = next(name for name in COUNTRIES if name in question)
            assert wrong != f"The capital of {name} is {COUNTRIES[name][0]}." and COUNTRIES[name][0] in right


def test_length_does_not_tell_which_answer_is_right():
    lengths = np.array([[len(ids) for ids in tokenizer()(list(answers(row)))["input_ids"]] for row in ROWS])
    longer, shorter = (lengths[:, 0] > lengths[:, 1]).mean(), (lengths[:, 0] < lengths[:, 1]).mean()
    assert abs(longer - shorter) < 0.1 and (lengths[:, 0] == lengths[:, 1]).mean() > 0.5


def test_the_same_arguments_give_the_same_pairs_and_another_seed_others():
    assert preferences("train", count=100) == ROWS[:100]
    assert preferences("train", seed=1, count=100) != ROWS[:100]


def test_no_question_of_eval_is_asked_in_train():
    assert not questions("train") & questions("eval")


def test_quickstart_names_pairs_where_pairs_are_prepared(tmp_path):
    made = prepare_pairs(Data(train="quickstart", eval="quickstart", cache_dir=str(tmp_path)), tokenizer(), seed=0)
    assert made.eval is not None and (len(made.train), len(made.eval)) == (4_000, 200)
    splits: tuple[Split, Split] = ("train", "eval")
    for side, split in zip((made.train, made.eval), splits, strict=True):
        assert side.report.dropped == {} and side.report.truncated == side.report.pairs_apart == 0
        pair, row = side[0], preferences(split, count=1)[0]
        told = tokenizer().decode(pair.rejected.input_ids[pair.rejected.loss_mask])
        assert told == answers(row)[1] + "<|im_end|>\n"
        assert json.dumps(row["prompt"][-1]["content"])[1:-1] in tokenizer().decode(pair.chosen.input_ids)
