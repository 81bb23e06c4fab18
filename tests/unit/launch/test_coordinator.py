"""The launchers of a run while it goes on: a failure, a signal or a loss anywhere ends all, with one code and its reason, or all start again."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import BUG
from packtrain.launch import coordinator as machines
from packtrain.launch.coordinator import (
    Coordinator,
    MachineReport,
    Orders,
    Reporter,
    Restarts,
    Verdict,
    decide_exit,
    newest_step,
)
from packtrain.monitor.channel import Client, Server
from packtrain.monitor.heartbeat import ProcessState, TimeLimits
from packtrain.monitor.watchdog import Watchdog
from packtrain.run_folder import RunFolder, as_type
from tests.waiting import until

LONG_S = 60
Work = Callable[[Reporter], Verdict]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "BEAT_S", 0.05)


@contextmanager
def control(number: int, logs: Path, silence_s: float = 30) -> Iterator[tuple[Coordinator, Server]]:
    names = {node: f"n{node + 1}" for node in range(number)}
    watchdog = Watchdog([(name, range(2 * node, 2 * node + 2)) for node, name in names.items()], TimeLimits(), logs)
    main, server = Coordinator(names, 2, silence_s, watchdog), Server(secret="s", host="127.0.0.1")
    server.serve("machine", main.answer)
    try:
        yield main, server
    finally:
        server.close()


def together(works: list[Work], logs: Path, silence_s: float = 30) -> list[Any]:
    """What each of the launchers comes to, whose `works` have their reporter."""
    ends: dict[int, Any] = {}
    with control(len(works), logs, silence_s) as (main, server):

        def run(node: int) -> None:
            machine_0 = Client("127.0.0.1", server.port, secret="s") if node else main
            try:
                with Reporter(node, "n1", silence_s, machine_0) as reporter:
                    ends[node] = works[node](reporter)
                    if not node:
                        main.wait_until_all_informed()
            except RuntimeError as error:
                ends[node] = error

        threads = [threading.Thread(target=run, args=(node,), daemon=True) for node in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), f"still there; ended: {ends}"
    return [ends[node] for node in range(len(works))]


def ended(codes: Mapping[int, int | None] | None = None, lost: Sequence[int] = (), **facts: Any) -> dict[str, Any]:
    """Fields of the MachineReport of a machine whose ranks ended with `codes`; those in `lost` only because they lost others."""
    ranks = {
        rank: ProcessState(7, "gone", code, reported=code is not None, lost="lost" if rank in lost else "")
        for rank, code in (codes or {}).items()
    }
    return {"ranks": ranks, **facts}


def finish(reporter: Reporter, **facts: Any) -> Verdict:
    return reporter.finish(f"n{reporter.report.node + 1}", 2, **ended(**facts))


def good(reporter: Reporter) -> Verdict:
    return finish(reporter, codes={2 * reporter.report.node: 0, 2 * reporter.report.node + 1: 0})


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_anywhere_ends_the_others_at_once_with_its_code(failing: int, tmp_path: Path) -> None:
    whys, rank = {}, 2 * failing + 1

    def fails(reporter: Reporter) -> Verdict:
        reporter.update(failed=f"rank {rank} failed")
        return finish(reporter, codes={rank: 2}, launched=1, tails={rank: ["error:", "  bad data"]})

    def obeys(reporter: Reporter) -> Verdict:
        until(lambda: reporter.orders.end)
        whys[reporter.report.node] = reporter.orders.end
        return finish(reporter)

    ends = together([fails if node == failing else obeys for node in range(3)], tmp_path)
    name = f"n{failing + 1}, rank {rank}"
    assert {one.code for one in ends} == {2}
    assert [list(one.lines) for one in ends] == [
        [f"{name} failed (exit code 2): see logs/rank-0000{rank}.log", f"{name}: error:", f"{name}:   bad data"]
    ] * 3
    assert set(whys.values()) == {f"rank {rank} failed"} and len(whys) == 2


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_launcher_stops_all_in_order(asked: int, tmp_path: Path) -> None:
    whys = []

    def work(reporter: Reporter) -> Verdict:
        node = reporter.report.node
        if node == asked:
            reporter.update(signal=15)
        else:
            until(lambda: reporter.orders.stop)
            whys.append((reporter.orders.stop, reporter.orders.why))
        return finish(reporter, codes={2 * node: 143, 2 * node + 1: 143}, launched=1, signal=15)

    ends = together([work] * 3, tmp_path)
    assert [(one.code, list(one.lines)) for one in ends] == [(143, ["stopped by SIGTERM"])] * 3
    assert whys == [(15, f"stopping: n{asked + 1} received SIGTERM")] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_ends_without_an_outcome_is_named_by_the_others(lost, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "REFUSED_S", 0.2)

    def leaves(reporter: Reporter) -> Verdict:
        until(lambda: time.sleep(0.3) is None)
        raise RuntimeError("oops")

    def waits(reporter: Reporter) -> Verdict:
        until(lambda: reporter.orders.end or reporter.lost)
        return finish(reporter)

    ends = together([leaves if node == lost else waits for node in range(2)], tmp_path)
    other = ends[1 - lost]
    assert other.code == 4 and other.lines[0].startswith(f"n{lost + 1} was lost: its launcher ended")
    assert ("it is machine 0, without which the run ends" in other.lines[0]) == (lost == 0)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_launcher_that_falls_silent_is_lost_in_time(silent, tmp_path, monkeypatch):
    told, monkey = threading.Event(), monkeypatch.setattr
    monkey(machines, "CALL_S", 0.2)
    receive = Coordinator.receive_report

    def no_answer(main: Coordinator, report: MachineReport) -> Orders:
        if report.node:
            told.wait(LONG_S)
        return receive(main, report)

    if silent == 0:
        monkey(Coordinator, "receive_report", no_answer)

    def falls_silent(reporter: Reporter) -> Verdict:
        if silent:
            reporter.send_report = lambda: None  # type: ignore[method-assign]
        told.wait(LONG_S)
        return Verdict(0)

    def notices(reporter: Reporter) -> Verdict:
        until(lambda: reporter.orders.end or reporter.lost)
        assert "silent for" in (reporter.orders.end or reporter.lost)
        told.set()
        return finish(reporter)

    ends = together([falls_silent if node == silent else notices for node in range(2)], tmp_path, silence_s=0.8)
    other = ends[1 - silent]
    assert other.code == 4
    assert f"n{silent + 1} was lost: silent for" in other.lines[0]


def test_a_machine_whose_processes_do_not_end_after_a_failure_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "ENDING_S", 0.3)
    monkeypatch.setattr(machines, "INFORM_S", 0.3)
    over = threading.Event()

    def fails(reporter: Reporter) -> Verdict:
        verdict = finish(reporter, codes={0: 3}, launched=1)
        over.set()
        return verdict

    def stays(reporter: Reporter) -> Verdict:
        over.wait(LONG_S)
        return Verdict(0)

    assert together([fails, stays], tmp_path)[0].code == 3


def test_launchers_that_are_all_suspended_for_a_while_blame_nobody(tmp_path, monkeypatch):
    with control(2, tmp_path, silence_s=5) as (main, server):
        reporter = Reporter(1, "n1", 5, Client("127.0.0.1", server.port, secret="s"))
        now, clock = time.monotonic(), time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
        main.watch()
        reporter.send_report()
        main.watch()
        monkeypatch.setattr(time, "monotonic", clock)
        assert time.monotonic() - now < LONG_S
    assert main.receive_report(MachineReport(0)).end == "" and reporter.lost == ""


def test_a_rank_that_died_is_named_where_another_machine_was_quicker_to_lose_it(tmp_path: Path) -> None:
    def loses(reporter: Reporter) -> Verdict:
        reporter.report.failed = "rank 0 on n1 failed (exit code 4)"
        return finish(reporter, codes={0: 4}, lost=[0], tails={0: ["rank 0 lost the others"]})

    def died(reporter: Reporter) -> Verdict:
        until(lambda: reporter.orders.end)
        facts = {"ranks": {3: ProcessState(7, "gone", -9)}, "tails": {3: ["step 3", "munmap failed"]}}
        return reporter.finish("n2", 2, **facts)

    ends = together([loses, died], tmp_path)
    assert [one.code for one in ends] == [4, 4]
    assert re.match(r"rank 3 on n2 .*ended without an error message \(SIGKILL\)", ends[0].lines[0])
    assert ends[0].lines[-1] == "n2, rank 3: munmap failed"
    assert (tmp_path / "diagnosis.txt").read_text().splitlines() == list(ends[0].lines)


def test_reports_and_orders_survive_json() -> None:
    tails = {-1: ["y"], 3: ["x"]}
    report = MachineReport(
        1, {2: ProcessState(7, "gone", -9)}, {3: "stack"}, 15, "failed", ended=True, launched=1, tails=tails
    )
    assert as_type(json.loads(json.dumps(asdict(report))), MachineReport) == report
    orders = Orders(15, "why", "end", Verdict(4, ["lost"]))
    assert as_type(json.loads(json.dumps(asdict(orders))), Orders) == orders


FOLLOW = {"codes": {0: None, 1: 4}, "lost": (0, 1)}
"""A machine whose ranks only lost others."""
SILENT = {"silent": "silent for 10 s"}


def _all(code: int, first: int = 0, **facts: int) -> dict[str, Any]:
    """A machine whose two ranks ended alike."""
    return {"codes": {first: code, first + 1: code}, **facts}


@pytest.mark.parametrize(
    ("outcomes", "code", "said"),
    [
        ([{"codes": {0: 0, 1: 0}}, {"codes": {2: 0, 3: 0}}], 0, ""),
        ([{"codes": {0: -6, 1: -6}}, {"codes": {2: 1}}], 4, "n2, rank 2 failed (exit code 1)"),
        ([{"codes": {0: 4, 1: 4}}, {"codes": {2: 1}}], 4, "n2, rank 2 failed (exit code 1)"),
        ([{"codes": {0: 1}}, {}], 4, "n1, rank 0 failed (exit code 1): see logs/rank-00000.log"),
        ([{"codes": {0: 1, 1: 1}}, {"codes": {2: 1, 3: 1}}], 1, BUG),
        ([{"codes": {0: 4, 1: 4}, "lost": (0, 1)}, {"codes": {2: 4}}], 4, "n2, rank 2 failed (exit code 4)"),
        ([{"codes": {0: 4, 1: 1}}, SILENT], 4, "n1, rank 1 failed (exit code 1)"),
        ([{"codes": {0: 4, 1: 4}}, {"codes": {2: 3, 3: 2}}], 2, "n2, rank 3 failed (exit code 2)"),
        ([{"codes": {0: 2}}, {"codes": {2: 2, 3: 2}}], 2, ""),
        ([{"codes": {0: 4, 1: 1}}, SILENT], 4, "n2 was lost: silent for 10 s"),
        ([FOLLOW, {"codes": {2: 1}}], 4, "n2, rank 2 failed (exit code 1)"),
        ([FOLLOW, SILENT], 4, "n2 was lost: silent for 10 s"),
        ([FOLLOW, {"codes": {2: 4}, "lost": (2,)}], 4, "n1, rank 0 failed (no exit code)"),
        ([{"signal": 15}, {"signal": 15}], 143, "stopped by SIGTERM"),
        ([_all(130, signal=2), _all(130, 2, signal=2)], 130, "stopped by SIGINT"),
        ([{"codes": {0: 143}, "signal": 15}, _all(143, 2, signal=15)], 143, "but not every process ended cleanly"),
        ([_all(143), _all(143, 2)], 143, "stopped by SIGTERM"),
        ([_all(143, launched=1), _all(143, 2, launched=1)], 143, "stopped by SIGTERM"),
        ([{"launched": 1}, {}], 4, "n1: torchrun ended with exit code 1: see logs/launcher.log"),
    ],
)
def test_the_verdict_names_who_failed_first(outcomes: list[dict], code: int, said: str) -> None:
    ends = {
        node: MachineReport(node, **({"lost": values["silent"]} if "silent" in values else ended(**values)))
        for node, values in enumerate(outcomes)
    }
    verdict = decide_exit(ends, {0: "n1", 1: "n2"}, 2)
    assert verdict.code == code
    assert said in "\n".join(verdict.lines)
    assert bool(said) == bool(verdict.lines)
    assert (BUG in verdict.lines) == (code == 1)


KILLED = Verdict(4, ["rank 1 was killed"])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.open_attempt("auto")
    return folder


def checkpoint(folder: RunFolder, step: int) -> None:
    (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)


@pytest.mark.parametrize(("code", "again"), [(0, 0), (1, 1), (2, 0), (3, 0), (4, 1), (130, 0), (143, 0)])
def test_only_a_failure_that_may_not_come_again_is_followed_by_a_restart(code, again, folder):
    assert Restarts(1, folder).decide(Verdict(code), "", (0, 2)).restart == ((0, 2) if again else ())
    assert not Restarts(0, folder).decide(Verdict(code), "").restart


def test_there_are_as_many_as_asked_for_and_fewer_without_progress(folder: RunFolder) -> None:
    restarts, stuck = Restarts(3, folder), Restarts(9, folder)
    for step in (5, 10, 10):
        checkpoint(folder, step) if newest_step(folder) < step else None
        assert restarts.decide(KILLED, "").restart
    checkpoint(folder, 15)
    last = restarts.decide(KILLED, "")
    assert not last.restart
    assert last.lines == [*KILLED.lines, "not started again: all trainer.restarts=3 have been used"]
    assert [stuck.decide(KILLED, "").restart for _ in range(3)] == [(0,), (0,), ()]


def test_a_restart_resumes_this_run_and_never_an_earlier_one(folder: RunFolder) -> None:
    restarts = Restarts(3, folder)
    checkpoint(folder, 5)  # of an earlier run: this one has not begun
    restarts.decide(KILLED, "")
    assert restarts.resume_mode("never") == "never"
    folder.attempt.root.rmdir()
    assert restarts.resume_mode("never") == "auto"


def test_a_run_that_is_done_is_not_started_again(folder: RunFolder) -> None:
    folder.summary.write_text('{"status": "done"}')  # of an earlier run, until this one has begun
    assert Restarts(1, folder).decide(KILLED, "").restart
    folder.attempt.root.rmdir()
    assert Restarts(1, folder).decide(KILLED, "").lines[-1] == "not started again: the run had finished"


def test_each_restart_is_kept_also_by_the_launch_that_goes_on(folder: RunFolder) -> None:
    first = Restarts(2, folder)
    first.write_record(["n1", "n2"])
    assert folder.restarts() == []
    checkpoint(folder, 5)
    first.decide(Verdict(1, [BUG]), "rank 0 on n1 failed")
    first.write_record(["n1"])
    again = Restarts(2, folder)
    again.write_record(["n1"])
    again.decide(KILLED, "")
    again.write_record(["n1"])
    kept = folder.restarts()
    assert [one["why"] for one in kept] == [["rank 0 on n1 failed"], ["rank 1 was killed"]]
    assert [(one["step"], one["machines"]) for one in kept] == [(5, ["n1"])] * 2
