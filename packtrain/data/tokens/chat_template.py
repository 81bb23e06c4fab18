"""Chat templates: the model's own, TRL's training version, and conversations rewritten for them.

TRL ships the templates of many model families (`trl/chat_templates/NAME.jinja`) and, beside most, NAME_training.jinja:
the same template with `{% generation %}` marks around the model's turns. We read them as files, without importing
TRL. A template that equals one of TRL's gets the training version as `marked`. loss_mask.py uses its marks
only for conversations that both render alike, because some training versions change the text.

Templates agree on `content` and mostly on `tool_calls`, and on little else. They read a thought from `reasoning_content`, `reasoning`
or `thinking` (gpt-oss), others from <think> in the content (SmolLM3, DeepSeek R1's distillates). Mistral's want a nine-character id
for each call and its answer, Hermes' want the tool's name with the answer. loss_mask.py refuses anything still unread.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.config.rules.paths_and_packages import as_name, template_files, template_names
from packtrain.data.formats.examples import Conversation
from packtrain.data.formats.messages import THOUGHTS, Messages
from packtrain.data.sources.chunks import Json, is_object
from packtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The generation mark covers an answer and its end token, but not the header before it."""
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
ADVICE = "Set data.chat_template to a .jinja file or a name (chatml, llama3, qwen3 …)."


@dataclass(frozen=True)
class Template:
    """Text of a template and of its marked twin. `marked` is None without a twin, or if the text has marks itself."""

    text: str
    marked: str | None
    name: str = field(default="the tokenizer's own", compare=False)
    for_tools: str = ""  # the text for rows with tools, if it differs
    day: date | None = None  # only set if the template computes the format of its clock

    def on(self, day: date) -> Template:
        """Return the template with this day instead of the clock, so that all rows agree."""
        at = partial(_CLOCK.sub, lambda look: repr(f"{day:{look[2]}}"))
        text, for_tools = at(self.text), at(self.for_tools)
        left = day if "strftime_now" in text + for_tools else None
        return replace(self, text=text, marked=self.marked and at(self.marked), for_tools=for_tools, day=left)

    @property
    def with_tools(self) -> Template:
        """Return the template for rows with tools."""
        return replace(self, text=self.for_tools, marked=_find_twin(self.for_tools), for_tools="")

    @cached_property
    def words(self) -> frozenset[str]:
        """Return all quoted words of the text: names of roles, and harmless others."""
        return frozenset(re.findall(r"""['"](\w+)['"]""", self.text + self.for_tools))

    @cached_property
    def keys(self) -> frozenset[str]:
        """Return all words after a dot or in quotes, and </think>. These are keys that it reads, and harmless others."""
        found = re.findall(r"""\.(\w+)|['"](\w+)['"]|(</think>)""", self.text + self.for_tools)
        return frozenset(chain.from_iterable(found))

    @property
    def content(self) -> str:
        """Return a hash of the texts and the day."""
        parts = (self.text, self.marked, self.for_tools, str(self.day))
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@lru_cache
def has_marks(text: str) -> bool:
    """Return whether the text of a template has generation marks."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def choose_template(name: str | None, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """Return the template called `name`: a .jinja file, or one of `template_names()`. Default: the tokenizer's own.

    Returns None if the tokenizer has none either: only conversations need one. Raises UserError for an unknown name, and a file
    that cannot be read or is no template.
    """
    if name is None:
        own: object = getattr(tokenizer, "chat_template", None)
        named: Json = own if is_object(own) else {"default": own}
        text, for_tools = named.get("default"), str(named.get("tool_use") or "")
        return Template(text, _find_twin(text), for_tools=for_tools) if isinstance(text, str) and text else None
    path = Path(os.path.expanduser(name))
    if path.suffix in (".jinja", ".j2") or os.path.isfile(path):
        try:
            text = path.read_text(encoding="utf-8")
            return Template(text, _find_twin(text), name=str(path))
        except (OSError, UnicodeDecodeError) as error:
            what = f"cannot read the chat template: {error}"
            raise UserError(what, where="data.chat_template", fix=ADVICE, code="unreadable-template") from error
    if (key := as_name(name)) not in template_names():
        what = f"no chat template is called {name!r}"
        raise UserError(what, where="data.chat_template", fix=ADVICE, code="no-such-template")
    text = CHATML if key == "chatml" else _read_shipped(key)
    return Template(text, _find_twin(text), name=key)


def give_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the template called `name` on the tokenizer. The trained model is then prompted as in training.

    Its generation marks become `{% if true %}`: programs other than transformers do not know them.
    """
    template = choose_template(name, tokenizer)
    if template is not None:
        marks = re.compile(r"(\{%-?\s*)(end)?generation(\s*-?%\})")
        words = {None: "if true", "end": "endif"}
        tokenizer.chat_template = marks.sub(lambda mark: f"{mark[1]}{words[mark[2]]}{mark[3]}", template.text)


def _read_shipped(name: str) -> str:
    return template_files()[name].read_text(encoding="utf-8")


def _find_twin(text: str) -> str | None:
    names = () if has_marks(text) else template_names()
    pairs = ((name, f"{name}_training") for name in names if f"{name}_training" in names)
    return next((_read_shipped(twin) for name, twin in pairs if _read_shipped(name).strip() == text.strip()), None)


@lru_cache
def _find_thought_key(template: str) -> str | None:
    """Find the key of thoughts in a template. "content" means <think> in the content; None means no thoughts."""
    read = (key for key in THOUGHTS if re.search(rf"""[.'"]{key}\b""", template))
    return next(read, "content" if "</think>" in template else None)


def rewrite_for_template(template: str, conversation: Conversation, *, text_arguments: bool = False) -> Conversation:
    """Move thoughts, calls and ids of a conversation to the keys that the template reads."""
    messages, key = conversation.messages, _find_thought_key(template)
    if any("tool_calls" in message for message in messages):
        messages = _with_ids(messages, short=re.search(r"id\s*\|\s*length\s*!=\s*9", template) is not None)
    if key is not None and any("reasoning_content" in message for message in messages):
        messages = [_move_thought(message, key) for message in messages]
    if text_arguments:
        messages = [*map(_with_text_arguments, messages)]
    return conversation if messages is conversation.messages else replace(conversation, messages=messages)


def _move_thought(message: Json, key: str) -> Json:
    message = dict(message)
    thought = message.pop("reasoning_content", None)
    if thought is not None and key == "content":
        message["content"] = f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"
    elif thought is not None:
        message[key] = thought
    return message


def _with_text_arguments(message: Json) -> Json:
    """Return the message with call arguments as JSON text, and null for an empty content."""
    calls = copy.deepcopy(message.get("tool_calls", []))
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**message, "content": message["content"] or None, "tool_calls": calls} if calls else message


def _with_ids(messages: Messages, short: bool) -> Messages:
    """Give each call an id, and each tool's answer its call's id and name. `short`: ids have nine characters."""
    made: Messages = []
    named: dict[str, tuple[str, str]] = {}
    number, waiting = 0, dict[str, str]()
    for message in messages:
        if "tool_calls" in message:
            calls, waiting = list[Json](), {}
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
