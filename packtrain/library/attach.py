"""`attach`: run the padded forward passes of a TRL trainer or transformers model packed.

It packs the backbone, which is the model without its head. A padded call [B, L] of the backbone runs as rows of Segments, and its
hidden states return to their padded places. Only the call's arguments are read: token ids, attention mask, positions and labels. Common
beginnings of documents (the prompt of a group or a pair, turns of a chat) are found from the ids (packing/prefixes.py), and are in a row
once. Head, loss and pooling stay the model's or the trainer's own code. In TRL's call for log-probabilities (`labels=…,
fused_lm_head=True`) the head gets only the labelled places.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakSet

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import ModelOutput
from trl.models.utils import add_hooks, remove_hooks

from packtrain.attention.backends import attention_by
from packtrain.attention.forwards import replace_forward
from packtrain.attention.spec import BACKENDS, tried_by_auto
from packtrain.errors import CheckFailed, UserError
from packtrain.library.seeing import check_row_with_pictures, picture_arguments, row_with_pictures
from packtrain.model.forward import name_backbone
from packtrain.model.load import base_model
from packtrain.packing.collate import IGNORE, on_device, row_arguments, to_device
from packtrain.packing.prefixes import rows_of
from packtrain.packing.segments import Segments
from packtrain.proof.choice import AttentionChoice, choose_attention
from packtrain.proof.comparison import difference, evaluating, model_refusals, tolerance_of
from packtrain.proof.isolation import random_ids
from packtrain.system import holding

if TYPE_CHECKING:
    from transformers import Trainer

Call = dict[str, Any]
"""Arguments of a model's call, by name."""
Forward = Callable[..., Any]
TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "margin")
"""Arguments of a call that rows do not get. `margin` belongs to TRL's reward loss, which finds it in the batch."""


class NotPacked(Exception):
    """Why a call runs unpacked, in a few words."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of a padded call, and the way of their outputs back to the batch.
    `rows`: segments of each row, and int64 [T] the place (b · L + column) of each token in the batch, which has `shape` [B, L].
    `slots`, int64 [B · L]: for each place the number of its token, counted through the rows; the total of tokens for padding.
    `real`: tokens that are not padding."""

    rows: tuple[tuple[Segments, np.ndarray], ...]
    slots: np.ndarray
    shape: torch.Size
    real: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all rows."""
        return sum(segments.tokens for segments, _ in self.rows)

    def arguments(self, row: int, input_ids: torch.Tensor) -> Call:
        """Return the model's arguments for one of the rows."""
        segments, places = self.rows[row]
        ids = input_ids.flatten()[to_device(torch.from_numpy(places), input_ids.device)][None]
        return {"input_ids": ids, **on_device(row_arguments(segments), input_ids.device)}


def layout_of_call(call: Call, *, left_padding: bool, share: Callable[[], bool], tokens_per_row: int | None) -> Layout:
    """Lay out a padded call, given by its keyword arguments, in rows.

    `left_padding`: padding on the left does not change the model's outputs. `share` is asked only for a batch that can be packed. Waits for the device of ids and mask. Raises NotPacked if
    it is no padded batch of texts, or generates, and if packing is impossible or saves nothing."""
    ids, mask, pictures = call.get("input_ids"), call.get("attention_mask"), picture_arguments(call)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise NotPacked("no batch of input_ids")
    if call.get("past_key_values") is not None or call.get("use_cache"):
        raise NotPacked("generation with a cache")
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise NotPacked("no attention mask of the shape of input_ids")
    if call.get("output_attentions"):
        raise NotPacked("output_attentions")
    for name, value in call.items():
        number = isinstance(value, str) or (isinstance(value, torch.Tensor) and not value.dim())  # num_items_in_batch
        if name not in (*TAKEN, *pictures) and isinstance(value, torch.Tensor | Sequence) and not number:
            raise NotPacked(name)
    real = mask.bool().cpu().numpy()
    starts, lengths = real.argmax(axis=1), real.sum(axis=1)
    columns = np.arange(real.shape[1])
    if (real != ((columns >= starts[:, None]) & (columns < (starts + lengths)[:, None]))).any():
        raise NotPacked("an attention mask with holes")
    if not lengths.any():
        raise NotPacked("no tokens")
    rows = np.flatnonzero(lengths)
    if (given := call.get("position_ids")) is not None:
        if given.dim() != 2 or (given.cpu().numpy() != columns - starts[:, None])[real].any():
            raise NotPacked("position_ids of their own")
    elif starts[rows].any() and not left_padding:
        raise NotPacked("padding on the left changes the outputs of the model")
    tokens = ids.cpu().numpy()
    documents = [tokens[row, starts[row] : starts[row] + lengths[row]] for row in rows]
    # with pictures all documents are in one row, in order, since nobody knows whose pixels are whose
    most = None if pictures else tokens_per_row
    packed = rows_of(documents, most or int(lengths.sum()), share=not pictures and share())
    slots, before, laid_rows = np.full(real.shape, sum(row.segments.tokens for row in packed)), 0, []
    for row in packed:
        places = [
            rows[number] * real.shape[1] + starts[rows[number]] + np.arange(len(documents[number]))
            for number in row.documents
        ]
        slots.flat[np.concatenate(places)] = before + np.concatenate(row.places)
        laid_rows.append((row.segments, np.concatenate(places)[row.sources]))
        before += row.segments.tokens
    if before == real.size:
        raise NotPacked("nothing padded and nothing shared")
    return Layout(tuple(laid_rows), slots.ravel(), ids.shape, int(lengths.sum()))


def places_with_labels(labels: torch.Tensor, layout: Layout) -> np.ndarray:
    """Return the places whose next token has a label. They are int64 [n], counted through [B, L - 1]. Raises NotPacked unless there is a
    label for each token, or if such a place is padding: a model's output there depends on how it treats padding."""
    if labels.shape != layout.shape:
        raise NotPacked("labels of another shape")
    labelled = labels.cpu().numpy()[:, 1:] != IGNORE
    padding = layout.slots.reshape(layout.shape)[:, :-1] == layout.tokens
    if (labelled & padding).any():
        raise NotPacked("a label after padding")
    return np.flatnonzero(labelled)


def at_places(values: torch.Tensor, slots: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Put the rows' outputs `values` [T, …] at `slots`, as a tensor [*shape, …]. It is zero where a slot is T."""
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded.index_select(0, slots).view(*shape, *values.shape[1:])


Share = Literal["auto", True, False]
_MODELS = ("model", "ref_model", "teacher_model")
"""Attributes of TRL's trainers that may hold a model with padded forward passes."""
_PADDED_BY = 3  # padding tokens in the trial of left padding
_ATTACHED: WeakSet[PreTrainedModel] = WeakSet()


@dataclass(slots=True)
class Stats:
    """Counts of packed calls since `attach`, over all attached models.

    `padded_slots` is Σ B · L of the packed calls, `real_tokens` the slots without padding, `row_slots` the tokens that the model
    ran on. `unchanged` counts the calls that ran unpacked, by reason. `unrolled`: why prompts cannot be shared.
    """

    calls: int = 0
    padded_slots: int = 0
    real_tokens: int = 0
    row_slots: int = 0
    shared_tokens: int = 0
    unchanged: Counter[str] = field(default_factory=Counter)
    unrolled: str = ""

    def count(self, layout: Layout) -> None:
        """Count a call that ran in this layout."""
        self.calls += 1
        self.padded_slots += layout.shape.numel()
        self.real_tokens += layout.real
        self.row_slots += layout.tokens
        self.shared_tokens += layout.real - layout.tokens


@dataclass(slots=True)
class Attached:
    """The handle that `attach` returns."""

    stats: Stats = field(default_factory=Stats)
    _models: list[_PackedModel] = field(default_factory=list)

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the attention backend of each model (docs/modes.md); "" until training begins and chooses it."""
        return tuple(model.backend for model in self._models)

    def detach(self) -> None:
        """Let the models run as before from now on."""
        for model in self._models:
            model.detach()


def attach(
    trainer_or_model: object,
    *,
    tokens_per_row: int | None = None,
    share_prefix: Share = "auto",
    proof: bool = True,
) -> Attached:
    """Pack the padded forward passes of a trainer's models, or of one model.

    A trainer's models are its model, reference and teacher. `tokens_per_row` limits a row; a longer call runs as several rows, one after
    another (None: one row a call). Documents' common beginnings are computed once: with `share_prefix="auto"` unless dropout is active,
    with False never. `proof` measures on the loaded model that documents of a row cannot see each other, and chooses the fastest exact
    attention. Raises CheckFailed if no attention is exact for the model, UserError if it is not a model or trainer or is attached already.
    Under FSDP and DeepSpeed the trained model is measured when training begins, and packed from then on.

        attach(trainer)
        trainer.train()
    """
    limits = tokens_per_row is None or (isinstance(tokens_per_row, int) and tokens_per_row > 0)
    if share_prefix not in ("auto", True, False) or not limits:
        what = f"share_prefix is {share_prefix!r} and tokens_per_row {tokens_per_row}"
        fix = 'set share_prefix to "auto", True or False, and tokens_per_row to a number or None'
        raise UserError(what, fix=fix, code="attach-arguments")
    handle = Attached()
    trainer = None if isinstance(trainer_or_model, nn.Module) else trainer_or_model
    given = [trainer_or_model] if trainer is None else [getattr(trainer, name, None) for name in _MODELS]
    engines = [model for model in given if isinstance(model, nn.Module)]
    models = [base_model(cast(nn.Module, extract_model_from_parallel(engine))) for engine in engines]
    if not models or not all(isinstance(model, PreTrainedModel) for model in models):
        what = f"attach takes a model of transformers or a trainer that has one, not {type(trainer_or_model).__name__}"
        raise UserError(what, fix="see docs/library.md", code="not-attachable")
    wrapped_later = trainer is not None and _is_wrapped_later(trainer)
    different = {id(model): (model, engine) for model, engine in zip(models, engines, strict=True)}
    try:
        for model, engine in different.values():
            packed = _PackedModel(model, handle.stats, tokens_per_row, share_prefix, proof, _autocast(trainer))
            handle._models.append(packed)
            if not (wrapped_later and model is models[0]):
                packed.choose(engine)
    except Exception:
        handle.detach()
        raise
    if wrapped_later:
        cast("Trainer", trainer).add_callback(_WhenTrainingBegins(handle._models[0], trainer))
    return handle


def _autocast(trainer: object) -> torch.dtype | None:
    """Return the dtype of the trainer's autocast; None without autocast."""
    args = getattr(trainer, "args", None)
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else None


def _is_wrapped_later(trainer: object) -> bool:
    """Return whether the trained model gets its weights, or its device, when training begins."""
    engine = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    return bool(engine) and getattr(trainer, "model_wrapped", None) is getattr(trainer, "model", None)


class _WhenTrainingBegins(TrainerCallback):
    """Callback that chooses the attention once the trained model's weights are in place."""

    def __init__(self, packed: _PackedModel, trainer: object) -> None:
        self._packed, self._trainer = packed, trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        if not self._packed.backend:
            self._packed.choose(getattr(self._trainer, "model_wrapped", None))


@dataclass(slots=True, eq=False)
class _PackedModel:
    """A model whose padded calls run packed once `backend` is chosen.

    `tokens_per_row`, `share` and `proof` are arguments of `attach`. `_planned`: layout and labelled places of the head's call. `_passing`:
    calls run unpacked. `_row`: segments of the call, for models whose code does not pass them on (bloom)."""

    model: PreTrainedModel
    stats: Stats
    tokens_per_row: int | None
    share: Share
    proof: bool
    autocast: torch.dtype | None
    backend: str = ""
    _backbone: PreTrainedModel = field(init=False)
    _left_padding: bool = False
    _planned: tuple[Layout, np.ndarray | None] | None = None
    _passing: bool = False
    _row: Segments | None = None
    _proved_pictures: bool = False
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        model = self.model
        if getattr(model.config, "is_encoder_decoder", False):
            what = f"{type(model).__name__} has an encoder, whose tokens see later ones"
            raise CheckFailed(what, fix="attach serves causal models", code="model-has-encoder")
        name_backbone(model)
        self._backbone = _backbone_of(model)
        if model in _ATTACHED or self._backbone in _ATTACHED:
            what = f"this {type(model).__name__} is attached already"
            raise UserError(what, fix="call detach() of its handle first", code="attached-already")
        _ATTACHED.update((model, self._backbone))
        self._undo.callback(_ATTACHED.difference_update, (model, self._backbone))

    def choose(self, engine: Any = None) -> None:
        """Choose the attention by its proof, and pack from now on. All processes choose the same. `engine` is DeepSpeed's. Raises
        CheckFailed if none is exact, or if processes would have to gather weights a different number of times."""
        choice = self._agreed()
        sharded = self._is_sharded()
        attention = attention_by(choice.backend.name)
        attention.run_alike(self._backbone, self._subject)  # rows run the backbone
        uneven = choice.backend.by_document or attention.gathers_unevenly(self._backbone)
        if sharded and (self.tokens_per_row is not None or uneven):
            parts = "documents" if uneven else "rows"
            rows = f"{type(self.model).__name__}: running {parts} one by one"
            what = f"{rows} would make processes gather sharded weights a different number of times"
            fix = "use DDP or ZeRO-2; else do not set tokens_per_row, and take a model whose sharded modules run once per row"
            raise CheckFailed(what, fix=fix, code="gathers-unevenly")
        if choice.why_not_shared:
            if self.share is True:
                what = f"prefixes cannot be shared: {choice.why_not_shared}"
                raise CheckFailed(what, fix="set share_prefix to auto", code="prefixes-not-shared")
            self.share, self.stats.unrolled = False, self.stats.unrolled or choice.why_not_shared
        self._left_padding = self._takes_left_padding()
        zero3 = any(hasattr(weight, "ds_id") for weight in self.model.parameters())
        if zero3 and getattr(
            engine, "optimizer", None
        ):  # the engine would expect the proof's calls again in every step
            remove_hooks(engine)
            add_hooks(engine)
        self.backend = choice.backend.name
        self._undo.callback(attention.install_when_packed(self._backbone))
        self._undo.callback(_replaced(self._backbone, self._forward_of_backbone()))
        if self.model is not self._backbone:
            self._undo.callback(_replaced(self.model, self._forward_of_model()))

    def detach(self) -> None:
        """Let the model run as before from now on."""
        self.backend = ""
        self._undo.close()

    @property
    def _subject(self) -> PreTrainedModel:
        """Return the model that the proof runs: with its head, if it has one."""
        return self._backbone if self.model.get_output_embeddings() is None else self.model

    def _agreed(self) -> AttentionChoice:
        """Return the choice of the first process. Only that process may have all weights."""
        choose = functools.partial(
            choose_attention, model=self._subject, device=self.model.device, autocast=self.autocast
        )
        pairs, must_share = self.proof and self.share is not False, self.share is True
        agreed: AttentionChoice | CheckFailed | None = None
        try:
            for name in ["auto"] if self.proof else [backend.name for backend in tried_by_auto()]:
                with suppress(UserError):  # not available
                    agreed = agreed or choose(name, prove=self.proof, pairs=pairs, must_share=must_share)
        except CheckFailed as refusal:
            agreed = refusal
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            agreed = broadcast_object_list([agreed])[0]
        if isinstance(agreed, CheckFailed):
            raise agreed
        assert agreed is not None
        return agreed

    def _takes_left_padding(self) -> bool:
        """Measure whether left padding leaves the outputs of a call without positions unchanged."""
        ids = torch.from_numpy(random_ids(self.model, Segments((12,)))[:1]).to(self.model.device)
        hidden: list[torch.Tensor] = []
        hook = self._backbone.register_forward_hook(lambda *given: hidden.append(given[-1][0].float()))
        try:
            what = "no padding"
            with hook, evaluating(self.model, self.autocast) as dtype, torch.no_grad(), model_refusals(what, fix=""):
                for padding in (0, _PADDED_BY):  # sharded weights need calls of the whole model
                    row = torch.cat([ids[:, :padding], ids], dim=1)
                    mask = (torch.arange(row.shape[1], device=row.device) >= padding)[None].long()
                    self.model(input_ids=row, attention_mask=mask, use_cache=False)
        except CheckFailed:
            return False
        alone, behind = hidden[0], hidden[1][:, _PADDED_BY:]
        return difference(behind, alone) <= tolerance_of(dtype()).outputs

    def _is_sharded(self) -> bool:
        """Return whether no process has all weights."""
        return any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in self.model.parameters())

    def _packs(self) -> bool:
        """Return whether to pack calls now: attached, and not inside a call that runs unpacked."""
        return bool(self.backend) and not self._passing

    def _forward_of_backbone(self) -> Forward:
        inner, signature = self._backbone.forward, inspect.signature(type(self._backbone).forward)

        @functools.wraps(type(self._backbone).forward)
        def forward(_: nn.Module, *args: object, **kwargs: object) -> object:
            if not self._packs():
                return inner(*args, **kwargs)
            call = _by_name(signature, args, kwargs)
            if (row := self._row or _row_of(call)) is not None:
                return inner(**_check_row(call, row))
            layout, places = self._planned or (None, None)
            try:
                layout = layout or self._layout(call)
            except NotPacked as reason:
                self.stats.unchanged[str(reason)] += 1
                return inner(*args, **kwargs)
            self.stats.count(layout)
            return self._run(inner, call, layout, places)

        return forward

    def _forward_of_model(self) -> Forward:
        """Make the model's forward. Padding predicts no labels; in TRL's call for log-probabilities the head gets only the labelled places."""
        inner, signature = self.model.forward, inspect.signature(type(self.model).forward)
        predicting = self.model.get_output_embeddings() is not None  # labels are next tokens
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

        @functools.wraps(type(self.model).forward)
        def forward(_: nn.Module, *args: object, **kwargs: object) -> object:
            call = _by_name(signature, args, kwargs)
            if self._packs() and (row := _row_of(call)) is not None:
                if not passes_on:
                    kwargs.pop("segments", None)
                with holding(self, _row=row):
                    return inner(*args, **kwargs)
            labels, fused = call.pop("labels", None), call.pop("fused_lm_head", False)
            predicts = predicting and isinstance(labels, torch.Tensor) and labels.dim() == 2
            if not predicts or "shift_labels" in call or not self._packs():
                return inner(*args, **kwargs)
            count = call.pop("num_items_in_batch", None)
            try:
                layout = self._layout({name: value for name, value in call.items() if name != "logits_to_keep"})
                places = places_with_labels(labels, layout)
            except NotPacked as reason:
                self.stats.unchanged[str(reason)] += 1
                with holding(self, _passing=True):
                    return inner(*args, **kwargs)
            if not fused:
                with holding(self, _planned=(layout, None)):
                    return inner(*args, **kwargs)
            shape = labels[:, 1:].shape
            # at least one place, so that the outputs reach every parameter: DDP needs it
            scored_places = places if len(places) else np.zeros(1, dtype=np.int64)
            labelled = layout.slots.reshape(layout.shape)[np.unravel_index(scored_places, shape)]
            at = to_device(torch.from_numpy(scored_places), labels.device)
            scored = labels[:, 1:].flatten()[at][None]
            with holding(self, _planned=(layout, labelled.clip(max=layout.tokens - 1))):
                outputs = inner(**call, shift_labels=scored, fused_lm_head=True, num_items_in_batch=count)
            return _scatter(outputs, at, shape)

        return forward

    def _layout(self, call: Call) -> Layout:
        if picture_arguments(call) and BACKENDS[self.backend].by_document:
            raise NotPacked("pictures, of a model that runs document by document")
        all_layers = call.get("output_hidden_states") or call.get("output_router_logits")
        if all_layers and BACKENDS[self.backend].by_document:
            raise NotPacked("hidden states of all layers, of a model that runs document by document")
        most = self.tokens_per_row
        return layout_of_call(call, left_padding=self._left_padding, share=self._shares, tokens_per_row=most)

    def _shares(self) -> bool:
        noise = self.share == "auto" and self.model.training and any(map(_has_dropout, self.model.modules()))
        return bool(self.share) and not noise

    def _run(self, inner: Forward, call: Call, layout: Layout, places: np.ndarray | None) -> object:
        """Return the output of the padded call. With `places` the last hidden states are [1, n, d], at these tokens only."""
        ids, as_tuple = call["input_ids"], call.get("return_dict") is False
        pictures = picture_arguments(call)
        rest = {name: value for name, value in call.items() if name not in (*TAKEN, *pictures)}
        rows = [layout.arguments(row, ids) for row in range(len(layout.rows))]
        if pictures:
            seen = row_with_pictures(self._backbone, call, *layout.rows[0])
            rows = [{**rows[0], **on_device(seen, ids.device)}]
        with holding(self, _passing=True):
            outputs = [inner(**row, **rest, use_cache=False) for row in rows]
            if pictures and self.proof and not self._proved_pictures:
                self._prove_pictures(inner, call, outputs[0], layout)
        joined = _join_rows(outputs, layout, places)
        return joined.to_tuple() if as_tuple else joined

    @torch.no_grad()
    def _prove_pictures(self, inner: Forward, call: Call, row: ModelOutput, layout: Layout) -> None:
        """Compare the first row with pictures with the padded call. Raises CheckFailed if it differs.

        Not if the model draws noise, nor with sharded weights: a process without pictures would make one call fewer.
        """
        self._proved_pictures = True
        if any(map(_has_dropout, self.model.modules())) or self._is_sharded():
            return
        padded = inner(**{**call, "use_cache": False, "return_dict": True}).last_hidden_state
        check_row_with_pictures(self.model, row["last_hidden_state"][0], padded.flatten(0, 1), layout.slots)


def _backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` without its head: the module from token ids to hidden states."""
    decoder = model.get_decoder()
    takes_embeddings = (
        model.config.get_text_config() is not model.config
    )  # the text model stands beside models of other media
    whole = takes_embeddings or not isinstance(decoder, PreTrainedModel)
    return cast(PreTrainedModel, model.base_model) if whole else decoder


def _replaced(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Call `replace_forward`; return its undo. If another library (accelerate's autocast) has wrapped our forward since, the undo leaves
    `module` alone: ours then passes all calls on."""
    undo = replace_forward(module, forward)
    ours = module.__dict__["forward"]
    return lambda: undo() if module.__dict__.get("forward") is ours else None


def _row_of(call: Call) -> Segments | None:
    """Return the segments of a call that is a packed row already, else None.

    Without `segments`, its positions restart with each document, as padding-free collators of other libraries write them. They are read on
    the CPU, so it waits for their device."""
    ids, positions = call.get("input_ids"), call.get("position_ids")
    if (given := call.get("segments")) is not None:
        return given
    if any(call.get(name) is not None for name in ("past_key_values", "attention_mask")):
        return None
    if ids is None or positions is None or positions.shape != ids.shape or ids.dim() != 2 or len(ids) != 1:
        return None
    counted = positions[0].cpu().numpy()
    starts = np.flatnonzero(counted == 0)
    if len(starts) < 2 or starts[0]:
        return None
    row = Segments(tuple(np.diff(starts, append=len(counted)).tolist()))
    return row if (row.position_ids()[0].numpy() == counted).all() else None


def _check_row(call: Call, row: Segments) -> Call:
    """Return the call of a row that the user packed, with its positions. Raises UserError if tokens and segments differ in number."""
    given = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    if given.shape[:2] != (1, row.tokens):
        what = f"segments are of a row [1, {row.tokens}], and the tokens of the call {list(given.shape[:2])}"
        fix = "call the model with one row at a time, and its own segments"
        raise UserError(what, fix=fix, code="segments-of-another-row")
    positions = call.get("position_ids")
    positions = to_device(row.position_ids(), given.device) if positions is None else positions
    return {**call, "position_ids": positions, "segments": row, "use_cache": False}


def _by_name(signature: inspect.Signature, args: tuple[object, ...], kwargs: Call) -> Call:
    """Name the arguments of a method, without self."""
    names = list(signature.parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _has_dropout(module: nn.Module) -> bool:
    """Return whether `module` draws random numbers while training."""
    if isinstance(module, _DropoutNd):
        return module.p > 0 and module.training
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def _join_rows(outputs: list[ModelOutput], layout: Layout, places: np.ndarray | None) -> ModelOutput:
    """Join the rows' outputs. Values per token ([1, T, …] or [T, …]) go to their places in the batch; nothing else is kept."""
    tokens = layout.rows[0][0].tokens

    def put(parts: list[Any], name: str = "") -> object:
        first = parts[0]
        if isinstance(first, tuple | list):
            return tuple(put(list(part)) for part in zip(*parts, strict=True))
        if not isinstance(first, torch.Tensor):
            return None
        flat = first.shape[:2] != (1, tokens)
        if flat and first.shape[:1] != (tokens,):
            return None
        values = torch.cat([part if flat else part[0] for part in parts])
        if name == "last_hidden_state" and places is not None:
            return values[to_device(torch.from_numpy(places), values.device)][None]
        slots = to_device(torch.from_numpy(layout.slots), values.device)
        return at_places(values, slots, (layout.shape.numel(),) if flat else layout.shape)

    kept = {name: put([output[name] for output in outputs], name) for name in outputs[0]}
    return type(outputs[0])(**{name: value for name, value in kept.items() if value is not None})


def _scatter(outputs: ModelOutput, places: torch.Tensor, shape: torch.Size) -> ModelOutput:
    """Put TRL's per-token figures [1, n] at `places` of [B, L - 1], zero elsewhere. Scalars stay."""

    def put(value: torch.Tensor) -> torch.Tensor:
        if value.dim() != 2:
            return value
        flat = value.new_zeros(shape.numel())
        return flat.index_put((places.to(value.device),), value[0]).view(shape)

    return type(outputs)(**{name: put(value) for name, value in outputs.items()})
