"""Rows of any known shape become one of four things: a conversation, a prompt with its completion, text, or tokens.

Every check names the field as the FILE calls it, so that an error can be found there.
Shapes follow TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats), ShareGPT and Stanford Alpaca.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from packtrain.data.formats import roles
from packtrain.data.sources.rows import BadRow, kind_of, too_much

Objective = Literal["sft", "dpo"]
Format = Literal["messages", "prompt_completion", "text", "preference", "ranked", "sharegpt", "alpaca", "tokenised"]
LossOn = Literal["auto", "assistant", "completion", "all"]

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
_BEFORE = ("prompt", "conversations", "instruction")
READ_TOO = {"preference": _BEFORE, "ranked": (*_BEFORE, "scores", "ranks")}
"""Columns beside the required ones and OPTIONAL that only this format reads."""
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
OPTIONAL = ("tools", "system", "input", "attention_mask", "chat_template_kwargs", *MASKS)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template; with `answer_from`, the answer starts there (else it is the last turn)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    answer_from: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
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


Example = Conversation | Pair | Text | Tokens


@dataclass(frozen=True, slots=True)
class Row:
    """One row under our column names; `columns` maps ours to the file's, `named` are roles of the template."""

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    named: frozenset[str]

    def name(self, ours: str) -> str:
        return self.columns.get(ours, ours)

    def optional(self, ours: str) -> Any:
        return self.values.get(self.name(ours))

    def take(self, ours: str) -> Any:
        name = self.name(ours)
        if name not in self.values:
            found = ", ".join(map(repr, self.values)) or "none"
            raise BadRow("missing column", f"no column {name!r}; found: {found}", name)
        return self.values[name]

    def text(self, ours: str, *, may_be_empty: bool = False) -> str:
        value = self.take(ours)
        if not isinstance(value, str):
            raise BadRow("wrong type", f"expected a string, found {kind_of(value)}", self.name(ours))
        if not may_be_empty and not value.strip():
            raise BadRow("empty", "the text is empty", self.name(ours))
        return value


def convert(values: Mapping[str, Any], format: Format, columns: Mapping[str, str], named: frozenset[str]) -> Example:
    """One raw row as an example; raises BadRow naming the field. Roles `named` by the template may speak."""
    row = Row(values, columns, named)
    if format == "messages":
        return Conversation(messages_of(row, "messages"), tools_of(row), variables_of(row))
    if format == "prompt_completion":
        return _prompt_completion(row)
    if format == "text":
        return Text(row.text("text"))
    if format == "sharegpt":
        return _sharegpt(row)
    if format == "alpaca":
        return _alpaca(row)
    return _tokens(row)


def list_of(value: Any, where: str) -> list[Any]:
    """A list, or the list in a JSON string (csv and parquet files often hold nested columns that way)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(
                "wrong type", f"expected a list, found a string that is not JSON ({too_much(error)})", where
            ) from None
    if not isinstance(value, list):
        raise BadRow("wrong type", f"expected a list, found {kind_of(value)}", where)
    return value


def messages_of(row: Row, ours: str) -> list[dict[str, Any]]:
    where = row.name(ours)
    messages = [_message(one, f"{where}[{index}]", row) for index, one in enumerate(list_of(row.take(ours), where))]
    if not messages:
        raise BadRow("empty", "there are no messages", where)
    return messages


def _message(value: Any, where: str, row: Row) -> dict[str, Any]:
    """A message with the keys that are null left out (as apply_chat_template does), its content one string."""
    if not isinstance(value, dict):
        raise BadRow("wrong type", f"expected an object, found {kind_of(value)}", where)
    message = {key: part for key, part in value.items() if part is not None}
    for key in ("role", "content"):
        if key not in value:
            if key == "content" and message.get("tool_calls"):
                continue
            raise BadRow("missing field", f"no {key!r}; found: {', '.join(map(repr, value)) or 'nothing'}", where)
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRow("wrong type", f"expected a string, found {kind_of(value['role'])}", f"{where}.role")
    roles.check(role, row.named, f"{where}.role")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
        if not message["tool_calls"]:
            del message["tool_calls"]
    content = _content(message.get("content"), f"{where}.content", optional="tool_calls" in message)
    message["content"] = content
    if (
        role == "assistant"
        and not content.strip()
        and not message.keys() & {"tool_calls", "reasoning_content", "thinking"}
    ):
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
        raise BadRow("wrong type", f"expected a string, found {kind_of(value)}", where)
    return value


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI's API gives JSON in a string, templates want objects."""
    calls = []
    for index, call in enumerate(list_of(value, where)):
        place = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise BadRow("wrong type", f"expected an object, found {kind_of(call)}", place)
        inner = call.get("function", call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise BadRow("wrong type", "expected a function with a name", place)
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                what = f"the arguments are not JSON: {too_much(error)}"
                raise BadRow("wrong type", what, f"{place}.arguments") from None
        inner = {**inner, "arguments": arguments if arguments is not None else {}}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return calls


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    value = row.optional("tools")
    if not value:
        return None
    tools = list_of(value, row.name("tools"))
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRow("wrong type", f"expected an object, found {kind_of(tool)}", f"{row.name('tools')}[{index}]")
    return tools or None


def variables_of(row: Row) -> dict[str, Any]:
    value = row.optional("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow("wrong type", f"expected an object, found {kind_of(value)}", row.name("chat_template_kwargs"))
    return {key: part for key, part in value.items() if part is not None}


def _prompt_completion(row: Row) -> Example:
    if isinstance(row.take("prompt"), str):
        return Pair(row.text("prompt", may_be_empty=True), row.text("completion"))
    before, after = messages_of(row, "prompt"), messages_of(row, "completion")
    return Conversation([*before, *after], tools_of(row), variables_of(row), answer_from=len(before))


def turn_of(value: Any, where: str, row: Row) -> dict[str, Any]:
    """A message that is written as one, or as ShareGPT does ({"from", "value"})."""
    if isinstance(value, dict) and "from" in value:
        role = roles.of_speaker(value["from"], f"{where}.from")
        if not isinstance(value.get("value"), str):
            raise BadRow("wrong type", f"expected a string, found {kind_of(value.get('value'))}", f"{where}.value")
        value = {"role": role, "content": value["value"]}
    return _message(value, where, row)


def system_of(row: Row) -> list[dict[str, Any]]:
    """The message of the column `system`, if any."""
    system = row.optional("system")
    if not system:
        return []
    return [{"role": "system", "content": _content(system, row.name("system"), optional=False)}]


def _sharegpt(row: Row) -> Conversation:
    name = row.name("conversations")
    turns = list_of(row.take("conversations"), name)
    messages = [*system_of(row), *(turn_of(turn, f"{name}[{index}]", row) for index, turn in enumerate(turns))]
    if not any(message["role"] != "system" for message in messages):
        raise BadRow("empty", "there are no turns", name)
    return Conversation(messages, tools_of(row))


def _alpaca(row: Row) -> Conversation:
    instruction, output = row.text("instruction"), row.text("output")
    extra = row.optional("input") or ""
    if not isinstance(extra, str):
        raise BadRow("wrong type", f"expected a string, found {kind_of(extra)}", row.name("input"))
    pattern = ALPACA_WITH_INPUT if extra.strip() else ALPACA
    question = pattern.format(instruction=instruction, input=extra)
    return Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": output}])


def _tokens(row: Row) -> Tokens:
    ids = _integers(row, "input_ids")
    if not len(ids):
        raise BadRow("empty", "there are no tokens", row.name("input_ids"))
    attention = row.optional("attention_mask")
    if attention is not None and not np.all(_integers(row, "attention_mask", len(ids))):
        raise BadRow(
            "padded", "attention_mask has zeros", row.name("attention_mask"), "Give the tokens without padding."
        )
    given = [name for name in MASKS if row.optional(name) is not None]
    if len(given) > 1:
        raise BadRow(
            "ambiguous", f"both {given[0]} and {given[1]} say what is trained", row.name(given[1]), "Keep one."
        )
    if not given:
        return Tokens(ids, None)
    values = _integers(row, given[0], len(ids))
    if given[0] != "labels":
        strange = np.flatnonzero((values != 0) & (values != 1))
        if len(strange):
            what = f"expected 0 or 1, found {values[strange[0]]}"
            raise BadRow("wrong type", what, f"{row.name(given[0])}[{strange[0]}]")
        return Tokens(ids, values.astype(bool))
    strange = np.flatnonzero((values != -100) & (values != ids))
    if len(strange):
        at = int(strange[0])
        what = f"the label is {values[at]}, the token {ids[at]}: expected that token, or -100 (labels are not shifted)"
        raise BadRow("label is not the token", what, f"{row.name('labels')}[{at}]")
    return Tokens(ids, values != -100)


def _integers(row: Row, ours: str, length: int | None = None) -> np.ndarray:
    where = row.name(ours)
    value = row.take(ours)
    values = list_of(value, where)
    for index, one in enumerate(values):
        if not isinstance(one, int):
            raise BadRow("wrong type", f"expected an integer, found {kind_of(one)}", f"{where}[{index}]")
    if length is not None and len(values) != length:
        raise BadRow("lengths differ", f"{len(values)} values for {length} tokens", where)
    try:
        return np.asarray(values, dtype=np.int32)
    except OverflowError:
        raise BadRow("token outside the vocabulary", "a number does not fit in 32 bits", where) from None
