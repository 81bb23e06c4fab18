"""Questions to the model with their pictures: trainer.samples, and rows of data.eval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from packtrain.data.tokens.cache import Document
from packtrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt of the model: its `text` as shown, and its tokens with pictures.

    `expected`: the answer in the data, "" if there is none. `set_name`: its set of data.eval, "" without names.
    """

    text: str
    document: Document
    expected: str = ""
    set_name: str = ""


def make_questions(
    samples: Sequence[int | str], tokenizer: PreTrainedTokenizerBase, system: str | None, held_out: Any
) -> list[Question]:
    """Make the questions of trainer.samples: texts, and numbers of examples of `held_out` (data.eval).

    A text is a user turn (after `system`, data.system) if the tokenizer has a chat template, else plain text to continue. Raises
    UserError for a number without an example, and for an example without a prompt.
    """
    return [
        _of_text(sample, tokenizer, system) if isinstance(sample, str) else _of_example(sample, tokenizer, held_out)
        for sample in samples
    ]


def _of_text(text: str, tokenizer: PreTrainedTokenizerBase, system: str | None) -> Question:
    rendered = text
    if chat := bool(tokenizer.chat_template):
        turns = [{"role": "system", "content": system}] if system else []
        turns += [{"role": "user", "content": text}]
        rendered = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    ids = np.array(tokenizer(rendered, add_special_tokens=not chat)["input_ids"], np.int32)
    return Question(text, Document(ids, np.zeros(len(ids), bool)))


def _of_example(number: int, tokenizer: PreTrainedTokenizerBase, held_out: Any) -> Question:
    where = "trainer.samples"
    if number >= len(held_out):
        fix = f"The first is 0, the last {len(held_out) - 1}."
        raise UserError(f"data.eval has no example {number}", where=where, fix=fix, code="no-such-example")
    if (found := split_example(held_out[number])) is None:
        fix = "Name an example with a question and an answer."
        raise UserError(f"example {number} of data.eval has no prompt", where=where, fix=fix, code="no-such-example")
    prompt, answer = found
    expected = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
    labels = getattr(held_out, "labels", None)
    return Question(_show(prompt, tokenizer), prompt, expected if labels is None or labels[number] else "")


def split_example(example: Any) -> tuple[Document, np.ndarray] | None:
    """Split an example into its prompt and the ids of its last answer. None without a prompt.

    The prompt is everything before this answer. A pair gives the chosen answer.
    """
    document: Document = getattr(example, "chosen", example)
    last = int(np.flatnonzero(document.loss_mask)[-1]) + 1
    begin = last - int(np.argmin([*document.loss_mask[:last][::-1], False]))
    pictures = tuple(picture for picture in document.pictures if picture.end <= begin)
    prompt = Document(document.input_ids[:begin], document.loss_mask[:begin], pictures)
    return (prompt, document.input_ids[begin:last]) if begin else None


def _show(prompt: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt as text, with [picture WIDTH×HEIGHT] for pictures.

    A single user turn is shown without the template's text around it.
    """
    text, at = "", 0
    for picture in prompt.pictures:
        text += str(tokenizer.decode(prompt.input_ids[at : picture.start]))
        text, at = f"{text}[picture {picture.width}×{picture.height}] ", picture.end
    text += str(tokenizer.decode(prompt.input_ids[at:]))
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": "\0"}]
        frame = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)).split("\0")
        frame, text = [part.strip() for part in frame], text.strip()  # a picture's first token may hold a line's end
        text = text.removeprefix(frame[0]).removesuffix(frame[-1]) if text.startswith(frame[0]) else text
    return re.sub("|".join(map(re.escape, tokenizer.all_special_tokens)), "", text).strip()
