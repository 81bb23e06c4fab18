"""Costs of a micro-batch may not grow: launches, bytes moved and bytes kept, on models of real widths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.standin import counted


@pytest.fixture(scope="module")
def now(gpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, counted.Costs]:
    folder = tmp_path_factory.mktemp("counted")
    file = folder / "costs.json"
    gpus.call(counted.count_all, env={"COUNTED": str(file), "COUNTED_IN": str(folder), "COUNTED_FAULTS": "1"})
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def ceilings() -> dict[str, counted.Costs]:
    costs = json.loads(counted.COSTS.read_text())
    if (others := costs.pop("made by")) != counted.versions():
        pytest.skip(f"the ceilings were counted with {others}, here are {counted.versions()}: {counted.RENEW}")
    return costs


@pytest.mark.parametrize("shape", counted.SHAPES)
def test_a_micro_batch_costs_no_more_than_before(shape: str, now, ceilings) -> None:
    grown = counted.growth(now[shape], ceilings[shape])
    assert not grown, f"{shape} costs more. If that is meant: {counted.RENEW}\n" + "\n".join(grown)


def test_copies_before_attention_and_casts_of_adapters_are_seen_and_named(now, ceilings) -> None:
    grown = counted.growth(now["faults"], ceilings["LoRA 8B"])
    assert any(line.startswith("layer forward: bytes") for line in grown) and any(
        "bytes kept" in line for line in grown
    )
    assert {"constant_pad_nd", "_to_copy"} <= {line.strip().partition(":")[0] for line in grown}


def test_it_counts_what_real_widths_take(now) -> None:
    """Seven linear layers are a product each, and two in the backward pass. At least their inputs are kept."""
    launches = now["sft 1.5B"]["launches"]
    products = {"forward": 0.0, "backward": 0.0}
    for phase in products:
        products[phase] = sum(launches.get(f"layer {phase}: {name}", 0) for name in ("mm", "addmm", "addmm_"))
    assert products == {"forward": 7, "backward": 14}
    assert now["sft 1.5B"]["figures"]["layer: bytes kept"] > 2 * (3 * 1536 + 2 * 8960)


needs_liger = pytest.mark.skipif(not find_spec("liger_kernel"), reason="no liger-kernel: pip install -e '.[liger]'")


def by_liger(*asked: str) -> list[list[list[float]]]:
    command = [sys.executable, "tests/standin/gpus.py", "1", sys.executable, "-m", "tests.standin.counted_liger"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f".:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run([*command, *asked], env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[[")]


@pytest.mark.exhaustive
@needs_liger
@pytest.mark.parametrize(("shape", "width"), [("sft 0.6B", 1024), ("sft 1.5B", 1536), ("LoRA 8B", 4096)])
def test_sums_in_ligers_norms_save_a_launch_each_way_and_six_bytes_a_number(shape: str, width: int) -> None:
    ((apart, within),) = by_liger(shape)
    assert [one - other for one, other in zip(apart, within, strict=True)] == pytest.approx(
        [2 * width, 1, 4 * width, 1]
    )


@pytest.mark.exhaustive
@needs_liger
def test_fused_experts_move_and_keep_less_than_grouped_ones() -> None:
    """docs/speed.md has these figures: bytes beside products, launches, bytes of the products, bytes kept."""
    (grouped, fused), (products, kept) = by_liger("experts 30B", "fused")
    for own, most in ((grouped, (1_231_700, 103)), (fused, (374_700, 80))):
        assert own[0] + own[2] <= most[0] and own[1] + own[3] <= most[1]
    assert products[1] <= 475_400 < products[0] and kept[1] <= 69_700 < kept[0]
