"""Turn rows into documents: parse, tokenise, mask, and fit to data.max_length.

No side effects; this runs in every tokenising process. A document's mask marks the trained TARGETS, so its first token is never trained.
A text ends in EOS, and starts with BOS if the tokenizer adds one; rendered conversations contain their own. A cut
document keeps its first tokens; `split` gives consecutive parts of data.max_length, without overlap.

Prompt and completion as strings are tokenised together, as TRL does. If a token crosses their border, they are
tokenised separately and joined, since the model sees them so at inference. We count these rows (`apart`).

A preference pair becomes two documents, prompt + chosen and prompt + rejected, with the ids and targets of TRL's DPOTrainer:
each is tokenised as one text, and the answer starts at the first token where either differs from the tokenised prompt
(`apart` if this is not the prompt's end; both are then tokenised separately, unless data.render=conversation). Every later token is
a target, also the user's turns within an answer. An answer with a label (packtrain kto) becomes one document in the same way, as in
TRL's KTOTrainer. As in TRL, an empty thought before an answer is a target here; sft counts it as part of the prompt.

A picture is looked at (its header) when its row is encoded; its tokens are never trained, and no cut goes through them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from packtrain.config.schema import Data, Format
from packtrain.data.formats.columns import Row, fill_in_questions, hash_content, hash_row, merge_uses, read_marks
from packtrain.data.formats.examples import (
    Answered,
    Conversation,
    Example,
    PromptCompletion,
    Tokens,
    common_prompt,
    read_margin,
    read_preference,
    read_row,
    read_unpaired,
)
from packtrain.data.formats.messages import has_pictures, texts_of
from packtrain.data.pictures.processor import PictureProcessor
from packtrain.data.pictures.source import look
from packtrain.data.sources.chunks import BadRow, Chunk, Json, RawRow
from packtrain.data.tokens.cache import REWRITTEN, Document, EncodedChunk, Fate
from packtrain.data.tokens.chat_template import ADVICE, Template
from packtrain.data.tokens.loss_mask import UNVERIFIED, ChatEncoder, LossOn
from packtrain.data.tokens.tokenizer import PlainTokenizer
from packtrain.data.tokens.turns import TurnEncoder
from packtrain.errors import Problem, UserError
from packtrain.objectives.spec import OBJECTIVES

MAX_PROBLEMS = 5
UNTRAINED = "no trained token within data.max_length"
TOO_LONG = "longer than data.max_length"
SAME = "identical answers within data.max_length"
MARKED = "marked as not trained"
LEFT_OUT = "left out"
"""Reason for dropping the rows in data.leave_out."""
STRAY = "stray placeholder"
"""Reason for dropping rows whose texts have the token that stands for a picture."""
UNUSABLE = (UNTRAINED, TOO_LONG, SAME, MARKED, LEFT_OUT)
"""Reasons for dropping rows that are not bad rows."""
NO_EOS = "Set eos_token on the tokenizer: without it the model cannot learn to stop."
Flags = dict[str, float]
"""Fields of a row's Fate."""


@dataclass(frozen=True)
class Encoder:
    """Encoder of rows into the documents of an objective. A pair gives two, the chosen one first."""

    tokenizer: PlainTokenizer
    template: Template | None
    data: Data
    objective: str
    pictures: PictureProcessor | None = None

    def encode(self, chunk: Chunk, format: Format) -> EncodedChunk:
        """Encode every row of the chunk, in order."""
        kept: list[Document] = []
        fates: list[Fate] = []
        problems: list[Problem] = []
        unread: dict[str, str] = {}
        columns, folder = chunk.columns or self.data.columns, chunk.folder
        look.cache_clear()  # files may have changed
        rows = fill_in_questions([*chunk.rows()], columns) if format == "alpaca" else chunk.rows()
        for number, (where, row) in zip(chunk.numbers, rows, strict=True):
            content = hash_row(row, format, columns)
            left_out = LEFT_OUT if number in chunk.left_out else ""
            if isinstance(row, dict) and not all(read_marks(row, columns).values()):
                fates.append(Fate(content, dropped=left_out or MARKED))
                continue
            try:
                documents, flags = self.encode_row(row, format, columns, unread, folder)
            except BadRow as bad:
                fates.append(Fate(content, dropped=left_out or bad.reason))
                if self.data.bad_rows == "error" and not left_out:
                    problems.append(bad.problem(where))
                continue
            if left_out:  # tokenised all the same: its content, which may be a pair's prompt, keeps data.eval's side
                fates.append(Fate(Fate(content)._replace(**flags).content, dropped=left_out))
                continue
            longest = max(len(document.input_ids) for document in documents)
            if self.data.overlong == "error" and self.data.max_length and longest > self.data.max_length:
                what = f"{longest} tokens, but data.max_length={self.data.max_length}"
                fix = "Raise data.max_length, or set data.overlong to truncate or drop."
                problems.append(Problem(what, where, fix, code="overlong"))
            parts, fate = self._fit(documents, Fate(content)._replace(**flags), format)
            kept.extend(parts)
            fates.append(fate)
        return EncodedChunk(
            ids=np.concatenate([part.input_ids for part in kept] or [np.empty(0, np.int32)]).astype(
                np.int32, copy=False
            ),
            mask=np.concatenate([part.loss_mask for part in kept] or [np.empty(0, bool)]),
            lengths=np.array([len(part.input_ids) for part in kept], dtype=np.int32),
            fates=fates,
            problems=problems[:MAX_PROBLEMS],
            unread=unread,
            pictures=[part.pictures for part in kept] if any(part.pictures for part in kept) else [],
        )

    def check(self, format: Format, where: str) -> None:
        """Raise UserError if this tokenizer and data.loss_on cannot serve rows of the format at all."""
        tokenizer, loss_on = self.tokenizer, self.data.loss_on
        if format == "text" and loss_on in ("assistant", "completion"):
            what = f"data.loss_on={loss_on}, but running text has no {loss_on}"
            raise UserError(what, where=where, fix="Set data.loss_on to all or auto.", code="text-has-no-part")
        if format in ("text", "tokenised") and self.data.render == "turns":
            what = f"data.render=turns, but rows of the format {format} have no turns"
            raise UserError(what, where=where, fix="Set data.render to auto.", code="no-turns")
        if format in ("text", "prompt_completion") and tokenizer.eos_id is None:
            raise UserError(f"the tokenizer {tokenizer.name} has no EOS token", where=where, fix=NO_EOS, code="no-eos")
        if self.data.system and self.template is not None and self._chat.drops_system:
            fix = "Set data.chat_template to one that has system prompts, or remove the key."
            what = "the chat template leaves system prompts out"
            raise UserError(what, where="data.system", fix=fix, code="system-left-out")

    @cached_property
    def _chat(self) -> TurnEncoder:
        """Return the encoder of conversations. Raises BadRow without a chat template."""
        if self.template is None:
            what = f"messages need a chat template, and {self.tokenizer.name} has none"
            raise BadRow("no chat template", what, fix=ADVICE)
        return TurnEncoder(self.tokenizer, self.template, self.pictures)

    def _look(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its pictures' sizes. Raises BadRow for a picture that cannot be used."""
        if not any(map(has_pictures, conversation.messages)):
            return conversation
        if any(map(has_pictures, conversation.messages[conversation.answer_from or len(conversation.messages) :])):
            fix = "Write the turns with pictures into the prompt."
            raise BadRow("picture in the answer", "the answer has a picture, and pictures are not trained", fix=fix)
        messages = [self._look_at(message) if has_pictures(message) else message for message in conversation.messages]
        return replace(conversation, messages=messages)

    def _look_at(self, message: Json) -> Json:
        parts = list[Json]()
        for part in message["content"]:
            if part["type"] == "image":
                source = part["image"]
                if self.pictures is None:
                    raise BadRow("no image processor", "nothing here takes pictures", source.field)
                try:
                    picture = look(source)
                    self.pictures.text_of(picture.height, picture.width)
                except BadRow as bad:
                    raise BadRow(bad.reason, bad.what, bad.field or source.field, bad.fix) from bad
                part = {**part, "image": picture}
            parts.append(part)
        return {**message, "content": parts}

    @cached_property
    def _with_tools(self) -> Encoder:
        """Return the encoder of rows with tools."""
        return replace(self, template=self.template.with_tools) if self.template and self.template.for_tools else self

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        """Return a pattern for text that becomes a control token."""
        ids = () if self.tokenizer.encode_special_tokens else self.tokenizer.special_ids
        texts = filter(None, map(self.tokenizer.text_of, sorted(ids)))
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def _find_faults(self, *examples: Example) -> Flags:
        """Return `marker`, `drops_system` and `tools_in_system` of a Fate."""
        faults = Flags()
        for example in examples:
            if isinstance(example, Tokens):
                continue
            if isinstance(example, Conversation):
                texts = [text for message in example.messages for text in texts_of(message)]
                if example.messages[0]["role"] == "system" and texts[0].strip() and self._chat.drops_system:
                    faults["drops_system"] = True
                faults["tools_in_system"] = example.tools_in_system
            else:
                end = "" if self.tokenizer.eos_id is None else self.tokenizer.text_of(self.tokenizer.eos_id)
                # ignore EOS as text: the file may hold it
                texts = [example.prompt, example.completion.rstrip().removesuffix(end)]
            if any(map(self._markers.search, texts)):
                faults["marker"] = True
                self._refuse_placeholders(texts)
        return faults

    def _refuse_placeholders(self, texts: Sequence[str]) -> None:
        """Raise BadRow if a text has one of the model's tokens for pictures.

        The model would look for a picture there.
        """
        tokens = set[str]()
        if self.pictures is not None and self.pictures.content:
            with suppress(BadRow):  # the processor cannot be loaded
                tokens = {self.pictures.placeholder, *map(self.tokenizer.text_of, self.pictures.tokens)}
        if token := next((token for token in sorted(tokens) if any(token in text for text in texts)), ""):
            fix = f"Give the row its pictures (a column images, with <image> in the texts), or take {token} out."
            raise BadRow(STRAY, f"a text has {token}, the model's token for a picture", fix=fix)

    @cached_property
    def _training(self) -> ChatEncoder | None:
        """Return an encoder with TRL's training version of the template, if there is one."""
        if self.template is None or self.template.marked is None:
            return None
        template = replace(self.template, text=self.template.marked, marked=None)
        return ChatEncoder(self.tokenizer, template, self.pictures)

    def _encode_chat(self, conversation: Conversation, loss_on: LossOn) -> tuple[list[Document], Flags]:
        """Encode a conversation by the template, as a whole or by turns.

        If the mask of a whole conversation is not exact, use TRL's training version. `auto` prefers turns to another text.
        """
        by_turns, told = self.data.render == "turns", None
        if self.data.render != "conversation" and loss_on != "all":
            with nullcontext() if by_turns else suppress(BadRow):
                told = None if by_turns else self._chat.tell(conversation, loss_on)
                documents, apart, reason = self._chat.encode_turns(conversation, loss_on, told)
                if documents:
                    return documents, {"apart": apart, "turns": reason}
        try:
            document, apart = self._chat.encode(conversation, loss_on, told)
            return [document], {"apart": apart}
        except BadRow as bad:
            training = self._training
            if bad.reason == UNVERIFIED and told is not None:
                with suppress(BadRow):
                    retold = training.tell(conversation, loss_on).rendered.text if training else ""
                    if not retold.startswith(told.rendered.text):
                        documents, apart, _ = self._chat.encode_turns(conversation, loss_on, None)
                        return documents, {"apart": apart, "turns": REWRITTEN}
            if bad.reason == UNVERIFIED and training is not None:
                with suppress(BadRow):
                    document, apart = training.encode(conversation, loss_on)
                    return [document], {"apart": apart, "retold": True}
            raise

    def encode_row(
        self, row: RawRow, format: Format, columns: Mapping[str, str], unread: dict[str, str], folder: str = ""
    ) -> tuple[list[Document], Flags]:
        """Return the row's documents before data.max_length, and the flags to count.

        `unread` gets the row's columns that nothing reads. Paths of pictures start from `folder`. Raises BadRow for a row without a use.
        """
        if isinstance(row, BadRow):
            raise row
        are_documents = OBJECTIVES[self.objective].examples == "documents"
        encode = self._encode_example if are_documents else self._encode_answered
        template, none = self.template, frozenset[str]()
        roles, keys = (template.words, template.keys) if template else (none, none)
        nameless = self._chat.nameless_roles if template else none
        made = Row(row, columns, roles, keys, self.data.system, nameless, folder)
        try:
            documents, flags = encode(made, format)
        except UnicodeEncodeError as error:
            what = f"not UTF-8: a lone surrogate \\u{ord(error.object[error.start]):04x} in the text"
            fix = "Write it anew with the two halves of the character together."
            raise BadRow("not UTF-8", what, fix=fix) from None
        merge_uses(unread, made.unread())
        for document in documents:
            document.loss_mask[:1] = False
            first = document.input_ids[:2].tolist()
            flags["two_bos"] = flags.get("two_bos", False) or first == [self.tokenizer.bos_id] * 2
        return documents, flags

    def _encode_example(self, row: Row, format: Format) -> tuple[list[Document], Flags]:
        example = read_row(row, format)
        loss_on, flags = self.data.loss_on, Flags()
        if isinstance(example, Conversation):
            example = self._look(example)
            default = "assistant" if example.answer_from is None else "completion"
            encoder = self._with_tools if example.tools else self
            documents, flags = encoder._encode_chat(example, default if loss_on == "auto" else loss_on)
        elif isinstance(example, PromptCompletion):
            ids, prompt_tokens, flags["apart"] = self._join_completion(example)
            documents = [Document(ids, np.arange(len(ids)) >= (0 if loss_on == "all" else prompt_tokens))]
        else:
            documents = [self._check_tokens(example)]
        return documents, flags | self._find_faults(example)

    def _encode_answered(self, row: Row, format: Format) -> tuple[list[Document], Flags]:
        """Encode a pair, or labelled answers, with the ids and targets of TRL's trainers. The answers of a pair share one border.

        With data.render, a prompt whose tokens would change before its answer keeps them."""
        spec, flags = OBJECTIVES[self.objective], Flags()
        if spec.pairs:
            examples = [*read_preference(row)]
        else:
            examples, flags["desirable"] = read_unpaired(row, format)
        examples = [self._look(example) if isinstance(example, Conversation) else example for example in examples]
        groups = [examples] if spec.pairs else [[example] for example in examples]
        encoded = [self._encode_answers(*group) for group in groups]
        may_part = self.data.render != "conversation" and not spec.scores and self.tokenizer.joins
        may_part &= row.has("prompt") or isinstance(examples[0], Conversation)  # or the prompt may end inside a word
        for at, group in enumerate(groups):
            if may_part and encoded[at][1]:
                documents, is_rewritten = self._encode_answers(*group, apart=True)
                if not is_rewritten:
                    encoded[at] = documents, True
                elif self.data.render == "turns":
                    what = "the chat template rewrites the prompt once an answer follows"
                    raise BadRow(UNVERIFIED, what, "messages", "Set data.render=conversation.")
        if spec.margins:
            flags["margin"] = read_margin(row)
        flags |= {"content": hash_content(common_prompt(row, examples[0])), "apart": any(apart for _, apart in encoded)}
        return [document for made, _ in encoded for document in made], flags | self._find_faults(*examples)

    def _check_tokens(self, tokens: Tokens) -> Document:
        ids, mask, loss_on = tokens.input_ids, tokens.mask, self.data.loss_on
        if len(outside := np.flatnonzero((ids < 0) | (ids >= self.tokenizer.vocabulary))):
            what = f"token {ids[outside[0]]} is not in the vocabulary of {self.tokenizer.vocabulary}"
            where, fix = f"input_ids[{outside[0]}]", "Use the model's own tokenizer."
            raise BadRow("token outside the vocabulary", what, where, fix)
        if loss_on in ("assistant", "completion") and mask is None:
            what = f"data.loss_on={loss_on}, but the row has neither labels nor a mask"
            raise BadRow("no mask", what, "input_ids", "Add labels or a mask, or set data.loss_on to all or auto.")
        return Document(ids, np.ones(len(ids), dtype=bool) if mask is None or loss_on == "all" else mask)

    def _encode_prompt(self, text: str) -> np.ndarray:
        """Return the ids of a prompt alone. Drop the EOS of tokenizers that end every text with it."""
        ids = self.tokenizer.ids(text, special=True)
        return ids[:-1] if len(ids) and ids[-1] == self.tokenizer.eos_id else ids

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        """Append EOS to `ids` unless they end in it."""
        eos = self.tokenizer.eos_id
        return ids if eos is None or (len(ids) and ids[-1] == eos) else np.append(ids, np.int32(eos))

    def _join_completion(self, pair: PromptCompletion) -> tuple[np.ndarray, int, bool]:
        """Tokenise prompt, completion and EOS. Return the ids, the prompt's length, and whether both were tokenised separately."""
        prompt = self._encode_prompt(pair.prompt)
        whole = self.tokenizer.ids(pair.prompt + pair.completion, special=True)
        if len(whole) > len(prompt) and np.array_equal(whole[: len(prompt)], prompt):
            return self._with_eos(whole), len(prompt), False
        completion = self.tokenizer.ids(pair.completion)
        return self._with_eos(np.concatenate([prompt, completion])), len(prompt), True

    def _encode_answers(self, *answers: Answered, apart: bool = False) -> tuple[list[Document], bool]:
        """Encode the prompt with each of its answers, like TRL's preference trainers, or `apart`.
        The flag is True if the targets begin within the separately tokenised prompt."""
        if chats := [answer for answer in answers if isinstance(answer, Conversation)]:
            encoder = self._with_tools if chats[0].tools else self
            asked, *answered = encoder._chat.encode_answers(*chats, apart=apart)
            prompt = asked.input_ids
        else:
            texts = [answer for answer in answers if isinstance(answer, PromptCompletion)]
            if self.tokenizer.eos_id is None:
                raise BadRow("no EOS token", f"the tokenizer {self.tokenizer.name} has no EOS token", fix=NO_EOS)
            prompt = self._encode_prompt(texts[0].prompt)
            whole = [self.tokenizer.ids(text.prompt + text.completion, special=True) for text in texts]
            if apart:
                whole = [np.concatenate([prompt, self.tokenizer.ids(text.completion)]) for text in texts]
            answered = [Document(self._with_eos(ids), np.zeros(0, bool)) for ids in whole]
        border = min(_count_common(prompt, document.input_ids) for document in answered)
        trained = [np.arange(len(document.input_ids)) >= border for document in answered]
        documents = [replace(document, loss_mask=mask) for document, mask in zip(answered, trained, strict=True)]
        return documents, border < len(prompt)

    def _fit(self, documents: list[Document], fate: Fate, format: Format) -> tuple[list[Document], Fate]:
        """Return the kept parts of the documents and the new `fate`. Each part has a trained token; a pair keeps both documents or none."""
        is_pair = OBJECTIVES[self.objective].pairs
        fitted = [self._fit_document(document, fate, format) for document in documents]
        kept = [part for parts, _ in fitted for part in parts]
        fates = [own for parts, own in fitted if parts]
        if not kept or (is_pair and len(fates) < 2):
            return [], next((own for parts, own in fitted if not parts), fate._replace(dropped=UNTRAINED))
        if is_pair and np.array_equal(kept[0].keys, kept[1].keys):
            return [], fate._replace(dropped=SAME)
        return kept, fate._replace(
            documents=len(kept),
            cut_tokens=sum(own.cut_tokens for own in fates),
            cut_pictures=sum(own.cut_pictures for own in fates),
            dropped_chunks=sum(own.dropped_chunks for own in fates) + len(documents) - len(fates),
            truncated=any(own.truncated for own in fates),
            split=any(own.split for own in fates),
            desirable=fate.desirable and bool(fitted[0][0]),  # a split pair of kto may keep only the rejected answer
        )

    def _fit_document(self, document: Document, fate: Fate, format: Format) -> tuple[list[Document], Fate]:
        """Fit one document like `_fit`; the returned fate counts the tokens cut."""
        ids, mask = document.input_ids, document.loss_mask
        limit = self.data.max_length or len(ids)
        if len(ids) > limit and self.data.overlong == "drop":
            return [], fate._replace(dropped=TOO_LONG if mask.any() else UNTRAINED)
        if len(ids) <= limit and mask.any():
            return [document], fate._replace(documents=1)
        splits = self.data.overlong == "split" or (self.data.overlong == "auto" and format == "text")
        borders = [*self._find_borders(document, limit)]
        if not splits:
            borders = borders[:2]
        mask[borders[:-1]] = False  # nothing predicts the first token of a part
        parts = [_cut(document, start, end) for start, end in pairwise(borders) if mask[start:end].any()]
        if not parts:
            return [], fate._replace(dropped=UNTRAINED)
        return parts, fate._replace(
            documents=len(parts),
            dropped_chunks=len(borders) - 1 - len(parts),
            cut_tokens=len(ids) - sum(len(part.input_ids) for part in parts),
            cut_pictures=len(document.pictures) - sum(len(part.pictures) for part in parts),
            truncated=not splits,
            split=splits,
        )

    def _find_borders(self, document: Document, limit: int) -> Iterator[int]:
        """Yield the borders of a document's parts of at most `limit` tokens, from 0 on. None lies within a picture.

        The control token in front of a picture stays with it. A picture longer than `limit` ends the last part.
        """
        ids, end = document.input_ids, 0
        behind = {picture.end for picture in document.pictures}
        yield 0
        while end < len(ids):
            start, end = end, min(end + limit, len(ids))
            for picture in document.pictures:
                begun = picture.start not in behind and int(ids[picture.start - 1]) in self.tokenizer.special_ids
                first = picture.start - begun
                if first < end < picture.end:
                    end = first
            if end <= start:
                return
            yield end


def _cut(document: Document, start: int, end: int) -> Document:
    """Return the tokens from `start` to before `end` as a document."""
    inside = [
        replace(picture, start=picture.start - start, end=picture.end - start)
        for picture in document.pictures
        if start <= picture.start and picture.end <= end
    ]
    return Document(document.input_ids[start:end], document.loss_mask[start:end], tuple(inside))


def _count_common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of leading tokens that both share."""
    shortest = min(len(first), len(second))
    differs = first[:shortest] != second[:shortest]
    return int(np.argmax(differs)) if differs.any() else shortest
