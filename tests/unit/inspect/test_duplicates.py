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
    lengths = np.array([len(document) for document in documents])
    signatures, compared = sign(np.concatenate(documents), lengths, find_common_grams([]))
    similar = find_similar(signatures)
    assert compared.all()
    assert (similar[300:] == np.arange(100)).mean() > 0.97
    assert (similar[:300] == -1).mean() > 0.97
