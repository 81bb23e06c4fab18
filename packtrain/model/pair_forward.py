"""The forward pass of preference pairs: TRL calls the model on a padded batch, the model runs on the flattened row.

All of TRL's trainers call `model(**padded, labels=…, fused_lm_head=True)` and read per-token outputs of shape [rows, L - 1].
With a `layout` among the arguments that call is served from the row: its outputs are put back where the padded call would
have had them, zero where nothing is labelled, which is also what TRL's head gives there. So its loss code runs unmodified.

The output head sees labelled positions only (on a CPU, TRL's own scores every one).
"""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from packtrain.packing.collate import IGNORE, on_device, row_arguments
from packtrain.packing.pairs import PairLayout

_OF_THE_PADDED_CALL = ("input_ids", "attention_mask", "labels", "fused_lm_head")


def add_pair_layout(model: PreTrainedModel, outputs: tuple[str, ...]) -> None:
    """Adds `layout=` to the forward of `model`: a padded call with `labels` and `fused_lm_head=True` that runs on the row.

    `outputs` are the per-token figures that TRL's `add_fused_lm_head` was asked for on this model, before. Whatever serves
    packed rows (attention/backends.py) goes around it afterwards.
    """
    if model.base_model is model and hasattr(model, "model"):  # Llama4ForCausalLM names its backbone by another prefix
        model.base_model_prefix = "model"
    inner = model.forward
    head = _Head(model, outputs)

    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel, *args: Any, layout: PairLayout | None = None, scored: bool = False, **kwargs: Any
    ) -> Any:
        if scored:
            return head.score(self.base_model, kwargs)
        if layout is None:
            return inner(*args, **kwargs)
        row, shape = _row(kwargs["input_ids"], kwargs["labels"], layout)
        rest = {name: value for name, value in kwargs.items() if name not in _OF_THE_PADDED_CALL}
        # by the attribute, so that a backend that takes rows apart does it around this one
        return _put_back(self.forward(**row, **rest, scored=True), layout, shape)

    model.forward = types.MethodType(forward, model)


class _Head:
    """TRL's fused output head of `model`, given hidden states in place of a backbone to run."""

    def __init__(self, model: PreTrainedModel, outputs: tuple[str, ...]) -> None:
        self.config, self._model = model.config, model
        add_fused_lm_head(cast(Any, self), outputs=outputs)  # it looks at these four members only

    def base_model(self, hidden: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self) -> Any:
        return self._model.get_output_embeddings()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Where TRL's head goes."""

    def score(self, backbone: torch.nn.Module, arguments: dict[str, Any]) -> FusedCausalLMOutput:
        """The per-token figures [rows, T] of one call of the backbone, computed where `shift_labels` has a label."""
        labels = arguments.pop("shift_labels")
        arguments.pop("use_cache", None)
        backbone_output = backbone(**arguments, use_cache=False)
        hidden, labelled = backbone_output.last_hidden_state, labels != IGNORE
        said = self.forward(
            hidden[labelled][None],
            shift_labels=labels[labelled][None],
            fused_lm_head=True,
            output_router_logits=False,
        )
        figures = {
            name: value.new_zeros(labels.shape).masked_scatter(labelled, value)
            for name, value in said.items()
            if value.dim() > 0
        }
        # connected to every parameter also where nothing is labelled, as DDP's reducer needs
        figures["log_probs"] = figures["log_probs"] + (hidden.sum() + said.log_probs.sum()) * 0.0
        return FusedCausalLMOutput(**figures)


def _row(input_ids: torch.Tensor, labels: torch.Tensor, layout: PairLayout) -> tuple[dict[str, Any], torch.Size]:
    """The arguments of a forward pass over the row, and the shape [2B, L - 1] of TRL's per-token figures."""
    device = input_ids.device
    places = layout.rows.to(device), layout.columns.to(device)
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    told = on_device(row_arguments(layout.segments), device)
    row = {"input_ids": input_ids[places][None], "shift_labels": following[places][None], **told}
    return row, labels[:, 1:].shape


def _put_back(said: FusedCausalLMOutput, layout: PairLayout, shape: torch.Size) -> FusedCausalLMOutput:
    """Per-token figures [1, T] of the row where a padded call has them."""
    inside = layout.columns < shape[1]  # the last token of the longest document predicts nothing
    device = next(iter(said.values())).device
    places = tuple(index[inside].to(device) for index in (layout.rows, layout.columns))
    kept = inside.to(device)
    return FusedCausalLMOutput(
        **{name: value.new_zeros(shape).index_put(places, value[0, kept]) for name, value in said.items()}
    )
