"""Real processes of one launch, one of which is not like the others: all end with exit code 3, and the first one says why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.train import forked
from tests.train.running import base_config, conversations, write_jsonl


def prepared(folder: Path) -> Path:
    """A folder with a config, and two places with other data under the same name."""
    for place in ("same", "other"):
        (folder / place).mkdir()
        write_jsonl(folder / place / "data.jsonl", conversations(8, seed=int(place == "other")))
    config = base_config(folder, data={"train": "data.jsonl"}, trainer={"max_steps": 1})
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def launch(
    folder: Path,
    number: int,
    *verb: str,
    odd: tuple[str, ...] = (),
    place: str = "same",
    odd_env: Mapping[str, str] = MappingProxyType({}),
    begin: Callable[..., None] | None = None,
    **env: str,
) -> list[BaseProcess]:
    """The processes of a launch; rank 1 has the arguments `odd`, the folder `place` and the variables `odd_env`."""
    started = []
    for rank, variables in enumerate(forked.told_by_torchrun(number)):
        own = {**forked.ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", **variables, **env, **(odd_env if rank == 1 else {})}
        arguments = (verb[0], str(folder / "run.yaml"), *verb[1:], *(odd if rank == 1 else ()))
        outputs = [folder / f"{rank}.{kind}" for kind in ("out", "err")]
        started.append(forked.start(arguments, own, folder / (place if rank == 1 else "same"), outputs, begin))
    return started


def with_other_seed(*given: Any) -> None:
    from packtrain.train import preparation

    load = preparation.load_model

    def of_other_seed(*given: Any, seed: int, **more: Any) -> Any:
        return load(*given, seed=seed + (os.environ["RANK"] == "1"), **more)

    preparation.load_model = of_other_seed
    forked.run(*given)


Launches = dict[str, tuple[Path, list[tuple[int | None, str]]]]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """All launches to their end, at once: folder, exit codes and what the processes said."""
    names = ("config", "disk", "data", "sft", "verify", "size")
    place = {name: prepared(tmp_path_factory.mktemp(name)) for name in names}
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    jobs = {
        "config": launch(place["config"], 2, "sft", odd=("optim.learning_rate=0.5",), odd_env=alone),
        "disk": launch(place["disk"], 2, "sft", "trainer.output_dir=run", "trainer.checkpoint_every=1", place="other"),
        "data": launch(place["data"], 2, "sft", place="other"),
        "sft": launch(place["sft"], 3, "sft", begin=with_other_seed),
        "verify": launch(place["verify"], 2, "verify", begin=with_other_seed),
        "size": launch(place["size"], 2, "sft", "topology.nodes=2", "topology.gpus_per_node=2", **alone),
    }
    ended = {}
    for name, processes in jobs.items():
        for process in processes:
            process.join(400)
        said = [(place[name] / f"{rank}.err").read_text() for rank in range(len(processes))]
        ended[name] = place[name], [(process.exitcode, text) for process, text in zip(processes, said, strict=True)]
    return ended


def said_once(ended: list[tuple[int | None, str]], code: int = 3) -> str:
    """What the first process said, where all have ended with exit code `code` and no other has said anything."""
    assert [one for one, _ in ended] == [code] * len(ended), ended
    assert [stderr for _, stderr in ended[1:]] == [""] * (len(ended) - 1)
    return ended[0][1]


def test_another_config_and_number_of_processes_are_named_before_any_data_is_read(launches: Launches) -> None:
    folder, ended = launches["config"]
    said = said_once(ended)
    assert "optim.learning_rate: rank 1 has 0.5; rank 0 has 0.001" in said
    assert "processes on the machine: rank 1 has 1; rank 0 has 2" in said
    assert not (folder / "cache").exists()


def test_other_data_under_the_same_name_is_named_before_the_model_is_loaded(launches: Launches) -> None:
    said = said_once(launches["data"][1])
    assert "data.train: rank 1 has 8 documents with fingerprint " in said
    assert said.count("fingerprint") == 2


@pytest.mark.parametrize(("verb", "others"), [("sft", "ranks 0 and 2 have"), ("verify", "rank 0 has")])
def test_other_weights_at_the_start_are_named(verb: str, others: str, launches: Launches) -> None:
    said = said_once(launches[verb][1])
    assert "model weights: rank 1 has those with hash " in said
    assert f"; {others} those with hash " in said


def test_a_launch_of_another_size_than_the_config_names_both_numbers(launches: Launches) -> None:
    """As when accelerate launch is given the processes of one machine in place of those of all."""
    ended = launches["size"][1]
    assert [code for code, _ in ended] == [3, 3]
    asked, has = "2 machines, 2 processes on each are asked for", "the launch has 2 machines, 1 process on each"
    assert f"{asked}, but {has}" in ended[0][1]


def test_checkpoints_on_disks_that_are_not_shared_are_refused_before_training(launches: Launches) -> None:
    """Each process has the run folder in a place of its own."""
    folder, ended = launches["disk"]
    assert [code for code, _ in ended] == [3, 3]
    assert "[disk-not-shared]" in ended[0][1]
    assert "trainer.checkpoint_every=null" in ended[0][1]
    assert not (folder / "same/run/metrics.jsonl").exists()
    assert not list((folder / "same/run/logs").glob(".seen*"))
