"""`gpus` runs packtrain on stand-in GPUs; without a C++ compiler these tests are skipped, and say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from running import Run, written

from tests.standin import gpus as standin
from tests.train import forked

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 900
"""A limit that only a hang reaches."""


class Gpus:
    """packtrain's command on stand-in GPUs, in processes that are forked from one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.report = folder / "report.jsonl"
        environment = {**os.environ, **standin.variables(1, self.report), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] += f":{ROOT / 'tests' / 'train'}"  # as pytest has it
        environment.pop("DS_ACCELERATOR", None)
        environment.pop(forked.SHARED, None)  # its processes have no GPUs
        self.said = folder / "server.txt"
        with self.said.open("w") as said:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said, "text": True}
            command = [sys.executable, "-m", "tests.standin.warm"]
            self.server = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def packtrain(
        self, *arguments: str, devices: int = 1, ranks: int = 1, expect: int = 0, env: Mapping[str, str] | None = None
    ) -> Any:
        """`packtrain ARGUMENTS` on a machine with so many devices, as one process or as `ranks` that torchrun has started.

        Returns rank 0's result, a CompletedProcess; asserts the exit code of each.
        """
        return self._launch({"arguments": arguments}, devices, ranks, expect, env)

    def call(
        self, function: Any, devices: int = 1, ranks: int = 1, env: Mapping[str, str] | None = None, expect: int = 0
    ) -> Any:
        """Calls a function of a module in place of packtrain's command."""
        return self._launch({"function": f"{function.__module__}:{function.__name__}"}, devices, ranks, expect, env)

    def _launch(
        self, asked: dict[str, Any], devices: int, ranks: int, expect: int, env: Mapping[str, str] | None
    ) -> Any:
        launched = forked.told_by_torchrun(ranks) if ranks > 1 else [{}]
        own = [{**one, **(env or {}), "STANDIN_GPUS": str(devices)} for one in launched]
        return self._ask({"variables": own, **asked}, expect)

    def _ask(self, asked: dict[str, Any], expect: int) -> Any:
        self.report.unlink(missing_ok=True)
        assert self.server.stdin is not None and self.server.stdout is not None
        try:
            self.server.stdin.write(json.dumps({"cwd": str(ROOT), "timeout": LONG_S, **asked}) + "\n")
            self.server.stdin.flush()
            results = json.loads(self.server.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            pytest.fail(f"the server ended with {self.server.wait(60)}: {self.said.read_text()[-5000:]}")
        for one in results:
            assert one["code"] == expect, f"exit {one['code']}\n{one['stdout']}\n{one['stderr']}"
        return subprocess.CompletedProcess(asked, *(results[0][name] for name in ("code", "stdout", "stderr")))

    @property
    def reported(self) -> list[dict[str, Any]]:
        """What the processes of the last launch wrote down (site/standin_gpus/device.py::report)."""
        return [json.loads(line) for line in self.report.read_text().splitlines()]

    def touched(self) -> dict[int, dict[int, str]]:
        """Of each rank of the last launch the devices that it used, and the first thread that used each."""
        touched: dict[int, dict[int, str]] = {}
        for line in self.reported:
            if "device" in line:
                touched.setdefault(line["rank"], {})[line["device"]] = line["thread"]
        return touched

    def flash_calls(self, rank: int) -> tuple[list[int], list[int]]:
        """The calls of flash attention's kernel in that rank of the last launch, forward and backward: the segments of each."""
        lines = [line for line in self.reported if "flash" in line and line["rank"] == rank]
        return tuple([one["segments"] for one in lines if one["flash"] == way] for way in ("forward", "backward"))  # type: ignore[return-value]

    def train(
        self, folder: Path, config: dict[str, Any], *overrides: str, verb: str = "sft", name: str = "run", **how: Any
    ) -> Run:
        """Trains by `config` into folder/name; `how` as for `packtrain`."""
        config = {**config, "trainer": {**config["trainer"], "output_dir": str(folder / name)}}
        self.packtrain(verb, written(folder, config, name), *overrides, **how)
        return Run(folder / name)


@pytest.fixture(scope="session")  # to import everything takes as long as a few runs
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    try:
        standin.library()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    made = Gpus(tmp_path_factory.mktemp("gpus"))
    yield made
    made.server.stdin.close()  # type: ignore[union-attr]
    made.server.wait()
