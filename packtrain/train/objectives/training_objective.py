"""Bases of objectives: the interface to a run, and objectives with a reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, reduce
from filelock import FileLock
from transformers import PreTrainedModel

from packtrain.config.schema import Model, Peft, RunConfig
from packtrain.data.tokens.cache import cache_folder
from packtrain.errors import CheckFailed, UserError, boundary, naming
from packtrain.model.adapters import add_reference
from packtrain.model.load import base_model, check_positions, load_model
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks, reading_mesh, spread
from packtrain.model.weights import weights_hash
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import RowLayout
from packtrain.packing.schedule import Schedule
from packtrain.plan.known_model import reference_of
from packtrain.proof.choice import AttentionChoice, prove_backend
from packtrain.proof.isolation import TREE
from packtrain.system import aside, publish
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import AnswerLoss, Loss, ReferenceLoss, Setup
from packtrain.train.preflight import choose_on_all_ranks, same_everywhere
from packtrain.train.sight import exhibits_of
from packtrain.train.verify.loss_proofs import check_answer_forward, check_first_loss

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared

ReferenceSteps = TypeVar("ReferenceSteps", bound=Steps)
"""Steps with a field `reference`."""


@dataclass(frozen=True, slots=True)
class Start:
    """A run before step 1, as the checks of an objective see it.

    `attention`: the model's original implementation. `preflight`: verify.preflight; without it only steps that training needs run.
    """

    trainer: StepTrainer
    log: Log
    ranks: Ranks
    precision: Precision
    attention: str
    preflight: bool


class TrainingObjective:
    """Parts of a run that depend on the objective, in the order of use.

    A subclass sets `loss_class`. Everything else fits documents without a reference.
    """

    loss_class: Callable[..., Loss]
    """The class of the loss. Its arguments are a Setup and the group `objective` of the config."""
    steps_class: type[Steps] = Steps
    why_not_shared = ""
    """Why equal beginnings (prompts of pairs, prefixes of documents) are not computed once. Empty if they are."""
    shares_unless_told = False
    """Whether rows share beginnings if packing.share_prefix is not set."""
    ranks_per_row = 1
    """Ranks that split a row, at most (strategy.sequence_parallel)."""
    others: tuple[tuple[PreTrainedModel, str], ...] = ()
    """Other models that run the same rows, each with its attention backend."""

    def __init__(self, config: RunConfig) -> None:
        self.objective, self.packing, self.batch = config.objective, config.packing, config.batch
        self.layout: RowLayout = "padding" if config.packing.mode == "padding" else "flat"

    def longest_document(self, data: Any) -> int:
        """Return the tokens of the longest document. The model must have as many positions."""
        return int(data.lengths.max())

    def take_reference(self, run: Prepared) -> dict[str, str]:
        """Load the reference, if any, before the model is sharded.

        Returns facts about it by config key. They must be equal in a run that resumes.
        """
        return {}

    def why_repeated(self, run: Prepared) -> str:
        """Return why documents of an example cannot share their common beginnings, "" if they can."""
        return ""

    def decide_attention(self, run: Prepared) -> AttentionChoice:
        """Choose the backend for packed rows, and decide whether rows share beginnings (`layout`).

        Raises CheckFailed if packing.share_prefix is true and the backend cannot share.
        """
        model, ranks, autocast = base_model(run.model), run.ranks, run.precision.autocast
        wanted, prove = run.config.model.attention, run.config.verify.preflight
        asked, packed = self.packing.share_prefix, self.packing.mode == "packed"
        joins = packed and (run.several or (run.data.stream is not None and run.may_turn))
        repeated = self.why_repeated(run) if joins else "packing.share_prefix=false"
        share = self.shares_unless_told if asked is None else asked
        choice = choose_on_all_ranks(
            wanted,
            model,
            ranks,
            autocast,
            prove=prove,
            pairs=share or not repeated,
            must_share=bool(asked) or (packed and run.several and not repeated),
            exhibits=exhibits_of(run),
        )
        if not share and repeated:
            self.why_not_shared = repeated
            return choice
        reason = choice.why_not_shared
        if reason is None:  # not tried yet, since nothing was proved
            reason, _ = prove_backend(choice.backend.name, model, autocast, TREE)
        self.layout, self.why_not_shared = "flat" if reason else "shared", reason
        same_everywhere(self.layout, "layout of rows", "packing.share_prefix", ranks.world_size)
        if reason and asked:
            what = f"{'prompts' if self.shares_unless_told else 'prefixes'} cannot be shared: {reason}"
            raise CheckFailed(what, where="packing.share_prefix", fix="set it to false", code="sharing-inexact")
        return choice

    def slots(self, data: Any) -> np.ndarray:
        """Return the token slots of each example in a row, int [examples].

        A subclass raises UserError if one exceeds a micro-batch.
        """
        return data.lengths

    def check_longest(self, thing: str, longest: int, *, documents: int = 1) -> None:
        """Raise UserError if the `thing`, of `documents` in a row, has more slots than a micro-batch."""
        _, most = self.batch.limits(self.packing.mode)
        if most is not None and longest > (most := most * self.ranks_per_row):
            raise UserError(
                f"{thing} takes {longest} token slots, a micro-batch has {most}",
                where="batch.tokens_per_device",
                fix=f"set batch.tokens_per_device to at least {-(-longest // self.ranks_per_row)}, or data.max_length to {most // documents}",
                code="example-too-long",
            )

    def steps(
        self, data: Any, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> Steps:
        """Return the optimizer steps over a data set. `evaluation`: the steps evaluate, and train nothing."""
        return self.steps_class(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)

    def loss(self, setup: Setup) -> Loss:
        """Make the loss. It patches the forward of the model."""
        return type(self).loss_class(setup, self.objective)

    def prove(self, start: Start) -> None:
        """Check the trainer before step 1. The base class checks the forward of an AnswerLoss."""
        loss, trainer = start.trainer.loss, start.trainer
        if start.preflight and isinstance(loss, AnswerLoss):
            check_answer_forward(loss, trainer.steps, trainer.settings.first_step, start.attention)


def load_frozen(run: Prepared, model: Model, key: str) -> PreTrainedModel:
    """Load a model without updates, not spread yet. Its errors name the config key `key`."""
    mesh, seed = reading_mesh(run.ranks), run.config.trainer.seed
    with naming(key):
        loaded = load_model(model, Peft(), run.tokenizer, seed=seed, mesh=mesh)
    if hasattr(run, "data"):  # `packtrain verify` makes its own rows
        check_positions(loaded, run.longest, padded=run.config.packing.mode == "padding", key=key)
    return loaded.requires_grad_(False)


class ReferenceObjective(TrainingObjective):
    """Base of objectives with a reference: loads it, and precomputes its log-probabilities.

    `identity` names the reference in the cache of precomputed log-probabilities.
    """

    loss_class: Callable[..., ReferenceLoss]
    """Its third argument is the reference, a model or None."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._model, self._peft = config.model, config.peft
        self.reference = reference_of(config.model, config.peft, config.objective, config.strategy)
        self._cache = cache_folder(config.data.cache_dir) / "reference"
        self._reference_model: PreTrainedModel | None = None
        self.identity = ""

    @property
    def losses_in_words(self) -> str:
        """Name the losses, with their weights, for the log."""
        return " + ".join(self.objective.losses) or self.objective.kind

    def take_reference(self, run: Prepared) -> dict[str, str]:
        """See TrainingObjective.

        Raises UserError if the model asks for a loss of its routers: answers have none.
        """
        model = run.model
        if getattr(base_model(model).config.get_text_config(), "output_router_logits", False):
            what = f"packtrain {self.objective.kind} adds no load-balancing loss of routers, which the model asks for"
            fix = "set it to false: the preferences are then trained without it"
            raise UserError(what, where="model.config.output_router_logits", fix=fix, code="router-loss-of-answers")
        if self.reference.kind == "adapters":
            add_reference(cast(Any, model), self.reference.adapters)
        weights = ""
        if self.reference.kind in ("model", "path"):
            other = replace(self._model, path=self.objective.reference, init="pretrained", experts="auto")
            loaded = load_frozen(run, other if self.reference.kind == "path" else self._model, "objective.reference")
            weights = weights_hash(loaded)
            spread(loaded, run.ranks, run.precision.autocast)
            self._reference_model = loaded.eval()
        weights = weights or weights_hash(model)
        self.identity = identity_of_reference(model, self._peft, weights)
        return {"objective.reference": f"one of weights with hash {weights[:12]}"}

    @property
    def logps_depend_on(self) -> tuple[object, ...]:
        """Options that change log-probabilities of answers. They are part of the cache's key."""
        return ()

    def loss(self, setup: Setup) -> ReferenceLoss:
        """See TrainingObjective."""
        return type(self).loss_class(setup, self.objective, self._reference_model)

    def with_reference(self, steps: ReferenceSteps, start: Start) -> ReferenceSteps:
        """Return `steps` with the reference's log-probabilities of every example.

        The model, before step 1, is the reference. It runs the rows of the first pass: in 16 bits an answer's log-probability depends on the row
        it is in.
        """
        shape = (len(steps.data), 2)[: len(cast(ReferenceLoss, start.trainer.loss).answers)]
        return replace(steps, reference=self.precompute(steps, start, shape, steps.first_pass()))

    def precompute(
        self,
        steps: Steps,
        start: Start,
        shape: tuple[int, ...],
        parts: Iterable[tuple[np.ndarray, MicroBatch]],
        *depends_on: object,
    ) -> np.ndarray:
        """Read or compute the log-probabilities of `parts`, float32 of this `shape`.

        Computed ones are kept in a file of the cache. `parts` are this process's micro-batches of `steps`, each with the places of its examples in the result. The name of the file is a hash
        of everything that the values depend on, `depends_on` too.
        """
        ranks, loss = start.ranks, cast(ReferenceLoss, start.trainer.loss)
        file = self._cache / f"{self._cache_key(steps, start, *depends_on)}.npy"
        with waiting("rank 0 to read the reference"):
            (known,) = broadcast_object_list([_read(file, shape) if ranks.main else None])
        if known is not None:
            return known
        values = torch.zeros(shape, device=ranks.device)
        for numbers, batch in parts:
            if len(numbers) or ranks.sharded:  # with sharded weights every rank makes the same number of calls
                start.trainer.clock.enter("proof")
                own = torch.stack(loss.policy_logps(batch), dim=1).squeeze(1).float()[: len(numbers)]
                if batch.part == 0:  # all ranks have the values of a row that they split
                    values[numbers] = own
        with waiting("all ranks to compute their part of the reference"):
            reduced = cast(torch.Tensor, reduce(values, "sum")).cpu().numpy()
        if ranks.main:
            what, fix = "the reference's log-probabilities cannot be written", "Free some space, or set data.cache_dir."
            with boundary(what, str(file.parent), fix, code="reference-unwritable"):
                file.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(file.with_suffix(".lock")):  # another run may compute the same
                    with aside(file).open("wb") as written:
                        np.save(written, reduced)
                    publish(aside(file), file)
        return reduced

    def _cache_key(self, steps: Steps, start: Start, *depends_on: object) -> str:
        """Hash everything that precomputed log-probabilities depend on. In 16 bits that includes the rows, and the device that rounds."""
        precision, loss, rows = start.precision, start.trainer.loss, None
        if loss.compute_dtype.itemsize == 2:
            device, backend = start.ranks.device, start.trainer.settings.backend
            named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            computer = f"{named}, torch {torch.__version__}"
            rows = (steps.schedule.settings, steps.layout, backend, start.ranks.world_size, computer, *loss.changes)
        formats, kind = (precision.weights, precision.autocast), self.objective.kind
        known = (kind, steps.data.fingerprint, self.identity, formats, rows, *self.logps_depend_on, *depends_on)
        return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()

    def prove(self, start: Start) -> None:
        """Precompute the reference's log-probabilities if configured. Then check the forward and the first loss."""
        trainer, log, dropout = start.trainer, start.log, self._peft.dropout
        held_to = {
            "model": "a second copy of the model",
            "adapters_off": "the model with its adapters off",
            "adapters": f"the model with the adapters of {self.reference.adapters}",
            "precomputed": "log-probabilities of the model before training, computed once",
            "path": self.objective.reference,
        }[self.reference.kind]
        log.fact("loss", f"{self.losses_in_words}, beta {self.objective.beta:g}, against {held_to}")
        if dropout:  # TRL turns dropout off
            log.fact("dropout", f"off, peft.dropout={dropout:g} too, so that preferences are not noisy")
        if self.reference.kind == "precomputed":
            trainer.steps = self.with_reference(trainer.steps, start)
            for name, steps in trainer.evaluation.items():
                trainer.evaluation[name] = self.with_reference(steps, start)
        super().prove(start)
        if start.preflight and self.reference.at_start:
            check_first_loss(cast(ReferenceLoss, trainer.loss), trainer.steps.first_batch(trainer.settings.first_step))


def _read(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """Read the values of an earlier run. None if there are none, or the file is damaged."""
    with suppress(OSError, ValueError, EOFError):
        if (values := np.load(file)).shape == shape:
            return values
    return None


def identity_of_reference(model: PreTrainedModel, peft: Peft, weights: str) -> str:
    """Return the part of the cache key that names the reference.

    It has the hash of its `weights`, the settings of `model`, and LoRA's scale.
    """
    settings = base_model(model).config.to_dict()
    kept = {name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")}
    scale = f"{peft.alpha / peft.r} {peft.options or ''}".strip() if peft.kind == "lora" else 1
    return f"{weights} {json.dumps(kept, sort_keys=True, default=str)} {scale}"
