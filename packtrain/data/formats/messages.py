"""Messages for chat templates, parsed from the forms that data sets use.

We read OpenAI's messages ({"role", "content"}, `tool_calls`, `tool` answers), ShareGPT's turns ({"from", "value"}, with
`function_call` and `observation`), and contents that are lists of parts (`text`, `reasoning`, `tool_call`).
All become {"role", "content"} with the content as one string. Only a content with pictures stays a list of parts:
{"type": "text", "text"} and {"type": "image", "image": its PictureSource, None if it is in a column}. An assistant's turn may also have

    reasoning_content   its thought, also written `reasoning` or `thinking`
    tool_calls          [{"type": "function", "id", "function": {"name", "arguments": an object}}]; id only if given
    weight              0 if the turn is not trained; also read from other keys (WEIGHTS), or from all of its parts

tokens/chat_template.py puts these where a template reads them. Roles are checked: most templates render any role, so a misspelt
one would silently go untrained. Sources: transformers' guide to chat templates, OpenAI's API, LLaMA-Factory, ms-swift.
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from itertools import chain, product
from typing import Any

from packtrain.config import is_list
from packtrain.config.keys import suggest
from packtrain.data.formats.columns import MASKED, WEIGHTS, Row, list_of, parse_json
from packtrain.data.pictures.source import KINDS, read_source
from packtrain.data.sources.chunks import BadRow, Json, drop_nulls, is_object, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
CALLS = ("function_call", "tool_call")
"""Roles with JSON as text: a call, or a list of parallel calls."""
RESULTS = ("observation", "tool_response", "function_response")
SPEAKERS = {  # words of ShareGPT and others for the roles
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(CALLS, "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", *RESULTS), "tool"),
}
_EXCHANGE = {
    **{name: role for name, role in SPEAKERS.items() if role != "tool" and name not in CALLS},
    "input": "user",
    "output": "assistant",
}
"""Keys of exchanges in the formats of ms-swift and XTuner."""
STAND_INS = {**dict.fromkeys(("function", "ipython"), "tool"), "developer": "system"}
"""Roles replaced by another role if the template names only the other: most templates would drop their messages."""
PARTS = {
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "text": "content",
    "tool_call": "tool_calls",
}
"""Types of parts, in the order of an assistant's turn, and the key of the message for each."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
WHOLE = "packtrain trains a whole turn or none of it"
_WEIGHT = re.compile(
    r"(?i)(\w+_)?(train(able|ed|ing)?|loss|mask(ed)?|weights?)(_?(mask|scale|weight|detail|on|turn)s?)*"
)
KNOWN = {"role", "content", "name", "id", "tool_calls", "tool_call_id", "reasoning_content", "weight"}
"""Keys that a parsed message may have; nothing reads others, unless the chat template does."""
CALL = '{"name": …, "arguments": {…}}'
_TAKEN = re.compile(r"conversations?|tools|tokenize|chat_template|return_\w+|add_generation_prompt|continue_final_\w+")
_LISTED = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
Messages = list[Json]
Tools = list[Json]
"""Tools as templates want them: {"type": "function", "function": {…}}."""


def read_messages(row: Row, ours: str) -> Messages:
    """Read the messages of a column. Raises BadRow if there are none.

    A turn of CALLS continues the assistant's previous turn: text, or other calls, which then count as parallel.
    """
    where = row.name(ours)
    messages: Messages = []
    for index, value in enumerate(chain.from_iterable(map(_unfold, list_of(row.take(ours), where)))):
        message = read_message(value, f"{where}[{index}]", row)
        last = messages[-1] if messages else {}
        is_call = value.get("role", value.get("from")) in CALLS and message.keys() == {"role", "content", "tool_calls"}
        if is_call and last.get("role") == "assistant" and "weight" not in last:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    if not messages:
        raise BadRow("empty", "there are no messages", where)
    return messages


def _unfold(turn: Any) -> list[Any]:
    """Return the turn as a list. An exchange ({"human": …, "assistant": …}) becomes its turns."""
    is_turn = not is_object(turn) or turn.keys() & {"role", "from", "content", "value"}
    said = {} if is_turn else {_EXCHANGE[name]: text for name, text in turn.items() if text and name in _EXCHANGE}
    rest = {name: value for name, value in turn.items() if name not in _EXCHANGE} if said else {}
    found = (role for role in ("system", "user", "assistant") if role in said)
    return [{**(rest if role == "assistant" else {}), "role": role, "content": said[role]} for role in found] or [turn]


def read_message(value: object, where: str, row: Row) -> Json:
    """Read one message of the file. Drops null keys, like apply_chat_template. Raises BadRow naming the field."""
    if not is_object(value):
        raise wrong_type("an object", value, where)
    message = {key: part for key, part in value.items() if part is not None}
    who, what = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    if who == "from":
        message |= {"role": message.pop("from", None), "content": message.pop("value", None)}
    if call := message.pop("function_call", None):  # OpenAI's API had this key before tool_calls
        message.setdefault("tool_calls", [call])
    wordless = bool(message.get("tool_calls") or message.keys() & set(THOUGHTS))
    for key in ("role", "content"):
        if key not in value and key not in message and not (key == "content" and wordless):
            raise BadRow("missing field", f"no {key!r}; found: {', '.join(map(repr, value)) or 'nothing'}", where)
    role = message.get("role")
    if not isinstance(role, str):
        raise wrong_type("a string", role, f"{where}.{who}")
    if role in CALLS and what in value:
        message.pop("content", None)
        message |= read_calls(value[what], f"{where}.{what}")
    message["role"] = _read_role(role, who, row.roles, f"{where}.{who}")
    _set_weight(message, where, what)
    if is_list(message.get("content")):
        message = _join_parts(message, f"{where}.{what}", row.folder)
    if calls := _read_tool_calls(message.pop("tool_calls", None) or [], f"{where}.tool_calls"):
        message["tool_calls"] = calls
    content = message.get("content")
    message["content"] = "" if content is None and (calls or message.keys() & set(THOUGHTS)) else content
    if not isinstance(message["content"], str) and not has_pictures(message):
        raise wrong_type("a string", content, f"{where}.{what}")
    if message["role"] == "assistant":
        _set_thought(message, where)
        if not ("".join(texts_of(message)).strip() or message.keys() & {"tool_calls", "reasoning_content"}):
            raise BadRow("empty", "the assistant's turn is empty", f"{where}.{what}")
    unread = message.keys() - KNOWN - row.keys | (
        message.keys() & {"name"} if message["role"] in row.nameless else set[str]()
    )
    unknown = (key for key in unread if message[key] not in ("", [], {}))
    row.unknown.update(f"{where.partition('[')[0]}[].{key}" for key in unknown)
    return message


def _read_role(role: str, who: str, named: frozenset[str], where: str) -> str:
    """Return our word for a `role`, or for a speaker if `who` is "from". Raises BadRow for an unknown one.

    `named` are the template's roles. Another word for the assistant is refused even if named: only `assistant` is ever trained.
    """
    if who == "from" and role in SPEAKERS:
        return SPEAKERS[role]
    if who == "role":
        if role in CALLS:
            return "assistant"
        if role not in named:
            role = "tool" if role in RESULTS else STAND_INS[role] if STAND_INS.get(role) in named else role
        if role in ROLES or (role in named and SPEAKERS.get(role.lower()) != "assistant"):
            return role
    what = f"unknown role {role!r}; known: {', '.join(SPEAKERS if who == 'from' else ROLES)}"
    fix = f"Did you mean {SPEAKERS[role.lower()]!r}?" if role.lower() in SPEAKERS else suggest(role, ROLES)
    fix = fix or "Write it as one of these, or take a chat template that names this role."
    raise BadRow("unknown role", what, where, fix)


def _set_weight(message: Json, where: str, inside: str) -> None:
    """Keep `weight` 0 on an assistant's turn that is not trained, and no other weight."""
    given = _take_weights(message, where, message["role"])
    if is_list(parts := message.get("content")):
        places = ((part, f"{where}.{inside}[{at}]") for at, part in enumerate(parts) if is_object(part))
        taken = [_take_weights({**part}, place, message["role"]) for part, place in places]
        weights = {weight for one in taken if any(taken) for weight in one.values() or [1]}
        if len(weights) > 1 and message["role"] == "assistant" and 0 not in given.values():
            fix = "Give all parts one weight, or write them as turns of their own."
            raise BadRow("weight", f"parts of this turn differ, and {WHOLE}", f"{where}.{inside}", fix)
        if len(weights) == 1:
            given["its parts"] = weights.pop()
    if len({*given.values()}) > 1:
        raise BadRow("weight", f"{' and '.join(given)} differ", where, "Keep one.")
    if message["role"] == "assistant" and 0 in given.values():
        message["weight"] = 0


def _take_weights(value: Json, where: str, role: str) -> dict[str, int]:
    """Remove and return the weights of a turn or a part. Raises BadRow unless they are 0 or 1."""
    given = dict[str, int]()
    for key in [key for key, weight in value.items() if _WEIGHT.fullmatch(key) and weight not in (None, [])]:
        weight = value.pop(key)
        if key not in (*WEIGHTS, MASKED) or not isinstance(weight, (int, float)) or weight not in (0, 1):
            what = f"{WHOLE}, and found {key}: {weight!r}"
            raise BadRow("weight", what, f"{where}.{key}", "Write weight: 0 or 1 for all of the turn, or remove it.")
        given[key] = int(weight) ^ (key == MASKED)
        if given[key] and role != "assistant":
            what = f"it asks to train what the {role} says, but only the assistant's turns are trained"
            raise BadRow("weight", what, f"{where}.{key}", "Set it to 0, or data.loss_on=all to train everything.")
    return given


def _set_thought(message: Json, where: str) -> None:
    """Keep an assistant's thought only as `reasoning_content`."""
    given = {key: message.pop(key) for key in THOUGHTS if key in message}
    for key, thought in given.items():
        if not isinstance(thought, str):
            raise wrong_type("a string", thought, f"{where}.{key}")
        if thought.strip() and message.setdefault("reasoning_content", thought) != thought:
            raise BadRow("ambiguous", f"{' and '.join(given)} differ", f"{where}.{key}", "Keep one.")


def has_pictures(message: Json) -> bool:
    """Return whether the content of a parsed message has parts with a picture."""
    return is_list(message["content"]) and any(
        is_object(part) and part["type"] == "image" for part in message["content"]
    )


def texts_of(message: Json) -> list[str]:
    """Return the texts of a parsed message: its content or its text parts."""
    content = message["content"] or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _read_picture_parts(message: Json, where: str, folder: str) -> list[Json]:
    """Return the message's parts in order, each of type text or image."""
    parts = list[Json]()
    for index, part in enumerate(message["content"]):
        place, kind = f"{where}[{index}]", part.get("type") if is_object(part) else None
        if kind in KINDS and message["role"] != "assistant":
            parts.append({"type": "image", "image": read_source(part, place, folder)})
        elif kind == "text":
            name = next((name for name in ("text", "value", "content") if part.get(name) is not None), "text")
            if not isinstance(text := part.get(name), str):
                raise wrong_type("a string", text, f"{place}.{name}")
            parts.append({"type": "text", "text": text})
        else:
            what = f"a part of type {kind!r} in what the {message['role']} says, beside a picture"
            raise BadRow("not text", what, place, "Pictures stand beside text, and never in the assistant's words.")
    return parts


def _join_parts(message: Json, where: str, folder: str) -> Json:
    """Join the content's parts: text, thought and calls each under their own key. Parts stay apart beside pictures."""
    if any(is_object(part) and part.get("type") in KINDS for part in message["content"]):
        return {**message, "content": _read_picture_parts(message, where, folder)}
    joined = {**message, "content": ""}
    order, last = list(dict.fromkeys(PARTS.values())), 0
    for index, part in enumerate(message["content"]):
        place = f"{where}[{index}]"
        if not is_object(part):
            raise wrong_type("an object with a type", part, place)
        kind = part.get("type")
        if kind not in PARTS or (kind != "text" and message["role"] != "assistant"):
            what = f"a part of type {kind!r} in what the {message['role']} says; packtrain trains on text and pictures"
            raise BadRow("not text", f"{what}: parts of type {', '.join(PARTS)}", place)
        key = PARTS[kind]
        if kind != "text" and key in message:
            raise BadRow("ambiguous", f"both {key!r} and a part of type {kind!r}", place, "Keep one.")
        if order.index(key) < last:
            fix = "Write thoughts, text and calls in this order, or as messages of their own."
            raise BadRow("order of parts", f"a part of type {kind!r} after one of type {order[last]!r}", place, fix)
        last = order.index(key)
        name = next((name for name in (kind, "value", "text", "content") if part.get(name) is not None), None)
        if kind == "tool_call":
            value = read_calls(part if name is None else part[name], place)["tool_calls"]
        elif name is None:
            raise BadRow("missing field", f"no 'value'; found: {', '.join(map(repr, part))}", place)
        elif not isinstance(value := part[name], str):
            raise wrong_type("a string", value, f"{place}.{name}")
        joined[key] = joined[key] + value if key in joined else value
    return joined


def read_calls(value: object, where: str) -> Json:
    """Read the calls (JSON) of a turn of CALLS, after an optional <think>. Raises BadRow without a call."""
    said: Json = {}
    if isinstance(value, str):
        if value.lstrip().startswith("<think>"):
            thought, _, value = value.lstrip().removeprefix("<think>").partition("</think>")
            said["reasoning_content"] = thought.strip()
        value = parse_json(value, "not a call", f"expected a call of a tool as JSON, {CALL}, or a list of calls", where)
    calls = value if is_list(value) else [value]
    if not calls:
        raise BadRow("not a call", f"an empty list; expected {CALL}", where)
    return {**said, "tool_calls": _read_tool_calls(calls, where)}


def _read_tool_calls(value: object, where: str) -> list[Json]:
    """Return calls in OpenAI's form, but with arguments as objects. The API has JSON strings; templates want objects."""
    calls: list[Json] = []
    for index, call in enumerate(list_of(value, where)):
        place = f"{where}[{index}]"
        function = _read_function(call, CALL, place)
        arguments = function.pop("arguments", function.pop("parameters", None))
        if isinstance(arguments, str) and arguments.strip():
            arguments = parse_json(arguments, "not a call", "the arguments are not JSON", f"{place}.arguments")
        if arguments and not is_object(arguments):
            raise wrong_type("an object", arguments, f"{place}.arguments")
        name = {"id": str(call["id"])} if call.get("id") else {}
        calls.append({"type": "function", **name, "function": {**function, "arguments": arguments or {}}})
    return calls


def _read_function(value: object, expected: str, where: str) -> Json:
    """Return a copy of the function of a tool or a call. Takes {"type": "function", "function": {…}} or the function itself."""
    given = value if is_object(value) else {}
    inner = given.get("function", {key: part for key, part in given.items() if key not in ("type", "id")})
    if not is_object(inner) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise BadRow("wrong type", f"expected a function with a name, {expected}", where)
    return dict(inner)


def read_tools(row: Row) -> Tools | None:
    """Return the tools of the column `tools`, if any. Templates want this form: {"type": "function", "function": {…}}."""
    value, where, tools = row.optional("tools"), row.name("tools"), Tools()
    for index, tool in enumerate(list_of(value, where) if value else []):
        place, expected = f"{where}[{index}]", '{"name": …, "description": …, "parameters": {…}}'
        if isinstance(tool, str):
            tool = parse_json(tool, "wrong type", "expected an object or one as JSON", place)
        tools.append({"type": "function", "function": _read_function(tool, expected, place)})
    return tools or None


def read_listed_tools(messages: Messages) -> Tools:
    """Return the tools that system prompts list in <tools>…</tools>; [] without a list.

    We read JSON (a list, or one object after the other) and, as in Hermes' data, a list of Python.
    """
    prompts = [text for message in messages if message["role"] in ("system", "developer") for text in texts_of(message)]
    found: list[object] = []
    for text in chain.from_iterable(map(_LISTED.findall, prompts)):
        lines = re.sub(r"}\s*{", "},{", text)  # an object on each line
        for parse, written in product((json.loads, ast.literal_eval), (text, lines)):
            with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                found += chain.from_iterable(one if is_list(one) else [one] for one in parse(f"[{written}]"))
                break
    with suppress(BadRow):  # other words between the tags
        return [{"type": "function", "function": _read_function(tool, "", "")} for tool in found]
    return []


def are_same_tools(first: Tools, second: Tools) -> bool:
    """Return whether two lists have the same tools in any order, once or twice. Null fields do not count: tables add them."""

    def spell(tools: Tools) -> set[str]:
        plain = [json.loads(json.dumps(tool, default=str)) for tool in tools]  # keys of Python's objects may be numbers
        return {json.dumps(drop_nulls(tool), sort_keys=True) for tool in plain}

    return spell(first) == spell(second)


def read_system(row: Row) -> Messages:
    """Return the system message from the column `system`, else from data.system, if any."""
    said = row.text("system") if row.optional("system") else row.system
    return [{"role": "system", "content": said}] if said else []


def with_system(row: Row, messages: Messages) -> Messages:
    """Put the system message first unless the messages begin with one, like ms-swift and LLaMA-Factory. See read_system."""
    own = bool(messages) and messages[0]["role"] in ("system", "developer")
    if own and messages[0]["content"] != row.values.get(row.name("system")):
        return messages
    return [*([] if own else read_system(row)), *messages]


def with_thought(row: Row, messages: Messages) -> Messages:
    """Add a column's thought to the last answer. The template must have a place for it."""
    last = messages[-1]
    free = last["role"] == "assistant" and "reasoning_content" not in last and "</think>" not in last["content"]
    if not (free and row.keys & {*THOUGHTS, "</think>"}) or not row.optional("reasoning_content"):
        return messages
    thought = row.text("reasoning_content", may_be_empty=True)
    return [*messages[:-1], {**last, "reasoning_content": thought}] if thought.strip() else messages


def refuse_closed_turn(prompt: Messages, answer: Messages, where: str) -> None:
    """Raise BadRow if the answer would continue the prompt's last turn."""
    if prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
        what = "the prompt ends in a turn of the assistant, which the chat template closes before the answer"
        raise BadRow("closed turn", what, where, "Write the whole turn into the answer.")


def read_variables(row: Row) -> Json:
    """Return the row's own arguments for the chat template."""
    value: object = row.optional("chat_template_kwargs") or {}
    where = row.name("chat_template_kwargs")
    if not is_object(value):
        raise wrong_type("an object", value, where)
    variables = {key: part for key, part in value.items() if part is not None}
    if taken := next(filter(_TAKEN.fullmatch, variables), None):
        what = f"{taken!r} is an argument of apply_chat_template, not a variable of the template"
        raise BadRow("template argument", what, where, "Remove it.")
    return variables
