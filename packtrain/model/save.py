"""Saving a model for from_pretrained, so that no training is lost at its end.

Saving is tried before step 1, and the weights are written even if the rest fails. transformers checks more when it saves than when it loads (a
generation_config.json with `do_sample: false` and a temperature, as in Llama 2), and writes the weights last.

A sharded model is written without a whole copy. The files are planned only from shapes. Then all processes gather one weight after the other,
and the main one writes a file as soon as it has all its weights: beside its share it holds one file and one weight. If the library saves another
form than it computes with (experts), it converts each weight alone. If it makes one saved weight from several, the model is left to
whole_weights.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import align_special_tokens
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from packtrain.config.schema import Model
from packtrain.data.pictures.processor import files_of
from packtrain.errors import UserError, boundary
from packtrain.model.load import base_model, check_dequantizes
from packtrain.model.weights import carry
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.plan.known_model import folder_of
from packtrain.system import holding
from packtrain.wording import first_line

if TYPE_CHECKING:
    from peft import PeftModel

_STAYS = re.compile(
    r"\..*|(readme|adapter|optimizer|scheduler|trainer_state|rng_state|training_args|summary|metrics).*|"
    r".*results\.json|.*\.(safetensors|bin|pth?|ckpt(\..*)?|gguf|h5|msgpack|onnx|npz|zip|index\.json|jsonl|parquet|arrow|"
    r"ot|tflite|nemo|pkl|pdparams|csv|log|lock)",
    re.IGNORECASE,
)
"""Files beside a model that are not copied: weights, states, figures of other weights, and unrelated files."""
_OF_TOKENIZERS = re.compile(r".*token.*|vocab.*|merges.*|chat_template.*|.*\.(model|tiktoken|spm|bpe)", re.IGNORECASE)


def mend_generation_config(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> str:
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


def end_answers_at(model: nn.Module, ends: Sequence[int]) -> list[int]:
    """Let answers stop at the tokens `ends`, too; return the new ones."""
    settings = getattr(base_model(model), "generation_config", None)
    known = getattr(settings, "eos_token_id", None)
    known = [known] if isinstance(known, int) else known or []
    new = [token for token in ends if settings and token not in known]
    if settings and new:
        settings.eos_token_id = [*known, *new]
    return new


class _AsItCame(GenerationConfig):
    """A generation config saved without the library's checks."""

    def save_pretrained(self, save_directory: str | os.PathLike, *given: object, **settings: object) -> None:
        self.to_json_file(Path(save_directory, GENERATION_CONFIG_NAME), keys_to_pop=["compile_config"])


def try_saving(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, *, whole: bool) -> None:
    """Save everything except the weights into a temporary folder, as at the end. `whole`: for the model too, not only for adapters.
    Raises UserError for parts that cannot be saved."""
    base = base_model(model)
    if whole:
        check_dequantizes(base)
        if getattr(base, "is_quantized", False) and any(isinstance(weight, DTensor) for weight in base.parameters()):
            fix = "Set it to false, and merge after the training: packtrain merge."
            what = "fsdp2 cannot merge adapters into quantised weights yet"
            raise UserError(what, where="peft.merge", fix=fix, code="sharded-merge-quantised")
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


def complete(model: nn.Module, settings: Model, folder: Path) -> str:
    """Add other weights and files of the first model to the saved one in `folder`.

    They stay unchanged; weights.py has the weights. Files of the tokenizer come from its own place. Returns words for the last lines
    of a run. Raises UserError if the files are gone.
    """
    with boundary(f"what came with {settings.path} cannot be copied", str(folder), code="model-files-uncopied"):
        said, source = carry(model, folder), folder_of(settings)
        words = folder_of(replace(settings, path=settings.tokenizer or settings.path))
        words = None if getattr(model, "grown", False) else words  # files of the base lack the tokens that were added
        for place in {source, words} - {None} if settings.init == "pretrained" else ():
            for file in filter(Path.is_file, cast(Path, place).iterdir()):
                its_place = words if _OF_TOKENIZERS.fullmatch(file.name) else source
                saved = folder / ("chat_template.jinja" if file.stem == "chat_template" else file.name)
                if place == its_place and not (saved.exists() or _STAYS.fullmatch(file.name)):
                    shutil.copyfile(file, folder / file.name)
        if settings.init == "random":  # new weights of a model that takes pictures
            for name, content in files_of(settings).items():
                folder.joinpath(name).write_bytes(content)
    return said


@contextmanager
def weights_at_least(
    model: nn.Module, folder: str | Path, weights: dict[str, torch.Tensor] | None = None
) -> Iterator[None]:
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
        raise UserError(f"{what} cannot be saved: {first_line(error)}", where=where, code="cannot-save") from error


def _refusal(settings: GenerationConfig) -> str:
    """Return why the library refuses to save a generation config; "" if it does not. It is the first reason."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        reasons = [line for line in str(error).splitlines() if line.startswith("- ")] or [first_line(error)]
        return reasons[0].removeprefix("- ").partition(" -- ")[0]  # before its advice
    return ""


FILE_BYTES = 5 * 10**9
"""Largest size of a file, unless a single weight is larger; huggingface_hub's own default."""
_PATTERN = "model{suffix}.safetensors"
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The saved weights: their `names` in the state dict, in order. `files`: the saved names by file. `index`: the index file."""

    names: tuple[str, ...]
    files: dict[str, list[str]]
    index: dict[str, dict] | None


def plan_files(model: PreTrainedModel, dtype: torch.dtype) -> FilePlan | None:
    """Plan the files of a `model` saved in `dtype`. None if weights have to be converted together."""
    held = model.state_dict(keep_vars=True)
    marks = {id(value): torch.zeros(1) for value in held.values()}  # tied weights have the same
    kept = remove_tied_weights_from_state_dict({name: marks[id(value)] for name, value in held.items()}, model)
    kept = {name for name in kept if name not in (model._keys_to_ignore_on_save or ())}
    shapes = {
        name: torch.empty(
            getattr(value, "ds_shape", value.shape),  # ZeRO-3's parameters are empty
            dtype=dtype if isinstance(value, torch.nn.Parameter) else value.dtype,
            device="meta",
        )
        for name, value in held.items()
        if name in kept
    }
    single: dict[str, torch.Tensor] = {}
    try:
        together = revert_weight_conversion(model, dict(shapes))
        for name, shape in shapes.items():
            single |= revert_weight_conversion(model, {name: shape})
    except Exception:  # from a conversion that lacks the other weights
        return None
    if {name: value.shape for name, value in single.items()} != {name: value.shape for name, value in together.items()}:
        return None
    split = split_torch_state_dict_into_shards(single, filename_pattern=_PATTERN, max_shard_size=FILE_BYTES)
    counts = {"total_parameters": sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())}
    index = {"metadata": counts | split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    return FilePlan(tuple(shapes), split.filename_to_tensors, index)


def write_files(
    model: PreTrainedModel,
    plan: FilePlan,
    folder: Path,
    made: Callable[[torch.Tensor], torch.Tensor | None],
    *,
    main: bool,
) -> None:
    """Write the weights of `model` into `folder` by `plan`, on the `main` process. All processes call it.

    `made` returns the tensor to save for a parameter, whole and on the CPU (None elsewhere). If the disk fails, the weights are still gathered
    to the end, since the others wait for that; then the error is raised.
    """
    held, place = model.state_dict(keep_vars=True), {name: file for file, names in plan.files.items() for name in names}
    open_files: dict[str, dict[str, torch.Tensor]] = {file: {} for file in plan.files}
    failure: Exception | None = None
    for name in plan.names:
        value = held[name]
        whole = made(value) if isinstance(value, torch.nn.Parameter) else value.detach().cpu()
        progress()
        parts = {} if not main or whole is None or failure else revert_weight_conversion(model, {name: whole})
        del whole
        for key, part in parts.items():
            file = place[key]
            open_files[file][key] = part.contiguous()
            if len(open_files[file]) == len(plan.files[file]):
                try:
                    save_file(open_files.pop(file), folder / file, metadata={"format": "pt"})
                except (OSError, SafetensorError) as error:
                    failure = error
        parts = {}
        return_freed_memory()
    if failure:
        raise failure
    if main and plan.index:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(plan.index, indent=2, sort_keys=True) + "\n")


def gathered(weight: torch.Tensor) -> torch.Tensor:
    """Gather all of a weight whose rows may be sharded. All processes call it. It broadcasts into place: gloo's all-gather takes
    one more copy, and `full_tensor` two."""
    if hasattr(weight, "ds_id"):
        import deepspeed

        with waiting("the other ranks to gather a weight"), deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight
    mesh, own = weight.device_mesh, weight.to_local().to(weight.device_mesh.device_type)
    last = mesh.ndim - 1
    whole, group = own.new_empty(weight.shape), mesh.get_group(last)
    with waiting("the other ranks to gather a weight"):
        for number, part in enumerate(whole.split(-(-len(weight) // mesh.size(last)))):
            if number == mesh.get_local_rank(last):
                part.copy_(own)
            dist.broadcast(part, group=group, group_src=number)
    return whole


def return_freed_memory() -> None:
    """Call malloc_trim. glibc would keep the memory of freed weights, as much as a whole model."""
    with suppress(OSError, AttributeError):  # another library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def map_large_blocks() -> None:
    """Make glibc unmap each block of 1 MiB or more when it is freed.

    Its heap keeps the holes between gathered layers: three whole models in each of four processes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 2**20)
