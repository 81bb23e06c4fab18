"""Padded batches of pairs by TRL's own collator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from trl.trainer.dpo_trainer import DataCollatorForPreference

from packtrain.data.dataset import Preference


def trl_batch(pairs: Sequence[Preference]) -> dict[str, torch.Tensor]:
    """The padded batch of TRL's own collator."""
    rows = []
    for pair in pairs:
        prompt = int((~pair.chosen.loss_mask).sum())
        both = {"chosen_ids": pair.chosen, "rejected_ids": pair.rejected}
        ids = {name: document.input_ids[prompt:].tolist() for name, document in both.items()}
        rows.append({"prompt_ids": pair.chosen.input_ids[:prompt].tolist(), **ids})
    return DataCollatorForPreference(pad_token_id=0)(rows)
