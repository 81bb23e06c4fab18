"""What `packtrain.attach` does with an architecture, measured: how far its packed calls are from the padded ones.

The call is one of GRPO: prompts padded on the left, answers on the right, groups with a prompt in common, and answers that begin
alike; where it is not packed the same documents are padded on the right alone, as those of other trainers are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from sweep import Difference, gradients_of, without_figures
from tiny import LONGEST, VOCABULARY, Unbuildable, tiny_model
from transformers import PreTrainedModel

from packtrain import attach
from packtrain.errors import CheckFailed

WINDOW = 44  # tokens; more than a row of the isolation proof has
ANSWERS = ((12, (40, 21, 3)), (25, (30, 1)), (7, (5,)))  # tokens of each prompt and of its answers, beyond a window
ALIKE = 18  # tokens that the first two answers have in common
NOT_CAUSAL = {"doge": "a document longer than keep_window_size sees its own later tokens, also without attach"}
"""Types whose documents that begin alike have other outputs there if they are longer than a window."""
SHARED, PACKED, AS_IT_COMES, REFUSED = "shared", "packed", "unchanged", "refused"


@dataclass(frozen=True, slots=True)
class Attachment:
    """What becomes of a padded call, in a word and in more of them, and how far its outputs and gradients are from those without
    `attach`, by its padding; where the model itself gives other outputs beside padding, from those of its documents alone."""

    path: str
    why: str
    calls: dict[str, Difference] = field(default_factory=dict)


@cache
def attachment_of(model_type: str) -> Attachment:
    """Attaches to a tiny model of the type and compares. Measured once in the life of a process."""
    model = tiny_model(model_type, LONGEST if model_type in NOT_CAUSAL else WINDOW)
    if isinstance(model, Unbuildable):
        return Attachment(REFUSED, model.reason)
    calls = {name: padded_call(left=left) for name, left in (("left and right", True), ("right", False))}
    try:
        truth = outputs_and_gradients(model, calls["left and right"])
    except (AssertionError, RuntimeError) as error:
        return Attachment(REFUSED, "no padded call runs: " + str(error).splitlines()[0])
    try:
        handle = attach(model)
    except CheckFailed as refusal:
        return Attachment(REFUSED, without_figures(refusal.problems[0].what))
    found = {"left and right": outputs_and_gradients(model, calls["left and right"])}
    if handle.stats.unchanged:
        found["right"] = outputs_and_gradients(model, calls["right"])
    path, why = (
        PACKED if handle.stats.unrolled else SHARED,
        [NOT_CAUSAL[model_type]] if model_type in NOT_CAUSAL else [],
    )
    if handle.stats.unrolled and handle.backends != ("per_document",):
        why.append(without_figures(handle.stats.unrolled))
    if handle.stats.unchanged:
        path = AS_IT_COMES if not handle.stats.calls else path
        why += [f"{reason}: unchanged" if handle.stats.calls else reason for reason in handle.stats.unchanged]
    handle.detach()
    differences = {"left and right": off(found["left and right"], truth)}
    if "right" in found:
        differences["right"] = off(found["right"], outputs_and_gradients(model, calls["right"]))
    for name in [name for name, difference in differences.items() if not difference.exact]:
        differences[name] = off(found[name], one_by_one(model, calls[name]))
        why.append(f"padded {name} the model itself gives other outputs than documents have alone, which attach gives")
    return Attachment(path, "; ".join(why), differences)


def off(found: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor]) -> Difference:
    """How far outputs and gradients are from the truth."""
    return Difference(*(((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)))


def padded_call(*, left: bool) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [6, L]; with `left` prompts end in one column."""
    rng = np.random.default_rng(0)
    longest = max(prompt for prompt, _ in ANSWERS)
    rows = []
    for prompt, answers in ANSWERS:
        begin, alike = rng.integers(3, VOCABULARY, prompt), rng.integers(3, VOCABULARY, ALIKE)
        for answer in answers:
            whole = np.concatenate([begin, alike, rng.integers(3, VOCABULARY, answer)])
            rows.append((longest - prompt if left else 0, whole[: prompt + answer]))
    batch = torch.zeros(2, len(rows), max(start + len(ids) for start, ids in rows), dtype=torch.int64)
    for number, (start, ids) in enumerate(rows):
        batch[0, number, start : start + len(ids)] = torch.from_numpy(ids)
        batch[1, number, start : start + len(ids)] = 1
    return {"input_ids": batch[0], "attention_mask": batch[1]}


def outputs_and_gradients(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of all real tokens [n, vocabulary], and the gradients of one fixed function of them, as one vector."""
    model.zero_grad()
    return of_logits(model, model(**batch, use_cache=False).logits[batch["attention_mask"].bool()])


def one_by_one(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, of each document by itself."""
    model.zero_grad()
    documents = [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    ones = [torch.ones_like(document) for document in documents]
    pairs = zip(documents, ones, strict=True)
    logits = [model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0] for ids, mask in pairs]
    return of_logits(model, torch.cat(logits))


def of_logits(model: PreTrainedModel, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [n, vocabulary], and the gradients of one fixed function of them."""
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits).sin()
    (logits * weights).sum().backward()
    return logits.detach(), gradients_of(model)
