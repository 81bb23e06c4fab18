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
    exact = BLOCK * (np.array(shares) / sum(shares))
    assert counts.sum() == BLOCK and np.abs(counts - exact).max() < len(shares) + 1
    assert ((counts > 0) == (exact > 0)).all()


def test_another_seed_draws_other_sources_a_stage_begins_at_its_step_and_names_are_never_alike() -> None:
    assert not np.array_equal(mixture([1, 1]).sources(0, 100), mixture([1, 1], seed=1).sources(0, 100))
    stages = [Stage(until=3, weights={"b": 2}), Stage(weights={"a": 1})]
    assert make_mixture(stages, {"a": 1, "b": 1}, 4, 0).sources(10, 14).tolist() == [1, 1, 0, 0]
    assert mixture([1.0]).sources(5, 5).tolist() == []
    given = [DataSource(path="x"), DataSource(path="x"), DataSource(path="y", name="z")]
    assert name_sources(given) == ("x", "x 2", "z")


def write(folder: Path, **sizes: int) -> list[DataSource]:
    for name, size in sizes.items():
        rows = "".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(size))
        (folder / f"{name}.jsonl").write_text(rows)
    return [DataSource(path=str(folder / f"{name}.jsonl"), name=name) for name in sizes]


def test_an_epoch_has_each_source_by_its_weight_or_exactly_so_many_of_its_documents(tmp_path: Path) -> None:
    full, half, more = write(tmp_path, a=90, b=10, c=7)
    given = [full, replace(half, weight=0.5), replace(more, samples=20)]
    train = prepare(Data(train=given, cache_dir=str(tmp_path / "cache")), TOKENIZER, "sft", seed=0).train
    assert np.bincount(train.source_of).tolist() == [90, 5, 20] and train.report.sources == ("a", "b", "c")
    assert len(np.unique(train.rows)) == 90 + 5 + 7


NAMED = [{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "b"}]
COMPLETE: dict[str, dict[str, Any]] = {
    "model": {"path": "x/y"},
    "data": {"train": NAMED, "stages": [{"until": 5, "weights": {"a": 1}}, {"weights": {"a": 0.2, "b": 0.8}}]},
    "batch": {"examples_per_step": 4},
    "trainer": {"max_steps": 10},
}


A, B = NAMED
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no stage at the end": ("data.stages", {"stages": [{"until": 5, "weights": {"a": 1}}]}),
    "no until before the end": ("data.stages", {"stages": [{"weights": {"a": 1}}, {"weights": {"b": 1}}]}),
    "one until twice": ("data.stages", {"stages": [*[{"until": 5, "weights": {"a": 1}}] * 2, {"weights": {"a": 1}}]}),
    "no such source": ("data.stages[0].weights.c", {"stages": [{"weights": {"c": 1}}]}),
    "a weight below 0": ("data.stages[0].weights.a", {"stages": [{"weights": {"a": -1, "b": 1}}]}),
    "no weight": ("data.stages[0].weights", {"stages": [{"weights": {"a": 0}}]}),
    "no such key": ("data.stages[0].weight", {"stages": [{"weight": {"a": 1}}]}),
    "a weight of a source": ("data.train", {"train": [{**A, "weight": 2}, B]}),
    "samples of a source": ("data.train", {"train": [{**A, "samples": 2}, B]}),
    "one name twice": ("data.train", {"train": [A, {**B, "name": "a"}], "stages": []}),
    "by prefix": ("data.shuffle", {"shuffle": "by_prefix"}),
    "steps of tokens": ("batch.examples_per_step", {"examples_per_step": None, "tokens_per_step": 8192}),
    "no last step": ("trainer.max_steps", {"max_steps": None}),
    "a reference of before": ("objective.reference", {"kind": "dpo", "reference": "precomputed"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_with_stages_is_refused_and_stages_alone_are_taken(name: str) -> None:
    at, keys = WRONG[name]
    assert faults_of(COMPLETE) == []
    group = at.partition(".")[0]
    faults = faults_of({**COMPLETE, group: {**COMPLETE.get(group, {}), **keys}})
    assert at in {fault.keys[0] for fault in faults}
