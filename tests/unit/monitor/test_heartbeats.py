"""The watchdog by itself: heartbeats of this very process, and what ranks answer put in their place."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from packtrain import run_folder as disk
from packtrain.launch import own_folder
from packtrain.launch.processes import Sight
from packtrain.launch.telling import pointer_of
from packtrain.monitor.old import stacks, watchdog
from packtrain.monitor.old import time_limits as patience
from packtrain.monitor.old.heartbeat import Pulse, read_beat, read_beats
from packtrain.monitor.old.stacks import Answer, Collective, Frame
from packtrain.monitor.old.watchdog import Watchdog

ALL_REDUCE = Answer(pending=Collective("gloo:all_reduce", 7, "0", "Float 3"), told=True)
BARRIER = Answer(pending=Collective("gloo:barrier", 7, "0"), told=True)
LONG_S = 120  # for what comes in no time, unless the machine has other things to do


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "sight", lambda pid: Sight("S"))  # or this process is seen at work
    monkeypatch.setattr(watchdog, "count", lambda pids: {})


def machine(folder: Path, node: int, machines: int, timeout: float = 0.2, usual_s: float = 0.001) -> Watchdog:
    heartbeats = folder / f"n{node}"
    heartbeats.mkdir()
    pulse = Pulse(heartbeats, node)
    pulse.usual_s = usual_s
    pulse.enter("backward", step=9)
    return Watchdog(
        heartbeats, folder, ranks=range(node, node + 1), host=f"n{node}", step_timeout=timeout, machines=machines
    )


def turns(*watchdogs: Watchdog, seconds: float = 0.5, until: Callable[[list], object] | None = None) -> list:
    """What each said first, when all look and the first hears the others: for a while, or `until` that is so of what they said."""
    said: list = [None] * len(watchdogs)
    reports, end = {}, time.monotonic() + (LONG_S if until else seconds)
    while True:
        for node, one in enumerate(watchdogs):
            said[node] = said[node] or one.look({})
            if (report := one.report()) and node:
                reports[node] = (time.monotonic(), json.loads(json.dumps(report)))
        watchdogs[0].hear(reports)
        if time.monotonic() >= end or (until and until(said)):
            return said
        time.sleep(0.02)


@pytest.mark.parametrize(("answer", "cause"), [(ALL_REDUCE, "network"), (BARRIER, "collectives")])
def test_what_lies_between_machines_is_told_by_the_first_alone_when_it_has_heard_all(
    answer: Answer, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_AGAIN_S", 0.05)
    answers = {0: ALL_REDUCE, 1: answer}
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: {rank: answers[rank] for rank in pids})
    first, second = turns(machine(tmp_path, 0, 2), machine(tmp_path, 1, 2), until=any)
    assert second is None
    assert first is not None and first.cause == cause
    assert "n1" in "\n".join(first.lines)


def stalls_at(two: list[Watchdog], clock: SimpleNamespace, *, by_files: bool) -> float:
    """Seconds of a standstill after which the first of two machines tells why; it hears the other at once, or, as watchers
    beside a foreign launch do, only while it reports itself."""
    begun, reports = clock.now, {}
    while clock.now - begun < 1200:
        for node, one in enumerate(two):
            if one.look({}):
                assert node == 0
                return clock.now - begun
            report = one.report()
            if report and node:
                reports[1] = (clock.now, report)
            if not node and (report or not by_files):
                one.hear(dict(reports))
        clock.now += 0.5
    raise AssertionError("it never tells")


@pytest.mark.parametrize("by_files", [False, True], ids=["by their line", "by files"])
@pytest.mark.parametrize("usual", [0.0, 0.1], ids=["first step", "later"])
@pytest.mark.parametrize("timeout", [10, 20, 50, 57, 60, 600, 1200])
def test_what_lies_between_machines_is_told_before_their_collectives_run_out_of_time(
    timeout: int, usual: float, by_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=time.monotonic(), monotonic=lambda: clock.now)

    def ask(folder: Path, pids: dict[int, int]) -> dict[int, Answer]:
        clock.now += 0.6
        return dict.fromkeys(pids, ALL_REDUCE)

    monkeypatch.setattr(watchdog, "LOOK_S", 1.0)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "gpu_error", lambda since: "")
    monkeypatch.setattr(stacks, "ask", ask)
    two = [machine(tmp_path, node, 2, timeout, usual) for node in (0, 1)]
    least = 45 * max(1, timeout / 600)
    assert stalls_at(two, clock, by_files=by_files) < min(timeout, math.inf if not usual else least + 10)


def test_a_machine_alone_does_not_judge_those_it_has_not_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: dict.fromkeys(pids, ALL_REDUCE))
    assert turns(machine(tmp_path, 0, 2)) == [None]


def test_a_rank_that_waits_for_nobody_is_named_by_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {0: ALL_REDUCE, 1: Answer(told=True)}
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: {rank: answers[rank] for rank in pids})
    first, second = turns(machine(tmp_path, 0, 2), machine(tmp_path, 1, 2), until=any)
    assert first is None
    assert (second.cause, second.ranks) == ("stuck", (1,))


def test_a_rank_that_computes_is_left_until_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "sight", lambda pid: Sight("R"))
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: dict.fromkeys(pids, Answer(told=True)))
    assert turns(machine(tmp_path, 0, 1, timeout=30)) == [None]
    (found,) = turns(machine(tmp_path, 1, 1, timeout=0.1), until=any)
    assert found.cause == "busy"


@pytest.mark.parametrize(
    "file", ["/x/filelock/_api.py", "/x/packtrain/train/sync/store.py", "/x/torch/distributed/c10d.py"]
)
def test_one_that_waits_for_what_another_machine_may_be_doing_is_not_named_by_its_own(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer(told=True, stack=(Frame(file, 5, "waits"),))
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: dict.fromkeys(pids, answer))
    one = machine(tmp_path, 1, 2)
    asked: list = []
    end = time.monotonic() + LONG_S
    while not asked and time.monotonic() < end:
        assert one.look({}) is None
        asked = one.report() or []
    assert asked[0]["stack"][0]["file"] == file  # the first machine hears of it


def test_one_that_stops_working_is_named_when_it_has_done_nothing_for_long_not_when_it_is_next_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 0.2)
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: dict.fromkeys(pids, Answer(told=True)))
    one, works = machine(tmp_path, 0, 1, timeout=600), True
    monkeypatch.setattr(watchdog, "sight", lambda pid: Sight("R" if works else "S"))
    assert turns(one, seconds=1) == [None]
    works, one._asked_at = False, 60.0
    found, end = None, time.monotonic() + LONG_S
    while found is None and time.monotonic() < end:
        found = one.look({})
    assert found is not None and found.cause == "stuck"


def test_a_disk_that_stalls_does_not_hold_the_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DISK_S", 0.1)
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: dict.fromkeys(pids, Answer(told=True, text="the stack")))
    names = ("diagnosis.txt", "stacks-rank-00000.txt")
    for name in names:
        os.mkfifo(tmp_path / name)
    (found,) = turns(machine(tmp_path, 0, 1), until=any)
    assert found is not None and found.cause == "stuck"
    # the disk is back: all that it has not taken yet is written now
    taken = {name: os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK) for name in names}
    for one in threading.enumerate():
        if one.name == "stalled disk":
            one.join(LONG_S)
    assert os.read(taken["diagnosis.txt"], 1000).startswith(b"rank 0 on n0")
    for descriptor in taken.values():
        os.close(descriptor)


def test_a_stopped_rank_that_is_let_go_on_while_it_is_asked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list = []
    monkeypatch.setattr(watchdog, "STOPPED_S", 0.05)
    monkeypatch.setattr(watchdog, "sight", lambda pid: Sight("S" if asked else "T"))
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: asked.append(pids) or {})
    assert turns(machine(tmp_path, 0, 1, timeout=600), until=lambda _: asked) == [None] and asked


def test_stacks_of_a_rank_that_does_not_answer_any_more_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {rank: Answer(told=True, text=f"stack {rank}") for rank in (0, 1)}
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: said)
    one = machine(tmp_path, 0, 1)
    kept = watchdog.stacks_of(tmp_path, 0)
    one.ask()
    assert kept.read_text() == "stack 0"
    del said[0]
    one.ask()
    assert not kept.exists()


def test_ranks_that_never_come_to_their_first_line_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEGIN_S", 0.05)
    one = Watchdog(tmp_path, tmp_path, ranks=range(2, 4), host="n1", step_timeout=600)
    (found,) = turns(one, until=any)
    assert re.match(r"ranks 2 and 3 on n1 have not come to their first line \d+ s after the start", found.lines[0])
    assert found.cause == "start" and (tmp_path / "diagnosis.txt").exists()
    stacks.listen(tmp_path, "2")  # it has begun, and maybe finds no room for its heartbeat
    assert turns(one, seconds=0.2) == [None]


def test_heartbeats_that_somebody_takes_away_are_told_of_once_and_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = machine(tmp_path, 0, 1, timeout=600)
    assert turns(one, seconds=0.1) == [None]
    shutil.rmtree(tmp_path / "n0")
    assert turns(one, seconds=0.2) == [None]
    assert stacks.ask(tmp_path / "n0", {0: os.getpid()}) == {}
    assert capsys.readouterr().err.count("not watched any more") == 1


def test_a_full_disk_costs_the_heartbeats_and_not_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (tmp_path / "0").symlink_to("/dev/full")
    Pulse(tmp_path, 0).enter("forward", step=3)
    assert "rank 0 is not watched: No space left on device" in capsys.readouterr().err


def test_of_many_loader_processes_only_some_stacks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 0)
    monkeypatch.setattr(os, "truncate", lambda file, size: None)
    for number in range(9):
        (tmp_path / f"0.loader-{number}.stacks").write_text(
            'Thread 1 (most recent call first):\n  File "f", line 1, in g\n'
        )
    assert len(stacks.ask(tmp_path, {0: 2**22 + 1})[0].loaders) == 4


def test_a_pause_of_everything_is_no_standstill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine(tmp_path, 0, 1, timeout=30)
    one.note()
    monkeypatch.setattr(one, "_noted", time.monotonic() - 3600)  # as when the machine was suspended for an hour
    assert one.look({}) is None
    assert one.states({})[0].still_s <= 3.1


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, 3)
    at = pulse.enter("forward", step=2**40, micro=5)
    (tmp_path / "question").touch()
    (tmp_path / "4").write_bytes(b"short")
    (beat,) = read_beats(tmp_path).values()
    assert (beat.pid, beat.phase, beat.step, beat.micro, beat.at) == (os.getpid(), "forward", 2**40, 5, at)
    assert beat.place == f"the forward pass of step {2**40} (micro-batch 5)"
    pulse.enter("backward", micro=10**9)
    again = read_beat(tmp_path / "3")
    assert again is not None and again.number == beat.number + 1
    pulse.go_on()
    anew = read_beat(tmp_path / "3")
    assert anew is not None and (anew.number, anew.place) == (again.number + 1, again.place)


def test_a_pulse_without_a_launcher_writes_nothing(tmp_path: Path) -> None:
    pulse = Pulse(None, 0)
    assert pulse.enter("data", step=4) <= time.monotonic()
    assert Pulse(tmp_path / "gone", 0).enter("data") and not (tmp_path / "gone").exists()


def test_a_rank_that_goes_on_while_it_is_asked_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, asked = machine(tmp_path, 0, 1), []

    def ask(folder: Path, pids: dict[int, int]) -> dict[int, Answer]:
        asked.append(pids)
        pulse = Pulse(folder, 0)
        for step in range(10 + len(asked)):
            pulse.enter("forward", step=step)
        return {0: ALL_REDUCE}

    monkeypatch.setattr(stacks, "ask", ask)
    assert turns(one, until=lambda _: asked) == [None] and asked


def test_the_folder_of_heartbeats_is_gone_afterwards_and_the_last_ones_are_in_the_logs(tmp_path: Path) -> None:
    with own_folder.heartbeat_folder() as folder:
        one = Watchdog(folder, tmp_path, ranks=range(1), host="n0", step_timeout=600)
        with one.found_by_others(0):
            Pulse(folder, 0).enter("eval", step=8)
            assert json.loads(pointer_of(tmp_path, 0).read_text())["folder"] == str(folder)
            one.note()
    assert not folder.exists()
    left = json.loads(pointer_of(tmp_path, 0).read_text())
    assert "folder" not in left and left["last"]["0"]["phase"] == "eval"


def test_folders_of_killed_launchers_are_swept_away_and_those_of_living_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_folder, "_MEMORY_DISK", str(tmp_path))
    monkeypatch.setattr(own_folder, "_NEW_S", -1)
    killed = tmp_path / "packtrain-heartbeats-x"
    killed.mkdir()
    (killed / "lock").touch()
    with own_folder.heartbeat_folder() as first, own_folder.own_folder(tmp_path, "packtrain-heart") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not list(tmp_path.iterdir())
