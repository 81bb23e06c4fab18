"""Messages as chat templates take them, from the ways in which data sets write them.

Read are OpenAI's messages ({"role", "content"}, `tool_calls`, `tool` answers), ShareGPT's turns ({"from", "value"}, with
`function_call` and `observation`), and contents that are lists of parts (`text`, `reasoning`, `tool_call`, `tool_result`).
All become {"role", "content"} with the content as one string, and of what an assistant says beside it

    reasoning_content   its thought, also written `reasoning` or `thinking`
    tool_calls          [{"type": "function", "id", "function": {"name", "arguments": an object}}]; id only if given
    weight              0 where the turn is not to be trained, also written `loss_weight`, `train` or `loss`

tokens/dialect.py puts that into the words of one template. Errors name the field as it is called in the FILE.

Roles are checked: most templates render any role, so a misspelt one would silently go untrained. Allowed are the common
roles, and those that the chat template names.
Sources: https://huggingface.co/docs/transformers/chat_extras, OpenAI's API, LLaMA-Factory's and ms-swift's data formats.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from packtrain.data.formats.columns import Row, list_of
from packtrain.data.sources.chunks import BadRow, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
CALLS = ("function_call", "tool_call")
"""Whose text is JSON: a call, or a list of parallel ones."""
RESULTS = ("observation", "tool_response", "function_response")
SPEAKERS = {  # the words of ShareGPT and others for the roles
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(CALLS, "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", *RESULTS), "tool"),
}
STAND_INS = {**dict.fromkeys(("function", "ipython"), "tool"), "developer": "system"}
"""Roles that speak as another in a template that names only the other: most would leave out what they say."""
PARTS = {
    **dict.fromkeys(("reasoning", "thinking"), "reasoning"),
    "text": "text",
    "tool_call": "tool_call",
    **dict.fromkeys(("tool_result", "tool_response"), "tool_result"),
}
"""Types of parts; of those before `tool_result` an assistant's turn has some, in this order."""
ORDER = tuple(dict.fromkeys(PARTS.values()))
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
WEIGHTS = ("weight", "loss_weight", "train", "loss")
UNKNOWN_ROLE = "unknown role"
CALL = '{"name": …, "arguments": {…}}'
_TAKEN = re.compile(r"conversations?|tools|tokenize|chat_template|return_\w+|add_generation_prompt|continue_final_\w+")
Messages = list[dict[str, Any]]


def messages_of(row: Row, ours: str) -> Messages:
    """The messages of a column; raises BadRow where there are none.

    A turn of CALLS goes on with what the assistant just said: text or other calls, which are parallel ones then.
    """
    where = row.name(ours)
    messages: Messages = []
    for index, one in enumerate(list_of(row.take(ours), where)):
        read = messages_in(one, f"{where}[{index}]", row)
        last = messages[-1] if messages else {}
        goes_on = one.get("role", one.get("from")) in CALLS and read[0].keys() == {"role", "content", "tool_calls"}
        if goes_on and last.get("role") == "assistant" and "weight" not in last:
            last["tool_calls"] = [*last.get("tool_calls", ()), *read[0]["tool_calls"]]
        else:
            messages += read
    if not messages:
        raise BadRow("empty", "there are no messages", where)
    return messages


def messages_in(value: Any, where: str, row: Row) -> Messages:
    """One message of the file: as one, or where its parts hold results of tools as several.

    Keys that are null are left out, as apply_chat_template does. Raises BadRow naming the field.
    """
    if not isinstance(value, dict):
        raise wrong_type("an object", value, where)
    message, said = {key: part for key, part in value.items() if part is not None}, "content"
    if "from" in value and "role" not in value:
        message, said = {key: part for key, part in message.items() if key not in ("from", "value")}, "value"
        message |= {"role": _role_of_speaker(value["from"], f"{where}.from"), "content": value.get("value")}
    if call := message.pop("function_call", None):  # as OpenAI's API had it before tool_calls
        message.setdefault("tool_calls", [call])
    role = value["from"] if said == "value" else message.get("role")
    wordless = message.get("tool_calls") or message.keys() & set(THOUGHTS)
    for key in ("role", "content"):
        if key not in value and key not in message and not (key == "content" and wordless):
            raise BadRow("missing field", f"no {key!r}; found: {', '.join(map(repr, value)) or 'nothing'}", where)
    if not isinstance(role, str):
        raise wrong_type("a string", role, f"{where}.role")
    if role in CALLS and said in value:
        message.pop("content", None)
        message |= {"role": "assistant", **calls_in(value[said], f"{where}.{said}")}
    elif role in RESULTS and role not in row.named:
        message["role"] = "tool"
    elif role not in row.named and STAND_INS.get(role) in row.named:
        message["role"] = STAND_INS[role]
    _check_role(message["role"], row.named, f"{where}.role")
    if isinstance(message.get("content"), list) and said == "content":
        return [_message(one, where, said) for one in _of_parts(message, where)]
    return [_message(message, where, said)]


def _message(message: dict[str, Any], where: str, said: str) -> dict[str, Any]:
    """A message with text as its content; `said` is the file's word for that."""
    _set_weight(message, where)
    calls = message.pop("tool_calls", None)
    if calls := _tool_calls(calls, f"{where}.tool_calls") if calls else []:
        message["tool_calls"] = calls
    wordless = bool(calls) or bool(message.keys() & set(THOUGHTS))
    message["content"] = text_of(message.get("content"), f"{where}.{said}", optional=wordless)
    if message["role"] == "assistant":
        _set_thought(message, where)
        if not (message["content"].strip() or message.keys() & {"tool_calls", "reasoning_content"}):
            raise BadRow("empty", "the assistant's turn is empty", f"{where}.{said}")
    return message


def _set_weight(message: dict[str, Any], where: str) -> None:
    """Leave `weight` 0 where an assistant's turn is not trained, and no other weight."""
    if message.get("train_detail"):  # axolotl's
        fix = "Set weight to 0 for all of the turn, or take train_detail out to train it."
        raise BadRow("weight", "a turn is trained or not, with no parts of it left out", f"{where}.train_detail", fix)
    given = {key: message.pop(key) for key in WEIGHTS if key in message}
    for key, weight in given.items():
        if not isinstance(weight, (int, float)) or weight not in (0, 1):
            what = f"expected 0 or 1 (a turn is trained or not), found {weight!r}"
            raise BadRow("weight", what, f"{where}.{key}")
        if weight and message["role"] != "assistant":
            what = f"what the {message['role']} says is to be trained; packtrain trains the assistant's turns"
            raise BadRow("weight", what, f"{where}.{key}", "Set it to 0, or data.loss_on=all to train everything.")
        if bool(weight) != bool(next(iter(given.values()))):
            raise BadRow("weight", f"{' and '.join(given)} say different things", f"{where}.{key}", "Keep one.")
        if message["role"] == "assistant" and not weight:
            message["weight"] = 0


def _set_thought(message: dict[str, Any], where: str) -> None:
    """Leave an assistant's thought under `reasoning_content`."""
    given = {key: message.pop(key) for key in THOUGHTS if key in message}
    for key, thought in given.items():
        if not isinstance(thought, str):
            raise wrong_type("a string", thought, f"{where}.{key}")
        if thought.strip() and message.setdefault("reasoning_content", thought) != thought:
            raise BadRow("ambiguous", f"{' and '.join(given)} differ", f"{where}.{key}", "Keep one.")


def text_of(value: Any, where: str, *, optional: bool = False) -> str:
    """A content as one string: a string, or parts of text; raises BadRow for anything else."""
    if value is None and optional:
        return ""
    if isinstance(value, list):
        parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(value)]
        if strange := next((kind for kind, _ in parts if kind != "text"), None):
            raise BadRow("not text", f"expected parts of type text, found {strange!r}", where)
        return "".join(part for _, part in parts)
    if not isinstance(value, str):
        raise wrong_type("a string", value, where)
    return value


def _of_parts(message: dict[str, Any], where: str) -> Messages:
    """A message whose content is a list of parts, as messages with text, thought and calls apart, and one for each result."""
    made: Messages = []
    turn, last = None, "reasoning"
    for index, part in enumerate(message["content"]):
        kind, value = _part(part, place := f"{where}.content[{index}]")
        if kind == "tool_result":
            names = {key: part[key] for key in ("tool_call_id", "name") if part.get(key) is not None}
            made.append({"role": "tool", "content": value, **names})
            turn = None
            continue
        if kind != "text" and message["role"] != "assistant":
            raise BadRow("not text", f"a part of type {kind!r} in what the {message['role']} says", place)
        key = {"reasoning": "reasoning_content", "text": "content", "tool_call": "tool_calls"}[kind]
        if kind != "text" and key in message:
            raise BadRow("ambiguous", f"both {key!r} and a part of type {kind!r}", place, "Keep one.")
        if turn is None:
            keys = ("role", *WEIGHTS) if made else tuple(message)
            turn, last = {**{key: message[key] for key in keys if key in message}, "content": ""}, "reasoning"
            made.append(turn)
        if ORDER.index(kind) < ORDER.index(last):
            fix = "Write it as a message of its own."
            raise BadRow("order of parts", f"a part of type {kind!r} after one of type {last!r}", place, fix)
        last = kind
        turn[key] = turn[key] + value if key in turn else value
    return made or [{**message, "content": ""}]


def _part(part: Any, where: str) -> tuple[str, Any]:
    """Type and value of a part: text, or a list of calls; the value may be under the type's name, `value` or `content`."""
    if not isinstance(part, dict):
        raise wrong_type("an object with a type", part, where)
    kind = PARTS.get(named) if isinstance(named := part.get("type"), str) else None
    if kind is None:
        what = f"a part of type {named!r}; packtrain trains on text: parts of type {', '.join(ORDER)}"
        raise BadRow("not text", what, where)
    key = next((key for key in (named, "value", "text", "content") if part.get(key) is not None), None)
    if kind == "tool_call":
        call = calls_in(part if key is None else part[key], where if key is None else f"{where}.{key}")["tool_calls"]
        return kind, [{**one, "id": part["id"]} if part.get("id") else one for one in call]
    if key is None:
        raise BadRow("missing field", f"no 'value'; found: {', '.join(map(repr, part))}", where)
    return kind, text_of(part[key], f"{where}.{key}")


def calls_in(value: Any, where: str) -> dict[str, Any]:
    """What a turn of CALLS says: calls as JSON, after a thought in <think> if there is one; raises BadRow where there is no call."""
    said: dict[str, Any] = {}
    if isinstance(value, str):
        if value.lstrip().startswith("<think>"):
            thought, _, value = value.lstrip().removeprefix("<think>").partition("</think>")
            said["reasoning_content"] = thought.strip()
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            what = f"expected a call of a tool as JSON, {CALL}, or a list of calls: {error}"
            raise BadRow("not a call", what, where) from None
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise BadRow("not a call", f"an empty list; expected {CALL}", where)
    return {**said, "tool_calls": _tool_calls(calls, where)}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, with their arguments as objects: the API gives JSON in a string, templates want objects."""
    calls = []
    for index, call in enumerate(list_of(value, where)):
        place = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise wrong_type("an object", call, place)
        function = _function(call, CALL, place)
        arguments = function.pop("arguments", function.pop("parameters", None))
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise BadRow("not a call", f"the arguments are not JSON: {error}", f"{place}.arguments") from None
        if arguments and not isinstance(arguments, dict):
            raise wrong_type("an object", arguments, f"{place}.arguments")
        name = {"id": str(call["id"])} if call.get("id") else {}
        calls.append({"type": "function", **name, "function": {**function, "arguments": arguments or {}}})
    return calls


def _function(value: dict[str, Any], expected: str, where: str) -> dict[str, Any]:
    """The function of a tool or a call, whether {"type": "function", "function": {…}} or itself; a copy."""
    inner = value.get("function", {key: part for key, part in value.items() if key not in ("type", "id")})
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise BadRow("wrong type", f"expected a function with a name, {expected}", where)
    return dict(inner)


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    """The tools of the column `tools`, if any, as templates want them: {"type": "function", "function": {…}}."""
    value, where = row.optional("tools"), row.name("tools")
    tools = list_of(value, where) if value else []
    made = []
    for index, tool in enumerate(tools):
        if isinstance(tool, str):
            try:
                tool = json.loads(tool)
            except (ValueError, RecursionError) as error:
                raise BadRow("wrong type", f"expected an object or one as JSON: {error}", f"{where}[{index}]") from None
        if not isinstance(tool, dict):
            raise wrong_type("an object", tool, f"{where}[{index}]")
        expected = '{"name": …, "description": …, "parameters": {…}}'
        made.append({"type": "function", "function": _function(tool, expected, f"{where}[{index}]")})
    return made or None


def system_of(row: Row) -> Messages:
    """The message of the column `system`, if any."""
    system = row.optional("system")
    return [{"role": "system", "content": text_of(system, row.name("system"))}] if system else []


def with_system(row: Row, messages: Messages) -> Messages:
    """The messages after that of the column `system`, unless they begin with the same."""
    said = system_of(row)
    return messages if said == messages[:1] else [*said, *messages]


def variables_of(row: Row) -> dict[str, Any]:
    """Arguments for the chat template that the row brings."""
    value = row.optional("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("an object", value, row.name("chat_template_kwargs"))
    if taken := [key for key, part in value.items() if part is not None and _TAKEN.fullmatch(key)]:
        what = f"{taken[0]!r} is an argument of apply_chat_template, and no variable of the template"
        raise BadRow("template argument", what, row.name("chat_template_kwargs"), "Take it away.")
    return {key: part for key, part in value.items() if part is not None}


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
