"""What makes a training pointless, looked for in a sample of its documents in a few milliseconds: for the start of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.data.tokens.encode import UNTRAINED, UNTRAINED_ONCE_CUT
from packtrain.inspect.audit import POINTLESS

_SAMPLE = 128


def pointless(data: TokenDataset | PairDataset, tokenizer: Any, max_length: int | None) -> list[str]:
    """Sentences for the user; none for data that can be learned from. `tokenizer` is that of transformers."""
    documents = data.documents if isinstance(data, PairDataset) else data
    report, found = documents.report, list[str]()
    untrained = report.dropped.get(UNTRAINED, 0) + report.dropped.get(UNTRAINED_ONCE_CUT, 0)
    if untrained >= POINTLESS * report.rows:
        found.append(
            f"{untrained:,} of {report.rows:,} rows have nothing to train and are left out (data.loss_on, data.max_length)"
        )
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {*tokenizer.all_special_ids, *(one for one, token in added.items() if getattr(token, "special", False))}
    sample = np.unique(np.linspace(0, len(documents) - 1, min(_SAMPLE, len(documents))).astype(int)).tolist()
    whole = [documents[one] for one in sample if max_length is None or documents.lengths[one] < max_length]
    endless = sum(1 for one in whole if control.isdisjoint(one.input_ids[one.loss_mask].tolist()))
    if whole and endless >= POINTLESS * len(whole):
        found.append(
            f"{endless:,} of {len(whole):,} documents that were looked at train no end of an answer, such as"
            f" {tokenizer.eos_token or 'EOS'}: the model would not learn to stop"
        )
    return [f"data: {one}; packtrain inspect shows which" for one in found]
