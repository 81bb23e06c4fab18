"""What the objectives of preference pairs share: how a pair is laid out in a row, decided once by proof, and what room it takes."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import PairDataset
from packtrain.errors import CheckFailed, UserError
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.packing.collate import PairRows
from packtrain.proof.choice import AttentionChoice, prove_pairs
from packtrain.train.preflight import choose_together, same_everywhere


class PairObjective:
    """Parts of a TrainingObjective. `unshared` says why prompts are not computed once, where they are not."""

    def __init__(self, packing: Packing, batch: Batch) -> None:
        self._packing, self._batch = packing, batch
        self.layout: PairRows = "padding"
        self.unshared = ""

    def longest_document(self, data: PairDataset) -> int:
        """Tokens of the longest prompt with an answer."""
        return int(data.documents.lengths.max())

    def decide_attention(
        self, wanted: str, model: PreTrainedModel, ranks: Ranks, precision: Precision, *, prove: bool
    ) -> AttentionChoice:
        """Which backend serves packed rows of `model`, and whether prompts are computed once for both answers.

        Raises CheckFailed if packing.share_prefix is true and the backend cannot share prompts.
        """
        share = self._packing.share_prefix
        decision = choose_together(wanted, model, ranks, precision.autocast, prove=prove, pairs=share is not False)
        if share is False:
            self.layout, self.unshared = "flat", "packing.share_prefix=false"
            return decision
        lack = decision.unshared
        if lack is None:  # not tried yet, since nothing was proved
            lack, _ = prove_pairs(decision.backend.name, model, precision.autocast)
        layout = "shared" if not lack else "flat"
        same_everywhere(layout, "layout of pairs", "packing.share_prefix", ranks.world_size)
        if lack and share:
            raise CheckFailed(f"prompts cannot be shared: {lack}", where="packing.share_prefix", fix="set it to false")
        self.layout, self.unshared = layout, lack
        return decision

    def slots(self, data: PairDataset) -> np.ndarray:
        """int32 [pairs]: token slots of each. Raises UserError if the longest exceeds a micro-batch: pairs are never split."""
        # padded a pair takes two rows as long as the longer of its documents
        longer = 2 * data.documents.lengths.reshape(-1, 2).max(axis=1)
        slots = {"padding": longer, "flat": data.lengths, "shared": data.shared_lengths}[self.layout].astype(np.int32)
        longest, (_, most) = int(slots.max(initial=0)), self._batch.limits(self._packing.mode)
        if most is not None and longest > most:
            raise UserError(
                f"the longest pair takes {longest} token slots, a micro-batch has {most}",
                where="batch.tokens_per_device",
                fix=f"set batch.tokens_per_device to at least {longest}, or data.max_length to {most // 2}",
            )
        return slots
