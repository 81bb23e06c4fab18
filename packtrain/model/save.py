"""Saving a model for from_pretrained, so that no training is lost at its end.

Saving is tried before step 1, and the weights are written even if the rest fails. transformers checks more when it saves than when it loads (a
generation_config.json with `do_sample: false` and a temperature, as in Llama 2), and writes the weights last.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import align_special_tokens
from transformers.utils import GENERATION_CONFIG_NAME

from packtrain.config.schema import Model
from packtrain.errors import UserError, boundary
from packtrain.model.load import base_model
from packtrain.model.weights.quantized import check_dequantizes
from packtrain.model.weights.source import carry
from packtrain.plan.known_model import folder_of
from packtrain.system import holding
from packtrain.wording import first_line

_STAYS = re.compile(
    r"\..*|(readme|adapter|optimizer|scheduler|trainer_state|rng_state|training_args|summary|metrics).*|"
    r".*results\.json|.*\.(safetensors|bin|pth?|ckpt(\..*)?|gguf|h5|msgpack|onnx|npz|zip|index\.json|jsonl|parquet|arrow|"
    r"ot|tflite|nemo|pkl|pdparams|csv|log|lock)",
    re.IGNORECASE,
)
"""Files beside a model that are not copied: weights, states, figures of other weights, and unrelated files."""
_OF_TOKENIZERS = re.compile(r".*token.*|vocab.*|merges.*|chat_template.*|.*\.(model|tiktoken|spm|bpe)", re.IGNORECASE)


def mend_generation_config(model: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Switch sampling on if the library refuses to save without it. If that does not help, save the config unchecked. Returns
    a sentence about it; "" if the library refuses nothing."""
    base = base_model(model)
    align_special_tokens(base, tokenizer)  # this may mend it
    settings = getattr(base, "generation_config", None)  # None: a model that cannot generate
    if settings is None or not (refusal := _refusal(settings)):
        return ""
    before, settings.do_sample = settings.do_sample, True
    if not _refusal(settings) and settings.temperature != 0:  # 0 means greedy answers, and sampling fails
        return f"{GENERATION_CONFIG_NAME} is saved with do_sample: true, since the library says of it: {refusal}"
    settings.do_sample = before
    base.generation_config = _AsItCame.from_dict(settings.to_dict())
    return f"{GENERATION_CONFIG_NAME} is saved as it came, though the library says of it: {refusal}"


def end_answers_at(model: Any, ends: Sequence[int]) -> list[int]:
    """Let answers stop at the tokens `ends`, too; return the new ones."""
    settings: Any = getattr(base_model(model), "generation_config", None)
    known = getattr(settings, "eos_token_id", None)
    known = [known] if isinstance(known, int) else known or []
    if new := [token for token in ends if settings and token not in known]:
        settings.eos_token_id = [*known, *new]
    return new


class _AsItCame(GenerationConfig):
    """A generation config saved without the library's checks."""

    def save_pretrained(self, save_directory: Any, *given: Any, **settings: Any) -> None:
        self.to_json_file(Path(save_directory, GENERATION_CONFIG_NAME), keys_to_pop=["compile_config"])


def try_saving(model: Any, tokenizer: PreTrainedTokenizerBase, *, whole: bool) -> None:
    """Save everything except the weights into a temporary folder, as at the end. `whole`: for the model too, not only for adapters.
    Raises UserError for parts that cannot be saved."""
    base = base_model(model)
    if whole:
        check_dequantizes(base)
        if getattr(base, "is_quantized", False) and any(isinstance(weight, DTensor) for weight in base.parameters()):
            fix = "Set it to false, and merge after the training: packtrain merge."
            raise UserError("fsdp2 cannot merge adapters into quantised weights yet", where="peft.merge", fix=fix)
    with TemporaryDirectory(prefix="packtrain-saving-") as folder:
        # a quantised base is saved dequantised, without the conversions of its loading: they have no reverse
        own = {"_weight_conversions": None} if getattr(base, "is_quantized", False) else {}
        with _raising_user_error("the model's config", "model.path"), holding(base, **own):
            for part in {model, base} if whole else {model}:
                # PEFT looks up the layers of modules_to_save, and would ask the hub about embedding layers
                names = model.state_dict() if part is not base else {}
                empty = {name: torch.empty(0) for name in names}
                part.save_pretrained(folder, state_dict=empty, save_embedding_layers=False)
        with _raising_user_error("the tokenizer", "model.tokenizer"):
            tokenizer.save_pretrained(folder)


def complete(model: Any, settings: Model, folder: Path) -> str:
    """Add other weights and files of the first model to the saved one in `folder`.

    They stay unchanged; weights/source.py has the weights. Files of the tokenizer come from its own place. Returns words for the last lines
    of a run. Raises UserError if the files are gone.
    """
    with boundary(f"what came with {settings.path} cannot be copied", str(folder)):
        said, source = carry(model, folder), folder_of(settings)
        words = folder_of(replace(settings, path=settings.tokenizer or settings.path))
        words = None if getattr(model, "grown", False) else words  # files of the base lack the tokens that were added
        for place in {source, words} - {None} if settings.init == "pretrained" else ():
            for file in filter(Path.is_file, cast(Path, place).iterdir()):
                its_place = words if _OF_TOKENIZERS.fullmatch(file.name) else source
                saved = folder / ("chat_template.jinja" if file.stem == "chat_template" else file.name)
                if place == its_place and not (saved.exists() or _STAYS.fullmatch(file.name)):
                    shutil.copyfile(file, folder / file.name)
    return said


@contextmanager
def weights_at_least(model: Any, folder: str | Path, weights: dict[str, Any] | None = None) -> Iterator[None]:
    """Write the weights (by default of `model`) if the block fails to save them. Then raise UserError with the reason."""
    try:
        yield
    except Exception:
        if not any(Path(folder).glob("*.safetensors")):
            save_torch_state_dict(model.state_dict() if weights is None else weights, folder)
        with _raising_user_error("the model's config or tokenizer", f"saving into {Path(folder).parent}"):
            raise


@contextmanager
def _raising_user_error(what: str, where: str) -> Iterator[None]:
    """Turn errors of the block into UserErrors. Not for a full disk: train/library_errors.py has the words for that."""
    try:
        yield
    except Exception as error:  # every kind of error: some come from code of the model
        if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno):
            raise
        raise UserError(f"{what} cannot be saved: {first_line(error)}", where=where) from error


def _refusal(settings: GenerationConfig) -> str:
    """Return why the library refuses to save a generation config; "" if it does not. It is the first reason."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        reasons = [line for line in str(error).splitlines() if line.startswith("- ")] or [first_line(error)]
        return reasons[0].removeprefix("- ").partition(" -- ")[0]  # before its advice
    return ""
