"""`packtrain doctor RUN_DIR`: state of the ranks, and why a run stands still or has failed.

It works during and after the run. While a run goes on, logs/channel.json has the address of its control channel, and the watchdog there
answers for all machines. It reports a stall sooner than the terminal does. Afterwards logs/ has the diagnosis and the ranks' last states.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packtrain.errors import Json, PeerFailed, UserError
from packtrain.launch.attempt import is_locked
from packtrain.launch.coordinator import MOST_TELLING, tail_of
from packtrain.monitor.channel import PUBLISHED, Channel, Client
from packtrain.monitor.heartbeat import life_of
from packtrain.monitor.watchdog import DIAGNOSIS, FRAMES_SHOWN, RANKS, RankState, stacks_of
from packtrain.plan.network_settings import LOOPBACK
from packtrain.run_folder import RunFolder, as_type, object_of, read_as, text_of
from packtrain.wording import Redactor, ranks_in_words

WATCHDOG_ANSWER_S = 20  # it may have to ask the ranks for stacks first
_SILENT_S = 10
_START = "a run is about to start here, or has just ended"


@dataclass(frozen=True, slots=True)
class Finding:
    """State of a run. `status`: running, stalled, done, stopped or failed; `lines`: the text for the terminal.

    `ranks` are the known states, `silent` the machines (host, ranks) whose launchers do not report.
    """

    status: str
    lines: Sequence[str]
    ranks: Sequence[RankState] = ()
    diagnosis: Json | None = None
    silent: Sequence[Json] = ()

    @property
    def exit_code(self) -> int:
        """4 for a run that stands still or has failed, else 0."""
        return PeerFailed.exit_code if self.status in ("stalled", "failed") else 0

    def to_json(self) -> Json:
        """Return the document of --json."""
        diagnosis = self.diagnosis and {name: self.diagnosis[name] for name in ("cause", "ranks")}
        return {**asdict(self), "diagnosis": diagnosis}


def show_run(place: str, *, ask: bool, as_json: bool) -> int:
    """Print the state of the run in the folder `place`; return the exit code. `ask`: request stacks of its live ranks."""
    finding = examine(RunFolder(Path(os.path.expanduser(place))), ask=ask)
    document = Redactor(os.environ).plain(finding.to_json())
    print(json.dumps(document, indent=2) if as_json else "\n".join(document["lines"]))
    return finding.exit_code


def examine(folder: RunFolder, *, ask: bool = False, over: bool = False) -> Finding:
    """Examine a run from this machine. `over`: its own process, which still has the lock, says that it has ended. Raises
    UserError if there is no run."""
    channel = folder.logs / PUBLISHED
    logs = [folder.logs / name for name in (RANKS, DIAGNOSIS, PUBLISHED)]
    begun = [folder.summary, folder.config, folder.attempt.config, *logs]
    if not any(map(os.path.lexists, begun)) and not is_locked(folder.root):
        fix = "Name the folder that trainer.output_dir is; a job may wait in a queue (squeue)."
        raise UserError("no run has begun here", where=str(folder.root), fix=fix, code="no-run")
    if not over and (published := object_of(channel)):
        return _examine_live(folder, read_as(channel, published, Channel), ask)
    return _examine_ended(folder) if over or not is_locked(folder.root) else Finding("running", [_START])


def _examine_live(folder: RunFolder, channel: Channel, ask: bool) -> Finding:
    """Return the finding from the watchdog's answer, or from its silence."""
    here, pid = channel.host == platform.node(), channel.pid
    address = channel.address if here or channel.address != LOOPBACK else channel.host
    try:
        client = Client(address, channel.port, secret=channel.secret)
        answer = client.call("ranks", {"stacks": ask}, timeout_s=WATCHDOG_ANSWER_S)
    except OSError as error:
        state, locked = life_of(pid) if here else "running", is_locked(folder.root)
        if here and locked and state == "gone":
            return Finding("running", [_START])
        if here and not locked and state != "stopped":
            advice = "  → see what ended it (dmesg, the scheduler's log), and start the same command again: it resumes"
            return Finding("failed", [f"the launcher of this run (process {pid}) was killed", advice])
        what = f"{channel.host} (process {pid}, {state}), which watches this run, does not answer: {error}"
        advice = f"kill -CONT {pid}" if state == "stopped" else f"check whether {channel.host} is up"
        return Finding("stalled", [what, f"  → {advice}"])
    ranks, diagnosis = as_type(answer["ranks"], tuple[RankState, ...]), answer["diagnosis"]
    silent = [machine for machine in answer["machines"] if (machine["heard_s"] or 0) > _SILENT_S]
    lines = [*map(_describe, ranks), *(_stacks(folder, ranks) if ask else [])]
    for machine in silent:
        who = f"{machine['host']} ({ranks_in_words(machine['ranks'])})"
        lines.append(f"{who}: its launcher has not been heard of for {machine['heard_s']:.0f} s")
    lines += diagnosis["lines"] if diagnosis else []
    return Finding("stalled" if diagnosis else "running", lines, ranks, diagnosis, silent)


def _describe(state: RankState) -> str:
    if state.heard_s is None:
        return f"rank {state.rank} on {state.host}: no sign of it yet"
    process = f", {state.process.state}" if state.process.state != "running" else ""
    waits = f", waits for {state.waits}" if state.waits else ""
    silent = f"; not heard of for {state.heard_s:.0f} s" if state.heard_s > _SILENT_S else ""
    who = f"rank {state.rank} on {state.host} (process {state.pid}{process})"
    return f"{who}: for {state.still_s:.0f} s in {state.place}{waits}{silent}"


def _stacks(folder: RunFolder, states: Sequence[RankState]) -> Iterator[str]:
    for state in states:
        who = f"rank {state.rank} on {state.host}"
        yield f"stack of {who}, innermost call first (all threads: {stacks_of(folder.logs, state.rank)}):"
        yield from [f"    {frame}" for frame in state.stack[:FRAMES_SHOWN]] or ["    it does not answer"]
        if state.pending:
            yield f"    in {state.pending}"


def _examine_ended(folder: RunFolder) -> Finding:
    """Return the finding for an ended run, from its diagnosis, exit codes or status."""
    file, report, attempt = folder.logs / RANKS, folder.logs / DIAGNOSIS, folder.attempt.config
    ranks: Sequence[RankState] = read_as(file, object_of(file).get("ranks", []), tuple[RankState, ...])
    if attempt.exists() and (not file.exists() or attempt.stat().st_mtime > file.stat().st_mtime):
        what = f"the last attempt here ({attempt}) was ended before it had started any process"
        return Finding("failed", [what, "  → its terminal, or the log of its job, says why"])
    if report.exists():
        return Finding("failed", text_of(report).splitlines(), ranks)
    codes = {state.rank: state.process.code for state in ranks if state.process.code is not None}
    if failures := {code for code in codes.values() if 0 < code <= 128}:
        telling = next((code for code in MOST_TELLING if code in failures), min(failures))
        failed = sorted(rank for rank, code in codes.items() if code == telling)
        log = folder.log(failed[0])
        lines = [f"{ranks_in_words(failed)} failed (exit code {telling}); the end of {log}:"]
        lines += [f"    {line}" for line in tail_of(text_of(log).splitlines())]
        return Finding("failed", lines, ranks)
    if (status := folder.status()) is not None:
        steps = object_of(folder.summary).get("steps")
        return Finding(status, [f"this run is {status} after step {steps}"], ranks)
    if min(codes.values(), default=0) > 128:
        return Finding("stopped", ["this run was stopped by a signal before its first step"], ranks)
    what = "this run has ended without results, and none of its processes said why"
    return Finding("failed", [what, f"  → see {folder.logs}/"], ranks)
