"""`packtrain env [CONFIG]`: facts of this machine for a bug report, and whether they suffice.

All questions are asked at once, and answered within ten seconds; a missing answer is a line of the report. No process stays
behind, and nothing secret is shown (packtrain/wording.py).
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

import yaml
from huggingface_hub import constants
from rich.console import Console
from rich.markup import escape

from packtrain.config.schema import RunConfig
from packtrain.diagnose import machine
from packtrain.diagnose.machine import MIB, Check, Driver, Facts, Folder, Load, PlannedRun, Status, Torch
from packtrain.errors import CheckFailed, Json, PacktrainError
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.network_settings import read_network
from packtrain.plan.surroundings import Surroundings, detect_surroundings
from packtrain.system import start
from packtrain.wording import Redactor, size

_Fact = TypeVar("_Fact")
TORCH_S, DRIVER_S, FOLDER_S = 8.0, 5.0, 5.0
"""Seconds for the answers, from the start on."""
_TRL_BLOCK = (
    *("TRL", "PyTorch", "Transformers", "Accelerate", "Datasets", "HF Hub"),
    *("bitsandbytes", "DeepSpeed", "Liger-Kernel", "PEFT", "vLLM"),
)
_OTHER_NAMES = {"PyTorch": "torch", "HF Hub": "huggingface_hub"}
"""Packages whose name is not the title in lower case."""
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def show_environment(load: Load, *, as_json: bool) -> int:
    """Print the report of this machine for the run whose config `load` returns. Return the exit code."""
    facts, run = gather(load)
    checks = check_all(facts, run)
    redactor = Redactor(os.environ, run.config.topology.variables)
    if as_json:
        print(json.dumps(report_json(facts, run, checks, redactor), indent=2))
    else:
        _print_report(facts, run, checks, redactor)
    return CheckFailed.exit_code if any(check.status == "fail" for check in checks) else 0


def check_all(facts: Facts, run: PlannedRun) -> list[Check]:
    """Return the results of all checks of a machine and a run."""
    results = [result for check in machine.CHECKS for result in check(facts, run)]
    return [replace(result, fix="") if result.status == "ok" else result for result in results]


def gather(load: Load) -> tuple[Facts, PlannedRun]:
    """Gather the facts of this machine, and plan the run whose config `load` returns.

    Takes ten seconds at most. Raises the errors of `load`.
    """
    config = load()
    run = PlannedRun(config is not None, config or RunConfig())
    asked = start(partial(machine.ask_torch, TORCH_S, run.dtype, run.config.topology.variables))
    paths = {
        "trainer.output_dir": run.config.trainer.output_dir if config else ".",
        "data.cache_dir": run.config.data.cache_dir or os.environ.get("PACKTRAIN_CACHE") or "~/.cache/packtrain",
        "HF_HOME": constants.HF_HOME,
    }
    disks = {name: start(partial(machine.read_folder, name, path)) for name, path in paths.items()}
    nvidia, begun = start(partial(machine.ask_driver, DRIVER_S)), time.monotonic()

    def answer(future: Future[_Fact], limit_s: float, otherwise: Callable[[str], _Fact]) -> _Fact:
        try:
            return future.result(max(0.0, begun + limit_s - time.monotonic()))
        except (OSError, RuntimeError) as error:  # TimeoutError, too; or no home folder
            return otherwise(str(error) or f"no answer within {limit_s:.0f} s")

    host = machine.read_host()
    folders = [answer(disks[name], FOLDER_S, partial(Folder, name, path, None, None)) for name, path in paths.items()]
    driver = answer(nvidia, DRIVER_S + 0.5, Driver)
    if config:
        # a silent name server is not asked for the address of the first machine
        network = (lambda main: read_network(None)) if host.silence else read_network
        around = detect_surroundings([gpu.memory or 0 for gpu in driver.gpus])
        run = plan_run(config, replace(around, network=network))
    torch = answer(asked, TORCH_S + 0.5, Torch)
    return Facts(host, torch, driver, read_network(None), tuple(folders)), run


def plan_run(config: RunConfig, surroundings: Surroundings) -> PlannedRun:
    """Plan the run of a config on a machine with these surroundings."""
    topology = config.topology
    per_node = topology.gpus_per_node or max(surroundings.gpus, 1)
    try:
        launch = plan_launch(config, surroundings, config.objective.kind)
    except PacktrainError as error:
        return PlannedRun(True, config, topology.nodes or 1, per_node, problems=error.problems)
    return PlannedRun(True, config, launch.nodes, launch.gpus_per_node, launch.network, obstacles=launch.obstacles)


def report_json(facts: Facts, run: PlannedRun, checks: Sequence[Check], redactor: Redactor) -> Json:
    """Return the whole report as plain containers. The keys up to `checks` are a promise to users."""
    torch, host, driver = facts.torch, facts.host, facts.driver
    built = {"cuda": torch.cuda, "nccl": torch.nccl, "driver": driver.version}
    gpus = [asdict(gpu) for gpu in driver.gpus]
    document = {
        "versions": {"python": host.python, "platform": host.platform, **host.packages, **built},
        "devices": gpus or [{"index": at, "name": name} for at, name in enumerate(torch.devices)],
        "attention": machine.attention_json(facts, run),
        "checks": [asdict(check) for check in checks],
        "facts": asdict(facts),
    }
    return redactor.plain(document)


def trl_block(facts: Facts) -> str:
    """Return the lines of `trl env` without importing its libraries, which takes seconds."""
    torch, host = facts.torch, facts.host
    lines = [f"- Platform: {host.platform}", f"- Python version: {host.python}"]
    versions = {title: host.packages[_OTHER_NAMES.get(title, title.lower())] for title in _TRL_BLOCK}
    lines += [f"- {title} version: {version or 'not installed'}" for title, version in versions.items()]
    config = "".join(f"\n  - {name}: {value}" for name, value in (torch.accelerate or {}).items())
    lines.insert(6, f"- Accelerate config: {config or 'not found'}")
    devices = ", ".join(torch.accelerators) or (torch.available is None and torch.error) or "cpu"
    lines.insert(4, f"- accelerator(s): {devices}")
    return "\n".join(lines)


def _print_report(facts: Facts, run: PlannedRun, checks: Sequence[Check], redactor: Redactor) -> None:
    """Print the three blocks to stdout, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nCopy-paste the following information when reporting an issue:\n")
    console.print(f"{escape(redactor.text(trl_block(facts)))}\n", emoji=False)
    settings = {setting.name: f"{setting.value or 'as it is'}: {setting.reason}" for setting in run.network}
    known = _drop_unknown(redactor.plain({**asdict(facts), "network settings": settings}))
    text = yaml.safe_dump(known, sort_keys=False, allow_unicode=True, width=_width(console))
    console.print(escape(redactor.text(text)), emoji=False)
    console.print("Checks:\n")
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        result, fix = redactor.text(check.found), redactor.text(check.fix)
        print_check(console, check.status, f"{check.name:<{width}}", result, fix)
    failed, warned = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    console.print(f"\n{failed} failed, {warned} to look at, {len(checks) - failed - warned} ok")


def print_check(console: Console, status: Status, name: str, result: str, fix: str) -> None:
    """Print a check, and its fix below. A terminal (or COLUMNS) wraps both at words."""
    head, width = " " * len(f"{status:<4}  {name}  "), _width(console)
    wrap = partial(textwrap.wrap, width=width, initial_indent=head, break_long_words=False, break_on_hyphens=False)
    first, *rest = wrap(result, subsequent_indent=head) or [head]
    rest += wrap(f"→ {fix}", subsequent_indent=f"{head}  ") if status != "ok" and fix else []
    console.print(f"[{_COLOURS[status]}]{status:<4}[/]  {escape(name)}  {escape(first[len(head) :])}", emoji=False)
    for line in rest:
        console.print(escape(line), emoji=False)


def _width(console: Console) -> int:
    """Return the columns of a line; a file or a pipe has no limit."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 10_000


def _drop_unknown(value: object) -> object:
    """Drop unknown values from plain containers, and write large numbers as sizes."""
    if isinstance(value, dict):
        known = {name: _drop_unknown(inner) for name, inner in value.items()}
        return {name: inner for name, inner in known.items() if inner not in (None, "", [], {})}
    if isinstance(value, list):
        return [_drop_unknown(inner) for inner in value]
    return size(value) if isinstance(value, int) and value > MIB else value
