"""`packtrain env CONFIG --cluster`: every machine of the run makes its report, machine 0 compares them and shows the result.

The machines meet as launchers do before a run (launch/arrival.py), but here nobody is sent away for being different, and
who is missing holds up the others for LIMIT_S seconds only. Links are measured when machine 0 says so, in rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from packtrain.config.schema import RunConfig
from packtrain.diagnose.checks.all import check_all
from packtrain.diagnose.checks.check import Check
from packtrain.diagnose.cluster.doors import next_door, opened
from packtrain.diagnose.cluster.hub import Hub
from packtrain.diagnose.cluster.station import REACH_S, Station, reached
from packtrain.diagnose.cluster.view import print_comparison
from packtrain.diagnose.env_view import report_json
from packtrain.diagnose.facts.ask import NoAnswer, Question, end_commands
from packtrain.diagnose.facts.fingerprints import code_fingerprint, data_fingerprints
from packtrain.diagnose.facts.gather import age_s, gather
from packtrain.diagnose.facts.host import told
from packtrain.diagnose.facts.output_folder import Output, output_of, without_guess
from packtrain.diagnose.redact import Redactor
from packtrain.errors import PeerFailed, UserError
from packtrain.launch.arrival import arrive
from packtrain.launch.exchange import Event, Exchange
from packtrain.launch.execute import execute
from packtrain.launch.line import BEAT_S
from packtrain.launch.members import Member, digest_of, shared_values, shared_versions
from packtrain.launch.place import Place, own_addresses
from packtrain.launch.wire import LINE_LIMIT, Wire, error_of
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import look_around
from packtrain.plan.topology import GPUS_PER_NODE, Processes, choose_processes
from packtrain.run_folder import environment

LIMIT_S = 20.0
"""How long a machine is waited for, from the start of this process; topology.join_timeout may shorten it."""
_LEAST_S = 3.0
_REPORT_S = 15.0
_FILES_S = 8.0
_JOB = "packtrain env --cluster"
_POLL_S = 0.05
_SHARES = (0.6, 0.4)  # of the time for machine 0: at the run's port, before and after the one beside it is tried
_SSH = 22
_REFUSED = "refused"


def show_cluster(load: Callable[[], RunConfig | None], arguments: Sequence[str], *, as_json: bool) -> int:
    """Meets the other machines of the run whose config `load` returns; machine 0 prints. Returns the exit code of all.

    In a Slurm job `packtrain env arguments…` is started on all of its machines. Raises UserError where the config is of
    one machine; PeerFailed where machine 0 is missing or leaves.
    """
    config = load()
    if config is None:
        raise UserError("no config", where="--cluster", fix="Name the config whose machines are to be compared.")
    # without asking for GPUs: a machine that has lost one is to be compared, too
    around = replace(look_around([]), driver=False)
    processes = choose_processes(config.topology, around)
    if processes.role == "spread":
        return execute(plan_launch(config, around, "env", arguments), config, int)
    _check(processes)
    me, place = _member(processes, around.host), _place(processes, config)
    report = Question(lambda: own_report(config), _REPORT_S)
    station = Station()
    env = partial(settings_of, config)
    try:
        if me.node:
            return _Spoke(me, place, report, station, env, output_of(config)).run()
        found = Hub(me, place, lambda: answer(report), station, _REPORT_S, env, output_of(config)).run()
    finally:
        station.close()
        end_commands()  # a process of an all-reduce that hangs
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_comparison(found)
    return found.exit_code


def own_report(config: RunConfig) -> dict[str, Any]:
    """This machine's report as `env --json` has it, with what else is compared under `own`; nothing secret is in it."""
    files = Question[dict[str, Any]](lambda: {"code": code_fingerprint(), "data": data_fingerprints(config)}, _FILES_S)
    facts, needs = gather(lambda: config)
    redactor = Redactor(os.environ, needs.environment)
    checks = without_guess(check_all(facts, needs))
    try:
        prints = files.answer()
    except NoAnswer as refusal:
        prints = {"code": "", "data": data_fingerprints(config, lambda _: "")}
        what = f"files of code, model and data are not compared: {refusal}"
        checks.append(Check("files", "warn", what, "look at the disks they are on (dmesg, nfsstat)"))
    own = {
        "versions": shared_versions(environment()),
        "config": {key: shown(key, value, redactor) for key, value in shared_values(config).items()},
        "network": {one.name: one.value for one in needs.network if one.value is not None},
        "environment": {name: shown(name, value, redactor) for name, value in told(os.environ).items()},
        "code": prints["code"],
        "data": {redactor.text(key): value for key, value in prints["data"].items()},
    }
    return fitting({**report_json(facts, needs, checks, redactor), "own": own})


def settings_of(config: RunConfig, report: dict[str, Any]) -> dict[str, str]:
    """What the run's processes on this machine would be told of its network, as its report has found it."""
    chosen = report.get("own", {}).get("network", {})
    return {**chosen, **config.topology.variables}


def shown(name: str, value: str, redactor: Redactor) -> str:
    """The value of a variable or a key; of one with a secret in it a digest, too, by which two can be told apart."""
    plain = redactor.plain({name: value})[name]
    return plain if plain == value else f"{plain} ({digest_of(value)})"


def fitting(report: dict[str, Any]) -> dict[str, Any]:
    """The report as one line of the wire: what nobody compares is left out of one that is too long."""
    for name, key in (("gpus", "events"), ("gpus", "topology"), ("network", "interfaces")):
        if len(json.dumps(report)) < LINE_LIMIT // 2:
            break
        report["facts"][name][key] = "" if key == "topology" else []
    return report


def answer(report: Question[dict[str, Any]]) -> dict[str, Any]:
    """The report, or why there is none."""
    try:
        return report.answer()
    except NoAnswer as refusal:
        return {"error": str(refusal)}


class _Spoke:
    """Any machine but the first: reports, measures what it is told to, and ends with machine 0's exit code."""

    def __init__(
        self,
        me: Member,
        place: Place,
        report: Question[dict[str, Any]],
        station: Station,
        env: Callable[[dict[str, Any]], dict[str, str]],
        output: Output,
    ) -> None:
        self._me, self._place, self._report, self._station, self._env = me, place, report, station, env
        self._output = output
        self._exchange = _Ear()

    def run(self) -> int:
        """Until machine 0 says that it is done. Raises PeerFailed where it does not answer any more."""
        try:
            wire, names = self._arrive()
            print(f"{names[0]} shows the comparison", file=sys.stderr, flush=True)
            report = answer(self._report)
            run_port = {"run_port": self._place.port, "no_port": self._station.open(self._place.port)}
            here = {"port": self._station.port, "word": self._station.word, "clock": time.time(), **run_port}
            self._exchange.send(wire, {"kind": "report", "report": report, **here})
            return self._serve(wire)
        finally:
            self._exchange.close()

    def _arrive(self) -> tuple[Wire, dict[int, str]]:
        """As for a run; where machine 0 is silent by the port beside the run's. Raises PeerFailed where it stays so."""
        begun, limit = time.monotonic(), self._place.timeout_s
        wait, beside = max(limit - 2 * REACH_S, limit / 2), next_door(self._place)
        for share in _SHARES:
            try:
                return arrive(self._me, replace(self._place, timeout_s=share * wait), self._exchange)
            except PeerFailed:
                if self._exchange.heard:
                    raise
            if share == _SHARES[0] and not reached(beside.address, beside.port):
                print(f"machine 0 gives no answer at port {self._place.port}, but at {beside.port}", file=sys.stderr)
                left = max(_LEAST_S, begun + limit - time.monotonic())
                return arrive(self._me, replace(beside, timeout_s=left), self._exchange)
        raise _silent(self._place, time.monotonic() - begun)

    def _serve(self, wire: Wire) -> int:
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._exchange.send(wire, {"kind": "beat"})
            for _, what in self._exchange.poll(_POLL_S):
                if isinstance(what, Exception):
                    raise _left(str(what))
                if what is not None and what["kind"] == "done":
                    return int(what["code"])
                if what is not None:
                    self._obey(what)
            while not self._station.results.empty():
                self._exchange.send(wire, self._station.results.get())
            if time.monotonic() - wire.heard > LIMIT_S:
                raise _left(f"silent for {LIMIT_S:.0f} s")

    def _obey(self, message: dict[str, Any]) -> None:
        if message["kind"] in ("knock", "measure"):
            ask = self._station.knock if message["kind"] == "knock" else self._station.measure
            address = message["address"] or self._place.address
            ask(int(message["number"]), address, int(message["port"]), str(message["word"]))
        elif message["kind"] == "look":
            name = str(message["name"])
            Question(lambda: self._station.results.put({"kind": "seen", "seen": self._output.sees(name)}))
        elif message["kind"] == "leave":
            self._station.leave()
        elif message["kind"] == "reduce":
            self._station.reduce({**message, "address": self._place.address}, self._env(answer(self._report)))
        elif message["kind"] == "stop":
            raise error_of(message)
        elif message["kind"] == "bye":
            raise _left(str(message["why"]))


class _Ear(Exchange):
    """Knows whether machine 0 has ever said a line: then it is not its port that is closed."""

    heard = False

    def poll(self, timeout_s: float) -> list[Event]:
        events = super().poll(timeout_s)
        self.heard = self.heard or any(isinstance(what, dict) for _, what in events)
        return events


def _silent(place: Place, waited_s: float) -> PeerFailed:
    """Where no machine 0 was found: whether it is the machine or a firewall that gives no answer."""
    ports = (place.port, next_door(place).port, _SSH)
    asked = [Question(lambda port=port: reached(place.address, port), 2 * REACH_S) for port in ports]
    said = {port: _words(one) for port, one in zip(ports, asked, strict=True)}
    why = said.pop(place.port)
    alive = [port for port, words in said.items() if not words or _REFUSED in words]
    what = (
        f"machine 0 could not be reached at {place.address}:{place.port} for {waited_s:.0f} s: {why or 'it is silent'}"
    )
    fix = "Is packtrain env started there, with topology.node_rank=0? Does a firewall let the port through?"
    if alive and why and _REFUSED not in why:
        what += f", while port {alive[0]} there answers: a firewall keeps this machine from port {place.port}"
        fix = opened(place.port, "machine 0")
    elif not alive:
        silent = " and ".join(map(str, said))
        fix = f"Ports {silent} there give no answer, either: is the machine up, is the address right? {fix}"
    return PeerFailed(what, where="roll call", fix=fix)


def _words(question: Question[str]) -> str:
    try:
        return question.answer()
    except NoAnswer as refusal:  # of a name server
        return str(refusal)


def _left(why: str) -> PeerFailed:
    what = f"machine 0 left before the comparison was done: {why}"
    return PeerFailed(what, where="--cluster", fix="Its terminal or log says why; start all machines again.")


def _check(processes: Processes) -> None:
    """Raises UserError where this process cannot be one machine of several."""
    if processes.joins:
        what = "this process is one of several of a running launch"
        raise UserError(what, where="--cluster", fix="Start packtrain env once on each machine.")
    obstacles = [one for one in processes.obstacles if one.where != GPUS_PER_NODE]
    if obstacles:
        raise UserError(obstacles)
    if processes.nodes == 1:
        fix = "Set topology (docs/multi-node.md), or leave --cluster away."
        raise UserError("the run has one machine: there is nothing to compare", where="--cluster", fix=fix)


def _member(processes: Processes, host: str) -> Member:
    return Member(
        node=processes.node,
        nodes=processes.nodes,
        per_node=processes.per_node,
        total=processes.total,
        gpus=0,
        host=host,
        addresses=own_addresses(),
        versions=shared_versions(environment()),
        config={},
        clock=time.time(),
    )


def _place(processes: Processes, config: RunConfig) -> Place:
    limit = min(LIMIT_S, config.topology.join_timeout) - age_s()
    return Place(
        address=processes.main_address or "",
        port=processes.main_port or 0,
        timeout_s=max(limit, _LEAST_S),
        job=_JOB,
        names=processes.hosts,
        silence_s=LIMIT_S,
    )
