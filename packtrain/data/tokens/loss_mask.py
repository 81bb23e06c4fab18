"""Turn conversations into tokens with an exact loss mask, or raise an error; never guess.

The conversation is rendered to text and tokenised once. The model's turns are found as spans of characters and mapped to
tokens by their offsets. A border may fall inside a token: the header ends in white space and the answer begins with some.
Then both sides are tokenised separately, as at inference. Three ways find the spans:

1. the template's own `{% generation %}` marks;
2. the marks of TRL's training version of the template, used only if both render this very conversation to the same text;
3. prefixes: we also render the conversation up to a turn, with the generation prompt, and up to the turn's end. Each
   must be a prefix of the whole text. This proves that the template does not rewrite history (Qwen3 strips earlier
   thoughts, so it is refused; turns.py then renders each answer, or encode.py takes the training version).

Not trained are the role's header before an answer, an empty thought in front of it, white space after its end, and turns of weight 0.
If no trained turn has a thought, the template is told that thinking is off. Refused: marks over the user's or the system's
text, turns that do not end in a control token (the model would not learn to stop), and a template that
leaves out an answer, a thought, a call or the tools.
Source: transformers' apply_chat_template(return_assistant_tokens_mask=True), TRL's assistant_only_loss.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple, cast

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template  # pyright: ignore[reportUnknownVariableType]

from packtrain.data.formats.examples import Conversation
from packtrain.data.formats.messages import Messages, has_pictures, texts_of
from packtrain.data.pictures.encoded import Picture
from packtrain.data.pictures.processor import PictureProcessor, Span
from packtrain.data.sources.chunks import BadRow, Json
from packtrain.data.tokens.cache import Document
from packtrain.data.tokens.chat_template import Template, has_marks, rewrite_for_template
from packtrain.data.tokens.tokenizer import Encoded, PlainTokenizer
from packtrain.errors import UserError, is_ours
from packtrain.wording import first_line

LossOn = Literal["assistant", "completion", "all"]
UNVERIFIED = "loss mask cannot be verified"
TEMPLATE_ADVICE = (
    "If turns end in <|im_end|>: data.chat_template=qwen3_instruct_2507 (has tools) or qwen3_training (has thoughts, too); "
    "in <|eot_id|>: llama3_1 (tools); in <|call|>: gptoss. Or remove them from the data."
)
THINKING_OFF = {"enable_thinking": False, "thinking": False}
"""Variables that ask templates for an answer without a thought; DeepSeek and Granite read the second."""
EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>\s*")
_LEADING_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
ADVICE = "Set data.chat_template to a template with {% generation %} marks, or data.loss_on=completion or all."


_CALL = {"type": "function", "function": {"name": "NAME", "arguments": {"key": "value"}}}
_CALLING = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


class Rendered(NamedTuple):
    """Text of a conversation, with the characters between generation `marks`, and of each picture."""

    text: str
    marks: list[Span]
    pictures: list[Span]


class Told(NamedTuple):
    """Conversation as given, rewritten for the template, and rendered once. `spans` of trained turns, if known."""

    given: Conversation
    rewritten: Conversation
    rendered: Rendered
    spans: list[Span]


@dataclass(frozen=True)
class ChatEncoder:
    """Encoder of conversations with one template; made once per process. Without `pictures` the model takes text alone."""

    tokenizer: PlainTokenizer
    template: Template
    pictures: PictureProcessor | None = None

    def tell(self, conversation: Conversation, loss_on: LossOn) -> Told:
        """Render a whole conversation. Raises BadRow if the template refuses."""
        given = with_switch(conversation, find_turns(conversation, loss_on)[1])
        rewritten = self._rewrite(given)
        return Told(given, rewritten, self._render(rewritten), [])

    def encode(self, conversation: Conversation, loss_on: LossOn, told: Told | None = None) -> tuple[Document, bool]:
        """Return the document and a flag. The flag: a turn's border split the text for tokenising.

        `completion` trains the assistant's turns from `answer_from` on, or else the last one. Without an assistant's turn nothing is trained.
        `told` is what `tell` returns for it. Raises BadRow if ids or targets are uncertain.
        """
        given, conversation, rendered, _ = told = told or self.tell(conversation, loss_on)
        turns, wanted = find_turns(given, loss_on)
        untrained = [turn for turn in turns if given.messages[turn].get("weight") == 0]
        text = rendered.text
        self._check_tools(given, text)
        encoded = self.tokenizer.encode(text)
        if loss_on == "all":
            if untrained:
                what = "this turn is not to be trained (weight 0), but data.loss_on=all trains everything"
                raise BadRow("weight", what, f"messages[{untrained[0]}]", "Set data.loss_on=assistant.")
            self._check_said(given, turns[-1:], text, text)
            return make_document(encoded, np.ones(len(encoded.ids), dtype=bool), given.messages, rendered), False
        if not wanted:
            return make_document(encoded, np.zeros(len(encoded.ids), dtype=bool), given.messages, rendered), False
        spans, whole = self._find_spans(told, turns, wanted)
        if not whole:
            _check_others(conversation, text, spans, self.template.name)
        spoken = "\n".join(text[start:end] for start, end in spans)
        self._check_said(given, wanted, spoken if whole else text, text if has_marks(self.template.text) else spoken)
        encoded, separated = self._separate_at_borders(encoded, text, spans)
        mask = np.zeros(len(encoded.ids), dtype=bool)
        for start, end in spans:
            turn = ((encoded.starts >= start) & (encoded.starts < end)).nonzero()[0]
            mask[self._cut_after_end(turn, encoded, text)] = True
        return make_document(encoded, mask, given.messages, rendered), separated

    def encode_answers(self, *answered: Conversation, apart: bool = False) -> list[Document]:
        """Return the prompt (with the generation prompt) and each conversation, nothing trained.

        All have the same messages before `answer_from`. `apart`: they are tokenised in two parts, the first as long as the prompt.
        Raises BadRow if the template refuses or leaves out a part.
        """
        first = answered[0]
        asked = self._rewrite(replace(first, messages=first.prompt))
        found = [(first.prompt, self._render(asked, generation_prompt=True))]
        for side in answered:
            rendered = self._render(self._rewrite(side))
            text = rendered.text
            self._check_tools(side, text)
            turns = range(side.answer_from or 0, len(side.messages))
            said = [turn for turn in turns if side.messages[turn]["role"] == "assistant"]
            self._check_said(side, said, text, text)
            found.append((side.messages, rendered))
        cuts = [len(found[0][1].text)] if apart else []
        encoded = [self.tokenizer.encode(rendered.text, cuts) for _, rendered in found]
        nothing = [np.zeros(len(own.ids), dtype=bool) for own in encoded]
        return [make_document(own, mask, *of) for own, mask, of in zip(encoded, nothing, found, strict=True)]

    def _find_spans(self, told: Told, turns: list[int], wanted: list[int]) -> tuple[list[Span], bool]:
        """Return the spans of the wanted turns, and whether they are whole turns (way 3)."""
        conversation, (text, marks, _) = told.rewritten, told.rendered
        thinks = any(conversation.variables.get(switch) for switch in THINKING_OFF)
        strip = partial(self._strip_header, text, thinks)
        if not has_marks(self.template.text):
            if told.spans:
                return [*map(strip, told.spans)], True
            if self.template.marked is not None:
                twin = self._render(conversation, template=self.template.marked)
                marks = twin.marks if twin.text == text else []
        marks = [span for span in map(strip, marks) if span[0] < span[1]]
        if marks and len(wanted) == len(turns):
            return marks, False
        if marks and len(marks) == len(turns):
            return [marks[turns.index(turn)] for turn in wanted], False
        return [strip(self._find_span_by_prefixes(conversation, text, turn)) for turn in wanted], True

    def _find_span_by_prefixes(self, conversation: Conversation, text: str, turn: int) -> Span:
        messages, place = conversation.messages, f"messages[{turn}]"
        try:
            before = self._render(conversation, messages[:turn], generation_prompt=True).text
            if not text.startswith(before) and THINKING_OFF.items() <= conversation.variables.items():
                given = {key: value for key, value in conversation.variables.items() if key not in THINKING_OFF}
                conversation = replace(conversation, variables=given)  # answers lack the empty thought
                before = self._render(conversation, messages[:turn], generation_prompt=True).text
        except BadRow as bad:
            what = f"the conversation before this turn cannot be rendered alone: {bad.what}"
            raise BadRow(UNVERIFIED, what, place, ADVICE) from bad
        if not text.startswith(before):
            raise BadRow(UNVERIFIED, "the chat template rewrites what comes before this turn", place, ADVICE)
        through = text if turn + 1 == len(messages) else self._render(conversation, messages[: turn + 1]).text
        if not text.startswith(through) or len(through) <= len(before):
            what = "the chat template renders this turn differently once others follow it (as Qwen3 strips thoughts)"
            raise BadRow(UNVERIFIED, what, place, ADVICE)
        return len(before), len(before) + len(through[len(before) :].rstrip())

    def _strip_header(self, text: str, thinks: bool, span: Span) -> Span:
        """Return the span without the role's header and, unless the row `thinks`, an empty thought."""
        start, end = span
        for header in self._headers[thinks:]:
            for inside in range(len(header) + 1):
                before = start + inside - len(header)
                if before >= 0 and text.startswith(header, before):
                    start = min(start + inside, end)
                    break
        empty = None if thinks else EMPTY_THOUGHT.match(text, start, end)
        return (empty.end() if empty else start), end

    @cached_property
    def _headers(self) -> tuple[str, str]:
        """Return the text before every answer: with thinking off, and up to an opening <think>."""
        question = {"role": "user", "content": "question"}
        found = list[str]()
        for how in (THINKING_OFF, {}):
            said, asked = self._probe(question, **how), self._probe(question, generation_prompt=True, **how)
            found.append(asked.removeprefix(said) if said and asked.startswith(said) else "")
        return "" if found[0].rstrip().endswith("<think>") else found[0], found[1].split("<think>")[0]

    def _probe(self, *messages: Json, generation_prompt: bool = False, **variables: object) -> str:
        """Render the messages; return "" if the template refuses them."""
        with suppress(BadRow, UserError):
            return self._render(
                Conversation([*messages], variables=variables), generation_prompt=generation_prompt
            ).text
        return ""

    def render(self, conversation: Conversation) -> str:
        """Render the conversation. Raises BadRow if the template refuses."""
        return self._render(self._rewrite(conversation)).text

    def _rewrite(self, conversation: Conversation) -> Conversation:
        if self._repeats_thought[any(conversation.variables.get(switch) is False for switch in THINKING_OFF)]:
            messages = [*map(with_thought_beside, conversation.messages)]
            conversation = replace(conversation, messages=messages)
        made, tag = self._with_keys(conversation), self._result_tag
        return replace(made, messages=[_without_tag(message, tag) for message in made.messages]) if tag else made

    def _with_keys(self, conversation: Conversation) -> Conversation:
        return rewrite_for_template(self.template.text, conversation, text_arguments=self._takes_text)

    @cached_property
    def _result_tag(self) -> str:
        """Return the tag that the template writes around a tool's answer; "" without one."""
        made = self._with_keys(Conversation([*_CALLING, {"role": "tool", "content": "RESULT"}]))
        found = re.search(r"<(\w+)>\s*RESULT\s*</\1>", self._probe(*made.messages))
        return found[1] if found else ""

    @cached_property
    def _repeats_thought(self) -> tuple[bool, bool]:
        """Return whether the template repeats a thought: by default, and with thinking off.

        The thought stands at the start of a content.
        """
        question, block, found = {"role": "user", "content": "question"}, "<think>\n\n</think>\n\n", list[bool]()
        for how in ({}, THINKING_OFF):
            turns = ({"role": "assistant", "content": f"{at}ANSWER"} for at in ("", block))
            bare, begun = (self._probe(question, turn, **how) for turn in turns)
            own = bare.split("ANSWER")[0].rstrip().endswith("</think>")
            found.append(own and begun.count("</think>") > bare.count("</think>"))
        return found[0], found[1]

    @cached_property
    def nameless_roles(self) -> frozenset[str]:
        """Return the roles whose `name` is not in the rendered text. A tool's name is in its call, too."""
        turns = [{"role": role, "content": role, "name": f"NAME {role}"} for role in ("system", "user", "assistant")]
        text = self._probe(*turns) or self._probe(*turns[1:])  # some templates refuse system prompts
        return frozenset(turn["role"] for turn in turns if turn["name"] not in text)

    @cached_property
    def _takes_text(self) -> bool:
        """Return whether the template takes call arguments only as JSON text, like DeepSeek's."""
        rewrite = partial(rewrite_for_template, self.template.text, Conversation(_CALLING))
        as_object, as_text = (self._probe(*rewrite(text_arguments=form).messages) for form in (False, True))
        return '{"key": "value"}' in as_text and ("NAME" not in as_object or "{'key'" in as_object)

    @cached_property
    def drops_system(self) -> bool:
        """Return whether the template silently leaves out system messages."""
        asked = {"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "question"}
        text = self._probe(*asked, {"role": "assistant", "content": "answer"})
        return bool(text) and "SYSTEM" not in text

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end a turn. These are EOS, and this template's control token after an answer."""
        ends = set[int]() if self.tokenizer.eos_id is None else {self.tokenizer.eos_id}
        text = self._probe({"role": "user", "content": "question"}, {"role": "assistant", "content": "ANSWER"})
        _, answer, rest = text.rpartition("ANSWER")
        tail = self.tokenizer.ids(rest.lstrip())
        if answer and len(tail) and int(tail[0]) in self.tokenizer.special_ids:
            ends.add(int(tail[0]))
        return frozenset(ends)

    def _check_tools(self, conversation: Conversation, text: str) -> None:
        """Raise BadRow if the text lacks the tools, or the system prompt that lists them."""
        are_lost = conversation.tools_in_system and self.drops_system
        if conversation.tools:
            with suppress(BadRow):  # some templates are for tools only
                are_lost = self.render(replace(conversation, tools=None)) == text
        if are_lost:
            what = f"the chat template ({self.template.name}) leaves out the tools"
            raise BadRow("tools left out", what, "tools", TEMPLATE_ADVICE)

    def _check_said(self, conversation: Conversation, turns: list[int], answers: str, others: str) -> None:
        """Raise BadRow if text of these turns is lost. Answers must be in `answers`, calls and thoughts in `others`."""
        position = 0
        for turn in turns:
            message, place = conversation.messages[turn], f"messages[{turn}]"
            # templates for images drop string content; some for tools drop text beside a call
            answer = message["content"].rsplit("</think>", 1)[-1].strip()
            if answer not in answers:
                what = f"the chat template leaves out or rewrites the answer {answer[:40]!r}"
                raise BadRow(UNVERIFIED, what, f"{place}.content", "Set data.chat_template to another template.")
            if thought := find_thought(message):
                if (position := others.find(thought, position)) < 0:
                    what = f"the chat template ({self.template.name}) leaves out the thought {thought[:40]!r}"
                    fix = f"{TEMPLATE_ADVICE} If it keeps those of the last turn, data.loss_on=completion trains that."
                    raise BadRow(UNVERIFIED, what, f"{place}.reasoning_content", fix)
                position += len(thought)  # one thought must not stand for another
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            lost = next((name for name in calls if name not in others), None)
            unsure = len(calls) > 1 or (calls and has_marks(self.template.text))
            if lost is None and unsure and not self._depends_on_last_call(conversation, turn):
                lost = calls[-1]
            if lost is not None:
                what = f"the chat template ({self.template.name}) leaves out the call of {lost!r}"
                fix = f"Write parallel calls as turns of their own, or: {TEMPLATE_ADVICE}"
                raise BadRow(UNVERIFIED, what, f"{place}.tool_calls", fix)

    def _depends_on_last_call(self, conversation: Conversation, turn: int) -> bool:
        """Return whether the text changes with the turn's last call. (Its name may also be among the tools.)"""
        until = conversation.messages[: turn + 1]
        fewer = {**until[turn], "tool_calls": until[turn]["tool_calls"][:-1]}
        if not fewer["tool_calls"]:
            del fewer["tool_calls"]
        try:
            without = self.render(replace(conversation, messages=[*until[:-1], fewer]))
        except BadRow:
            return True
        return without != self.render(replace(conversation, messages=until))

    def _separate_at_borders(
        self, encoded: Encoded, text: str, spans: list[Span], wanted: Set[int] = frozenset()
    ) -> tuple[Encoded, bool]:
        """Tokenise `text` again at borders `wanted`, and at borders of `spans` inside tokens.

        Return the tokens and whether they changed. Raises BadRow for a tokenizer that cannot tokenise a text in parts.
        """
        cuts: set[int] = set()
        while True:
            crossed = (_find_crossed_borders(encoded, text, span, self.tokenizer.special_ids) for span in spans)
            if not (borders_crossed := {border for borders in crossed for border in borders} | wanted - cuts):
                return encoded, bool(cuts)
            if not self.tokenizer.joins:
                at = min(borders_crossed)
                what = f"the border of an assistant's turn falls inside a token, in {text[max(0, at - 12) : at + 12]!r}, and this"
                what += " tokenizer cannot tokenise both sides separately: it puts a space before each text"
                raise BadRow(UNVERIFIED, what, "messages", f"Trim the white space at the turn's ends. {ADVICE}")
            cuts |= borders_crossed
            encoded = self.tokenizer.encode(text, sorted(cuts))

    def _cut_after_end(self, turn: np.ndarray, encoded: Encoded, text: str) -> np.ndarray:
        """Cut the tokens `turn` (indices) after the end-of-turn token. Raises BadRow without such a token."""
        ids, starts, ends = encoded.ids, encoded.starts, encoded.ends
        spoken = [number for number, at in enumerate(turn, 1) if text[starts[at] : ends[at]].strip()]
        if spoken and int(ids[turn[spoken[-1] - 1]]) in self.tokenizer.special_ids:
            return turn[: spoken[-1]]
        shown = text[max(0, int(ends[turn[-1]]) - 40) : int(ends[turn[-1]])] if len(turn) else ""
        what = f"an assistant's turn does not end in a control token, so the model would not learn to stop: …{shown!r}"
        fix = "Have the chat template write eos_token after the assistant's turns, inside generation marks."
        raise BadRow(UNVERIFIED, what, "messages", fix)

    def _render(
        self,
        conversation: Conversation,
        messages: Messages | None = None,
        *,
        template: str = "",
        generation_prompt: bool = False,
    ) -> Rendered:
        """Render the conversation, or its first `messages`. Placeholders of pictures become the pictures' texts."""
        messages = conversation.messages if messages is None else messages
        template, seen = template or self.template.text, pictures_of(messages)
        if self._takes_parts:
            messages = [*map(_with_parts, messages)]
        text, marks = self._call(conversation, messages, template, generation_prompt=generation_prompt)
        if not seen:
            return Rendered(text, marks, [])
        assert self.pictures is not None  # or no picture has become part of a conversation
        text, before, after = self.pictures.expand(text, seen)
        ends, gained = (
            [end for _, end in before],
            [0, *(new[1] - old[1] for old, new in zip(before, after, strict=True))],
        )
        moved = [tuple(at + gained[bisect_right(ends, at)] for at in mark) for mark in marks]
        return Rendered(text, cast("list[Span]", moved), after)

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the template leaves out contents that are strings, as LLaVA's does."""
        turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]

        def writes(messages: Messages) -> bool:
            with suppress(BadRow, UserError):
                text = self._call(Conversation(messages), messages, self.template.text)[0]
                return "QUESTION" in text and "ANSWER" in text
            return False

        return not writes(turns) and writes([*map(_with_parts, turns)])

    def _call(
        self, conversation: Conversation, messages: Messages, template: str, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Call the template. Return the text and the spans between generation marks."""
        marked = has_marks(template)
        variables: Json = {**self.tokenizer.special_tokens, **conversation.variables}
        try:
            texts, spans = render_jinja_template(
                [[*map(_without_sources, messages)]],
                tools=[*conversation.tools] if conversation.tools else None,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is a program and may raise anything
            if is_ours(error):
                raise
            token = re.fullmatch(r"'(\w+_token)' is undefined", first_line(error))
            if token and token[1] not in variables:
                what = f"the chat template ({self.template.name}) writes {token[1]}, and {self.tokenizer.name} has none"
                fix = "Name another template, or a tokenizer that has it (model.tokenizer)."
                raise UserError(what, where="data.chat_template", fix=fix, code="template-needs-token") from error
            what = f"the chat template refuses the conversation: {first_line(error)}"
            has_system = [message["role"] for message in conversation.messages[:1]] == ["system"]
            fix = "Fix the row, or data.system, if it takes no system prompt." if has_system else ""
            raise BadRow("chat template refuses", what, "messages", fix) from error
        return texts[0], cast("list[list[Span]]", spans)[0] if marked else []


def pictures_of(messages: Messages) -> list[Picture]:
    """Return the pictures of parsed messages in their order."""
    seen = (message["content"] for message in messages if has_pictures(message))
    return [part["image"] for content in seen for part in content if part["type"] == "image"]


def _with_parts(message: Json) -> Json:
    """Return the message with its content as a list of parts."""
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _without_sources(message: Json) -> Json:
    """Return the message for a template: pictures are parts without content."""
    if not has_pictures(message):
        return message
    return {
        **message,
        "content": [part if part["type"] == "text" else {"type": "image"} for part in message["content"]],
    }


def make_document(encoded: Encoded, mask: np.ndarray, messages: Messages, rendered: Rendered) -> Document:
    """Return the document of a rendered conversation. Tokens of pictures are not trained."""
    placed = list[Picture]()
    for picture, (start, end) in zip(pictures_of(messages), rendered.pictures, strict=True):
        inside = np.flatnonzero((encoded.ends > start) & (encoded.starts < end))
        placed.append(replace(picture, start=int(inside[0]), end=int(inside[-1]) + 1))
        mask[inside[0] : inside[-1] + 1] = False
    return Document(encoded.ids, mask, tuple(placed))


def _check_others(conversation: Conversation, text: str, spans: list[Span], name: str) -> None:
    """Raise BadRow if the marks of the template `name` cover a user's or system turn."""
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(text)]
    rest = "\n".join(text[end:start] for end, start in zip(ends, starts, strict=True))
    for turn, message in enumerate(conversation.messages):
        texts = map(str.strip, texts_of(message) if message["role"] in ("user", "system") else [])
        if any(said not in rest and said in text for said in texts):
            what = f"the generation marks of the chat template ({name}) cover what the {message['role']} says"
            fix = "Mark the assistant's turns only, or set data.loss_on=all to train everything."
            raise BadRow(UNVERIFIED, what, f"messages[{turn}].content", fix)


def find_turns(conversation: Conversation, loss_on: LossOn) -> tuple[list[int], list[int]]:
    """Return the assistant's turns, and those that are trained."""
    messages, first = conversation.messages, conversation.answer_from
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = turns
    if loss_on == "completion":
        wanted = turns[-1:] if first is None else [turn for turn in turns if turn >= first]
    return turns, [turn for turn in wanted if messages[turn].get("weight") != 0]


def with_switch(conversation: Conversation, turns: list[int]) -> Conversation:
    """Switch thinking off if none of the turns thinks, unless the row has a switch."""
    thinks = any(find_thought(conversation.messages[turn]) for turn in turns)
    if thinks or THINKING_OFF.keys() & conversation.variables:
        return conversation
    return replace(conversation, variables={**conversation.variables, **THINKING_OFF})


def find_thought(message: Json) -> str:
    """Return an assistant's thought, "" without one."""
    before, end, _ = message["content"].rpartition("</think>")
    return (message.get("reasoning_content") or (before.split("<think>", 1)[-1] if end else "")).strip()


def with_thought_beside(message: Json) -> Json:
    """Return an answer with its thought outside the content, if that begins with one. An empty thought is dropped."""
    found = _LEADING_THOUGHT.match(message["content"]) if message["role"] == "assistant" else None
    if not found or (found[1].strip() and message.get("reasoning_content", "").strip()):
        return message
    thought = {"reasoning_content": found[1].strip()} if found[1].strip() else {}
    return {**message, **thought, "content": message["content"][found.end() :]}


def _without_tag(message: Json, tag: str) -> Json:
    """Return a tool's answer without <tag> around it. Several answers keep the tags between them."""
    inner = re.fullmatch(rf"\s*<{tag}>\s*(.*?)\s*</{tag}>\s*", "".join(texts_of(message)), re.DOTALL)
    inner = None if has_pictures(message) else inner
    return {**message, "content": inner[1]} if inner and message["role"] == "tool" else message


def _find_crossed_borders(encoded: Encoded, text: str, span: Span, special_ids: frozenset[int]) -> list[int]:
    """Return the borders of the span that fall inside a token.

    A control token may cover white space after the end (many control tokens swallow it).
    """
    start, end = span
    crossed = [start] if ((encoded.starts < start) & (encoded.ends > start)).any() else []
    for at in ((encoded.starts < end) & (encoded.ends > end)).nonzero()[0]:
        if int(encoded.ids[at]) not in special_ids or text[end : int(encoded.ends[at])].strip():
            return [*crossed, end]
    return crossed
