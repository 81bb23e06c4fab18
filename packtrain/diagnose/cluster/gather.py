"""`packtrain env CONFIG --cluster`: every machine makes its report, machine 0 compares them and shows the result.

Machine 0 serves a control channel on topology.main_port (monitor/channel.py). Each other machine calls it twice a second with
what it has, its report and then its part of the all-reduce, and is answered with what to do next and, at last, with the exit
code. A machine that is missing, silent or refused costs lines of the result, and holds up the others for a limited time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from packtrain.config.compose import to_dict
from packtrain.config.schema import DataSource, RunConfig
from packtrain.diagnose.cluster.all_reduce import WAITED, Reduced, backend_of, checks_of, limit_s, summary, take_part
from packtrain.diagnose.cluster.compare import Difference, Folded, differences, folded, named
from packtrain.diagnose.env import age_s, check_all, gather, print_check, report_json
from packtrain.diagnose.facts import Check
from packtrain.diagnose.host import EACH_ITS_OWN, told
from packtrain.diagnose.probe import Probe, Unanswered, kill_commands
from packtrain.diagnose.redact import Redactor
from packtrain.errors import CheckFailed, PeerFailed, UserError
from packtrain.launch.execute import execute
from packtrain.monitor import channel
from packtrain.plan.agreement import digest_of, shared_values, shared_versions
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import look_around
from packtrain.plan.topology import GPUS_PER_NODE, Processes, choose_processes
from packtrain.run_folder import environment

LIMIT_S = 20.0
"""How long a machine is waited for from the start of this process (topology.join_timeout may shorten it), and how long one
that has come may be silent."""
REPORT_S = 15.0
_FILES_S = 8.0
_LEAST_S, _LATE_S, _CALL_S = 3.0, 3.0, 0.5
_CALL = "env"
_MARK = ".packtrain-env-"
_BLOCK, _MOST_FILES = 2**20, 512  # of a file its first and last bytes are compared
NOT_HERE = "no file or folder here"
_OWN_NUMBER = "Give each machine its own number (topology.node_rank), from 0, and all the same topology.nodes."
_NOT_STARTED = "Is packtrain env started there, with topology.node_rank=0, and is the address right? Does a firewall let TCP port {} through?"


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
    here = Here(processes, config)
    try:
        if processes.node:
            return _report_to_machine_0(here)
        found = _Gathering(here).run()
    finally:
        kill_commands()  # a process of an all-reduce that hangs
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        found.show()
    return found.exit_code


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


class Here:
    """This machine: its number, where machine 0 is, and its report, which is begun at once."""

    def __init__(self, processes: Processes, config: RunConfig) -> None:
        self.node, self.nodes, self.hosts = processes.node, processes.nodes, processes.hosts
        self.address, self.port = processes.main_address or "", processes.main_port or 0
        self.name, self.folder = socket.gethostname(), config.trainer.output_dir
        self.checkpoints, self.variables = config.trainer.checkpoint_every is not None, config.topology.variables
        self.limit_s = max(min(LIMIT_S, config.topology.join_timeout) - age_s(), _LEAST_S)
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

    def nearest(self) -> Path:
        """The output folder, or the one above it that is there."""
        wanted = Path(self.folder).expanduser().absolute()
        return next(one for one in (wanted, *wanted.parents) if os.path.isdir(one))


def own_report(config: RunConfig) -> dict[str, Any]:
    """This machine's report as `env --json` has it, with what else is compared under `own`; nothing secret is in it."""
    files = Probe(lambda: {name: files_digest(path) for name, path in _paths(config)}, _FILES_S)
    facts, needs = gather(lambda: config)
    redactor = Redactor(os.environ, needs.environment)
    # whether others see this machine's disk is tried, and not guessed
    checks = [one for one in check_all(facts, needs) if not one.found.endswith(EACH_ITS_OWN)]
    try:
        digests = files.answer()
    except Unanswered as refusal:
        digests = {name: "" for name, _ in _paths(config)}
        what = f"files of code, model and data are not compared: {refusal}"
        checks.append(Check("files", "warn", what, "look at the disks they are on (dmesg, nfsstat)"))
    own = {
        "versions": shared_versions(environment()),
        "config": {key: shown(key, value, redactor) for key, value in shared_values(to_dict(config)).items()},
        "network": {one.name: one.value for one in needs.network if one.value is not None},
        "environment": {name: shown(name, value, redactor) for name, value in told(os.environ).items()},
        "files": {redactor.text(key): value for key, value in digests.items()},
    }
    return {**report_json(facts, needs, checks, redactor), "own": own}


def shown(name: str, value: str, redactor: Redactor) -> str:
    """The value of a variable or a key; of one with a secret in it a digest, too, by which two can be told apart."""
    plain = redactor.plain({name: value})[name]
    return plain if plain == value else f"{plain} ({digest_of(value)})"


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What of a run lies on each machine's own disk, by name; a hub id is no file anywhere."""
    yield "packtrain's code", str(Path(__file__).parents[2] / "**/*.py")
    if config.model.path:
        yield f"model.path {config.model.path}", config.model.path
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for one in sources if isinstance(sources, list) else [sources]:
            path = one.path if isinstance(one, DataSource) else one
            if isinstance(path, str) and path and path != "quickstart":
                yield f"{key} {path}", path


def files_digest(path: str) -> str:
    """Sizes and digest of a file, a folder's or a glob's files: of each its name and its first and last MiB."""
    place = Path(path).expanduser()
    pattern = str(place / "**") if place.is_dir() else str(place)
    files = [name for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)]
    if not files:
        return NOT_HERE
    root, total, digest = os.path.commonpath(files), 0, hashlib.blake2b(digest_size=6)
    for number, name in enumerate(files):
        with open(name, "rb") as opened:
            length = os.fstat(opened.fileno()).st_size
            total += length
            digest.update(f"{name.removeprefix(root)} {length}\n".encode())
            if number < _MOST_FILES:
                digest.update(opened.read(_BLOCK))
                opened.seek(max(0, length - _BLOCK))
                digest.update(opened.read(_BLOCK))
    return f"{f'{len(files)} files, ' if len(files) > 1 else ''}{total:,} bytes, {digest.hexdigest()}"


def _report_to_machine_0(here: Here) -> int:
    """Reports, measures what it is told to, and returns machine 0's exit code."""
    client = channel.Client(here.address, here.port, secret=os.environ.get(channel.SECRET, ""))
    said: dict[str, Any] = {"node": here.node, "nodes": here.nodes, "host": here.name, "token": channel.new_secret()}
    news: dict[str, Any] = {}  # what this machine has found out, filled in by threads
    started: set[str] = set()

    def find(name: str, ask: Callable[[], Any]) -> None:
        if name not in started:
            started.add(name)
            threading.Thread(target=lambda: news.update({name: ask()}), daemon=True).start()

    find("report", here.report)
    begun = heard = time.monotonic()
    welcome = False
    while True:
        sent = dict(news)
        try:
            limit = min(channel.CALL_S, max(1.0, heard + here.limit_s - time.monotonic()))
            orders = client.call(_CALL, {**said, **sent, "clock": time.time()}, timeout_s=limit)
        except (channel.NoAnswer, channel.Refused) as error:
            if welcome and time.monotonic() - heard > LIMIT_S:
                raise _left(str(error)) from error
            if not welcome and (waited := time.monotonic() - begun) > here.limit_s:
                raise _not_reached(here, error, waited) from error
            time.sleep(_CALL_S)
            continue
        if not welcome and "main" in orders:
            print(f"{orders['main']} shows the comparison", file=sys.stderr, flush=True)
        welcome, heard = True, time.monotonic()
        if "refused" in orders:
            raise CheckFailed(str(orders["refused"]), where="--cluster", fix=_OWN_NUMBER)
        if "left" in orders:
            raise _left(str(orders["left"]))
        if orders.get("code") is not None:
            return int(orders["code"])
        if mark := orders.get("mark"):
            find("sees", lambda mark=mark: os.path.exists(here.nearest() / Path(mark).name))
        if order := orders.get("reduce"):
            find("result", lambda order=order: here.reduce(order))
        for name in sent:
            news.pop(name)
        time.sleep(_CALL_S)


def _left(why: str) -> PeerFailed:
    what = f"machine 0 left before the comparison was done: {why}"
    return PeerFailed(what, where="--cluster", fix="Its terminal or log says why; start all machines again.")


def _not_reached(here: Here, error: OSError, waited_s: float) -> PeerFailed:
    what = f"machine 0 could not be reached at {here.address}:{here.port} for {waited_s:.0f} s: {error}"
    if isinstance(error, channel.Refused):
        what += " (is a run going on there?)"
    elif "refused" in str(error).lower():
        what += " (the machine is up, but nothing listens at this port)"
    elif "timed out" in str(error).lower():
        what += " (the machine is down, or a firewall drops what comes for this port)"
    return PeerFailed(what, where="--cluster", fix=_NOT_STARTED.format(here.port))


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

    def __init__(self, here: Here) -> None:
        self._here = here
        self._others: dict[int, _Other] = {}
        self._refused: list[Folded] = []
        self._orders: dict[str, Any] = {"main": here.name}
        self._ranks: dict[int, int] = {}  # by number of a machine, of those that take part in the all-reduces
        self._lock = threading.Lock()

    def run(self) -> Comparison:
        """The comparison of all that answered; the others are told its exit code. Raises CheckFailed where the port is taken."""
        secret = os.environ.get(channel.SECRET, "")
        try:
            server = channel.Server(self._here.port, secret=secret)
        except OSError as error:
            what = f"port {self._here.port} cannot be listened at: {(error.strerror or str(error)).lower()}"
            raise CheckFailed(
                what, where="topology.main_port", fix="Is a run going on here? Or set another port."
            ) from error
        server.about = lambda: "packtrain env --cluster"
        server.serve(_CALL, self._answer, open=not secret)
        mark = Probe(self._leave_mark)
        try:
            with suppress(Unanswered):
                self._orders["mark"] = os.path.basename(mark.answer())
            self._await(lambda: len(self._others) == self._here.nodes - 1, self._here.limit_s)
            if absent := [name for node, name in self._names().items() if node and node not in self._others]:
                print(
                    f"{named(absent, 16)} did not connect within {self._here.limit_s:.0f} s; the others go on",
                    file=sys.stderr,
                )
            self._await(lambda: all("report" in one.news for one in self._present().values()), REPORT_S + _LATE_S)
            for one in self._present().values():
                one.lost = "" if "report" in one.news else "connected, but made no report"
            own = self._here.report()
            self._await(
                lambda: all("sees" in one.news for one in self._present().values()), _LATE_S if mark.done else 0
            )
            reduced = self._reduce(own)
            found = self._compared(own, reduced)
            self._orders["code"] = found.exit_code
            self._await(lambda: all(one.ended for one in self._present().values()), _LATE_S)
            return found
        except BaseException:
            self._orders["left"] = "packtrain env was stopped there"
            time.sleep(2 * _CALL_S)
            raise
        finally:
            server.close()
            with suppress(Unanswered):
                Probe(lambda: os.unlink(mark.answer()), 2.0).answer()

    def _answer(self, said: dict[str, Any]) -> dict[str, Any]:
        """What a machine that has called is to do."""
        node, nodes, host, now = int(said["node"]), int(said["nodes"]), str(said["host"])[:255], time.monotonic()
        with self._lock:
            if not 0 < node < self._here.nodes or nodes != self._here.nodes:
                what = f"{host} is machine {node} of {nodes} by its config, and {self._here.name} has {self._here.nodes} (from 0)"
                return self._refuse(what, "topology.nodes, topology.node_rank", host)
            one = self._others.setdefault(node, _Other(host, said["token"], now, float(said["clock"]) - time.time()))
            if one.token != said["token"]:
                what = f"two machines say that they are number {node}: {one.host} and {host}"
                return self._refuse(what, "topology.node_rank", host)
            one.heard = now
            one.news.update({name: said[name] for name in ("report", "sees", "result") if name in said})
            one.ended = "code" in self._orders
            orders = dict(self._orders)
            if node in self._ranks:
                orders["reduce"] = {**orders["reduce"], "rank": self._ranks[node]}
            else:
                orders.pop("reduce", None)
            return orders

    def _refuse(self, what: str, where: str, host: str) -> dict[str, Any]:
        self._refused.append(Folded("rendezvous", "fail", f"{where}: {what}", _OWN_NUMBER, (host,)))
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
        return {node: one for node, one in sorted(self._others.items()) if not one.lost}

    def _leave_mark(self) -> str:
        """A new, empty file in the output folder, for the others to look for."""
        with tempfile.NamedTemporaryFile(prefix=_MARK, dir=self._here.nearest(), delete=False) as mark:
            return mark.name

    def _reduce(self, own: dict[str, Any]) -> Reduced:
        """The all-reduces of all that reported, where nothing speaks against them already."""
        names = self._names()
        reports = {0: own, **{node: one.news["report"] for node, one in self._present().items()}}
        able = [node for node, one in reports.items() if "error" not in one]
        if len(able) < 2 or able[0]:
            return Reduced(found="fewer than two machines reported")
        backend, why = backend_of({names[node]: reports[node] for node in able})
        if why:
            return Reduced(found=why)
        self._orders["reduce"] = order = {
            "backend": backend,
            "world": len(able),
            "port": _free_port(self._here.port + 1),
        }
        self._ranks = {node: rank for rank, node in enumerate(able)}
        mine = Probe(lambda: self._here.reduce({**order, "rank": 0}), 2 * limit_s(len(able)))

        def results() -> dict[int, dict[str, Any]]:
            found = {
                node: one.news["result"]
                for node, one in self._others.items()
                if node in self._ranks and "result" in one.news
            }
            return {**found, **({0: mine.answer()} if mine.done else {})}

        def ended() -> bool:  # or a machine could not take part: the others only wait for it
            found = results()
            failed = any("error" in one and "pairs" not in one for one in found.values())
            return failed or all(node in found or (node and self._others[node].lost) for node in able)

        self._await(ended, limit_s(len(able)) + _LATE_S)
        self._await(lambda: len(results()) == len(able), _LATE_S)
        found = results()
        return summary(backend, {names[node]: found.get(node, {"error": WAITED}) for node in able})

    def _compared(self, own: dict[str, Any], reduced: Reduced) -> Comparison:
        names = self._names()
        reports = {
            names[0]: own,
            **{names[node]: one.news["report"] for node, one in sorted(self._others.items()) if "report" in one.news},
        }
        good = {name: one for name, one in reports.items() if "error" not in one}
        checks = [*self._refused, *folded(good), *self._unshared(names), *checks_of(reduced)]
        for name in sorted(set(reports) - set(good)):
            text = f"it could not make its report: {reports[name]['error']}"
            checks.append(Folded("report", "fail", text, "Start packtrain env there.", (name,)))
        missing = {names[node]: one.lost for node, one in sorted(self._others.items()) if one.lost}
        where = f"{self._here.name} ({self._here.address}:{self._here.port}) within {self._here.limit_s:.0f} s"
        why = f"did not connect to {where}; is packtrain env started there, and does the port answer?"
        missing |= {name: why for node, name in names.items() if node and node not in self._others}
        offsets = {names[0]: 0.0, **{names[node]: one.offset_s for node, one in sorted(self._others.items())}}
        return Comparison(len(names), reports, differences(good, offsets), checks, missing, reduced)

    def _unshared(self, names: Mapping[int, str]) -> list[Folded]:
        """The check that machines which do not see the mark in the output folder come to: all processes write checkpoints."""
        blind = [names[node] for node, one in self._present().items() if one.news.get("sees") is False]
        if not blind:
            return []
        what = f"{named(blind)} cannot see what {names[0]} writes to {Redactor(os.environ).text(self._here.folder)}: each machine has its own"
        what += ", and checkpoints are written by all of them" if self._here.checkpoints else ""
        fix = "trainer.output_dir on a file system that all machines share"
        return [Folded("output-folder", "fail" if self._here.checkpoints else "warn", what, fix, tuple(blind))]

    def _names(self) -> dict[int, str]:
        """Of all machines, as they call themselves, or as Slurm or the number calls those that are not here."""
        hosts = {
            **dict(enumerate(self._here.hosts)),
            **{node: one.host for node, one in self._others.items()},
            0: self._here.name,
        }
        double = [host for host in hosts.values() if list(hosts.values()).count(host) > 1]
        named = {node: f"{host} (machine {node})" if host in double else host for node, host in hosts.items()}
        return {node: named.get(node, f"machine {node}") for node in range(self._here.nodes)}


def _free_port(wanted: int) -> int:
    """For torch's store: this one, or any that is free."""
    for port in (wanted if wanted < 2**16 else 0, 0):
        with suppress(OSError), socket.create_server(("", port)) as server:
            return server.getsockname()[1]
    return 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that machine 0 found out of `nodes` machines: `missing` are those that are not compared, and why."""

    nodes: int
    reports: Mapping[str, Mapping[str, Any]]
    differences: Sequence[Difference]
    checks: Sequence[Folded]
    missing: Mapping[str, str]
    reduced: Reduced

    @property
    def exit_code(self) -> int:
        """4 where a machine is missing, 3 where something failed or must not differ, else 0."""
        if self.missing:
            return PeerFailed.exit_code
        return CheckFailed.exit_code if any(one.status == "fail" for one in (*self.differences, *self.checks)) else 0

    def to_json(self) -> dict[str, Any]:
        """Plain containers; the keys are a promise to users."""
        return {
            "nodes": dict(self.reports),
            "differences": [one.to_json() for one in self.differences],
            "all_reduce": self.reduced.to_json(),
            "missing": list(self.missing),
            "reasons": dict(self.missing),
            "checks": [one.to_json() for one in self.checks],
        }

    def show(self) -> None:
        """Everything on stdout, in colour on a terminal."""
        console = Console(highlight=False, soft_wrap=True)
        console.print(escape(f"\n{len(self.reports)} of {self.nodes} machines: {named(tuple(self.reports), 16)}"))
        for name, why in self.missing.items():
            print_check(console, "fail", "missing", f"{name}: {why}", "")
        console.print("\nWhat differs:\n")
        for one in self.differences:
            print_check(console, one.status, one.what, one.text, one.fix)
        console.print("nothing" if not self.differences else "", end="\n\nChecks that failed or warned:\n\n")
        for one in self.checks:
            print_check(console, one.status, one.name, f"{named(one.nodes)}: {one.found}", one.fix)
        console.print("none" if not self.checks else "")
        console.print(escape(f"\nAll-reduce: {self.reduced.status} ({self.reduced.found})"))
        for link in self.reduced.pairs[:16]:
            rate = "" if link.mib_per_s is None else f"{link.latency_ms:.2g} ms, {link.mib_per_s:.0f} MiB/s, "
            console.print(escape(f"{link.start} and {link.end}: {rate}{link.status}"))
        everything = (*self.differences, *self.checks)
        failed, warned = (sum(one.status == status for one in everything) for status in ("fail", "warn"))
        console.print(f"\n{len(self.missing)} missing, {failed} failed, {warned} to look at")
