"""Who says each token: a chat template begins every turn with a header, which is found again in the tokens.

The headers are learned from conversations that are rendered and tokenised: what stands before each of their contents, without
the end of the turn before. Documents without any header have two parts instead: what is not trained (a prompt), and what is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
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
_CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
_PROBES: tuple[tuple[str, ...], ...] = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
)
LONGEST = 24
"""Tokens of a header; of what is longer those up to a control token count."""
_CONTENTS = ("Alpha said", "Beta said", "Gamma said", "Delta said", "Epsilon said")
Piece = list[tuple[int, str]]
"""Tokens, each with its text."""


@dataclass(frozen=True)
class Headers:
    """Sequences of tokens that begin a turn, each with the number of its role in `names`; number 0 is what precedes all turns."""

    names: tuple[str, ...] = ("template",)
    tokens: dict[tuple[int, ...], int] = field(default_factory=dict)

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places int64[n] where turns begin in `ids` int32[T], ascending, and their roles uint8[n]."""
        role_at = np.zeros(len(ids), np.uint8)
        for header in sorted(self.tokens, key=len):  # where one header begins like another the longer one counts
            at = np.flatnonzero(ids[: max(0, len(ids) - len(header) + 1)] == header[0])
            for offset, token in enumerate(header[1:], 1):
                at = at[ids[at + offset] == token]
            role_at[at] = self.tokens[header]
        places = np.flatnonzero(role_at)
        return places, role_at[places]


def learn_headers(chat: ChatEncoder | None) -> Headers:
    """The headers of a chat template; none where there is none, or it begins turns by no words of its own."""
    if chat is None:
        return Headers()
    gaps: list[tuple[str, str, Piece]] = []
    for roles in _PROBES:
        with suppress(BadRow):
            gaps += _render_gaps(chat, roles)
    following = defaultdict[int, set[str]](set)
    for before, _, piece in gaps:
        if before and piece:
            following[piece[0][0]].add(before)
    special = chat.tokenizer.special_ids
    ends = chat.end_ids | {token for token, roles in following.items() if len(roles) > 1 and token in special}
    gaps = [(before, role, _strip(piece[_find_last(piece[:-1], ends) + 1 :])) for before, role, piece in gaps]
    opening = {piece[0][0] for before, _, piece in gaps if before and piece}
    names, tokens = ["template"], dict[tuple[int, ...], int]()
    for before, role, piece in gaps:
        if not before:  # the template itself may speak before the first turn
            last = _find_last(piece, opening)
            piece = _strip(piece[max(last if last >= 0 else _find_last(piece, special), 0) :])
        line_end = next((at for at in range(1, len(piece)) if "\n" in piece[at][1]), len(piece))
        header = tuple(token for token, _ in _strip(piece[:line_end]))
        if header in tokens and names[tokens[header]] != role:
            header = tuple(token for token, _ in piece)
        if len(header) > LONGEST:
            header = header[: max((at for at in range(LONGEST) if header[at] in special), default=-1) + 1]
        shared = header[:1] if len(opening) == 1 else (chat.tokenizer.bos_id,)  # what tells no role from another
        if header and header != shared:
            names += [] if role in names else [role]
            tokens.setdefault(header, names.index(role))
    return Headers(tuple(names), tokens)


def _strip(piece: Piece) -> Piece:
    """The tokens without blank ones around them."""
    said = [at for at, (_, text) in enumerate(piece) if text.strip()]
    return piece[said[0] : said[-1] + 1] if said else []


def _find_last(piece: Piece, ids: Collection[int]) -> int:
    """Where the last of `ids` is, -1 for nowhere."""
    return max((at for at, (token, _) in enumerate(piece) if token in ids), default=-1)


def _render_gaps(chat: ChatEncoder, roles: Sequence[str]) -> Iterator[tuple[str, str, Piece]]:
    """For each turn of a conversation who spoke before ("" at the start), who speaks, and the tokens between the two contents."""
    messages: list[dict[str, Any]] = [
        {"role": role, "content": said} for role, said in zip(roles, _CONTENTS, strict=False)
    ]
    for message, following in pairwise(messages):
        if following["role"] == "tool":
            message |= {"tool_calls": _CALL, "content": ""}
    text = chat.render(Conversation(messages))
    encoded = chat.tokenizer.encode(text)
    end, before = 0, ""
    for message in messages:
        content, role = message["content"], message["role"]
        if not content or (start := text.find(content, end)) < 0:
            continue
        inside = np.flatnonzero((encoded.starts >= end) & (encoded.ends <= start))
        yield (
            before,
            role,
            _strip([(int(encoded.ids[at]), text[encoded.starts[at] : encoded.ends[at]]) for at in inside]),
        )
        end, before = start + len(content), role
