"""Parse rows of preference pairs, and single answers with a label.

A pair becomes two examples that begin with the same prompt. We read these forms, as in TRL
(https://huggingface.co/docs/trl/dataset_formats#preference), LLaMA-Factory, axolotl and ms-swift:

    prompt, chosen, rejected          strings, lists of messages, or a string and two conversations
    chosen, rejected                  the prompt is their common beginning: messages, or the characters of two strings
    conversations, chosen, rejected   ShareGPT's turns, then one turn for each answer
    messages, chosen, rejected        axolotl's: the prompt's messages, then an answer each (the last turn of whole conversations)
    instruction, chosen, rejected     the user's request, with `input`, `history` and `system` (Alpaca's columns)
    messages, rejected_response       ms-swift's: a conversation, and a replacement for everything after its last question; also
                                      rejected_messages (a whole conversation), and Alpaca's columns instead of messages

with `tools`, `system` and chat_template_kwargs beside messages. Single answers with a label (packtrain kto) are rows
of prompt and completion, of messages whose last turn is the answer, or of Alpaca's columns. Pairs are split into their two answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from packtrain.config.schema import Format
from packtrain.data.formats.columns import CHOSEN, LABELS, PROMPTS, Row, parse_json
from packtrain.data.formats.conversations import (
    READERS,
    Conversation,
    PromptCompletion,
    ask_by_columns,
    make_conversation,
    refuse_chat_columns,
    refuse_media,
)
from packtrain.data.formats.messages import (
    Messages,
    read_message,
    read_messages,
    refuse_closed_turn,
    with_system,
)
from packtrain.data.sources.chunks import BadRow, wrong_type

ASKING = ("system", "developer", "user")
"""Roles that cannot begin an answer."""
_TURNS = re.compile(r"""\s*(\[\s*)?\{\s*"(role|from|content|value)"|\s*\[\s*\]""")
"""Match the beginning of messages as JSON."""
Answered = Conversation | PromptCompletion
"""A prompt with an answer."""


def read_preference(row: Row) -> tuple[Answered, Answered]:
    """Return the prompt with the better answer and with the worse one. Raises BadRow naming the field."""
    refuse_media(row)
    if not row.has("chosen"):
        return _pair_conversation(row)
    prompt = _find_prompt(row)
    parts = [row.take(ours) for ours in ("chosen", "rejected", prompt) if ours]
    is_plain = prompt in (None, "prompt") and all(isinstance(part, str) for part in parts)
    return _pair_strings(row) if is_plain else _pair_messages(row, prompt)


def read_margin(row: Row) -> float:
    """Return the row's margin of the chosen answer over the rejected one, default 0. Raises BadRow unless it is a number."""
    value = row.optional("margin")
    if value is None or value == "":  # csv has an empty string here
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= 3.4e38:  # NaN fails too
        raise wrong_type("a number that float32 holds", value, row.name("margin"))
    return number


def read_unpaired(row: Row, format: Format) -> tuple[list[Answered], bool]:
    """Read one labelled answer, or a pair as two answers. The flag is the first one's label. Raises BadRow naming the field."""
    if format == "preference":
        return [*read_preference(row)], True
    refuse_media(row)
    value = row.take("label")  # csv has text here
    label = LABELS.get(str(value).lower()) if isinstance(value, (bool, int, str)) else None
    if label is None:
        raise wrong_type("true (desirable) or false", value, row.name("label"))
    example = READERS[format](row)
    if isinstance(example, Conversation):
        example = _find_answer(example)
    assert isinstance(example, (Conversation, PromptCompletion))
    return [example], label


def _find_answer(conversation: Conversation) -> Conversation:
    """Set where the answer of a conversation begins, by default at the last turn."""
    messages = conversation.messages
    start = len(messages) - 1 if conversation.answer_from is None else conversation.answer_from
    if not 0 < start < len(messages):
        raise BadRow("no prompt", "there is no message before the answer", f"messages[{max(start, 0)}]")
    if (role := messages[start]["role"]) in ASKING:
        fix = "The last turn must be what the assistant says; the label is about it."
        raise BadRow("not an answer", f"the answer is what the {role} says", f"messages[{start}]", fix)
    if any(message.get("weight") == 0 for message in messages[start:]):
        raise BadRow("weight", "the answer is not to be trained; take the row out instead", f"messages[{start}].weight")
    return replace(conversation, answer_from=start)


def common_prompt(row: Row, answered: Answered) -> str | Messages:
    """Return the prompt of a row read as `answered`. Rows with the same question have equal prompts.

    If the prompt is the common beginning of two strings, drop its last line: the answers may have common words there.
    """
    if isinstance(answered, Conversation) or row.has("prompt"):
        return answered.prompt
    before, line, _ = answered.prompt.rpartition("\n")
    return before if line else answered.prompt


def _pair_strings(row: Row) -> tuple[Answered, Answered]:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    refuse_chat_columns(row)
    if row.has("prompt"):
        prompt = row.text("prompt", may_be_empty=True)
        return PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected)
    border = _find_border(chosen, rejected)
    if border and chosen[border] != rejected[border] and chosen[border - 1] == " ":
        border -= 1  # most tokenizers keep a space with the next word
    if not chosen[:border].strip():
        what = f"there is no prompt: no column {row.name('prompt')!r}, and the answers begin differently"
        raise BadRow("no common prompt", what, row.name("chosen"), "Name the prompt's column with data.columns.")
    prompt = chosen[:border]
    return PromptCompletion(prompt, chosen[border:]), PromptCompletion(prompt, rejected[border:])


def _pair_messages(row: Row, asked: str | None) -> tuple[Answered, Answered]:
    """Pair chosen and rejected. `asked` is the prompt's column, None if only the answers contain the prompt."""
    chosen, rejected = _read_answer(row, "chosen"), _read_answer(row, "rejected")
    is_whole = chosen[0]["role"] in ASKING and rejected[0]["role"] in ASKING
    prompt = None if asked is None else _read_prompt(row, asked)
    is_text = asked == "instruction" or (asked is not None and isinstance(row.take(asked), str))
    if prompt is None or (is_whole and (is_text or chosen[: len(prompt)] == rejected[: len(prompt)] == prompt)):
        border = _find_border(chosen, rejected)
        prompt, chosen, rejected = chosen[:border], chosen[border:], rejected[border:]
    elif is_whole and asked == "messages":
        chosen, rejected = chosen[-1:], rejected[-1:]  # like axolotl
    else:
        refuse_closed_turn(prompt, chosen, row.name("chosen"))
    if not prompt:
        what = "there is no prompt: chosen and rejected begin with different messages"
        raise BadRow("no common prompt", what, row.name("chosen"), "Put the prompt into a column of its own.")
    return _join(row, with_system(row, prompt), {row.name("chosen"): chosen, row.name("rejected"): rejected})


def _pair_conversation(row: Row) -> tuple[Answered, Answered]:
    """Read ms-swift's pair: the last round of a conversation, and a worse one."""
    if (ours := next(filter(row.has, CHOSEN), None)) is None:
        raise BadRow("missing column", f"no column {row.name('chosen')!r}; found: {', '.join(map(repr, row.values))}")
    example = READERS[CHOSEN[ours]](row)
    assert isinstance(example, Conversation)
    prompt, chosen = _split_last_round(example.messages, row.name(ours))
    rejected, name = _read_answer(row, "rejected"), row.name("rejected")
    if rejected[0]["role"] in ASKING:
        other, rejected = _split_last_round(with_system(row, rejected), name)
        if other != prompt:
            fix = "Both conversations must be the same up to their last answers."
            raise BadRow("no common prompt", f"what comes before the answer is not that of {row.name(ours)}", name, fix)
    return _join(row, prompt, {row.name(ours): chosen, name: rejected})


def _split_last_round(messages: Messages, where: str) -> tuple[Messages, Messages]:
    """Split messages after the last question. The answer includes tool calls and their results."""
    start = max((at for at, message in enumerate(messages, 1) if message["role"] in ASKING), default=0)
    if not 0 < start < len(messages):
        raise BadRow("no prompt", "expected a question and then an answer", where)
    return messages[:start], messages[start:]


def _join(row: Row, prompt: Messages, answers: dict[str, Messages]) -> tuple[Answered, Answered]:
    """Join the prompt with both answers, given by column name. Raises BadRow for an answer that is not one."""
    for name, answer in answers.items():
        if answer[0]["role"] in ASKING:
            what = f"the answer begins with what the {answer[0]['role']} says"
            raise BadRow("not an answer", what, name, "Both answers must follow the same prompt.")
        if any(message.get("weight") == 0 for message in answer):
            raise BadRow("weight", "a turn of the answer is not to be trained; dpo trains all of it", name)
    first, second = (make_conversation(row, [*prompt, *side], len(prompt)) for side in answers.values())
    return first, second


def _find_prompt(row: Row) -> str | None:
    """Return our column that holds the prompt; None if only the answers contain it."""
    if "instruction" in row.columns and row.has("instruction") and row.name("instruction") == row.name("prompt"):
        return "instruction"
    return next((ours for ours in PROMPTS if row.has(ours) and (ours != "messages" or _is_prompt(row))), None)


def _is_prompt(row: Row) -> bool:
    """Return whether the column `messages` is the prompt, not a copy of the chosen answer."""
    value = row.values[row.name("messages")]
    return bool(value) and (_is_text(value) or read_messages(row, "messages")[-1]["role"] != "assistant")


def _is_text(value: object) -> bool:
    """Return whether a value is plain text rather than messages. Tables may hold messages as JSON text."""
    return isinstance(value, str) and not _TURNS.match(value)


def _read_prompt(row: Row, asked: str) -> Messages:
    """Return the messages before the answers, from the column `asked`."""
    if asked == "instruction":
        return ask_by_columns(row)
    value = row.take(asked)
    if (asked == "prompt" and isinstance(value, str)) or (asked == "messages" and _is_text(value)):
        return [{"role": "user", "content": row.text(asked)}]
    return read_messages(row, asked)


def _read_answer(row: Row, ours: str) -> Messages:
    """Read the messages of `chosen` or `rejected`. A string is the assistant's text, an object the only message."""
    value = row.take(ours)
    if _is_text(value):
        return [{"role": "assistant", "content": row.text(ours)}]
    if isinstance(value, str):
        value = parse_json(value, "wrong type", "expected messages", row.name(ours))
    return [read_message(value, row.name(ours), row)] if isinstance(value, dict) else read_messages(row, ours)


def _find_border(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Return the index of the first difference. If one is a prefix of the other, return its last index."""
    shortest = min(len(chosen), len(rejected))
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest - 1)
