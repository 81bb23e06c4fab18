"""What is proved on the loaded model before step 1 and at it: the attention of packed rows, the output head, the first loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from packtrain.attention.backends import PER_DOCUMENT, attention_of
from packtrain.attention.rotary import rotates_by_length
from packtrain.attention.segmented_modules import uses_attention_interface
from packtrain.config.schema import SHARDED_WEIGHTS
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.model.forward import Head, choose_head
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, most_of_all
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded, on_device
from packtrain.plan.accelerate import STAGES
from packtrain.proof.choice import Decision, decide
from packtrain.proof.isolation import evaluating, loss_tolerance_of, refusals_of_a_model


def decide_together(
    wanted: str,
    model: PreTrainedModel,
    ranks: Ranks,
    autocast: torch.dtype | None,
    *,
    prove: bool,
    pairs: bool = False,
) -> Decision:
    """Decides by proof which attention serves packed rows, the same on all processes; `wanted` is model.attention, and
    `pairs` as in `decide`.

    Raises UserError or CheckFailed where what is asked for is not there or not exact, or where processes would differ.
    """
    decision = decide(wanted, model, model.device, autocast=autocast, prove=prove, pairs=pairs)
    same_everywhere(decision.backend.name, "attention", "model.attention", ranks.world_size)
    check_together(ranks.strategy, decision.backend.name, model)
    return decision


def check_together(strategy: str, backend: str, model: PreTrainedModel) -> None:
    """Raises CheckFailed where processes would gather weights a different number of times, each for its own documents."""
    if strategy in SHARDED_WEIGHTS and backend == PER_DOCUMENT:
        raise CheckFailed(
            f"packed rows of {type(model).__name__} run one document at a time, so that processes call it a different number "
            f"of times; under {strategy} all have to call it together",
            where="strategy.name",
            fix="set packing.mode=padding, or strategy=zero2",
        )
    if strategy in SHARDED_WEIGHTS and strategy in STAGES and not uses_attention_interface(model):
        raise CheckFailed(
            f"packed rows of {type(model).__name__} run its own attention code once per document, which {strategy} does not follow",
            where="strategy.name",
            fix="set strategy=fsdp2 or zero2, or packing.mode=padding",
        )


def same_everywhere(choice: str, what: str, where: str, processes: int) -> None:
    """Raises CheckFailed on all processes where they did not come to the same `choice`."""
    with waiting("the choices of all ranks"):
        choices = gather_object([choice]) if processes > 1 else [choice]
    if len(set(choices)) > 1:
        ranks = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(choices))
        raise CheckFailed(
            f"the processes would not use the same {what} ({ranks})",
            where=where,
            fix="install the same packages everywhere, or name what to use",
        )


def fit_head(model: PreTrainedModel, head: Head, probe: dict[str, Any], autocast: torch.dtype | None) -> float:
    """Has the model's full logits made where the fused output head does not fit; returns how far that one is off."""
    with evaluating(model, autocast), torch.no_grad():
        return choose_head(model, head, probe, tolerance=loss_tolerance_of(autocast or model.dtype))


WATCHED_STEPS = 3
_FEWEST = 16  # trained tokens whose rounding errors average out
_BEGINNINGS = (32, 13, 24)  # tokens of the first documents whose gradients are compared
_OF_GRADIENTS = 5  # times the tolerance of losses: in 16 bits a router may choose another expert, which moves them more
_NOT_RIGHT = (
    "packed rows are not computed right: set model.attention=per_document or packing.mode=padding, and please report this "
    "model"
)
_LESS_OF_A_ROW = "set model.attention=per_document: some models have tables by position in the row, which end before it"


@dataclass(frozen=True, slots=True)
class FirstStepWatch:
    """Compares the loss of each document of a packed row with that of the same document padded, computed as the run does,
    and their sums: of the first row of each of the first WATCHED_STEPS steps, since what a run keeps from one step to the
    next may be at fault too.

    `attention` is the implementation that the model came with, which serves the padded batch. The proof before it has made
    its own short documents; these are the real ones, at their real lengths. Document by document, since a border that is
    forgotten moves one or two of them, which does not show in the sum of many, and since errors of either sign cancel there.

    Norms of gradients are compared at the first of these steps, over the beginnings of a few documents: a forward pass has
    none, and a backward pass of the whole padded row would take memory that training does not need. Where weights are
    spread they are not, as that takes hooks which training uses; `packtrain verify` compares them there.
    """

    attention: str
    tolerance: float
    pad_token_id: int

    @torch.no_grad()
    def check(self, model: Any, row: dict[str, Any], *, step: int) -> float:
        """Returns the largest difference, relative to the document's loss or to a nat for each of its trained tokens and for
        16 at least, whichever is more: rounding errors of few tokens do not average out.

        `row` is a flattened micro-batch of `step`. Costs one forward pass of it and some of its documents padded, each of no more slots.
        Raises CheckFailed beyond the tolerance, and where a row this long cannot run.
        """
        device, documents, lengths = row["input_ids"].device, _documents(row), row["segments"].lengths
        padded = torch.zeros(len(documents), dtype=torch.float64)
        name, tokens = type(base_model(model)).__name__, row["segments"].tokens
        # a longer document beside them would change the others in a padded batch
        slots = 0 if rotates_by_length(base_model(model)) else tokens
        with evaluating(model):
            with refusals_of_a_model(f"{name} cannot run a row of {tokens} tokens", fix=_LESS_OF_A_ROW):
                packed = _of_documents(model(**row, token_losses=True)[0], lengths)
            with attention_of(base_model(model), self.attention):
                batches = list(_batches(lengths, slots))
                for number in range(
                    most_of_all(len(batches), device)
                ):  # as often as the others, where weights are spread
                    these = batches[min(number, len(batches) - 1)]
                    batch = collate_padded([documents[one] for one in these], self.pad_token_id)
                    padded[these] = model(**on_device(batch, device), token_losses=True).sum(dim=1).double().cpu()
        trained = _of_documents(row["shift_labels"][0] != IGNORE, lengths)
        packed, padded, trained = (torch.cat([each, each.sum()[None]]) for each in (packed, padded, trained))
        off = (packed - padded).abs() / padded.maximum(trained).clamp(min=_FEWEST)
        nowhere = ~(packed.isfinite() | padded.isfinite())  # too high a learning rate: no fault of the rows
        off = off.nan_to_num(torch.inf).masked_fill((packed == padded) | nowhere, 0.0)
        difference, worst = (one.item() for one in off.max(dim=0))
        if difference > self.tolerance:
            which = (
                f"document {int(worst) + 1} of the first row of step {step} has"
                if worst < len(lengths)
                else f"the documents of the first row of step {step} have"
            )
            ours, theirs = (each[int(worst)] / trained[int(worst)].clamp(min=1) for each in (packed, padded))
            raise CheckFailed(
                f"{which} loss {ours:.6g} packed and {theirs:.6g} padded",
                fix=_NOT_RIGHT,
            )
        return difference

    def check_gradients(self, model: Any, row: dict[str, Any]) -> float:
        """Returns the relative difference of the norms of all trained parameters' gradients, over the beginnings of the first
        documents of `row`, every token of them trained.

        Leaves the gradients in the parameters alone, and what waits for them. Costs a forward and a backward pass of 69
        tokens packed and padded, and the memory of one set of gradients. Raises CheckFailed beyond the tolerance.
        """
        beginnings = [one.input_ids[:tokens] for one, tokens in zip(_documents(row), _BEGINNINGS, strict=False)]
        documents = [Document(ids, np.ones(len(ids), dtype=bool)) for ids in beginnings]
        with evaluating(model):
            packed = _gradient_norm(model, collate_flat(documents))
            with attention_of(base_model(model), self.attention):
                padded = _gradient_norm(model, collate_padded(documents, self.pad_token_id))
        difference = abs(packed - padded) / max(packed, padded, 1e-30)
        if not difference <= _OF_GRADIENTS * self.tolerance:  # NaN fails too
            raise CheckFailed(
                f"the beginnings of the first documents have gradients of norm {packed:.6g} packed and {padded:.6g} padded",
                fix=_NOT_RIGHT,
            )
        return difference


def _gradient_norm(model: Any, batch: dict[str, Any]) -> float:
    """Of all trained parameters as one vector, for the summed loss; 0 where nothing is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(**on_device(batch, model.device), loss_sum=True)
    gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients if one is not None]
    return torch.stack(norms).norm().item() if norms else 0.0


def _of_documents(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """float64 [documents] on the CPU: the sums over the tokens of each document, of `values` [T]."""
    return torch.stack([part.sum() for part in values.double().cpu().split(lengths)])


def _documents(row: dict[str, Any]) -> list[Document]:
    """The documents of a flattened row, as they were before."""
    borders = np.cumsum(row["segments"].lengths)[:-1]
    ids = np.split(row["input_ids"][0].cpu().numpy().astype(np.int32), borders)
    labels = np.split(row["shift_labels"][0].cpu().numpy(), borders)
    return [
        Document(one, np.concatenate([[False], label[:-1] != IGNORE])) for one, label in zip(ids, labels, strict=True)
    ]


def _batches(lengths: tuple[int, ...], slots: int) -> Iterator[list[int]]:
    """The numbers of all documents, those of like length together, in batches that take at most `slots` padded."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and lengths[number] * (len(batch) + 1) > slots:
            yield batch
            batch = []
        batch.append(number)
    yield batch
