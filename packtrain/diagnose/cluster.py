"""`packtrain env CONFIG --cluster`: compare the reports of all machines on machine 0.

The machines meet like the machines of a run (launch/rendezvous.py), but go on without a missing one. Each makes its report and takes
part in the all-reduces, then sends both to machine 0. Machine 0 answers with the exit code when all have sent, or time is over. A
difference is a `fail` in facts that must be equal (the run would stop, or train something else), and a `warn` in facts that should be.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace

from rich.console import Console
from rich.markup import escape

from packtrain.diagnose.all_reduce import PROCESS_S as REDUCE_S
from packtrain.diagnose.all_reduce import check_all_reduce, describe_pair, summarize, take_part
from packtrain.diagnose.env import check_all, gather, print_check, report_json
from packtrain.diagnose.machine import Facts, Load, PlannedRun, Status, reported_variables
from packtrain.errors import CheckFailed, Json, PeerFailed, UserError
from packtrain.launch.jobs import run_srun
from packtrain.launch.rendezvous import Group, MeetingPoint, Member, meet, own_addresses
from packtrain.monitor.channel import Client, Rejected
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.origin import shared_values, shared_versions
from packtrain.plan.surroundings import DEFAULT_PORT, detect_surroundings
from packtrain.plan.topology import GPUS_PER_NODE, choose_processes
from packtrain.run_folder import environment
from packtrain.system import start
from packtrain.wording import Redactor, listed, size

GATHER_S = 20.0  # to wait for the machines; topology.join_timeout may shorten it
REPORT_S = 15.0
JOB = "packtrain env"
_NOTHING = "nothing"
_OWN = re.compile(r"_IFNAME$|_HCA$|VISIBLE_DEVICES$|^TMPDIR$|^MASTER_ADDR$")  # variables that may differ by machine
_FIXES: dict[Status, str] = {
    "fail": "Start every machine with the same config and arguments, from one image or lock file; check nvidia-smi there.",
    "warn": "Take machines that are alike, from one image, with the same limits and variables (topology.environment).",
}

Traits = Mapping[Status, Mapping[str, str]]
"""Compared facts of a machine, by the meaning of a difference: name → value in words, "" if unknown."""


def show_cluster(load: Load, arguments: Sequence[str], *, as_json: bool) -> int:
    """Meet the other machines of the run whose config `load` returns. Machine 0 prints; return the exit code of all.

    In a Slurm job, start `packtrain env arguments…` on all of its machines. Raises UserError if the config is for
    one machine, CheckFailed if this machine cannot be the one that it claims to be, PeerFailed if machine 0 is missing or ends.
    """
    config = load()
    if config is None:
        fix = "Name the config whose machines are to be compared."
        raise UserError("no config", where="--cluster", fix=fix, code="no-config")
    # without querying GPUs: a machine that has lost one must be compared, too
    around = replace(detect_surroundings([]), driver=False)
    processes = choose_processes(config.topology, around)
    if obstacles := [problem for problem in processes.obstacles if problem.where != GPUS_PER_NODE]:
        raise UserError(obstacles)
    if processes.nodes == 1:
        fix = "Set topology (docs/multi-node.md), or omit --cluster."
        what = "the run has one machine: there is nothing to compare"
        raise UserError(what, where="--cluster", fix=fix, code="nothing-to-compare")
    if processes.role == "srun":
        return run_srun(plan_launch(config, around, "env", arguments).srun)
    report = start(lambda: own_report(*gather(lambda: config), asdict(config)))
    limit_s = min(GATHER_S, config.topology.join_timeout)
    address, port = processes.main_address or "", processes.main_port or DEFAULT_PORT
    place = MeetingPoint(address, port, limit_s, JOB, processes.hosts, least=1)
    # only the number of machines has to be equal at the rendezvous: the rest is compared later
    me = Member(processes.node, processes.nodes, 1, 0, around.host, own_addresses(), {}, {})
    with meet(me, place) as group:
        try:
            made = report.result(REPORT_S)
        except Exception as error:  # a fault of one machine must not cost the others
            made = {"error": str(error) or f"no answer within {REPORT_S:.0f} s"}
        own: Json = {"node": processes.node, "report": made}
        own["result"] = _reduce(group, own, address, config.topology.variables)
        if isinstance(group.channel, Client):
            return _send(group.channel, group.names[0], own)
        sent, code = {0: own}, Future[int]()

        def take(message: Json) -> Json:
            sent[int(message["node"])] = message
            return {"code": code.result()}

        group.channel.serve("report", take)
        end = time.monotonic() + REPORT_S + REDUCE_S
        while len(sent) < len(group.names) and time.monotonic() < end:
            time.sleep(0.1)
        document = compare(dict(sorted(sent.items())), group.names, place, processes.nodes)
        code.set_result(exit_code_for(document))
        print(json.dumps(document, indent=2)) if as_json else print_comparison(document, processes.nodes)
        return code.result()


def _reduce(group: Group, own: Json, address: str, variables: Mapping[str, str]) -> Json:
    """Take part in the all-reduces, with the network settings of the run's processes here."""
    report, nodes, name = own["report"], sorted(group.names), group.names[own["node"]]
    torch = {} if "error" in report else report["facts"]["torch"]
    if "error" in report or torch["error"].startswith("torch cannot be imported"):
        return {"skipped": f"{name}: {report.get('error') or torch['error']}"}
    if len(nodes) < 2:
        return {"skipped": "no other machine is here"}
    names, backend = [group.names[node] for node in nodes], "nccl" if torch["available"] else "gloo"
    order = {"rank": nodes.index(own["node"]), "names": names, "address": address, "port": group.store_port}
    return take_part({**order, "backend": backend}, {**report["own"]["network"], **variables})


def _send(client: Client, main: str, own: Json) -> int:
    """Send this machine's results and return machine 0's exit code. Raises PeerFailed if machine 0, called `main`, ends first."""
    print(f"{main} shows the comparison", file=sys.stderr, flush=True)
    while True:
        try:
            return int(client.call("report", {**own}, timeout_s=REPORT_S + 2 * REDUCE_S)["code"])
        except OSError as error:
            if not (isinstance(error, Rejected) and error.unknown):  # otherwise machine 0 registers this handler soon
                what = f"machine 0 ended before the comparison was done: {error}"
                fix = "Its terminal or log says why."
                raise PeerFailed(what, where="--cluster", fix=fix, code="machine-0-left") from error
            time.sleep(0.1)


def compare(sent: Mapping[int, Json], joined: Mapping[int, str], place: MeetingPoint, machines: int) -> Json:
    """Compare the machines' messages (by number) in plain containers. The keys are a promise to users."""
    names = {node: f"machine {node}" for node in range(machines)} | dict(enumerate(place.names)) | dict(joined)
    reports = {names[node]: message["report"] for node, message in sent.items() if "error" not in message["report"]}
    missing = {}
    for node, name in names.items():
        if node not in joined:
            where = f"did not connect to {names[0]} ({place.address}:{place.port}) within {place.timeout_s:.0f} s"
            missing[name] = f"{where}; is packtrain env started there, and does the port answer?"
        elif name not in reports:
            why = sent[node]["report"]["error"] if node in sent else "it has not answered"
            missing[name] = f"connected, but made no report: {why}"
    silent = {"result": {"error": "no result in time"}}
    reduced = summarize({name: sent.get(node, silent)["result"] for node, name in sorted(joined.items())})
    return {
        "nodes": reports,
        "differences": find_differences({name: report["own"]["traits"] for name, report in reports.items()}),
        "all_reduce": reduced,
        "missing": list(missing),
        "reasons": missing,
        "checks": [*group_checks(reports), *check_all_reduce(reduced)],
    }


def own_report(facts: Facts, run: PlannedRun, config: Json) -> Json:
    """Make this machine's report, like `env --json`. `own` adds the compared facts and the settings of NCCL and gloo.
    `config` is in plain containers."""
    redactor = Redactor(os.environ, run.config.topology.variables)
    same = redactor.plain({**shared_versions(environment()), **shared_values(config)})
    variables = redactor.plain(reported_variables(os.environ))
    network = {setting.name: setting.value for setting in run.network if setting.value is not None}
    own = {"network": network, "traits": traits_of(facts, same, variables)}
    return {**report_json(facts, run, check_all(facts, run), redactor), "own": own}


def traits_of(facts: Facts, same: Mapping[str, str], variables: Mapping[str, str]) -> Traits:
    """Return the compared facts of a machine. `same` are versions and config values: a run compares them, too."""
    torch, cards, host = facts.torch, facts.driver.gpus, facts.host
    # a torch that does not answer has a check of its own
    builds = {"cuda of torch": torch.cuda, "nccl of torch": torch.nccl} if torch.version else {}
    build = {"cuda of torch": "", "nccl of torch": ""} | {name: text or _NOTHING for name, text in builds.items()}
    alike = {
        "NVIDIA driver": facts.driver.version or _NOTHING,
        "GPUs": _counted(f"{card.name}, {size(card.memory)}" for card in cards),
        "RDMA ports": _counted(f"{port.layer} {port.rate} Gb/s" for port in facts.network.ports if port.active),
        "platform": host.platform,
        "cores": str(host.cpus),
        "memory": size(host.memory),
        "/dev/shm": size(host.shm),
        "ulimit -n": str(host.nofile),
        **{name: version or "not installed" for name, version in host.packages.items() if name not in same},
        **{name: value for name, value in variables.items() if not _OWN.search(name)},
    }
    return {"fail": {**same, **build, "number of GPUs": str(len(cards))}, "warn": alike}


def find_differences(traits: Mapping[str, Traits]) -> list[Json]:
    """Find facts that differ between machines, with the machines of each value. Facts that must not differ come first, then the most
    common values."""
    result = []
    for status, fix in _FIXES.items():
        for what in dict.fromkeys(what for trait in traits.values() for what in trait[status]):
            values = {name: trait[status].get(what, _NOTHING) for name, trait in traits.items()}
            counts = Counter(value for value in values.values() if value)
            if len(counts) > 1:
                nodes = {value: [name for name in values if values[name] == value] for value, _ in counts.most_common()}
                groups = [{"value": value, "nodes": names} for value, names in nodes.items()]
                result.append({"what": what, "status": status, "values": groups, "fix": fix})
    return result


def group_checks(reports: Mapping[str, Json]) -> list[Json]:
    """Group checks that failed or warned, failed ones first. Equal checks are one, with all their machines (`nodes`)."""
    checks: dict[str, Json] = {}
    for name, report in reports.items():
        for check in report["checks"]:
            if check["status"] != "ok":
                checks.setdefault(repr(check), {**check, "nodes": []})["nodes"].append(name)
    return sorted(checks.values(), key=lambda check: check["status"])


def exit_code_for(document: Json) -> int:
    """Return 4 for a missing machine, 3 for a failed check or difference, else 0."""
    failed = any(item["status"] == "fail" for item in (*document["differences"], *document["checks"]))
    return PeerFailed.exit_code if document["missing"] else CheckFailed.exit_code if failed else 0


def _counted(texts: Iterable[str]) -> str:
    """Count equal texts: "8 × H100, 1 × A100"."""
    return ", ".join(f"{number} × {text}" for text, number in sorted(Counter(texts).items())) or _NOTHING


def print_comparison(document: Json, machines: int) -> None:
    """Print the comparison of `machines` machines to stdout, in colour on a terminal."""
    console, reduced = Console(highlight=False, soft_wrap=True), document["all_reduce"]
    differ, checks = document["differences"], document["checks"]
    console.print(escape(f"\n{len(document['nodes'])} of {machines} machines: {listed(list(document['nodes']))}"))
    for name, why in document["reasons"].items():
        print_check(console, "fail", "missing", f"{name}: {why}", "")
    for item in differ:
        values = [f"{listed(value['nodes'])}: {value['value']}" for value in item["values"]]
        print_check(console, item["status"], item["what"], " / ".join(values), item["fix"])
    for item in checks:
        print_check(console, item["status"], item["name"], f"{listed(item['nodes'])}: {item['found']}", item["fix"])
    pairs = [f"\n{describe_pair(pair)}" for pair in reduced["pairs"]]
    console.print(escape(f"\nAll-reduce: {reduced['status']} ({reduced['found']}){''.join(pairs)}"))
    statuses = Counter(item["status"] for item in (*differ, *checks))
    console.print(f"\n{len(document['missing'])} missing, {statuses['fail']} failed, {statuses['warn']} to look at")
