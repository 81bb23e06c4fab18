"""`packtrain env [CONFIG]`: what this machine is and has, as a list to paste into a bug report, and whether that will do.

Everything is asked at once and answered within ten seconds; what does not answer is a line of the report. Nothing is started
that stays, and nothing secret is shown (redact.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import psutil
from huggingface_hub import constants
from rich.console import Console
from rich.markup import escape

from packtrain.config.schema import RunConfig
from packtrain.diagnose import devices, host, network, software
from packtrain.diagnose.devices import ask_driver, ask_torch, has_nvidia
from packtrain.diagnose.facts import (
    MIB,
    Check,
    Facts,
    Folder,
    Gpu,
    Gpus,
    Host,
    RunNeeds,
    Status,
    Torch,
    dtype_of,
    needs_of,
    size,
)
from packtrain.diagnose.probe import LIMIT_S, Inquiry, Probe, Unanswered, kill_commands
from packtrain.diagnose.redact import Redactor
from packtrain.errors import CheckFailed
from packtrain.plan.interfaces import HostNetwork, read_network
from packtrain.plan.surroundings import look_around

BUDGET_S = 8.5
"""From the start of this process to the last answer."""
_LEAST_FOR_TORCH_S = 3.0
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def show_environment(load: Callable[[], RunConfig | None], *, as_json: bool) -> int:
    """Prints the report of this machine, for the run whose config `load` returns; returns the exit code."""
    facts, needs = gather(load)
    checks = check_all(facts, needs)
    redactor = Redactor(os.environ, needs.environment)
    if as_json:
        print(json.dumps(report_json(facts, needs, checks, redactor), indent=2))
    else:
        _print_report(facts, needs, checks, redactor)
    return CheckFailed.exit_code if any(check.status == "fail" for check in checks) else 0


def check_all(facts: Facts, needs: RunNeeds) -> list[Check]:
    """What every check says of a machine and a run."""
    checks = (*host.CHECKS, *software.CHECKS, *devices.CHECKS, *network.CHECKS)
    return [check for one in checks for check in one(facts, needs)]


def gather(load: Callable[[], RunConfig | None]) -> tuple[Facts, RunNeeds]:
    """The facts of this machine and what the run whose config `load` returns needs of it.

    Takes until ten seconds after this process started. Raises what `load` raises.
    """
    config, inquiry = load(), Inquiry()
    dtype = RunNeeds().dtype if config is None else dtype_of(config)
    try:
        inquiry.ask("GPU driver", lambda: ask_driver(LIMIT_S), LIMIT_S + 0.5)
        torch_s = max(_LEAST_FOR_TORCH_S, BUDGET_S - age_s())
        inquiry.ask("torch", lambda: ask_torch(torch_s, dtype), torch_s + 0.3)
        inquiry.ask("limits", host.read_host)
        software.ask_software(inquiry)
        network.ask_network(inquiry)
        folders = _folders(config, os.environ)
        for name, path in folders.items():
            inquiry.ask(name, lambda name=name, path=path: host.read_folder(name, path))
        gpus = inquiry.answer("GPU driver", Gpus(present=has_nvidia(), error="no answer"))
        inquiry.lacks += [f"GPU driver: {gpus.error}"] if gpus.error else []
        needs = RunNeeds() if config is None else _needs(config, gpus.gpus)
        silent = [Folder(name, path, lack="no answer within 5 s") for name, path in folders.items()]
        found = [inquiry.answer(one.setting, one) for one in silent]
        machine = replace(inquiry.answer("limits", Host()), folders=tuple(found))
        links, installed = network.network_of(inquiry, needs), software.software_of(inquiry)
        torch = inquiry.answer("torch", Torch(error="no answer"))
        return Facts(installed, torch, gpus, links, machine, tuple(inquiry.lacks)), needs
    finally:
        kill_commands()


def _needs(config: RunConfig, gpus: Sequence[Gpu]) -> RunNeeds:
    """As for a launch, without asking for GPUs again, and without waiting for a silent name server."""

    def read(main: str | None) -> HostNetwork:
        try:
            return Probe(lambda: read_network(main), network.NAME_S).answer()
        except Unanswered:
            return read_network(None)

    return needs_of(config, replace(look_around([gpu.memory or 0 for gpu in gpus]), network=read))


def _folders(config: RunConfig | None, env: Mapping[str, str]) -> dict[str, str]:
    """Where a run writes, by config key or variable; without a config the folder that packtrain is called in."""
    cache = config.data.cache_dir if config else None
    return {
        "trainer.output_dir": config.trainer.output_dir if config else ".",
        "data.cache_dir": cache or env.get("PACKTRAIN_CACHE") or "~/.cache/packtrain",
        "HF_HOME": constants.HF_HOME,
    }


def age_s() -> float:
    """Seconds since this process was started, imports and config included."""
    return max(0.0, time.time() - psutil.Process().create_time())


def report_json(facts: Facts, needs: RunNeeds, checks: Sequence[Check], redactor: Redactor) -> dict[str, Any]:
    """The whole report as plain containers; the keys up to `checks` are a promise to users."""
    plain, torch, installed = asdict(facts), facts.torch, facts.software.packages
    built = {"cuda": torch.cuda, "nccl": torch.nccl, "driver": facts.gpus.driver}
    document = {
        "versions": {"python": facts.software.python, "platform": facts.software.platform, **installed, **built},
        "devices": plain["gpus"]["gpus"] or [{"index": at, **one} for at, one in enumerate(plain["torch"]["devices"])],
        "attention": software.attention_json(facts, needs),
        "checks": [{"name": one.name, "status": one.status, "found": one.found, "fix": one.fix} for one in checks],
        "trl": software.trl_lines(facts.software, torch),
        "facts": plain,
    }
    return redactor.plain(document)


def _print_report(facts: Facts, needs: RunNeeds, checks: Sequence[Check], redactor: Redactor) -> None:
    """Both blocks on stdout, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nCopy-paste the following information when reporting an issue:\n")
    lines = {**software.trl_lines(facts.software, facts.torch), **asdict(facts)}
    lines["Network settings"] = [f"{one.name}={one.value or 'as it is'}: {one.reason}" for one in needs.network]
    for line in _listed(redactor.plain(lines)):
        console.print(escape(redactor.text(line)), emoji=False)
    console.print("\nChecks:\n")
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        print_check(
            console, check.status, f"{check.name:<{width}}", redactor.text(check.found), redactor.text(check.fix)
        )
    failed, warned = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    console.print(f"\n{failed} failed, {warned} to look at, {len(checks) - failed - warned} ok")


def print_check(console: Console, status: Status, name: str, found: str, fix: str) -> None:
    """A check in one line, and its fix in another."""
    console.print(f"[{_COLOURS[status]}]{status:<4}[/]  {escape(f'{name}  {found}')}", emoji=False)
    if status != "ok" and fix:
        console.print(f"      {' ' * len(name)}  → {escape(fix)}", emoji=False)


def _listed(facts: Mapping[str, Any]) -> Iterator[str]:
    """What is known as a list of two levels; what is not known is left out."""
    for name, group in facts.items():
        if not isinstance(group, Mapping):
            yield f"- {name}: {_words(group)}"
            continue
        yield f"- {name}:"
        for key, value in group.items():
            if value and isinstance(value, list) and isinstance(value[0], Mapping):
                yield from (f"  - {key}:", *(f"    - {_words(one)}" for one in value))
            elif value not in (None, "", [], {}):
                yield f"  - {key}: {_words(value)}"


def _words(value: Any) -> str:
    """A value in one line; large numbers are sizes in bytes."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items() if one not in (None, "", [], {}))
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return size(value) if isinstance(value, int) and value > MIB else str(value)
