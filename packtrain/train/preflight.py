"""What is proved on the loaded model before step 1 and at it: the attention of packed rows, the output head, the first loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from packtrain.attention.backends import attention_of
from packtrain.attention.choice import Decision, decide
from packtrain.attention.isolation import evaluating, loss_tolerance_of, refusals_of_a_model
from packtrain.attention.rotary import rotates_by_length
from packtrain.config.schema import RunConfig
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.packing.collate import IGNORE, collate_padded
from packtrain.train.forward import Head, choose_head
from packtrain.train.model import base_model


def decide_together(config: RunConfig, model: PreTrainedModel, processes: int) -> Decision:
    """Decides by proof which attention serves packed rows, the same on all processes.

    Raises UserError or CheckFailed where what is asked for is not there or not exact, or where processes would differ.
    """
    decision = decide(
        config.model.attention,
        model,
        model.device,
        autocast=autocast_of(config),
        prove=config.verify.preflight,
    )
    same_everywhere(decision.backend.name, "attention", "model.attention", processes)
    return decision


def same_everywhere(choice: str, what: str, where: str, processes: int) -> None:
    """Raises CheckFailed on all processes where they did not come to the same `choice`."""
    choices = gather_object([choice]) if processes > 1 else [choice]
    if len(set(choices)) > 1:
        ranks = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(choices))
        raise CheckFailed(
            f"the processes would not use the same {what} ({ranks})",
            where=where,
            fix="install the same packages everywhere, or name what to use",
        )


def fit_head(config: RunConfig, model: PreTrainedModel, head: Head, probe: dict[str, Any]) -> float:
    """Has the model's full logits made where the fused output head does not fit; returns how far that one is off."""
    autocast = autocast_of(config)
    with evaluating(model, autocast), torch.no_grad():
        return choose_head(model, head, probe, tolerance=loss_tolerance_of(autocast or model.dtype))


def autocast_of(config: RunConfig) -> torch.dtype | None:
    """What the model computes in where that is not the format of its weights."""
    return torch.bfloat16 if config.trainer.mixed_precision == "bf16" else None


_LESS_OF_A_ROW = "set model.attention=per_document: some models have tables by position in the row, which end before it"


@dataclass(frozen=True, slots=True)
class FirstStepWatch:
    """Compares the loss of the first packed row with that of the same documents padded, each computed as the run does.

    `attention` is the implementation that the model came with, which serves the padded batch. The proof before it has made
    its own short documents; these are the real ones, at their real lengths.
    """

    attention: str
    tolerance: float
    pad_token_id: int

    @torch.no_grad()
    def check(self, model: Any, row: dict[str, Any]) -> float:
        """Returns the relative difference; raises CheckFailed beyond the tolerance, and where a row this long cannot run.

        `row` is a flattened micro-batch. Costs one forward pass of it and some of its documents padded, each of no more slots.
        """
        device, loss = row["input_ids"].device, torch.zeros((), dtype=torch.float64)
        name, tokens = type(base_model(model)).__name__, row["segments"].tokens
        # a longer document beside them would change the others in a padded batch
        slots = 0 if rotates_by_length(base_model(model)) else tokens
        with evaluating(model):
            with refusals_of_a_model(f"{name} cannot run a row of {tokens} tokens", fix=_LESS_OF_A_ROW):
                packed = model(**row, loss_sum=True).item()
            with attention_of(base_model(model), self.attention):
                for documents in _batches(_documents(row), slots):
                    batch = collate_padded(documents, self.pad_token_id)
                    loss += model(**_on(device, batch), loss_sum=True).item()
        padded, trained = loss.item(), max(int((row["shift_labels"] != IGNORE).sum()), 1)
        difference = abs(packed - padded) / max(abs(padded), 1e-8)
        if not difference <= self.tolerance and packed != padded:  # NaN fails too
            raise CheckFailed(
                f"the first documents have loss {packed / trained:.6g} packed and {padded / trained:.6g} padded",
                fix="packed rows are not computed right: set model.attention=per_document or packing.mode=padding, and "
                "please report this model",
            )
        return difference


def _documents(row: dict[str, Any]) -> list[Document]:
    """The documents of a flattened row, as they were before."""
    borders = np.cumsum(row["segments"].lengths)[:-1]
    ids = np.split(row["input_ids"][0].cpu().numpy().astype(np.int32), borders)
    labels = np.split(row["shift_labels"][0].cpu().numpy(), borders)
    return [
        Document(one, np.concatenate([[False], label[:-1] != IGNORE])) for one, label in zip(ids, labels, strict=True)
    ]


def _batches(documents: list[Document], slots: int) -> Iterator[list[Document]]:
    """All documents, those of like length together, in batches that take at most `slots` padded."""
    batch: list[Document] = []
    for document in sorted(documents, key=lambda document: len(document.input_ids)):
        if batch and len(document.input_ids) * (len(batch) + 1) > slots:
            yield batch
            batch = []
        batch.append(document)
    yield batch


def _on(device: torch.device, batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
