"""Who is named when a run stands still, as tables: states of ranks in, one diagnosis out. No process is started."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from packtrain.monitor.heartbeat import (
    LONG,
    PHASES,
    Collective,
    Phase,
    ProcessState,
    TimeLimits,
    last_collectives,
    main_stack,
    place_of,
    progress_of,
)
from packtrain.monitor.watchdog import CAUSES, Cause, Diagnosis, RankState, diagnose
from packtrain.run_folder import as_type


def rank(number: int, phase: Phase, step: int = 8, *, process: ProcessState | None = None, **known: Any) -> RankState:
    process = process or ProcessState(1000 + number)
    known = {"heard_s": 0.5, "still_s": 545.0, **known}
    return RankState(number, f"n{number // 4}", 1000 + number, phase, step, process=process, **known)


def waits(number: int, phase: Phase, step: int = 8, name: str = "gloo:all_reduce", at: int = 37, what: str = "Float 4"):
    return rank(number, phase, step, pending=Collective(name, at, "0", what))


def ended(number: int, code: int | None, phase: Phase = "backward", **known: Any) -> RankState:
    return rank(number, phase, process=ProcessState(1000 + number, "gone", code, **known))


def named(states: list[RankState]) -> Diagnosis:
    found = diagnose(states)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (rank(1, "data"), "data"),
        (rank(1, "prepare"), "data"),
        (rank(1, "checkpoint", 7), "storage"),
        (rank(1, "final"), "storage"),
        (rank(1, "forward"), "stuck"),
        (rank(1, "start", heard_s=None), "stuck"),
        (rank(1, "counts", heard_s=700, waits="the counts"), "stuck"),
        (rank(1, "forward", heard_s=700), "stuck"),
        (rank(1, "backward", process=ProcessState(1001, "stopped")), "stopped"),
        (ended(1, None), "died"),
        (ended(1, -9), "died"),
        (ended(1, -9, oom=True), "memory"),
        (ended(1, -11, oom=True), "died"),
        (ended(1, 7), "died"),
        (ended(1, 0, "done", reported=True), "ended"),
        (waits(1, "checkpoint", 7, "gloo:barrier"), "collectives"),
        (waits(1, "counts", what="Long 6"), "collectives"),
        (waits(1, "forward", at=36), "collectives"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.phase,
)
def test_one_rank_keeps_three_waiting_and_is_named_with_the_cause(culprit: RankState, cause: Cause) -> None:
    found = named([waits(0, "counts"), culprit, waits(2, "counts"), waits(3, "counts")])
    assert (found.cause, found.ranks) == (cause, (1,))
    assert "rank 1 on n0" in found.what
    assert found.others == (
        "ranks 0, 2 and 3 on n0 wait in gloo:all_reduce number 37 (Float 4), in exchanging the counts of step 8",
    )
    assert found.lines[-1] == f"  → {CAUSES[cause][1]}"


def test_who_says_that_it_waits_is_not_the_one_that_is_behind() -> None:
    states = [rank(0, "counts", waits="the counts of all ranks"), rank(1, "backward", 7), rank(2, "data")]
    found = named(states)
    assert (found.cause, found.ranks) == ("stuck", (1,))
    assert found.others == (
        "rank 0 on n0 waits for the counts of all ranks, in exchanging the counts of step 8",
        "rank 2 on n0 is in loading data of step 8",
    )
    assert found.what.endswith(" is behind: no progress for 545 s, in the backward pass of step 7")


def test_an_operation_that_the_others_have_passed_was_lost_on_its_way() -> None:
    lost = Collective("gloo:all_reduce", 36, "0", "Float 4")
    states = [replace(waits(0, "counts"), finished=lost), waits(1, "forward", at=36)]
    found = named(states)
    assert (found.cause, found.ranks) == ("network", ())
    assert found.what.startswith(
        "rank 1 on n0 (process 1001) waits in gloo:all_reduce number 36 (Float 4), which the others "
    )
    states[0] = replace(states[0], finished=replace(lost, name="gloo:broadcast"))
    assert named(states).cause == "collectives"


def test_of_two_ranks_that_wait_in_different_operations_the_one_that_is_less_far_is_named() -> None:
    states = [waits(0, "counts"), waits(1, "step end", 7, "gloo:all_gather")]
    for found in (named(states), named(states[::-1])):
        assert (found.cause, found.ranks) == ("collectives", (1,))


def test_where_all_wait_in_the_same_operation_nobody_is_named_but_what_lies_between() -> None:
    found = named([waits(one, "backward") for one in range(4)])
    assert (found.cause, found.ranks) == ("network", ())
    assert found.what == (
        "ranks 0 to 3 on n0 wait in gloo:all_reduce number 37 (Float 4), in the backward pass of step 8, and no rank is behind"
    )


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_whose_answer_was_lost_is_not_said_to_wait_elsewhere(silent: int) -> None:
    states = [waits(one, "backward") for one in range(2)]
    states[silent] = replace(states[silent], pending=None, waits="the others")
    found = named(states)
    assert (found.cause, found.ranks) == ("network", ())
    assert found.what.startswith(
        "ranks 0 and 1 on n0 wait in gloo:all_reduce number 37 (Float 4), in the backward pass"
    )
    states[silent] = replace(states[silent], finished=Collective("gloo:all_reduce", 36, "0", "Float 4"))
    assert named(states).cause == "collectives"


def test_of_ranks_that_died_those_are_named_that_were_not_ended_for_it() -> None:
    states = [ended(0, -6), ended(1, -11), waits(2, "backward"), ended(3, -15)]
    found = named(states)
    assert found.ranks == (1,) and "(SIGSEGV)" in found.what


def test_a_run_at_its_end_has_no_diagnosis_and_the_first_rank_writes_its_results_alone() -> None:
    done = [ended(one, 0, "done", reported=True) for one in range(3)]
    assert diagnose(done) is None
    assert named([rank(0, "final", still_s=1700), *done[1:]]).cause == "storage"


@pytest.mark.parametrize("culprit", [0, 513, 1023])
def test_one_of_1024_ranks_is_found_in_well_under_a_second(culprit: int) -> None:
    states = [waits(one, "backward") for one in range(1024)]
    states[culprit] = rank(culprit, "forward", micro=3)
    started = time.process_time()  # of this process alone: a busy machine is none of its business
    found = named(states)
    assert time.process_time() - started < 1
    assert found.ranks == (culprit,)
    assert f"rank {culprit} on n{culprit // 4}" in found.what and "(micro-batch 3)" in found.what
    assert len("\n".join(found.lines)) < 1000


def test_progress_orders_all_places_that_a_rank_comes_through() -> None:
    way: list[tuple[Phase, int, int]] = [(phase, 0, 0) for phase in PHASES[: PHASES.index("data")]]
    for step in (1, 2):
        way += [("data", step, 0), ("counts", step, 0)]
        for micro in (1, 2, 3):
            way += [("forward", step, micro), ("backward", step, micro)]
        way += [("optimizer", step, 0), ("step end", step, 0), ("checkpoint", step, 0), ("eval", step, 0)]
    way += [("final", 2, 0), ("done", 2, 0)]
    progress = [progress_of(*place) for place in way]
    assert progress == sorted(set(progress))
    assert place_of("forward", 12, 3) == "the forward pass of step 12 (micro-batch 3)"


@pytest.mark.parametrize(("step_s", "join_s"), [(600, 300), (10, 60), (3600, 300)])
def test_every_phase_has_a_deadline_a_little_before_that_of_collectives(step_s: int, join_s: int) -> None:
    limits = TimeLimits(step_s, join_s)
    for phase in PHASES:
        deadline = limits.deadline_s(phase)
        if phase in ("start", "join"):
            assert deadline == 2 * join_s + 60
        elif phase in LONG:
            assert deadline == limits.deadline_s("checkpoint")
        else:
            assert limits.collective_s(phase) / 2 <= deadline <= 0.9 * limits.collective_s(phase)


def test_docs_hangs_md_has_every_cause_in_the_words_that_are_printed() -> None:
    page = (Path(__file__).parents[3] / "docs/hangs.md").read_text()
    for why, fix in CAUSES.values():
        assert f"| {why} | {fix} |" in page


def test_states_travel_as_json() -> None:
    state = rank(1, "data", stack=('File "a.py", line 3 in read',), finished=Collective("gloo:barrier", 4))
    for one in (state, waits(2, "backward"), RankState(3, "n0")):
        assert as_type(json.loads(json.dumps(asdict(one))), RankState) == one


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    dump = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in helper\n\n'
        'Current thread 0x2 (most recent call first):\n  File "b c.py", line 7 in <module>\n  File "<frozen x>", line ??? in y\n'
    )
    assert main_stack(dump) == ('File "b c.py", line 7 in <module>', 'File "<frozen x>", line ??? in y')


def test_pending_and_finished_are_told_apart_by_torchs_flight_record() -> None:
    def entry(number: int, *, retired: bool = False, p2p: bool = False, group: int = 0) -> dict:
        sizes = {"input_dtypes": ["Float", "Long"], "input_sizes": [[4, 8], []]}
        name = {"profiling_name": "nccl:all_gather", "pg_id": group, "collective_seq_id": number}
        return {**name, **sizes, "is_p2p": p2p, "retired": retired}

    entries = [entry(6, retired=True), entry(7), entry(8), entry(9, p2p=True), entry(3, group=1)]
    status = {"0": {"last_completed_collective": "7"}, "1": {"last_completed_collective": "-1"}}
    last = last_collectives({"entries": entries, "pg_status": status})
    assert str(Collective(**last["pending"])) == "nccl:all_gather number 8 (Float 4x8, Long 1)"
    assert (last["finished"]["group"], last["finished"]["number"]) == ("0", 7)
    assert last_collectives({}) == {"pending": None, "finished": None}
