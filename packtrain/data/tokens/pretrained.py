"""Locations of models (hub id, folder, .gguf file), their tokenizers, and the hub's availability.

Without a network huggingface_hub tries each of its requests six times: half a minute of warnings before an error. Here one
request decides. If the hub does not answer it, the libraries work offline, as with HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from packtrain.config.schema import BUILT_IN, Model
from packtrain.errors import UserError, boundary, read_json
from packtrain.plan.known_model import base_of, below_adapters
from packtrain.system import holding, start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
def offline_unless_reachable() -> Generator[bool]:
    """Work offline in the block if the hub does not answer; yield whether it does. Covers huggingface_hub, transformers and datasets."""
    from huggingface_hub import constants

    online = is_reachable()
    modules: list[ModuleType] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
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
                what = "this is only a Git LFS pointer, not the file itself"
                raise UserError(what, where=str(file), fix=fix, code="lfs-pointer")


def load_tokenizer(config: Model) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, else of `model.path`. Raises UserError if it cannot be loaded."""
    source = config.tokenizer or tokenizer_of(config.path)
    config = config if source in (config.tokenizer, config.path) else below_adapters(config)
    if source in BUILT_IN:
        from packtrain.data.sources import quickstart, quickstart_pictures

        made = quickstart if source == "quickstart" else quickstart_pictures
        return copy.deepcopy(made.tokenizer())  # a run sets a template on it
    assert source is not None  # config/rules/ refuses it
    from transformers import AutoTokenizer

    where = "model.tokenizer" if config.tokenizer else "model.path"
    check_model_folder(Path(source).expanduser())
    with (
        hub(source) as online,
        boundary(
            f"cannot load a tokenizer from {source}", where, partial(fix_of, online), code="cannot-load-tokenizer"
        ),
    ):
        load = AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        loaded = cast("PreTrainedTokenizerBase", load(**location(source, config)))
        if loaded.pad_token_id is None:
            loaded.pad_token = loaded.eos_token
        if loaded.chat_template is None:
            loaded.chat_template = _find_processors_template(source, config)
        return loaded


def find_files(names: Sequence[str], source: str, config: Model) -> list[Path]:
    """Return the files of a hub id or folder that have one of these names."""
    place = location(source, config)
    folder = Path(place["pretrained_model_name_or_path"])
    if folder.is_dir() or "gguf_file" in place:
        return [folder / name for name in names if (folder / name).is_file()]
    from transformers.utils import cached_file

    silent = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "gated_repo", "connection_errors")}
    with hub(source):
        found = [cached_file(source, name, revision=place["revision"], **silent) for name in names]
    return [Path(name) for name in found if name]


def _find_processors_template(source: str, config: Model) -> str | None:
    """Return the chat template that an older processor of pictures keeps beside its tokenizer."""
    files = find_files(("chat_template.json", "processor_config.json"), source, config)
    return next(filter(None, (read_json(file).get("chat_template") for file in files)), None)


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
