"""Where a model is (a hub id, a folder or a .gguf file), what is wrong with its files, and its tokenizer without the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.boundary import boundary
from packtrain.config.schema import Model
from packtrain.data.sources.files import check_regular
from packtrain.data.sources.offline import OFFLINE_ADVICE, offline_unless_reachable
from packtrain.errors import UserError
from packtrain.monitor.retries import patiently

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

QUICKSTART = "quickstart"
_READ = (".json", ".safetensors", ".bin", ".gguf", ".model", ".jinja", ".txt", ".py")
_OBJECTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "adapter_config.json")
_MOST_PARSED = 1 << 20
"""Bytes: a large tokenizer.json takes a fourth of a second to parse, and its library says where it is broken."""
_LFS = b"version https://git-lfs.github.com/"


def check_model_folder(folder: Path) -> None:
    """Raises UserError for what is no regular file, a pointer of Git LFS, or JSON that is no object; hub ids are no folders.

    Libraries would say "header too large".
    """
    inside = folder.is_dir()
    for file in sorted(folder.iterdir()) if inside else [folder]:
        if (inside and file.suffix not in _READ) or not file.exists():
            continue
        check_regular(file)
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                fix = f"Get the file itself: git lfs pull in {file.parent}, or hf download."
                raise UserError("it is a pointer of Git LFS, not the file", where=str(file), fix=fix)
        index = file.name.endswith(".safetensors.index.json")
        if (index or file.name in _OBJECTS) and file.stat().st_size <= _MOST_PARSED:
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"it is not valid JSON: {error}", where=str(file), fix="Mend it, or get it anew."
                ) from error
            if not isinstance(content, dict):
                what = f"expected an object of settings, found {json.dumps(content)[:40]}"
                raise UserError(what, where=str(file), fix="Mend it, or get it anew.")


def load_tokenizer(config: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else of `model.path`. Raises UserError if none can be loaded."""
    source = config.tokenizer or config.path
    if source == QUICKSTART:
        from packtrain.data.sources.quickstart import tokenizer

        return tokenizer()
    if source is None:
        raise UserError("no tokenizer is named", where="model.tokenizer", fix="set it, or model.path")
    from transformers import AutoTokenizer

    where = "model.tokenizer" if config.tokenizer else "model.path"
    check_model_folder(Path(source).expanduser())
    with hub(source) as online, boundary(f"cannot load a tokenizer from {source}", where, partial(fix_of, online)):
        try:
            loaded = loaded_patiently(source, lambda: AutoTokenizer.from_pretrained(**location(source, config)))
        except Exception:
            _check_config(source, config)
            raise
        if loaded.pad_token_id is None:
            loaded.pad_token = loaded.eos_token
        return loaded


def _check_config(source: str, config: Model) -> None:
    """Raises UserError if what is broken is the model's config, which tells transformers which tokenizer to take."""
    from transformers import AutoConfig

    file = Path(source).expanduser() / "config.json"
    if file.is_file():
        fix = partial(fix_of, True, otherwise="Mend it, or get it anew.")
        with boundary("the model's config cannot be used", str(file), fix):
            AutoConfig.from_pretrained(**location(source, config))


def fix_of(online: bool, error: BaseException, otherwise: str = "") -> str:
    """What to do about what cannot be loaded: trust its own code, or go where there is a hub; else `otherwise`."""
    if "custom code" in str(error):
        return "It has code of its own: trust it with model.trust_remote_code=true."
    return otherwise if online else OFFLINE_ADVICE


def hub(source: str | None) -> AbstractContextManager[bool]:
    """Inside the block, hub ids are loaded offline if the hub does not answer; yields whether it does."""
    local = source is None or Path(source).expanduser().exists()
    return nullcontext(True) if local else offline_unless_reachable()


def loaded_patiently(source: str | None, load: Callable[[], Any]) -> Any:
    """What `load` makes of a hub id or folder, which it tries again while the hub or the disk comes and goes."""
    local = source is None or Path(source).expanduser().exists()
    return patiently("storage" if local else "hub", str(source), load)


def location(source: str, config: Model) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a hub id, a folder or a .gguf file."""
    arguments: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **arguments}
    if path.exists():
        return {"pretrained_model_name_or_path": str(path), **arguments}
    return {"pretrained_model_name_or_path": source, "revision": config.revision or "main", **arguments}
