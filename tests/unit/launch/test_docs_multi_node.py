"""docs/multi-node.md has the words that are printed when machines do not meet: each row is produced here by what prints it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.errors import PacktrainError
from packtrain.launch import rendezvous
from packtrain.launch.exit_status import Outcome, judge
from packtrain.launch.rendezvous import Place, meet
from packtrain.launch.run_lock import locked
from packtrain.plan import network_settings as names
from packtrain.plan.agreement import Member, twice, unlike
from packtrain.plan.network_settings import HostNetwork, Interface, choose_network
from tests.ports import free_port
from tests.unit.plan.test_agreement import member

PAGE = Path(__file__).parents[3] / "docs/multi-node.md"
PLACE = Place("n1", 29500, 300, "job")


def same(text: str) -> str:
    """A text without what differs from run to run: numbers, addresses, host names, processes, folders."""
    text = re.sub(r"\b(localhost|127\.0\.0\.1|n\d+)\b", "HOST", text)
    text = re.sub(r"process \d+ \(.*?\)", "process", text)
    return re.sub(r"\S*/\S*", "PATH", re.sub(r"\d[\d.]*", "0", text))


TABLES = [
    tuple(same(cell.strip()) for cell in line.split("|")[1:-1])
    for line in PAGE.read_text().splitlines()
    if line[:2] == "| "
]
ROWS = [(what, fix) for what, _, fix in TABLES]


def raised(work: Callable[[], object]) -> PacktrainError:
    with pytest.raises(PacktrainError) as caught:
        work()
    return caught.value


def missing() -> PacktrainError:
    joined = rendezvous._JoinServer(member(0, per_node=8), PLACE)
    return joined._not_here(joined._missing())


def unequal(**changes: object) -> PacktrainError:
    here: Member = member(0, per_node=8, gpus=8)
    found = unlike([here, replace(here, node=1, host="n2", **changes)])
    assert found is not None
    return found


def mistake(place: Place) -> PacktrainError:
    with pytest.raises(rendezvous._NotYet) as caught:
        rendezvous._asked(member(1), place, "token", 1)
    assert caught.value.mistake is not None
    return caught.value.mistake


def unknown_name() -> PacktrainError:
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        patch.setattr(socket, "getaddrinfo", fails)
        return mistake(PLACE)


def own_address() -> PacktrainError:
    return mistake(replace(PLACE, address="localhost", port=free_port()))


def other_program() -> PacktrainError:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return mistake(Place("127.0.0.1", held.getsockname()[1], 1, "job"))


def second_machine_0() -> PacktrainError:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "is_own", lambda address: False)
        patch.setattr(rendezvous, "resolve", lambda address, port: ["10.0.0.1"])
        patch.setattr(rendezvous, "own_addresses", lambda: ("10.0.0.2",))
        patch.setattr(rendezvous, "_CALL_OUT_S", 0)
        return raised(lambda: rendezvous._check_address(member(0, host="n2"), PLACE))


def port_taken() -> PacktrainError:
    with socket.create_server(("", 0)) as held:
        place = Place("127.0.0.1", held.getsockname()[1], 5, "job")
        return raised(lambda: meet(member(0), place).__enter__())


def no_interface() -> PacktrainError:
    network = HostNetwork((Interface("eth0", ("10.0.0.2",), up=True),), (), "10.0.0.2")
    return raised(lambda: choose_network(network, {"GLOO_SOCKET_IFNAME": "ib0"}, main_address="n1", nodes=2))


def locked_twice(folder: Path) -> PacktrainError:
    (folder / "logs").mkdir()
    (folder / "logs/channel.json").write_text('{"host": "n7"}')
    with locked(folder):
        return raised(lambda: locked(folder).__enter__())


ERRORS: dict[str, Callable[[], PacktrainError]] = {
    "no machine 0": lambda: rendezvous._not_found(PLACE, "connection refused", 300),
    "no machine 1": missing,
    "number 0 twice": lambda: twice(member(0), member(0, host="n2")),
    "second machine 0": second_machine_0,
    "own address": own_address,
    "unknown name": unknown_name,
    "port taken": port_taken,
    "no interface": no_interface,
    "other program": other_program,
    "other run": lambda: rendezvous._not_for_us(PLACE, rendezvous._ANOTHER_RUN),
    "nodes": lambda: unequal(nodes=3),
    "GPUs": lambda: unequal(per_node=7, gpus=7),
    "fewer GPUs": lambda: unequal(gpus=7),
    "no GPUs": lambda: unequal(gpus=0),
    "config": lambda: unequal(config={"optim.learning_rate": "0.002"}),
    "versions": lambda: unequal(versions={"torch": "2.12.0"}),
    "come back": lambda: rendezvous._without_this_machine(PLACE),
    "left": lambda: rendezvous._left(PLACE, "its launcher was stopped"),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_the_page_has_every_error_of_the_rendezvous_in_the_words_that_are_printed(fault: str) -> None:
    (problem,) = ERRORS[fault]().problems
    keyed = f"{problem.where}: {problem.what}"
    assert any((same(what), same(problem.fix)) in ROWS for what in (problem.what, keyed)), f"{problem}"


def test_the_page_has_the_error_of_a_folder_that_is_taken(tmp_path: Path) -> None:
    (problem,) = locked_twice(tmp_path).problems
    assert (same(problem.what), same(problem.fix)) in ROWS


def test_the_page_has_what_the_verdict_says() -> None:
    names = {0: "n1", 1: "n2"}
    assert same(judge({0: Outcome(), 1: Outcome(codes={9: 2})}, names, 8).lines[0]) in [what for what, _ in ROWS]
    silent, ended = Outcome(lost="silent for 12 s"), Outcome(lost="its launcher ended")
    late = Outcome(lost="its processes had not ended 30 s after the failure")
    for outcomes in ((Outcome(), silent), (Outcome(), ended), (Outcome(), late), (silent, Outcome())):
        said, cause, advice = judge(dict(enumerate(outcomes)), names, 8).lines
        assert (same(said), same(cause.partition(": ")[2]), same(advice.partition("→ ")[2])) in TABLES


def test_the_page_has_what_is_said_of_a_silent_name_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(names, "_look_up", lambda address: time.sleep(1))
    monkeypatch.setattr(names, "LOOK_UP_S", 0.01)
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    names.short_waits("n1")
    what, fix = capsys.readouterr().err.strip().split("\n    → ")
    assert (same(what), same(fix)) in ROWS
