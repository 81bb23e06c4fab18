"""`packtrain doctor RUN_DIR`: where the ranks of a run are, and why it stands still or has failed, during or after it.

While a run goes on, its heartbeats are on its own machines, in memory; logs/heartbeats-*.json says where. Those of this machine
are read, the launchers of the others are asked (doctor_elsewhere.py). The diagnosis is the watchdog's (launch/diagnosis.py),
only sooner: whoever asks has a reason to.
"""

from __future__ import annotations

import json
import platform
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packtrain.diagnose.doctor_dumps import dumped, line_of
from packtrain.diagnose.doctor_elsewhere import Inquiry, Machine, Pointer, pointers_in, read_json
from packtrain.errors import UserError
from packtrain.launch.exit_status import MOST_TELLING, TAIL_LINES
from packtrain.launch.processes import killed_for_memory, sight
from packtrain.launch.run_lock import locked
from packtrain.launch.telling import pointer_of
from packtrain.monitor.old.diagnosis import CAUSES, FRAMES_SHOWN, Diagnosis, diagnose
from packtrain.monitor.old.heartbeat import read_beats
from packtrain.monitor.old.rank_state import RankState
from packtrain.monitor.old.time_limits import LEAST_S, most_s
from packtrain.monitor.old.watchdog import BETWEEN_RANKS, DIAGNOSIS, Watchdog, stacks_of
from packtrain.run_folder import RunFolder
from packtrain.wording import ranks_in_words

_BETWEEN_LOOKS_S = 1.2
_SUSPICIOUS_S, _SUSPICIOUS_STEPS = 5, 5
_SOONER = 5  # a part of what the watchdog allows, where nothing is known of steps
_FAILED = 4
_ALL_NEEDED = (
    "  → they wait for ranks of which nothing is known: look whether those machines are up, and their launchers there"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`status`: running, stalled, done, stopped or failed; `lines` say so to people.

    `ranks` are those that something is known of, `silent` the machines that nothing is known of now."""

    status: str
    lines: Sequence[str]
    ranks: Sequence[RankState] = ()
    diagnosis: Diagnosis | None = None
    silent: Sequence[Machine] = ()

    @property
    def exit_code(self) -> int:
        """4 for a run that stands still or has failed."""
        return _FAILED if self.status in ("stalled", "failed") else 0

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        diagnosis = self.diagnosis and {"cause": self.diagnosis.cause, "ranks": list(self.diagnosis.ranks)}
        return {
            "status": self.status,
            "lines": list(self.lines),
            "ranks": [asdict(one) for one in self.ranks],
            "diagnosis": diagnosis,
            "silent": [{"host": one.host, "ranks": list(one.ranks), "told_s_ago": one.ago_s} for one in self.silent],
        }


def show_run(place: str, *, ask: bool, as_json: bool) -> int:
    """Prints what is found out about the run folder `place` and returns the exit code; `ask` its live ranks for stacks."""
    found = examine(RunFolder(Path(place).expanduser()), ask=ask)
    print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines))
    return found.exit_code


def examine(folder: RunFolder, *, ask: bool = False) -> Finding:
    """What can be told of a run from this machine. Raises UserError where no run is."""
    pointers = pointers_in(folder.logs)
    if not folder.logs.is_dir() and not folder.summary.exists():
        fix = "Name the folder that trainer.output_dir is."
        raise UserError("there is no run of packtrain", where=str(folder.root), fix=fix)
    by_sbatch = all("slurm-" in file.name for file in folder.logs.glob("*"))
    if by_sbatch and not folder.config.exists() and not folder.summary.exists():
        fix = "It may wait in a queue (squeue); if it has been started, its terminal or log says why it is not here."
        raise UserError("no run has begun here yet", where=str(folder.root), fix=fix)
    live = {node: one for node, one in pointers.items() if one.get("folder")}
    here = [one for one in live.values() if one["host"] == platform.node()]
    near = {node: one for node, one in live.items() if one in here and _goes_on(one)}
    if here and not near:
        return _of_a_killed_run(here)
    if not live:
        return _of_an_ended_run(folder, pointers)
    inquiry = Inquiry(folder.logs, {node: one for node, one in live.items() if node not in near}, stacks=ask)
    watchdogs = [_watchdog(folder, one) for one in near.values()]
    _look(watchdogs, inquiry)
    if inquiry.ended():
        return examine(folder, ask=ask)
    unseen = max(one.get("machines", 1) for one in live.values()) - len(pointers)
    return _of_a_live_run(folder, watchdogs, inquiry.machines(), unseen, _timeout(live), ask=ask)


def _goes_on(one: Pointer) -> bool:
    return sight(one["launcher"]).state not in ("", "Z") and Path(one["folder"]).is_dir()


def _timeout(live: Mapping[int, Pointer]) -> float:
    return max(one["step_timeout"] for one in live.values())


def _watchdog(folder: RunFolder, one: Pointer) -> Watchdog:
    ranks, timeout = range(*one["ranks"]), one["step_timeout"]
    return Watchdog(Path(one["folder"]), folder.logs, ranks=ranks, host=one["host"], step_timeout=timeout)


def _look(watchdogs: Sequence[Watchdog], inquiry: Inquiry) -> None:
    """Until it is known which ranks here move, and the other machines have answered."""
    while True:
        for one in watchdogs:
            one.note()
        if inquiry.over():
            break
        time.sleep(_BETWEEN_LOOKS_S)
    if watchdogs:
        time.sleep(_BETWEEN_LOOKS_S)
        for one in watchdogs:
            one.note()


def _of_a_killed_run(here: Sequence[Pointer]) -> Finding:
    """Its heartbeats are there until the next run begins, and nobody is."""
    launchers = [one["launcher"] for one in here]
    beats = {rank: beat for one in here for rank, beat in read_beats(Path(one["folder"])).items()}
    lines = [f"the launcher of this run (process {launchers[0]}) is gone without a word: it was killed"]
    if sight(launchers[0]).state not in ("", "Z"):  # or another process has its number
        lines.append(f"  unless that process is it, of which only the heartbeats are gone: ps -fp {launchers[0]}")
    lines += [f"  rank {rank} was last in {beat.place}" for rank, beat in beats.items()]
    advice = "start the same command again: complete checkpoints are kept"
    if any(killed_for_memory(pid) for pid in (*launchers, *(beat.pid for beat in beats.values()))):
        why, advice = CAUSES["memory"]
        lines.append(f"  likely cause: {why}")
    return Finding("failed", [*lines, f"  → {advice}"])


def _of_a_live_run(
    folder: RunFolder,
    watchdogs: Sequence[Watchdog],
    elsewhere: Sequence[Machine],
    unseen: int,
    step_timeout: float,
    *,
    ask: bool,
) -> Finding:
    """`watchdogs` are those of this machine; of `unseen` machines the folder has nothing."""
    silent = [one for one in elsewhere if one.silent]
    told = [state for one in elsewhere if not one.silent for state in one.states]

    def states() -> list[RankState]:
        return sorted(
            [*told, *(one for watchdog in watchdogs for one in watchdog.states({}))], key=lambda one: one.rank
        )

    suspicious = _stands_still(states(), step_timeout)
    if ask or suspicious:
        for one in watchdogs:
            one.ask()
    known = states()
    lines = [*map(_line, known), *_of_silent(silent, unseen), *(_stacks(folder, known) if ask else [])]
    found = diagnose(known) if suspicious else None
    if found is not None and found.cause in ("busy", "writing"):
        return Finding("running", [*lines, f"{found.what}, and still at work"], known, silent=silent)
    if found is not None and (silent or unseen) and found.cause in BETWEEN_RANKS:
        return Finding("stalled", [*lines, _ALL_NEEDED], known, silent=silent)
    if found is not None:
        return Finding("stalled", [*lines, *found.lines], known, found, silent)
    nobody = not known and any(one.asked for one in silent)
    return Finding("stalled" if nobody else "running", lines, known, silent=silent)


def _of_silent(silent: Sequence[Machine], unseen: int) -> list[str]:
    """Of machines whose ranks nothing is known of now; what they said before is shown with its age."""
    lines = []
    for one in silent:
        lines.append(f"{one} {one.why}")
        if one.ago_s is not None:
            lines.append(f"  it last told of its ranks {one.ago_s:.0f} s ago:")
            lines += [f"    {_line(state)}" for state in one.states]
    if unseen > 0:
        number = f"{unseen} more machine{'s' if unseen > 1 else ''}"
        lines.append(
            f"{number} of this run cannot be seen in this folder, which is not shared: start packtrain doctor there"
        )
    return lines


def _stands_still(states: Sequence[RankState], step_timeout: float) -> bool:
    if any(one.dead or one.state == "T" for one in states if one.beat):
        return True
    live = [one for one in states if one.beat and not one.at_its_end]
    return bool(live) and all(one.still_s >= _suspicious_s(one, step_timeout) for one in live)


def _suspicious_s(one: RankState, step_timeout: float) -> float:
    if one.beat is None or not one.in_a_step:
        return min(most_s(step_timeout) / _SOONER, LEAST_S)
    return max(_SUSPICIOUS_S, _SUSPICIOUS_STEPS * one.beat.usual_s)


def _line(state: RankState) -> str:
    if state.beat is None:
        return f"rank {state.rank} on {state.host}: has said nothing yet"
    process = {"T": ", stopped", "": ", gone", "Z": ", gone", "D": ", waiting for a device"}.get(state.state, "")
    return f"rank {state.rank} on {state.host} (process {state.beat.pid}{process}): for {state.still_s:.0f} s in {state.beat.place}"


def _stacks(folder: RunFolder, states: Sequence[RankState]) -> list[str]:
    said = []
    for state in states:
        if state.beat is not None:
            who = f"rank {state.rank} on {state.host}"
            said.append(f"stack of {who}, innermost call first (all threads: {stacks_of(folder.logs, state.rank)}):")
            said += [f"    {frame}" for frame in state.stack[:FRAMES_SHOWN]] or ["    it does not answer"]
            said += [f"    in {state.pending}"] if state.pending else []
    return said


def _of_an_ended_run(folder: RunFolder, pointers: Mapping[int, Pointer]) -> Finding:
    report = folder.logs / DIAGNOSIS
    if _newer_attempt(folder, pointers):
        return _of_a_start(folder)
    if report.exists():
        return Finding("failed", report.read_text(encoding="utf-8").splitlines())
    if folder.status() not in ("done", "stopped") and (states := dumped(folder.logs, pointers)):
        return _of_dumps(states, sum(len(range(*one["ranks"])) for one in pointers.values()))
    codes = {int(rank): code for one in pointers.values() for rank, code in one.get("codes", {}).items()}
    if failures := {code for code in codes.values() if 0 < code <= 128}:
        telling = next((code for code in MOST_TELLING if code in failures), min(failures))
        failed = sorted(rank for rank, code in codes.items() if code == telling)
        first = failed[0]
        begun = max((one.get("logs", {}).get(str(first), 0) for one in pointers.values()), default=0)
        ends = [
            f"{ranks_in_words(failed)} failed (exit code {telling}); the end of {folder.log(first)}:",
            *(f"    {line}" for line in _tail(folder.log(first), begun)),
        ]
        return Finding("failed", [*ends, *_of_an_attempt(folder)])
    if (status := folder.status()) is not None:
        summary = read_json(folder.summary)
        return Finding(status, [f"this run is {status} after step {summary.get('steps')}"])
    if codes and min(codes.values()) > 128:
        name = signal.Signals(min(codes.values()) - 128).name
        return Finding("stopped", [f"this run was stopped by {name} before its first step"])
    what = "this run has ended without results, and none of its processes said why"
    return Finding("failed", [what, f"  → see {folder.logs}/"])


def _of_dumps(states: Sequence[RankState], ranks: int) -> Finding:
    """Of a run whose collectives have run out of time, with nobody to say why they did."""
    lines = [
        "a collective operation ran out of time; by the flight recorders in logs/:",
        *(f"  {line_of(one)}" for one in states),
    ]
    found = diagnose(states) if all(one.beat for one in states) else None
    if found is None or (len(states) < ranks and found.cause in BETWEEN_RANKS):
        return Finding(
            "failed",
            [
                *lines,
                "  → see the logs of the ranks that wait in another operation than most, or in none, or left no dump",
            ],
            states,
        )
    return Finding("failed", [*lines, *found.lines], states, found)


def _newer_attempt(folder: RunFolder, pointers: Mapping[int, Pointer]) -> bool:
    """Whether a run was prepared here after the one that has left the pointers."""
    try:
        told = max((pointer_of(folder.logs, node).stat().st_mtime for node in pointers), default=0.0)
        return folder.attempt.config.stat().st_mtime > told
    except OSError:
        return False


def _of_a_start(folder: RunFolder) -> Finding:
    """Of a run that has started no process."""
    try:
        with locked(folder.root):
            what = f"the last attempt here ({folder.attempt.config}) was ended before it had started any process"
            return Finding("failed", [what, "  → its terminal, or the log of its job, says why"])
    except UserError:
        return Finding("running", ["a run is about to start here"])


def _of_an_attempt(folder: RunFolder) -> list[str]:
    """That a run has not begun to train, and what is in the folder in its place."""
    if not folder.attempt.root.is_dir():
        return []
    earlier = folder.status()
    left = "" if earlier is None else f"; the results here are those of an earlier run, which is {earlier}"
    return [f"it ended before its first step, its config is {folder.attempt.config}{left}"]


def _tail(log: Path, begun: int) -> list[str]:
    """The last lines of a log that come after its first `begun` bytes, which are of earlier runs."""
    try:
        with log.open("rb") as file:
            file.seek(begun if begun < log.stat().st_size else 0)  # another file by that name, where it is shorter
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
