"""The pass over the tokens: who says them in real templates, and which documents are alike."""

from __future__ import annotations

import numpy as np
import pytest
from data_tokenizers import STYLES, tokenizer_of

from packtrain.data.formats.conversations import Conversation
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.loss_mask import ChatEncoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.inspect.duplicates import compare, find_candidates, find_common_grams, sign
from packtrain.inspect.roles import learn_headers

TURNS = ("user", "assistant", "user", "assistant")


@pytest.mark.parametrize("name", STYLES)
def test_turns_are_found_by_the_headers_of_real_templates(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = ChatEncoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer))
    headers = learn_headers(chat)
    said = [f"what is it {turn}" for turn in range(4)]
    text = chat.render(Conversation([{"role": r, "content": c} for r, c in zip(TURNS, said, strict=True)]))
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
    best, alike = find_candidates(signatures(documents))
    assert (best[300:] == np.arange(100)).mean() > 0.97
    assert (best[:300] == -1).mean() > 0.97
    assert alike[300:].mean() == pytest.approx(113 / 121, abs=0.03)
    none = find_common_grams([])
    assert compare(documents[0], documents[300], none) == pytest.approx(113 / 121)
    assert compare(documents[0], documents[1], none) == 0


def test_what_all_documents_share_does_not_make_them_alike() -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 5000, 400)
    documents = [np.concatenate([prompt, rng.integers(0, 5000, 60)]) for _ in range(100)]
    common = find_common_grams(documents)
    assert compare(documents[0], documents[1], np.zeros_like(common)) > 0.7
    assert compare(documents[0], documents[1], common) < 0.1
    best, _ = find_candidates(signatures(documents, common))
    assert (best == -1).mean() > 0.97


def signatures(documents: list[np.ndarray], common: np.ndarray | None = None) -> np.ndarray:
    lengths = np.array([len(document) for document in documents])
    values, compared = np.zeros((len(documents), 24), np.uint32), np.zeros(len(documents), bool)
    sign(np.concatenate(documents), lengths, find_common_grams([]) if common is None else common, values, compared)
    assert compared.all()
    return values
