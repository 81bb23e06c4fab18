"""`packtrain env [CONFIG]`: what this machine is and has, as a list to paste into a bug report, and whether that will do.

Everything is asked at once and answered within ten seconds; what does not answer is a line of the report. Nothing is started
that stays, and nothing secret is shown (redact.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import Queue
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.markup import escape

from packtrain.config.schema import RunConfig
from packtrain.diagnose import gpus, host, network, software
from packtrain.diagnose.devices import ask_driver, ask_torch, has_nvidia
from packtrain.diagnose.facts import (
    Check,
    Facts,
    Folder,
    Gpu,
    Host,
    HostName,
    Layer,
    NetworkFacts,
    RunNeeds,
    Status,
    Torch,
    layer_of,
    needs_of,
    size,
)
from packtrain.diagnose.probe import LIMIT_S, Probe, Unanswered, kill_commands
from packtrain.diagnose.redact import Redactor
from packtrain.errors import CheckFailed
from packtrain.plan.network import LOOPBACK, Interface, Network, read_network, silence_for
from packtrain.plan.shapes import hub_home
from packtrain.plan.surroundings import look_around

BUDGET_S = 8.5
"""From the start of this process to the last answer."""
_LEAST_FOR_TORCH_S, _NAME_S = 3.0, 3.0
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
CHECKS = (
    *(host.check_run, software.check_packages, gpus.check_torch, software.check_attention, software.check_deepspeed),
    *(gpus.check_driver, gpus.check_number, gpus.check_health, gpus.check_use, gpus.check_gpu_memory),
    *(network.check_infiniband, network.check_interfaces, network.check_host_name, network.check_name_server),
    *(network.check_main_address, host.check_limits, host.check_memory, host.check_cores, host.check_clock),
    *(host.check_folders, host.check_variables),
)
"""In the order in which they are shown: each takes facts and needs, and yields what it has to say."""
Value = TypeVar("Value")


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
    return [check for one in CHECKS for check in one(facts, needs)]


def gather(load: Callable[[], RunConfig | None]) -> tuple[Facts, RunNeeds]:
    """The facts of this machine and what the run whose config `load` returns needs of it.

    Takes until ten seconds after this process started; the machine is asked while the config is loaded. Raises what `load`
    raises.
    """
    layer: Queue[Layer] = Queue()
    lacks: list[str] = []

    def answer(what: str, probe: Probe[Value], otherwise: Value) -> Value:
        try:
            return probe.answer()
        except Unanswered as refusal:
            lacks.append(f"{what}: {refusal}")
            return otherwise

    def named(name: str) -> Probe[HostName]:
        return Probe(lambda: network.resolved(name), _NAME_S)

    def name_of(name: str, probe: Probe[HostName]) -> HostName:
        try:
            return probe.answer()
        except Unanswered as refusal:
            return HostName(name, lack=f"the name server gives {refusal}")

    def layer_after_driver() -> Layer:
        driver.wait()
        return layer.get()

    try:
        driver = Probe(lambda: ask_driver(LIMIT_S), LIMIT_S + 0.5)
        torch_s = max(_LEAST_FOR_TORCH_S, BUDGET_S - age_s())
        torch = Probe(lambda: ask_torch(torch_s, layer_after_driver), torch_s + 0.3)
        installed, limits, clock = software.SoftwareProbes(), Probe(host.read_host), Probe(host.clock_kept)
        own_name, interfaces, verbs = (
            named(socket.gethostname()),
            Probe(lambda: read_network(None)),
            Probe(network.read_verbs),
        )
        silence = Probe(lambda: silence_for(LOOPBACK) or silence_for(socket.gethostname()), _NAME_S)
        config = load()
        layer.put(Layer() if config is None else layer_of(config))
        disks = {
            name: (path, Probe(lambda name=name, path=path: host.read_folder(name, path)))
            for name, path in _folders(config, os.environ).items()
        }
        found_gpus = answer("GPUs", driver, replace(Facts().gpus, present=has_nvidia(), error="no answer"))
        if found_gpus.error:
            lacks.append(f"GPU driver: {found_gpus.error}")
        needs = RunNeeds() if config is None else _needs(config, found_gpus.gpus)
        main = named(needs.main_address) if needs.main_address else None
        links = answer("network", interfaces, HostNetwork())
        facts = Facts(
            software=installed.answer(lacks),
            gpus=found_gpus,
            network=NetworkFacts(
                host=name_of(socket.gethostname(), own_name),
                main=main and name_of(str(needs.main_address), main),
                interfaces=links.interfaces,
                ports=links.ports,
                verbs=answer("/dev/infiniband", verbs, ()),
                environment={key: value for key, value in os.environ.items() if key.startswith(network.PREFIXES)},
                silence=answer("name server", silence, ""),
                taken=network.taken(needs.port),
            ),
            host=replace(
                answer("limits", limits, Host()),
                folders=tuple(_folder(name, path, probe) for name, (path, probe) in disks.items()),
                clock_kept=answer("timedatectl", clock, None),
            ),
            torch=answer("torch", torch, Torch(error="no answer")),
        )
        return replace(facts, lacks=tuple(lacks)), needs
    finally:
        kill_commands()


def _needs(config: RunConfig, found: Sequence[Gpu]) -> RunNeeds:
    """As for a launch, without asking for GPUs again, and without waiting for a silent name server."""

    def read(main: str | None) -> HostNetwork:
        try:
            return Probe(lambda: read_network(main), _NAME_S).answer()
        except Unanswered:
            return read_network(None)

    return needs_of(config, replace(look_around([gpu.memory or 0 for gpu in found]), network=read))


def _folder(name: str, path: str, probe: Probe[Folder]) -> Folder:
    try:
        return probe.answer()
    except Unanswered as refusal:
        return Folder(name, path, lack=str(refusal))


def _folders(config: RunConfig | None, env: Mapping[str, str]) -> dict[str, str]:
    """Where a run writes, by config key or variable; without a config the folder that packtrain is called in."""
    cache = config.data.cache_dir if config else None
    return {
        "trainer.output_dir": config.trainer.output_dir if config else ".",
        "data.cache_dir": cache or env.get("PACKTRAIN_CACHE") or "~/.cache/packtrain",
        "HF_HOME": hub_home(env),
    }


def age_s() -> float:
    """Seconds since this process was started, imports and config included."""
    return max(0.0, time.time() - psutil.Process().create_time())


def report_json(facts: Facts, needs: RunNeeds, checks: Sequence[Check], redactor: Redactor) -> dict[str, Any]:
    """The whole report as plain containers; the keys up to `checks` are a promise to users."""
    plain, torch = facts.to_json(), facts.torch
    built = {"cuda": torch.cuda, "cudnn": torch.cudnn, "nccl": torch.nccl, "driver": facts.gpus.driver}
    installed = {**facts.software.packages, **built, **facts.software.tools}
    backend, why = software.chosen_backend(facts, needs)
    document = {
        "versions": {"python": facts.software.python, "platform": facts.software.platform, **installed},
        "devices": plain["gpus"]["gpus"] or [{"index": at, **one} for at, one in enumerate(plain["torch"]["devices"])],
        "attention": software.attention_json(facts, needs),
        "checks": [{"name": one.name, "status": one.status, "found": one.found, "fix": one.fix} for one in checks],
        "attention_choice": {"backend": backend, "why": why},
        "trl": software.trl_lines(facts.software, torch),
        "facts": plain,
    }
    return redactor.plain(document)


def _print_report(facts: Facts, needs: RunNeeds, checks: Sequence[Check], redactor: Redactor) -> None:
    """Both blocks on stdout, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nCopy-paste the following information when reporting an issue:\n")
    for name, value in _lines(facts, needs).items():
        value = redactor.plain({name: value})[name]
        if isinstance(value, dict):
            value = [f"{key}: {inner}" for key, inner in value.items()]
        several = "".join(f"\n  - {redactor.text(one)}" for one in value) if isinstance(value, list) else f" {value}"
        console.print(escape(f"- {name}:{several}"), emoji=False)
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


def _lines(facts: Facts, needs: RunNeeds) -> dict[str, Any]:
    """Name → text, or several texts, of every line: those of `trl env` first."""
    torch, driver, net, own = facts.torch, facts.gpus, facts.network, facts.host
    packages, commit = facts.software.packages, facts.software.commits.get("packtrain")
    kernels = [f"{name}: {lack or 'right on this GPU'}" for name, lack in (torch.kernels or {}).items()]
    takes = f"up to {driver.cuda}" if driver.cuda else "none"
    limits = [
        f"{name} {'none' if one == -1 else one}" for name, one in (("memlock", own.memlock), ("nofile", own.nofile))
    ]
    names = ", ".join(net.host.addresses) or net.host.lack
    return {
        **software.trl_lines(facts.software, torch),
        "packtrain version": f"{packages.get('packtrain') or 'not installed'}{f'+{commit}' if commit else ''}",
        "torch, as imported": f"{torch.version or 'not imported'}{f' ({torch.error})' if torch.error else ''}",
        "CUDA": f"torch is built for {torch.cuda or 'none'}, the driver takes {takes}",
        "NVIDIA driver": driver.driver or driver.error or "none",
        "NCCL, cuDNN versions": f"{torch.nccl or 'none'}, {torch.cudnn or 'none'}",
        "flash-attn versions": ", ".join(
            f"{at}: {packages.get(name) or 'not installed'}"
            for at, name in ((2, "flash-attn"), (3, "flash-attn-3"), (4, "flash-attn-4"))
        ),
        "Attention of packed rows": "{} ({})".format(*software.chosen_backend(facts, needs)),
        "Flash kernels": kernels or "not tried: torch uses no GPU here",
        "Build tools": ", ".join(f"{name}: {version or 'none'}" for name, version in facts.software.tools.items()),
        "GPUs": [_gpu(gpu) for gpu in driver.gpus] or "none",
        "RDMA devices": [network.port_words(port) for port in net.ports] or "none",
        "Network interfaces": [*map(_interface, net.interfaces)] or "not known",
        "Network settings": [f"{one.name}{f'={one.value}' if one.value else ''}: {one.reason}" for one in needs.network]
        or "none of packtrain's",
        "Host name": f"{net.host.name}: {names}{f', in {own.container}' if own.container else ''}",
        "Limits": ", ".join(limits),
        "Shared memory": f"{size(own.shm_free)} free of {size(own.shm)} in /dev/shm",
        "Memory": f"{size(own.memory_free)} free of {size(own.memory)}; the machine has {size(own.machine_memory)}",
        "Cores": f"{own.cpus:g}",
        "Folders": [
            f"{one.setting}: {one.path}, {one.lack or f'{size(one.free)} free of {size(one.total)}'} {one.kind}".rstrip()
            for one in own.folders
        ],
        "Environment": dict(own.environment) or "nothing set that matters",
        "Not answered": list(facts.lacks) or "nothing",
    }


def _gpu(gpu: Gpu) -> str:
    parts = [f"{gpu.index}: {gpu.name}", size(gpu.memory), f"{size(gpu.memory_used)} in use"]
    figures = {
        "{} % busy": gpu.utilization,
        "{} °C": gpu.temperature,
        "{} MHz at most": gpu.clock,
        "{} W at most": gpu.power,
        "{} NVLinks": gpu.nvlinks,
        "{} PCIe lanes": gpu.width,
    }
    parts += [words.format(number) for words, number in figures.items() if number is not None]
    return ", ".join(
        [*parts, *(["ECC on" if gpu.ecc else "ECC off"] if gpu.ecc is not None else []), *(["MIG"] * gpu.mig)]
    )


def _interface(one: Interface) -> str:
    parts = ["up" if one.up else "down", *one.addresses, *([f"MTU {one.mtu}"] if one.mtu else [])]
    parts += [f"{one.speed} Mb/s"] if one.speed else []
    return f"{one.name}: {', '.join(parts)}{', default route' if one.default_route else ''}"
