"""Locations of models (hub id, folder, .gguf file), their tokenizers, and the hub's availability.

Without a network huggingface_hub tries each of its requests six times: half a minute of warnings before an error. Here one
request decides. If the hub does not answer it, the libraries work offline, as with HF_HUB_OFFLINE=1.

A PlainTokenizer is the part of a transformers tokenizer that tokenising processes need: it pickles as JSON, calls the Rust
tokenizer directly, and never truncates or pads. We refuse tokenizers written in Python: an exact loss mask needs the
offsets of tokens, and they give none.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Encoding, Tokenizer

from packtrain.config.schema import Model
from packtrain.errors import UserError, boundary
from packtrain.plan.known_model import base_of, below_adapters
from packtrain.system import holding, start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUICKSTART = "quickstart"
ANSWER_S = 6.0
OFFLINE_ADVICE = (
    "The Hugging Face hub cannot be reached from here (or HF_HUB_OFFLINE is set): give a local path; or download on a machine "
    "with internet (hf download), copy $HF_HOME here, and set HF_HUB_OFFLINE=1."
)
_READ = (".json", ".safetensors", ".bin", ".gguf", ".model", ".jinja", ".txt", ".py")
_LFS = b"version https://git-lfs.github.com/"


@lru_cache
def is_reachable() -> bool:
    """Return whether the hub answers within ANSWER_S seconds; False with HF_HUB_OFFLINE. Each process asks once."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:  # a name look-up has no timeout of its own
        start(lambda: get_session().head(constants.ENDPOINT, timeout=ANSWER_S)).result(ANSWER_S)
    except Exception:  # no route, no name, no certificate, a proxy's refusal: no answer
        return False
    return True


@contextmanager
def offline_unless_reachable() -> Iterator[bool]:
    """Work offline in the block if the hub does not answer; yield whether it does. Covers huggingface_hub, transformers and datasets."""
    from huggingface_hub import constants

    online = is_reachable()
    modules: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    with ExitStack() as offline:
        for module in modules:
            offline.enter_context(holding(module, HF_HUB_OFFLINE=module.HF_HUB_OFFLINE or not online))
        yield online


def check_model_folder(folder: Path) -> None:
    """Raise UserError for a Git LFS pointer (loaders say "header too large"). Hub ids are no folders."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if file.suffix not in _READ or not file.is_file():
            continue
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                fix = f"Get the file itself: git lfs pull in {file.parent}, or hf download."
                raise UserError("this is only a Git LFS pointer, not the file itself", where=str(file), fix=fix)


def load_tokenizer(config: Model) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, else of `model.path`. Raises UserError if it cannot be loaded."""
    source = config.tokenizer or tokenizer_of(config.path)
    config = config if source in (config.tokenizer, config.path) else below_adapters(config)
    if source == QUICKSTART:
        from packtrain.data.sources.quickstart import tokenizer

        return copy.deepcopy(tokenizer())  # a run sets a template on it
    assert source is not None  # config/rules/ refuses it
    from transformers import AutoTokenizer

    where = "model.tokenizer" if config.tokenizer else "model.path"
    check_model_folder(Path(source).expanduser())
    with hub(source) as online, boundary(f"cannot load a tokenizer from {source}", where, partial(fix_of, online)):
        loaded = AutoTokenizer.from_pretrained(**location(source, config))
        if loaded.pad_token_id is None:
            loaded.pad_token = loaded.eos_token
        return loaded


def tokenizer_of(path: str | None) -> str | None:
    """Return the source of a model's tokenizer: adapters without one use their base's."""
    base, place = base_of(path), Path(path or "").expanduser()
    own = base is None or any(any(place.glob(name)) for name in ("tokenizer.*", "vocab*", "*.model"))
    return path if own else base


def fix_of(online: bool, error: BaseException) -> str:
    """Return the advice for a loading error, else "". It is to trust custom code, to name a tokenizer, or to go online."""
    if "custom code" in str(error):
        return "It has code of its own: trust it with model.trust_remote_code=true."
    if "backend tokenizer" in str(error):
        return "There is none: name a folder or hub id with a tokenizer.json (model.tokenizer)."
    return "" if online else OFFLINE_ADVICE


def hub(source: str | None) -> AbstractContextManager[bool]:
    """Load hub ids offline in the block if the hub does not answer. Yields whether it does."""
    local = source is None or Path(source).expanduser().exists()
    return nullcontext(True) if local else offline_unless_reachable()


def location(source: str, config: Model) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for a hub id, a folder or a .gguf file."""
    arguments: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **arguments}
    if path.exists():
        return {"pretrained_model_name_or_path": str(path), **arguments}
    return {"pretrained_model_name_or_path": source, "revision": config.revision or "main", **arguments}


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
        starts, ends = np.array(encoding.offsets, np.int32).reshape(-1, 2).T.copy()
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
        raise UserError(what, where="model.tokenizer", fix="Take a model or tokenizer that has a tokenizer.json.")
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
