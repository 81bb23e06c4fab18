"""Who is named when a run stands still, as tables: states of ranks in, one diagnosis out. No process is started."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.monitor.old.diagnosis import CAUSES, Diagnosis, RankState, diagnose
from packtrain.monitor.old.heartbeat import PHASES, Beat, Phase
from packtrain.monitor.old.stacks import Collective, Frame, main_stack, passed_of, pending_of
from packtrain.monitor.old.time_limits import LEAST_S, TimeLimits, limit_s, patience_s
from packtrain.wording import ranks_in_words


def rank(number: int, phase: Phase, step: int = 8, *, micro: int = 0, usual: float = 1.0, **known) -> RankState:
    beat = Beat(100, 1000 + number, phase, step, micro, 0.0, usual)
    return RankState(number, f"n{number // 4}", beat, still_s=45, told=True, **known)


def waits(number: int, phase: Phase, step: int = 8, name: str = "gloo:all_reduce", at: int = 37, what="Float 4"):
    return rank(number, phase, step, pending=Collective(name, at, "0", what))


def named(states: list[RankState]) -> Diagnosis:
    found = diagnose(states)
    assert found is not None
    return found


LOADER = (*[Frame("/x/socket.py", 5, "recv")] * 9, Frame("/x/torch/utils/data/dataloader.py", 1, "_try_get_data"))
SYNC = (Frame("/x/packtrain/train/checkpoint.py", 9, "_sync"),)
XID = "NVRM: Xid (PCI:0000:c3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
CUDA = (Frame("/x/torch/cuda/streams.py", 9, "synchronize"),)
USUAL = TimeLimits()


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (rank(1, "data"), "data"),
        (rank(1, "data", stack=LOADER), "loader"),
        (rank(1, "eval", stack=LOADER), "loader"),
        (rank(1, "prepare"), "data"),
        (rank(1, "checkpoint", 7, stack=SYNC), "storage"),
        (rank(1, "final", stack=SYNC), "storage"),
        (rank(1, "forward", state="D"), "storage"),
        (rank(1, "forward", stack=CUDA), "device"),
        (rank(1, "forward"), "stuck"),
        (rank(1, "forward", stack=CUDA, gpu_error=XID), "gpu"),
        (rank(1, "forward", state="", exit=-6, gpu_error=XID), "gpu"),
        (rank(1, "forward", cores=0.9, gpu_error=XID), "gpu"),
        (rank(1, "data", gpu_error=XID), "data"),
        (rank(1, "forward", cores=0.9), "busy"),
        (rank(1, "backward", state="T"), "stopped"),
        (rank(1, "backward", state="", exit=None), "killed"),
        (rank(1, "backward", state="", exit=-9), "killed"),
        (rank(1, "backward", state="", exit=-9, oom=True), "memory"),
        (rank(1, "backward", state="", exit=-11, oom=True), "killed"),
        (rank(1, "backward", state="", exit=7, unsaid=True), "left"),
        (rank(1, "backward", state="", exit=0, unsaid=True), "left"),
        (rank(1, "done", 7, exit=0), "ended"),
        (waits(1, "checkpoint", 7, "gloo:barrier"), "collectives"),
        (waits(1, "counts", what="Long 6"), "collectives"),
        (waits(1, "forward", at=36), "collectives"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.beat.phase,
)
def test_one_rank_keeps_three_waiting_and_is_named_with_the_cause(culprit: RankState, cause: str) -> None:
    found = named([waits(0, "counts"), culprit, waits(2, "counts"), waits(3, "counts")])
    assert (found.cause, found.ranks) == (cause, (1,))
    assert "rank 1 on n0" in found.what
    assert found.others[0] == (
        "ranks 0, 2 and 3 on n0 wait in gloo:all_reduce number 37 (Float 4), in exchanging the counts of step 8"
    )
    assert found.others[1:] == ((f"the kernel of n0 says: {XID}",) if cause == "gpu" else ())
    assert found.lines[-1] == f"  → {CAUSES[cause][1]}"  # type: ignore[index]


def test_an_operation_that_the_others_have_passed_was_lost_on_its_way() -> None:
    lost = Collective("gloo:all_reduce", 36, "0", "Float 4")
    states = [replace(waits(0, "counts"), passed=(lost,)), waits(1, "forward", at=36)]
    found = named(states)
    assert (found.cause, found.ranks) == ("network", ())
    assert found.what.startswith(
        "rank 1 on n0 (process 1001) waits in gloo:all_reduce number 36 (Float 4), which the others "
    )
    states[0] = replace(states[0], passed=(replace(lost, name="gloo:broadcast"),))
    assert named(states).cause == "collectives"


def test_of_two_ranks_that_wait_in_different_operations_the_one_that_is_less_far_is_named() -> None:
    states = [waits(0, "counts"), waits(1, "step end", 7, "gloo:all_gather")]
    for found in (named(states), named(states[::-1])):
        assert (found.cause, found.ranks) == ("collectives", (1,))


def test_where_all_wait_in_the_same_operation_nobody_is_named_but_what_lies_between() -> None:
    found = named([waits(one, "backward") for one in range(4)])
    assert (found.cause, found.ranks) == ("network", ())
    assert found.what == (
        "ranks 0 to 3 on n0 wait in gloo:all_reduce number 37 (Float 4), in the backward pass of step 8, and none is behind"
    )


def test_an_xid_is_told_where_all_wait_and_the_link_stays_the_likely_cause() -> None:
    states = [waits(one, "backward") for one in range(8)]
    found = named([*states[:4], *(replace(one, gpu_error=XID) for one in states[4:])])
    assert (found.cause, found.others) == ("network", (f"the kernel of n1 says: {XID}",))


def test_the_least_far_is_named_where_no_rank_can_tell_of_collectives() -> None:
    states = [replace(rank(one, "backward", micro=1), told=False) for one in range(4)]
    states[2] = replace(rank(2, "forward", micro=1), told=False)
    assert named(states).ranks == (2,)


def test_a_main_process_that_writes_the_results_alone_keeps_nobody_waiting() -> None:
    found = named([rank(0, "final"), rank(1, "done", exit=0)])
    assert (found.cause, found.ranks) == ("storage", (0,))


def test_a_rank_that_is_through_and_gone_has_not_died() -> None:
    through = rank(1, "done", state="")  # as packtrain doctor sees it, which knows no exit codes
    assert not through.dead and rank(1, "done", state="", exit=-6).dead
    found = named([rank(0, "final", stack=SYNC), through])
    assert (found.cause, found.ranks) == ("storage", (0,))


def test_of_ranks_that_died_those_are_named_that_did_not_abort_and_else_the_first() -> None:
    def gone(number: int, exit: int | None, died: float | None = None) -> RankState:
        return rank(number, "forward", state="", exit=exit, died=died)

    found = named([gone(0, -6, 7.0), gone(1, None), gone(2, -6, 6.5), waits(3, "counts")])
    assert found.ranks == (1,) and found.others[-1] == "ranks 0 and 2 on n0 aborted after it (SIGABRT)"
    assert named([gone(0, -6, 7.0), gone(1, -11, 7.5), gone(2, -9)]).ranks == (1, 2)
    assert named([gone(0, -6, 7.0), gone(1, -6, 6.5), waits(2, "counts")]).ranks == (1,)
    assert named([gone(0, -6), gone(1, -6), waits(2, "counts")]).ranks == (0, 1)


def test_all_ranks_at_a_stalled_disk_are_named_together() -> None:
    found = named([rank(one, "data") for one in range(8)])
    assert (found.cause, found.ranks) == ("data", tuple(range(8)))
    assert found.what.startswith("ranks 0 to 7 on n0 and n1 are behind: for 45 s in loading data of step 8")


def test_a_run_at_its_end_has_no_diagnosis() -> None:
    assert diagnose([rank(one, "done", exit=0) for one in range(3)]) is None


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
    way = [Beat(1, 1, phase, 0, 0, 0.0) for phase in PHASES[: PHASES.index("data")]]
    for step in (1, 2):
        way += [Beat(1, 1, "data", step, 0, 0.0), Beat(1, 1, "counts", step, 0, 0.0)]
        way += [Beat(1, 1, phase, step, micro, 0.0) for micro in (1, 2, 3) for phase in ("forward", "backward")]
        way += [Beat(1, 1, phase, step, 0, 0.0) for phase in ("optimizer", "step end", "checkpoint", "eval")]
    way += [Beat(1, 1, "final", 2, 0, 0.0), Beat(1, 1, "done", 2, 0, 0.0)]
    assert [beat.progress for beat in way] == sorted({beat.progress for beat in way})


PHASES_BEFORE_AND_AFTER = ("start", "join", "prepare", "load", "proof", "final")


@pytest.mark.parametrize("usual", [0.0, 1, 100])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "done"])
def test_a_rank_that_does_nothing_at_all_is_named_within_a_minute_in_every_phase(phase: Phase, usual: float) -> None:
    culprit = rank(0, phase, usual=usual, stack=(Frame("/x/socket.py", 5, "recv"),))
    found = named([culprit, waits(1, "final")])
    assert found.ranks == (0,)
    assert patience_s(found, [culprit], USUAL) == limit_s(culprit, USUAL) == LEAST_S == 45


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "done"])
def test_one_that_works_has_its_time_and_for_ever_where_nobody_waits_in_a_collective(phase: Phase) -> None:
    culprits = [rank(0, phase, usual=1, cores=0.06), rank(1, phase, usual=1)]
    found = named([*culprits, waits(2, "final")])
    assert (found.cause, found.ranks) == ("writing" if phase in ("checkpoint", "final") else "busy", (0, 1))
    most = math.inf if phase in PHASES_BEFORE_AND_AFTER else 1620 if phase == "checkpoint" else 540
    assert patience_s(found, culprits, USUAL) == most
    assert f"→ {CAUSES[found.cause][1]}" in found.lines[-1]
    assert ("topology.checkpoint_timeout" in found.lines[-1]) == (phase in ("checkpoint", "final"))


ITSELF = {
    "its storage takes in what it has written": {"moves": True},
    "the gpu may be at work": {"stack": CUDA},
    "autograd's threads may": {"stack": (Frame("/x/torch/autograd/graph.py", 1, "_engine_run_backward"),)},
}
FOR_OTHERS = {
    "a file lock": {"stack": (Frame("/x/site-packages/filelock/_api.py", 1, "acquire"),)},
    "the extension that another rank compiles": {"stack": (Frame("/x/torch/utils/file_baton.py", 1, "wait"),)},
    "the others": {"stack": (Frame("/x/torch/distributed/distributed_c10d.py", 1, "new_group"),)},
    "the others, at the store": {"stack": (Frame("/x/packtrain/train/sync/store.py", 1, "_wait_for"),)},
    "the first sum": {
        "stack": (
            *[Frame("/x/threading.py", 1, "join")] * 2,
            Frame("/x/packtrain/train/sync/checks.py", 1, "f"),
        )
    },
}


@pytest.mark.parametrize("known", [*ITSELF.values(), *FOR_OTHERS.values()], ids=[*ITSELF, *FOR_OTHERS])
@pytest.mark.parametrize(
    ("phase", "usual", "limit"),
    [
        ("prepare", 0.0, 540),
        ("load", 0.0, 540),
        ("forward", 0.0, 540),  # the first step: compiling takes what it takes
        ("forward", 0.1, LEAST_S),
        ("forward", 10, 100),
        ("forward", 100, 540),
        ("eval", 1, 540),
    ],
)
def test_one_that_waits_for_what_may_be_at_work_has_more_time(
    known: dict, phase: Phase, usual: float, limit: float
) -> None:
    assert limit_s(rank(0, phase, usual=usual, **known), USUAL) == limit


@pytest.mark.parametrize("phase", ["checkpoint", "final"])
def test_one_that_may_be_writing_has_the_checkpoints_time_and_who_waits_for_the_others_has_not(phase: Phase) -> None:
    assert [limit_s(rank(0, phase, **known), USUAL) for known in ITSELF.values()] == [1620] * len(ITSELF)
    assert limit_s(waits(0, phase), USUAL) == 540
    assert limit_s(rank(0, phase, **FOR_OTHERS["the others"]), USUAL) == 540


def test_a_write_that_torch_distributes_is_a_write() -> None:
    stack = (Frame("/x/torch/distributed/checkpoint/filesystem.py", 9, "write_data"),)
    assert limit_s(rank(0, "checkpoint", stack=stack), USUAL) == LEAST_S


def test_short_time_limits_of_collectives_shorten_everything() -> None:
    limits = [TimeLimits(20), TimeLimits(10)]
    assert [limit_s(rank(0, phase), one) for phase in ("load", "forward") for one in limits] == [15, 5] * 2
    assert [limit_s(rank(0, "checkpoint", **known), TimeLimits(600, 20)) for known in ({}, {"moves": True})] == [15, 15]


def test_a_longer_time_limit_of_collectives_gives_a_rank_that_does_nothing_more_time() -> None:
    limits = [TimeLimits(one) for one in (100, 600, 1200, 6000)]
    assert [limit_s(rank(0, "step end"), one) for one in limits] == [45, 45, 90, 450]
    assert [limit_s(rank(0, "checkpoint"), one) for one in limits] == [45] * 4


@pytest.mark.parametrize("phase", ["checkpoint", "final"])
def test_a_longer_time_limit_of_checkpoints_gives_storage_that_takes_nothing_more_time(phase: Phase) -> None:
    limits = [TimeLimits(600, one) for one in (100, 1800, 3600, 18000)]
    assert [limit_s(rank(0, phase), one) for one in limits] == [45, 45, 90, 450]
    assert [limit_s(rank(0, "forward"), one) for one in limits] == [45] * 4


LOCKED = (*[Frame("/x/filelock/_api.py", 5, "acquire")] * 2, Frame("/x/packtrain/data/other.py", 1, "f"))
FOR_DATA = (LOCKED[0], Frame("/x/packtrain/data/tokens/cache.py", 1, "_only_one"))


def test_who_waits_for_a_lock_is_named_only_where_nobody_else_is_behind() -> None:
    waiting = [rank(one, "prepare", stack=LOCKED) for one in (0, 1)]
    found = named([*waiting, rank(2, "prepare")])
    assert (found.cause, found.ranks) == ("data", (2,))
    found = named([*waiting, waits(2, "load")])
    assert (found.cause, found.ranks) == ("lock", (0, 1))
    assert patience_s(found, waiting, USUAL) == 540
    held_elsewhere = [rank(0, "prepare", stack=FOR_DATA)]  # by a run that tokenises: the cache says for whom it waits
    assert patience_s(named(held_elsewhere), held_elsewhere, USUAL) == math.inf


def test_an_error_of_a_gpu_makes_no_work_of_what_is_computed_after_it() -> None:
    broken = rank(0, "forward", cores=0.9, gpu_error=XID)
    assert patience_s(named([broken, waits(1, "counts")]), [broken], USUAL) == LEAST_S


def test_docs_hangs_md_has_every_cause_in_the_words_that_are_printed() -> None:
    page = (Path(__file__).parents[3] / "docs/hangs.md").read_text()
    for why, fix in CAUSES.values():
        assert f"| {why} | {fix} |" in page


def test_states_travel_as_json() -> None:
    state = rank(1, "data", stack=LOADER, loaders=(SYNC, CUDA))
    for one in (state, waits(2, "backward"), RankState(3, "n0")):
        assert RankState.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    dump = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in helper\n\n'
        'Current thread 0x2 (most recent call first):\n  File "b c.py", line 7 in <module>\n  File "<frozen x>", line ??? in y\n'
    )
    assert main_stack(dump) == (Frame("b c.py", 7, "<module>"), Frame("<frozen x>", 0, "y"))


def test_pending_and_passed_are_told_apart_by_torchs_flight_record() -> None:
    def entry(number: int, *, retired: bool = False, p2p: bool = False, group: int = 0) -> dict:
        sizes = {"input_dtypes": ["Float", "Long"], "input_sizes": [[4, 8], []]}
        name = {"profiling_name": "nccl:all_gather", "pg_id": group, "collective_seq_id": number}
        return {**name, **sizes, "is_p2p": p2p, "retired": retired}

    entries = [entry(6, retired=True), entry(7), entry(8), entry(9, p2p=True), entry(3, group=1)]
    status = {"0": {"last_completed_collective": "7"}, "1": {"last_completed_collective": "-1"}}
    found = [Collective(**one) for one in pending_of({"entries": entries, "pg_status": status})]
    assert [(one.group, one.number) for one in found] == [("0", 8), ("1", 3)]
    assert str(found[0]) == "nccl:all_gather number 8 (Float 4x8, Long 1)"
    passed = [Collective(**one) for one in passed_of({"entries": entries, "pg_status": status})]
    assert [(one.group, one.number) for one in passed] == [("0", 7), ("0", 6)]
    assert pending_of({}) == passed_of({}) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2, 3, 4, 5, 7], "ranks 0 to 5 and 7"),
        ([0, 2, 4], "ranks 0, 2 and 4"),
        (range(64), "ranks 0 to 63"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words
