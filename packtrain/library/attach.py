"""`attach`: a trainer of TRL, or a plain transformers model, runs its padded forward passes packed, and sees no difference.

The backbone of the model (all but its head) is what is packed: a padded call of it runs as rows of Segments, and its hidden
states come back at their padded places. So whatever is above it, a head, a loss, a pooling, is the model's or the trainer's
own code. Of TRL's call for log-probabilities (`labels=…, fused_lm_head=True`) the head, also TRL's own, is given the labelled
places alone: as on a GPU, where it leaves out the others itself.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from weakref import WeakSet

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel, TrainerCallback
from trl.models.utils import add_hooks, remove_hooks

from packtrain.attention.backends import PER_DOCUMENT, attend_when_packed
from packtrain.attention.segmented_modules import replace_forward, uses_attention_interface
from packtrain.errors import CheckFailed, UserError
from packtrain.library.padded import (
    TAKEN,
    Layout,
    LeftAlone,
    Positions,
    at_places,
    check_call,
    layout_of_call,
    places_with_labels,
    row_of_positions,
)
from packtrain.model.forward import name_backbone
from packtrain.model.load import base_model
from packtrain.packing.collate import IGNORE, to_device
from packtrain.packing.segments import Segments
from packtrain.proof.choice import AUTO, AttentionChoice, choose_attention
from packtrain.proof.comparison import difference, evaluating, refusals_of_a_model, tolerance_of
from packtrain.proof.isolation import random_ids

Share = Literal["auto", True, False]
_MODELS = ("model", "ref_model", "teacher_model")
"""The attributes of TRL's trainers that may hold a model whose forward passes are padded."""
_PADDED_BY = 3  # padding tokens of the trial of positions
_ATTACHED: WeakSet[PreTrainedModel] = WeakSet()


@dataclass(slots=True)
class Stats:
    """What was run packed since `attach`, in all attached models.

    `padded_slots` are B · L of the packed calls, `real_tokens` those of them that are no padding, `row_slots` what the model
    ran on, `shared_tokens` real tokens that were computed with others. `left_alone` counts the calls that ran as they came, by
    the reason. `unrolled` says why prompts cannot be shared, "" if they can.
    """

    calls: int = 0
    padded_slots: int = 0
    real_tokens: int = 0
    row_slots: int = 0
    shared_tokens: int = 0
    left_alone: Counter[str] = field(default_factory=Counter)
    unrolled: str = ""

    def count(self, layout: Layout) -> None:
        """Adds a call that was run in this layout."""
        self.calls += 1
        self.padded_slots += layout.shape.numel()
        self.real_tokens += layout.real
        self.row_slots += layout.tokens
        self.shared_tokens += layout.real - layout.tokens


@dataclass(slots=True)
class Attached:
    """What `attach` returns. `stats` counts; `backends` names the attention of each attached model, once it is chosen."""

    stats: Stats = field(default_factory=Stats)
    _models: list[_PackedModel] = field(default_factory=list)

    @property
    def backends(self) -> tuple[str, ...]:
        """The attention backend of each model (docs/modes.md); "" where it is chosen when training begins."""
        return tuple(model.backend for model in self._models)

    def detach(self) -> None:
        """The models run as before from now on."""
        for model in self._models:
            model.detach()


def attach(
    trainer_or_model: Any,
    *,
    tokens_per_row: int | None = None,
    share_prefix: Share = "auto",
    proof: bool = True,
) -> Attached:
    """Has padded forward passes of a trainer (its model, reference and teacher), or of a model, run packed from now on.

    `tokens_per_row` limits the rows that a call is run as, one after the other; by default a call is one row. What documents
    begin with in common is computed once; `share_prefix="auto"` does so unless dropout is active, whose noise they would then
    share, False never. `proof` measures on the loaded model that documents of a row cannot see each other, by
    8 short forward passes, and chooses the fastest attention for which that holds; without it the first one that runs is taken.

    Raises CheckFailed where no attention is exact for the model, UserError for what is no model or trainer, or attached
    already. Under FSDP and DeepSpeed the trained model is measured, and packed, from when training begins.

        attach(trainer)
        trainer.train()
    """
    if share_prefix not in ("auto", True, False):
        raise UserError(f"share_prefix is {share_prefix!r}", fix='set it to "auto", True or False')
    if tokens_per_row is not None and tokens_per_row < 1:
        raise UserError(f"tokens_per_row is {tokens_per_row}", fix="set it to the tokens of a row, or to None")
    handle = Attached()
    trainer = None if isinstance(trainer_or_model, nn.Module) else trainer_or_model
    models = [trainer_or_model] if trainer is None else [getattr(trainer, name, None) for name in _MODELS]
    models = [one for one in models if isinstance(one, nn.Module)]
    whole = [base_model(cast(nn.Module, extract_model_from_parallel(one))) for one in models]
    if not whole or not all(isinstance(one, PreTrainedModel) for one in whole):
        what = type(trainer_or_model).__name__
        raise UserError(
            f"attach takes a model of transformers or a trainer that has one, not {what}", fix="see docs/library.md"
        )
    wrapped_later = trainer is not None and _is_wrapped_later(trainer)
    try:
        for model, given in {id(one): (one, given) for one, given in zip(whole, models, strict=True)}.values():
            packed = _PackedModel(model, handle.stats, tokens_per_row, share_prefix, proof, _autocast(trainer))
            handle._models.append(packed)
            if not (wrapped_later and model is whole[0]):
                packed.choose(given)
    except Exception:
        handle.detach()
        raise
    if wrapped_later:
        cast(Any, trainer).add_callback(_WhenTrainingBegins(handle._models[0], trainer))
    return handle


def _autocast(trainer: Any) -> torch.dtype | None:
    """What the trainer's autocast computes in; None without."""
    args = getattr(trainer, "args", None)
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else None


def _is_wrapped_later(trainer: Any) -> bool:
    """Whether the trained model gets its weights, or its device, when training begins."""
    engine = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    return bool(engine) and getattr(trainer, "model_wrapped", None) is trainer.model


class _WhenTrainingBegins(TrainerCallback):
    """Chooses the attention of the trained model when its weights are in their place."""

    def __init__(self, packed: _PackedModel, trainer: Any) -> None:
        self._packed, self._trainer = packed, trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not self._packed.backend:
            self._packed.choose(self._trainer.model_wrapped)


class _PackedModel:
    """A model whose padded calls run packed, once its `backend` is chosen."""

    def __init__(
        self,
        model: PreTrainedModel,
        stats: Stats,
        tokens_per_row: int | None,
        share_prefix: Share,
        proof: bool,
        autocast: torch.dtype | None,
    ) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            what = f"{type(model).__name__} has an encoder, whose tokens see later ones"
            raise CheckFailed(what, fix="attach serves causal models")
        name_backbone(model)
        self._backbone = _backbone_of(model)
        if model in _ATTACHED or self._backbone in _ATTACHED:
            raise UserError(f"this {type(model).__name__} is attached already", fix="call detach() of its handle first")
        _ATTACHED.update((model, self._backbone))
        self.model, self.backend = model, ""
        self._stats, self._share, self._proof = stats, share_prefix, proof
        self._tokens_per_row, self._autocast = tokens_per_row, autocast
        self._positions: Positions | None = None
        self._planned: tuple[Layout, np.ndarray | None] | None = None  # by the head's call, and its labelled places
        self._passing = False  # calls run as they come
        self._row: Segments | None = (
            None  # that a call has brought itself; the code above may not pass it on, as bloom's
        )
        self._undo = ExitStack()
        self._undo.callback(_ATTACHED.difference_update, (model, self._backbone))

    def choose(self, engine: Any = None) -> None:
        """Chooses the attention by its proof, the same on all processes, and packs from now on. `engine`: DeepSpeed's.

        Raises CheckFailed where none is exact, or processes would have to gather weights a different number of times.
        """
        choice = self._agreed()
        sharded = any(isinstance(one, DTensor) or hasattr(one, "ds_id") for one in self.model.parameters())
        if sharded:
            self._check_sharded(choice.backend.name)
        self._stats.unrolled = self._stats.unrolled or choice.unshared or ""
        if choice.unshared and self._share is True:
            raise CheckFailed(f"prefixes cannot be shared: {choice.unshared}", fix="set share_prefix to auto")
        if choice.unshared:
            self._share = False
        self._positions = self._what_positions_count()
        zero3 = any(hasattr(weight, "ds_id") for weight in self.model.parameters())
        if zero3 and getattr(engine, "optimizer", None):  # it would expect the calls of the proof again, in every step
            remove_hooks(engine)
            add_hooks(engine)
        self.backend = choice.backend.name
        self._undo.callback(attend_when_packed(self._backbone, self.backend))
        self._undo.callback(_replaced(self._backbone, self._forward_of_backbone()))
        if self.model is not self._backbone:
            self._undo.callback(_replaced(self.model, self._forward_of_model()))

    def detach(self) -> None:
        """From now on the model runs as before `choose`."""
        self.backend = ""
        self._undo.close()

    def _agreed(self) -> AttentionChoice:
        """The choice of the first process, which has all weights where only one has them."""
        scored = self.model.get_output_embeddings() is not None
        subject, shares = self.model if scored else self._backbone, self._share is not False
        choose = functools.partial(choose_attention, model=subject, device=self.model.device, autocast=self._autocast)
        agreed: Any = None
        try:
            if self._proof:
                agreed = choose("auto", pairs=shares)
            else:
                for name in AUTO:
                    with suppress(UserError):  # not available
                        agreed = choose(name, prove=False)
                        break
        except CheckFailed as refusal:
            agreed = refusal
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            agreed = broadcast_object_list([agreed])[0]
        if isinstance(agreed, CheckFailed):
            raise agreed
        return agreed

    def _check_sharded(self, backend: str) -> None:
        if self._tokens_per_row is not None:
            what = "tokens_per_row would have processes gather the sharded weights a different number of times"
            raise CheckFailed(what, fix="leave it away: a call is then one row")
        zero3 = any(hasattr(one, "ds_id") for one in self.model.parameters())
        if backend == PER_DOCUMENT or (zero3 and not uses_attention_interface(self._backbone)):
            what = f"{type(self.model).__name__} runs rows document by document, which sharded weights do not allow"
            raise CheckFailed(what, fix="use DDP or ZeRO-2 with this model, or do not attach")

    def _what_positions_count(self) -> Positions | None:
        """What a padded call of the model without positions counts, measured by its outputs behind padding; None if neither."""
        document, everything = Segments((12,)), torch.ones(1, 12, dtype=torch.int64, device=self.model.device)
        ids = torch.from_numpy(random_ids(self.model, document)[:1]).to(self.model.device)
        columns = document.position_ids().to(ids.device) + _PADDED_BY
        padded, mask = (
            torch.cat([ids[:, :_PADDED_BY], ids], dim=1),
            torch.nn.functional.pad(everything, (_PADDED_BY, 0)),
        )
        with (
            evaluating(self.model, self._autocast),
            torch.no_grad(),
            suppress(CheckFailed),
            refusals_of_a_model("no positions", fix=""),
        ):
            behind = self._hidden(padded, mask)[:, _PADDED_BY:]
            for name, given in (("tokens", {}), ("columns", {"position_ids": columns})):
                alone = self._hidden(ids, everything, **given)
                if difference(behind, alone) <= tolerance_of(self._autocast or self.model.dtype).outputs:
                    return cast(Positions, name)
        return None

    def _hidden(self, ids: torch.Tensor, mask: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The last hidden states, float32, by a call of the whole model, as sharded weights need it."""
        kept: list[Any] = []
        handle = self._backbone.register_forward_hook(lambda *given: kept.append(given[-1]))
        try:
            self.model(input_ids=ids, attention_mask=mask, use_cache=False, **arguments)
        finally:
            handle.remove()
        return kept[0][0].float()

    def _forward_of_backbone(self) -> Callable[..., Any]:
        backbone = self._backbone
        inner, signature = backbone.forward, inspect.signature(type(backbone).forward)

        @functools.wraps(type(backbone).forward)
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = _by_name(signature, args, kwargs)
            row = self._row or call.get("segments")
            if row is not None and self.backend and not self._passing:
                return inner(**_of_row(call, row))
            if self._passing or not self.backend:
                return inner(*args, **kwargs)
            if (row := row_of_positions(call)) is not None:
                return inner(**call | {"segments": row})
            layout, places = self._planned or (None, None)
            try:
                layout = layout or self._layout(call)
            except LeftAlone as reason:
                self._stats.left_alone[str(reason)] += 1
                return inner(*args, **kwargs)
            self._stats.count(layout)
            return self._run(inner, call, layout, places)

        return forward

    def _forward_of_model(self) -> Callable[..., Any]:
        """Labels are not predicted from padding; of TRL's call for log-probabilities the head gets the labelled places alone."""
        inner, signature = self.model.forward, inspect.signature(type(self.model).forward)
        predicting = self.model.get_output_embeddings() is not None  # labels are next tokens
        passes_on = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())

        @functools.wraps(type(self.model).forward)
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            row = kwargs.get("segments")
            if row is None and self.backend and not self._passing:
                row = row_of_positions(_by_name(signature, args, kwargs))
            if row is not None:
                given = kwargs if passes_on else {name: one for name, one in kwargs.items() if name != "segments"}
                with self._holding(row=row):
                    return inner(*args, **given)
            call = _by_name(signature, args, kwargs)
            labels, fused = call.pop("labels", None), call.pop("fused_lm_head", False)
            predicts = predicting and isinstance(labels, torch.Tensor) and labels.dim() == 2
            if not predicts or "shift_labels" in call or not self.backend or self._passing:
                return inner(*args, **kwargs)
            count = call.pop("num_items_in_batch", None)
            try:
                layout = self._layout({name: value for name, value in call.items() if name != "logits_to_keep"})
                places = places_with_labels(labels, layout)
            except LeftAlone as reason:
                self._stats.left_alone[str(reason)] += 1
                with self._holding(passing=True):
                    return inner(*args, **kwargs)
            if not fused:
                with self._holding(planned=(layout, None)):
                    return inner(*args, **kwargs)
            at = to_device(torch.from_numpy(places), labels.device)
            scored = labels[:, 1:].flatten()[at][None] if len(places) else labels.new_full((1, 1), IGNORE)
            shape = labels[:, 1:].shape
            # one place at least, so that the outputs reach every parameter, as DDP needs it
            rows_and_columns = np.unravel_index(places if len(places) else np.zeros(1, dtype=np.int64), shape)
            labelled = layout.slots.reshape(layout.shape)[rows_and_columns].clip(max=layout.tokens - 1)
            with self._holding(planned=(layout, labelled)):
                outputs = inner(**call, shift_labels=scored, fused_lm_head=True, num_items_in_batch=count)
            return _scattered(outputs, at, shape)

        return forward

    def _layout(self, call: Mapping[str, Any]) -> Layout:
        check_call(call)
        if self.backend == PER_DOCUMENT and (call.get("output_hidden_states") or call.get("output_router_logits")):
            raise LeftAlone("hidden states of all layers, of a model that runs document by document")
        layout = layout_of_call(
            call, positions=self._positions, share=self._shares(), tokens_per_row=self._tokens_per_row
        )
        if layout.columns and self.backend == PER_DOCUMENT:
            raise LeftAlone("positions that count padding, of a model that runs document by document")
        return layout

    def _shares(self) -> bool:
        if self._share == "auto":
            return not (self.model.training and any(map(_drops, self.model.modules())))
        return bool(self._share)

    def _run(self, inner: Callable[..., Any], call: dict[str, Any], layout: Layout, places: np.ndarray | None) -> Any:
        """The output of the padded call; if `places` are given, its last hidden states are those at these tokens, [1, n, d]."""
        ids, as_tuple = call["input_ids"], call.get("return_dict") is False
        rest = {name: value for name, value in call.items() if name not in TAKEN}
        with self._holding(passing=True):
            outputs = [inner(**layout.arguments(row, ids), **rest, use_cache=False) for row in range(len(layout.rows))]
        slots = to_device(torch.from_numpy(layout.slots), ids.device)
        joined = _joined(outputs, [segments.tokens for segments, _ in layout.rows], slots, layout.shape, places)
        return joined.to_tuple() if as_tuple else joined

    @contextmanager
    def _holding(self, **values: Any) -> Iterator[None]:
        """Inside the block the backbone runs what is `planned`, runs this `row`, or is `passing` calls on."""
        before = {f"_{name}": getattr(self, f"_{name}") for name in values}
        vars(self).update({f"_{name}": value for name, value in values.items()})
        try:
            yield
        finally:
            vars(self).update(before)


def _backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """All of `model` but its head: what takes token ids and gives hidden states."""
    decoder = cast(Any, model).get_decoder()
    takes_embeddings = model.config.get_text_config() is not model.config  # the text model beside those of other media
    whole = takes_embeddings or not isinstance(decoder, PreTrainedModel)
    return cast(PreTrainedModel, model.base_model) if whole else decoder


def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """`replace_forward`; the undo function leaves `module` alone where another library has wrapped that forward since.

    Ours then passes all calls on (accelerate's autocast would be lost otherwise).
    """
    undo = replace_forward(module, forward)
    ours = module.__dict__["forward"]
    return lambda: undo() if module.__dict__.get("forward") is ours else None


def _of_row(call: Mapping[str, Any], row: Segments) -> dict[str, Any]:
    """The call of a row of the user's own. Raises UserError for other tokens than the row has."""
    given = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    if given.shape[:2] != (1, row.tokens):
        what = f"segments are of a row [1, {row.tokens}], and the tokens of the call {list(given.shape[:2])}"
        raise UserError(what, fix="call the model with one row at a time, and its own segments")
    positions = call.get("position_ids")
    positions = to_device(row.position_ids(), given.device) if positions is None else positions
    return {**call, "position_ids": positions, "segments": row}


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method, without self, by name."""
    names = list(signature.parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _drops(module: nn.Module) -> bool:
    """Whether `module` draws random numbers while training."""
    if isinstance(module, _DropoutNd):
        return module.p > 0 and module.training
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def _joined(
    outputs: list[Any], lengths: list[int], slots: torch.Tensor, shape: torch.Size, places: np.ndarray | None
) -> Any:
    """The rows' outputs as one: what is per token ([1, T, …] or [T, …]) at its places in the batch; nothing else is kept."""

    def put(parts: list[Any], name: str = "") -> Any:
        first = parts[0]
        if isinstance(first, tuple | list):
            return tuple(put(list(one)) for one in zip(*parts, strict=True))
        if not isinstance(first, torch.Tensor):
            return None
        flat = first.dim() < 2 or first.shape[0] != 1 or first.shape[1] != lengths[0]
        if flat and first.shape[:1] != (lengths[0],):
            return None
        values = torch.cat([part if flat else part[0] for part in parts])
        if name == "last_hidden_state" and places is not None:
            return values[to_device(torch.from_numpy(places), values.device)][None]
        return at_places(values, slots.to(values.device), (shape.numel(),) if flat else shape)

    kept = {name: put([one[name] for one in outputs], name) for name in outputs[0]}
    return type(outputs[0])(**{name: value for name, value in kept.items() if value is not None})


def _scattered(outputs: Any, places: torch.Tensor, shape: torch.Size) -> Any:
    """TRL's per-token figures [1, n] at `places` of [B, L - 1], zero elsewhere; scalars stay."""

    def put(value: torch.Tensor) -> torch.Tensor:
        if value.dim() != 2:
            return value
        flat = value.new_zeros(shape.numel())
        if not len(places):  # connected to every parameter
            return (flat + value.sum() * 0).view(shape) if value.is_floating_point() else flat.view(shape)
        return flat.index_put((places.to(value.device),), value[0]).view(shape)

    return type(outputs)(**{name: put(value) for name, value in outputs.items()})
