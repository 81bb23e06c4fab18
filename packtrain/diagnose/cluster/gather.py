"""`packtrain env CONFIG --cluster`: every machine makes its report, machine 0 compares them and shows the result.

Machine 0 serves a control channel on topology.main_port (monitor/channel.py). Each other machine calls it twice a second with
what it has, its report and then its part of the all-reduce, and is answered with what to do next and, at last, with the exit
code. A machine that is missing, silent or refused costs lines of the result, and holds up the others for a limited time.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from packtrain.config.schema import RunConfig
from packtrain.diagnose.cluster.all_reduce import LIMIT_S as REDUCE_S
from packtrain.diagnose.cluster.all_reduce import WAITED, Reduced, backend_of, checks_of, summary, take_part
from packtrain.diagnose.cluster.compare import Folded, differences, folded, own_report, show
from packtrain.diagnose.env import age_s
from packtrain.diagnose.probe import Probe, Unanswered, kill_commands
from packtrain.errors import CheckFailed, PeerFailed, UserError
from packtrain.launch.execute import execute
from packtrain.monitor import channel
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import free_port, look_around
from packtrain.plan.topology import GPUS_PER_NODE, Processes, choose_processes
from packtrain.wording import listed

LIMIT_S = 20.0
"""How long a machine is waited for from the start of this process (topology.join_timeout may shorten it), and how long one
that has come may be silent."""
REPORT_S = 15.0
_LEAST_S, _LATE_S, _CALL_S = 3.0, 3.0, 0.5
_CALL = "env"
_OWN_NUMBER = "Give each machine its own number (topology.node_rank), from 0, and all the same topology.nodes."
_STARTED = "Is packtrain env started there, with topology.node_rank=0, and is the address right? Does a firewall let TCP port {} through?"


def show_cluster(load: Callable[[], RunConfig | None], arguments: Sequence[str], *, as_json: bool) -> int:
    """Meets the other machines of the run whose config `load` returns; machine 0 prints. Returns the exit code of all.

    In a Slurm job `packtrain env arguments…` is started on all of its machines. Raises UserError where the config is of
    one machine; CheckFailed where this machine cannot be the one that it says; PeerFailed where machine 0 is missing or leaves.
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
    here = _Here(processes, config)
    try:
        if here.node:
            return _bring_report(here)
        document = _Gathering(here).run()
    finally:
        kill_commands()  # a process of an all-reduce that hangs
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        show(document, here.nodes)
    return exit_code_of(document)


def _check(processes: Processes) -> None:
    """Raises UserError where this process cannot be one machine of several."""
    if processes.joins:
        what = "this process is one of several of a running launch"
        raise UserError(what, where="--cluster", fix="Start packtrain env once on each machine.")
    if obstacles := [one for one in processes.obstacles if one.where != GPUS_PER_NODE]:
        raise UserError(obstacles)
    if processes.nodes == 1:
        fix = "Set topology (docs/multi-node.md), or leave --cluster away."
        raise UserError("the run has one machine: there is nothing to compare", where="--cluster", fix=fix)


def exit_code_of(document: Mapping[str, Any]) -> int:
    """4 where a machine is missing, 3 where something failed or must not differ, else 0."""
    failed = any(one["status"] == "fail" for one in (*document["differences"], *document["checks"]))
    return PeerFailed.exit_code if document["missing"] else CheckFailed.exit_code if failed else 0


class _Here:
    """This machine: its number, where machine 0 is, and its report, which is begun at once."""

    def __init__(self, processes: Processes, config: RunConfig) -> None:
        self.node, self.nodes, self.hosts = processes.node, processes.nodes, processes.hosts
        self.address, self.port = processes.main_address or "", processes.main_port or 0
        self.name, self.variables = socket.gethostname(), config.topology.variables
        self.limit_s = max(min(LIMIT_S, config.topology.join_timeout) - age_s(), _LEAST_S)
        self.secret = os.environ.get(channel.SECRET, "")
        self._report = Probe(lambda: own_report(config), REPORT_S)

    def report(self) -> dict[str, Any]:
        """The report, or why there is none."""
        try:
            return self._report.answer()
        except Unanswered as refusal:
            return {"error": str(refusal)}

    def reduce(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Takes part in the all-reduces, with the network settings that the run's processes would have here."""
        return take_part({**order, "address": self.address}, {**self.report()["own"]["network"], **self.variables})


def _bring_report(here: _Here) -> int:
    """Reports, measures what it is told to, and returns machine 0's exit code."""
    client = channel.Client(here.address, here.port, secret=here.secret)
    said = {"node": here.node, "nodes": here.nodes, "host": here.name, "token": channel.new_secret()}
    probes: dict[str, Probe[Any]] = {"report": Probe(here.report, REPORT_S + 1)}  # what there is to find out
    begun = heard = time.monotonic()
    brought: set[str] = set()
    welcome = False
    while True:
        news = {name: one.answer() for name, one in probes.items() if one.done and name not in brought}
        try:
            limit = min(channel.CALL_S, max(1.0, heard + here.limit_s - time.monotonic()))
            orders = client.call(_CALL, {**said, **news, "clock": time.time()}, timeout_s=limit)
        except (channel.NoAnswer, channel.Refused) as error:
            waited = time.monotonic() - (heard if welcome else begun)
            if waited > (LIMIT_S if welcome else here.limit_s):
                raise _no_answer(here, error, waited, welcome) from error
            time.sleep(_CALL_S)
            continue
        if not welcome and "main" in orders:
            print(f"{orders['main']} shows the comparison", file=sys.stderr, flush=True)
        welcome, heard = True, time.monotonic()
        brought |= set(news)
        if "refused" in orders:
            raise CheckFailed(str(orders["refused"]), where="--cluster", fix=_OWN_NUMBER)
        if "code" in orders:
            return int(orders["code"])
        if "reduce" in orders and "result" not in probes:
            probes["result"] = Probe(lambda order=orders["reduce"]: here.reduce(order), 2 * REDUCE_S)
        time.sleep(_CALL_S)


def _no_answer(here: _Here, error: OSError, waited_s: float, welcome: bool) -> PeerFailed:
    if welcome:
        what, fix = f"machine 0 left before the comparison was done: {error}", "Its terminal or log says why."
        return PeerFailed(what, where="--cluster", fix=fix)
    what = f"machine 0 could not be reached at {here.address}:{here.port} for {waited_s:.0f} s: {error}"
    if isinstance(error, channel.Refused):
        what += " (is a run going on there?)"
    elif "refused" in str(error).lower():
        what += " (the machine is up, but nothing listens at this port)"
    return PeerFailed(what, where="--cluster", fix=_STARTED.format(here.port))


@dataclass(slots=True)
class _Other:
    """What machine 0 knows of another machine: `news` is what it has found out, `lost` why it does not count any more."""

    host: str
    token: str
    heard: float
    offset_s: float
    news: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    ended: bool = False


class _Gathering:
    """Machine 0's part: who has come, their reports, the all-reduces, and the comparison."""

    def __init__(self, here: _Here) -> None:
        self._here = here
        self._others: dict[int, _Other] = {}
        self._refused: list[Folded] = []
        self._orders: dict[str, Any] = {"main": here.name}
        self._ranks: dict[int, int] = {}  # by number of a machine, of those that take part in the all-reduces
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """The comparison of all that answered; the others are told its exit code. Raises CheckFailed where the port is taken."""
        here = self._here
        try:
            server = channel.Server(here.port, secret=here.secret)
        except OSError as error:
            what = f"port {here.port} cannot be listened at: {(error.strerror or str(error)).lower()}"
            fix = "Is a run going on here? Or set another port."
            raise CheckFailed(what, where="topology.main_port", fix=fix) from error
        server.about = lambda: "packtrain env --cluster"
        server.serve(_CALL, self._answer, open=not here.secret)
        try:
            self._await(lambda: len(self._others) == here.nodes - 1, here.limit_s)
            if absent := [name for node, name in self._names().items() if node and node not in self._others]:
                what = f"{listed(absent)} did not connect within {here.limit_s:.0f} s; the others go on"
                print(what, file=sys.stderr, flush=True)
            self._await(lambda: all("report" in one.news for one in self._present().values()), REPORT_S + _LATE_S)
            for one in self._present().values():
                one.lost = "" if "report" in one.news else "connected, but made no report"
            reports = {0: here.report(), **{node: one.news["report"] for node, one in self._present().items()}}
            document = self._document(reports, self._reduce(reports))
            self._orders["code"] = exit_code_of(document)
            self._await(lambda: all(one.ended for one in self._present().values()), _LATE_S)
            return document
        finally:
            server.close()

    def _answer(self, said: dict[str, Any]) -> dict[str, Any]:
        """What a machine that has called is to do."""
        node, nodes, host, now = int(said["node"]), int(said["nodes"]), str(said["host"])[:255], time.monotonic()
        with self._lock:
            if not 0 < node < self._here.nodes or nodes != self._here.nodes:
                what = f"{host} is machine {node} of {nodes} by its config, and {self._here.name} has {self._here.nodes} (from 0)"
                return self._refuse(what, host)
            one = self._others.setdefault(node, _Other(host, said["token"], now, float(said["clock"]) - time.time()))
            if one.token != said["token"]:
                return self._refuse(f"two machines say that they are number {node}: {one.host} and {host}", host)
            one.heard, one.ended = now, "code" in self._orders
            one.news.update({name: said[name] for name in ("report", "result") if name in said})
            order = {**self._orders["reduce"], "rank": self._ranks[node]} if node in self._ranks else None
            orders = {name: value for name, value in self._orders.items() if name != "reduce"}
            return {**orders, "reduce": order} if order else orders

    def _refuse(self, what: str, host: str) -> dict[str, Any]:
        self._refused.append(Folded("rendezvous", "fail", what, _OWN_NUMBER, (host,)))
        return {"refused": what}

    def _await(self, done: Callable[[], bool], limit_s: float) -> None:
        """Until `done`, at most `limit_s`; a machine that is silent meanwhile is lost."""
        end = time.monotonic() + limit_s
        while not done() and time.monotonic() < end:
            for node, one in self._present().items():
                if time.monotonic() - one.heard > LIMIT_S:
                    one.lost = f"was not heard of for {LIMIT_S:.0f} s"
                    print(f"{self._names()[node]}: {one.lost}; the others go on", file=sys.stderr, flush=True)
            time.sleep(0.05)

    def _present(self) -> dict[int, _Other]:
        return {node: one for node, one in sorted(dict(self._others).items()) if not one.lost}

    def _reduce(self, reports: Mapping[int, dict[str, Any]]) -> Reduced:
        """The all-reduces of all that reported, where nothing speaks against them already."""
        names, able = self._names(), [node for node, one in reports.items() if "error" not in one]
        backend, why = backend_of({names[node]: reports[node] for node in able})
        if len(able) < 2 or able[0]:
            why = "fewer than two machines reported"
        if why:
            return Reduced(found=why)
        order = {"backend": backend, "world": len(able), "port": free_port()}
        self._orders["reduce"], self._ranks = order, {node: rank for rank, node in enumerate(able)}
        mine = Probe(lambda: self._here.reduce({**order, "rank": 0}), 2 * REDUCE_S)

        def results() -> dict[int, dict[str, Any]]:
            others = {node: self._others[node].news.get("result") for node in able if node}
            return {node: one for node, one in {0: mine.answer() if mine.done else None, **others}.items() if one}

        def ended() -> bool:  # or a machine cannot take part: the others only wait for it
            alone = any("error" in one and not one.get("pairs") for one in results().values())
            return alone or all(node in results() or (node and self._others[node].lost) for node in able)

        self._await(ended, REDUCE_S + _LATE_S)
        self._await(lambda: len(results()) == len(able), _LATE_S)
        found = results()
        return summary(backend, {names[node]: found.get(node, {"error": WAITED}) for node in able})

    def _document(self, reports: Mapping[int, dict[str, Any]], reduced: Reduced) -> dict[str, Any]:
        """What was found out, as plain containers; the keys are a promise to users."""
        here, names = self._here, self._names()
        good = {names[node]: one for node, one in reports.items() if "error" not in one}
        checks = [*self._refused, *folded(good), *checks_of(reduced)]
        for node in (node for node, one in reports.items() if "error" in one):
            text = f"it could not make its report: {reports[node]['error']}"
            checks.append(Folded("report", "fail", text, "Start packtrain env there.", (names[node],)))
        missing = {names[node]: one.lost for node, one in sorted(self._others.items()) if one.lost}
        why = f"did not connect to {here.name} ({here.address}:{here.port}) within {here.limit_s:.0f} s; "
        why += "is packtrain env started there, and does the port answer?"
        missing |= {name: why for node, name in names.items() if node and node not in self._others}
        traits = {name: one["own"]["traits"] for name, one in good.items()}
        offsets = {names[0]: 0.0, **{names[node]: one.offset_s for node, one in sorted(self._others.items())}}
        return {
            "nodes": {names[node]: one for node, one in reports.items()},
            "differences": [one.to_json() for one in differences(traits, offsets)],
            "all_reduce": reduced.to_json(),
            "missing": list(missing),
            "reasons": missing,
            "checks": [asdict(one) for one in checks],
        }

    def _names(self) -> dict[int, str]:
        """Of all machines, as they call themselves, or as Slurm or the number calls those that are not here."""
        called = {node: one.host for node, one in dict(self._others).items()}  # calls may come in meanwhile
        hosts = {**dict(enumerate(self._here.hosts)), **called, 0: self._here.name}
        alone = {node: list(hosts.values()).count(host) == 1 for node, host in hosts.items()}
        words = {node: host if alone[node] else f"{host} (machine {node})" for node, host in hosts.items()}
        return {node: words.get(node, f"machine {node}") for node in range(self._here.nodes)}
