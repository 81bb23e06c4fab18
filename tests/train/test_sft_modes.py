"""Switching the packing mode, the number of processes or the micro-batch never changes the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Run, base_config, train

LAYOUTS = {
    "padding": ["packing.mode=padding", "batch.examples_per_device=2"],
    "padding, one micro-batch": ["packing.mode=padding", "batch.examples_per_device=8", "batch.tokens_per_device=null"],
    "padding_free": ["packing.mode=padding_free", "batch.examples_per_device=3"],
    "packed": ["packing.mode=packed"],
    "packed in order, long rows": [
        "packing.mode=packed",
        "packing.strategy=in_order",
        "batch.tokens_per_device=2048",
    ],
}
CASES = [
    pytest.param(processes, layout, id=f"{layout}, {processes} processes")
    for processes in (1, 2, 3)
    for layout in LAYOUTS
    if (processes, layout) != (1, "padding")
    and not (processes > 1 and "," in layout)
    and not (processes == 2 and layout != "packed")
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Padding on one process."""
    folder = tmp_path_factory.mktemp("modes")
    return folder, train(folder, base_config(folder), *LAYOUTS["padding"], name="reference")


def largest_difference(a: dict, b: dict) -> float:
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in b)


@pytest.mark.parametrize(("processes", "layout"), CASES)
def test_same_losses_and_weights_in_every_mode_on_every_number_of_processes(
    reference: tuple[Path, Run], processes: int, layout: str
) -> None:
    folder, expected = reference
    name = f"{layout}-{processes}".replace(" ", "")
    run = train(folder, base_config(folder), *LAYOUTS[layout], name=name, processes=processes)
    assert len(run.losses) == 10
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [s["grad_norm"] for s in run.steps] == pytest.approx([s["grad_norm"] for s in expected.steps], rel=1e-4)
    assert [s["tokens"] for s in run.steps] == [s["tokens"] for s in expected.steps]
    assert [s["examples"] for s in run.steps] == [7, 7, 7, 1, 7, 7, 7, 1, 7, 7]
    assert largest_difference(run.weights(), expected.weights()) < 1e-4
    if processes == 1:  # what each mode wastes is logged
        wasted = [step["padding_fraction"] for step in run.steps]
        assert sum(wasted) / len(wasted) > 0.01 if layout.startswith("padding,") else max(wasted) == 0


def test_tokens_per_step_trains_the_same_documents_in_every_mode(tmp_path: Path) -> None:
    config = base_config(tmp_path, batch={"examples_per_step": None, "tokens_per_step": 1024}, trainer={"max_steps": 6})
    expected = train(tmp_path, config, "packing.mode=padding", "batch.examples_per_device=2", name="padding")
    for mode, processes in (("packed", 2), ("padding_free", 1)):
        run = train(tmp_path, config, f"packing.mode={mode}", name=f"{mode}-{processes}", processes=processes)
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert largest_difference(run.weights(), expected.weights()) < 1e-4
