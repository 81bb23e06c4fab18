"""model.experts: grouped products train as the loop over experts does, in the format of the run; what a model cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import preferences
from here import run_here
from matrix import SPARSE
from running import LLAMA, base_config, write_jsonl
from test_routers import EXPERTS
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe

from packtrain.attention.backends import attending_by
from packtrain.changes.experts import group_experts
from packtrain.config.compose import load_config
from packtrain.errors import CheckFailed, UserError
from packtrain.model.layers import can_group, loop_over_experts
from packtrain.packing.segments import Segments

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]
MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("olmoe", "qwen2_moe", "granitemoe", "phimoe")]


def loss_and_gradients(model: Any, segments: Segments, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, Any]:
    """Of some labels for all tokens of a row, in autocast's `dtype`."""
    ids = torch.arange(segments.tokens)[None] * 7 % 94 + 3
    model.zero_grad()
    row = {"position_ids": segments.position_ids(), "segments": segments, "use_cache": False}
    with attending_by(model, "segmented"), torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(input_ids=ids, **row).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0] * 5 % 97, reduction="sum")
        loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("lengths", [(17, 1, 33, 8), (1,)], ids=["a row", "one token, most experts without any"])
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_losses_and_gradients_are_those_of_the_loop(family: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(
        family, **{**EXPERTS, "num_local_experts": 8, "num_experts": 8}
    )  # phimoe draws noise in training mode
    assert can_group(model)
    loop_over_experts(model, "auto")
    loss, gradients = loss_and_gradients(model, Segments(lengths))
    undo = group_experts(model)
    ours, our_gradients = loss_and_gradients(model, Segments(lengths))
    assert abs(ours - loss) <= 1e-5 * abs(loss)
    whole = torch.stack([gradient.norm() for gradient in gradients.values() if gradient is not None]).norm()
    for name, gradient in our_gradients.items():
        expected = torch.zeros_like(gradient) if gradients[name] is None else gradients[name]
        assert (gradient - expected).norm() <= 1e-5 * max(expected.norm(), 1e-2 * whole), name
    undo()
    assert loss_and_gradients(model, Segments(lengths))[0].equal(loss)


class Grouped(TorchDispatchMode):
    """The formats in which grouped products multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.formats = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::_grouped_mm"):
            self.formats |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_over_float32_weights_products_are_in_the_format_of_autocast(family: str) -> None:
    """transformers' own stay in float32, whose products GPUs make one by one."""
    model, segments = tiny_model(family, **EXPERTS).train(), Segments((17, 33))
    group_experts(model)
    exact, _ = loss_and_gradients(model, segments)
    with Grouped() as seen:
        loss, gradients = loss_and_gradients(model, segments, torch.bfloat16)
    assert seen.formats == {torch.bfloat16} and abs(loss - exact) <= 0.05 * abs(exact)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_a_run_proves_them_and_trains_as_by_the_loop(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 4})
    config["model"]["config"] = SPARSE
    loop = run_here(tmp_path, config, "model.experts=loop", name="loop")
    grouped = run_here(tmp_path, config, name="grouped")
    assert "experts" not in loop.summary["changes"]
    assert grouped.summary["changes"]["experts"].startswith("all of a layer in one grouped product (loss off by ")
    assert grouped.losses == pytest.approx(loop.losses, rel=1e-5)
    norms = [[line["grad_norm"] for line in run.steps] for run in (loop, grouped)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_preferences_begin_with_a_zero_margin_as_the_reference_groups_its_experts_too(tmp_path: Path) -> None:
    config = base_config(tmp_path, objective={"kind": "dpo"}, trainer={"max_steps": 1}, data={"max_length": 92})
    config["data"]["train"] = str(write_jsonl(tmp_path / "pairs.jsonl", preferences(8, seed=0)))
    config["model"]["config"] = {**SPARSE, "output_router_logits": False}
    run = run_here(tmp_path, config)
    assert run.losses[0] == pytest.approx(0.6931472, abs=1e-6) and "loss off by" in run.summary["changes"]["experts"]


def test_products_that_are_not_exact_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = moe._grouped_linear
    monkeypatch.setattr(moe, "_grouped_linear", lambda *given, **named: own(*given, **named) * 0.9)
    config = base_config(tmp_path, trainer={"max_steps": 1})
    config["model"]["config"] = SPARSE
    loop = run_here(tmp_path, config, "model.experts=loop", name="loop")
    run = run_here(tmp_path, config, name="auto")
    assert run.losses == loop.losses and "the loss of the first rows is off" in run.summary["changes"]["experts"]
    with pytest.raises(CheckFailed, match="would not train as the model itself does"):
        run_here(tmp_path, config, "model.experts=grouped", name="asked")


@pytest.mark.parametrize("asked", ["grouped", "loop"])
@pytest.mark.parametrize(
    ("shape", "said"),
    [(LLAMA, "it has no experts"), ({**LLAMA, "model_type": "jetmoe", "kv_channels": 12}, "code of its own")],
)
def test_a_model_without_such_experts_is_refused_by_name(tmp_path: Path, shape: Any, said: str, asked: str) -> None:
    config = base_config(tmp_path)
    config["model"]["config"] = shape
    with pytest.raises(UserError, match=said) as refused:
        run_here(tmp_path, config, f"model.experts={asked}")
    assert refused.value.problems[0].where == f"model.experts ({asked})"


def test_a_loop_over_parts_of_rows_is_refused() -> None:
    given = ["model.path=owner/model", "data.train=x", "batch.examples_per_step=4", "model.experts=loop"]
    with pytest.raises(UserError, match="a part of a row may be empty"):
        load_config(None, [*given, "strategy.sequence_parallel=2", "batch.tokens_per_device=2048"])
