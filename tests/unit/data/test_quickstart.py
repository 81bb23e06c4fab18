"""The built-in data and its tokenizer: the same everywhere, held-out means held out, and what is trained is right."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
import yaml

from packtrain.config.schema import Data
from packtrain.config.yaml_files import shipped
from packtrain.data.prepare import prepare
from packtrain.data.sources import quickstart
from packtrain.data.sources.quickstart import Split, conversations, held_out, labelled, preferences, tokenizer

END = "<|im_end|>"


def texts(split: str, role: str) -> set[str]:
    return {m["content"] for row in conversations(split) for m in row["messages"] if m["role"] == role}


def encoded(messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and 1 where the template marks a token as generated."""
    found = tokenizer().apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return found["input_ids"], found["assistant_masks"]


def test_another_process_makes_the_same_data_and_the_same_tokenizer():
    code = (
        "import hashlib, json; from packtrain.data.sources.quickstart import *\n"
        "for text in (json.dumps(conversations('train', 3, 500)), tokenizer().backend_tokenizer.to_str()):\n"
        "    print(hashlib.sha256(text.encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "2"}
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = (json.dumps(conversations("train", 3, 500)), tokenizer().backend_tokenizer.to_str())
    assert made.stdout.split() == [hashlib.sha256(text.encode()).hexdigest() for text in here]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_wrong_answer_is_one_to_another_question(split: Split) -> None:
    pairs, answers = preferences(split, count=200), labelled(split, count=200)
    known = texts("train", "assistant") | texts("eval", "assistant")
    assert all(row["chosen"] != row["rejected"] for row in pairs)
    wrong = [row["rejected"][0]["content"] for row in pairs]
    wrong += [row["completion"][0]["content"] for row in answers if not row["label"]]
    assert sum(one in known for one in wrong) > 0.6 * len(wrong)  # the others are of lists and numbers without end
    assert 70 < sum(row["label"] for row in answers) < 130
    assert preferences(split, count=50) == pairs[:50] and labelled(split, count=50) == answers[:50]
    asked = {row["prompt"][0]["content"] for row in [*pairs, *answers] if row["prompt"][0]["role"] == "user"}
    assert all(held_out(one) == (split == "eval") for one in asked)


def test_the_trained_tokens_are_exactly_the_answers_with_their_end_tokens():
    for row in conversations("train", count=300):
        ids, mask = encoded(row["messages"])
        assert len(ids) == len(mask)
        trained = tokenizer().decode([token for token, marked in zip(ids, mask, strict=True) if marked])
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert trained == "".join(answer + END for answer in answers)


def test_no_question_of_eval_or_of_the_samples_of_a_recipe_is_asked_in_train():
    assert not questions("train") & questions("eval")
    for recipe in ("quickstart-sft", "quickstart-dpo"):
        samples = yaml.safe_load((shipped("recipes") / f"{recipe}.yaml").read_text())["trainer"]["samples"]
        assert len(samples) == 3
        assert all(held_out(question) for question in samples)
        assert not set(samples) & texts("train", "user")


def questions(split: Split) -> set[str]:
    """All that users say in conversations and pairs of a split, but for questions that refer to an earlier one."""
    said = [row["messages"] for row in conversations(split)] + [row["prompt"] for row in preferences(split)]
    texts = {message["content"] for messages in said for message in messages if message["role"] == "user"}
    return {text for text in texts if not text.startswith("And the ")}


def test_quickstart_names_pairs_where_pairs_are_prepared(tmp_path, monkeypatch):
    monkeypatch.setitem(quickstart.PAIR_COUNTS, "train", 500)
    made = prepare(Data(train="quickstart", eval="quickstart", cache_dir=str(tmp_path)), tokenizer(), "dpo", seed=0)
    assert made.eval is not None and (len(made.train), len(made.eval)) == (500, 200)
    splits: tuple[Split, Split] = ("train", "eval")
    for side, split in zip((made.train, made.eval), splits, strict=True):
        assert side.report.dropped == {} and side.report.truncated == side.report.apart == 0
        pair, row = side[0], preferences(split, count=1)[0]
        rejected = tokenizer().decode(pair.rejected.input_ids[pair.rejected.loss_mask])
        assert rejected == row["rejected"][0]["content"] + "<|im_end|>\n"
        assert json.dumps(row["prompt"][-1]["content"])[1:-1] in tokenizer().decode(pair.chosen.input_ids)
