"""`packtrain env CONFIG --cluster`: every machine makes its report, machine 0 compares them and shows the result.

The machines meet as those of a run do (launch/rendezvous.py), but do without one that is missing. Each makes its report and
takes part in the all-reduces, brings both to machine 0, and is answered with the exit code when all have, or the time is over.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from packtrain.config.schema import RunConfig
from packtrain.diagnose.cluster.all_reduce import PROCESS_S as REDUCE_S
from packtrain.diagnose.cluster.all_reduce import checks_of, summary, take_part
from packtrain.diagnose.cluster.compare import differences, exit_code_of, folded, own_report, show
from packtrain.diagnose.env import age_s, gather
from packtrain.diagnose.timeouts import Probe, Unanswered, kill_processes
from packtrain.errors import PeerFailed, UserError
from packtrain.launch.rendezvous import Group, Place, meet, own_addresses
from packtrain.launch.slurm.srun import run_srun
from packtrain.monitor.channel import Refused, Server
from packtrain.plan.agreement import Member
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import DEFAULT_PORT, look_around
from packtrain.plan.topology import GPUS_PER_NODE, Processes, choose_processes

GATHER_S = 20.0
"""Seconds to wait for the machines, from the start of this process; topology.join_timeout may shorten them."""
REPORT_S = 15.0
_LEAST_S = 3.0
_JOB = "packtrain env"


def show_cluster(load: Callable[[], RunConfig | None], arguments: Sequence[str], *, as_json: bool) -> int:
    """Meets the other machines of the run whose config `load` returns; machine 0 prints. Returns the exit code of all.

    In a Slurm job `packtrain env arguments…` is started on all of its machines. Raises UserError where the config is of
    one machine; CheckFailed where this machine cannot be the one that it says; PeerFailed where machine 0 is missing or leaves.
    """
    config = load()
    if config is None:
        raise UserError("no config", where="--cluster", fix="Name the config whose machines are to be compared.")
    # without querying GPUs: a machine that has lost one must be compared, too
    around = replace(look_around([]), driver=False)
    processes = choose_processes(config.topology, around)
    _check(processes)
    if processes.role == "srun":
        return run_srun(plan_launch(config, around, "env", arguments).srun)
    making = Probe(lambda: own_report(*gather(lambda: config), asdict(config)), REPORT_S)
    limit_s = max(min(GATHER_S, config.topology.join_timeout) - age_s(), _LEAST_S)
    address, port = processes.main_address or "", processes.main_port or DEFAULT_PORT
    place = Place(address, port, limit_s, _JOB, processes.hosts, least=1)
    # only the number of machines has to be the same at the rendezvous: the rest is compared later
    nodes = processes.nodes
    me = Member(processes.node, nodes, 1, 0, around.host, own_addresses(), {}, {})
    try:
        with meet(me, place) as group:
            brought = _Brought(group.server) if group.server else None
            own = {"node": processes.node, "report": _made(making)}
            own["result"] = _reduced(group, own, address, config.topology.variables)
            if brought is None:
                return _bring(group, own)
            document = _document(brought.collect(own, len(group.names)), group, place, processes)
            code = exit_code_of(document)
            brought.answer({"code": code})
            print(json.dumps(document, indent=2)) if as_json else show(document, nodes)
            return code
    finally:
        kill_processes()  # a process of an all-reduce that hangs


def _check(processes: Processes) -> None:
    """Raises UserError if this process cannot be one machine of several."""
    if obstacles := [one for one in processes.obstacles if one.where != GPUS_PER_NODE]:
        raise UserError(obstacles)
    if processes.nodes == 1:
        fix = "Set topology (docs/multi-node.md), or leave --cluster away."
        raise UserError("the run has one machine: there is nothing to compare", where="--cluster", fix=fix)


def _made(making: Probe[dict[str, Any]]) -> dict[str, Any]:
    """The report, or why there is none."""
    try:
        return making.answer()
    except Unanswered as refusal:
        return {"error": str(refusal)}


def _reduced(group: Group, own: Mapping[str, Any], address: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """This machine's part of the all-reduces, with the network settings that the run's processes would have here."""
    report, nodes = own["report"], sorted(group.names)
    if "error" in report:
        return {"skipped": f"{group.names[own['node']]} could not make its report"}
    torch = report["facts"]["torch"]
    if torch["error"] and not torch["error"].startswith("no answer"):  # a slow torch may still work
        return {"skipped": f"torch cannot be imported on {group.names[own['node']]} ({torch['error']})"}
    if len(nodes) < 2:
        return {"skipped": "no other machine is here"}
    where = {"rank": nodes.index(own["node"]), "world": len(nodes), "address": address, "port": group.store_port}
    backend = "nccl" if torch["available"] else "gloo"
    return take_part({**where, "backend": backend}, {**report["own"]["network"], **variables})


def _bring(group: Group, own: Mapping[str, Any]) -> int:
    """Machine 0's exit code. Raises PeerFailed if machine 0 ends first."""
    assert group.client is not None
    print(f"{group.names[0]} shows the comparison", file=sys.stderr, flush=True)
    limit_s = REPORT_S + 2 * REDUCE_S
    while True:
        try:
            said = {**own, "clock": time.time()}
            return int(group.client.call("report", said, timeout_s=limit_s)["code"])
        except OSError as error:
            if not (
                isinstance(error, Refused) and error.unknown
            ):  # not ready yet: machine 0 registers this handler soon
                what = f"machine 0 left before the comparison was done: {error}"
                raise PeerFailed(what, where="--cluster", fix="Its terminal or log says why.") from error
            time.sleep(0.1)


class _Brought:
    """What the machines send to machine 0, by number; all get their answers together."""

    def __init__(self, server: Server) -> None:
        self._said: dict[int, dict[str, Any]] = {}
        self._answer: dict[str, Any] = {}
        self._changed = threading.Condition()
        server.serve("report", self._take)

    def _take(self, said: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._said[int(said["node"])] = {**said, "offset_s": float(said["clock"]) - time.time()}
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer)
            return self._answer

    def collect(self, own: dict[str, Any], machines: int) -> dict[int, dict[str, Any]]:
        """What `machines` machines sent, machine 0's `own` included; a machine that hangs is waited for until the common limit."""
        with self._changed:
            self._said[0] = {**own, "offset_s": 0.0}
            self._changed.wait_for(lambda: len(self._said) == machines, REPORT_S + REDUCE_S)
            return dict(sorted(self._said.items()))

    def answer(self, answer: dict[str, Any]) -> None:
        """Answers the machines that have sent theirs."""
        with self._changed:
            self._answer = answer
            self._changed.notify_all()


def _document(
    said: Mapping[int, Mapping[str, Any]], group: Group, place: Place, processes: Processes
) -> dict[str, Any]:
    """The results as plain containers; the keys are a promise to users."""
    hosts = {**{node: f"machine {node}" for node in range(processes.nodes)}, **dict(enumerate(processes.hosts))}
    names = {**hosts, **group.names}
    reports = {names[node]: one["report"] for node, one in said.items() if "error" not in one["report"]}
    missing = {}
    for node, name in names.items():
        if node not in group.names:
            where = f"did not connect to {names[0]} ({place.address}:{place.port}) within {place.timeout_s:.0f} s"
            missing[name] = f"{where}; is packtrain env started there, and does the port answer?"
        elif name not in reports:
            why = said[node]["report"]["error"] if node in said else "it has not answered"
            missing[name] = f"connected, but made no report: {why}"
    silent = {"result": {"error": "no result in time"}}
    reduced = summary({name: said.get(node, silent)["result"] for node, name in sorted(group.names.items())})
    clocks = {names[node]: one["offset_s"] for node, one in said.items()}
    return {
        "nodes": reports,
        "differences": differences({name: one["own"]["traits"] for name, one in reports.items()}, clocks),
        "all_reduce": reduced,
        "missing": list(missing),
        "reasons": missing,
        "checks": [*folded(reports), *checks_of(reduced)],
    }
