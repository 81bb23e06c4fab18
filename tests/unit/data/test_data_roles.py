"""A misspelt role is an error or a counted row, never a turn that nobody trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import SMOLLM, tokenizer_of

from packtrain.config.schema import Data
from packtrain.data.prepare import PreparedData, prepare
from packtrain.errors import UserError


def go(tmp_path: Path, *rows: dict[str, Any], **keys: Any) -> PreparedData:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(Data(train=str(path), cache_dir=str(tmp_path / "cache"), **keys), tokenizer_of("smollm"), seed=0)


def talk(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "Hello there!"} for role in roles]}


GOOD = talk("user", "assistant")
NEAREST = {
    "asistant": "assistant",
    "Assistant": "assistant",
    "humman": "user",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "sytem": "system",
    "tools": "tool",
}


@pytest.mark.parametrize("found, meant", NEAREST.items())
def test_an_unknown_role_is_an_error_with_the_nearest_one(tmp_path, found, meant):
    with pytest.raises(UserError) as caught:
        go(tmp_path, GOOD, talk("user", found))
    message = str(caught.value)
    assert f"x.jsonl:2, messages[1].role: unknown role {found!r}; known: system, developer, user, assistant" in message
    assert f"Did you mean {meant!r}?" in message


def test_unknown_roles_are_skipped_and_counted_under_a_reason_of_their_own(tmp_path):
    report = go(tmp_path, GOOD, talk("user", "asistant"), talk("humman", "assistant"), bad_rows="skip").train.report
    assert (report.kept, report.dropped) == (1, {"unknown role": 2})


@pytest.mark.parametrize("role", ["system", "developer", "tool", "function", "ipython"])
def test_roles_that_everybody_knows_need_no_template_that_names_them(tmp_path, role):
    assert len(go(tmp_path, talk(role, "user", "assistant")).train) == 1


def test_a_role_that_the_template_names_may_speak(tmp_path):
    critic = "{% if messages[0]['role'] == 'critic' %}{{ '!' }}{% endif %}" + SMOLLM
    (tmp_path / "own.jinja").write_text(critic)
    rows = talk("critic", "user", "assistant")
    assert len(go(tmp_path, rows, chat_template=str(tmp_path / "own.jinja")).train) == 1
    with pytest.raises(UserError, match=r"unknown role 'critic'[\s\S]*Name the role in the chat template"):
        go(tmp_path, rows)


def test_another_word_for_the_assistant_is_refused_though_the_template_names_it(tmp_path):
    """Gemma's template writes 'model': a turn of that role would be rendered and never trained."""
    (tmp_path / "own.jinja").write_text("{% set name = 'model' %}" + SMOLLM)
    with pytest.raises(UserError, match=r"unknown role 'model'[\s\S]*Did you mean 'assistant'"):
        go(tmp_path, talk("user", "model"), chat_template=str(tmp_path / "own.jinja"))


def test_a_misspelt_speaker_and_a_misspelt_role_of_a_prompt_are_named_as_the_file_calls_them(tmp_path):
    speaker = {"conversations": [{"from": "humman", "value": "Hello"}, {"from": "gpt", "value": "there"}]}
    with pytest.raises(UserError, match=r"conversations\[0\].from: unknown speaker 'humman'[\s\S]*mean 'user'"):
        go(tmp_path, speaker)
    row = {"q": [{"role": "usr", "content": "Hello"}], "completion": [{"role": "assistant", "content": "there"}]}
    with pytest.raises(UserError, match=r"q\[0\].role: unknown role 'usr'[\s\S]*mean 'user'"):
        go(tmp_path, row, columns={"prompt": "q"})
