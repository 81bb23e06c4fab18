"""The built-in data and its tokenizer: the same everywhere, held-out means held out, and what is trained is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from packtrain.config.files import shipped
from packtrain.data.sources.quickstart import VOCABULARY, conversations, held_out, tokenizer

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
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1] and len(set(made[0].split())) == 2


def test_fewer_rows_are_the_first_rows_and_another_seed_gives_others():
    assert conversations("train", count=100) == conversations("train")[:100]
    assert conversations("train", seed=1, count=100) != conversations("train", seed=0, count=100)


def test_no_question_of_eval_is_asked_in_train():
    """Follow-up questions ("And the milk?") mean something only after their first question, which counts."""
    both = texts("train", "user") & texts("eval", "user")
    assert all(question.startswith("And the ") for question in both)
    assert len(texts("eval", "user") - both) > 100


def test_no_conversation_of_eval_is_in_train():
    train, held = ({json.dumps(row) for row in conversations(split)} for split in ("train", "eval"))
    assert not train & held


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_conversation_alternates_question_and_answer_after_at_most_one_system_prompt(split):
    for row in conversations(split):
        roles = [message["role"] for message in row["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles and roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in row["messages"])


def test_lengths_have_a_long_tail_that_packing_is_for():
    lengths = np.array([len(encoded(row["messages"])[0]) for row in conversations("train", count=3_000)])
    assert np.percentile(lengths, 95) / np.median(lengths) > 4
    assert lengths.min() < 25 and lengths.max() > 400
    assert lengths.max() <= 1024


def test_sums_and_days_are_right():
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    checked = 0
    for row in conversations("train", count=3_000):
        for question, answer in zip(row["messages"], row["messages"][1:], strict=False):
            words = question["content"].strip("?").split()
            if question["content"].startswith("How much is") and words[4] in ("plus", "minus"):
                result = int(words[3]) + int(words[5]) * (1 if words[4] == "plus" else -1)
                assert answer["content"].endswith(f"It is {result}.")
                checked += 1
            if question["content"].startswith("Which day is"):
                distance = int(words[3]) * (1 if words[5] == "after" else -1)
                assert answer["content"].endswith(f"It is {days[(days.index(words[6]) + distance) % 7]}.")
                checked += 1
    assert checked > 200


@pytest.mark.parametrize(
    "text", ["12 + 7 = 19", "A young goose is called a gosling.", "é 漢字 \U0001f642\n\n| a | b |", " x  y "]
)
def test_the_tokenizer_gives_any_text_back(text):
    assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


def test_every_digit_is_a_token_of_its_own():
    tokens = tokenizer().convert_ids_to_tokens(tokenizer()("From 1234 to 56")["input_ids"])
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["Ġ1", "2", "3", "4", "Ġ5", "6"]


def test_the_vocabulary_has_the_special_tokens_and_no_more_than_it_says():
    assert len(tokenizer()) <= VOCABULARY
    assert tokenizer().eos_token == END
    assert tokenizer().pad_token_id != tokenizer().eos_token_id
    assert len(tokenizer()(END)["input_ids"]) == 1


def test_the_trained_tokens_are_exactly_the_answers_with_their_end_tokens():
    for row in conversations("train", count=300):
        ids, mask = encoded(row["messages"])
        assert len(ids) == len(mask)
        trained = tokenizer().decode([token for token, marked in zip(ids, mask, strict=True) if marked])
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert trained == "".join(answer + END for answer in answers)


def test_a_generation_prompt_is_what_stands_before_an_answer_in_training():
    messages = conversations("train", count=1)[0]["messages"][:2]
    prompt = tokenizer().apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer().apply_chat_template(messages, tokenize=False)
    assert whole == prompt + messages[1]["content"] + END + "\n"


@pytest.mark.parametrize("recipe", ["quickstart-sft", "quickstart-dpo"])
def test_the_sample_questions_of_the_recipe_are_held_out(recipe: str):
    samples = yaml.safe_load((shipped("recipes") / f"{recipe}.yaml").read_text())["trainer"]["samples"]
    assert len(samples) == 3
    assert all(held_out(question) for question in samples)
    assert not set(samples) & texts("train", "user")
