"""Asks a machine everything at once and makes facts of what it answers within some seconds; starts nothing that stays."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue
from typing import TypeVar

from packtrain.config.schema import RunConfig
from packtrain.diagnose.checks.needs import Needs, layer_of, needs_of
from packtrain.diagnose.facts import gpus as nvidia
from packtrain.diagnose.facts import host, links, software
from packtrain.diagnose.facts.ask import NoAnswer, Question, command, end_commands, first_line
from packtrain.diagnose.facts.facts import Clock, Facts, Folder, Gpus, Host, Limits, Name, Network, Software, Torch
from packtrain.diagnose.facts.torch_side import Layer, read_facts
from packtrain.plan import interfaces as launch_network
from packtrain.plan.interfaces import LOOPBACK, read_network, silence_for
from packtrain.plan.shapes import hub_home
from packtrain.plan.surroundings import Surroundings, look_around

BUDGET_S = 8.5  # from the start of this process to the last answer
_LEAST_FOR_TORCH_S = 3.0
_NAME_LIMIT_S = 3.0
_SOCKET_VARIABLES = ("NCCL_", "GLOO_", "UCX_", "FI_")

Value = TypeVar("Value")


def gather(load: Callable[[], RunConfig | None]) -> tuple[Facts, Needs]:
    """The facts of this machine and what the run whose config `load` returns needs of it.

    Takes until ten seconds after this process started; the machine is asked while the config is loaded. Raises what `load`
    raises.
    """
    try:
        return _Inquiry(max(_LEAST_FOR_TORCH_S, BUDGET_S - age_s())).facts(load())
    finally:
        end_commands()


class _Inquiry:
    """Every question that needs no config is under way once this is made; `facts` collects the answers."""

    def __init__(self, torch_limit_s: float) -> None:
        self._layer: Queue[Layer] = Queue()
        self._lacks: list[str] = []
        self._smi = Question(lambda: nvidia.parse_details(command(nvidia.DETAILS)))
        self._short = Question(lambda: nvidia.parse_short(command(nvidia.SHORT)))
        self._topology = Question(lambda: nvidia.parse_topology(command(nvidia.TOPOLOGY)))
        self._nvlinks = Question(lambda: nvidia.parse_nvlinks(command(nvidia.NVLINKS)))
        self._torch = Question(lambda: self._ask_torch(torch_limit_s), torch_limit_s + 0.3)
        self._log = Question(lambda: nvidia.parse_kernel_log(command(("dmesg",)), host.uptime()))
        self._chrony = Question(lambda: host.parse_chrony(command(host.CHRONY)))
        self._timedate = Question(lambda: host.parse_timedate(command(host.TIMEDATE)))
        tools = {name: software.tool_command(name, os.environ) for name in software.TOOLS}
        self._tools = {name: Question(lambda argv=argv: command(argv)) for name, argv in tools.items()}
        self._limits = Question(host.read_limits)
        self._host = Question(lambda: links.resolved(socket.gethostname()), _NAME_LIMIT_S)
        self._silence = Question(lambda: silence_for(LOOPBACK) or silence_for(socket.gethostname()), _NAME_LIMIT_S)
        self._links = Question(lambda: read_network(None))
        self._states = Question(links.read_states)
        self._verbs = Question(links.read_verbs)

    def facts(self, config: RunConfig | None) -> tuple[Facts, Needs]:
        """Facts and needs, once every question is answered or given up."""
        self._layer.put(Layer() if config is None else layer_of(config))
        disks = [
            (name, path, Question(lambda name=name, path=path: host.read_folder(name, path)))
            for name, path in folders(config, os.environ).items()
        ]
        gpus = self._gpus()
        needs = Needs() if config is None else needs_of(config, self._surroundings(gpus))
        main = Question(lambda: links.resolved(needs.main_address or ""), _NAME_LIMIT_S) if needs.main_address else None
        machine, network = self._machine(disks), self._network(main)
        installed = software.read_software({name: self._tool(name) for name in self._tools})
        torch, installed = self._torch_and(installed)
        return Facts(installed, torch, gpus, network, machine, tuple(self._lacks)), needs

    def _ask_torch(self, limit_s: float) -> str:
        argv = (sys.executable, "-m", "packtrain.diagnose.facts.torch_side")
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
        return command(argv, limit_s, quiet, hold=self._layer_after_smi)

    def _layer_after_smi(self) -> str:
        for question in (self._smi, self._short):
            question.wait()
        return json.dumps(asdict(self._layer.get()))

    def _gpus(self) -> Gpus:
        """By the whole description, or by the short list where that does not come."""
        try:
            found = self._smi.answer()
        except NoAnswer as refusal:
            self._lacks.append(f"nvidia-smi -q -x: {refusal}")
            try:
                found = self._short.answer()
            except NoAnswer:
                found = Gpus(present=has_nvidia(), error=str(refusal))
        if not found.gpus and not found.error:
            found = replace(found, present=has_nvidia(), error="No devices were found")
        if found.gpus:
            topology = self._answer("nvidia-smi topo -m", self._topology, "")
            uplinks = self._answer("nvidia-smi nvlink --status", self._nvlinks, {})
            found = replace(found, topology=topology, gpus=nvidia.with_nvlinks(found.gpus, uplinks))
        try:
            return replace(found, events=self._log.answer())
        except NoAnswer as refusal:
            self._lacks.append(f"dmesg: {refusal}")
            return replace(found, events_lack=str(refusal))

    def _machine(self, disks: list[tuple[str, str, Question[Folder]]]) -> Host:
        clock = self._answer("chronyc", self._chrony, Clock())
        if clock.synchronised is None:
            clock = self._answer("timedatectl", self._timedate, Clock())
        found = []
        for name, path, question in disks:
            try:
                found.append(question.answer())
            except NoAnswer as refusal:
                found.append(Folder(name, path, lack=str(refusal)))
        return Host(
            limits=self._answer("limits", self._limits, Limits()),
            folders=tuple(found),
            clock=clock,
            around=host.surroundings_of(os.environ),
            environment=host.told(os.environ),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        )

    def _network(self, main: Question[Name] | None) -> Network:
        name = socket.gethostname()
        found = self._answer("network", self._links, launch_network.Network())
        return Network(
            host=self._name(name, self._host),
            main=None if main is None else self._name("the first machine", main),
            interfaces=found.interfaces,
            ports=found.ports,
            states=self._answer("/sys/class/infiniband", self._states, {}),
            verbs=self._answer("/dev/infiniband", self._verbs, ()),
            environment={key: value for key, value in os.environ.items() if key.startswith(_SOCKET_VARIABLES)},
            silence=self._answer("name server", self._silence, ""),
        )

    def _surroundings(self, gpus: Gpus) -> Surroundings:
        """As for a launch, without asking for GPUs again, and without waiting for a silent name server."""

        def network(main: str | None) -> launch_network.Network:
            try:
                return Question(lambda: read_network(main), _NAME_LIMIT_S).answer()
            except NoAnswer:
                return read_network(None)

        return replace(look_around([gpu.memory or 0 for gpu in gpus.gpus]), network=network)

    def _name(self, name: str, question: Question[Name]) -> Name:
        try:
            return question.answer()
        except NoAnswer as refusal:
            return Name(name, lack=f"the name server gives {refusal}")

    def _tool(self, name: str) -> str | None:
        try:
            said = self._tools[name].answer()
        except NoAnswer as refusal:
            self._lacks.append(f"{name}: {refusal}")
            return None
        return software.tool_version(name, said) or first_line(said)

    def _torch_and(self, installed: Software) -> tuple[Torch, Software]:
        """What torch says, and the software with accelerate's config as accelerate reads it."""
        try:
            torch, accelerate = read_facts(self._torch.answer())
            if torch.version is None and not torch.error:
                torch = replace(torch, error="its process said nothing")
        except NoAnswer as refusal:
            torch, accelerate = read_facts(refusal.output, str(refusal))
        return torch, installed if accelerate is None else replace(installed, accelerate=accelerate)

    def _answer(self, name: str, question: Question[Value], otherwise: Value) -> Value:
        try:
            return question.answer()
        except NoAnswer as refusal:
            self._lacks.append(f"{name}: {refusal}")
            return otherwise


def folders(config: RunConfig | None, env: Mapping[str, str]) -> dict[str, str]:
    """Where a run writes, by config key or variable; without a config the folder that packtrain is called in."""
    cache = config.data.cache_dir if config else None
    return {
        "trainer.output_dir": config.trainer.output_dir if config else ".",
        "data.cache_dir": cache or env.get("PACKTRAIN_CACHE") or "~/.cache/packtrain",
        "HF_HOME": hub_home(env),
    }


def has_nvidia(root: Path = Path("/")) -> bool:
    """Whether the system shows NVIDIA hardware or its driver."""
    if (root / "proc/driver/nvidia").exists() or any((root / "dev").glob("nvidia[0-9]*")):
        return True
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith(("0x0300", "0x0302")):
            return True
    return False


def age_s() -> float:
    """Seconds since this process was started, imports and config included."""
    import psutil

    try:
        return max(0.0, time.time() - psutil.Process().create_time())
    except psutil.Error:
        return 0.0
