"""Render a conversation by turns: each trained answer after its own prompt.

The prompt is the template's own for generation, after all messages before the answer. The answer is the text that the template adds to this
prompt once the answer is the last message: the model has to write it, with its end. In a whole conversation, templates of thinking models show
both differently: they leave out the thoughts of earlier answers, or end the last answer in a token of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from packtrain.data.formats.examples import Conversation
from packtrain.data.sources.chunks import BadRow, Json
from packtrain.data.tokens.cache import BY_REQUEST, REWRITTEN, WITHOUT_THOUGHTS, Document
from packtrain.data.tokens.loss_mask import (
    EMPTY_THOUGHT,
    THINKING_OFF,
    UNVERIFIED,
    ChatEncoder,
    LossOn,
    Rendered,
    Told,
    find_thought,
    find_turns,
    make_document,
    with_switch,
    with_thought_beside,
)

_OPENED = re.compile(
    r"(?:<think>|<\|START_THINKING\|>|<\|channel>thought)\s*((?:</think>|<\|END_THINKING\|>|<channel\|>)\s*)?\Z"
)
"""End of a prompt that opens a thought, or has an empty one (in group 1)."""
_QUESTION, _ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "ANSWER"}
_CLOSED = re.compile(r"</think>\s*\Z")


class Answer(NamedTuple):
    """Answer to the prompt `asked`: the `text` that the model writes, with its end. It is the last message of `given`."""

    given: Conversation
    asked: Rendered
    text: str

    def compare(self, told: str) -> int:
        """Return 0 if the whole conversation begins with prompt and answer, else the reason."""
        if told.startswith(self.asked.text + self.text):
            return 0
        *before, own = (find_thought(message) for message in self.given.messages if message["role"] == "assistant")
        is_forgotten = own not in told or any(thought not in self.asked.text for thought in before)
        return WITHOUT_THOUGHTS if is_forgotten else REWRITTEN

    def trains_as_in(self, told: Told) -> bool:
        """Return whether the same tokens are trained in `told`. TRL's marks also hold a <think> that the prompt opens."""
        return self.given.variables == told.given.variables and not self.asked.text.rstrip().endswith("<think>")


@dataclass(frozen=True)
class TurnEncoder(ChatEncoder):
    """Encoder of conversations, as a whole or by turns."""

    def encode_turns(
        self, conversation: Conversation, loss_on: LossOn, told: Told | None
    ) -> tuple[list[Document], bool, int]:
        """Return a document for each trained answer, the flag of `encode`, and the reason.

        There are no documents, and the reason is 0, if the whole conversation `told` has the same prompts and answers. Then its spans are filled
        in, so that `encode` need not look for them. Without `told` there are always documents. Raises BadRow for an uncertain prompt or answer.
        """
        turns = find_turns(conversation, loss_on)[1]
        answers = [self._find_answer(conversation, turn, told) for turn in turns]
        reason = BY_REQUEST
        if told is not None:
            text = self._to_end(told.rewritten, told.rendered.text)
            reason = min(filter(None, (answer.compare(text) for answer in answers)), default=0)
            if not reason and self._end and not self._closing and all(answer.trains_as_in(told) for answer in answers):
                told.spans.extend((len(answer.asked.text), len(answer.asked.text + answer.text)) for answer in answers)
        if not reason or not turns:
            return [], False, 0
        self._check_tools(answers[-1].given, self.render(answers[-1].given))
        encoded = [self._encode_answer(answer) for answer in answers]
        return [document for document, _ in encoded], any(apart for _, apart in encoded), reason

    def _find_answer(self, conversation: Conversation, turn: int, told: Told | None) -> Answer:
        """Find the answer of a turn, and its prompt. Raises BadRow if the template does not show them."""
        given = with_switch(replace(conversation, messages=conversation.messages[: turn + 1]), [turn])
        thought = find_thought(given.messages[turn])
        rewritten, asked = self._ask(given)
        if (
            thought and _CLOSED.search(asked.text) and not THINKING_OFF.keys() & given.variables
        ):  # closed unless asked to think
            given = replace(given, variables={**given.variables, **dict.fromkeys(THINKING_OFF, True)})
            rewritten, asked = self._ask(given)
        rendered = told.rendered if told and told.rewritten == rewritten else self._render(rewritten)
        whole = self._to_end(rewritten, rendered.text)
        content = rewritten.messages[turn]["content"] or ""
        if not (text := _continue(asked.text, whole, thought, content)):
            # gpt-oss shows earlier thoughts in the prompt, but no more once the answer follows
            *history, answer = given.messages
            bare, before = self._ask(replace(given, messages=[*map(_without_thought, history), answer]))
            if self._to_end(bare, self._render(bare).text) == whole:
                text = _continue(before.text, whole, thought, content)
        text = text.rstrip().removesuffix(self._closing).rstrip()
        if not text:
            what = f"the prompt of this turn ends in {asked.text[-16:]!r}, and the chat template does not show what follows"
            fix = "Set data.render=conversation, or data.chat_template to another template."
            raise BadRow(UNVERIFIED, what, f"messages[{turn}]", fix)
        return Answer(given, asked, text)

    def _ask(self, given: Conversation) -> tuple[Conversation, Rendered]:
        """Return the conversation rewritten for the template, and the prompt for its last message."""
        rewritten = self._rewrite(given)
        return rewritten, self._render(rewritten, rewritten.messages[:-1], generation_prompt=True)

    def _to_end(self, rewritten: Conversation, text: str) -> str:
        """Return the rendered conversation with the end of its last turn. Only TRL's version may have it (GLM-4.5)."""
        if self._end or self.template.marked is None:
            return text
        told = self._render(rewritten, template=self.template.marked).text
        return told if told.startswith(text) else text

    def _encode_answer(self, answer: Answer) -> tuple[Document, bool]:
        """Return the document of prompt and answer, and whether they are tokenised apart."""
        given, asked, said = answer.given, answer.asked.text, answer.text
        turn, text, start = len(given.messages) - 1, asked + said, len(asked)
        self._check_said(given, [turn], said, said)
        thinks = any(given.variables.get(switch) for switch in THINKING_OFF)
        empty = None if thinks else EMPTY_THOUGHT.match(text, start)
        span = (empty.end() if empty else start, len(text))
        prompt, encoded = self.tokenizer.ids(asked), self.tokenizer.encode(text)
        encoded, separated = self._separate_at_borders(encoded, text, [span])
        if not np.array_equal(encoded.ids[: len(prompt)], prompt):
            encoded, separated = self._separate_at_borders(encoded, text, [span], {start})
        mask = np.zeros(len(encoded.ids), dtype=bool)
        mask[self._cut_after_end((encoded.starts >= span[0]).nonzero()[0], encoded, text)] = True
        mask[: len(prompt)] = False
        return make_document(encoded, mask, given.messages[:turn], answer.asked), separated

    @cached_property
    def _end(self) -> str:
        """Return what the template writes after the last answer."""
        return self._probe(_QUESTION, _ANSWER).rpartition("ANSWER")[2].strip()

    @cached_property
    def _closing(self) -> str:
        """Return EOS if the template writes it behind the end of the last turn (Phi-3)."""
        eos = "" if self.tokenizer.eos_id is None else self.tokenizer.text_of(self.tokenizer.eos_id)
        inner = self._probe(_QUESTION, _ANSWER, _QUESTION).partition("ANSWER")[2]
        end = self._end.removesuffix(eos).strip()
        return eos if end and inner.startswith(end) and not inner.startswith(self._end) else ""


def _continue(asked: str, text: str, thought: str, content: str) -> str:
    """Return the part of `text` after the prompt `asked`; "" if that is unsure.

    The prompt may end in an opened thought, or an empty one, that the template leaves out of `text` (DeepSeek R1). Then the
    model writes the `thought` first: with its end in the `content`, or before the template's </think>.
    """
    opened = _OPENED.search(asked)
    header = asked[: opened.start()] if opened and not text.startswith(asked) else asked
    if not text.startswith(header):
        return ""
    answer = text[len(header) :]
    if opened and not opened[1] and thought and answer.startswith("</think>"):
        return thought + answer
    if header == asked or not opened:
        return answer
    if opened[1]:
        empty = EMPTY_THOUGHT.match(answer)
        return "" if thought else answer[empty.end() if empty else 0 :]
    body = content.rpartition("</think>")[2]
    if thought and content.startswith(opened[0]) and answer.startswith(body):
        return content[len(opened[0]) :] + answer[len(body) :]
    return ""


def _without_thought(message: Json) -> Json:
    """Return the message without its thought."""
    return {key: value for key, value in with_thought_beside(message).items() if key != "reasoning_content"}
