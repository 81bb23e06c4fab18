"""Parses rows with one answer: a conversation, a prompt with its completion, text, or tokens.

One function reads one format; a new format is one more entry of READERS, with its columns in columns.py. Errors name the
field as it is called in the FILE. Shapes follow TRL's dataset formats
(https://huggingface.co/docs/trl/dataset_formats), ShareGPT and Stanford Alpaca.

Roles are checked: most templates render any role, so a misspelt one would silently go untrained. Allowed are the common
roles, and those that the chat template names.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.config.schema import Format
from packtrain.data.formats.columns import MASKS, Row, list_of
from packtrain.data.sources.chunks import BadRow, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SPEAKERS = {  # the words of ShareGPT and others for the roles
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "bot", "chatbot", "ai"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
UNKNOWN_ROLE = "unknown role"
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template; with `answer_from`, the answer starts there (else it is the last turn)."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    answer_from: int | None = None


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt and its completion, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Running text."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids int32[n] and which of them are trained bool[n] (None: the row does not say)."""

    input_ids: np.ndarray
    mask: np.ndarray | None


Example = Conversation | PromptCompletion | Text | Tokens


def read_row(row: Row, format: Format) -> Example:
    """A row as an example; raises BadRow naming the field."""
    return READERS[format](row)


def _messages(row: Row) -> Conversation:
    return Conversation(messages_of(row, "messages"), tools_of(row), variables_of(row))


def _prompt_completion(row: Row) -> Conversation | PromptCompletion:
    if isinstance(row.take("prompt"), str):
        return PromptCompletion(row.text("prompt", may_be_empty=True), row.text("completion"))
    before, after = messages_of(row, "prompt"), messages_of(row, "completion")
    return Conversation([*before, *after], tools_of(row), variables_of(row), answer_from=len(before))


def _text(row: Row) -> Text:
    return Text(row.text("text"))


def _sharegpt(row: Row) -> Conversation:
    return Conversation([*system_of(row), *messages_of(row, "conversations")], tools_of(row))


def _alpaca(row: Row) -> Conversation:
    instruction, output = row.text("instruction"), row.text("output")
    extra = row.text("input", may_be_empty=True) if row.optional("input") is not None else ""
    question = (ALPACA_WITH_INPUT if extra.strip() else ALPACA).format(instruction=instruction, input=extra)
    return Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": output}])


def _tokenised(row: Row) -> Tokens:
    ids = _integers(row, "input_ids")
    if not len(ids):
        raise BadRow("empty", "there are no tokens", row.name("input_ids"))
    if row.optional("attention_mask") is not None and not np.all(_integers(row, "attention_mask", len(ids))):
        where, fix = row.name("attention_mask"), "Give the tokens without padding."
        raise BadRow("padded", "attention_mask has zeros", where, fix)
    given = [name for name in MASKS if row.optional(name) is not None]
    if len(given) > 1:
        what = f"both {given[0]} and {given[1]} say what is trained"
        raise BadRow("ambiguous", what, row.name(given[1]), "Keep one.")
    if not given:
        return Tokens(ids, None)
    values, name = _integers(row, given[0], len(ids)), row.name(given[0])
    if given[0] == "labels":
        if len(strange := np.flatnonzero((values != -100) & (values != ids))):
            at = strange[0]
            what = (
                f"the label is {values[at]}, the token {ids[at]}: expected that token, or -100 (labels are not shifted)"
            )
            raise BadRow("label is not the token", what, f"{name}[{at}]")
        return Tokens(ids, values != -100)
    if len(strange := np.flatnonzero((values != 0) & (values != 1))):
        raise BadRow("wrong type", f"expected 0 or 1, found {values[strange[0]]}", f"{name}[{strange[0]}]")
    return Tokens(ids, values.astype(bool))


READERS: dict[str, Callable[[Row], Example]] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "text": _text,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "tokenised": _tokenised,
}


def messages_of(row: Row, ours: str) -> Messages:
    """The messages of a column; raises BadRow where there are none."""
    where = row.name(ours)
    messages = [message_of(one, f"{where}[{index}]", row) for index, one in enumerate(list_of(row.take(ours), where))]
    if not messages:
        raise BadRow("empty", "there are no messages", where)
    return messages


def message_of(value: Any, where: str, row: Row) -> dict[str, Any]:
    """A message, or a turn as ShareGPT writes it ({"from", "value"}), with its content as one string.

    Keys that are null are left out, as apply_chat_template does. Raises BadRow naming the field.
    """
    if not isinstance(value, dict):
        raise wrong_type("an object", value, where)
    if "from" in value and "role" not in value:
        role = _role_of_speaker(value["from"], f"{where}.from")
        if not isinstance(value.get("value"), str):
            raise wrong_type("a string", value.get("value"), f"{where}.value")
        value = {"role": role, "content": value["value"]}
    message = {key: part for key, part in value.items() if part is not None}
    for key in ("role", "content"):
        if key not in value and not (key == "content" and message.get("tool_calls")):
            raise BadRow("missing field", f"no {key!r}; found: {', '.join(map(repr, value)) or 'nothing'}", where)
    role = message.get("role")
    if not isinstance(role, str):
        raise wrong_type("a string", value["role"], f"{where}.role")
    _check_role(role, row.named, f"{where}.role")
    if calls := message.pop("tool_calls", None):
        calls = _tool_calls(calls, f"{where}.tool_calls")
        message |= {"tool_calls": calls} if calls else {}
    message["content"] = _content(message.get("content"), f"{where}.content", optional=bool(calls))
    spoken = message["content"].strip() or message.keys() & {"tool_calls", "reasoning_content", "thinking"}
    if role == "assistant" and not spoken:
        raise BadRow("empty", "the assistant's turn is empty", f"{where}.content")
    return message


def _content(value: Any, where: str, *, optional: bool) -> str:
    if value is None and optional:
        return ""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise BadRow("not text", "expected parts of type text only; packtrain trains on text", where)
        return "".join(part for part in parts if part is not None)
    if not isinstance(value, str):
        raise wrong_type("a string", value, where)
    return value


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI's API gives JSON in a string, templates want objects."""
    calls = []
    for index, call in enumerate(list_of(value, where)):
        place = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise wrong_type("an object", call, place)
        inner = call.get("function", call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise BadRow("wrong type", "expected a function with a name", place)
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise BadRow("wrong type", f"the arguments are not JSON: {error}", f"{place}.arguments") from None
        inner = {**inner, "arguments": arguments if arguments is not None else {}}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return calls


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    """The tools of the column `tools`, if any."""
    value, where = row.optional("tools"), row.name("tools")
    tools = list_of(value, where) if value else []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong_type("an object", tool, f"{where}[{index}]")
    return tools or None


def variables_of(row: Row) -> dict[str, Any]:
    """Arguments for the chat template that the row brings."""
    value = row.optional("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("an object", value, row.name("chat_template_kwargs"))
    return {key: part for key, part in value.items() if part is not None}


def system_of(row: Row) -> Messages:
    """The message of the column `system`, if any."""
    system = row.optional("system")
    if not system:
        return []
    return [{"role": "system", "content": _content(system, row.name("system"), optional=False)}]


def _check_role(role: str, named: frozenset[str], where: str) -> None:
    """Raise BadRow unless `role` is in ROLES or `named` by the template.

    Another word for the assistant is refused even so: only `assistant` is ever trained.
    """
    meant = SPEAKERS.get(role.lower())
    if role in ROLES or (role in named and meant != "assistant"):
        return
    what = f"unknown role {role!r}; known: {', '.join(ROLES)}, and what the chat template names"
    raise BadRow(UNKNOWN_ROLE, what, where, _role_advice(role, [*ROLES, *SPEAKERS], meant))


def _role_of_speaker(speaker: object, where: str) -> str:
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        what = f"unknown speaker {speaker!r}; known: {', '.join(SPEAKERS)}"
        raise BadRow(UNKNOWN_ROLE, what, where, _role_advice(str(speaker), list(SPEAKERS), None))
    return role


def _role_advice(found: str, allowed: list[str], meant: str | None) -> str:
    near = difflib.get_close_matches(found.lower(), allowed, 1, cutoff=0.6)
    if meant is None and near:
        meant = near[0] if near[0] in ROLES else SPEAKERS[near[0]]
    return f"Did you mean {meant!r}?" if meant else "Name the role in the chat template, or write it as one of these."


def _integers(row: Row, ours: str, length: int | None = None) -> np.ndarray:
    where = row.name(ours)
    values = list_of(row.take(ours), where)
    for index, one in enumerate(values):
        if not isinstance(one, int):
            raise wrong_type("an integer", one, f"{where}[{index}]")
    if length is not None and len(values) != length:
        raise BadRow("lengths differ", f"{len(values)} values for {length} tokens", where)
    try:
        return np.asarray(values, dtype=np.int32)
    except OverflowError:
        raise BadRow("token outside the vocabulary", "a number does not fit in 32 bits", where) from None
