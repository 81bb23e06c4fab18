"""The pass over the tokens: who says them in real templates, which documents are alike, and what scripts they are in."""

from __future__ import annotations

import numpy as np
import pytest
from data_tokenizers import STYLES, tokenizer_of

from packtrain.data.formats.conversations import Conversation
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.loss_mask import ChatEncoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.inspect.scan.near_duplicates import (
    Signatures,
    candidates,
    common_grams,
    grams,
    signatures_of,
    similarity,
)
from packtrain.inspect.scan.roles import headers_of
from packtrain.inspect.scan.vocabulary import SCRIPTS, Vocabulary

TURNS = ("user", "assistant", "user", "assistant")


@pytest.mark.parametrize("name", STYLES)
def test_turns_are_found_by_the_headers_of_real_templates(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = ChatEncoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer))
    headers = headers_of(chat)
    said = [f"what is it {turn}" for turn in range(4)]
    text = chat.text(Conversation([{"role": r, "content": c} for r, c in zip(TURNS, said, strict=True)]))
    encoded = chat.tokenizer.encode(text)
    places, roles = headers.find(encoded.ids)
    names = [headers.names[role] for role in roles]
    assert names[-4:] == list(TURNS)  # before them is the system prompt that some templates bring
    for place, content in zip(places[-4:], said, strict=True):
        assert encoded.starts[place] < text.index(content)
    assert all(
        text.index(content) < encoded.starts[place] for place, content in zip(places[-3:], said[:3], strict=True)
    )


def test_a_document_and_its_changed_copy_are_candidates_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5000, 120) for _ in range(400)]
    for number in range(100):  # one token of 120 is changed: 116 of 117 + 4 n-grams are in both
        documents[300 + number] = documents[number].copy()
        documents[300 + number][60] = 5001
    best, alike = candidates(_signatures(documents), np.arange(400), np.arange(400))
    assert (best[300:] == np.arange(100)).mean() > 0.97
    assert (best[:300] == -1).mean() > 0.97
    assert alike[300:].mean() == pytest.approx(113 / 121, abs=0.03)
    none = np.zeros(1 << 18, bool)
    assert similarity(documents[0], documents[300], none) == pytest.approx(113 / 121)
    assert similarity(documents[0], documents[1], none) == 0


def test_what_all_documents_share_does_not_make_them_alike() -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 5000, 400)
    documents = [np.concatenate([prompt, rng.integers(0, 5000, 60)]) for _ in range(100)]
    common = common_grams(documents)
    assert similarity(documents[0], documents[1], np.zeros_like(common)) > 0.7
    assert similarity(documents[0], documents[1], common) < 0.1
    best, _ = candidates(_signatures(documents, common), np.arange(100), np.arange(100))
    assert (best == -1).mean() > 0.97


def _signatures(documents: list[np.ndarray], common: np.ndarray | None = None) -> Signatures:
    lengths = np.array([len(one) for one in documents])
    found = Signatures(np.zeros((len(documents), 24), np.uint32), np.zeros(len(documents), bool))
    common = np.zeros(1 << 18, bool) if common is None else common
    signatures_of(grams(np.concatenate(documents)), lengths, common, found.values, found.compared)
    return found


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("weather", "Latin"),
        ("погода", "Cyrillic"),
        ("καιρός", "Greek"),
        ("天气", "Chinese"),
        ("날씨", "Hangul"),
        ("طقس", "Arabic"),
    ],
)
def test_the_script_of_tokens_that_are_parts_of_characters_is_known(text: str, script: str) -> None:
    plain = plain_tokenizer(tokenizer_of("qwen3"))  # of these only Latin has tokens of whole letters
    vocabulary = Vocabulary(plain)
    numbers = vocabulary.scripts[plain.ids(text)]
    assert SCRIPTS[np.bincount(numbers[numbers > 0]).argmax()] == script
    assert b"".join(vocabulary.texts[one] for one in plain.ids(text)).decode() == text
