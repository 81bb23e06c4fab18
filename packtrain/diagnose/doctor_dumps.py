"""What the ranks of an ended run waited for, by the dumps of torch's flight recorders in logs/ (launch/recorder.py).

A dump is a pickle of plain containers, and is read as nothing else: a run folder may come from anywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from packtrain.diagnose.doctor_elsewhere import Pointer
from packtrain.monitor.old.flight_recorder import dumps_in
from packtrain.monitor.old.heartbeat import Beat
from packtrain.monitor.old.rank_state import RankState
from packtrain.monitor.old.stacks import Collective, Frame, passed_of, pending_of


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a dump of plain containers")


def dumped(logs: Path, pointers: Mapping[int, Pointer]) -> list[RankState]:
    """The ranks that have left a dump, where their last heartbeats in `pointers` were; the others are not among them."""
    hosts = {rank: one["host"] for one in pointers.values() for rank in range(*one["ranks"])}
    beats = {int(rank): beat for one in pointers.values() for rank, beat in one.get("last", {}).items()}
    codes = {int(rank): code for one in pointers.values() for rank, code in one.get("codes", {}).items()}
    found = []
    for rank, file in sorted(dumps_in(logs).items()):
        with suppress(OSError, pickle.PickleError, EOFError, LookupError, TypeError, ValueError, AttributeError):
            beat = Beat(**beats[rank]) if rank in beats else None
            ended = 0 if codes.get(rank) == 0 else None
            found.append(_state(_read(file), RankState(rank, hosts.get(rank, "?"), beat, exit=ended)))
    return found


def line_of(one: RankState) -> str:
    """What it waited for, in words."""
    who = f"rank {one.rank} on {one.host}"
    if one.pending:
        return f"{who} waited in {one.pending}"
    return (
        f"{who} waited in no collective operation; the last that it passed is {one.passed[0] if one.passed else 'none'}"
    )


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return _Plain(opened).load()


def _state(recorded: dict[str, Any], known: RankState) -> RankState:
    pending, passed = pending_of(recorded), passed_of(recorded)
    frames: tuple[Frame, ...] = ()
    for entry in recorded["entries"] if pending else ():
        if (str(entry["pg_id"]), entry["collective_seq_id"]) == (pending[0]["group"], pending[0]["number"]):
            frames = tuple(Frame(one["filename"], int(one["line"]), one["name"]) for one in entry.get("frames", ()))
    return RankState(
        known.rank,
        known.host,
        known.beat,
        exit=known.exit,
        stack=frames,
        pending=Collective(**pending[0]) if pending else None,
        passed=tuple(Collective(**one) for one in passed),
        told=True,
    )
