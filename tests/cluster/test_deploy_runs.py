"""What `packtrain deploy` writes is run on two hosts, with the variables that the engine sets there, and trains as one process does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.two_hosts import ADDRESSES, both
from tests.train.running import Run, base_config, packtrain, train

NODES = "\n".join(ADDRESSES)
ENGINES = {
    "kubeflow": "PET_NNODES=2 PET_NODE_RANK={node} PET_NPROC_PER_NODE=2 PET_MASTER_ADDR=n1 PET_MASTER_PORT=29400 "
    "KUBERNETES_SERVICE_HOST=10.0.0.1",
    "skypilot": "SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK={node} SKYPILOT_NODE_IPS={nodes} SKYPILOT_NUM_GPUS_PER_NODE=0",
    "dstack": "DSTACK_NODES_NUM=2 DSTACK_NODE_RANK={node} DSTACK_MASTER_NODE_IP={first} DSTACK_GPUS_PER_NODE=0 "
    "DSTACK_NODES_IPS={nodes}",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone")
    return train(folder, base_config(folder, trainer={"max_steps": 4}))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_command_on_each_machine_trains_as_one_process_does(hosts, tmp_path, alone, engine):
    config = base_config(tmp_path, trainer={"max_steps": 4}, topology={"nodes": 2, "gpus_per_node": 2})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    image = ["--image", "you/packtrain"] if engine == "kubeflow" else []
    text = packtrain("deploy", "--on", engine, "--gpu", "none", *image, "sft", "run.yaml", cwd=tmp_path).stdout
    *_, made = yaml.safe_load_all(text)
    if engine == "kubeflow":
        assert "resourcesPerNode" not in made["spec"]["trainer"]
        # these hosts share /tmp
        command = made["spec"]["trainer"]["args"][0].replace("/tmp/packtrain.yaml", "$TMPDIR/packtrain.yaml")
    else:
        command = made["run"] if engine == "skypilot" else made["commands"][-1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = []
    for node in (1, 0):
        own = {"node": node, "nodes": NODES, "first": ADDRESSES[0]}
        env = {name: value.format(**own) for name, value in (one.split("=") for one in ENGINES[engine].split())}
        here = hosts.start(node + 1, "bash", "-c", command, cwd=tmp_path, env={**env, "PATH": path}, python=False)
        started.append(here)
    assert both(started, 400) == [0, 0], started[0].text + started[1].text
    hosts.assert_empty()
    assert Run(tmp_path / "run").losses == pytest.approx(alone.losses, rel=1e-5)
