"""The watchdog of a run, told by beats as ranks send them: who is named, when, and when nobody is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from packtrain.monitor import watchdog as module
from packtrain.monitor.channel import Client, Server
from packtrain.monitor.heartbeat import Heartbeat, ProcessState, TimeLimits
from packtrain.monitor.watchdog import DIAGNOSIS, RANKS, Diagnosis, Watchdog, stacks_of

WAITS = {"waits": "the counts of all ranks"}
STACK = 'Thread 0x1 (most recent call first):\n  File "store.py", line 88 in read\n  File "run.py", line 3 in train'


class Clock:
    """time, as the watchdog sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Ranks:
    """Ranks 0 and 1 on n1, 2 and 3 on n2, that beat once a second to a watchdog of theirs."""

    def __init__(self, clock: Clock, logs: Path, limits: TimeLimits | None = None) -> None:
        self.clock, self.logs = clock, logs
        self.watchdog = Watchdog([("n1", [0, 1]), ("n2", [2, 3])], limits or TimeLimits(), logs)
        self.places: dict[int, dict[str, Any]] = {}
        self.changes = 0
        self.silent: set[int] = set()
        self.states = {rank: ProcessState(70 + rank) for rank in range(4)}
        self.answers: dict[int, dict[str, Any]] = {}
        for rank in range(4):
            self.are(rank, phase="backward", step=7)

    def are(self, *ranks: int, **place: Any) -> None:
        for rank in ranks:
            self.places[rank] = {"phase": "backward", "step": 7, "micro": 1, "waits": "", **place}
            self.changes += 1
            self.places[rank]["changes"] = self.changes

    def second(self) -> Diagnosis | None:
        self.clock.now += 1
        for rank, place in self.places.items():
            if rank not in self.silent:
                beat = {"rank": rank, "host": "", "pid": 70 + rank, "usual_s": 1.0, **place}
                if self.watchdog.receive_beat(beat)["ask"] and rank in self.answers:
                    self.watchdog.receive_beat({**beat, **self.answers[rank]})
        for node in (0, 1):
            self.watchdog.receive_processes(node, {rank: self.states[rank] for rank in (2 * node, 2 * node + 1)})
        return self.watchdog.diagnose()

    def until(self, limit_s: int) -> tuple[Diagnosis | None, int]:
        """What is found, and after how many seconds; None where nothing is until the limit."""
        for second in range(1, limit_s + 1):
            if found := self.second():
                return found, second
        return None, limit_s


def answer(pending: tuple[str, int] | None = None, stack: str = STACK) -> dict[str, Any]:
    name, number = pending or ("", 0)
    one = {"name": f"gloo:{name}", "number": number, "group": "0", "what": ""}
    return {"stacks": stack, "collectives": {"pending": one if pending else None, "finished": None}}


@pytest.fixture
def ranks(clock: Clock, tmp_path: Path) -> Ranks:
    return Ranks(clock, tmp_path)


@pytest.mark.parametrize(
    ("phase", "cause", "after_s"),
    [("data", "data", 540), ("forward", "stuck", 540), ("checkpoint", "storage", 1620), ("prepare", "data", 1620)],
)
def test_the_rank_that_does_not_wait_is_named_at_the_deadline_of_its_phase(
    phase: str, cause: str, after_s: int, ranks: Ranks
) -> None:
    ranks.are(0, 1, 3, phase="counts", **WAITS)
    ranks.are(2, phase=phase, step=7)
    ranks.answers = {rank: answer() for rank in range(4)}
    found, after = ranks.until(2000)
    assert found is not None and (found.cause, found.ranks) == (cause, (2,))
    assert after_s <= after <= after_s + 2
    said = "\n".join(found.lines)
    assert "rank 2 on n2 (process 72) is behind: no progress for " in said and "in read" in said
    assert "ranks 0, 1 and 3 on n1 and n2 wait for the counts of all ranks, in exchanging the counts of step 7" in said
    assert (ranks.logs / DIAGNOSIS).read_text() == said + "\n"
    assert "in train" in stacks_of(ranks.logs, 2).read_text()


def test_a_rank_that_tells_of_progress_or_whose_step_takes_long_is_never_named(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.are(0, 1, 3, phase="prepare", waits="the data")
    for _ in range(100):
        ranks.are(2, phase="prepare")
        assert ranks.until(58) == (None, 58)
    assert capsys.readouterr().err == ""


def test_a_rank_whose_beats_are_late_has_the_whole_deadline_from_the_last_on(ranks: Ranks) -> None:
    ranks.are(0, 1, 3, phase="counts", **WAITS)
    ranks.are(2, phase="forward")
    assert ranks.until(500)[0] is None
    ranks.silent.add(2)
    assert ranks.until(300)[0] is None  # it may have gone on
    ranks.silent.clear()
    ranks.are(2, phase="forward", step=8)
    assert ranks.until(300)[0] is None
    ranks.silent.add(2)
    found, after = ranks.until(600)
    assert found is not None and "has sent no heartbeat" in found.what and 535 <= after <= 550


def test_a_rank_that_nothing_is_heard_of_is_named_though_it_waited_when_it_was_last_heard(ranks: Ranks) -> None:
    ranks.are(0, 1, 2, 3, phase="counts", **WAITS)
    assert ranks.second() is None
    ranks.silent.add(1)
    ranks.answers = {rank: answer(("all_reduce", 9)) for rank in range(4)}
    found, _ = ranks.until(600)
    assert found is not None and (found.cause, found.ranks) == ("stuck", (1,))


def test_a_stopped_rank_is_named_within_seconds(ranks: Ranks) -> None:
    ranks.states[3] = ProcessState(73, "stopped")
    ranks.answers = {rank: answer() for rank in range(3)}
    found, after = ranks.until(60)
    assert found is not None and (found.cause, found.ranks) == ("stopped", (3,)) and 5 <= after <= 7


@pytest.mark.parametrize("told", [False, True])
def test_once_a_rank_is_gone_nobody_else_is_named_for_standing_still(told: bool, ranks: Ranks) -> None:
    ranks.states[1] = ProcessState(71, "gone", 2 if told else -9, reported=told)
    assert ranks.until(700)[0] is None
    found = ranks.watchdog.diagnose_deaths()
    assert (found and found.cause) == (None if told else "died")
    assert [one.rank for one in ranks.watchdog.states() if one.failed] == ([1] if told else [])


def test_a_rank_that_has_come_to_its_end_too_early_is_named(ranks: Ranks) -> None:
    ranks.are(0, 1, 2, phase="counts", step=8, **WAITS)
    ranks.are(3, phase="done")
    ranks.states[3] = ProcessState(73, "gone", 0, reported=True)
    found, after = ranks.until(100)
    assert found is not None and (found.cause, found.ranks) == ("ended", (3,)) and after <= 32
    assert ranks.watchdog.describe_waits(but=[3])[0].startswith("ranks 0 to 2 on n1 and n2 wait for the counts")


def test_while_the_first_writes_the_results_nobody_has_ended_too_early(ranks: Ranks) -> None:
    ranks.are(1, 2, 3, phase="done")
    ranks.are(0, phase="final")
    assert ranks.until(100)[0] is None


@pytest.mark.parametrize(
    ("pending", "cause", "named", "after_s"),
    [
        ([("all_reduce", 9)] * 4, "network", (), 540),
        ([("all_reduce", 9), ("barrier", 9), ("all_reduce", 9), ("all_reduce", 9)], "collectives", (1,), 540),
        ([None, ("all_reduce", 9), ("all_reduce", 9), ("all_reduce", 9)], "stuck", (0,), 540),
    ],
)
def test_where_no_rank_says_that_it_waits_the_flight_recorder_tells(
    pending: list[tuple[str, int] | None], cause: str, named: tuple[int, ...], after_s: int, ranks: Ranks
) -> None:
    ranks.answers = {rank: answer(one) for rank, one in enumerate(pending)}
    found, after = ranks.until(600)
    assert found is not None and (found.cause, found.ranks) == (cause, named)
    assert after_s <= after <= after_s + 12


def test_a_watchdog_that_was_suspended_does_not_count_the_time(clock: Clock, ranks: Ranks) -> None:
    ranks.are(0, 1, 2, 3, phase="counts", **WAITS)
    assert ranks.until(100)[0] is None
    clock.now += 5000
    assert ranks.watchdog.diagnose() is None and ranks.until(100)[0] is None


def test_beats_go_over_the_channel_and_a_question_is_answered_with_stacks(tmp_path: Path) -> None:
    watchdog = Watchdog([("n1", [0])], TimeLimits(), tmp_path)
    server = Server(secret="s", host="127.0.0.1")
    watchdog.attach(server)
    heartbeat, client = Heartbeat(0), Client("127.0.0.1", server.port, secret="s")
    heartbeat.enter("forward", step=3, micro=2)
    with heartbeat.waiting("the others"):
        heartbeat.connect(client, 1)
        shown = client.call("ranks", {"stacks": True}, timeout_s=30)
        (rank,) = shown["ranks"]
        assert (rank["phase"], rank["step"], rank["waits"]) == ("forward", 3, "the others")
        assert any(
            test_beats_go_over_the_channel_and_a_question_is_answered_with_stacks.__name__ in call
            for call in rank["stack"]
        )
    assert heartbeat.message()["waits"] == ""
    ended: list[str] = []
    stopped = threading.Event()
    watchdog.end_reason = "enough"
    other = Heartbeat(0)
    other.connect(client, 1, on_end=lambda why: (ended.append(why), stopped.set())[0])
    assert stopped.wait(30) and ended[0] == "enough"
    client.call("beat", {**heartbeat.message(), "ended": 2, "lost": ""})
    assert watchdog.states()[0].failed
    for one in (heartbeat, other):
        one.close()
    watchdog.close()
    server.close()
    assert (tmp_path / RANKS).exists()
