"""A conversation in the words of one chat template, so that nothing it holds goes unread.

Templates agree on `content` and mostly on `tool_calls`, and on little else:

- a thought is read from `reasoning_content`, `reasoning` or `thinking` (gpt-oss), by others from <think> in the content
  (SmolLM3, DeepSeek R1's distillates). In a template that knows none of these it would be lost: loss_mask.py refuses it;
- SmolLM3 reads tools from `xml_tools`, and calls as <tool_call> in the content; DeepSeek V3 wants arguments as JSON text;
- Mistral's templates want an id of nine characters for each call and its answer, Hermes' the tool's name with the answer.
  Calls without an id get one by their place; answers without one are those of the first call still unanswered.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from packtrain.data.formats.conversations import Conversation
from packtrain.data.formats.messages import THOUGHTS, Messages

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a template reads: `thought` is the key of thoughts (content: in <think> there), None if it knows none."""

    thought: str | None
    calls_in_content: bool
    arguments_as_text: bool
    tools: str
    short_ids: bool


@lru_cache
def dialect_of(template: str) -> Dialect:
    """The dialect of a template, by the names in its text."""

    def reads(key: str) -> bool:
        return re.search(rf"""[.'"]{key}\b""", template) is not None

    in_content = "content" if "</think>" in template else None
    return Dialect(
        thought=next((key for key in THOUGHTS if reads(key)), in_content),
        calls_in_content="<tool_call>" in template and not reads("tool_calls"),
        arguments_as_text=re.search(r"\barguments['\"]?\]?\s*[+~]", template) is not None,
        tools="xml_tools" if re.search(r"\bxml_tools\b", template) else "tools",
        short_ids=re.search(r"id\s*\|\s*length\s*!=\s*9", template) is not None,
    )


def in_dialect_of(template: str, conversation: Conversation) -> Conversation:
    """The conversation with its thoughts, calls, ids and tools where the template reads them."""
    dialect, messages, tools = dialect_of(template), conversation.messages, conversation.tools
    if any("tool_calls" in message for message in messages):
        messages = _with_ids(messages, dialect.short_ids)
    if any(message.keys() & {"reasoning_content", "tool_calls"} for message in messages):
        messages = [_spoken(message, dialect) for message in messages]
    if tools and dialect.tools != "tools":
        variables = {dialect.tools: tools, **conversation.variables}
        conversation = replace(conversation, variables=variables)
    return conversation if messages is conversation.messages else replace(conversation, messages=messages)


def _spoken(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    message = dict(message)
    if dialect.thought and (thought := message.pop("reasoning_content", None)) is not None:
        if dialect.thought == "content":
            message["content"] = f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"
        else:
            message[dialect.thought] = thought
    if dialect.arguments_as_text and "tool_calls" in message:
        message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    if dialect.calls_in_content:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls", ())]
        parts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        message["content"] = "\n".join(filter(None, parts))
    return message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_ids(messages: Messages, short: bool) -> Messages:
    """Each call with an id, each answer of a tool with id and name of its call; with `short`, ids are of nine characters."""
    made: Messages = []
    named: dict[str, tuple[str, str]] = {}
    number, waiting = 0, dict[str, str]()
    for message in messages:
        if "tool_calls" in message:
            calls, waiting = [], {}
            for call in message["tool_calls"]:
                given, number = call.get("id"), number + 1
                name = given if given and (SHORT_ID.fullmatch(given) or not short) else f"call{number:05d}"
                waiting[name] = call["function"]["name"]
                named[given or name] = name, waiting[name]
                calls.append({**call, "id": name})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            answered = named.get(str(given)) if given else next(iter(waiting.items()), None)
            if answered is not None:
                waiting.pop(answered[0], None)
                message = {"name": answered[1], **message, "tool_call_id": answered[0]}
        made.append(message)
    return made
