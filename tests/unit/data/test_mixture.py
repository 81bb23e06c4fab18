"""Sources share a run as they are told to: by weights and numbers in an epoch, and example by example in stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from packtrain.config.compose import faults_of
from packtrain.config.schema import Data, DataSource, Stage, name_sources
from packtrain.data.dataset import BLOCK, Mixture, make_mixture
from packtrain.data.prepare import prepare

TOKENIZER = tokenizer_of("smollm")
SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda shares: sum(shares) > 0.01)


def mixture(*rows: list[float], first: tuple[int, ...] = (0,), seed: int = 0) -> Mixture:
    return Mixture(first, tuple(tuple(weight / sum(row) for weight in row) for row in rows), seed)


@given(SHARES, st.integers(0, 3 * BLOCK), st.integers(1, 300))
def test_counts_are_those_of_the_examples_one_by_one(shares: list[float], first: int, number: int) -> None:
    mixed = mixture(shares, shares[::-1], first=(0, BLOCK + 77))
    drawn = mixed.sources(0, first + number)
    assert np.array_equal(np.bincount(drawn, minlength=len(shares)), mixed.counts(first + number))
    assert np.array_equal(drawn[first:], mixed.sources(first, first + number))


@given(SHARES)
def test_every_source_has_its_share_of_a_block_and_one_without_a_share_nothing(shares: list[float]) -> None:
    counts = mixture(shares).counts(BLOCK)
    exact = BLOCK * np.array(shares) / sum(shares)
    assert counts.sum() == BLOCK and np.abs(counts - exact).max() < len(shares) + 1
    assert ((counts > 0) == (exact > 0)).all()


def test_another_seed_draws_other_sources_and_a_stage_begins_at_its_step() -> None:
    assert not np.array_equal(mixture([1, 1]).sources(0, 100), mixture([1, 1], seed=1).sources(0, 100))
    stages = [Stage(until=3, weights={"b": 2}), Stage(weights={"a": 1})]
    assert make_mixture(stages, {"a": 1, "b": 1}, 4, 0).sources(10, 14).tolist() == [1, 1, 0, 0]
    assert mixture([1.0]).sources(5, 5).tolist() == []


def write(folder: Path, **sizes: int) -> list[DataSource]:
    for name, size in sizes.items():
        rows = "".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(size))
        (folder / f"{name}.jsonl").write_text(rows)
    return [DataSource(path=str(folder / f"{name}.jsonl"), name=name) for name in sizes]


def test_an_epoch_has_each_source_by_its_weight_or_exactly_so_many_of_its_documents(tmp_path: Path) -> None:
    full, half, more = write(tmp_path, a=90, b=10, c=7)
    given = [full, replace(half, weight=0.5), replace(more, samples=20)]
    train = prepare(Data(train=given, cache_dir=str(tmp_path / "cache")), TOKENIZER, seed=0).train
    assert np.bincount(train.source_of).tolist() == [90, 5, 20] and train.report.sources == ("a", "b", "c")
    assert len(np.unique(train.rows)) == 90 + 5 + 7


def test_sources_are_called_by_their_names_or_paths_and_never_alike() -> None:
    given = [DataSource(path="x"), DataSource(path="x"), DataSource(path="y", name="z")]
    assert name_sources(given) == ("x", "x 2", "z")


NAMED = [{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "b"}]
COMPLETE: dict[str, dict[str, Any]] = {
    "model": {"path": "x/y"},
    "data": {"train": NAMED, "stages": [{"until": 5, "weights": {"a": 1}}, {"weights": {"a": 0.2, "b": 0.8}}]},
    "batch": {"examples_per_step": 4},
    "trainer": {"max_steps": 10},
}


def test_stages_that_go_with_all_else_are_taken() -> None:
    assert faults_of(COMPLETE) == []


@pytest.mark.parametrize(
    ("group", "keys", "at"),
    [
        ("data", {"stages": [{"until": 5, "weights": {"a": 1}}]}, "data.stages"),
        ("data", {"stages": [{"weights": {"a": 1}}, {"weights": {"b": 1}}]}, "data.stages"),
        ("data", {"stages": [{"until": 5, "weights": {"a": 1}}, {"until": 5, "weights": {"a": 1}}, {"weights": {"a": 1}}]}, "data.stages"),
        ("data", {"stages": [{"weights": {"c": 1}}]}, "data.stages[0].weights.c"),
        ("data", {"stages": [{"weights": {"a": -1, "b": 1}}]}, "data.stages[0].weights.a"),
        ("data", {"stages": [{"weights": {"a": 0}}]}, "data.stages[0].weights"),
        ("data", {"stages": [{"weight": {"a": 1}}]}, "data.stages[0].weight"),
        ("data", {"train": [{**NAMED[0], "weight": 2}, NAMED[1]]}, "data.train"),
        ("data", {"train": [{**NAMED[0], "samples": 2}, NAMED[1]]}, "data.train"),
        ("data", {"train": [NAMED[0], {**NAMED[1], "name": "a"}], "stages": []}, "data.train"),
        ("data", {"shuffle": "by_prefix"}, "data.shuffle"),
        ("batch", {"examples_per_step": None, "tokens_per_step": 8192}, "batch.examples_per_step"),
        ("trainer", {"max_steps": None}, "trainer.max_steps"),
        ("objective", {"kind": "dpo", "reference": "precomputed"}, "objective.reference"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_stages_is_refused(group: str, keys: dict[str, Any], at: str) -> None:
    faults = faults_of({**COMPLETE, group: {**COMPLETE.get(group, {}), **keys}})
    assert at in {fault.keys[0] for fault in faults}
