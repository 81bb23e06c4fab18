"""The rendezvous of several machines: who meets, who is refused, and in which words."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, UserError, error_from_json
from packtrain.launch import rendezvous
from packtrain.launch.rendezvous import Group, MeetingPoint, Member, Prepare, is_own, meet
from packtrain.monitor.channel import SECRET, Client
from tests.ports import free_port
from tests.unit.plan.test_agreement import member
from tests.waiting import until

LONG_S = 60  # for what comes in no time, unless the machine has other things to do


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> MeetingPoint:
    monkeypatch.setattr(rendezvous, "POLL_S", 0.05)
    monkeypatch.delenv(SECRET, raising=False)
    return free_place()


def free_place() -> MeetingPoint:
    return MeetingPoint("127.0.0.1", free_port(), LONG_S, "job")


class Launchers:
    """Threads that each go through one rendezvous; `ends` has what became of each, by the order of starting."""

    def __init__(self) -> None:
        self.ends: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def start(self, me: Member, place: MeetingPoint, prepare: Prepare = lambda names: "") -> None:
        number = len(self._threads)

        def run() -> None:
            try:
                with meet(me, place, prepare) as group:
                    self.ends[number] = group
                    self._over.wait(2 * LONG_S if me.node == 0 else 0)  # serves until the others have their answer
            except (PacktrainError, RuntimeError) as error:
                self.ends[number] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> list[Any]:
        until(lambda: len(self.ends) == len(self._threads), said=lambda: f"still there; ended: {self.ends}")
        self._over.set()
        for thread in self._threads:
            thread.join(LONG_S)
        return [self.ends[number] for number in range(len(self._threads))]


def together(place: MeetingPoint, *members: Member) -> list[Any]:
    launchers = Launchers()
    for me in members:
        launchers.start(me, place)
    return launchers.join()


def join(place: MeetingPoint, me: Member, token: str = "visitor", job: str = "job") -> dict[str, Any]:
    """What machine 0 answers to one call, as soon as it serves."""
    said = {"member": asdict(me), "token": token, "password": replace(place, job=job).password}

    def answer() -> dict[str, Any] | None:
        with suppress(OSError):
            return Client("127.0.0.1", place.port).call("join", said)

    return until(answer)


@pytest.mark.parametrize("number", [3, 64])
def test_all_machines_meet_and_share_names_a_secret_and_a_port_for_torch(number: int, place: MeetingPoint) -> None:
    ends = together(place, *[member(node, number) for node in reversed(range(number))])
    assert all(isinstance(one, Group) for one in ends), ends
    assert {tuple(one.names.values()) for one in ends} == {tuple(f"n{node + 1}" for node in range(number))}
    assert len({one.channel.secret for one in ends}) == len({one.store_port for one in ends}) == 1
    assert ends[0].store_port != place.port


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"optim.learning_rate": "0.002"}}, "optim.learning_rate: n2 has 0.002; n1 has 0.001"),
        ({"nodes": 3, "node": 2}, "topology.nodes: n2 has 3; n1 has 2"),
    ],
    ids=["config", "number"],
)
def test_machines_that_do_not_fit_all_stop_with_the_same_words(change: dict, said: str, place: MeetingPoint) -> None:
    ends = together(place, member(0), replace(member(1), **change))
    assert [type(end) for end in ends] == [CheckFailed, CheckFailed]
    assert said in str(ends[0])
    assert str(ends[0]) == str(ends[1])


def test_two_machines_of_one_number_and_what_machine_0_cannot_prepare_are_errors_for_all(place: MeetingPoint) -> None:
    ends = together(place, member(0, 3), member(1, 3), member(1, 3, host="n7", addresses=("10.0.0.7",)))
    assert {str(end).partition(": ")[0] for end in ends} == {"topology.node_rank"}
    assert all("two machines are number 1: n" in str(end) and "n7 (10.0.0.7)" in str(end) for end in ends)

    def prepare(names: Mapping[int, str]) -> str:
        raise UserError("the run folder cannot be written", where="trainer.output_dir")

    launchers, place = Launchers(), free_place()
    launchers.start(member(0), place, prepare)
    launchers.start(member(1), place)
    assert all(isinstance(one, UserError) and "cannot be written" in str(one) for one in launchers.join())


def test_a_missing_machine_is_named_to_all_that_are_there(place, capfd):
    place = replace(place, names=("n1", "n2", "n3"), timeout_s=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "PROGRESS_S", 1)
        ends = together(place, member(0, 3), member(2, 3))
    for error in ends:
        assert isinstance(error, PeerFailed)
        assert "n2 (machine 1, ranks 2 and 3) did not connect to n1 within 3 s (connected: n1 and n3)" in str(error)
        assert "topology.node_rank=1" in str(error)
    shown = capfd.readouterr().err
    assert "for n2 (machine 1, ranks 2 and 3) to connect; connected: n1 and n3" in shown


def test_a_machine_0_that_never_starts_is_named(place: MeetingPoint, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "PROGRESS_S", 0)
        patch.setattr(rendezvous, "is_own", lambda address: False)
        (error,) = together(replace(place, timeout_s=1.2), member(1))
    assert isinstance(error, PeerFailed)
    (problem,) = error.problems  # with the address once
    said = rf"machine 0 could not be reached at 127\.0\.0\.1:{place.port} for \d+ s: connection refused"
    assert re.fullmatch(said, problem.what)
    assert re.search(r"waited \d+ s so far for machine 0 at 127\.0\.0\.1", capfd.readouterr().err)


def test_a_taken_port_is_an_error_on_machine_0_and_no_machine_0_for_the_others(place: MeetingPoint) -> None:
    with socket.create_server(("", place.port)):
        here, there = together(replace(place, timeout_s=1), member(0), member(1))
    assert isinstance(here, CheckFailed) and isinstance(there, PeerFailed)
    assert f"port {place.port} is taken" in str(here) and "topology.main_port" in str(here)


def test_strangers_neither_join_nor_stop_the_rendezvous(place: MeetingPoint) -> None:
    launchers = Launchers()
    launchers.start(member(0), place)
    join(place, member(1), job="another")  # it serves by now
    with socket.create_connection(("127.0.0.1", place.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
        with socket.create_connection(("127.0.0.1", place.port)) as silent:
            client = Client("127.0.0.1", place.port)
            assert "another run" in json.dumps(client.call("join", {}))
            for odd in (3, {"node": -1}):
                said = {"member": odd, "token": "x", "password": place.password}
                assert "another version of packtrain" in json.dumps(client.call("join", said))
            assert silent.fileno() > 0
            launchers.start(member(1), place)
            ends = launchers.join()
    assert all(isinstance(one, Group) for one in ends), ends


def test_one_machine_takes_any_free_port_as_it_is_bound_and_machines_meet_over_ipv6(place: MeetingPoint) -> None:
    alone = meet(member(0, nodes=1), replace(place, port=0))
    with alone as group, socket.create_connection(("127.0.0.1", group.channel.port)):
        assert group.channel.port != group.store_port
    if not socket.has_dualstack_ipv6() or not is_own("::1"):
        pytest.skip("no IPv6 on this machine")
    ends = together(replace(place, address="::1"), member(0), member(1))
    assert all(isinstance(one, Group) for one in ends), ends


def test_a_machine_of_another_run_is_sent_away_and_the_run_goes_on(place: MeetingPoint) -> None:
    launchers = Launchers()
    launchers.start(member(0), place)
    launchers.start(member(1), replace(place, job="another"))
    until(lambda: 1 in launchers.ends)
    assert isinstance(launchers.ends[1], CheckFailed)
    assert "another run" in str(launchers.ends[1])
    launchers.start(member(1), place)
    ends = launchers.join()
    assert isinstance(ends[0], Group) and isinstance(ends[2], Group)


def test_who_has_not_the_secret_that_all_were_given_cannot_join(place, monkeypatch):
    monkeypatch.setenv(SECRET, "of the job")
    launchers = Launchers()
    launchers.start(member(0), place)
    time.sleep(1)
    said = {"member": asdict(member(1)), "token": "t", "password": f"guessed {place.job}"}
    assert "another run" in str(Client("127.0.0.1", place.port).call("join", said)["stop"])
    launchers.start(member(1), place)
    first, second = (one.channel.secret for one in launchers.join())
    assert first == second != "of the job"


def test_a_machine_that_left_is_waited_for_again(place: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = Launchers()
    launchers.start(member(0, 3), place)
    monkeypatch.setattr(rendezvous, "ABSENT_S", 3)  # ten times what lies between two calls of one that is there
    assert "wait" in join(place, member(1, 3))
    time.sleep(3.5)
    launchers.start(member(1, 3), place)
    launchers.start(member(2, 3), place)
    ends = launchers.join()
    assert all(isinstance(one, Group) for one in ends), ends


def test_machine_0_that_is_stopped_tells_the_others_and_who_comes_late_is_told_that_it_has_begun(place):
    def stopped(names: Mapping[int, str]) -> str:
        raise RuntimeError

    launchers = Launchers()
    launchers.start(member(0), place, stopped)
    launchers.start(member(1), place)
    error = launchers.join()[1]
    assert isinstance(error, PeerFailed)
    assert "its launcher was stopped [machine-0-left]" in str(error)
    place, begun = free_place(), Launchers()
    begun.start(member(0), place)
    begun.start(member(1), place)
    until(lambda: len(begun.ends) == 2)
    for host in ("n2", "n7"):
        late = error_from_json(join(place, member(1, host=host))["stop"])
        assert isinstance(late, PeerFailed) and "[run-has-started]" in str(late)
    begun.join()
