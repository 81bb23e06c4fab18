"""Who says each token: a chat template begins every turn with a header, which is found again in the tokens.

The headers are learned from a conversation that is rendered and tokenised: what stands before each of its contents, without the
end of the turn before. Documents without any header have two parts instead: what is not trained (a prompt), and what is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from packtrain.data.formats.conversations import Conversation
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.loss_mask import ChatEncoder

PARTS = {"text": ("text", "text"), "tokenised": ("not trained", "trained")}
"""The two parts of documents without headers, by the source's format; else prompt and answer."""
_CALL = [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]
_PROBES: tuple[tuple[str, ...], ...] = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
)
LONGEST = 24
"""Tokens of a header; of what is longer those up to a control token count."""
_SAID = ("Alpha said", "Beta said", "Gamma said", "Delta said", "Epsilon said")


@dataclass(frozen=True)
class Headers:
    """Sequences of tokens that begin a turn, each with the number of its role in `names`; number 0 is what precedes all turns."""

    names: tuple[str, ...] = ("template",)
    tokens: dict[tuple[int, ...], int] = field(default_factory=dict)

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places int64[n] where turns begin in `ids` int32[T], ascending, and their roles uint8[n]."""
        places, roles = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        firsts = {header[0]: np.flatnonzero(ids == header[0]) for header in self.tokens}
        for header in sorted(self.tokens, key=len, reverse=True):
            at = firsts[header[0]]
            at = at[: np.searchsorted(at, len(ids) - len(header), side="right")]
            for offset, token in enumerate(header[1:], 1):
                at = at[ids[at + offset] == token]
            places.append(at)
            roles.append(np.full(len(at), self.tokens[header], np.uint8))
        at, role = np.concatenate(places), np.concatenate(roles)
        order = np.argsort(
            at, kind="stable"
        )  # where one header begins like another the longer one counts: it comes first
        at, role = at[order], role[order]
        first = np.append(True, at[1:] != at[:-1])[: len(at)]
        return at[first], role[first]


def headers_of(chat: ChatEncoder | None) -> Headers:
    """The headers of a chat template; none where there is none, or it begins turns by no words of its own."""
    if chat is None:
        return Headers()
    gaps: list[_Gap] = []
    for roles in _PROBES:
        with suppress(BadRow):
            gaps += _gaps(chat, roles)
    after: dict[int, set[str]] = defaultdict(set)
    for gap in gaps:
        if gap.before and gap.ids:
            after[gap.ids[0]].add(gap.before)
    special = chat.tokenizer.special_ids
    ends = chat.end_ids | {token for token, roles in after.items() if len(roles) > 1 and token in special}
    gaps = [gap.without_end(ends) for gap in gaps]
    opening = {gap.ids[0] for gap in gaps if gap.before and gap.ids}
    names, tokens = ["template"], dict[tuple[int, ...], int]()
    for gap in gaps:
        whole = gap if gap.before else gap.from_last(opening) or gap.from_last(special) or gap
        header = whole.first_line()
        if header in tokens and names[tokens[header]] != gap.role:
            header = tuple(whole.ids)
        if len(header) > LONGEST:
            last = max((at for at in range(LONGEST) if header[at] in special), default=-1)
            header = header[: last + 1]
        of_all = header[:1] if len(opening) == 1 else (chat.tokenizer.bos_id,)  # what tells no role from another
        if header and header != of_all:
            names += [] if gap.role in names else [gap.role]
            tokens.setdefault(header, names.index(gap.role))
    return Headers(tuple(names), tokens)


@dataclass(frozen=True)
class _Gap:
    """The tokens between what `before` says ("" at the start) and what `role` says; which are `blank`, and hold a line end."""

    before: str
    role: str
    ids: list[int]
    blank: list[bool]
    line_end: list[bool]

    def part(self, first: int, end: int) -> _Gap:
        """The tokens from `first` to `end` - 1, without blank ones around them."""
        while first < end and self.blank[first]:
            first += 1
        while end > first and self.blank[end - 1]:
            end -= 1
        inside = slice(first, end)
        return _Gap(self.before, self.role, self.ids[inside], self.blank[inside], self.line_end[inside])

    def without_end(self, ends: Collection[int]) -> _Gap:
        """What follows the end of the turn before."""
        at = [at for at, token in enumerate(self.ids[:-1]) if token in ends]
        return self.part(at[-1] + 1 if at else 0, len(self.ids))

    def from_last(self, opening: Collection[int]) -> _Gap | None:
        """The last token of `opening` and what follows it."""
        at = [at for at, token in enumerate(self.ids) if token in opening]
        return self.part(at[-1], len(self.ids)) if at else None

    def first_line(self) -> tuple[int, ...]:
        """The tokens up to a line end."""
        end = next((at for at in range(1, len(self.ids)) if self.line_end[at]), len(self.ids))
        return tuple(self.part(0, end).ids)


def _gaps(chat: ChatEncoder, roles: Sequence[str]) -> list[_Gap]:
    messages: list[dict[str, Any]] = [{"role": role, "content": said} for role, said in zip(roles, _SAID, strict=False)]
    for message, following in pairwise(messages):
        if following["role"] == "tool":
            message |= {"tool_calls": _CALL, "content": ""}
    text = chat.text(Conversation(messages))
    encoded = chat.tokenizer.encode(text)
    found, end, before = list[_Gap](), 0, ""
    for message in messages:
        said, role = message["content"], message["role"]
        if not said or (begins := text.find(said, end)) < 0:
            continue
        inside = (encoded.starts >= end) & (encoded.ends <= begins)
        parts = [text[first:last] for first, last in zip(encoded.starts[inside], encoded.ends[inside], strict=True)]
        blank, lines = [not part.strip() for part in parts], ["\n" in part for part in parts]
        gap = _Gap(before, role, encoded.ids[inside].tolist(), blank, lines)
        found.append(gap.part(0, len(parts)))
        end, before = begins + len(said), role
    return found
