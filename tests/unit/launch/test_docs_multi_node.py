"""docs/multi-node.md has the words that are printed when machines do not meet: each row is produced here by what prints it."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.errors import PacktrainError
from packtrain.launch import rendezvous
from packtrain.launch.attempt import locked
from packtrain.launch.exit_status import Report, judge
from packtrain.launch.rendezvous import Place, meet
from packtrain.monitor.channel import Server
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


def unequal(**changes: object) -> PacktrainError:
    here: Member = member(0, per_node=8, gpus=8)
    found = unlike([here, replace(here, node=1, host="n2", **changes)])
    assert found is not None
    return found


def refused(me: Member, place: Place | None = None) -> PacktrainError:
    """What ends the rendezvous for a machine that waits half a second."""
    return raised(lambda: meet(me, place or Place("127.0.0.1", free_port(), 0.5, "job")).__enter__())


def unknown_name() -> PacktrainError:
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        patch.setattr(socket, "getaddrinfo", fails)
        return refused(member(0), PLACE)


def other_program() -> PacktrainError:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return refused(member(1), Place("127.0.0.1", held.getsockname()[1], 0.5, "job"))


def answered(handler: Callable[[dict], dict]) -> PacktrainError:
    """What a machine makes of the first answer of a machine 0 which then ends."""
    server = Server(secret="s", host="127.0.0.1")

    def answer_once(body: dict) -> dict:
        threading.Thread(target=server.close).start()
        return handler(body)

    server.serve("join", answer_once, open=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "CERTAIN_S", 0)
        return refused(member(1), Place("127.0.0.1", server.port, 30, "job"))


def late() -> PacktrainError:
    place = Place("127.0.0.1", free_port(), 5, "job")
    with meet(member(0, 1), place):
        return refused(member(1, 1), place)


def second_machine_0() -> PacktrainError:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "is_own", lambda address: False)
        patch.setattr(rendezvous, "resolve", lambda address, port: ["10.0.0.1"])
        patch.setattr(rendezvous, "own_addresses", lambda: ("10.0.0.2",))
        return refused(member(0, host="n2"), PLACE)


def port_taken() -> PacktrainError:
    with socket.create_server(("", 0)) as held:
        return refused(member(0), Place("127.0.0.1", held.getsockname()[1], 5, "job"))


def no_interface() -> PacktrainError:
    network = HostNetwork((Interface("eth0", ("10.0.0.2",), up=True),), (), "10.0.0.2")
    return raised(lambda: choose_network(network, {"GLOO_SOCKET_IFNAME": "ib0"}, main_address="n1", nodes=2))


def locked_twice(folder: Path) -> PacktrainError:
    (folder / "logs").mkdir()
    (folder / "logs/channel.json").write_text('{"host": "n7"}')
    with locked(folder):
        return raised(lambda: locked(folder).__enter__())


ERRORS: dict[str, Callable[[], PacktrainError]] = {
    "no machine 0": lambda: refused(member(1)),
    "no machine 1": lambda: refused(member(0, per_node=8)),
    "number 1 twice": lambda: twice(member(1), member(1, host="n3")),
    "second machine 0": second_machine_0,
    "unknown name": unknown_name,
    "port taken": port_taken,
    "no interface": no_interface,
    "other program": other_program,
    "nodes": lambda: unequal(nodes=3),
    "GPUs": lambda: unequal(per_node=7, gpus=7),
    "fewer GPUs": lambda: unequal(gpus=7),
    "no GPUs": lambda: unequal(gpus=0),
    "config": lambda: unequal(config={"optim.learning_rate": "0.002"}),
    "versions": lambda: unequal(versions={"torch": "2.12.0"}),
    "late": late,
    "left": lambda: answered(lambda body: {"wait": ""}),
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
    for why in ("silent for 12 s", "its launcher ended", "its processes had not ended 30 s after the failure"):
        said, cause, advice = judge({0: Report(0), 1: Report(1, lost=why)}, names, 8).lines
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
