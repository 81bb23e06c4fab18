"""Saving what from_pretrained loads, so that no training is lost at its end: tried before step 1, and the weights first.

transformers checks when it saves what it did not check when it loaded, and writes the weights last: a generation_config.json
with `do_sample: false` and a temperature, as Llama 2 ships, would cost the training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

from transformers import GenerationConfig, modeling_utils
from transformers.dynamic_module_utils import custom_object_save
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import align_special_tokens
from transformers.utils import GENERATION_CONFIG_NAME

from packtrain.errors import UserError
from packtrain.model.load import base_model


def mend_generation_config(model: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Switches sampling on where the library refuses to save without it. Returns what will be saved and why, "" as a rule.

    What sampling does not mend is left as it came, and saved so (`weights_first`).
    """
    base = base_model(model)
    align_special_tokens(base, tokenizer)  # as transformers' Trainer does later, which may mend it
    source, settings = base.name_or_path, cast(Any, base.generation_config)
    try:
        json.loads(Path(source, GENERATION_CONFIG_NAME).read_bytes() if source else "{}")
    except OSError:  # of a hub id
        pass
    except ValueError:
        return f"{GENERATION_CONFIG_NAME} of {source} is not valid JSON: one is made of the model's config"
    if settings is None or not (refused := _refusal(settings)):  # None: a model that cannot generate
        return ""
    before, settings.do_sample = settings.do_sample, True
    if not _refusal(settings):
        return f"{GENERATION_CONFIG_NAME} is saved with do_sample: true, since the library says of it: {refused}"
    settings.do_sample = before
    return f"{GENERATION_CONFIG_NAME} is saved as it came, though the library says of it: {refused}"


def try_saving(model: Any, tokenizer: PreTrainedTokenizerBase, *, whole: bool) -> None:
    """Saves all but the weights into a temporary folder, as at the end: those of adapters, and with `whole` of the model.

    Raises UserError for what cannot be saved.
    """
    with TemporaryDirectory(prefix="packtrain-saving-") as folder, weights_first(model, tokenizer):
        for one in {model, base_model(model)} if whole else {model}:
            one.save_pretrained(folder, state_dict={}, save_embedding_layers=False)  # PEFT would ask the hub about them
        tokenizer.save_pretrained(folder)


@contextmanager
def weights_first(model: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Inside the block `save_pretrained` of the model writes the weights, whatever becomes of the config, which it writes before.

    A generation config is written as it is. Raises UserError at the end of the block for what could not be written.
    """
    config, kind = type(base_model(model).config), type(tokenizer)
    failed: list[tuple[Exception, str, str]] = []

    def put_off(save: Callable[..., Any], what: str, where: str) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> None:
            try:
                save(*args, **kwargs)
            except Exception as error:  # of every kind, some from code that came with the model
                failed.append((error, what, where))

        return attempt

    def unchecked(settings: GenerationConfig, folder: Any, **_: Any) -> None:
        settings.to_json_file(Path(folder, GENERATION_CONFIG_NAME), keys_to_pop=["compile_config"])

    with ExitStack() as stack:
        for owner, name, save, what, where in (
            (config, "save_pretrained", config.save_pretrained, "the model's config", "model.path"),
            (GenerationConfig, "save_pretrained", unchecked, GENERATION_CONFIG_NAME, "model.path"),
            (kind, "save_pretrained", kind.save_pretrained, "the tokenizer", "model.tokenizer"),
            (modeling_utils, "custom_object_save", custom_object_save, "the model's code", "model.path"),
        ):
            stack.enter_context(patch.object(owner, name, put_off(save, what, where)))
        yield
    for error, what, where in failed:
        if isinstance(error, OSError) and error.errno:
            raise error  # a full disk, for which train/library_errors.py has the words
        raise UserError(f"{what} cannot be saved: {_first(error)}", where=where) from error


def _refusal(settings: GenerationConfig) -> str:
    """The first reason why the library refuses to save a generation config, "" if it does not."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("- ")] or [str(error)]
        return _first(lines[0].removeprefix("- ")).partition(" -- ")[0]  # before its advice
    return ""


def _first(said: object) -> str:
    return next(iter(str(said).strip().splitlines()), type(said).__name__)
