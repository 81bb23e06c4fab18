"""All-reduces over all machines and over each pair of them, on the backend that the run would use, with limits.

One process on each machine makes them (all_reduce_process.py); here are its start and what its results mean. Times are those
that a machine sees: in the one over all everybody waits for the slowest, which the pairs name. Pure but for `take_part`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from packtrain.diagnose.cluster.all_reduce_process import PAIRS_S, PATIENCE_S
from packtrain.diagnose.cluster.compare import Folded
from packtrain.diagnose.cluster.links_table import Kind, Link, Pair, judged, remarks, rounds_of
from packtrain.diagnose.facts.ask import NoAnswer, command

LIMIT_S = 60.0
"""For the one over all: a busy machine imports torch in half of it."""
WAITED = "waited for the others"
_FIX = "Look at the interfaces that NCCL and gloo take (packtrain plan); NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO for gloo, says what it tries."
PAIRS = Kind(
    name="all-reduce of two",
    several="all-reduces with one other machine",
    dead="{} and {} cannot reduce together",
    fix_dead=_FIX,
    far=2.0,  # less than of Python's streams: the backend, its cards and the bytes are those of a training
    later_ms=5.0,  # of processes that wake each other up
)


@dataclass(frozen=True, slots=True)
class Reduced:
    """What came of the one over all: `found` in words, `nodes` has milliseconds or an `error` of each that took part."""

    status: str = "skipped"
    found: str = ""
    backend: str = ""
    nodes: Mapping[str, Mapping[str, Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def limit_s(machines: int) -> float:
    """Seconds for everything, between so many."""
    return LIMIT_S + (PAIRS_S + PATIENCE_S if machines > 2 else 0)


def backend_of(reports: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The backend for these machines, or "" and why there can be no all-reduce."""
    gpus = {name: bool(one["facts"]["torch"]["available"]) for name, one in reports.items()}
    errors = {name: one["facts"]["torch"]["error"] for name, one in reports.items()}
    for name, error in errors.items():
        if error and not error.startswith("no answer"):  # slow is not broken
            return "", f"torch cannot be imported on {name} ({error})"
    if len(set(gpus.values())) > 1:
        return "", "torch finds GPUs on some machines and none on others"
    return "nccl" if all(gpus.values()) else "gloo", ""


def able(nodes: Sequence[int], closed: Sequence[int], links: Sequence[Link]) -> tuple[list[int], list[Pair]]:
    """The machines that can take part, and by rank the pairs of them that are known not to reach each other.

    Out are those that machine 0's port is `closed` to, where the store is, and those that reach none of the others.
    """
    dead = {tuple(sorted((one.start, one.end))) for one in links if one.status == "dead"}
    here = [node for node in nodes if node not in closed]
    here = [one for one in here if not one or any(tuple(sorted((one, it))) not in dead for it in here if it != one)]
    apart = [pair for pair in combinations(range(len(here)), 2) if (here[pair[0]], here[pair[1]]) in dead]
    return here, apart


def outcome(backend: str, results: Mapping[str, Mapping[str, Any]]) -> Reduced:
    """The results of the one over all, by machine, as one; each has milliseconds or `error`, or nothing where it was left out."""
    results = {name: {key: one[key] for key in one if key != "pairs"} for name, one in results.items()}
    if failed := _failed(results):
        said = "; ".join(f"{name}: {error}" for name, error in list(failed.items())[:4])
        return Reduced("failed", f"over {backend}: {said}", backend, results)
    if not all("kib_ms" in one for one in results.values()):
        return Reduced("skipped", f"over {backend}: not every pair can", backend)
    kib, mib = (max(float(one[key]) for one in results.values()) for key in ("kib_ms", "mib_64_ms"))
    found = f"over {backend}: 1 KiB in {kib:.2g} ms, 64 MiB in {mib:.0f} ms ({64e3 / mib:.0f} MiB/s)"
    return Reduced("ok", found, backend, results)


def of_each(reduced: Reduced) -> str:
    """What each machine saw of the one over all, in lines."""
    lines = []
    for name, one in (reduced.nodes or {}).items():
        kib, mib = float(one["kib_ms"]), float(one["mib_64_ms"])
        lines.append(f"{name}: {kib:.2g} ms, {64e3 / mib:.0f} MiB/s")
    return "\n".join(lines)


def remark(reduced: Reduced) -> list[Folded]:
    """The check that an all-reduce which failed comes to."""
    if reduced.status != "failed" or reduced.nodes is None:
        return []
    return [Folded("all-reduce", "fail", reduced.found, _FIX, tuple(_failed(reduced.nodes)))]


def _failed(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Who could not take part and why; those that only waited where there is nobody else to blame."""
    errors = {name: str(one["error"]) for name, one in results.items() if "error" in one}
    return {name: error for name, error in errors.items() if error != WAITED} or errors


def pairs_of(nodes: Sequence[int], results: Mapping[int, Mapping[str, Any]], apart: Sequence[Pair] = ()) -> list[Link]:
    """Every pair that was to be tried, of machines by rank and their results by machine: the slower figures of both ends."""
    said = {rank: _said(results.get(node, {}), rank, len(nodes)) for rank, node in enumerate(nodes)}
    found = []
    for one, other in (pair for pairs in rounds_of(range(len(nodes))) for pair in pairs):
        if (min(one, other), max(one, other)) in apart:
            continue
        both = [said[rank][with_] for rank, with_ in ((one, other), (other, one)) if with_ in said[rank]]
        failed = [entry["found"] for entry in both if entry["latency_ms"] is None or entry["mib_per_s"] is None]
        ends = nodes[one], nodes[other]
        if failed or not both:
            found.append(Link(*ends, status="dead" if both else "not tried", found=failed[0] if failed else ""))
        else:
            rate = min(entry["mib_per_s"] for entry in both)
            found.append(Link(*ends, max(entry["latency_ms"] for entry in both), rate))
    return judged(found, PAIRS)


def _said(result: Mapping[str, Any], rank: int, machines: int) -> dict[int, Mapping[str, Any]]:
    """A machine's pairs by the other's rank; of two machines the one over all is that of the pair."""
    if machines > 2 or not result:
        return {one["other"]: one for one in result.get("pairs", ())}
    figures = {
        "latency_ms": result.get("kib_ms"),
        "mib_per_s": 64e3 / result["mib_64_ms"] if "kib_ms" in result else None,
    }
    return {1 - rank: {**figures, "found": result.get("error", "")}}


def pair_remarks(pairs: Sequence[Link], names: Mapping[int, str], reduced: Reduced) -> list[Folded]:
    """The checks of slow and dead pairs; none where no pair works, which the one over all has said."""
    if reduced.status == "failed" and not any(one.latency_ms is not None for one in pairs):
        return []
    return remarks(pairs, names, PAIRS)


def take_part(order: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """This machine's process, to its end: milliseconds by size, or `error`; and of more than two machines its `pairs`."""
    asked = json.dumps({name: order[name] for name in ("backend", "rank", "world", "address", "port", "apart")})
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    blocking = {"TORCH_NCCL_BLOCKING_WAIT": "1"}  # what takes too long is then an error, and not the process' end
    argv = (sys.executable, "-m", "packtrain.diagnose.cluster.all_reduce_process")
    try:
        said = _last(command(argv, limit_s(order["world"]), {**quiet, **blocking, **env}, hold=lambda: asked))
        return said or {"error": "its process said nothing"}
    except NoAnswer as refusal:
        known, why = _last(refusal.output), str(refusal)
        why = "its process ended without a word" if why.startswith("{") else why
        return known if "kib_ms" in known else {"error": why, **known}


def _last(output: str) -> dict[str, Any]:
    """What the last line of a process says, {} where it says nothing."""
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return {}


def checked(result: Any) -> dict[str, Any]:
    """The result of another machine. Raises ValueError, KeyError or TypeError where it is none."""
    result = dict(result)
    if not {"error", "pairs", "kib_ms"} & set(result):
        raise ValueError("no result")
    pairs = [
        {
            "other": int(one["other"]),
            "latency_ms": None if one["latency_ms"] is None else float(one["latency_ms"]),
            "mib_per_s": None if one["mib_per_s"] is None else float(one["mib_per_s"]),
            "found": str(one["found"])[:300],
        }
        for one in result.get("pairs", ())
    ]
    figures = {key: float(result[key]) for key in ("kib_ms", "mib_64_ms")} if "kib_ms" in result else {}
    return {**result, **figures, **({"pairs": pairs} if "pairs" in result else {})}
