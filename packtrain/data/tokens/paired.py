"""Preference pairs to tokens: a row becomes two documents, prompt + chosen and prompt + rejected.

Ids and targets are those of TRL's DPOTrainer: prompt with answer is tokenised as one text, and the answer starts where
the tokenised prompt and this part, in either document. That is the prompt's end, unless tokens reach over the border or
the template renders the prompt differently alone: such rows are counted. Every token after the prompt is a target, also
what a user says inside an answer of several turns. So both documents begin with the same tokens, and their first targets
are at the same place; for plain text EOS is the last.

A pair that is too long keeps the first tokens of each document (TRL's `keep_start`), or loses the beginning of the
prompt (`keep_end`), as much in both documents, so that both answers still follow the same words. TRL's keep_end cuts
each alone, and compares answers to different prompts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packtrain.data.formats.conversations import Conversation, Format, Pair, Row
from packtrain.data.formats.identity import number_of
from packtrain.data.formats.preference import Choice, asked_by, choice_of
from packtrain.data.formats.ranked import best_and_worst
from packtrain.data.report import Fate
from packtrain.data.sources.rows import BadRow
from packtrain.data.sources.rows import Row as RawRow
from packtrain.data.tokens.templates import ADVICE
from packtrain.data.tokens.tokenise import TOO_LONG, UNTRAINED, UNTRAINED_ONCE_CUT, Encoder, Tokenised
from packtrain.errors import Problem

SAME = "identical answers"
SAME_ONCE_CUT = "identical answers within data.max_length"
NO_ROOM = "an answer leaves no room for its prompt within data.max_length"


@dataclass(frozen=True)
class PairEncoder(Encoder):
    """Turns chunks of preference pairs into documents, two for each row that is kept."""

    def _content(self, row: RawRow, format: Format) -> int:
        """The prompt's alone: all answers to it are trained, or all are held out."""
        if isinstance(row, dict):
            with suppress(BadRow):
                return number_of(asked_by(self._pair_in(row, format)))
        return super()._content(row, format)

    def _documents(self, row: dict[str, Any], format: Format) -> tuple[list[Tokenised], bool]:
        prompt, *answered = self._encoded(choice_of(self._pair_in(row, format)))
        border = min(_common(prompt, ids) for ids in answered)
        return [(ids, np.arange(len(ids)) >= border) for ids in answered], border < len(prompt)

    def _pair_in(self, values: dict[str, Any], format: Format) -> Row:
        row = Row(values, dict(self.settings.columns), self._named_roles)
        return best_and_worst(row) if format == "ranked" else row

    def _encoded(self, choice: Choice) -> list[np.ndarray]:
        """Ids of the prompt, of prompt + chosen and of prompt + rejected."""
        chosen, rejected = choice.chosen, choice.rejected
        if isinstance(chosen, Conversation) and isinstance(rejected, Conversation):
            if self._chat is None:
                what = f"messages need a chat template, and {self.codec.name} has none"
                raise BadRow("no chat template", what, fix=ADVICE)
            return self._chat.encode_choice(chosen, rejected)
        assert isinstance(chosen, Pair) and isinstance(rejected, Pair)
        if self.codec.eos_id is None:
            fix = "Set eos_token on the tokenizer: without it the model cannot learn to stop."
            raise BadRow("no EOS token", f"the tokenizer {self.codec.name} has no EOS token", fix=fix)
        texts = (chosen.prompt + chosen.completion, rejected.prompt + rejected.completion)
        prompt = self.codec.encode(chosen.prompt, special=True).ids
        if len(prompt) and prompt[-1] == self.codec.eos_id:  # a tokenizer that ends every text, not this prompt
            prompt = prompt[:-1]
        return [prompt, *(self._ended(self.codec.encode(text, special=True).ids) for text in texts)]

    def _overlong_problem(self, where: str, length: int) -> Problem:
        fix = "Raise data.max_length, or set data.overlong to truncate, keep_end or drop."
        return replace(super()._overlong_problem(where, length), fix=fix)

    def _fitted(self, documents: list[Tokenised], fate: Fate) -> tuple[list[Tokenised], Fate]:
        """Both documents or none, and `fate` with what that means."""
        kept, limit = documents, self.settings.max_length
        if _same(documents):
            return [], fate._replace(dropped=SAME)
        if not all(mask.any() for _, mask in documents):
            return [], fate._replace(dropped=UNTRAINED)
        excess = 0 if limit is None else max(len(ids) for ids, _ in documents) - limit
        if excess <= 0:
            return documents, fate._replace(documents=2)
        if self.settings.overlong == "drop":
            return [], fate._replace(dropped=TOO_LONG)
        if self.settings.overlong == "keep_end":
            if excess >= int(np.argmax(documents[0][1])):
                return [], fate._replace(dropped=NO_ROOM)
            kept = [(ids[excess:], mask[excess:]) for ids, mask in documents]
        else:
            kept = [(ids[:limit], mask[:limit]) for ids, mask in documents]
            if not all(mask.any() for _, mask in kept):
                return [], fate._replace(dropped=UNTRAINED_ONCE_CUT)
            if _same(kept):
                return [], fate._replace(dropped=SAME_ONCE_CUT)
        lost = sum(len(ids) for ids, _ in documents) - sum(len(ids) for ids, _ in kept)
        return kept, fate._replace(documents=2, truncated=True, cut_tokens=lost)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Number of leading tokens that both share."""
    shortest = min(len(first), len(second))
    differs = first[:shortest] != second[:shortest]
    return int(np.argmax(differs)) if differs.any() else shortest


def _same(documents: list[Tokenised]) -> bool:
    return np.array_equal(documents[0][0], documents[1][0])
