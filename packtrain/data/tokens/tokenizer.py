"""The part of a transformers tokenizer that tokenising processes need.

A PlainTokenizer pickles as JSON, calls the Rust tokenizer directly, and never truncates or pads. We refuse tokenizers
written in Python: an exact loss mask needs the offsets of tokens, and they give none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
from tokenizers import Encoding, Tokenizer

from packtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text: ids int32[n], and the characters starts[t]:ends[t] (int32[n]) of token t.

    Some tokenizers leave white space out of a token's offsets although the token holds it. `starts` are corrected for this:
    characters that no token claims belong to the next token.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class PlainTokenizer:
    """Tokenizer as a plain value. `special_ids` are the ids of control tokens, `special_tokens` go to templates."""

    backend: str
    special_tokens: dict[str, object]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    vocabulary: int
    encode_special_tokens: bool = False
    name: str = field(default="tokenizer", compare=False)

    @cached_property
    def _rust(self) -> Tokenizer:
        rust = Tokenizer.from_str(self.backend)
        rust.encode_special_tokens = self.encode_special_tokens
        return rust

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_rust"}

    def ids(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return `text` as ids int32[n]. `special` adds the tokens that the tokenizer puts around a text (e.g. BOS).

        Raises UnicodeEncodeError for text with lone surrogates.
        """
        return np.array(self._encode(text, special).ids, np.int32)

    def _encode(self, text: str, special: bool = False) -> Encoding:
        try:
            return self._rust.encode(text, add_special_tokens=special)
        except TypeError:
            text.encode()  # the Rust side raises TypeError for lone surrogates
            raise

    def encode(self, text: str, cuts: Sequence[int] = ()) -> Encoded:
        """Tokenise `text` in parts that end at the characters `cuts` (ascending). Return tokens with places.

        Raises UnicodeEncodeError for text with lone surrogates.
        """
        if cuts:
            bounds = [0, *cuts, len(text)]
            parts = [(start, self.encode(text[start:end])) for start, end in pairwise(bounds)]
            ids = np.concatenate([part.ids for _, part in parts])
            starts = np.concatenate([part.starts + start for start, part in parts])
            return Encoded(ids, starts, np.concatenate([part.ends + start for start, part in parts]))
        encoding = self._encode(text)
        places = np.array(encoding.offsets, np.int32).ravel()
        starts, ends = np.array(places[::2]), np.array(places[1::2])
        starts[:1] = 0
        starts[1:] = np.minimum(starts[1:], np.maximum.accumulate(ends[:-1]))
        return Encoded(np.array(encoding.ids, np.int32), starts, ends)

    @cached_property
    def joins(self) -> bool:
        """Return whether joining two texts joins their tokens. False for Llama 2's tokenizer: it puts a space before each text."""
        return self._rust.decode(2 * self.ids("a").tolist()) == self._rust.decode(self.ids("aa").tolist())

    def text_of(self, token: int) -> str:
        """Return the token's text in the tokenizer's file, "" if it has none."""
        return self._rust.id_to_token(token) or ""

    @cached_property
    def content(self) -> str:
        """Return a hash of everything that determines a text's tokens. It covers the libraries' versions."""
        special = sorted(self.special_ids), sorted(self.special_tokens.items(), key=str), self.encode_special_tokens
        parts = (self.bos_id, self.eos_id, special, version("tokenizers"), version("transformers"), self.backend)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PlainTokenizer:
    """Make the PlainTokenizer of a transformers tokenizer. Raises UserError for one written in Python."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None:
        what = f"{name} is a tokenizer written in Python, which does not say where its tokens lie in the text"
        fix = "Take a model or tokenizer that has a tokenizer.json."
        raise UserError(what, where="model.tokenizer", fix=fix, code="python-tokenizer")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id for token_id, token in added.items() if getattr(token, "special", False)}
    if rust.truncation or rust.padding:  # they change whenever the tokenizer is called
        rust = Tokenizer.from_str(rust.to_str())
        rust.no_truncation()
        rust.no_padding()
    return PlainTokenizer(
        backend=rust.to_str(),
        special_tokens=dict(tokenizer.special_tokens_map),
        special_ids=frozenset(special | set(tokenizer.all_special_ids)),
        bos_id=cast("int | None", tokenizer.bos_token_id),
        eos_id=cast("int | None", tokenizer.eos_token_id),
        vocabulary=len(tokenizer),
        encode_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        name=name,
    )
