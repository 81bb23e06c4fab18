"""The launchers of several machines as threads of this process, on real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from packtrain.errors import PacktrainError
from packtrain.launch.line import Line
from packtrain.launch.members import Member
from packtrain.launch.place import Place
from packtrain.launch.rollcall import meet
from packtrain.launch.verdict import Outcome
from tests.ports import free_port


def member(node: int, nodes: int = 2, **changes: Any) -> Member:
    values = {"per_node": 2, "gpus": 0, "host": f"n{node + 1}", "addresses": (f"10.0.0.{node + 1}",)}
    values = {**values, "versions": {"torch": "2.13.0"}, "config": {"optim.learning_rate": "0.001"}, **changes}
    return Member(node=node, nodes=nodes, clock=time.time(), **{"total": nodes * values["per_node"], **values})


def free_place() -> Place:
    """A place to meet on a port that is free; its limits are for a machine that has other things to do, too."""
    return Place("127.0.0.1", free_port(), 60.0, "job", silence_s=30.0)


def end(line: Line) -> Any:
    return line.finish(Outcome(codes={2 * line.node: 0, 2 * line.node + 1: 0}))


def wait_for_order(line: Line) -> Any:
    """What the other machines want of this one, as soon as they do."""
    until = time.monotonic() + 60
    while (order := line.order()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return order


class Launchers:
    """Threads that each go through one roll call; `ends` has what became of each, by the order of starting."""

    def __init__(self) -> None:
        self.ends: dict[int, Any] = {}
        self.took: dict[int, float] = {}
        self._threads: list[threading.Thread] = []

    def start(
        self, me: Member, place: Place, work: Callable[[Line], Any] = end, prepare: Callable[[], None] = lambda: None
    ) -> None:
        number = len(self._threads)

        def run() -> None:
            begun = time.monotonic()
            try:
                with meet(me, place, prepare) as line:
                    self.ends[number] = work(line)
            except (PacktrainError, AssertionError, RuntimeError) as error:
                self.ends[number] = error
            self.took[number] = time.monotonic() - begun

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self, limit_s: float = 120) -> list[Any]:
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), f"still there; ended: {self.ends}"
        return [self.ends[number] for number in range(len(self._threads))]


def together(place: Place, *members: Member, work: Callable[[Line], Any] = end) -> list[Any]:
    launchers = Launchers()
    for me in members:
        launchers.start(me, place, work)
    return launchers.join()
