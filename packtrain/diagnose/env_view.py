"""Facts and checks as a person reads them: a list to paste into a bug report, then what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from packtrain.diagnose.checks.check import Check, Status, size
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.checks.software import attention_json, chosen_backend
from packtrain.diagnose.facts.facts import Facts, Gpu
from packtrain.diagnose.facts.software import trl_lines
from packtrain.diagnose.redact import Redactor
from packtrain.plan.interfaces import Interface, Port

_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_MOST_INTERFACES = 24


def report_json(facts: Facts, needs: Needs, checks: Sequence[Check], redactor: Redactor) -> dict[str, Any]:
    """The whole report as plain containers; the keys up to `checks` are a promise to users."""
    backend, why = chosen_backend(facts, needs)
    document = {
        "versions": _versions(facts),
        "devices": _devices(facts),
        "attention": attention_json(facts, needs),
        "checks": [check.to_json() for check in checks],
        "attention_choice": {"backend": backend, "why": why},
        "trl": trl_lines(facts.software, facts.torch),
        "facts": facts.to_json(),
    }
    return redactor.plain(document)


def print_report(facts: Facts, needs: Needs, checks: Sequence[Check], redactor: Redactor) -> None:
    """Both blocks on stdout, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nCopy-paste the following information when reporting an issue:\n")
    for name, value in lines(facts, needs).items():
        console.print(escape(_listed(name, redactor.plain({name: value})[name], redactor)), emoji=False)
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


def lines(facts: Facts, needs: Needs) -> dict[str, Any]:
    """Name → text, or several texts, of every line: those of `trl env` first."""
    software, torch, gpus = facts.software, facts.torch, facts.gpus
    packages, limits = software.packages, facts.host.limits
    commit = software.commits.get("packtrain")
    backend, why = chosen_backend(facts, needs)
    kernels = [f"{name}: {lack or 'right on this GPU'}" for name, lack in (torch.kernels or {}).items()]
    cuda = (
        f"torch is built for {torch.cuda or 'none'}, the driver takes {f'up to {gpus.cuda}' if gpus.cuda else 'none'}"
    )
    return {
        **trl_lines(software, torch),
        "packtrain version": f"{packages.get('packtrain') or 'not installed'}{f'+{commit}' if commit else ''}",
        "torch, as imported": f"{torch.version or 'not imported'}{f' ({torch.error})' if torch.error else ''}",
        "CUDA": cuda,
        "NVIDIA driver": gpus.driver or gpus.error or "none",
        "NCCL version": torch.nccl or "none",
        "cuDNN version": torch.cudnn or "none",
        "flash-attn versions": ", ".join(
            f"{number}: {packages.get(name) or 'not installed'}"
            for number, name in (("2", "flash-attn"), ("3", "flash-attn-3"), ("4", "flash-attn-4"))
        ),
        "Attention of packed rows": f"{backend} ({why})",
        "Flash kernels": kernels or "not tried: torch uses no GPU here",
        "Build tools": ", ".join(f"{name}: {version or 'none'}" for name, version in software.tools.items()),
        "GPUs": [_gpu(gpu) for gpu in gpus.gpus] or "none",
        "GPU links": gpus.topology.splitlines() or "not known",
        "RDMA devices": [_port(facts, port) for port in facts.network.ports] or "none",
        "Network interfaces": [*map(_interface, facts.network.interfaces)][:_MOST_INTERFACES] or "not known",
        "Network settings": [f"{one.name}{f'={one.value}' if one.value else ''}: {one.reason}" for one in needs.network]
        or "none of packtrain's",
        "Host name": f"{facts.network.host.name}: {', '.join(facts.network.host.addresses) or facts.network.host.lack}",
        "Limits": f"locked memory {_limit(limits.memlock, size)}, open files {_limit(limits.nofile, str)}",
        "Shared memory": f"{size(limits.shm_free)} free of {size(limits.shm)} in /dev/shm",
        "Memory": f"{size(limits.memory_free)} free of {size(limits.memory)}, cgroup limit {_or_none(limits.memory_limit)}",
        "Cores": f"{limits.cpus}, cgroup limit {'none' if limits.cpu_limit is None else f'{limits.cpu_limit:g}'}"
        + ("" if facts.host.load is None else f", {facts.host.load:.1f} in use"),
        "Folders": [
            f"{one.setting}: {one.path}, {one.lack or f'{size(one.free)} free of {size(one.total)}'} {one.kind}".rstrip()
            for one in facts.host.folders
        ],
        "Slurm and container": [f"{name}: {value}" for name, value in facts.host.around.items()] or "neither",
        "Environment": dict(facts.host.environment) or "nothing set that matters",
        "Not answered": list(facts.lacks) or "nothing",
    }


def _versions(facts: Facts) -> dict[str, str | None]:
    software, torch = facts.software, facts.torch
    built = {"cuda": torch.cuda, "cudnn": torch.cudnn, "nccl": torch.nccl, "driver": facts.gpus.driver}
    return {"python": software.python, "platform": software.platform, **software.packages, **built, **software.tools}


def _devices(facts: Facts) -> list[dict[str, Any]]:
    """The GPUs as the driver sees them, else the accelerators that torch sees."""
    if facts.gpus.gpus:
        return list(facts.to_json()["gpus"]["gpus"])
    return [{"index": at, **one} for at, one in enumerate(facts.to_json()["torch"]["devices"])]


def _listed(name: str, value: Any, redactor: Redactor) -> str:
    """A line of the list; of several values one below the other."""
    if isinstance(value, dict):
        return f"- {name}:" + "".join(redactor.text(f"\n  - {key}: {inner}") for key, inner in value.items())
    if isinstance(value, list):
        return f"- {name}:" + "".join(f"\n  - {inner}" for inner in value)
    return f"- {name}: {value}"


def _gpu(gpu: Gpu) -> str:
    parts = [f"{gpu.index}: {gpu.name}", size(gpu.memory), f"{size(gpu.memory_used)} in use"]
    parts += [f"{gpu.utilization} % busy"] if gpu.utilization is not None else []
    parts += [f"{gpu.temperature} °C"] if gpu.temperature is not None else []
    if limits := [f"{amount} {unit}" for amount, unit in ((gpu.clock, "MHz"), (gpu.power, "W")) if amount]:
        parts.append(f"{' and '.join(limits)} at most")
    parts += [f"{gpu.nvlinks} NVLinks"] if gpu.nvlinks else []
    parts += [f"PCIe {gpu.width} of {gpu.widest} lanes"] if gpu.width and gpu.widest else []
    parts += ["ECC on" if gpu.ecc else "ECC off"] if gpu.ecc is not None else []
    return ", ".join(parts + (["MIG"] if gpu.mig else []))


def _port(facts: Facts, port: Port) -> str:
    rate = "rate not known" if port.rate is None else f"{port.rate:g} Gb/s"
    interfaces = f", {', '.join(port.interfaces)}" if port.interfaces else ""
    name = f"{port.device}:{port.number}"
    state = facts.network.states.get(name, "ACTIVE" if port.active else "DOWN")
    return f"{name}: {port.layer}, {state}, {rate}{interfaces}"


def _interface(one: Interface) -> str:
    parts = ["up" if one.up else "down", *one.addresses]
    parts += [f"MTU {one.mtu}"] if one.mtu else []
    parts += [f"{one.speed} Mb/s"] if one.speed else []
    return f"{one.name}: {', '.join(parts)}{', default route' if one.default_route else ''}"


def _limit(value: int | None, words: Any) -> str:
    return "none" if value == -1 else "not known" if value is None else words(value)


def _or_none(value: int | None) -> str:
    return "none" if value is None else size(value)
