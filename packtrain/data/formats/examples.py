"""Parse rows into examples: conversations, prompts with completions, texts, tokens, pairs, labelled answers.

One function of READERS reads one format; `preference` and labelled answers have functions of their own. A new format is one more entry, with its
columns in columns.py and its name in config/schema.py. Shapes follow
TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats), ShareGPT, Stanford Alpaca and Salesforce's xLAM.

A pair becomes two conversations (or texts) that begin with the same prompt. We read these forms, as in TRL, LLaMA-Factory, axolotl and ms-swift:

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from packtrain.config import is_list
from packtrain.config.schema import Format
from packtrain.data.formats.columns import (
    CHOSEN,
    LABEL,
    LABELS,
    MASKS,
    PROMPTS,
    Row,
    is_answer_alone,
    list_of,
    parse_json,
)
from packtrain.data.formats.gallery import place_pictures
from packtrain.data.formats.messages import (
    Messages,
    Tools,
    are_same_tools,
    read_calls,
    read_listed_tools,
    read_message,
    read_messages,
    read_system,
    read_tools,
    read_variables,
    refuse_closed_turn,
    with_system,
    with_thought,
)
from packtrain.data.sources.chunks import BadRow, Json, is_object, wrong_type

MEDIA = ("videos", "video", "audios", "audio")
"""Columns of media: we refuse rows that have them."""
ASKING = ("system", "developer", "user")
"""Roles that cannot begin an answer."""
_TURNS = re.compile(r"""\s*(\[\s*)?\{\s*"(role|from|content|value)"|\s*\[\s*\]""")
"""Match the beginning of messages as JSON."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template. The answer starts at `answer_from`, or is the last turn.

    `tools_in_system`: the system prompt lists the row's tools, so `tools` is None.
    """

    messages: Messages
    tools: Tools | None = None
    variables: Json = field(default_factory=Json)
    answer_from: int | None = None
    tools_in_system: bool = False

    @property
    def prompt(self) -> Messages:
        """Return the messages before the answer."""
        return self.messages[: self.answer_from]


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """Prompt and completion as plain text; running text is the completion of an empty prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids int32[n] with a loss mask bool[n]. `mask` is None if the row has none."""

    input_ids: np.ndarray
    mask: np.ndarray | None


Answered = Conversation | PromptCompletion
"""A prompt with an answer."""
Example = Answered | Tokens


def read_row(row: Row, format: Format) -> Example:
    """Read a row as an example; raises BadRow naming the field."""
    if format not in ("text", "tokenised"):
        refuse_media(row)
        refuse_unwanted(row)
    elif format == "text" and row.optional("images"):
        fix = "Make a conversation of it (data.columns.output=text), or remove the column."
        raise BadRow("not plain text", "running text has no place for a picture", row.name("images"), fix)
    return READERS[format](row)


def refuse_media(row: Row) -> None:
    """Raise BadRow for a row with a film or a sound."""
    if given := next((name for name in MEDIA if row.values.get(name)), None):
        fix = "If the text makes sense without it, remove the column."
        raise BadRow("not text", "this row has more than text and pictures", given, fix)


def refuse_unwanted(row: Row) -> None:
    """Raise BadRow for an answer that is marked as undesirable. Other labels than true and false stay unread."""
    value = row.values.get(row.name(LABEL))
    label = LABELS.get(str(value).lower().removesuffix(".0"))  # a table with gaps has 0.0 for 0
    if label is not None:
        row.optional(LABEL)
    if label is False:
        what = f"this answer is marked as undesirable ({value}), and packtrain sft would train on it"
        fix = "Train on them with packtrain kto, or remove the column to train on all answers."
        raise BadRow("unwanted answer", what, row.name(LABEL), fix)


def refuse_chat_columns(row: Row) -> None:
    """Raise BadRow for plain text with columns that only a chat template can render."""
    if given := next((ours for ours in ("system", "history", "tools", "images") if row.optional(ours)), None):
        what = "the row is read as plain text, which has no place for this"
        fix = "Make a conversation of it (data.columns.instruction names the column of the prompt), or take this column out."
        raise BadRow("not plain text", what, row.name(given), fix)


def make_conversation(row: Row, messages: Messages, answer_from: int | None = None) -> Conversation:
    """Make the conversation of these messages, with the row's tools and template variables.

    A system prompt that lists the same tools stays unchanged. The template then gets none, or it would list them again.
    Raises BadRow if it lists other tools. Pictures of the column `images` are put into the messages.
    """
    messages = place_pictures(row, messages)
    tools, variables = read_tools(row), read_variables(row)
    if not (tools and (listed := read_listed_tools(messages))):
        return Conversation(messages, tools, variables, answer_from)
    if not are_same_tools(tools, listed):
        fix = "Take one of the two lists out: the model would see both."
        raise BadRow("two lists of tools", "the system prompt lists other tools in <tools>", row.name("tools"), fix)
    return Conversation(messages, None, variables, answer_from, tools_in_system=True)


def _read_conversation(row: Row, ours: str = "messages") -> Conversation:
    messages = with_thought(row, with_system(row, read_messages(row, ours)))
    return make_conversation(row, messages)


def _read_prompt_completion(row: Row) -> Conversation | PromptCompletion:
    if isinstance(row.take("prompt"), str):
        refuse_chat_columns(row)
        return PromptCompletion(row.text("prompt", may_be_empty=True), row.text("completion"))
    before = with_system(row, read_messages(row, "prompt"))
    after = with_thought(row, read_messages(row, "completion"))
    refuse_closed_turn(before, after, row.name("completion"))
    return make_conversation(row, [*before, *after], len(before))


def _read_alpaca(row: Row) -> Conversation:
    answer = {"role": "assistant", "content": row.text("output")}
    return make_conversation(row, with_thought(row, [*ask_by_columns(row), answer]))


def _read_xlam(row: Row) -> Conversation:
    asked = {"role": "user", "content": row.text("query")}
    calls = {"role": "assistant", "content": "", **read_calls(row.take("answers"), row.name("answers"))}
    return make_conversation(row, [*read_system(row), asked, calls])


def ask_by_columns(row: Row) -> Messages:
    """Build the messages before the answer from Alpaca's columns.
    `system`, pairs of `history`, then `instruction` with `input` on the next line."""
    messages, where = read_system(row), row.name("history")
    for index, pair in enumerate(list_of(row.optional("history") or [], where)):
        if not is_list(pair) or len(pair) != 2 or not all(isinstance(said, str) and said for said in pair):
            raise BadRow("wrong type", "expected [question, answer], two strings", f"{where}[{index}]")
        messages += [{"role": role, "content": said} for role, said in zip(("user", "assistant"), pair, strict=True)]
    extra, name = "", row.name("instruction")
    if row.name("input") != name and row.optional("input") is not None:
        extra = row.text("input", may_be_empty=True)
    if name not in row.values and is_answer_alone(row.values, row.columns):
        return [*messages, {"role": "user", "content": ""}]
    asked = (row.text("instruction", may_be_empty=bool(extra.strip())), extra)
    return [*messages, {"role": "user", "content": "\n".join(part for part in asked if part.strip())}]


def _read_tokens(row: Row) -> Tokens:
    ids = _read_integers(row, "input_ids")
    if not len(ids):
        raise BadRow("empty", "there are no tokens", row.name("input_ids"))
    if row.optional("attention_mask") is not None and not np.all(_read_integers(row, "attention_mask", len(ids))):
        raise BadRow("padded", "it has zeros", row.name("attention_mask"), "Give the tokens without padding.")
    given = [name for name in MASKS if row.optional(name) is not None]
    if len(given) > 1:
        what = f"both {given[0]} and {given[1]} say what is trained"
        raise BadRow("ambiguous", what, row.name(given[1]), "Keep one.")
    if not given:
        return Tokens(ids, None)
    values, name = _read_integers(row, given[0], len(ids)), row.name(given[0])
    mask = values != -100 if given[0] == "labels" else values.astype(bool)
    if len(strange := np.flatnonzero(values != np.where(mask, ids, -100) if given[0] == "labels" else values != mask)):
        at = strange[0]
        wanted = f"{ids[at]} (the token; labels are not shifted) or -100" if given[0] == "labels" else "0 or 1"
        raise BadRow("wrong mask", f"expected {wanted}, found {values[at]}", f"{name}[{at}]")
    return Tokens(ids, mask)


READERS: dict[str, Callable[[Row], Example]] = {
    "messages": _read_conversation,
    "prompt_completion": _read_prompt_completion,
    "text": lambda row: PromptCompletion("", row.text("text")),
    "sharegpt": lambda row: _read_conversation(row, "conversations"),
    "alpaca": _read_alpaca,
    "xlam": _read_xlam,
    "tokenised": _read_tokens,
}


def _read_integers(row: Row, ours: str, length: int | None = None) -> np.ndarray:
    where = row.name(ours)
    values = list_of(row.take(ours), where)
    for index, value in enumerate(values):
        is_flag = isinstance(value, bool) and ours in ("input_ids", "labels")
        if is_flag or not isinstance(value, int) or not -(2**31) <= value < 2**31:
            raise wrong_type("an integer of 32 bits", value, f"{where}[{index}]")
    if length is not None and len(values) != length:
        raise BadRow("lengths differ", f"{len(values)} values for {length} tokens", where)
    return np.asarray(values, dtype=np.int32)


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
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
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
    return [read_message(value, row.name(ours), row)] if is_object(value) else read_messages(row, ours)


def _find_border(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Return the index of the first difference. If one is a prefix of the other, return its last index."""
    shortest = min(len(chosen), len(rejected))
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest - 1)
