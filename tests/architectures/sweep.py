"""What packtrain does with an architecture, measured: the path of its packed rows, and how far every mode is from the truth.

The truth is each document alone, under the model's own attention, with full logits and plain cross-entropy. The documents
are longer and the windows wider than anything that the isolation proof runs, so that a proof which is blind to a window
is found out here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tiny import VOCABULARY, Unbuildable, tiny_model
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention import flattened
from packtrain.attention.backends import attending_by
from packtrain.attention.spec import Backend
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.model.forward import add_loss_sum, choose_head
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded, shifted_labels
from packtrain.proof.choice import choose_attention
from packtrain.proof.comparison import tolerance_of
from packtrain.proof.mixer_search import mixing_of
from packtrain.wording import first_line

Batch = dict[str, object]

WINDOW = 80  # tokens; the proof's row has 37
LENGTHS = (17, 1, 33, 33, 100)
TOLERANCE_LOSS, TOLERANCE_GRADIENTS = 1e-5, 1e-4  # relative, in float32


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative differences from the truth: of the summed loss, and of all gradients as one vector."""

    loss: float
    gradients: float

    @property
    def exact(self) -> bool:
        return self.loss <= TOLERANCE_LOSS and self.gradients <= TOLERANCE_GRADIENTS  # NaN is not


@dataclass(frozen=True, slots=True)
class Outcome:
    """`path` is a backend, "padding only" or "refused", `why` says what a better one lacks; `modes` that the path has, by name.

    `by_document`: the modules that run once per document of a row, in words; "" if the path has none.
    """

    model_type: str
    path: str
    why: str
    modes: dict[str, Difference] = field(default_factory=dict)
    by_document: str = ""


@contextmanager
def quietly_on_one_thread() -> Iterator[None]:
    """Such small models gain nothing by more threads, and only log warnings about their sizes."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)


@cache
def outcome_of(model_type: str) -> Outcome:
    """Builds a tiny model of the type, lets packtrain choose its path as a run would, and compares the modes with the truth.

    Measured once in the life of a process.
    """
    model = tiny_model(model_type, WINDOW)
    if isinstance(model, Unbuildable):
        return Outcome(model_type, "refused", model.reason)
    if why := fails_in_training(model):
        return Outcome(model_type, "refused", why)
    if not is_causal(model):
        return Outcome(model_type, "refused", "not causal: outputs move with later tokens, or with how many there are")
    items = documents()
    truth = one_by_one(model, items)
    add_fused_lm_head(model)
    head = add_loss_sum(model)
    try:
        with torch.no_grad():
            choose_head(model, head, collate_padded(items[:3], 0), tolerance=tolerance_of(torch.float32).outputs)
    except CheckFailed as refusal:
        return Outcome(model_type, "refused", without_figures(refusal.problems[0].what))
    modes = {"padding": difference(model, [collate_padded(items[:3], 0), collate_padded(items[3:], 0)], truth)}
    try:
        decision = choose_attention("auto", model, torch.device("cpu"))
    except CheckFailed as refusal:
        return Outcome(model_type, "padding only", without_figures(refusal.problems[0].what), modes)
    with attending_by(model, decision.backend.name):
        modes["padding_free"] = difference(model, [collate_flat(items[:3]), collate_flat(items[3:])], truth)
        modes["packed"] = difference(model, [collate_flat(items)], truth)
    lacks = "; ".join(lack for backend, lack in decision.rejected if backend != "flash")  # no CPU has it
    return Outcome(
        model_type, decision.backend.name, without_figures(lacks), modes, by_document(model, decision.backend)
    )


def by_document(model: PreTrainedModel, backend: Backend) -> str:
    """Name the modules that the backend runs once per document, and attention by segments."""
    if backend.name != "mixers":
        return ""
    seen = mock.patch.object(flattened, "row_of", wraps=flattened.row_of)
    with torch.no_grad(), attending_by(model, backend.name), seen as by_segments:
        model(**collate_flat(documents()), loss_sum=True)
    return mixing_of(model).words() + (", attention by segments" if by_segments.called else "")


def documents() -> list[Document]:
    """Five documents, two of them of equal length, one longer than the window, with 70 % of the tokens trained."""
    rng = np.random.default_rng(0)
    return [Document(rng.integers(3, VOCABULARY, n, dtype=np.int32), rng.random(n) < 0.7) for n in LENGTHS]


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether neither what the later tokens are nor how many there are moves an output, while its own token does."""
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, (1, 33)))
    changed = torch.cat([ids[:, :-1], 3 + (ids[:, -1:] - 2) % (VOCABULARY - 3)], dim=1)
    whole, other, part = (
        unmasked(model(input_ids=row, use_cache=False).logits[0]) for row in (ids, changed, ids[:, :20])
    )
    scale = whole.abs().max()
    content, number = (whole - other).abs().amax(dim=-1) / scale, (whole[:20] - part).abs().max() / scale
    tolerance = tolerance_of(torch.float32).outputs
    return max(content[:-1].max().item(), number.item()) <= tolerance and content[-1].item() > 5 * tolerance


@torch.no_grad()
def fails_in_training(model: PreTrainedModel) -> str:
    """Why a model in training mode refuses text alone, "" if it does not."""
    ids = torch.arange(3, 43)[None]
    try:
        model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except Exception as error:
        return f"cannot run text alone: {without_figures(first_line(error))}"
    finally:
        model.eval()
    return ""


def unmasked(logits: torch.Tensor) -> torch.Tensor:
    """The logits without tokens that are never the next one, such as chameleon's pictures."""
    return logits.masked_fill(logits < -1e30, 0)


def one_by_one(model: PreTrainedModel, items: Sequence[Document]) -> tuple[float, torch.Tensor]:
    """The truth: Σ loss, and all gradients as one vector."""
    model.zero_grad()
    loss = torch.zeros(())
    for item in items:
        logits = model(input_ids=torch.from_numpy(item.input_ids.astype(np.int64))[None], use_cache=False).logits[0]
        loss = loss + F.cross_entropy(logits, shifted_labels(item), ignore_index=IGNORE, reduction="sum")
    loss.backward()
    return loss.item(), gradients_of(model)


def difference(model: PreTrainedModel, batches: Sequence[Batch], truth: tuple[float, torch.Tensor]) -> Difference:
    """How far the batches together are from the truth."""
    model.zero_grad()
    loss = torch.stack([model(**batch, loss_sum=True) for batch in batches]).sum()
    loss.backward()
    true_loss, true_gradients = truth
    gradients = (gradients_of(model) - true_gradients).norm() / true_gradients.norm()
    return Difference(abs(loss.item() / true_loss - 1), gradients.item())


def gradients_of(model: PreTrainedModel) -> torch.Tensor:
    parts = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()]
    return torch.cat(parts)


def without_figures(text: str) -> str:
    """A reason without what was measured in this very run, so that it is the same on every machine."""
    text = re.sub(r",? (off|moves) by \S+( only)? \(tolerance [^)]*\)", "", text)
    return re.sub(r" gives loss \S+, its full logits give \S+", " gives another loss than its full logits", text)
