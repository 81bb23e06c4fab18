"""The line between the launchers of a run: a failure, a signal or a loss anywhere ends all, with one code and its reason."""

from __future__ import annotations

import re
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from packtrain.config.compose import load_config
from packtrain.launch import execute, line
from packtrain.launch.ending import BUG
from packtrain.launch.line import Line
from packtrain.launch.link import LinkWatch
from packtrain.launch.place import Place
from packtrain.launch.verdict import Outcome, judge
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import Surroundings
from tests.unit.launchers import end, free_place, member, together, wait_for_order


@pytest.fixture
def place() -> Place:
    return free_place()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_anywhere_ends_the_others_at_once_with_its_code(failing: int, place: Place) -> None:
    whys = {}

    def work(line: Line) -> Any:
        if line.node == failing:
            rank = 2 * failing + 1
            line.tell_failure(f"rank {rank} failed")
            return line.finish(Outcome(codes={rank: 2}, launched=1, tails={rank: ["error:", "  bad data"]}))
        whys[line.node] = wait_for_order(line)
        return line.finish(Outcome())

    ends = together(place, member(0, 3), member(1, 3), member(2, 3), work=work)
    rank = 2 * failing + 1
    name = f"n{failing + 1}, rank {rank}"
    assert {one.code for one in ends} == {2}
    assert list(ends[0].lines) == [
        f"{name} failed (exit code 2): see logs/rank-0000{rank}.log",
        f"{name}: error:",
        f"{name}:   bad data",
    ]
    assert {(one.signal, one.why) for one in whys.values()} == {(None, f"rank {rank} failed")}


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_launcher_stops_all_in_order(asked: int, place: Place) -> None:
    whys = []

    def work(line: Line) -> Any:
        if line.node == asked:
            line.tell_signal(15)
        else:
            whys.append(wait_for_order(line))
        return line.finish(Outcome(codes={2 * line.node: 143, 2 * line.node + 1: 143}, launched=1, signal=15))

    ends = together(place, member(0, 3), member(1, 3), member(2, 3), work=work)
    assert [(one.code, list(one.lines)) for one in ends] == [(143, [])] * 3
    assert {(one.signal, one.why) for one in whys} == {(15, f"stop asked by SIGTERM on n{asked + 1}")}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_vanishes_is_named_by_the_others(lost: int, place: Place) -> None:
    whys = {}

    def work(line: Line) -> Any:
        if line.node == lost:
            raise RuntimeError("oops")
        whys[line.node] = wait_for_order(line).why
        return line.finish(Outcome())

    ends = together(place, member(0, 3), member(1, 3), member(2, 3), work=work)
    others = [node for node in range(3) if node != lost]
    assert {ends[node].code for node in others} == {4}
    assert all(f"n{lost + 1} was lost: its launcher ended (oops)" in whys[node] for node in others)
    assert all(f"n{lost + 1} was lost" in ends[node].lines[0] for node in others)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_launcher_that_falls_silent_is_lost_in_time(silent: int, place: Place) -> None:
    told = threading.Event()

    def work(line: Line) -> Any:
        if line.node == silent:
            line._call(lambda: told.wait(120))
            return line.finish(Outcome(codes={2 * silent: 0, 2 * silent + 1: 0}))
        why = wait_for_order(line).why
        told.set()
        assert "silent for" in why
        return line.finish(Outcome())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "BEAT_S", 0.2)
        ends = together(replace(place, silence_s=1.2), member(0), member(1), work=work)
    other = ends[1 - silent]
    assert other.code == 4
    assert f"n{silent + 1} was lost: silent for" in other.lines[0]


def test_a_launcher_may_be_silent_for_longer_while_the_ranks_train(place: Place) -> None:
    def work(line: Line) -> Any:
        line.trains()
        if line.node == 0:
            return end(line)
        line._call(lambda: time.sleep(3))
        return end(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "BEAT_S", 0.2)
        ends = together(replace(place, silence_s=1.2, training_silence_s=120), member(0), member(1), work=work)
    assert [(one.code, list(one.lines)) for one in ends] == [(0, [])] * 2


@pytest.mark.parametrize(
    ("step_s", "join_s", "before", "while_training"),
    [(600, 300, 30, 30), (600, 20, 10, 30), (600, 5, 10, 30), (40, 30, 15, 20), (10, 300, 5, 5)],
)
def test_before_training_a_launcher_may_be_silent_for_half_the_time_limit_of_joining(
    step_s: int, join_s: int, before: float, while_training: float
) -> None:
    topology = ["topology=manual", "topology.nodes=2", "topology.gpus_per_node=1", "topology.main_address=n1"]
    limits = [f"topology.step_timeout={step_s}", f"topology.join_timeout={join_s}", "topology.node_rank=0"]
    config = load_config("recipes/quickstart-sft.yaml", [*topology, *limits])
    at = execute._place(plan_launch(config, Surroundings(cpus=4, host="n1")), config)
    assert (at.silence_s, at.training_silence_s) == (before, while_training)


def test_launchers_that_are_all_suspended_for_a_while_blame_nobody(place: Place) -> None:
    together_from, asleep = threading.Barrier(2), [threading.Event(), threading.Event()]

    def work(line: Line) -> Any:
        def suspended() -> None:
            together_from.wait(60)
            time.sleep(2)
            asleep[line.node].set()

        line._call(suspended)
        assert asleep[line.node].wait(60)
        time.sleep(0.5)
        return end(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "BEAT_S", 0.2)
        patch.setattr(line, "_LATE_S", 0.4)
        ends = together(replace(place, silence_s=1.2), member(0), member(1), work=work)
    assert [(one.code, list(one.lines)) for one in ends] == [(0, [])] * 2


def test_a_machine_whose_processes_do_not_end_after_a_failure_is_not_waited_for_long(place: Place) -> None:
    def work(line: Line) -> Any:
        if line.node == 1:
            time.sleep(1.5)
            return None
        return line.finish(Outcome(codes={0: 3}, launched=1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "BEAT_S", 0.2)
        patch.setattr(line, "ENDING_S", 0.5)
        ends = together(place, member(0), member(1), work=work)
    assert ends[0].code == 3


ABORTED = {"codes": {0: None, 1: 4}, "followers": (0, 1), "diagnosis": ("n1 aborted",)}
"""A machine whose ranks say no more than that others are gone."""


@pytest.mark.parametrize(
    ("outcomes", "code", "said"),
    [
        ([{"codes": {0: 0, 1: 0}}, {"codes": {2: 0, 3: 0}}], 0, ""),
        ([{"codes": {0: 4, 1: 4}}, {"codes": {2: None}}], 4, "n2, rank 2 ended without a word"),
        ([{"codes": {0: 4, 1: 4}}, {"codes": {2: 1}}], 4, "n2, rank 2 failed (exit code 1)"),
        ([{"codes": {0: 1}}, {}], 4, "n1, rank 0 failed (exit code 1): see logs/rank-00000.log"),
        ([{"codes": {0: 1, 1: 1}}, {"codes": {2: 1, 3: 1}}], 1, BUG),
        ([{"codes": {0: 4, 1: 4}, "followers": (0, 1)}, {"codes": {2: 4}}], 4, "n2, rank 2 failed (exit code 4)"),
        ([{"codes": {0: 4, 1: 1}}, {"lost": "silent for 10 s"}], 4, "n1, rank 1 failed (exit code 1)"),
        ([{"codes": {0: 4, 1: 4}}, {"codes": {2: 3, 3: 2}}], 2, "n2, rank 3 failed (exit code 2)"),
        ([{"codes": {0: 2}}, {"codes": {2: 2, 3: 2}}], 2, ""),
        ([{"codes": {0: 4, 1: 4}}, {"codes": {2: 4}, "frozen": (3,)}], 4, "n2, rank 3 was found stopped (SIGSTOP)"),
        ([{"codes": {0: 4, 1: 1}}, {"lost": "silent for 10 s"}], 4, "n2 was lost: silent for 10 s"),
        ([ABORTED, {"codes": {2: None}, "diagnosis": ("n2 was killed",)}], 4, "n2 was killed"),
        ([ABORTED, {"codes": {2: 1}}], 4, "n2, rank 2 failed (exit code 1)"),
        ([ABORTED, {"codes": {2: 4}}], 4, "n2, rank 2 failed (exit code 4)"),
        ([ABORTED, {"lost": "silent for 10 s"}], 4, "n2 was lost: silent for 10 s"),
        ([ABORTED, {"codes": {2: 4}, "followers": (2,)}], 4, "n1 aborted"),
        ([{"signal": 15}, {"signal": 15}], 143, "stopped by SIGTERM"),
        ([{"codes": {0: 130, 1: 130}, "signal": 2}, {"codes": {2: 130, 3: 130}, "signal": 2}], 130, ""),
        ([{"codes": {0: 143}, "signal": 15}, {"codes": {2: 143, 3: 143}, "signal": 15}], 143, "not every process"),
        ([{"codes": {0: 143, 1: 143}}, {"codes": {2: 143, 3: 143}}], 143, ""),
        ([{"launched": 1}, {}], 4, "n1: the processes could not be started"),
    ],
)
def test_the_verdict_names_who_failed_first(outcomes: list[dict], code: int, said: str) -> None:
    ends = {node: Outcome(**values) for node, values in enumerate(outcomes)}
    assert {node: Outcome.from_json(one.to_json()) for node, one in ends.items()} == ends
    verdict = judge(ends, {0: "n1", 1: "n2"}, 2)
    assert verdict.code == code
    assert said in "\n".join(verdict.lines)
    assert bool(said) == bool(verdict.lines)
    assert (BUG in verdict.lines) == (code == 1)
    assert ("n1 aborted" in verdict.lines) == (said == "n1 aborted") == bool(verdict.late)


def test_of_two_diagnoses_that_of_the_machine_which_failed_first_is_the_verdict() -> None:
    ends = {node: Outcome(codes={2 * node: None}, diagnosis=(f"n{node + 1} died",)) for node in (0, 1)}
    for first in (0, 1):
        assert judge(ends, {0: "n1", 1: "n2"}, 2, first).lines == [f"n{first + 1} died"]


LOST = "  likely cause: the machine is down, its link is cut, or its launcher is stopped"
WAIT = "rank {} on n{} waits in gloo:all_reduce number 12, in the backward pass of step 5"


def test_of_a_lost_machine_it_is_told_what_the_others_waited_in_and_what_to_do() -> None:
    others = {node: Outcome(waits=[WAIT.format(node, node + 1)]) for node in (0, 2, 3, 4, 5)}
    verdict = judge({1: Outcome(lost="silent for 10 s"), **others}, {node: f"n{node + 1}" for node in range(6)}, 1)
    assert list(verdict.lines[:-1]) == [
        "n2 was lost: silent for 10 s",
        *(f"  {WAIT.format(node, node + 1)}" for node in (0, 2, 3)),
        "  and so do those of 2 more machines",
        LOST,
    ]
    assert verdict.lines[-1].startswith("  → look whether the machine is up, and at its link")


def test_a_diagnosis_of_one_machine_is_completed_by_what_those_did_that_it_does_not_tell_of() -> None:
    said = ("rank 1 on n2 is stopped", "  likely cause: SIGSTOP", "  → see who stops processes there")
    ends = {0: Outcome(waits=[WAIT.format(0, 1)]), 1: Outcome(diagnosis=said, waits=["rank 1 on n2 waits"])}
    assert list(judge(ends, {0: "n1", 1: "n2"}, 1).lines) == [said[0], f"  {WAIT.format(0, 1)}", *said[1:]]


def test_who_has_ended_says_whom_it_waits_for(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    said, limit = "", time.monotonic() + 60

    def work(line: Line) -> Any:
        nonlocal said
        while line.node and "waiting" not in said and time.monotonic() < limit:
            said += capfd.readouterr().err
            time.sleep(0.05)
        return end(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "PROGRESS_S", 0.4)
        assert [one.code for one in together(place, member(0), member(1), work=work)] == [0, 0]
    assert re.search(r"the processes on n1 have ended; waiting \d s for those on n2", said)


def info(*, rtt_s: float, sent: int, again: int) -> bytes:
    """A struct tcp_info with what LinkWatch reads of it."""
    fields = bytearray(192)
    for place, value in ((68, int(1e6 * rtt_s)), (100, again), (156, sent)):
        struct.pack_into("I", fields, place, value)
    return bytes(fields)


@pytest.mark.parametrize(
    ("rtt_s", "again_each_beat", "said"),
    [
        (0.001, 0, None),
        (0.4, 0, None),
        (2.5, 0, "an answer takes 2.5 s, and 0 of 0 packets had to be sent again"),
        (0.3, 1, "an answer takes 0.3 s, and 3 of 6 packets had to be sent again"),
        (6e-5, 1, "an answer takes 0.06 ms, and 3 of 6 packets had to be sent again"),
    ],
)
def test_a_link_that_delays_or_loses_packets_is_told_once(rtt_s: float, again_each_beat: int, said: str | None) -> None:
    link = LinkWatch()
    told = [link.look(info(rtt_s=rtt_s, sent=2 * beat, again=again_each_beat * beat)) for beat in range(20)]
    assert [one for one in told if one] == ([said] if said else [])
    assert LinkWatch().look(b"") is None
