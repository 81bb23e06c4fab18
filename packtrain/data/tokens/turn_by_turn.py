"""Templates that write a conversation message by message, so that one rendering shows where each message lies.

Such a template is a loop over the messages that never looks ahead, and after it at most the generation prompt. Up to any message,
the text of a whole conversation is then the text of the conversation up to there, which loss_mask.py must otherwise find
out by rendering each beginning. It is proved from the syntax tree; most templates of ChatML and Llama 3 are such, those that
look at the last question or the next message (Qwen3, tools in Qwen2.5) are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # the public function renders copies, which cannot be watched
)

_OF_THE_PAST = ("first", "index", "index0", "previtem")
"""What may be asked of the loop over the messages."""
_NEVER = ("add_generation_prompt", "self", "caller", "lipsum")


@dataclass(frozen=True, slots=True)
class TurnByTurn:
    """A proved template, and the generation prompt that it writes after any message."""

    template: Template
    prompt: str

    def render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, list[int]]:
        """The text, and the place in it where each message begins. Raises whatever the template raises."""
        pieces: list[str] = []
        begins: list[int] = []
        length = 0
        watched = _Watched(messages)
        watched.taken = lambda: begins.append(length)
        for piece in self.template.generate(
            messages=watched, tools=None, documents=None, add_generation_prompt=False, **variables
        ):
            pieces.append(piece)
            length += len(piece)
        return "".join(pieces), begins


class _Watched(list[dict[str, Any]]):
    """Messages that call `taken` when the template comes to the next one."""

    taken: Any

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self)):
            self.taken()
            yield self[number]


@lru_cache
def turn_by_turn(template: str) -> TurnByTurn | None:
    """The template as one that writes message by message; None if that is not proved. Raises what a broken template raises."""
    compiled = _compile_jinja_template(template)
    body = compiled.environment.parse(template).body
    names, aliases = {"messages"}, []
    for node in body:
        if isinstance(node, nodes.Assign) and _is_name(node.node, names) and isinstance(node.target, nodes.Name):
            names.add(node.target.name)  # as Llama 3: set loop_messages = messages
            aliases.append(node)
    at = next((at for at, node in enumerate(body) if isinstance(node, nodes.For) and _is_name(node.iter, names)), None)
    if at is None:
        return None
    loop, before, after = body[at], body[:at], body[at + 1 :]
    assert isinstance(loop, nodes.For)
    if (
        loop.test
        or loop.else_
        or loop.recursive
        or any(_depends(node, names) for node in before if node not in aliases)
    ):
        return None
    if any(_depends(node, names, within="loop") for node in loop.body):
        return None
    prompt = _constant_prompt(after)
    return None if prompt is None else TurnByTurn(compiled, prompt)


def _is_name(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _depends(node: nodes.Node, names: set[str], within: str = "") -> bool:
    """Whether a node asks for more than the first message, the current one and what came before it.

    `within` is "loop" where the name `loop` is that over the messages.
    """
    if isinstance(node, nodes.Getitem) and _is_name(node.node, names):
        return not (isinstance(node.arg, nodes.Const) and node.arg.value == 0)
    if isinstance(node, nodes.Getattr) and _is_name(node.node, {within}):
        return node.attr not in _OF_THE_PAST
    if isinstance(node, nodes.Name):
        return node.name in names or node.name in (*_NEVER, within)
    if isinstance(node, nodes.Filter) and node.name == "random":
        return True
    if isinstance(node, nodes.For):  # in its body, and there alone, `loop` is its own
        outer = [node.target, node.iter, *filter(None, [node.test]), *node.else_]
        return any(_depends(one, names, within) for one in outer) or any(_depends(one, names) for one in node.body)
    if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.Macro)):
        return True
    return any(_depends(one, names, within) for one in node.iter_child_nodes())


def _constant_prompt(after: list[nodes.Node]) -> str | None:
    """What follows the messages if asked for, "" for nothing; None if that is not known, or something follows in any case."""
    if not after:
        return ""
    if len(after) > 1 or not isinstance(after[0], nodes.If):
        return None
    asked = after[0]
    if not _is_name(asked.test, {"add_generation_prompt"}) or asked.elif_ or asked.else_:
        return None
    text = ""
    for node in asked.body:
        if not isinstance(node, nodes.Output):
            return None
        for part in node.nodes:
            try:
                text += part.data if isinstance(part, nodes.TemplateData) else str(part.as_const())
            except nodes.Impossible:
                return None
    return text
