"""Faster ways for the loaded model to compute, each proved before step 1.

Changes are made before the objective's proofs and before the reference's log-probabilities are precomputed, so both use the model
that trains. A resumed run proves again, with the first documents of the data and the weights that the run began with. On a machine
with the same packages it makes the same changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from packtrain.config.schema import Model
from packtrain.errors import CheckFailed, UserError
from packtrain.model.compiled import is_compiled
from packtrain.model.float8 import KEY as FP8_KEY
from packtrain.model.float8 import TOLERANCE as FP8_TOLERANCE
from packtrain.model.float8 import multiply_in_float8
from packtrain.model.kernels import fuse_by_liger, why_no_liger
from packtrain.model.layers.experts import KEY as EXPERTS_KEY
from packtrain.model.layers.experts import can_group, group_experts
from packtrain.model.layers.tiled_mlp import mlps_of, tile_mlps
from packtrain.model.load import base_model
from packtrain.model.precision import carry_in
from packtrain.model.recomputation import recompute_in_eval
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.proof.change import Change, ChangeProof, prove_change
from packtrain.proof.comparison import Tolerance, evaluating, has_routers, tolerance_of
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.wording import counted

_TOKENS = 2048
"""Tokens in all of the documents that prove a change, unless each document is longer."""
_NO_GRADIENTS = "computes no gradients before step 1, by which it would be proved"


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A change, and the function that makes it.

    `name` stands in the log; `what` says what the model computes after it; `lacks` says why it cannot be made ("": it can). `key`: the
    config key that asked for it by name, which makes a failed proof an error; None if auto tries it. `tolerance`: None for the rounding of
    the compute dtype. `unproved`: why it is made without this proof; "" if it is proved."""

    name: str
    what: str
    make: Change
    lacks: str = ""
    key: str | None = None
    tolerance: Tolerance | None = None
    unproved: str = ""


def changes_of(
    model: Model, trainer: StepTrainer, *, fp8: bool = False, mlp_tokens: int | None = None
) -> list[ModelChange]:
    """List the changes to try. On a CPU these are only experts and changes that are asked for by name."""
    on_gpu, dtype = trainer.loss.device.type == "cuda", trainer.settings.autocast
    changes = list[ModelChange]()
    if model.experts != "loop" and can_group(base_model(trainer.model)):
        asked = EXPERTS_KEY if model.experts == "grouped" else None
        what, make = "all of a layer in one grouped product", _on_all(trainer, group_experts)
        # transformers groups experts without a proof too
        gathers = trainer.engine.spec.gathers_by_engine
        unproved = f"{trainer.settings.strategy} {_NO_GRADIENTS}" if gathers else ""
        changes.append(ModelChange("experts", what, make, key=asked, unproved=unproved))
    embeddings: Any = base_model(trainer.model).get_input_embeddings()
    # under FSDP2 weights are already gathered in that format
    if on_gpu and dtype is not None and not trainer.settings.sharded and embeddings.weight.dtype == torch.float32:
        what, rounding = f"stream in {str(dtype).removeprefix('torch.')}", tolerance_of(dtype)
        # the stream rounds more numbers, so its tolerance is twice as wide
        wider = Tolerance(2 * rounding.outputs, 2 * rounding.loss, 2 * rounding.gradients)
        make = _on_all(trainer, lambda model: carry_in(model, dtype))
        changes.append(ModelChange("residual", what, make, tolerance=wider))
    if model.kernels == "liger" or (model.kernels == "auto" and on_gpu):
        lacks = why_no_liger(trainer.model, trainer.loss.device)
        if not lacks and is_compiled(base_model(trainer.model)):
            lacks = "trainer.torch_compile fuses them already"
        what, key = "norms, rotation and activations by Liger's kernels", "model.kernels"
        asked = key if model.kernels == "liger" else None
        changes.append(ModelChange("kernels", what, _on_all(trainer, fuse_by_liger), lacks, asked))
    if fp8:
        what, make = "products of layers in 8 bits (torchao, rowwise)", _on_all(trainer, multiply_in_float8)
        changes.append(ModelChange("fp8", what, make, key=FP8_KEY, tolerance=FP8_TOLERANCE))
    # the last change, since Liger's replaces the MLPs' code. Unproved: without tiles the first documents may exceed the device
    if mlp_tokens:
        what = f"{counted(len(mlps_of(base_model(trainer.model))), 'MLPs')} on tiles of {mlp_tokens:,} tokens"
        make = _on_all(trainer, lambda model: tile_mlps(model, mlp_tokens))
        changes.append(ModelChange("tiles", what, make, unproved="compared when the model was loaded"))
    return changes


def _on_all(trainer: StepTrainer, change: Callable[[Any], Callable[[], object]]) -> Change:
    """Make the change in the reference too. Otherwise the reference rounds differently, and first margins are not zero."""
    models = [trainer.model, *filter(None, [getattr(trainer.loss, "reference", None)])]

    def make() -> Callable[[], object]:
        with ExitStack() as undo:
            for one in models:
                undo.callback(change(trainer.accelerator.unwrap_model(one)))
            return undo.pop_all().close

    return make


def make_changes(trainer: StepTrainer, ranks: Ranks, candidates: Iterable[ModelChange], log: Log) -> None:
    """Make the `candidates` that prove exact, one on top of another, and log them.

    All ranks call it together. Raises UserError if a change asked for by name is not available, CheckFailed if it is not exact.
    """
    for candidate in candidates:
        lacks, proof = candidate.lacks, None
        if not lacks and ranks.spec.gathers_by_engine and not candidate.unproved:
            lacks = f"{ranks.strategy} {_NO_GRADIENTS}"
        if lacks and candidate.key:
            what, fix = f"{candidate.what}: not available, {lacks}", "set it to auto"
            raise UserError(what, where=candidate.key, fix=fix)
        if candidate.unproved:
            candidate.make()
        elif not lacks:
            proof = prove(trainer, candidate)
            lacks = proof.refusal
        if proof and lacks and candidate.key:
            what, fix = f"{candidate.what} would not train as the model itself does: {lacks}", "set it to auto"
            raise CheckFailed(what, where=candidate.key, fix=fix)
        said = f"as the model comes; {candidate.what}: {lacks}" if lacks else candidate.what
        figures = "" if lacks else f" ({proof.figures() if proof else candidate.unproved})"
        trainer.changes[candidate.name] = said + figures
        if not lacks:
            trainer.loss.changes.append(candidate.name)
        log.fact(candidate.name, trainer.changes[candidate.name])


def prove(trainer: StepTrainer, candidate: ModelChange) -> ChangeProof:
    """Make the change if it is exact on the first documents. The proof runs in eval mode, where nothing is random."""
    loss, model, autocast = trainer.loss, trainer.model, trainer.settings.autocast
    batch = first_documents(trainer.steps)

    def loss_of_rows() -> torch.Tensor:
        with evaluating(base_model(model), autocast), loss.keeping_metrics():
            recompute_in_eval(base_model(model))
            return loss.of_rows(batch)

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        with waiting("the proofs of all ranks"):
            return cast(torch.Tensor, trainer.accelerator.reduce(values, reduction="sum"))

    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tolerance = candidate.tolerance or tolerance_of(loss.compute_dtype, routed=has_routers(base_model(model)))
    return prove_change(candidate.make, loss_of_rows, weights, tolerance, sum_over_ranks)


def first_documents(steps: Steps) -> MicroBatch:
    """Collate documents of the first micro-batch that fit into _TOKENS tokens, in order.
    If none fits, take the shortest; a text is cut to its last _TOKENS tokens that end with a trained one."""
    numbers, room, some = steps.first_examples(0), _TOKENS, list[int]()
    for number, slots in zip(numbers.tolist(), steps.schedule.lengths[numbers].tolist(), strict=True):
        if slots <= room:
            some.append(number)
            room -= slots
    shortest = int(numbers[steps.schedule.lengths[numbers].argmin()])
    if some or type(steps) is not Steps:
        return steps.collate(np.array(some or [shortest]))
    whole: Any = steps.data[shortest]
    end = int(np.flatnonzero(whole.loss_mask)[-1]) + 1
    part = slice(max(0, end - _TOKENS), end)
    cut = replace(whole, input_ids=whole.input_ids[part], loss_mask=whole.loss_mask[part])
    return replace(steps, data=cast(Any, [cut]), layout="padding" if steps.layout == "padding" else "flat").collate([0])
