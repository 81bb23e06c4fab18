"""The watchdog of one machine: reads the heartbeats of its ranks every second and says when, and why, they stand still.

It has no thread and asks no collective: the launcher calls `look` while it waits for its workers. When no rank has moved for
long all are asked for their stacks and pending collectives, and one diagnosis comes of it, as soon as those that keep the
others waiting have taken longer than they may (patience.py): 45 s where they do nothing at all (effort.py), most of the
collectives' time limit where they compute, load or write something, and for ever where no collective waits for them. Of
several machines each has one; what lies between machines is told by that of machine 0 alone, which has heard the `report` of
each: they ask sooner, so that all is known when it is time to tell.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from packtrain.launch.crash import crash_of, ends_of
from packtrain.launch.effort import Effort, count
from packtrain.launch.processes import gpu_error, killed_for_memory, oom_counter, oom_kills, sight
from packtrain.launch.telling import Teller
from packtrain.monitor.old import stacks
from packtrain.monitor.old.diagnosis import ABORTED, Diagnosis, diagnose, not_begun, waiting
from packtrain.monitor.old.flight_recorder import dumps_in
from packtrain.monitor.old.heartbeat import WRITING, Beat, read_beats
from packtrain.monitor.old.rank_state import RankState
from packtrain.monitor.old.time_limits import CHECKPOINT_S, JOIN_S, TimeLimits, most_s, patience_s
from packtrain.run_folder import in_time

DIAGNOSIS = "diagnosis.txt"
LOOK_S = 1.0
STOPPED_S = 5
"""Seconds after which a stopped process (SIGSTOP) counts as one."""
BEGIN_S = 600
"""Seconds after which it is said that no rank has come to its first heartbeat: Python may come off a slow disk."""
_JUST_S = 3  # a rank that stands still so long is worth a question
_AGAIN_S = 5  # between two reports of what one machine cannot tell, at most
_ROUNDS = 3  # of them before there may be a diagnosis: watchers beside a foreign launch hear of one in the next
_WINDOW_S = 5  # in which the ranks are seen to be at work or not
_WINDOWS = 4  # at least, before it is said that they are not
BETWEEN_RANKS = ("network", "collectives", "ended", "lock")
"""Causes that one machine cannot tell by its own ranks alone."""
_LONGEST_LOOK_S = 3  # what lies longer between two looks is no standstill of the ranks: all of us were suspended


def stacks_of(logs: Path, rank: int) -> Path:
    """Where the stacks of a rank are that it was asked for."""
    return logs / f"stacks-rank-{rank:05d}.txt"


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


@dataclass(slots=True)
class _Seen:
    """What was seen of a rank: its last record, for how long (s) it has been that and its process stopped, and what it did
    meanwhile; `kills` are those that the cgroup's `counter` had in the beginning."""

    beat: Beat
    counter: Path | None
    kills: int
    still_s: float = 0.0
    stopped_s: float = 0.0
    effort: Effort = field(default_factory=Effort)


class Watchdog:
    """Watches `ranks` of machine `node`, called `host`, whose heartbeats are in `folder`; writes into `logs`."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        *,
        ranks: range,
        host: str,
        step_timeout: float,
        checkpoint_timeout: float = CHECKPOINT_S,
        join_timeout: float = JOIN_S,
        machines: int = 1,
    ) -> None:
        self.codes: Mapping[int, int] = {}
        """Exit codes of the ranks that have ended, for those who look later."""
        self._machines = machines
        self._report: list[dict[str, Any]] | None = None
        self._reports: Mapping[int, tuple[float, list[dict[str, Any]]]] = {}
        self._folder, self._logs, self._ranks, self._host = folder, logs, ranks, host
        self._limits = TimeLimits(step_timeout, checkpoint_timeout, join_timeout)
        self._seen: dict[int, _Seen] = {}
        self._noted, self._awake_s, self._blind = time.monotonic(), 0.0, False
        self._least_s = self._limits.shortest_s
        self._again_s = min(_AGAIN_S, self._least_s / (_ROUNDS + 1))
        self._first_s = self._least_s - (_ROUNDS * self._again_s if machines > 1 else 0)
        self._asked_at = self._first_s  # seconds of standstill at which the ranks are asked next
        self._answers: dict[int, stacks.Answer] = {}
        self._begun, self._gpu_error = time.monotonic(), ""
        self._teller: Teller | None = None

    @property
    def trains(self) -> bool:
        """Whether any rank has come through what is before training."""
        return any(one.beat.progress >= (1,) for one in self._seen.values())

    @contextmanager
    def found_by_others(self, node: int, *, answers: bool = True) -> Iterator[None]:
        """Inside the block logs/ says where the heartbeats are; afterwards what the last ones were.

        With `answers` packtrain doctor may ask from other machines; `look` is then to be called now and again.
        """
        for old in (
            *(stacks_of(self._logs, rank) for rank in self._ranks),
            *(dump for rank, dump in dumps_in(self._logs).items() if rank in self._ranks),
            *([self._logs / DIAGNOSIS] if not node else []),
        ):
            with contextlib.suppress(OSError):
                old.unlink()
        about = {
            "host": self._host,
            "ranks": [self._ranks.start, self._ranks.stop, self._ranks.step],
            "machines": self._machines,
            "step_timeout": self._limits.step_s,
            "logs": {rank: _size(self._logs / f"rank-{rank:05d}.log") for rank in self._ranks},  # of earlier runs
        }
        teller = Teller(self._logs, node, {**about, "launcher": os.getpid(), "folder": str(self._folder)})
        teller.start(answers=answers)
        self._teller = teller if answers else None
        try:
            yield
        finally:
            self.note()
            last = {rank: asdict(one.beat) for rank, one in self._seen.items()}
            in_time(lambda: teller.close({**about, "last": last, "codes": self.codes}), None)

    def look(self, codes: Mapping[int, int]) -> Diagnosis | None:
        """Why the ranks of this machine stand still, if they do; `codes` are exit codes of those that have ended.

        Returns at once but once a second, and when it asks the ranks.
        """
        if time.monotonic() - self._noted < LOOK_S:
            return None
        self.note()
        self._say_if_blind()
        self._tell(codes)
        if not self._seen and not codes and self._awake_s >= BEGIN_S and not self._has_begun():
            return self.write(not_begun(self._ranks, self._host, self._awake_s))
        live = [one for rank, one in self._seen.items() if rank not in codes]
        if not live or any(codes.values()):  # who has failed is known
            return None
        if any(one.stopped_s >= min(STOPPED_S, most_s(self._limits.step_s)) for one in live):
            return self._conclude(codes)
        still = min(one.still_s for one in live)
        if still < LOOK_S or len(self._seen) < len(self._ranks):
            self._asked_at = self._first_s
        elif still >= self._asked_at or self._may_hold(codes, still):
            return self._judge(codes, still)
        return None

    def _has_begun(self) -> bool:
        """Whether any rank has come so far that it could be asked."""
        return any(self._folder.glob("*.stacks")) or not self._folder.is_dir()

    def blind(self) -> str:
        """Why nothing of the ranks is seen any more, in words; "" where it is."""
        if not self._seen or self._folder.is_dir():
            return ""
        return (
            f"the heartbeats of the ranks on {self._host} are gone from {self._folder.parent} (systemd's RemoveIPC takes them "
            "away when their user logs out): the run goes on, and is not watched any more"
        )

    def _say_if_blind(self) -> None:
        if not self._blind and (why := self.blind()):
            self._blind = True
            print(why, file=sys.stderr, flush=True)

    def _may_hold(self, codes: Mapping[int, int], still: float) -> bool:
        """Whether by what the ranks answered last there would be a diagnosis now: one may have stopped working since."""
        states = self.states(codes)
        found = diagnose(states) if self._answers else None
        if found is None or (self._machines > 1 and found.cause in BETWEEN_RANKS):
            return False
        return still >= patience_s(found, states, self._limits)

    def _tell(self, codes: Mapping[int, int]) -> None:
        """Leaves what is known of the ranks in logs/, where packtrain doctor asks for it or they stand still."""
        live = [one for rank, one in self._seen.items() if rank not in codes]
        still = min((one.still_s for one in live), default=0.0)
        usual = max((one.beat.usual_s for one in live), default=0.0)
        if self._teller is None or not self._teller.due(still, usual):
            return
        question = self._teller.question
        asked = question is not None and (question.stacks or still >= _JUST_S)
        if asked:
            self.ask()
        self._teller.tell([one.to_json() for one in self.states(codes)], question, asked=asked)

    def report(self) -> list[dict[str, Any]] | None:
        """What the ranks here answered, as RankState.to_json has it, for the watchdog of machine 0 (`hear`).

        Only where they stand still for what one machine cannot tell by itself, and once: None until they are asked again.
        """
        report, self._report = self._report, None
        return report

    def hear(self, reports: Mapping[int, tuple[float, list[dict[str, Any]]]]) -> None:
        """Takes the reports of the other machines, with the time (time.monotonic()) at which each came."""
        self._reports = reports

    def at_work(self, lately_s: float) -> list[int]:
        """The ranks that stand still and have computed or moved bytes in the last `lately_s`, they or their children."""
        return [rank for rank, one in self._seen.items() if one.effort.cores(lately_s)]

    def ask_if_still(self) -> None:
        """Has the ranks say their stacks, for the logs, if they stand still."""
        if self._seen and all(one.still_s >= _JUST_S for one in self._seen.values()):
            self.ask()

    def waiting(self, codes: Mapping[int, int]) -> tuple[str, ...]:
        """What the ranks do that have neither failed nor stopped, in words: they may have lost others (PeerFailed)."""
        self.note()
        fine = [one for one in self.states(codes) if one.beat and one.exit in (None, 4) and one.state != "T"]
        return waiting(fine)

    def states(self, codes: Mapping[int, int]) -> list[RankState]:
        """What is known of every rank, with its answer if it was asked; `RankState.to_json` makes it fit for a line."""
        return [self._state(rank, codes.get(rank)) for rank in self._ranks]

    def ask(self) -> None:
        """Has the ranks say their stacks and pending collectives; they go on afterwards."""
        self._measure(LOOK_S)
        self.gpu_error()
        pids = {rank: one.beat.pid for rank, one in self._seen.items() if sight(one.beat.pid).state not in ("", "Z")}
        self._answers = stacks.ask(self._folder, pids)
        self._keep_stacks()

    def _keep_stacks(self) -> None:
        """In logs/ are those of the last answers alone: earlier ones would show where a rank is no more."""
        said = {rank: answer.text for rank, answer in self._answers.items() if answer.text}
        files = {stacks_of(self._logs, rank): said.get(rank) for rank in self._ranks}
        in_time(
            lambda: [file.write_text(text) if text else file.unlink(missing_ok=True) for file, text in files.items()],
            [],
        )

    def ends(self, silent: Collection[int], log: Path) -> dict[int, int]:
        """The signals (negative) or exit codes of ranks that ended without a word (`silent`), as far as they are known: by what
        they left when they crashed, or by torchrun's `log`."""
        pids = {rank: one.beat.pid for rank, one in self._seen.items() if rank in silent}
        return ends_of(self._folder, pids, in_time(lambda: log.read_text(errors="replace"), ""))

    def aftermath(self, silent: Collection[int], codes: Mapping[int, int], log: Path) -> Diagnosis | None:
        """Why ranks that ended without a word (`silent`) did, torchrun's `log` may have their signals; or who left too early
        where others have lost their peers. None where neither is the case.

        It is left in logs/, but for ranks that did no more than abort: why they did another machine may know (verdict.py).
        """
        self.note()
        self.gpu_error()
        ends = self.ends(silent, log)
        for one in self._seen.values():
            one.still_s = 0.0
        states = [self._crashed(one) if one.rank in silent else one for one in self.states({**codes, **ends})]
        found = diagnose(states)
        if found is None or found.cause not in ("killed", "left", "gpu", "memory", "ended"):
            return None
        only_aborted = bool(silent) and all(ends.get(rank) == ABORTED for rank in silent)
        return found if only_aborted else self.write(found)

    def _crashed(self, state: RankState) -> RankState:
        """One that is gone, with what it left where it crashed, which is kept in logs/."""
        if (crash := crash_of(self._folder, str(state.rank))) is None:
            return replace(state, state="", unsaid=True)
        in_time(lambda: stacks_of(self._logs, state.rank).write_text(crash.text), 0)
        return replace(state, state="", unsaid=True, stack=crash.stack, died=crash.at)

    def gpu_error(self) -> str:
        """What the kernel of this machine has said of a GPU (Xid) since the start; "" where nothing."""
        self._gpu_error = gpu_error(self._begun)
        return self._gpu_error

    def note(self) -> None:
        """Reads the heartbeats."""
        now = time.monotonic()
        passed, self._noted = min(now - self._noted, _LONGEST_LOOK_S), now
        self._awake_s += passed
        for rank, beat in read_beats(self._folder).items():
            one = self._seen.get(rank)
            if one is None or one.beat.pid != beat.pid:
                counter = oom_counter(beat.pid)
                self._seen[rank] = _Seen(beat, counter, oom_kills(counter), max(now - beat.at, 0))
                continue
            state = sight(beat.pid).state
            one.stopped_s = one.stopped_s + passed if state == "T" else 0.0
            if beat.number == one.beat.number:
                one.still_s += passed
                one.effort.passes(passed, runs=state == "R")
            else:
                one.beat, one.still_s, one.effort = beat, 0.0, Effort()
                self._answers.pop(rank, None)  # it is not there any more
        self._measure(min(_WINDOW_S, self._least_s / _WINDOWS))

    def _measure(self, window_s: float) -> None:
        """Looks what ranks that stand still do, where it was last done `window_s` ago."""
        soon = min(window_s, 2 * LOOK_S)  # not in every step: it means to look at all processes of the machine
        looked_at = [one for one in self._seen.values() if one.still_s >= soon and one.effort.due(window_s)]
        still = {one.beat.pid: one for one in looked_at}
        for pid, counts in (count(still) if still else {}).items():
            one = still[pid]
            one.effort.measure(counts, writes=counts.writes or (counts.writes is None and one.beat.phase in WRITING))

    def _state(self, rank: int, code: int | None) -> RankState:
        one = self._seen.get(rank)
        if one is None:
            return RankState(rank, self._host, exit=code)
        process = sight(one.beat.pid)
        gone = process.state in ("", "Z")
        oom = gone and (oom_kills(one.counter) > one.kills or killed_for_memory(one.beat.pid))
        # at the end of much that is written a server may be silent until all of it is on its disks
        least_s, phase = self._limits.least_s(one.beat.phase), one.beat.phase
        lately_s = max(least_s, one.still_s / 2 if phase in WRITING else 0.0)
        answer = self._answers.get(rank, stacks.Answer())
        return RankState(
            rank,
            self._host,
            one.beat,
            round(one.still_s, 1),
            process.state,
            code,
            oom,
            one.effort.cores(lately_s),
            one.effort.moves(lately_s),
            answer.stack,
            answer.pending,
            answer.passed,
            answer.told,
            answer.loaders,
            self._gpu_error,
        )

    def _judge(self, codes: Mapping[int, int], still: float) -> Diagnosis | None:
        self.ask()
        self.note()
        if self._has_ended(codes) or any(one.still_s < still for rank, one in self._seen.items() if rank not in codes):
            return None  # it has gone on while it was asked
        states = self.states(codes)
        found = diagnose(states)
        between = self._machines > 1 and found is not None and found.cause in BETWEEN_RANKS
        if between:
            self._report = [one.to_json() for one in states]
            states += self._of_others()
            found = diagnose(states) if len(states) == self._machines * len(self._ranks) else None
            self._asked_at = still + self._again_s
        if found is None:
            return None
        limit = patience_s(found, states, self._limits)
        if still >= limit:
            return self.write(found)
        at_work = found.cause in ("busy", "writing") and still >= self._least_s
        if at_work and (still >= limit / 2 or all(one.in_a_step for one in states)):
            print(f"{found.what}, still at work; the run ends at {limit:.0f} s", file=sys.stderr, flush=True)
        self._asked_at = min(limit, still + self._again_s if between else 2 * still)
        return None

    def _of_others(self) -> list[RankState]:
        """The ranks of the machines that have reported lately: those that stand still, too."""
        now = time.monotonic()
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            fresh = [
                states for when, states in self._reports.values() if now - when < 2 * self._again_s + stacks.ANSWER_S
            ]
            return [RankState.from_json(one) for states in fresh for one in states]
        return []

    def _conclude(self, codes: Mapping[int, int]) -> Diagnosis | None:
        self.ask()
        found = None if self._has_ended(codes) else diagnose(self.states(codes))
        if found is None or found.cause != "stopped":  # it was let go on meanwhile
            return None
        self._answers |= stacks.let_answer(self._folder, {rank: self._seen[rank].beat.pid for rank in found.ranks})
        self._keep_stacks()
        first = self._answers.get(found.ranks[0], stacks.Answer())
        return self.write(replace(found, stack=first.stack))

    def _has_ended(self, codes: Mapping[int, int]) -> bool:
        """Whether any has come to its end while it was asked: with which code, and whether that tells of it, is yet to be seen."""
        return any(sight(one.beat.pid).state in ("", "Z") for rank, one in self._seen.items() if rank not in codes)

    def write(self, found: Diagnosis) -> Diagnosis:
        """Leaves the diagnosis in logs/, and returns it."""
        text = "\n".join(found.lines) + "\n"
        in_time(lambda: (self._logs / DIAGNOSIS).write_text(text, encoding="utf-8"), 0)
        return found
