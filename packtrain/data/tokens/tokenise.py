"""Rows to documents: convert, tokenise, mask, and fit to data.max_length. Pure; runs in every tokenising process.

A document's mask says which tokens are trained TARGETS, so its first token is never trained. A text ends in EOS, and
starts with BOS where the tokenizer adds one; rendered conversations bring their own.

Prompt and completion as strings are tokenised together, and the border is where the prompt's own tokens end (what TRL
does). Where the first tokens of the whole are not the prompt's (a token would reach over the border), both are
tokenised alone and put together, because that is what the model reads when it answers: these are counted.

A document that is cut keeps its first tokens; `split` gives consecutive parts of data.max_length, without overlap.
Preference pairs become two documents a row, in paired.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from packtrain.data.formats.conversations import Conversation, Example, Format, LossOn, Pair, Text, Tokens, convert
from packtrain.data.formats.identity import content_of
from packtrain.data.report import Fate
from packtrain.data.sources.rows import BadRow, Chunk, NoPair
from packtrain.data.sources.rows import Row as RawRow
from packtrain.data.tokens.chat import ChatEncoder
from packtrain.data.tokens.codec import Codec
from packtrain.data.tokens.templates import ADVICE, Template
from packtrain.errors import Problem, UserError

MOST_PROBLEMS = 5
UNTRAINED = "no trained token"
UNTRAINED_ONCE_CUT = "no trained token within data.max_length"
TOO_LONG = "longer than data.max_length"
Tokenised = tuple[np.ndarray, np.ndarray]
"""Ids int32[n] of a document and its trained targets bool[n]."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `data` that decide which tokens a row becomes."""

    loss_on: LossOn
    max_length: int | None
    overlong: Literal["truncate", "keep_end", "drop", "split", "error"]
    bad_rows: Literal["error", "skip"]
    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Documents:
    """Some documents end to end: ids int32[T], mask bool[T] and lengths int32[n]."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chunk, row by row; `problems` mean that the whole must stop.

    They are the first of `bad` rows, at most MOST_PROBLEMS.
    """

    documents: Documents
    fates: list[Fate]
    problems: list[Problem]
    bad: int


@dataclass(frozen=True)
class Encoder:
    """Turns chunks into documents."""

    codec: Codec
    template: Template | None
    settings: Settings

    def encode(self, chunk: Chunk, format: Format) -> Outcome:
        """Every row of the chunk, in order."""
        kept: list[Tokenised] = []
        fates: list[Fate] = []
        problems: list[Problem] = []
        for where, row in chunk.rows():
            content = self._content(row, format)
            try:
                documents, apart = self._tokens(row, format)
            except BadRow as bad:
                fates.append(Fate(content, dropped=bad.reason))
                if self.settings.bad_rows == "error" and not isinstance(bad, NoPair):
                    problems.append(bad.problem(where))
                continue
            longest = max((ids for ids, _ in documents), key=len)
            if self.settings.overlong == "error" and self._too_long(longest):
                problems.append(self._overlong_problem(where, len(longest)))
            parts, fate = self._fitted(documents, Fate(content, apart=apart))
            kept.extend(parts)
            fates.append(fate)
        return Outcome(_joined(kept), fates, problems[:MOST_PROBLEMS], len(problems))

    def check(self, format: Format, where: str) -> None:
        """Raise UserError if this tokenizer, template and data.loss_on cannot serve rows of the format at all."""
        codec, loss_on = self.codec, self.settings.loss_on
        chat = format in ("messages", "sharegpt", "alpaca")
        if chat and self.template is None:
            raise UserError(f"{format} needs a chat template, and {codec.name} has none", where=where, fix=ADVICE)
        if format == "text" and loss_on in ("assistant", "completion"):
            what = f"data.loss_on={loss_on}, but running text has no {loss_on}"
            raise UserError(what, where=where, fix="Set data.loss_on to all or auto.")
        if format in ("text", "prompt_completion") and codec.eos_id is None:
            fix = "Set eos_token on the tokenizer: without it the model cannot learn to stop."
            raise UserError(f"the tokenizer {codec.name} has no EOS token", where=where, fix=fix)
        if chat and loss_on != "all" and not codec.has_offsets:
            fix = "Use a fast tokenizer (a tokenizer.json), or data.loss_on=all."
            raise UserError(
                f"{codec.name} is a slow tokenizer that does not say where its tokens lie in the text, which "
                f"data.loss_on={loss_on} needs",
                where=where,
                fix=fix,
            )

    def _tokens(self, row: RawRow, format: Format) -> tuple[list[Tokenised], bool]:
        """The row's documents, and whether prompt and completion do not meet at a token's border."""
        if isinstance(row, BadRow):
            raise row
        try:
            documents, apart = self._documents(row, format)
        except UnicodeEncodeError as error:
            what = f"not UTF-8: a lone surrogate \\u{ord(error.object[error.start]):04x} in the text"
            raise BadRow(
                "not UTF-8", what, fix="Write it anew with the two halves of the character together."
            ) from None
        for _, mask in documents:
            mask[:1] = False
        return documents, apart

    def _content(self, row: RawRow, format: Format) -> int:
        """What rows are told apart by, see identity.py."""
        return content_of(row, format, dict(self.settings.columns))

    def _documents(self, row: dict[str, Any], format: Format) -> tuple[list[Tokenised], bool]:
        ids, mask, apart = self._example(convert(row, format, dict(self.settings.columns), self._named_roles))
        return [(ids, mask)], apart

    def _example(self, example: Example) -> tuple[np.ndarray, np.ndarray, bool]:
        loss_on = self.settings.loss_on
        if isinstance(example, Conversation):
            if self._chat is None:
                raise BadRow(
                    "no chat template", f"messages need a chat template, and {self.codec.name} has none", fix=ADVICE
                )
            default = "assistant" if example.answer_from is None else "completion"
            return *self._chat.encode(example, default if loss_on == "auto" else loss_on), False
        if isinstance(example, Pair):
            ids, prompt_tokens, apart = self._pair(example)
            trained_from = 0 if loss_on == "all" else prompt_tokens
            return ids, np.arange(len(ids)) >= trained_from, apart
        if isinstance(example, Text):
            ids = self._ended(self.codec.encode(example.text, special=True).ids)
            return ids, np.ones(len(ids), dtype=bool), False
        return *self._given(example), False

    def _given(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        ids, mask, loss_on = tokens.input_ids, tokens.mask, self.settings.loss_on
        outside = np.flatnonzero((ids < 0) | (ids >= self.codec.vocabulary))
        if len(outside):
            what = f"token {ids[outside[0]]} is not in the vocabulary of {self.codec.vocabulary}"
            raise BadRow(
                "token outside the vocabulary", what, f"input_ids[{outside[0]}]", "Use the model's own tokenizer."
            )
        if loss_on in ("assistant", "completion") and mask is None:
            fix = "Add labels or a mask, or set data.loss_on to all or auto."
            raise BadRow(
                "no mask", f"data.loss_on={loss_on}, but the row has neither labels nor a mask", "input_ids", fix
            )
        return ids, np.ones(len(ids), dtype=bool) if mask is None or loss_on == "all" else mask

    @cached_property
    def _chat(self) -> ChatEncoder | None:
        return None if self.template is None else ChatEncoder(self.codec, self.template)

    @cached_property
    def _named_roles(self) -> frozenset[str]:
        return frozenset() if self.template is None else self.template.words

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        """`ids` with EOS after them, unless it is there."""
        eos = self.codec.eos_id
        return ids if eos is None or (len(ids) and ids[-1] == eos) else np.append(ids, np.int32(eos))

    def _pair(self, pair: Pair) -> tuple[np.ndarray, int, bool]:
        """Ids of prompt, completion and EOS, the number of tokens of the prompt, and whether they were made apart."""
        prompt = self.codec.encode(pair.prompt, special=True).ids
        if len(prompt) and prompt[-1] == self.codec.eos_id:  # a tokenizer that ends every text, not this prompt
            prompt = prompt[:-1]
        whole = self.codec.encode(pair.prompt + pair.completion, special=True).ids
        if len(whole) > len(prompt) and np.array_equal(whole[: len(prompt)], prompt):
            return self._ended(whole), len(prompt), False
        return self._ended(np.concatenate([prompt, self.codec.encode(pair.completion).ids])), len(prompt), True

    def _too_long(self, ids: np.ndarray) -> bool:
        return self.settings.max_length is not None and len(ids) > self.settings.max_length

    def _overlong_problem(self, where: str, length: int) -> Problem:
        what = f"{length} tokens, but data.max_length={self.settings.max_length}"
        return Problem(what, where, "Raise data.max_length, or set data.overlong to truncate, split or drop.")

    def _fitted(self, documents: list[Tokenised], fate: Fate) -> tuple[list[Tokenised], Fate]:
        """The document's parts that are kept, each with a trained token (or none), and `fate` with what that means."""
        ((ids, mask),) = documents
        if not mask.any():
            return [], fate._replace(dropped=UNTRAINED)
        if not self._too_long(ids):
            return [(ids, mask)], fate._replace(documents=1)
        limit = self.settings.max_length
        assert limit is not None
        if self.settings.overlong == "drop":
            return [], fate._replace(dropped=TOO_LONG)
        if self.settings.overlong != "split":
            if not mask[:limit].any():
                return [], fate._replace(dropped=UNTRAINED_ONCE_CUT)
            cut = fate._replace(documents=1, truncated=True, cut_tokens=len(ids) - limit)
            return [(ids[:limit], mask[:limit])], cut
        parts = []
        for start in range(0, len(ids), limit):
            part, trained = ids[start : start + limit], mask[start : start + limit].copy()
            trained[0] = False
            if trained.any():
                parts.append((part, trained))
        if not parts:
            return [], fate._replace(dropped=UNTRAINED_ONCE_CUT)
        return parts, fate._replace(
            documents=len(parts),
            split=True,
            dropped_chunks=-(-len(ids) // limit) - len(parts),
            cut_tokens=len(ids) - sum(len(part) for part, _ in parts),
        )


def _joined(kept: list[Tokenised]) -> Documents:
    return Documents(
        ids=np.concatenate([ids for ids, _ in kept] or [np.empty(0, np.int32)]).astype(np.int32, copy=False),
        mask=np.concatenate([mask for _, mask in kept] or [np.empty(0, bool)]),
        lengths=np.array([len(ids) for ids, _ in kept], dtype=np.int32),
    )
