"""What a path is taken for: a file that cannot be read, a hub that does not answer, a split of the quickstart."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from data_tokenizers import tokenizer_of

from packtrain.config.schema import Data, DataSource
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.sources import hub
from packtrain.data.sources import locate as sources
from packtrain.errors import UserError


def go(tmp_path: Path, train: Any, **keys: Any) -> PreparedData:
    return prepare(Data(train=train, cache_dir=str(tmp_path / "cache"), **keys), tokenizer_of("smollm"), seed=0)


@pytest.fixture
def no_hub(monkeypatch):
    """No path may be asked for at the hub."""
    monkeypatch.setattr(sources, "_from_hub", lambda source, role: pytest.fail(f"{source.path} is no hub id"))


@pytest.mark.parametrize("name", ["chats.txt", "chats.tsv", "data/chats.xlsx", "chats.unheard"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_of_a_kind_that_is_not_read_is_no_hub_id(tmp_path, monkeypatch, no_hub, name, exists):
    monkeypatch.chdir(tmp_path)
    if exists:
        (tmp_path / "data").mkdir()
        (tmp_path / name).write_text("Hello")
    with pytest.raises(UserError, match=r"chats[\s\S]*Readable are \.jsonl, \.ndjson, \.json"):
        go(tmp_path, name)


def test_a_file_in_a_folder_that_exists_is_no_hub_id(tmp_path, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "trial").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no such file: data/train[\s\S]*Near it: trial"):
        go(tmp_path, "data/train")


@pytest.mark.parametrize("name", ["squad", "owner/name", "owner/name-v1.5", "owner/name.v2"])
def test_hub_ids_are_asked_for_at_the_hub(name):
    assert not sources.looks_local(name)


@pytest.fixture
def unasked():
    """The hub as if nobody had asked it yet."""
    hub.reachable.cache_clear()
    yield
    hub.reachable.cache_clear()


class Silent:
    """A hub that is looked for and never found."""

    def head(self, *_: Any, **__: Any) -> None:
        threading.Event().wait(300)


def test_a_hub_that_does_not_answer_fails_soon_with_one_message(tmp_path, monkeypatch, unasked):
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Silent())
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        go(tmp_path, "owner/name")
    assert time.monotonic() - started < 60
    message = str(caught.value)
    assert "cannot load 'owner/name'" in message and "taken for a hub id" in message
    assert "give a local path" in message and "HF_HUB_OFFLINE=1" in message
    assert before == (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_a_hub_that_answers_is_left_as_it_is(monkeypatch, unasked):
    class Answers:
        def head(self, *_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Answers())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with hub.offline_unless_reachable() as online:
        assert online and not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    "role, source, words",
    [
        ("eval", {"split": "train"}, "evaluating on it would measure what was learnt by heart"),
        ("eval", {"split": "validation"}, "quickstart has no split 'validation'"),
        ("train", {"split": "validation"}, "quickstart has no split 'validation'"),
        ("train", {"subset": "small"}, "quickstart has no subsets"),
    ],
)
def test_a_split_of_the_quickstart_means_what_it_says_or_is_refused(role, source, words):
    with pytest.raises(UserError, match=words):
        sources.locate(DataSource(path="quickstart", **source), role, 0)


@pytest.mark.parametrize("role", ["train", "eval"])
def test_the_quickstarts_name_alone_stands_for_the_split_of_its_role(role):
    (source,) = sources.sources_in("quickstart", role)
    assert (found := sources.locate(source, role, 0)) and isinstance(found, sources.Quickstart)
    assert found.split == role
    assert sources.locate(DataSource(path="quickstart", split="eval"), "eval", 0).name == "quickstart"
