"""The three modes of preference optimisation against its definition: every pair alone, padded, under the model's own attention.

Losses and gradients are those of the configured objective, by the trainer that a run has and so by TRL's own code, in place
of cross-entropy over documents (modes.py). The pairs are random tokens; the reference is the model itself, off by some nats
an answer, so that no pair is at a zero margin. Losses that sort the pairs of a step take all of them at once everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import DPOConfig

from packtrain.attention.backends import own_attention
from packtrain.config.schema import Batch, Packing, RunConfig
from packtrain.data.dataset import Document, PairDataset, Preference
from packtrain.model.load import base_model
from packtrain.model.precision import autocast_of, precision_of
from packtrain.packing.schedule import make_schedule
from packtrain.packing.segments import Segments
from packtrain.plan.dpo_reference import reference_of
from packtrain.proof.isolation import evaluating, joined, vocabulary_of
from packtrain.train.dpo import PackedDPOTrainer, objective_arguments
from packtrain.train.dpo_start import check_pair_forward
from packtrain.train.loader import MicroBatch, PairSteps
from packtrain.train.loop import LoopSettings, StopRequest, training_arguments
from packtrain.train.verify.modes import Comparison, Layouts, Measure, compare, lengths_for, longest_alone

_SHAPES = ((10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (18, 6, 11))  # tokens of prompt, chosen, rejected
_FIRST_BATCH = 3  # pairs in the first of two micro-batches
_OFF = 3.0  # nats, standard deviation of the reference's log-probabilities around the model's


def compare_pair_modes(
    config: RunConfig, trainer: PackedDPOTrainer, backend: str | None, *, shares: bool
) -> Comparison:
    """Compares the modes on the model of `trainer_on_random_pairs`, adapters included; `shares` prompts too.

    Raises as modes.compare, and CheckFailed where the output head is not the model's (`check_pair_forward`).
    """
    model, pairs = cast(Any, trainer.model), cast(_Pairs, cast(PairSteps, trainer.steps).data)
    trainer.precompute_ref_logps, trainer.ref_model = True, None
    reference = _off_by_some(said_of_each(trainer))
    padded = replace(cast(PairSteps, trainer.steps), reference=reference)
    flat, shared = replace(padded, layout="flat"), replace(padded, layout="shared")
    every = list(range(len(pairs)))
    parts = [every] if config.objective.sorting_losses else [every[:_FIRST_BATCH], every[_FIRST_BATCH:]]
    layouts = Layouts(
        lengths=tuple(len(side.input_ids) for pair in pairs.pairs for side in (pair.chosen, pair.rejected)),
        padding=[padded.collate(part) for part in parts],
        padding_free=[flat.collate(part) for part in parts],
        packed=[flat.collate(every)],
        borderless=[_borderless(flat.collate(every), longest_alone(base_model(model)))],
        shared=[shared.collate(every)] if shares else None,
    )
    check_pair_forward(trainer, own_attention(base_model(model)))
    alone = [padded.collate(part) for part in (parts if len(parts) == 1 else [[number] for number in every])]
    return compare(_PairLosses(model, autocast_of(config.trainer.mixed_precision), trainer, alone), layouts, backend)


@dataclass(frozen=True)
class _PairLosses(Measure):
    """Losses of micro-batches of one step, by `trainer`; `each` are its pairs alone, padded."""

    trainer: PackedDPOTrainer
    each: Sequence[MicroBatch]

    def alone(self) -> float:
        return self.together(self.each)

    def together(self, batches: Sequence[MicroBatch]) -> float:
        counts = torch.tensor([batch.counts for batch in batches]).sum(0)
        total = 0.0
        for batch in batches:
            kind = "flattened row" if "layout" in batch.inputs else "padded batch"
            with self.running(f"cannot run a {kind} of pairs"):
                loss = self.trainer.loss_of(self.model, batch, counts.to(self.model.device))
            total += self.backward(loss / self.trainer.accelerator.num_processes)
        return total


class _Pairs:
    """In the place of a PairDataset."""

    def __init__(self, pairs: list[Preference]) -> None:
        self.pairs = pairs
        self.lengths = np.array([len(p.chosen.input_ids) + len(p.rejected.input_ids) for p in pairs], np.int32)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Preference:
        return self.pairs[index]


def random_pairs(model: Any) -> list[Preference]:
    """Pairs of odd lengths, one of them longer than windows (see modes.lengths_for), none than the positions."""
    rng, vocabulary = np.random.default_rng(0), vocabulary_of(base_model(model))
    longest = max(lengths_for(base_model(model)))
    shapes = [*_SHAPES, (longest - 20, 20, 9)] if longest > 40 else _SHAPES

    def drawn(length: int) -> np.ndarray:
        return rng.integers(0, vocabulary, length, dtype=np.int32)

    pairs = []
    for prompt, *answers in shapes:
        asked = drawn(prompt)
        sides = [np.concatenate([asked, drawn(length)])[:longest] for length in answers]
        documents = [Document(ids, np.arange(len(ids)) >= prompt) for ids in sides]
        pairs.append(Preference(documents[0], documents[1], prompt if prompt > 1 else 0))
    return pairs


def trainer_on_random_pairs(
    config: RunConfig, model: Any, tokenizer: PreTrainedTokenizerBase, reference: PreTrainedModel | None
) -> PackedDPOTrainer:
    """The trainer of a run of one step of all pairs, padded, on the whole model whatever the strategy, against `reference`.

    `model` has no forward of packtrain's yet.
    """
    pairs, on_cpu = _Pairs(random_pairs(model)), base_model(model).device.type == "cpu"
    batch = Batch(examples_per_step=len(pairs), examples_per_device=len(pairs))
    schedule = make_schedule(pairs.lengths, Packing(mode="padding_free"), batch, max_steps=1)
    pad = int(cast(Any, tokenizer.pad_token_id) or 0)
    steps = PairSteps(cast(PairDataset, pairs), schedule, "padding", pad)
    arguments = training_arguments(
        replace(config.trainer, checkpoint_every=None, eval_every=None),
        config.optim,
        config.tracking,
        precision_of(model, config.trainer.mixed_precision),
        strategy="ddp",
        step_timeout=config.topology.step_timeout,
        total_steps=1,
        on_cpu=on_cpu,
        evaluates=False,
        starts_anew=True,
    )
    kind = reference_of(config.model, config.peft, config.objective, config.strategy).kind
    own = objective_arguments(config.objective, precomputed=kind == "precomputed")
    folder = Path(config.trainer.output_dir)
    settings = LoopSettings(
        steps, None, StopRequest(), folder, {}, autocast=autocast_of(config.trainer.mixed_precision)
    )
    return PackedDPOTrainer(model, DPOConfig(**arguments, **own), tokenizer, settings=settings, reference=reference)


def said_of_each(trainer: PackedDPOTrainer) -> np.ndarray:
    """float32 [pairs, 2]: what the model says of each pair alone."""
    steps = cast(PairSteps, trainer.steps)
    said = []
    with torch.no_grad(), evaluating(base_model(trainer.model)):
        for number in range(len(steps.data)):
            said.append(torch.stack(trainer.policy_logps(steps.collate([number])), dim=1).float().cpu())
    return torch.cat(said).numpy()


def _off_by_some(said: np.ndarray) -> np.ndarray:
    return said + np.random.default_rng(0).normal(0, _OFF, said.shape).astype(np.float32)


@dataclass(frozen=True)
class _Borderless(Segments):
    """Fewer documents by its lengths than its positions are those of."""

    positions: tuple[int, ...] = ()

    def position_ids(self) -> torch.Tensor:
        return torch.tensor(self.positions)[None]


def _borderless(batch: MicroBatch, most: int | None) -> MicroBatch:
    layout = batch.inputs["layout"]
    segments = layout.segments
    whole = _Borderless(joined(segments.lengths, most), positions=tuple(segments.position_ids()[0].tolist()))
    return replace(batch, inputs={**batch.inputs, "layout": replace(layout, segments=whole)})
