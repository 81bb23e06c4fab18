"""`packtrain env [CONFIG]`: what this machine is and has, as a list to paste into a bug report, and whether that will do.

Everything is asked at once and answered within ten seconds; what does not answer is a line of the report. Nothing is started
that stays, and nothing secret is shown (packtrain/redact.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
from huggingface_hub import constants
from rich.console import Console
from rich.markup import escape

from packtrain.config.schema import RunConfig
from packtrain.diagnose import devices, host
from packtrain.diagnose.facts import MIB, Check, Facts, Folder, Gpus, Host, RunNeeds, Status, Torch, size
from packtrain.diagnose.timeouts import PROBE_LIMIT_S, Probe, Unanswered, Value, kill_processes
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.plan.known_model import plan_precision
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.memory import ADAPTER_BYTES, BYTES, Memory, estimate
from packtrain.plan.network_settings import LOOPBACK, HostNetwork, read_network, silence_for
from packtrain.plan.surroundings import Surroundings, look_around
from packtrain.redact import Redactor

BUDGET_S = 8.5
"""Seconds from the start of this process to the last answer."""
NAME_S = 2.0
"""Seconds to wait for a name server."""
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
    """The results of all checks of a machine and a run."""
    return [result for check in (*host.CHECKS, *devices.CHECKS) for result in check(facts, needs)]


def gather(load: Callable[[], RunConfig | None]) -> tuple[Facts, RunNeeds]:
    """The facts of this machine and what the run whose config `load` returns needs of it.

    Takes until ten seconds after this process started. Raises what `load` raises.
    """
    config, lacks = load(), []
    dtype, cache = (_dtype_of(config), config.data.cache_dir) if config else (RunNeeds().dtype, None)
    torch_s = max(_LEAST_FOR_TORCH_S, BUDGET_S - age_s())
    folders = {
        "trainer.output_dir": config.trainer.output_dir if config else ".",
        "data.cache_dir": cache or os.environ.get("PACKTRAIN_CACHE") or "~/.cache/packtrain",
        "HF_HOME": constants.HF_HOME,
    }
    probes: dict[str, Probe] = {
        "GPU driver": Probe(lambda: devices.ask_driver(PROBE_LIMIT_S), PROBE_LIMIT_S + 0.5),
        "torch": Probe(lambda: devices.ask_torch(torch_s, dtype), torch_s + 0.3),
        "limits": Probe(host.read_host),
        "network": Probe(lambda: read_network(None)),
        "name server": Probe(lambda: silence_for(LOOPBACK) or silence_for(socket.gethostname()), NAME_S),
        **{name: Probe(partial(host.read_folder, name, path)) for name, path in folders.items()},
    }

    def answer(name: str, otherwise: Value) -> Value:
        try:
            return probes[name].answer()
        except Unanswered as refusal:
            lacks.append(f"{name}: {refusal}")
            return otherwise

    try:
        silence = answer("name server", "")
        gpus = answer("GPU driver", Gpus(error="no answer"))
        lacks += [f"GPU driver: {gpus.error}"] if gpus.error else []
        needs = RunNeeds() if config is None else needs_of(config, _surroundings(gpus))
        unknown = [Folder(name, path, lack="no answer within 5 s") for name, path in folders.items()]
        machine = replace(answer("limits", Host()), folders=tuple(answer(one.setting, one) for one in unknown))
        links, torch = answer("network", HostNetwork()), answer("torch", Torch(error="no answer"))
        lacks += [f"torch: {torch.error}"] if torch.error and torch.version else []
        return Facts(host.read_software(), torch, gpus, links, silence, machine, tuple(lacks)), needs
    finally:
        kill_processes()


def _surroundings(gpus: Gpus) -> Surroundings:
    """The surroundings as for a launch, but GPUs are not queried again, and a silent name server is not waited for."""

    def read(main: str | None) -> HostNetwork:
        try:
            return Probe(lambda: read_network(main), NAME_S).answer()
        except Unanswered:
            return read_network(None)

    return replace(look_around([gpu.memory or 0 for gpu in gpus.gpus]), network=read)


def needs_of(config: RunConfig, surroundings: Surroundings) -> RunNeeds:
    """The needs of a run on a machine with these surroundings."""
    topology = config.topology
    needs = RunNeeds(
        configured=True,
        nodes=topology.nodes or 1,
        per_node=topology.gpus_per_node or max(surroundings.gpus, 1),
        strategy=config.strategy.name,
        attention=config.model.attention,
        packed=config.packing.mode != "padding",
        dtype=_dtype_of(config),
        environment=topology.variables,
    )
    try:
        launch = plan_launch(config, surroundings, config.objective.kind)
    except PacktrainError as error:
        return replace(needs, memory="the run cannot be planned", problems=error.problems)
    memory = estimate(config, launch.num_processes, surroundings.gpu_memory)
    return replace(
        needs,
        nodes=launch.nodes,
        per_node=launch.gpus_per_node,
        network=launch.network,
        memory=memory,
        disk=_on_disk(config, memory) if isinstance(memory, Memory) else 0,
        obstacles=launch.obstacles,
    )


def _on_disk(config: RunConfig, memory: Memory) -> int:
    """Bytes of the trained model and all checkpoints (model and AdamW's two float32 numbers); a stopped run writes one more."""
    width = BYTES.get(config.model.dtype, 2)
    final = memory.trained * ADAPTER_BYTES if config.peft.kind == "lora" else memory.parameters * width
    kept = 1 if config.trainer.checkpoint_every is None else (config.trainer.keep_checkpoints or 0) + 1
    return final + kept * (final + 8 * memory.trained)


def _dtype_of(config: RunConfig) -> str:
    """What the attention layers compute in on a GPU, by torch's name."""
    dtype = config.model.dtype
    return "bfloat16" if dtype == "auto" or plan_precision(config, dtype, gpu=True)[0] == "bf16" else dtype


def age_s() -> float:
    """Seconds since this process was started, imports and config included."""
    return max(0.0, time.time() - psutil.Process().create_time())


def report_json(facts: Facts, needs: RunNeeds, checks: Sequence[Check], redactor: Redactor) -> dict[str, Any]:
    """The whole report as plain containers; the keys up to `checks` are a promise to users."""
    plain, torch, software = asdict(facts), facts.torch, facts.software
    built = {"cuda": torch.cuda, "nccl": torch.nccl, "driver": facts.gpus.driver}
    document = {
        "versions": {"python": software.python, "platform": software.platform, **software.packages, **built},
        "devices": plain["gpus"]["gpus"] or [{"index": at, "name": name} for at, name in enumerate(torch.devices)],
        "attention": devices.attention_json(facts, needs),
        "checks": [asdict(check) for check in checks],
        "trl": host.trl_lines(software, torch),
        "facts": plain,
    }
    return redactor.plain(document)


def _print_report(facts: Facts, needs: RunNeeds, checks: Sequence[Check], redactor: Redactor) -> None:
    """Both blocks on stdout, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nCopy-paste the following information when reporting an issue:\n")
    facts_by_name = {**host.trl_lines(facts.software, facts.torch), **asdict(facts)}
    facts_by_name["Network settings"] = {one.name: f"{one.value or 'as it is'}: {one.reason}" for one in needs.network}
    for name, value in redactor.plain(facts_by_name).items():
        for line in _list_lines(name, value):
            console.print(escape(redactor.text(line)), emoji=False)
    console.print("\nChecks:\n")
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        found, fix = redactor.text(check.found), redactor.text(check.fix)
        print_check(console, check.status, f"{check.name:<{width}}", found, fix)
    failed, warned = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    console.print(f"\n{failed} failed, {warned} to look at, {len(checks) - failed - warned} ok")


def print_check(console: Console, status: Status, name: str, found: str, fix: str) -> None:
    """A check in one line, and its fix in another."""
    console.print(f"[{_COLOURS[status]}]{status:<4}[/]  {escape(f'{name}  {found}')}", emoji=False)
    if status != "ok" and fix:
        console.print(f"      {' ' * len(name)}  → {escape(fix)}", emoji=False)


def _list_lines(name: str, value: Any, indent: str = "") -> Iterator[str]:
    """What is known of `value`, as a nested list."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield f"{indent}- {name}:"
        yield from (f"{indent}  - {_words(item)}" for item in value)
    elif isinstance(value, Mapping) and value:
        yield f"{indent}- {name}:"
        for key, inner in value.items():
            yield from _list_lines(key, inner, f"{indent}  ")
    elif value not in (None, "", [], {}):
        yield f"{indent}- {name}: {_words(value)}"


def _words(value: Any) -> str:
    """A value in one line; large numbers are sizes in bytes."""
    if isinstance(value, Mapping):
        known = ((name, inner) for name, inner in value.items() if inner not in (None, "", [], {}))
        return ", ".join(f"{name} {_words(inner)}" for name, inner in known)
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return size(value) if isinstance(value, int) and value > MIB else str(value)
