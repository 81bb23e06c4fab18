"""The run's port and a free one between machines, as tables: what a firewall lets through and what it does not."""

from __future__ import annotations

import pytest

from packtrain.diagnose.cluster.doors import Door, closed_to, next_door, port_remarks, ports_text, shut_links, ways_of
from packtrain.diagnose.cluster.links_table import rounds_of
from packtrain.launch.place import Place

NAMES = {0: "n1", 1: "n2", 2: "n3"}
SILENT = "no answer from 10.0.0.9:29500"


def doors(run: dict[tuple[int, int], str | None], free: dict[tuple[int, int], str | None]) -> list[Door]:
    """Both ports of three machines, each way: open but for these."""
    return [
        Door(*way, port, of_run, shut.get(way, ""), why="taken" if shut.get(way, "") is None else "")
        for way in ways_of(rounds_of(range(3)))
        for of_run, port, shut in ((False, 41000, free), (True, 29500, run))
    ]


def test_ports_that_answer_are_no_remark() -> None:
    well = doors({}, {})
    assert len(well) == 12 and port_remarks(well, NAMES) == [] and shut_links(well) == {} and closed_to(well, 0) == []
    assert ports_text(well, NAMES) == "port 29500: 6 of 6 ways open"


@pytest.mark.parametrize(("end", "status"), [(0, "fail"), (1, "warn")])
def test_the_runs_port_closed_where_another_answers_is_said_once_of_each_machine(end: int, status: str) -> None:
    others = [node for node in NAMES if node != end]
    found = doors({(start, end): SILENT for start in others}, {})
    (one,) = port_remarks(found, NAMES)
    who = ", ".join(NAMES[node] for node in others)
    assert one.status == status and one.nodes == (NAMES[end], *(NAMES[node] for node in others))
    said = f"{who} cannot reach {NAMES[end]} at the run's port 29500 ({SILENT}), while port 41000 there answers"
    assert one.found.startswith(said) and ("needs it at n1 alone" in one.found) == (end != 0)
    assert f"Open TCP port 29500 on {NAMES[end]}" in one.fix and "ip_local_port_range" in one.fix
    assert shut_links(found) == {} and closed_to(found, end) == others
    assert f"n1 to n3: closed ({SILENT})" in ports_text(doors({(0, 2): SILENT}, {}), NAMES)


def test_a_firewall_that_is_the_same_on_all_machines_is_said_once_and_machine_0s_for_itself() -> None:
    found = doors(dict.fromkeys(ways_of(rounds_of(range(3))), SILENT), {})
    first, others = port_remarks(found, NAMES)
    assert (first.status, first.nodes[0]) == ("fail", "n1") and (others.status, others.nodes) == ("warn", ("n2", "n3"))
    assert "the run's port 29500 of n2, n3 is closed to others" in others.found and others.fix
    names = {node: f"n{node}" for node in range(128)}
    many = [Door(start, end, 29500, True, SILENT) for start, end in ways_of(rounds_of(range(128)))]
    assert len(ports_text(many, names).splitlines()) == 8


def test_where_only_the_runs_port_is_let_through_the_link_is_dead_and_says_so() -> None:
    found = doors({(0, 2): SILENT}, {(0, 1): "silence", (0, 2): "silence"})
    links = shut_links(found)
    assert links[0, 1].status == "dead" and links[0, 1].found == (
        "silence, while the run's port 29500 answers: only that one is let through"
    )
    assert links[0, 2].found == "silence, nor at the run's port 29500"
    assert port_remarks(found, NAMES) == []  # a dead link is a remark of its own


def test_a_port_that_is_taken_is_not_tried_and_not_blamed() -> None:
    found = doors({(0, 2): None, (1, 2): None}, {})
    assert port_remarks(found, NAMES) == [] and closed_to(found, 2) == []
    assert ports_text(found, NAMES) == "port 29500: 4 of 4 ways open\nnot tried at n3: taken"
    assert [one.to_json(NAMES)["status"] for one in found if one.of_run].count("not tried") == 2


def test_the_port_beside_the_runs_is_a_port() -> None:
    assert [next_door(Place("n1", port, 1, "")).port for port in (29500, 65535)] == [29501, 65534]
