"""Which kernel a run takes by its times."""

from __future__ import annotations

import time
from inspect import signature

import numpy as np
import pytest
import torch

from packtrain.attention.kernels.selection import LayerFeatures
from packtrain.attention.kernels.timing import agreed_times, best_times, fastest, kernel_times
from packtrain.attention.kernels.varlen import Kernel, _by_signature
from packtrain.train.preflight import row_like
from tests.stand_in_kernels import KERNELS


@pytest.mark.parametrize(
    "times, taken",
    [
        ({"FA4": 1.0}, "FA4"),
        ({"FA4": 1.0, "FA3": 0.96, "FA2": 2.0}, "FA4"),  # within the margin the order decides
        ({"FA4": 1.0, "FA3": 0.94, "FA2": 2.0}, "FA3"),
        ({"FA4": 1.0, "FA3": 0.94, "FA2": 0.5}, "FA2"),
    ],
)
def test_the_preferred_kernel_is_taken_unless_another_is_clearly_faster(times: dict[str, float], taken: str) -> None:
    assert fastest(times) == taken


def test_ranks_decide_by_the_times_of_rank_0_among_what_all_have() -> None:
    of_ranks = [{"FA4": 3.0, "FA3": 2.0, "FA2": 1.0}, {"FA3": 1.0, "FA2": 5.0}]
    assert agreed_times(of_ranks) == {"FA3": 2.0, "FA2": 1.0}
    assert agreed_times([{"FA4": 1.0, "FA3": 2.0}, {}]) == {}


def test_calls_take_turns_and_the_best_counts_within_a_limit() -> None:
    said: list[str] = []
    pauses = {"slow": iter([0.0, 0.03, 0.02, 0.03]), "fast": iter([0.05, 0.002, 0.004, 0.004])}  # the first warms up

    def call(name: str) -> None:
        said.append(name)
        time.sleep(next(pauses[name]))

    calls = {name: lambda name=name: call(name) for name in pauses}
    times = best_times(calls, lambda: None, turns=3)
    assert said == ["slow", "fast"] * 4 and times["slow"] >= 0.02 > times["fast"] >= 0.002
    began = time.perf_counter()
    best_times({"slow": lambda: time.sleep(0.02)}, lambda: None, turns=1000, limit_s=0.1)
    assert time.perf_counter() - began < 1


def test_a_kernel_is_timed_forward_and_backward_at_the_shapes_that_it_is_given() -> None:
    seen: list[tuple[int, ...]] = []

    def kernel(q, k, v, **options):
        seen.append((*q.shape, k.shape[1], options["max_seqlen_q"]))
        q.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
        return KERNELS["FlashAttention 3"](q, k, v, **options)

    kernel.__signature__ = signature(KERNELS["FlashAttention 3"])  # type: ignore[attr-defined]
    layer = LayerFeatures(torch.bfloat16, 3, 16, 16)
    kernels = [Kernel(name, _by_signature(kernel)) for name in ("a", "b")]
    times = kernel_times(kernels, layer, 2, [30, 5, 61], torch.device("cpu"))
    assert list(times) == ["a", "b"] and min(times.values()) > 0
    assert set(seen) == {(96, 6, 16, 2, 61), (96, 6, 16)}


def test_a_row_like_those_of_the_run_has_documents_from_all_of_the_data() -> None:
    lengths = np.arange(1, 1001)
    row = row_like(lengths, None, 4096)
    assert 3000 < sum(row) <= 4096 and row[0] == 1 and len(row) >= 7
    assert row_like(lengths, 8, None) == [1, 143, 286, 429, 571, 714, 857, 1000]
    assert row_like(np.array([7, 9]), None, 4096) == [7, 9] and row_like(np.array([90]), None, 64) == [90]


def test_a_kernel_that_fails_at_the_shapes_of_the_run_is_not_taken() -> None:
    def refusing(*_: object) -> torch.Tensor:
        raise ValueError("no configuration for 96 tokens")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        return q + k + v

    kernels = [Kernel("refuses", refusing), Kernel("works", attend)]
    layer = LayerFeatures(torch.float32, 1, 16, 16)
    assert list(kernel_times(kernels, layer, 2, [30, 66], torch.device("cpu"))) == ["works"]
    assert kernel_times(kernels[:1], layer, 2, [30, 66], torch.device("cpu")) == {}
