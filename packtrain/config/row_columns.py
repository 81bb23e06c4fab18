"""packtrain's names for the columns of rows, by format; `data.columns` maps them to the file's."""

from __future__ import annotations

REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "ranked": ("answers",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "tokenised": ("input_ids",),
}
PROMPTS = ("prompt", "conversations", "instruction")
"""Columns that may hold the prompt of a preference."""
READ_TOO = {"preference": PROMPTS, "ranked": (*PROMPTS, "scores", "ranks")}
"""Columns beside the required ones and OPTIONAL that only this format reads."""
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
OPTIONAL = ("tools", "system", "input", "history", "attention_mask", "chat_template_kwargs", *MASKS)
_OF_FORMATS = (*REQUIRED.values(), *READ_TOO.values())
COLUMNS = tuple(dict.fromkeys((*(name for names in _OF_FORMATS for name in names), *OPTIONAL)))
"""All of them."""
