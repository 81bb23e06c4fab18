"""The teacher: a frozen model that runs the rows of its student."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import disable_dropout_in_model

from packtrain.attention.backends import attention_by
from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError, naming
from packtrain.model.forward import Batch, Places, add_calls, compute_dtype, name_backbone, patch_forward, places_on
from packtrain.objectives.answers import Inputs
from packtrain.objectives.distill.divergence import Readout
from packtrain.objectives.distill.spec import TEACHER
from packtrain.proof.comparison import difference, evaluating, model_refusals, tolerance_of

_NOT_FOR_MODEL = ("shift_labels", "label_places", "label_owners")
_SEE = "take another teacher"


class Teacher:
    """A frozen model, on the device or sharded.

    Student and teacher both have the first `words` rows of the vocabulary. `see` runs a micro-batch; `logits` then returns logits after some of its tokens.
    """

    def __init__(
        self, model: PreTrainedModel, head: tuple[torch.Tensor, torch.Tensor | None] | None, rows: int
    ) -> None:
        """`rows`: the student's rows of the vocabulary. `head`: the first `rows` of a sharded output head's weight and bias."""
        name_backbone(model)
        self.model, self.readout, self._head = model, Readout.of(model.config), head
        self.called: nn.Module = model
        """The model as the strategy wraps it."""
        self.words = min(rows, cast(nn.Linear, model.get_output_embeddings()).out_features)
        self.by_head = type(model.get_output_embeddings()) is nn.Linear
        """Whether logits are made from hidden states some at a time, else all at once."""
        self._seen = torch.empty(0)
        inner = model.forward

        def run(own: PreTrainedModel, asked: str, labels: object, at: Places, _: object, batch: Batch) -> object:
            if self.by_head:
                return own.base_model(**batch, use_cache=False).last_hidden_state
            return inner(**batch, use_cache=False).logits[..., : self.words]

        add_calls(model, ("states",), run)

    def patch(self, backend: str | None, autocast: torch.dtype | None) -> None:
        """Give it its attention of packed rows, and autocast."""
        disable_dropout_in_model(self.model)
        patch_forward(self.model, autocast=autocast)
        if backend:
            attention_by(backend).install_when_packed(self.model)

    @torch.no_grad()
    def see(self, inputs: Inputs) -> None:
        """Run a micro-batch."""
        self._seen = self.called(**inputs, states=True).flatten(0, 1)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits after some tokens of the flattened micro-batch, int64 [n]: float32 [n, words]."""
        seen = self._seen[tokens]
        if not self.by_head:
            return seen.float()
        output, dtype = cast(nn.Linear, self.model.get_output_embeddings()), compute_dtype(seen)
        if self._head is None or self._head[0].dtype != dtype:
            weight, bias = (
                one if one is None else one[: self.words].to(seen.device, dtype)
                for one in self._head or (output.weight, output.bias)
            )
            self._head = cast(torch.Tensor, weight), bias
        with torch.autocast(seen.device.type, enabled=False):
            return self.readout.logits(F.linear(seen.to(dtype), *self._head))

    @torch.no_grad()
    def check_head(self, batch: Batch, autocast: torch.dtype | None) -> str:
        """Compare `logits` with the model's own on a micro-batch. If they differ, take its own, and return why; else ""."""
        name, plain = type(self.model).__name__, {key: batch[key] for key in batch if key not in _NOT_FOR_MODEL}
        places = places_on(batch["shift_labels"], batch.get("label_places"))
        with evaluating(self.model, autocast), model_refusals(f"the teacher {name} cannot run a batch", fix=_SEE):
            self.see(batch)
            full = self.called(**plain, use_cache=False).logits.flatten(0, 1)[places, : self.words].float()
            off = difference(self.logits(places), full)
        self.by_head = self.by_head and off <= tolerance_of(autocast or self.model.dtype).outputs
        return "" if self.by_head else f"its head is not a plain one (logits are off by {off:.1g})"


def check_tokenizer(own: PreTrainedTokenizerBase, model: Model) -> None:
    """Raise UserError unless the teacher has the tokenizer `own`, token by token."""
    with naming(TEACHER):
        its = load_tokenizer(model)
    pairs = [{number: token for token, number in one.get_vocab().items()} for one in (own, its)]
    for number in sorted({*pairs[0], *pairs[1]}):
        mine, theirs = (repr(one[number]) if number in one else "no token" for one in pairs)
        if mine != theirs:
            what = f"the teacher has another tokenizer: token {number} is {theirs}, and {mine} of the student"
            fix = "Take a teacher of the student's family, or train the student with the teacher's tokenizer."
            raise UserError(what, where=TEACHER, fix=fix, code="other-tokenizer")
