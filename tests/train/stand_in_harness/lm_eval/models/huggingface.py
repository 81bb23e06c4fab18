"""lm_eval's model of transformers."""

from __future__ import annotations

from typing import Any

import torch


class HFLM:
    """A model that lm_eval asks."""

    def __init__(self, *, pretrained: Any, tokenizer: Any, batch_size: int | str) -> None:
        self.model, self.tokenizer = pretrained.eval(), tokenizer
        self.mixed_precision_dtype = None
        self._rank, self._world_size = 0, 1
        tokenizer.pad_token = "changed"
        pretrained.tie_weights()

    @property
    def rank(self) -> int:
        """The rank that it was given."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks that it was given."""
        return self._world_size

    def gather_object(self, own: Any) -> Any:
        """Return the values of all ranks on rank 0."""
        every: Any = [None] * self.world_size if self.rank == 0 else None
        torch.distributed.gather_object(own, every)
        return every

    def loglikelihood(self, requests: Any) -> Any:
        """Not asked here."""

    loglikelihood_rolling = loglikelihood

    def generate_until(self, requests: Any) -> list[float]:
        """The mean logit of the last token of each request."""
        asked = [self.tokenizer(word, return_tensors="pt")["input_ids"] for word in requests]
        with torch.no_grad():
            return [float(self.model(ids).logits[0, -1].float().abs().mean()) for ids in asked]
