"""`packtrain deploy`: files that the engines' own classes take, and what is refused."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.command_line import packtrain

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "recipes/quickstart-sft.yaml"
GIVEN = ("topology.nodes=2", "topology.gpus_per_node=8", "trainer.checkpoint_every=100", "trainer.restarts=3")
EXAMPLES = {
    "kubeflow": ("--image", "ghcr.io/you/packtrain"),
    "skypilot": ("--gpu", "H100", "--spot"),
    "dstack": ("--image", "ghcr.io/you/packtrain", "--gpu", "H100", "--spot"),
}


def deployed(folder: Path, engine: str, *given: str, code: int = 0, keys: Iterable[str] = ()) -> str:
    """What the command writes, or its error."""
    (folder / "recipes").mkdir(exist_ok=True)
    shutil.copy(ROOT / CONFIG, folder / CONFIG)
    done = packtrain("deploy", "--on", engine, *given, "sft", CONFIG, *GIVEN, *keys, folder=folder)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def lost(given: Any, made: Any, place: str = "") -> list[str]:
    """The keys of `given` that the engine's classes did not keep."""
    if isinstance(given, dict):
        inside = [(f"{place}.{key}", value, (made or {}).get(key)) for key, value in given.items()]
    elif isinstance(given, list):
        inside = [(f"{place}[{at}]", value, made[at]) for at, value in enumerate(given)]
    else:
        return [] if made is not None else [place]
    return [name for one, value, other in inside for name in ([one] if other is None else lost(value, other, one))]


def test_a_job_of_kubeflow_is_one_by_its_own_classes(tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, job = yaml.safe_load_all(deployed(tmp_path, "kubeflow", *EXAMPLES["kubeflow"]))
    kinds = (models.TrainerV1alpha1ClusterTrainingRuntime, models.TrainerV1alpha1TrainJob)
    for given, kind in zip((runtime, job), kinds, strict=True):
        assert lost(given, kind.from_dict(given).to_dict()) == []
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    config = trainer["args"][0].partition("<<'PACKTRAIN'\n")[2].partition("\nPACKTRAIN\n")[0]
    assert yaml.safe_load(config)["trainer"]["restarts"] == 3
    assert trainer["args"][0].endswith("exec packtrain sft /tmp/packtrain.yaml\n")


def test_a_task_of_skypilot_is_one_by_its_own_class(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(yaml.safe_load(deployed(tmp_path, "skypilot", *EXAMPLES["skypilot"])))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)


def test_a_task_of_dstack_is_one_by_its_own_class(tmp_path: Path) -> None:
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    text = deployed(tmp_path, "dstack", *EXAMPLES["dstack"])
    task = configurations.parse_run_configuration(yaml.safe_load(text))
    assert (task.nodes, task.resources.gpu.count.min, task.resources.gpu.name) == (2, 8, ["H100"])


@pytest.mark.parametrize("engine", EXAMPLES)
def test_the_files_in_deploy_are_what_the_command_writes(tmp_path: Path, engine: str) -> None:
    told = deployed(tmp_path, engine, *EXAMPLES[engine])
    assert (ROOT / "deploy" / f"{engine}.yaml").read_text() == told


def test_what_is_missing_or_named_by_others_is_refused(tmp_path: Path) -> None:
    for engine, given, says in (
        ("kubeflow", (), "--image: pods need an image"),
        ("kubeflow", ("--image", "a", "--spot"), "--spot: each cluster says in its own way"),
        ("skypilot", (), "--gpu: skypilot has to know"),
        ("dstack", ("--gpu", "H100", "--submit"), "--submit: dstack, the client of dstack, is not installed"),
    ):
        assert says in deployed(tmp_path, engine, *given, code=2)
    for key, says in (
        ("topology.node_rank=0", "topology.node_rank: skypilot names and numbers the machines itself"),
        ("topology=manual", "topology.kind"),
        ("topology.gpus_per_node=null", "topology.gpus_per_node: how many GPUs"),
    ):
        assert says in deployed(tmp_path, "skypilot", "--gpu", "H100", code=2, keys=[key])


@pytest.mark.parametrize("engine", EXAMPLES)
def test_a_run_gets_a_name_that_a_host_may_have(tmp_path: Path, engine: str) -> None:
    for folder, name in {"2024": "run-2024", "on": "on", "a": "run-a", f"{'b' * 39}-c": "b" * 39}.items():
        text = deployed(tmp_path, engine, *EXAMPLES[engine], keys=[f"trainer.output_dir=runs/{folder}"])
        *_, job = yaml.safe_load_all(text)
        assert name == (job["metadata"] if engine == "kubeflow" else job)["name"]


@pytest.mark.parametrize("engine", EXAMPLES)
def test_lines_of_the_shell_come_there_as_they_are(tmp_path: Path, engine: str) -> None:
    lines = ["  module load x", "cat <<E\n  a: {{ b }}\nE", "echo 'c' # \"d\""]
    keys = [f"topology.setup={lines}".replace("\\n", "\n"), "tracking.run_name='it\\'s\n$HOME'"]
    *_, job = yaml.safe_load_all(deployed(tmp_path, engine, *EXAMPLES[engine], keys=keys))
    if engine == "kubeflow":
        (script,) = job["spec"]["trainer"]["args"]
        config = yaml.safe_load(script.partition("<<'PACKTRAIN'\n")[2].partition("\nPACKTRAIN\n")[0])
        assert config["tracking"]["run_name"] == "it's\n$HOME"
    else:
        *commands, command = job["commands"] if engine == "dstack" else (job["setup"], job["run"])
        script = "\n".join(commands)
        assert shlex.split(command) == ["packtrain", "sft", CONFIG, *GIVEN, *keys]
    assert "\n".join(lines) in script


@pytest.mark.parametrize(("engine", "client"), [("skypilot", "sky"), ("dstack", "dstack"), ("kubeflow", "kubectl")])
def test_the_client_gets_the_file_in_this_folder_and_gives_the_exit_code(tmp_path, engine, client, monkeypatch):
    fake = tmp_path / "bin" / client
    fake.parent.mkdir()
    script = 'echo "$@" > said\nfor last; do :; done\ncp "$last" got\ndirname "$last" > where\nexit 7\n'
    fake.write_text(f"#!/bin/sh\n{script}")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    deployed(tmp_path, engine, *EXAMPLES[engine], "--submit", code=7)
    assert ("--secret=HF_TOKEN" in (tmp_path / "said").read_text()) == (engine == "skypilot")
    assert Path((tmp_path / "where").read_text().strip()).resolve() == tmp_path
    *_, job = yaml.safe_load_all((tmp_path / "got").read_text())
    assert "hf_a" not in str(job)


def test_what_the_machines_would_not_have_is_refused(tmp_path: Path) -> None:
    done = packtrain("deploy", "--gpu", "H100", "sft", str(ROOT / CONFIG), *GIVEN, folder=tmp_path)
    assert done.returncode == 2 and "[outside-job-folder]" in done.stderr
    deployed(tmp_path, "dstack", *EXAMPLES["dstack"], "-o", "recipes/job.yaml")
    assert yaml.safe_load((tmp_path / "recipes/job.yaml").read_text())["files"] == ["..:/workflow"]
