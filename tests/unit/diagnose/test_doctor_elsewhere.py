"""packtrain doctor on a run over several machines: their launchers are asked through the run folder."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packtrain.diagnose import doctor, doctor_elsewhere
from packtrain.diagnose.doctor import examine, show_run
from packtrain.launch import telling
from packtrain.launch.processes import Sight
from packtrain.launch.telling import pointer_of, put_question
from packtrain.monitor.old import stacks, watchdog
from packtrain.monitor.old.heartbeat import Phase, Pulse
from packtrain.monitor.old.stacks import Answer, Collective, Frame
from packtrain.monitor.old.watchdog import Watchdog
from packtrain.run_folder import RunFolder
from tests.unit.launch.test_docs_multi_node import ROWS, same

WAITS = Answer(pending=Collective("gloo:all_reduce", 7, "0", "Float 3"), told=True)
READS = Answer(stack=(Frame("store.py", 88, "read_documents"),), told=True)
STILL_S = 60
LONG_S = 120  # for what comes in no time, unless the machine has other things to do


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is on n1, and its process is each rank and launcher."""
    monkeypatch.setattr(platform, "node", lambda: "n1")
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "sight", lambda pid: Sight("S"))  # or this process is seen at work
    monkeypatch.setattr(watchdog, "count", lambda pids: {})
    monkeypatch.setattr(watchdog, "gpu_error", lambda since: "")  # the log of the whole kernel, at each look
    monkeypatch.setattr(telling, "LOOK_S", 0.02)
    monkeypatch.setattr(doctor, "_BETWEEN_LOOKS_S", 0.02)
    monkeypatch.setattr(doctor_elsewhere, "ANSWER_S", LONG_S)
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: {rank: READS if rank == 1 else WAITS for rank in pids})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.logs.mkdir(parents=True)
    return run


def beat(folder: Path, rank: int, phase: Phase, *, ago_s: float = STILL_S) -> Pulse:
    """A rank that came into a phase of step 9 so long ago."""
    folder.mkdir(exist_ok=True)
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now - ago_s)
        pulse = Pulse(folder, rank)
        pulse.usual_s = 0.01
        pulse.enter(phase, step=9)
    return pulse


def launcher(run: RunFolder, node: int, phase: Phase, *, machines: int = 2) -> Watchdog:
    """The watchdog of machine `node`, called n1, n2 and so on, with one rank that stands still."""
    beats = run.root / f"beats-{node}"
    beat(beats, node, phase)
    ranks = range(node, node + 1)
    return Watchdog(beats, run.logs, ranks=ranks, host=f"n{node + 1}", step_timeout=600, machines=machines)


@contextmanager
def at_work(one: Watchdog, node: int) -> Iterator[None]:
    """Inside the block the launcher looks at its ranks all the time."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            one.look({})

    thread = threading.Thread(target=look)
    with one.found_by_others(node):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def told(run: RunFolder, node: int) -> dict | None:
    return json.loads(pointer_of(run.logs, node).read_text()).get("told")


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("ask", [False, True])
def test_a_culprit_on_another_machine_is_named_from_this_one(ask: bool, run: RunFolder) -> None:
    here, there = launcher(run, 0, "backward"), launcher(run, 1, "data")
    with here.found_by_others(0), at_work(there, 1):
        found = examine(run, ask=ask)
    assert (found.status, found.exit_code) == ("stalled", 4)
    assert found.diagnosis and (found.diagnosis.cause, found.diagnosis.ranks) == ("data", (1,))
    said = "\n".join(found.lines)
    assert (
        "rank 1 on n2 " in said and re.search(r"is behind: for \d\d+ s", said) and "in loading data of step 9" in said
    )
    assert "rank 0 on n1 waits in gloo:all_reduce number 7" in said
    assert ("stack of rank 1 on n2, innermost call first" in said) == ask
    assert [one.rank for one in found.ranks] == [0, 1] and not found.silent


def test_a_machine_that_has_no_part_in_the_run_is_told_the_same(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "login")
    with at_work(launcher(run, 0, "backward"), 0), at_work(launcher(run, 1, "data"), 1):
        found = examine(run)
    assert found.diagnosis and (found.diagnosis.cause, found.diagnosis.ranks) == ("data", (1,))


def test_a_machine_that_does_not_answer_is_listed_with_the_age_of_what_it_told(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_elsewhere, "ANSWER_S", 0.1)
    here, there = launcher(run, 0, "backward"), launcher(run, 1, "backward")
    with at_work(there, 1):
        until(lambda: told(run, 1))
        last = pointer_of(run.logs, 1).read_text()
    pointer_of(run.logs, 1).write_text(last)  # as a launcher leaves it that is killed
    before = time.time() - 130
    os.utime(pointer_of(run.logs, 1), (before, before))
    with here.found_by_others(0):
        assert show_run(str(run.root), ask=False, as_json=False) == 4
        found = examine(run).to_json()
    said = capsys.readouterr().out.splitlines()
    (place,) = [number for number, line in enumerate(said) if line.startswith("n2 ")]
    assert said[place] == "n2 (rank 1) does not answer: machine or launcher gone?"
    assert re.match(r"  it last told of its ranks 1\d\d s", said[place + 1])
    assert said[place + 2].startswith("    rank 1 on n2 ")
    assert "look whether those machines are up" in said[-1] and not any("likely cause" in line for line in said)
    assert [one["rank"] for one in found["ranks"]] == [0] and found["diagnosis"] is None
    assert [(one["host"], one["ranks"]) for one in found["silent"]] == [("n2", [1])]


def test_a_rank_that_waits_for_nobody_is_named_without_the_other_machines(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_elsewhere, "ANSWER_S", 0.1)
    monkeypatch.setattr(stacks, "ask", lambda folder, pids: dict.fromkeys(pids, READS))
    with launcher(run, 0, "data").found_by_others(0):  # a folder of its own has nothing of the other machine
        found = examine(run)
    assert found.diagnosis and (found.diagnosis.cause, found.diagnosis.ranks) == ("data", (0,))
    (said,) = [same(line) for line in found.lines if "cannot be seen" in line]
    assert said in [what for what, _ in ROWS]  # of docs/multi-node.md


def test_a_run_of_which_nobody_answers_has_failed_or_stands_still(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_elsewhere, "ANSWER_S", 0.1)
    about = {"host": "n7", "ranks": [8, 16], "machines": 1, "step_timeout": 600, "folder": "/dev/shm/x", "launcher": 1}
    pointer_of(run.logs, 0).write_text(json.dumps({**about, "answers": True}))
    found = examine(run)
    assert (found.exit_code, list(found.lines)) == (
        4,
        ["n7 (ranks 8 to 15) does not answer: machine or launcher gone?"],
    )
    assert same(found.lines[0]) in [what for what, _ in ROWS]  # of docs/multi-node.md


def test_who_may_not_write_into_the_folder_is_told_so_and_what_was_told_before(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(platform, "node", lambda: "login")
    monkeypatch.setattr(doctor_elsewhere, "put_question", refuses)
    with at_work(launcher(run, 0, "data", machines=1), 0):
        until(lambda: told(run, 0))
        found = examine(run)
    assert (found.exit_code, found.lines[0]) == (0, f"n1 (rank 0) cannot be asked: {run.logs}/ is not writable here")
    assert "rank 0 on n1 " in found.lines[2] and "in loading data of step 9" in found.lines[2]


def test_a_run_of_one_process_on_another_machine_is_looked_at_there(run: RunFolder) -> None:
    about = {"host": "n7", "ranks": [0, 1], "machines": 1, "step_timeout": 600, "folder": "/dev/shm/x", "launcher": 1}
    pointer_of(run.logs, 0).write_text(json.dumps({**about, "answers": False}))
    found = examine(run)
    assert (found.exit_code, list(found.lines)) == (
        0,
        ["n7 (rank 0) is not asked from here: start packtrain doctor there"],
    )


def test_ranks_are_told_of_while_they_stand_still_and_once_more_when_they_go_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "_RENEWED_S", 0.02)
    monkeypatch.setattr(telling, "_SELDOM_S", 0.02)
    one = launcher(run, 1, "data")
    with at_work(one, 1):
        until(lambda: told(run, 1))
        first = told(run, 1)
        until(lambda: told(run, 1) != first)  # renewed
        pulse = beat(run.root / "beats-1", 1, "forward", ago_s=0)
        pulse.enter("forward", step=10)
        until(lambda: told(run, 1)["ranks"][0]["still_s"] < telling.STILL_S)
        last = told(run, 1)
        for step in range(11, 30):
            pulse.enter("forward", step=step)
            time.sleep(0.02)
        assert told(run, 1) == last
    assert told(run, 1) is None and not list(run.logs.glob(".*"))


def test_nothing_is_written_while_ranks_go_on_unless_somebody_asks_this_machine(run: RunFolder) -> None:
    one = launcher(run, 1, "data")
    pulse = beat(run.root / "beats-1", 1, "forward", ago_s=0)
    put_question(run.logs, [1], stacks=True)  # long ago, of an earlier launch
    with at_work(one, 1):
        put_question(run.logs, [0], stacks=True)
        for step in range(20):
            pulse.enter("forward", step=step)
            time.sleep(0.02)
        assert told(run, 1) is None
        put_question(run.logs, [1], stacks=True)
        until(lambda: (told(run, 1) or {}).get("asked"))
        (state,) = told(run, 1)["ranks"]
        assert state["stack"][0]["function"] == "read_documents"


def test_a_disk_that_stalls_does_not_stall_the_watchdog(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    back, reached = threading.Event(), threading.Event()
    one = launcher(run, 1, "data")

    def stalls(*_: object) -> None:
        reached.set()
        back.wait(2 * LONG_S)

    with one.found_by_others(1):
        monkeypatch.setattr(telling.Teller, "_look", stalls)
        assert reached.wait(LONG_S)
        until(lambda: one.look({}) or one._teller._next)  # it has been told of, and nobody writes it
        assert told(run, 1) is None
        back.set()
    assert one.states({})[0].still_s >= STILL_S
