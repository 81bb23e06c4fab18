"""The watchdog names the rank that all others wait for, with the cause, from tables and from beats."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from packtrain.monitor import watchdog as module
from packtrain.monitor.channel import Client, Server
from packtrain.monitor.heartbeat import (
    LONG,
    PHASES,
    Collective,
    Heartbeat,
    Phase,
    ProcessState,
    TimeLimits,
    last_collectives,
    main_stack,
    place_of,
    progress_of,
)
from packtrain.monitor.watchdog import (
    CAUSES,
    DIAGNOSIS,
    RANKS,
    Cause,
    Diagnosis,
    RankState,
    Watchdog,
    diagnose,
    stacks_of,
)
from packtrain.run_folder import as_type


def rank(number: int, phase: Phase, step: int = 8, *, process: ProcessState | None = None, **known: Any) -> RankState:
    process = process or ProcessState(1000 + number)
    known = {"heard_s": 0.5, "still_s": 545.0, **known}
    return RankState(number, f"n{number // 4}", 1000 + number, phase, step, process=process, **known)


def waits(number: int, phase: Phase, step: int = 8, name: str = "gloo:all_reduce", at: int = 37, what: str = "Float 4"):
    return rank(number, phase, step, pending=Collective(name, at, "0", what))


def ended(number: int, code: int | None, phase: Phase = "backward", **known: Any) -> RankState:
    return rank(number, phase, process=ProcessState(1000 + number, "gone", code, **known))


def named(states: list[RankState]) -> Diagnosis:
    found = diagnose(states)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (rank(1, "data"), "data"),
        (rank(1, "prepare"), "data"),
        (rank(1, "checkpoint", 7), "storage"),
        (rank(1, "final"), "storage"),
        (rank(1, "forward"), "stuck"),
        (rank(1, "start", heard_s=None), "stuck"),
        (rank(1, "counts", heard_s=700, waits="the counts"), "stuck"),
        (rank(1, "forward", heard_s=700), "stuck"),
        (rank(1, "backward", process=ProcessState(1001, "stopped")), "stopped"),
        (ended(1, None), "died"),
        (ended(1, -9), "died"),
        (ended(1, -9, oom=True), "memory"),
        (ended(1, -11, oom=True), "died"),
        (ended(1, 7), "died"),
        (ended(1, 0, "done", reported=True), "ended"),
        (waits(1, "checkpoint", 7, "gloo:barrier"), "collectives"),
        (waits(1, "counts", what="Long 6"), "collectives"),
        (waits(1, "forward", at=36), "collectives"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.phase,
)
def test_one_rank_keeps_three_waiting_and_is_named_with_the_cause(culprit: RankState, cause: Cause) -> None:
    found = named([waits(0, "counts"), culprit, waits(2, "counts"), waits(3, "counts")])
    assert (found.cause, found.ranks) == (cause, (1,))
    assert "rank 1 on n0" in found.what
    assert found.others == (
        "ranks 0, 2 and 3 on n0 wait in gloo:all_reduce number 37 (Float 4), in exchanging the counts of step 8",
    )
    assert found.lines[-1] == f"  → {CAUSES[cause][1]}"


def test_who_says_that_it_waits_is_not_behind_and_of_two_that_wait_elsewhere_the_less_far_is_named() -> None:
    states = [rank(0, "counts", waits="the counts of all ranks"), rank(1, "backward", 7), rank(2, "data")]
    found = named(states)
    assert (found.cause, found.ranks) == ("stuck", (1,))
    assert found.others == (
        "rank 0 on n0 waits for the counts of all ranks, in exchanging the counts of step 8",
        "rank 2 on n0 is in loading data of step 8",
    )
    assert found.what.endswith(" is behind: no progress for 545 s, in the backward pass of step 7")
    states = [waits(0, "counts"), waits(1, "step end", 7, "gloo:all_gather")]
    for found in (named(states), named(states[::-1])):
        assert (found.cause, found.ranks) == ("collectives", (1,))


def test_an_operation_that_the_others_have_passed_was_lost_on_its_way() -> None:
    lost = Collective("gloo:all_reduce", 36, "0", "Float 4")
    states = [replace(waits(0, "counts"), finished=lost), waits(1, "forward", at=36)]
    found = named(states)
    assert (found.cause, found.ranks) == ("network", ())
    where = "rank 1 on n0 (process 1001) waits in gloo:all_reduce number 36 (Float 4)"
    assert found.what.startswith(f"{where}, which the others ")
    states[0] = replace(states[0], finished=replace(lost, name="gloo:broadcast"))
    assert named(states).cause == "collectives"


def test_where_all_wait_in_the_same_operation_nobody_is_named_but_what_lies_between() -> None:
    found = named([waits(one, "backward") for one in range(4)])
    assert (found.cause, found.ranks) == ("network", ())
    assert found.what == (
        "ranks 0 to 3 on n0 wait in gloo:all_reduce number 37 (Float 4), in the backward pass of step 8, and no rank is behind"
    )


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_whose_answer_was_lost_is_not_said_to_wait_elsewhere(silent: int) -> None:
    states = [waits(one, "backward") for one in range(2)]
    states[silent] = replace(states[silent], pending=None, waits="the others")
    found = named(states)
    assert (found.cause, found.ranks) == ("network", ())
    where = "ranks 0 and 1 on n0 wait in gloo:all_reduce number 37 (Float 4)"
    assert found.what.startswith(f"{where}, in the backward pass")
    states[silent] = replace(states[silent], finished=Collective("gloo:all_reduce", 36, "0", "Float 4"))
    assert named(states).cause == "collectives"


def test_of_ranks_that_died_those_are_named_that_were_not_ended_for_it_and_a_run_at_its_end_has_no_diagnosis() -> None:
    states = [ended(0, -6), ended(1, -11), waits(2, "backward"), ended(3, -15)]
    found = named(states)
    assert found.ranks == (1,) and "(SIGSEGV)" in found.what
    done = [ended(one, 0, "done", reported=True) for one in range(3)]
    assert diagnose(done) is None
    assert named([rank(0, "final", still_s=1700), *done[1:]]).cause == "storage"


@pytest.mark.parametrize("culprit", [0, 513, 1023])
def test_one_of_1024_ranks_is_found_in_well_under_a_second(culprit: int) -> None:
    states = [waits(one, "backward") for one in range(1024)]
    states[culprit] = rank(culprit, "forward", micro=3)
    started = time.process_time()  # of this process alone: a busy machine is none of its business
    found = named(states)
    assert time.process_time() - started < 1
    assert found.ranks == (culprit,)
    assert f"rank {culprit} on n{culprit // 4}" in found.what and "(micro-batch 3)" in found.what
    assert len("\n".join(found.lines)) < 1000


def test_progress_orders_all_places_that_a_rank_comes_through() -> None:
    way: list[tuple[Phase, int, int]] = [(phase, 0, 0) for phase in PHASES[: PHASES.index("data")]]
    for step in (1, 2):
        way += [("data", step, 0), ("counts", step, 0)]
        for micro in (1, 2, 3):
            way += [("forward", step, micro), ("backward", step, micro)]
        way += [("optimizer", step, 0), ("step end", step, 0), ("checkpoint", step, 0), ("eval", step, 0)]
    way += [("final", 2, 0), ("done", 2, 0)]
    progress = [progress_of(*place) for place in way]
    assert progress == sorted(set(progress))
    assert place_of("forward", 12, 3) == "the forward pass of step 12 (micro-batch 3)"


@pytest.mark.parametrize(("step_s", "join_s"), [(600, 300), (10, 60), (3600, 300)])
def test_every_phase_has_a_deadline_a_little_before_that_of_collectives(step_s: int, join_s: int) -> None:
    limits = TimeLimits(step_s, join_s)
    for phase in PHASES:
        deadline = limits.deadline_s(phase)
        if phase in ("start", "join"):
            assert deadline == 2 * join_s + 60
        elif phase in LONG:
            assert deadline == limits.deadline_s("checkpoint")
        else:
            assert limits.collective_s(phase) / 2 <= deadline <= 0.9 * limits.collective_s(phase)


def test_docs_hangs_md_has_every_cause_in_the_words_that_are_printed() -> None:
    page = (Path(__file__).parents[3] / "docs/hangs.md").read_text()
    for why, fix in CAUSES.values():
        assert f"| {why} | {fix} |" in page


def test_states_travel_as_json_and_the_main_thread_is_the_last_of_a_dump() -> None:
    state = rank(1, "data", stack=('File "a.py", line 3 in read',), finished=Collective("gloo:barrier", 4))
    for one in (state, waits(2, "backward"), RankState(3, "n0")):
        assert as_type(json.loads(json.dumps(asdict(one))), RankState) == one
    dump = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in helper\n\n'
        'Current thread 0x2 (most recent call first):\n  File "b c.py", line 7 in <module>\n  File "<frozen x>", line ??? in y\n'
    )
    assert main_stack(dump) == ('File "b c.py", line 7 in <module>', 'File "<frozen x>", line ??? in y')


def test_pending_and_finished_are_told_apart_by_torchs_flight_record() -> None:
    def entry(number: int, *, retired: bool = False, p2p: bool = False, group: int = 0) -> dict:
        sizes = {"input_dtypes": ["Float", "Long"], "input_sizes": [[4, 8], []]}
        name = {"profiling_name": "nccl:all_gather", "pg_id": group, "collective_seq_id": number}
        return {**name, **sizes, "is_p2p": p2p, "retired": retired}

    entries = [entry(6, retired=True), entry(7), entry(8), entry(9, p2p=True), entry(3, group=1)]
    status = {"0": {"last_completed_collective": "7"}, "1": {"last_completed_collective": "-1"}}
    last = last_collectives({"entries": entries, "pg_status": status})
    assert str(Collective(**last["pending"])) == "nccl:all_gather number 8 (Float 4x8, Long 1)"
    assert (last["finished"]["group"], last["finished"]["number"]) == ("0", 7)
    assert last_collectives({}) == {"pending": None, "finished": None}


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
def test_the_rank_that_does_not_wait_is_named_at_the_deadline_of_its_phase(phase, cause, after_s, ranks):
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


def test_a_rank_that_tells_of_progress_or_whose_step_takes_long_is_never_named(ranks, capsys):
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


@pytest.mark.parametrize(
    ("pending", "cause", "named"),
    [
        ([("all_reduce", 9)] * 4, "network", ()),
        ([("all_reduce", 9), ("barrier", 9), ("all_reduce", 9), ("all_reduce", 9)], "collectives", (1,)),
        ([None, ("all_reduce", 9), ("all_reduce", 9), ("all_reduce", 9)], "stuck", (0,)),
    ],
)
def test_where_no_rank_says_that_it_waits_the_flight_recorder_tells(pending, cause, named, ranks):
    ranks.answers = {rank: answer(one) for rank, one in enumerate(pending)}
    found, after = ranks.until(600)
    assert found is not None and (found.cause, found.ranks) == (cause, named) and 540 <= after <= 552


def test_nobody_is_named_while_the_first_writes_the_results_or_where_the_watchdog_was_suspended(clock, ranks):
    ranks.are(1, 2, 3, phase="done")
    ranks.are(0, phase="final")
    assert ranks.until(100)[0] is None
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
        assert any("test_beats_go_over_the_channel" in call for call in rank["stack"])
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
