"""Runs over several sources: what was seen of each is told, and stages go on exactly, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import Run, assert_same_bits, base_config, conversations, train, write_jsonl

from packtrain.report.page import page
from packtrain.report.run_record import read_run
from packtrain.run_folder import RunFolder

STAGES = [{"until": 3, "weights": {"many": 1}}, {"weights": {"many": 1, "few": 1}}]


def config_of(folder: Path, **data: Any) -> dict[str, Any]:
    files = [
        write_jsonl(folder / f"{name}.jsonl", conversations(size, seed))
        for name, size, seed in (("many", 20, 1), ("few", 4, 2))
    ]
    named = [{"path": str(file), "name": file.stem} for file in files]
    data = {"train": named, "stages": STAGES, **data}
    return base_config(folder, data=data, trainer={"checkpoint_every": 2, "keep_checkpoints": None, "max_steps": 8})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stages")
    return train(folder, config_of(folder), name="unbroken")


def test_metrics_summary_and_report_tell_what_was_seen_of_each_source(unbroken: Run) -> None:
    last, seen = unbroken.steps[-1], unbroken.summary["sources"]
    assert sum(source["examples"] for source in seen.values()) == 8 * 7
    assert sum(source["tokens"] for source in seen.values()) == last["tokens"] and seen.keys() == {"many", "few"}
    assert all(source["examples"] == last[f"source_examples/{name}"] for name, source in seen.items())
    third = unbroken.steps[2]
    assert (third["source_examples/many"], third["source_examples/few"]) == (21, 0)
    assert last["source_examples/few"] > 4  # of which there are four
    html = page([read_run(RunFolder(unbroken.folder))])
    assert "Tokens of each source" in html and "source_examples" not in html.partition('id="points"')[0]


def test_a_run_that_goes_on_is_the_unbroken_one_and_counts_on(unbroken: Run) -> None:
    folder = unbroken.folder.parent
    resumed = train(folder, config_of(folder), unbroken.resume(4), name="resumed")
    assert resumed.steps[0]["step"] == 5
    assert_same_bits(resumed, unbroken, after=4)
    assert resumed.summary["sources"] == unbroken.summary["sources"]
    counts = [[line["source_tokens/few"] for line in run.steps[-4:]] for run in (resumed, unbroken)]
    assert counts[0] == counts[1]


def test_two_ranks_train_on_the_same_documents(unbroken: Run) -> None:
    folder = unbroken.folder.parent
    both = train(folder, config_of(folder), name="two", processes=2)
    assert both.losses == pytest.approx(unbroken.losses, rel=1e-5)
    assert both.summary["sources"] == unbroken.summary["sources"]


def test_a_changed_stage_is_no_continuation(unbroken: Run) -> None:
    folder, stages = unbroken.folder.parent, [{"weights": {"few": 1}}]
    train(folder, config_of(folder, stages=stages), unbroken.resume(4), name="changed", expect=2)
