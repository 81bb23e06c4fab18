"""Which documents are alike, by their signatures."""

from __future__ import annotations

import numpy as np

from packtrain.inspect.duplicates import find_common_grams, find_similar, sign


def test_a_document_and_its_changed_copy_are_candidates_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5000, 120) for _ in range(400)]
    for number in range(100):  # one token of 120 is changed: 116 of 117 + 4 n-grams are in both
        documents[300 + number] = documents[number].copy()
        documents[300 + number][60] = 5001
    similar = find_similar(signatures(documents, find_common_grams([])))
    assert (similar[300:] == np.arange(100)).mean() > 0.97
    assert (similar[:300] == -1).mean() > 0.97


def test_what_all_documents_share_does_not_make_them_alike() -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 5000, 400)
    documents = [np.concatenate([prompt, rng.integers(0, 5000, 60)]) for _ in range(100)]
    alike = find_similar(signatures(documents, find_common_grams([])))
    assert (alike[1:] >= 0).mean() > 0.3  # by chance, as 397 of 517 n-grams are in both
    assert (find_similar(signatures(documents, find_common_grams(documents))) == -1).mean() > 0.97


def signatures(documents: list[np.ndarray], common: np.ndarray) -> np.ndarray:
    lengths = np.array([len(document) for document in documents])
    values, compared = sign(np.concatenate(documents), lengths, common)
    assert compared.all()
    return values
