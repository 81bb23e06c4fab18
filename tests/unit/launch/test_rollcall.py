"""The roll call of several machines: who meets, who is refused, and in which words."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest

from packtrain.config.compose import to_dict
from packtrain.config.schema import Optim, RunConfig, Topology, Trainer
from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, Problem, UserError
from packtrain.launch import arrival, rollcall
from packtrain.launch.line import Line
from packtrain.launch.members import differences, job_of, shared_values
from packtrain.launch.place import Place, is_own
from packtrain.launch.rollcall import listening
from packtrain.launch.verdict import Outcome
from packtrain.launch.wire import LINE_LIMIT, Closed, NotOurs, Wire, error_of, stop_message
from tests.unit.launchers import Launchers, end, free_place, member, together, wait_for_order

LONG_S = 60  # for what comes in no time, unless the machine has other things to do


@pytest.fixture
def place() -> Place:
    return free_place()


@contextmanager
def visitor(place: Place) -> Iterator[socket.socket]:
    """A raw connection to the hub, as soon as it listens."""
    until = time.monotonic() + LONG_S
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", place.port), timeout=LONG_S)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)
    with connection:
        yield connection


def test_all_machines_meet_and_end_with_one_code(place: Place) -> None:
    ends = together(place, member(1, 3), member(0, 3), member(2, 3))
    assert [one.code for one in ends] == [0, 0, 0]


def test_64_machines_meet_within_seconds(place: Place) -> None:
    begun = time.monotonic()
    ends = together(place, *[member(node, 64) for node in reversed(range(64))])
    assert {one.code for one in ends} == {0}
    assert time.monotonic() - begun < 40


def test_the_port_is_free_for_torch_while_the_line_is_open(place: Place) -> None:
    def bind(line: Line) -> Any:
        if line.node == 0:
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                with socket.socket(family) as store:
                    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    store.bind((address, place.port))
                    store.listen()
        return end(line)

    assert [one.code for one in together(place, member(0), member(1), work=bind)] == [0, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"optim.learning_rate": "0.002"}}, "optim.learning_rate: n2 has 0.002; n1 has 0.001"),
        ({"versions": {"torch": "2.12.0"}}, "torch: n2 has 2.12.0; n1 has 2.13.0"),
        ({"per_node": 3, "gpus": 3}, "same number of processes (n1: 2, n2: 3)"),
        ({"nodes": 3, "total": 6}, "how many they are: 2 on n1, 3 on n2"),
        ({"total": 3}, "4 processes in total are wanted, but planned are 4 on n1, 3 on n2"),
        ({"gpus": 1}, "2 GPUs on each machine are wanted, and some have fewer (n2: 1)"),
        ({"gpus": 8}, "some machines have GPUs and others none (0 on n1, 8 on n2)"),
        ({"node": 0}, "two machines say that they are number 0: n1 (10.0.0.1) and n2 (10.0.0.2)"),
    ],
    ids=["config", "versions", "per-node", "nodes", "total", "few-gpus", "some-gpus", "twice"],
)
def test_machines_that_do_not_fit_all_stop_with_the_same_words(
    change: dict, said: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollcall, "check_address", lambda me, place: None)
    monkeypatch.setattr(rollcall, "_FULL_PICTURE_S", 0.2)
    other = member(1, **{name: value for name, value in change.items() if name not in ("node", "nodes")})
    other = replace(other, **{name: value for name, value in change.items() if name in ("node", "nodes")})
    launchers = Launchers()
    launchers.start(member(0), place)
    if other.node == 0:  # comes as any other machine would: its own address check sends it here
        with visitor(place):  # machine 0 listens by now
            pass
        monkeypatch.setattr(
            rollcall, "_gather", lambda me, place, exchange, prepare: arrival.arrive(me, place, exchange)
        )
    launchers.start(other, place)
    ends = launchers.join()
    assert [type(one) for one in ends] == [CheckFailed, CheckFailed]
    assert said in str(ends[0])
    assert str(ends[0]) == str(ends[1])
    assert "→" in str(ends[0])


def test_what_machine_0_cannot_prepare_is_an_error_for_all(place: Place) -> None:
    def prepare() -> None:
        raise UserError("the run folder cannot be written", where="trainer.output_dir")

    launchers = Launchers()
    launchers.start(member(0), place, prepare=prepare)
    launchers.start(member(1), place)
    ends = launchers.join()
    assert all(isinstance(one, UserError) and "cannot be written" in str(one) for one in ends)


def test_unequal_counts_of_gpus_are_named_by_machine() -> None:
    members = [member(0, per_node=4, gpus=4), member(1, per_node=3, gpus=3)]
    error = differences(members)
    assert error is not None
    assert "same number of GPUs (n1: 4, n2: 3)" in str(error)
    assert "topology.gpus_per_node=3" in str(error)


def test_of_many_machines_those_that_differ_are_named() -> None:
    members = [member(node, 64, host=f"n{node}") for node in range(64)]
    members[17] = replace(members[17], versions={"torch": "2.12.0"})
    error = differences(members)
    assert error is not None
    assert "n17 has 2.12.0; n0, n1, n2, n3, n4, n5 and 57 more have 2.13.0" in str(error)


def test_a_missing_machine_is_named_to_all_that_are_there(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place, tell = replace(place, names=("n1", "n2", "n3")), rollcall._Hall._tell

    def time_is_over(hall: rollcall._Hall, message: dict) -> None:
        tell(hall, message)
        if message["kind"] == "waiting" and len(hall.members()) == 2:
            hall._end = 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollcall, "PROGRESS_S", 0.1)
        patch.setattr(rollcall._Hall, "_tell", time_is_over)
        ends = together(place, member(0, 3), member(2, 3))
    for error in ends:
        assert isinstance(error, PeerFailed)
        assert "n2 (machine 1, ranks 2 to 3) did not connect to n1 within 60 s (here: n1 and n3)" in str(error)
        assert "topology.node_rank=1" in str(error)
    shown = capfd.readouterr().err
    assert "s for n2 (machine 1, ranks 2 to 3): not connected; n1 and n3 are here" in shown


def test_a_machine_0_that_never_starts_is_named(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival, "PROGRESS_S", 0)
        (error,) = together(replace(place, timeout_s=1.2), member(1))
    assert isinstance(error, PeerFailed)
    (problem,) = error.problems  # with the address once
    said = rf"machine 0 could not be reached at 127\.0\.0\.1:{place.port} for \d+ s: connection refused"
    assert re.fullmatch(said, problem.what)
    assert re.search(r"waiting \d+ s for machine 0 at 127\.0\.0\.1", capfd.readouterr().err)


def test_an_address_of_the_machine_itself_is_an_error_before_the_time_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "CERTAIN_S", 0.5)
    begun = time.monotonic()
    by_name, error = (together(replace(place, address=one), member(1))[0] for one in ("localhost", "127.0.0.1"))
    assert time.monotonic() - begun < place.timeout_s / 2
    assert isinstance(by_name, CheckFailed) and isinstance(error, CheckFailed)
    assert "127.0.0.1 here, an address of this machine itself, and nobody listens there" in str(by_name)
    assert "127.0.0.1 is an address of this machine itself, and nobody listens there" in str(error)
    assert "topology.main_address" in str(error)


def test_an_unknown_name_is_an_error_on_both_sides(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "CERTAIN_S", 0.5)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    ends = together(replace(place, address="nowhere"), member(0), member(1))
    assert all(isinstance(one, CheckFailed) and "'nowhere' is not known" in str(one) for one in ends)


def test_a_second_machine_0_is_told_its_own_addresses(place: Place) -> None:
    launchers = Launchers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollcall, "is_own", lambda address: False)
        patch.setattr(arrival, "_CALL_S", 0.5)  # nobody answers
        launchers.start(member(0, host="n2"), place)
        (error,) = launchers.join()
    assert isinstance(error, CheckFailed)
    said = "this machine (n2) has topology.node_rank=0, but topology.main_address=127.0.0.1 is not one of its addresses"
    assert said in str(error)
    assert "topology.node_rank, topology.main_address" in str(error)


def test_a_taken_port_is_an_error_with_its_holder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "CERTAIN_S", 0.5)
    with socket.create_server(("", place.port)):
        ends = together(place, member(0), member(1))
    assert all(isinstance(one, CheckFailed) and "topology.main_port" in str(one) for one in ends)
    assert f"port {place.port} is taken by process" in str(ends[0])
    assert "not a packtrain that waits" in str(ends[1])


def test_of_the_holder_of_a_port_no_option_is_told_for_it_may_be_a_secret() -> None:
    code = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    with subprocess.Popen([sys.executable, f"-c{code}", "--token=hush"], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        said = rollcall.holder_of(int(holder.stdout.readline()))
        holder.kill()
    assert re.fullmatch(rf" by process {holder.pid} \(\S*python\S*\)", said)


def test_strangers_neither_join_nor_stop_the_roll_call(place: Place) -> None:
    launchers = Launchers()
    launchers.start(member(0), place)
    with visitor(place) as scanner, visitor(place) as silent, visitor(place) as endless, visitor(place) as rude:
        scanner.sendall(b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n" + bytes(range(256)))
        endless.sendall(b"x" * 1000)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.close()  # with a reset
        for hello in (
            b"[]\n",
            b'{"kind": 3}\n',
            b'{"kind": "hello"}\n',
            b'{"kind": "hello", "member": {"node": -1}}\n',
        ):
            with visitor(place) as odd:
                odd.sendall(hello)
        assert silent.fileno() > 0
        launchers.start(member(1), place)
        assert [one.code for one in launchers.join()] == [0, 0]


def test_a_slow_machine_joins_byte_by_byte(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "_HELLO_S", LONG_S)
    launchers = Launchers()
    launchers.start(member(0), place)
    with visitor(place) as slow:
        hello = json.dumps({"kind": "hello", "job": "job", "member": asdict(member(1))}).encode() + b"\n"
        for at in range(0, len(hello), 7):
            slow.sendall(hello[at : at + 7])
            time.sleep(0.002)
        heard = b""
        while b'"go"' not in heard:
            heard += slow.recv(1000)
        slow.sendall(json.dumps({"kind": "outcome", **Outcome(codes={2: 0, 3: 0}).to_json()}).encode() + b"\n")
        while b'"end"' not in heard:
            heard += slow.recv(1000)
    assert [one.code for one in launchers.join()] == [0]


def test_an_order_that_comes_together_with_go_is_heard(place: Place) -> None:
    launchers = Launchers()
    with listening(place) as listener:
        listener.settimeout(LONG_S)
        launchers.start(member(1), place, work=lambda line: (wait_for_order(line), line.finish(Outcome())))
        connection, _ = listener.accept()
    said = (
        {"kind": "welcome"},
        {"kind": "go", "names": ["n1", "n2"]},
        {"kind": "order", "signal": None, "why": "rank 1 failed"},
    )
    with connection:
        connection.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in said))
        connection.sendall(json.dumps({"kind": "end", "code": 2, "lines": []}).encode() + b"\n")
        order, verdict = launchers.join()[0]
    assert (order.why, verdict.code) == ("rank 1 failed", 2)


def test_machines_meet_over_ipv6(place: Place) -> None:
    if not socket.has_dualstack_ipv6() or not is_own("::1"):
        pytest.skip("no IPv6 on this machine")
    assert [one.code for one in together(replace(place, address="::1"), member(0), member(1))] == [0, 0]


def test_a_machine_of_another_run_is_sent_away_and_the_run_goes_on(place: Place) -> None:
    launchers = Launchers()
    launchers.start(member(0), place)
    launchers.start(member(1), replace(place, job="another"))
    while 1 not in launchers.ends:
        time.sleep(0.05)
    assert isinstance(launchers.ends[1], CheckFailed)
    assert "another run" in str(launchers.ends[1])
    launchers.start(member(1), place)
    ends = launchers.join()
    assert (ends[0].code, ends[2].code) == (0, 0)


def test_a_machine_that_left_is_waited_for_again(place: Place) -> None:
    launchers = Launchers()
    launchers.start(member(0, 3), place)
    with visitor(place) as first:
        wire = Wire(first)
        wire.send({"kind": "hello", "job": "job", "member": asdict(member(1, 3))})
        until = time.monotonic() + LONG_S
        while not any(one["kind"] == "welcome" for one in wire.receive()):
            assert time.monotonic() < until
            time.sleep(0.01)
    launchers.start(member(1, 3), place)
    launchers.start(member(2, 3), place)
    assert [one.code for one in launchers.join()] == [0, 0, 0]


def test_machine_0_that_is_stopped_tells_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    welcome, here = rollcall._Hall._welcome, threading.Event()

    def welcomed(hall: rollcall._Hall, wire: Wire, hello: dict) -> None:
        welcome(hall, wire, hello)
        here.set()

    def stopped(self: object, *_: object) -> None:
        raise RuntimeError("a signal")

    monkeypatch.setattr(rollcall._Hall, "_welcome", welcomed)
    launchers = Launchers()
    launchers.start(member(0, 3), place)
    with visitor(place):  # it listens by now
        pass
    launchers.start(member(1, 3), place)
    assert here.wait(LONG_S)
    monkeypatch.setattr(rollcall._Hall, "_drop_silent", stopped)
    ends = launchers.join()
    assert isinstance(ends[1], PeerFailed)
    assert "machine 0 left before the run began: its launcher was stopped" in str(ends[1])


def test_what_is_compared_holds_no_secret_and_nothing_of_one_machine() -> None:
    secret = {"WANDB_API_KEY": "s3cret", "NCCL_SOCKET_IFNAME": "eth0"}
    config = RunConfig(topology=Topology(node_rank=1, main_address="n1", environment=secret))
    values = shared_values(to_dict(config))
    assert "s3cret" not in str(values)
    assert "topology.node_rank" not in values
    assert not any("IFNAME" in key for key in values)
    other = replace(config, topology=replace(config.topology, environment={**secret, "WANDB_API_KEY": "other"}))
    assert shared_values(to_dict(other)) != values
    assert shared_values(to_dict(replace(config, optim=Optim(learning_rate=0.5))))["optim.learning_rate"] == "0.5"
    assert job_of(config) != job_of(replace(config, trainer=Trainer(output_dir="elsewhere")))


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_a_wire_refuses_what_is_no_line_of_ours() -> None:
    def heard(data: bytes) -> list:
        ours, theirs = pair()
        with ours, theirs:
            wire = Wire(ours)
            sender = threading.Thread(target=theirs.sendall, args=(data,))
            sender.start()
            got: list = []
            until = time.monotonic() + LONG_S
            while time.monotonic() < until and not got:
                got += wire.receive()
            sender.join()
            return got

    assert heard(b'{"kind": "beat"}\n{"kind": "a"}\n{"kind"') == [{"kind": "beat"}, {"kind": "a"}]
    for garbage in (b"\x00\xff\n", b"[1]\n", b"[" * 100_000 + b"\n", b"x" * (LINE_LIMIT + 2)):
        with pytest.raises(NotOurs):
            heard(garbage)


@pytest.mark.parametrize("kind", [UserError, CheckFailed, PeerFailed])
def test_an_error_of_one_machine_is_of_the_same_kind_on_another(kind: type[PacktrainError]) -> None:
    told = error_of(json.loads(json.dumps(stop_message(kind("the port is taken", where="port", fix="take another")))))
    assert type(told) is kind
    assert told.problems == (Problem("the port is taken", "port", "take another"),)


def test_a_wire_gives_up_on_a_reader_that_never_reads() -> None:
    ours, theirs = pair()
    with ours, theirs, pytest.raises(Closed, match="does not read"):
        wire = Wire(ours)
        for _ in range(10):
            wire.send({"kind": "x", "text": "x" * LINE_LIMIT})
