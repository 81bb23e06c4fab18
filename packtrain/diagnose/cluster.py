"""`packtrain env CONFIG --cluster`: every machine makes its report, machine 0 compares them and shows the result.

The machines meet as those of a run do (launch/rendezvous.py), but do without one that is missing. Each makes its report and
takes part in the all-reduces, sends both to machine 0, and is answered with the exit code when all have, or the time is over.

Three kinds of difference: what must be the same (`fail`: the run would stop, or train something else), what should be
(`warn`), and what is a machine's own business (`ok`: its interfaces, its devices), shown because it explains the rest.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from packtrain.config.schema import RunConfig
from packtrain.diagnose.all_reduce import PROCESS_S as REDUCE_S
from packtrain.diagnose.all_reduce import check_all_reduce, describe_pair, summary, take_part
from packtrain.diagnose.env import age_s, check_all, gather, print_check, report_json
from packtrain.diagnose.facts import GIB, Facts, RunNeeds, Status, size
from packtrain.diagnose.host import reported_variables
from packtrain.diagnose.timeouts import Probe, Unanswered, kill_processes
from packtrain.errors import CheckFailed, PeerFailed, UserError
from packtrain.launch.rendezvous import Group, Place, meet, own_addresses
from packtrain.launch.slurm_jobs import run_srun
from packtrain.monitor.channel import Refused, Server
from packtrain.plan.agreement import Member, digest_of, shared_values, shared_versions
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import DEFAULT_PORT, look_around
from packtrain.plan.topology import GPUS_PER_NODE, Processes, choose_processes
from packtrain.redact import Redactor
from packtrain.run_folder import environment
from packtrain.wording import grouped, listed

GATHER_S = 20.0
"""Seconds to wait for the machines, from the start of this process; topology.join_timeout may shorten them."""
REPORT_S = 15.0
CLOCK_S = 2.0
"""Seconds by which clocks may differ: measured over a network on busy machines, less is not significant."""
JOB = "packtrain env"
_LEAST_S = 3.0
_NOTHING = "nothing"
_OWN = re.compile(r"_IFNAME$|_HCA$|VISIBLE_DEVICES$|^TMPDIR$|^MASTER_ADDR$")
_FIXES: dict[Status, str] = {
    "fail": "Start every machine with the same config and arguments, from one image or lock file; check nvidia-smi there.",
    "warn": "Take machines that are alike, from one image, with the same limits and variables (topology.environment).",
    "ok": "",
}

Traits = Mapping[Status, Mapping[str, str]]
"""The compared facts of a machine, by what a difference means: name → value in words, "" if it is not known."""


def show_cluster(load: Callable[[], RunConfig | None], arguments: Sequence[str], *, as_json: bool) -> int:
    """Meets the other machines of the run whose config `load` returns; machine 0 prints. Returns the exit code of all.

    In a Slurm job `packtrain env arguments…` is started on all of its machines. Raises UserError where the config is of
    one machine; CheckFailed where this machine cannot be the one that it claims to be; PeerFailed where machine 0 is missing or ends.
    """
    config = load()
    if config is None:
        raise UserError("no config", where="--cluster", fix="Name the config whose machines are to be compared.")
    # without querying GPUs: a machine that has lost one must be compared, too
    around = replace(look_around([]), driver=False)
    processes = choose_processes(config.topology, around)
    if obstacles := [problem for problem in processes.obstacles if problem.where != GPUS_PER_NODE]:
        raise UserError(obstacles)
    if processes.nodes == 1:
        fix = "Set topology (docs/multi-node.md), or omit --cluster."
        raise UserError("the run has one machine: there is nothing to compare", where="--cluster", fix=fix)
    if processes.role == "srun":
        return run_srun(plan_launch(config, around, "env", arguments).srun)
    report = Probe(lambda: own_report(*gather(lambda: config), asdict(config)), REPORT_S)
    limit_s = max(min(GATHER_S, config.topology.join_timeout) - age_s(), _LEAST_S)
    address, port = processes.main_address or "", processes.main_port or DEFAULT_PORT
    place = Place(address, port, limit_s, JOB, processes.hosts, least=1)
    # only the number of machines has to be the same at the rendezvous: the rest is compared later
    me = Member(processes.node, processes.nodes, 1, 0, around.host, own_addresses(), {}, {})
    try:
        with meet(me, place) as group:
            collection = _Collection(group.server) if group.server else None
            own: dict[str, Any] = {"node": processes.node}
            try:
                own["report"] = report.answer()
            except Unanswered as refusal:
                own["report"] = {"error": str(refusal)}
            own["result"] = _reduce(group, own, address, config.topology.variables)
            if collection is None:
                return _send(group, own)
            document = _document(collection.collect(own, len(group.names)), group, place, processes)
            code = exit_code_of(document)
            collection.answer({"code": code})
            print(json.dumps(document, indent=2)) if as_json else show(document, processes.nodes)
            return code
    finally:
        kill_processes()  # a process of an all-reduce that hangs


def _reduce(group: Group, own: Mapping[str, Any], address: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """This machine's part of the all-reduces, with the network settings that the run's processes would have here."""
    report, nodes, name = own["report"], sorted(group.names), group.names[own["node"]]
    if "error" in report:
        return {"skipped": f"{name} could not make its report"}
    torch = report["facts"]["torch"]
    if torch["error"] and not torch["error"].startswith("no answer"):  # a slow torch may still work
        return {"skipped": f"torch cannot be imported on {name} ({torch['error']})"}
    if len(nodes) < 2:
        return {"skipped": "no other machine is here"}
    order = {"rank": nodes.index(own["node"]), "world": len(nodes), "address": address, "port": group.store_port}
    backend = "nccl" if torch["available"] else "gloo"
    return take_part({**order, "backend": backend}, {**report["own"]["network"], **variables})


def _send(group: Group, own: Mapping[str, Any]) -> int:
    """Machine 0's exit code. Raises PeerFailed if machine 0 ends first."""
    assert group.client is not None
    print(f"{group.names[0]} shows the comparison", file=sys.stderr, flush=True)
    while True:
        try:
            report = {**own, "clock": time.time()}
            return int(group.client.call("report", report, timeout_s=REPORT_S + 2 * REDUCE_S)["code"])
        except OSError as error:
            if not (isinstance(error, Refused) and error.unknown):  # else machine 0 registers this handler soon
                what = f"machine 0 ended before the comparison was done: {error}"
                raise PeerFailed(what, where="--cluster", fix="Its terminal or log says why.") from error
            time.sleep(0.1)


class _Collection:
    """What the machines send to machine 0, by number; all get their answers together."""

    def __init__(self, server: Server) -> None:
        self._reports: dict[int, dict[str, Any]] = {}
        self._answer: dict[str, Any] = {}
        self._changed = threading.Condition()
        server.serve("report", self._take)

    def _take(self, report: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._reports[int(report["node"])] = {**report, "offset_s": float(report["clock"]) - time.time()}
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer)
            return self._answer

    def collect(self, own: dict[str, Any], machines: int) -> dict[int, dict[str, Any]]:
        """What `machines` machines sent, machine 0's `own` included; a machine that hangs is waited for until the common limit."""
        with self._changed:
            self._reports[0] = {**own, "offset_s": 0.0}
            self._changed.wait_for(lambda: len(self._reports) == machines, REPORT_S + REDUCE_S)
            return dict(sorted(self._reports.items()))

    def answer(self, answer: dict[str, Any]) -> None:
        """Answers the machines that have sent theirs."""
        with self._changed:
            self._answer = answer
            self._changed.notify_all()


def _document(
    sent: Mapping[int, Mapping[str, Any]], group: Group, place: Place, processes: Processes
) -> dict[str, Any]:
    """The results as plain containers; the keys are a promise to users."""
    hosts = {node: f"machine {node}" for node in range(processes.nodes)} | dict(enumerate(processes.hosts))
    names = {**hosts, **group.names}
    reports = {names[node]: one["report"] for node, one in sent.items() if "error" not in one["report"]}
    missing = {}
    for node, name in names.items():
        if node not in group.names:
            where = f"did not connect to {names[0]} ({place.address}:{place.port}) within {place.timeout_s:.0f} s"
            missing[name] = f"{where}; is packtrain env started there, and does the port answer?"
        elif name not in reports:
            why = sent[node]["report"]["error"] if node in sent else "it has not answered"
            missing[name] = f"connected, but made no report: {why}"
    silent = {"result": {"error": "no result in time"}}
    reduced = summary({name: sent.get(node, silent)["result"] for node, name in sorted(group.names.items())})
    clocks = {names[node]: one["offset_s"] for node, one in sent.items()}
    return {
        "nodes": reports,
        "differences": differences({name: one["own"]["traits"] for name, one in reports.items()}, clocks),
        "all_reduce": reduced,
        "missing": list(missing),
        "reasons": missing,
        "checks": [*folded(reports), *check_all_reduce(reduced)],
    }


def own_report(facts: Facts, needs: RunNeeds, config: Mapping[str, Any]) -> dict[str, Any]:
    """This machine's report as `env --json` has it, with what is compared, and the settings of NCCL and gloo, under `own`;
    `config` as plain containers."""
    redactor = Redactor(os.environ, needs.environment)
    same, variables = (
        {name: shown(name, value, redactor) for name, value in values.items()}
        for values in ({**shared_versions(environment()), **shared_values(config)}, reported_variables(os.environ))
    )
    network = {setting.name: setting.value for setting in needs.network if setting.value is not None}
    own = {"network": network, "traits": traits_of(facts, same, variables)}
    return {**report_json(facts, needs, check_all(facts, needs), redactor), "own": own}


def traits_of(facts: Facts, same: Mapping[str, str], variables: Mapping[str, str]) -> Traits:
    """The compared facts of a machine; `same` are versions and config values, which a run compares, too."""
    torch, cards, host, ports = facts.torch, facts.gpus.gpus, facts.host, facts.network.ports
    # a torch that does not answer has a check of its own
    build = {
        f"{name} of torch": (getattr(torch, name) or _NOTHING) if torch.version else "" for name in ("cuda", "nccl")
    }
    alike = {
        "NVIDIA driver": facts.gpus.driver or _NOTHING,
        # a machine without any differs in their number
        "GPUs": _counted(f"{card.name}, {size(card.memory)}" for card in cards) if cards else "",
        "RDMA ports": _counted(f"{port.layer} {port.rate} Gb/s {'up' if port.active else 'down'}" for port in ports),
        "platform": facts.software.platform,
        "cores": str(host.cpus),
        "memory": _rounded(host.memory),
        "/dev/shm": _rounded(host.shm),
        "ulimit -n": "unlimited" if host.nofile == -1 else f"{host.nofile}",
        **{f"{folder.setting} on": folder.kind for folder in host.folders},
        **{name: version or "not installed" for name, version in facts.software.packages.items() if name not in same},
        **{name: value for name, value in variables.items() if not _OWN.search(name)},
    }
    own = {name: value for name, value in variables.items() if _OWN.search(name)}
    return {"fail": {**same, **build, "number of GPUs": str(len(cards))}, "warn": alike, "ok": own}


def differences(traits: Mapping[str, Traits], offsets: Mapping[str, float]) -> list[dict[str, Any]]:
    """The facts that differ between machines, those that must not first, with the machines of each value, the most common first;
    `offsets` are their clocks' in seconds."""
    compared: list[tuple[str, Status, dict[str, str]]] = []
    for status in _FIXES:
        kind = {name: trait.get(status, {}) for name, trait in traits.items()}
        for what in dict.fromkeys(what for values in kind.values() for what in values):
            compared.append((what, status, {name: values.get(what, _NOTHING) for name, values in kind.items()}))
    compared.append(("clock", "warn", {name: _clock(offset) for name, offset in offsets.items()}))
    found = []
    for what, status, values in compared:
        groups = grouped({name: value for name, value in values.items() if value})
        if len(groups) > 1:
            by_value = [{"value": value, "nodes": list(nodes)} for value, nodes in groups]
            found.append({"what": what, "status": status, "values": by_value, "fix": _FIXES[status]})
    return found


def _clock(offset: float) -> str:
    return "right" if abs(offset) <= CLOCK_S else f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"


def folded(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The checks that failed or warned, each once with all machines (`nodes`) that report the same, failed ones first."""
    checks: dict[str, dict[str, Any]] = {}
    for name, report in reports.items():
        for check in report["checks"]:
            if check["status"] != "ok":
                checks.setdefault(repr(check), {**check, "nodes": []})["nodes"].append(name)
    return sorted(checks.values(), key=lambda check: check["status"])


def exit_code_of(document: Mapping[str, Any]) -> int:
    """4 if a machine is missing, 3 if a check failed or facts differ that must not, else 0."""
    failed = any(one["status"] == "fail" for one in (*document["differences"], *document["checks"]))
    return PeerFailed.exit_code if document["missing"] else CheckFailed.exit_code if failed else 0


def _counted(texts: Iterable[str]) -> str:
    """ "8 × H100, 1 × A100"."""
    return ", ".join(f"{number} × {text}" for text, number in sorted(Counter(texts).items())) or _NOTHING


def _rounded(number: int | None) -> str:
    """Bytes in GiB without a fraction: two machines of one kind differ by some MiB."""
    return _NOTHING if number is None else size(number) if number < GIB else f"{number / GIB:.0f} GiB"


def shown(name: str, value: str, redactor: Redactor) -> str:
    """The value of a variable or a key; a secret is hidden behind a digest, which shows whether two differ."""
    plain = redactor.plain({name: value})[name]
    return plain if plain == value else f"{plain} ({digest_of(value)})"


def show(document: Mapping[str, Any], machines: int) -> None:
    """The comparison of so many machines on stdout, in colour on a terminal."""
    console, reduced = Console(highlight=False, soft_wrap=True), document["all_reduce"]
    console.print(escape(f"\n{len(document['nodes'])} of {machines} machines: {listed(list(document['nodes']))}"))
    for name, why in document["reasons"].items():
        print_check(console, "fail", "missing", f"{name}: {why}", "")
    console.print("\nWhat differs:\n")
    for one in document["differences"]:
        values = [f"{listed(value['nodes'])}: {value['value']}" for value in one["values"]]
        print_check(console, one["status"], one["what"], " / ".join(values), one["fix"])
    console.print("" if document["differences"] else "nothing\n", end="\nChecks that failed or warned:\n\n")
    for one in document["checks"]:
        print_check(console, one["status"], one["name"], f"{listed(one['nodes'])}: {one['found']}", one["fix"])
    console.print("" if document["checks"] else "none\n")
    console.print(escape(f"All-reduce: {reduced['status']} ({reduced['found']})"))
    for pair in reduced["pairs"]:
        console.print(escape(describe_pair(pair)))
    statuses = [one["status"] for one in (*document["differences"], *document["checks"])]
    bad = f"{statuses.count('fail')} failed, {statuses.count('warn')} to look at"
    console.print(f"\n{len(document['missing'])} missing, {bad}")
