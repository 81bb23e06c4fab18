"""Runs over mixtures and streams: the same documents in each step on any number of ranks, exact when they go on, told, and a clean end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import preferences
from running import Run, assert_same_bits, base_config, conversations, joined, train, write_jsonl, written

from packtrain.report.page import page
from packtrain.report.run_record import read_run
from packtrain.run_folder import RunFolder
from tests.train import forked


def config_of(folder: Path, rows: int = 400, **groups: dict[str, Any]) -> dict[str, Any]:
    files = [
        write_jsonl(folder / f"{name}.jsonl", conversations(size, seed))
        for name, size, seed in (("many", rows, 1), ("few", 30, 2))
    ]
    named = [
        {"path": str(file), "name": file.stem, "weight": weight} for file, weight in zip(files, (3, 1), strict=True)
    ]
    groups["data"] = {"train": named, "streaming": True, "shuffle_buffer": 100, **groups.get("data", {})}
    groups["trainer"] = {"max_steps": 12, "checkpoint_every": 4, "keep_checkpoints": None, **groups.get("trainer", {})}
    return base_config(folder, **groups)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("streamed")
    return train(folder, config_of(folder), name="unbroken")


def test_the_summary_and_metrics_tell_what_was_streamed(unbroken: Run) -> None:
    summary, last = unbroken.summary, unbroken.steps[-1]
    assert (summary["examples"], summary["data_ended"], summary["epoch"]) == (12 * 7, False, 0)
    data = summary["data"]
    assert data["documents"] == 84 and data["tokens"] == summary["tokens"] == last["tokens"]
    assert 84 < data["rows"] == data["kept"] + sum(data["dropped"].values()) <= 430
    assert sum(source["examples"] for source in summary["sources"].values()) == 84
    assert 0 < data["trained_tokens"] < data["tokens"] and all(
        0 <= line["data_fraction"] <= 1 for line in unbroken.steps
    )


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_goes_on_bit_for_bit_from_its_place(unbroken: Run, processes: int) -> None:
    folder = unbroken.folder.parent
    name = f"resumed-{processes}"
    resumed = train(folder, config_of(folder), unbroken.resume(8), name=name, processes=processes)
    assert [line["step"] for line in resumed.steps] == [9, 10, 11, 12]
    assert [line["row"] for line in resumed.ledger] == [line["row"] for line in unbroken.ledger[8 * 7 :]]
    assert [line["document"] for line in unbroken.ledger] == [*range(12 * 7)]
    if processes == 1:
        assert_same_bits(resumed, unbroken, after=8)
    else:  # sums are made in another order
        assert resumed.losses == pytest.approx(unbroken.losses[8:], rel=1e-5)
    for key in ("sources", "examples", "tokens"):
        assert resumed.summary[key] == unbroken.summary[key]
    assert resumed.summary["data"] == unbroken.summary["data"]
    assert stream_of(resumed, 12) == stream_of(unbroken, 12)


def stream_of(run: Run, step: int) -> dict[str, Any]:
    return json.loads((run.checkpoint(step) / "stream.json").read_text())


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_end_of_the_data_ends_the_run_after_a_smaller_step_that_is_saved(tmp_path: Path, processes: int) -> None:
    config = config_of(tmp_path, rows=20, trainer={"max_steps": 100, "checkpoint_every": 50})
    run = train(tmp_path, config, name="ends", processes=processes)
    assert [line["step"] for line in run.steps] == [*range(1, 9)] and run.steps[-1]["examples"] == 1
    assert (run.summary["status"], run.summary["steps"], run.summary["data_ended"]) == ("done", 8, True)
    assert run.summary["sources"]["many"]["examples"] == 20 and run.summary["sources"]["few"]["examples"] == 30
    assert "data.train has ended: step 8 is the last of 100" in run.log
    assert run.checkpoint(8).is_dir() and run.weights()
    # as after a kill between the last checkpoint and final/
    on = train(tmp_path, config, run.resume(8), name="beyond", processes=processes)
    assert (on.summary["status"], on.summary["steps"], on.summary["data_ended"]) == ("done", 8, True)
    assert all(torch.equal(weight, run.weights()[name]) for name, weight in on.weights().items())


def test_another_buffer_is_no_continuation(unbroken: Run) -> None:
    folder = unbroken.folder.parent
    config = config_of(folder, data={"shuffle_buffer": 50})
    train(folder, config, unbroken.resume(8), name="refused", expect=2)


@pytest.mark.exhaustive
def test_a_stream_goes_on_from_a_run_that_was_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, data={"streaming": False, "shuffle_buffer": 10_000}, trainer={"max_steps": 4})
    whole = train(tmp_path, config, name="whole")
    config["data"] |= {"streaming": True, "shuffle_buffer": 100}
    despite = "trainer.resume_despite=[data.train,data.streaming]"
    run = train(tmp_path, config, whole.resume(4), despite, "trainer.max_steps=6", name="on")
    assert [line["step"] for line in run.steps] == [5, 6] and run.summary["examples"] == 14


@pytest.mark.exhaustive
def test_a_bad_row_ends_the_run_with_its_place_on_every_rank(tmp_path: Path) -> None:
    config = config_of(tmp_path, data={"shuffle_buffer": 10})
    with (tmp_path / "many.jsonl").open("a") as file:
        file.write('{"messages": 3}\n')
    path = written(tmp_path, {**config, "trainer": {**config["trainer"], "max_steps": 300}})
    assert all("many.jsonl:401" in ended.stderr for ended in joined(2, "sft", path, expect=2))


def in_a_folder_of_its_rank(arguments: Any, environment: Any, _: Path, outputs: Any) -> None:
    forked.run(arguments, environment, Path(arguments[1]).parent / environment["RANK"], outputs)


def test_ranks_that_read_other_rows_end_at_the_first_step_in_which_they_differ(tmp_path: Path) -> None:
    rows = conversations(400, 1)
    for rank, order in enumerate(([*range(400)], [*range(300), 301, 300, *range(302, 400)])):
        (tmp_path / str(rank)).mkdir()
        write_jsonl(tmp_path / str(rank) / "rows.jsonl", [rows[number] for number in order])
    config = config_of(tmp_path, data={"train": "/proc/self/cwd/rows.jsonl", "shuffle": False})
    config["trainer"] |= {"max_steps": 100, "checkpoint_every": None}
    config["batch"] = {"examples_per_step": 30, "tokens_per_device": 2048}
    run = train(tmp_path, config, name="differ", processes=2, expect=2, begin=in_a_folder_of_its_rank)
    assert [line["step"] for line in run.steps] == [*range(1, 11)]


def test_held_out_data_is_read_as_a_whole_and_pairs_are_streamed(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "pairs.jsonl", preferences(40, seed=0))
    held_out = write_jsonl(tmp_path / "held.jsonl", preferences(8, seed=1))
    data: dict[str, Any] = {"train": str(rows), "eval": str(held_out), "shuffle_buffer": 20, "max_length": 120}
    config = config_of(tmp_path, data=data, trainer={"max_steps": 3, "checkpoint_every": 2})
    run = train(tmp_path, config, name="dpo", command="dpo")
    assert run.losses[0] == pytest.approx(0.6931, abs=1e-3) and run.evals[-1]["eval_pairs"] == 8
    resumed = train(tmp_path, config, run.resume(2), name="dpo-2", command="dpo")
    assert resumed.losses == run.losses[2:]


@pytest.mark.exhaustive
def test_skipped_spikes_name_the_rows_of_their_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, trainer={"on_spike": "skip", "spike_factor": 1.0001, "max_steps": 20})
    config["optim"] |= {"learning_rate": 1e-7}
    run = train(tmp_path, config, name="spikes")
    assert run.spikes and all(len(line["documents"]) == 7 for line in run.spikes)
    files = {document["place"].rpartition(":")[0] for line in run.spikes for document in line["documents"]}
    assert files <= {str(tmp_path / name) for name in ("many.jsonl", "few.jsonl")}


STAGES = [{"until": 3, "weights": {"many": 1}}, {"weights": {"many": 1, "few": 1}}]


def mixed(folder: Path, **data: Any) -> dict[str, Any]:
    files = [
        write_jsonl(folder / f"{name}.jsonl", conversations(size, seed))
        for name, size, seed in (("many", 20, 1), ("few", 4, 2))
    ]
    named = [{"path": str(file), "name": file.stem} for file in files]
    data = {"train": named, "stages": STAGES, **data}
    return base_config(folder, data=data, trainer={"checkpoint_every": 2, "keep_checkpoints": None, "max_steps": 8})


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stages")
    return train(folder, mixed(folder), name="unbroken")


def test_metrics_summary_and_report_tell_what_was_seen_of_each_source(staged: Run) -> None:
    last, seen = staged.steps[-1], staged.summary["sources"]
    assert sum(source["examples"] for source in seen.values()) == 8 * 7
    assert sum(source["tokens"] for source in seen.values()) == last["tokens"] and seen.keys() == {"many", "few"}
    assert all(source["examples"] == last[f"source_examples/{name}"] for name, source in seen.items())
    third = staged.steps[2]
    assert (third["source_examples/many"], third["source_examples/few"]) == (21, 0)
    assert last["source_examples/few"] > 4  # of which there are four
    html = page([read_run(RunFolder(staged.folder))])
    assert "Tokens of each source" in html and "source_examples" not in html.partition('id="points"')[0]


def test_a_run_that_goes_on_is_the_unbroken_one_and_counts_on(staged: Run) -> None:
    folder = staged.folder.parent
    resumed = train(folder, mixed(folder), staged.resume(4), name="resumed")
    assert resumed.steps[0]["step"] == 5
    assert_same_bits(resumed, staged, after=4)
    assert resumed.summary["sources"] == staged.summary["sources"]
    counts = [[line["source_tokens/few"] for line in run.steps[-4:]] for run in (resumed, staged)]
    assert counts[0] == counts[1]


def test_two_ranks_train_on_the_same_documents(staged: Run) -> None:
    folder = staged.folder.parent
    both = train(folder, mixed(folder), name="two", processes=2)
    assert both.losses == pytest.approx(staged.losses, rel=1e-5)
    assert both.summary["sources"] == staged.summary["sources"]


def test_a_changed_stage_is_no_continuation(staged: Run) -> None:
    folder, stages = staged.folder.parent, [{"weights": {"few": 1}}]
    train(folder, mixed(folder, stages=stages), staged.resume(4), name="changed", expect=2)
