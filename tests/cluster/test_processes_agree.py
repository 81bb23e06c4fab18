"""Real processes of one launch, one of which is not like the others: all end with exit code 3, and the first one says why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from tests.train import forked

CONFIG = {
    "model": {
        "init": "random",
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "tokenizer": "quickstart",
    },
    "data": {"train": "data.jsonl"},
    "batch": {"examples_per_step": 4},
    "trainer": {"max_steps": 1},
}
ROW = '{"messages": [{"role": "user", "content": "Say %s."}, {"role": "assistant", "content": "%s"}]}\n'


def prepared(folder: Path) -> Path:
    """A folder with a config, and two places with other data under the same name."""
    for place in ("same", "other"):
        (folder / place).mkdir()
        said = ["one", "two", "three", "four" if place == "same" else "five"]
        (folder / place / "data.jsonl").write_text("".join(ROW % (word, word) for word in said))
    files = {"data": {**CONFIG["data"], "cache_dir": str(folder / "cache")}}
    trainer = {"trainer": {**CONFIG["trainer"], "output_dir": str(folder / "run")}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **files, **trainer}))
    return folder


@dataclass(frozen=True)
class Job:
    """`packtrain ARGUMENTS` as one process of a launch, which `begin` starts."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    begin: Callable[..., None] = forked.run


def launch(
    folder: Path,
    number: int,
    *verb: str,
    odd: tuple[str, ...] = (),
    place: str = "same",
    odd_env: Mapping[str, str] = MappingProxyType({}),
    begin: Callable[..., None] = forked.run,
    **env: str,
) -> list[Job]:
    """The `number` processes of a launch; rank 1 has the arguments `odd`, the folder `place` and the variables `odd_env`."""
    port = str(free_port())
    jobs = []
    for rank in range(number):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env, **(odd_env if rank == 1 else {})}
        arguments = (verb[0], str(folder / "run.yaml"), *verb[1:], *(odd if rank == 1 else ()))
        jobs.append(Job(arguments, told, folder / (place if rank == 1 else "same"), begin))
    return jobs


def run_all(jobs: Sequence[Job], outputs: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of all, which run at the same time."""
    files = [[outputs / f"{number}.{kind}" for kind in ("out", "err")] for number in range(len(jobs))]
    processes = []
    for job, output in zip(jobs, files, strict=True):
        env = {**forked.ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", **job.env}
        processes.append(forked._CONTEXT.Process(target=job.begin, args=(job.arguments, env, job.folder, output)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # for the server, as in forked.start
            processes[-1].start()
    for process in processes:
        process.join(400)
    return [(process.exitcode, err.read_text()) for process, (_, err) in zip(processes, files, strict=True)]


def _with_other_seed(arguments: tuple[str, ...], env: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    from packtrain.train import preparation

    load = preparation.load_model

    def of_other_seed(*given: Any, seed: int, **more: Any) -> Any:
        return load(*given, seed=seed + (os.environ["RANK"] == "1"), **more)

    preparation.load_model = of_other_seed
    forked.run(arguments, env, cwd, outputs)


Launches = dict[str, tuple[Path, list[tuple[int, str]]]]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """All launches to their end, at once: folder, exit codes and what the processes said."""
    place = {
        name: prepared(tmp_path_factory.mktemp(name)) for name in ("config", "disk", "data", "sft", "verify", "size")
    }
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    jobs = {
        "config": launch(place["config"], 2, "sft", odd=("optim.learning_rate=1e-3",), odd_env=alone),
        "disk": launch(place["disk"], 2, "sft", "trainer.output_dir=run", "trainer.checkpoint_every=1", place="other"),
        "data": launch(place["data"], 2, "sft", place="other"),
        "sft": launch(place["sft"], 3, "sft", begin=_with_other_seed),
        "verify": launch(place["verify"], 2, "verify", begin=_with_other_seed),
        "size": launch(
            place["size"],
            2,
            "sft",
            "topology.nodes=2",
            "topology.gpus_per_node=2",
            LOCAL_WORLD_SIZE="1",
            LOCAL_RANK="0",
        ),
    }
    ended = iter(run_all([job for one in jobs.values() for job in one], tmp_path_factory.mktemp("outputs")))
    return {name: (place[name], [next(ended) for _ in one]) for name, one in jobs.items()}


def told_once(ended: list[tuple[int, str]], code: int = 3) -> str:
    """What the first process said, where all have ended with exit code `code` and no other has said anything."""
    assert [one for one, _ in ended] == [code] * len(ended), ended
    assert [stderr for _, stderr in ended[1:]] == [""] * (len(ended) - 1)
    return ended[0][1]


def test_another_config_and_number_of_processes_are_named_before_any_data_is_read(launches: Launches) -> None:
    folder, ended = launches["config"]
    told = told_once(ended)
    assert "optim.learning_rate: rank 1 has 0.001; rank 0 has 2e-05" in told
    assert "processes on the machine: rank 1 has 1; rank 0 has 2" in told
    assert not (folder / "cache").exists()


def test_other_data_under_the_same_name_is_named_before_the_model_is_loaded(launches: Launches) -> None:
    told = told_once(launches["data"][1])
    assert "data.train: rank 1 has 4 documents with fingerprint " in told
    assert told.count("fingerprint") == 2


@pytest.mark.parametrize(("verb", "others"), [("sft", "ranks 0 and 2 have"), ("verify", "rank 0 has")])
def test_other_weights_at_the_start_are_named(verb: str, others: str, launches: Launches) -> None:
    told = told_once(launches[verb][1])
    assert "model weights: rank 1 has those with hash " in told
    assert f"; {others} those with hash " in told


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
    assert "and the first machine do not share the disk of this folder" in ended[0][1]
    assert "trainer.checkpoint_every=null" in ended[0][1]
    assert not (folder / "same/run/metrics.jsonl").exists()
    assert not list((folder / "same/run/logs").glob(".seen*"))
