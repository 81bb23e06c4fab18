"""Facts about a model before it is loaded: weight shapes, config sizes, compute format, reference.

No torch, no hub. Shapes come from the headers of safetensors files, in a local folder or in the hub's cache. If the model is in neither,
shapes of llama and similar models follow from the sizes in their config.json or in model.config. If those are missing too, the error
says what is missing; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import xxhash
from huggingface_hub import constants

from packtrain.config.objective import Objective
from packtrain.config.rules.paths_and_packages import frozen_of
from packtrain.config.schema import Model, Peft, RunConfig, Strategy
from packtrain.errors import Json, Problem, UserError, read_json
from packtrain.plan.model_types import check_type
from packtrain.wording import first_line, shortened

_LLAMA_KIN = ("llama", "mistral", "qwen2", "qwen3")
_KIN_THAT_SEE = {
    "qwen2_vl": "qwen2",  # without text_config, in older files
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Model types of language parts, by the type whose layers they have."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_COUNT = re.compile(
    r"vocab_size|(moe_)?intermediate_size|hidden_size|head_dim|num_\w+_(layers|heads)|n_(embd|layer|head)"
)
_HEADER_LIMIT = 100 * 2**20
_BLOCKS, _BLOCK_BYTES = 1024, 2**16
_BITS = r"(.+\.)(?:qweight|qzeros|scales|g_idx)"
_BESIDE = {
    "bitsandbytes": r"(.+\.)(?:weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)|SCB|weight_format)",
    **dict.fromkeys(("gptq", "awq", "auto-round"), _BITS),
    **dict.fromkeys(("fp8", "mxfp8"), r"(.+?)_?(?:scale_inv|activation_scale)"),
    "mxfp4": r"(.+)_(?:blocks|scales)",
    "compressed-tensors": r"(.+\.)(?:weight_(?:packed|shape|scale|zero_point|g_idx|global_scale)|(?:in|out)put_(?:global_)?scale)",
}
"""Names of the tensors of a quantised weight, beside or in place of the weight itself, by transformers' quant_method. The group is its
layer with a dot at the end, or its own name."""
EXPANDED = ("compressed-tensors", "mxfp4")
"""Quantisation methods that are dequantised at loading: their weights would have no gradients, or no adapters."""
_EXPANDED_ON_CPUS = ("fp8", "mxfp8")
_WITHOUT_GRADIENTS = ("auto-round", "fbgemm_fp8", "higgs", "nvfp4", "quark", "spqr", "vptq")
"""Methods whose weights take no adapters either: not `is_trainable` in transformers."""
_MAX_LAYERS = 10_000  # far more than any model has; a plan for a mistyped number would not be instant
FAST_ENOUGH = 1.5
"""Least speed of a CPU's bfloat16 products, with float32 as 1, for trainer.mixed_precision=fast. The rest of a step gains less."""
BASE = "adapter_base.json"
"""A file beside adapters. It holds the hash of their base model's files, and the relative path to them."""
_EXPERT = re.compile(
    r"(.*(?:_moe\.|(?=\bexperts\.)))(?:experts\.)?(?:\d+\.)?(?:gate_\w+|up_proj|w[13]|in\w+|(down_proj|w2|out\w+))"
)
TOWERS = re.compile(
    r"^mlp1\.|(^|\.)(vis|vit\.|vit_|video|image|audio|speech|acoustic|semantic|multi_modal|mm_|high_res|vq|embed_(vision|audio)|generation_|view_sep|sam_model|qwen2_model|patch_merg|mlp_AR|perception|ctc_|"
    r"word_timestamp|\w*(connector|aligner|projectors?|perceiver|merger|resampler|siglip))"
)
"""Names of the weights of towers and projectors, in the files of multimodal models."""
SCORE = "score.weight"
"""Name of a reward model's head."""
Shapes = Mapping[str, tuple[int, ...]]
Sizes = Mapping[str, Any]
"""Values of a model's own config."""
Kind = Literal["model", "adapters_off", "adapters", "precomputed", "path"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight `shapes` by name, bytes per `stored` number, known config values (`sizes`).

    `packed`: bytes in the files of each quantised weight, with its scales.
    """

    shapes: Shapes
    stored: int
    sizes: Sizes
    packed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layers:
    """Widths of a llama-like model, in numbers.

    `hidden` is the residual stream, `inner` the inside of the MLP. `query` and `key` are over all heads, `head` is one head.
    """

    kind: str
    number: int
    heads: int
    hidden: int
    inner: int
    query: int
    key: int
    head: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class ReferenceChoice:
    """The reference of a run. `kind` says how it is made.

    `adapters` is the folder of its adapters, "" for none. `at_start`: the model equals its reference before step 1.
    """

    kind: Kind
    adapters: str
    at_start: bool


def check_model_config(model: Model, *, scores: bool = False) -> None:
    """Raise UserError if model.config cannot be trained.

    It names all values that no model can have, or a model type that does not train. `scores`: for a reward model.
    """
    problems = []
    for name, value in model.config.items():
        several = value if isinstance(value, list) else [value]  # a list has one width for each layer
        if _COUNT.fullmatch(name) and value is not None and any(type(item) is not int or item < 1 for item in several):
            what, fix = f"found {shortened(value)}", "Allowed: whole number ≥ 1."
            problems.append(Problem(what, f"model.config.{name}", fix, code="not-a-size"))
    if not isinstance(kind := (sizes := known_sizes(model)).get("model_type", ""), str):
        what, fix = f"found {shortened(kind)}", "Allowed: text, such as llama."
        problems.append(Problem(what, "model.config.model_type", fix, code="not-a-model-type"))
    if problems:
        raise UserError(problems)
    if not model.trust_remote_code and not str(model.path).endswith(".gguf"):
        check_type(sizes, "model.config.model_type" if "model_type" in model.config else "model.path", scores=scores)


def weights_of(model: Model, *, scores: bool = False) -> Weights:
    """Return the weights of a model, without adapters. With `scores`: of a reward model, with a score head.

    Raises UserError if they cannot be known before loading, and names what is missing.
    """
    folder, sizes = folder_of(model), known_sizes(model)
    if model.init == "random":
        weights = Weights(_from_sizes(sizes), 4, sizes)
    elif model.path and model.path.endswith(".gguf"):
        raise UserError("a .gguf file is read while loading only", code="gguf-unread")
    elif folder is not None:
        try:
            weights = _stored(folder, sizes)
        except (KeyError, ValueError, TypeError, ArithmeticError, IndexError) as error:
            what = "its files do not have the tensors, or its config not the fields, of their quantization"
            raise UserError(f"{what} ({first_line(error)})", code="quantisation-incomplete") from error
    elif "model_type" in sizes:
        weights = Weights(_from_sizes(sizes), 2, sizes)  # model.dtype=auto: the usual format on the hub is bfloat16
    else:
        how = "its sizes can be given: model.config.model_type=…, model.config.hidden_size=… (docs/planning.md has all)"
        raise UserError(f"{below_adapters(model).path} is not on this machine yet; {how}", code="model-not-local")
    if not scores:
        return weights
    widths = [shape[1] for name, shape in weights.shapes.items() if re.search(r"embed_tokens|\bwte\b|embed_in", name)]
    head = {SCORE: (1, widths[0])} if widths else {}
    kept = {name: shape for name, shape in weights.shapes.items() if not re.search(r"\b(lm_head|embed_out)\b", name)}
    packed = {name: size for name, size in weights.packed.items() if name in kept}
    return replace(weights, shapes={**head, **kept}, packed=packed)


def known_sizes(model: Model) -> Json:
    """Return the known values of the model's own config.

    model.config overrides config.json, if that is on this machine. Raises UserError for a file that is not a config.
    """
    folder = folder_of(model)
    return {**(_read(folder / "config.json") if folder else {}), **model.config}


def quantised_by(sizes: Sizes, *, gpu: bool) -> str:
    """Return the quantisation method of a loaded model's weights. "" if its weights are whole."""
    settings = sizes.get("quantization_config")
    if not isinstance(settings, Mapping):
        return ""
    method = str(settings.get("quant_method", "bitsandbytes"))
    expanded = settings.get("dequantize") or method in EXPANDED or (method in _EXPANDED_ON_CPUS and not gpu)
    return "" if expanded else method


def check_weights(config: RunConfig, *, gpu: bool) -> None:
    """Raise UserError if the run would refuse weights on this machine."""
    check_quantised(config.model, config.peft, gpu=gpu)
    frozen = frozen_of(config)
    for path in (config.model.path, config.objective.reference, frozen and frozen[1].path):
        below = replace(config.model, path=path, revision=None)
        if below.init == "pretrained" and path and base_of(path) is not None and (folder := folder_of(below)):
            files = _weight_files(folder)
            check_base(Path(os.path.expanduser(path)), [*map(str, files)] if all(map(Path.is_file, files)) else [])


def check_quantised(model: Model, peft: Peft, *, gpu: bool) -> None:
    """Raise UserError if the training would change weights that stay quantised. Their config must be on this machine."""
    method = quantised_by(known_sizes(model), gpu=gpu) if model.init == "pretrained" else ""
    takes_adapters = method not in _WITHOUT_GRADIENTS
    if method and not (takes_adapters and peft.kind == "lora"):
        raise untrainable(method, takes_adapters=takes_adapters)


def untrainable(method: str, *, takes_adapters: bool) -> UserError:
    """Return the error for weights that stay quantised by `method`."""
    more = ", or train adapters (peft=lora)" if takes_adapters else ""
    fix = f"take the model that they were made of{more}"
    return UserError(f"weights quantised by {method} cannot be trained", where="model.path", fix=fix, code="quantised")


def language_sizes(sizes: Sizes) -> Sizes:
    """Return the values of a multimodal model's language part; for other models all values."""
    own = sizes.get("text_config")
    return {**sizes, **own} if isinstance(own, Mapping) else sizes


def read_layers(sizes: Sizes) -> Layers:
    """Return the layers of a llama, mistral, qwen2 or qwen3 model, or language part.

    Raises UserError with the missing sizes.
    """
    sizes = language_sizes(sizes)
    kind = sizes.get("model_type")
    kind = _KIN_THAT_SEE.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in _LLAMA_KIN:
        what = f"the layers of model type {kind} are not among those that packtrain knows"
        raise UserError(what, code="uncounted-layers")
    needed = list(_SIZES)
    needed += ["num_key_value_heads"] if kind != "llama" else []
    needed += ["head_dim"] if kind == "qwen3" else []
    for name in needed:
        if not isinstance(sizes.get(name), int) or sizes[name] < 1:
            whose = "tokenizer" if name == "vocab_size" else "model type"
            raise UserError(f"model.config.{name} is left to the {whose}", code="size-unknown")
    hidden, inner, number, heads, vocabulary = (sizes[name] for name in _SIZES)
    if number > _MAX_LAYERS:
        what = f"model.config.num_hidden_layers={number:,}: up to {_MAX_LAYERS:,} are counted"
        raise UserError(what, code="too-many-layers")
    head = sizes.get("head_dim") or hidden // heads
    shared = (sizes.get("num_key_value_heads") or heads) * head
    return Layers(kind, number, heads, hidden, inner, heads * head, shared, head, vocabulary)


def adapter_shapes(shapes: Shapes, peft: Peft) -> list[tuple[int, ...]]:
    """Return the shapes of LoRA's trained weights: two matrices per adapted layer. DoRA adds magnitudes; modules_to_save are whole."""
    trained, ranks = list[tuple[int, ...]](), peft.options.get("rank_pattern", {})
    ends = "|".join(map(re.escape, peft.modules_to_save)) or "(?!)"
    saved = re.compile(rf"({ends})\.")
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        found = _EXPERT.fullmatch(layer)
        tensor = f"{found[1]}experts.{'down' if found[2] else 'gate_up'}_proj" if found else ""
        is_matrix = len(shape) == 2 and name not in (SCORE, layer)
        if (is_matrix or (tensor and len(shape) == 3)) and is_chosen(layer, peft, tensor):
            r = next((r for at, r in ranks.items() if is_at(at, tensor or layer)), peft.r)
            r *= 1 if is_matrix else shape[0]
            gate = f"{layer.replace('.up_proj', '.gate_proj').replace('.w3', '.w1')}.weight"  # shares its first half
            halves = [(r, shape[-1]), (shape[-2], r), *([(shape[0],)] if peft.options.get("use_dora") else [])]
            trained += halves[1:] if tensor and gate != name and gate in shapes else halves
        if name == SCORE or saved.search(f"{tensor or layer}."):
            trained.append(shape)
    return trained


def is_chosen(layer: str, peft: Peft, tensor: str = "") -> bool:
    """Return whether `peft` adapts the linear layer, or the `tensor` of experts that contains it."""
    excluded, numbers = peft.options.get("exclude_modules", ""), peft.options.get("layers_to_transform")
    joint = tensor and (peft.experts or peft.target_modules == "all-linear")
    leaves_out = any(is_adapted(name, excluded) for name in (tensor or layer, tensor.rpartition(".")[0] or layer))
    if leaves_out or not (peft.experts if joint else is_adapted(layer, peft.target_modules)):
        return False
    if peft.target_modules == "all-linear" and TOWERS.search(layer):
        return False
    lists = peft.options.get("layers_pattern", "[^.]*")
    found = [re.match(rf"(?:.*?\.)?{name}\.(\d+)\.", layer) for name in ([lists] if isinstance(lists, str) else lists)]
    return numbers is None or any(int(item[1]) in numbers for item in found if item)


def has_experts(tensors: Iterable[str] | None) -> bool:
    """Return whether PEFT's target_parameters name experts. Weights of layers can be among them too."""
    return any(not name.endswith(".weight") for name in tensors or ())


def is_at(pattern: str, layer: str) -> bool:
    """Return whether a key of rank_pattern or alpha_pattern matches this layer name, by peft's rule."""
    return re.match(rf"(.*\.)?({pattern})$", layer) is not None


def is_adapted(layer: str, targets: str | Collection[str]) -> bool:
    """Return whether `targets` name the linear layer of this name."""
    if targets == "all-linear":
        return not re.search(r"embed|lm_head|\bwte\b|\bwpe\b|\.(gate|router)$|moe\.router\.layer$", layer)
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None  # peft too takes text as a pattern
    return any(ending in targets for ending in _endings(layer))


def choose_precision(
    asked: str, *, weights: str, adapters: bool, gpu: bool, has_bf16: bool, speed: Callable[[], float]
) -> tuple[str, str]:
    """Resolve trainer.mixed_precision=`asked` for `weights` of this format: ("no", "bf16" or "fp8", why).

    `adapters`: adapters are trained; they are float32. `has_bf16`: the GPU has bfloat16. `speed` measures how many times as fast as
    float32 a CPU multiplies in bfloat16.
    """
    if asked in ("no", "bf16", "fp8"):
        return asked, "asked for"
    if weights == "float16":
        return "no", "the weights are float16"
    if weights == "bfloat16" and not adapters:
        return "no", "the weights are bfloat16 already"
    if gpu:
        return ("bf16", "the GPU has bfloat16") if has_bf16 else ("no", "the GPU has no bfloat16")
    if asked == "auto":
        return "no", "on a CPU; trainer.mixed_precision=fast measures whether bfloat16 is faster"
    ratio = speed()
    how = f"this CPU multiplies {ratio:.1f} times as fast in bfloat16"
    return ("bf16", how) if ratio >= FAST_ENOUGH else ("no", f"{how}, {FAST_ENOUGH:g} are asked for")


def plan_precision(config: RunConfig, weights: str, *, gpu: bool) -> tuple[str, str]:
    """Return the precision that a plan counts with, and its condition. `weights` is their format; `gpu`: the plan is for GPUs."""
    asked, adapters = config.trainer.mixed_precision, config.peft.kind != "none"
    value, why = choose_precision(asked, weights=weights, adapters=adapters, gpu=gpu, has_bf16=True, speed=lambda: 0.0)
    if why.startswith("this CPU"):
        why = f"unless the start finds bfloat16 {FAST_ENOUGH:g} times as fast on the CPU"
    return value, why.replace("the GPU has bfloat16", "on GPUs that have it; on a CPU no")


def precision_in_words(config: RunConfig, *, gpu: bool) -> str:
    """Describe the formats of weights and computation in words."""
    weights = config.model.dtype
    value, why = plan_precision(config, "float32" if weights == "auto" else weights, gpu=gpu)
    words = {"no": "no mixed precision", "bf16": "computed in bfloat16", "fp8": "layers multiplied in 8 bits (fp8)"}
    formats = "weights as in the model's files; if they are float32" if weights == "auto" else f"{weights} weights"
    return f"{formats}, {words[value]} ({why})"


def base_of(path: str | None) -> str | None:
    """Return the base model of the adapters in `path`; None if it holds no adapters. Raises UserError if they name no base."""
    file = Path(os.path.expanduser(path or "")) / "adapter_config.json"
    if path is None or not os.path.isfile(file):
        return None
    base, where = read_json(file).get("base_model_name_or_path"), f"{file}: base_model_name_or_path"
    if not isinstance(base, str) or not base:
        raise UserError("the adapters name no base model", where=where, code="no-base-model")
    if not os.path.isabs(base) or os.path.exists(base):
        return base
    moved = os.path.normpath(file.parent / str(_read(file.with_name(BASE)).get("path", "")))  # moved with their base
    if moved == os.path.normpath(file.parent) or not os.path.exists(moved):
        fix = f"Write where it is on this machine there, in place of {base}."
        raise UserError(f"the adapters' base model is not here: {base}", where=where, fix=fix, code="base-missing")
    return moved


def below_adapters(model: Model) -> Model:
    """Return the base of a folder of adapters, in the revision they name; else `model`."""
    base = base_of(model.path) if model.init == "pretrained" else None
    if base is None:
        return model
    named = read_json(Path(os.path.expanduser(str(model.path))) / "adapter_config.json").get("revision")
    return replace(model, path=base, revision=named or model.revision)


def check_base(adapters: Path, files: Sequence[str]) -> None:
    """Raise UserError if the folder `adapters` was trained on other weights than `files`. No files: they are not known."""
    file = adapters / BASE
    known = _read(file)
    if known.get("weights") and files and known["weights"] != sampled_hash(files):
        here = os.path.dirname(files[0])
        what = f"the adapters of {adapters} were trained on {known.get('base')}, and {here} has other weights"
        fix = f"Name the model that they were trained on. If its weights were only stored anew, remove {file}."
        where = f"{adapters / 'adapter_config.json'}: base_model_name_or_path"
        raise UserError(what, where=where, fix=fix, code="another-base")


def sampled_hash(files: Iterable[str]) -> str:
    """Hash the sizes of `files`, their first bytes and blocks spread over them. No process sees all weights if they are read by slices.
    Samples suffice, because weights of another training differ everywhere."""
    digest = xxhash.xxh3_128()
    for file in sorted(files, key=os.path.basename):
        end = os.path.getsize(file)
        digest.update(f"{os.path.basename(file)} {end}".encode())
        with open(file, "rb") as opened:
            blocks = min(_BLOCKS, 2 + end // _BLOCK_BYTES)  # a small file is read whole
            for number in range(blocks):
                opened.seek(max(0, end - _BLOCK_BYTES) * number // (blocks - 1))
                digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()


def reference_of(model: Model, peft: Peft, objective: Objective, strategy: Strategy) -> ReferenceChoice:
    """Resolve objective.reference for this run."""
    wanted, lora = objective.reference, peft.kind == "lora"
    continued = model.init == "pretrained" and base_of(model.path) is not None  # goes on from a folder of adapters
    adapters = str(model.path) if wanted == "auto" else wanted
    kind: Kind
    if wanted == "auto" and not (lora and continued):
        kind = "adapters_off" if lora else "model"
    elif wanted in ("model", "adapters_off", "precomputed"):
        kind = cast(Kind, wanted)
    else:
        bases = [base_of(adapters), base_of(model.path) or model.path]
        same = None not in bases and len({os.path.realpath(os.path.expanduser(base or "")) for base in bases}) == 1
        if lora and same and not strategy.spec.shards_weights:  # adapters cannot be added to sharded weights
            return ReferenceChoice("adapters", adapters, wanted == "auto")
        kind = "model" if wanted == "auto" else "path"
    return ReferenceChoice(kind, "", kind in ("model", "precomputed") or (kind == "adapters_off" and not continued))


def folder_of(model: Model) -> Path | None:
    """Return the local folder or hub-cache snapshot of a model, or of adapters' base. None without either."""
    model = below_adapters(model)
    if (name := model.path) is None:
        return None
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    revision = model.revision or "main"
    with contextlib.suppress(OSError):  # a revision may itself be a commit
        revision = (repository / "refs" / revision).read_text().strip()
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def _stored(folder: Path, sizes: Sizes) -> Weights:
    """Return the weights in the safetensors files of a folder. Raises UserError for quantised ones in a layout that is not known."""
    settings = sizes.get("quantization_config")
    settings = settings if isinstance(settings, Mapping) else {}
    method = str(settings.get("quant_method", "bitsandbytes"))
    if settings and method not in _BESIDE:
        raise UserError(f"weights quantised by {method} are counted while loading only", code="unknown-quantisation")
    tensors, real = _headers(folder)
    shapes, packed = dict[str, tuple[int, ...]](), Counter[str]()
    for name, (_, shape, size) in tensors.items():
        if settings and (found := re.fullmatch(_BESIDE[method], name)):
            packed[f"{found[1]}weight" if found[1].endswith(".") else found[1]] += size
        else:
            shapes[name] = shape
    formats = {tensors[name][0] for name in shapes.keys() - packed.keys()}
    for name in packed:
        packed[name] += tensors[name][2] if name in shapes else 0
        layer = name.removesuffix("weight")
        if name in real:
            shapes[name] = real[name]
        elif f"{layer}qweight" in tensors:  # int32, each of several numbers
            outputs = tensors[f"{layer}scales"][1][-1]
            numbers = math.prod(tensors[f"{layer}qweight"][1]) * 32 // int(settings.get("bits") or settings["w_bit"])
            shapes[name] = outputs, numbers // outputs
        elif f"{name}_blocks" in tensors:  # blocks of 32 numbers, in 16 bytes
            experts, outputs, blocks, _ = tensors[f"{name}_blocks"][1]
            shapes[name] = experts, 32 * blocks, outputs
        elif f"{name}_packed" in tensors:  # two numbers in a byte
            outputs, half = tensors[f"{name}_packed"][1]
            shapes[name] = outputs, 2 * half
    return Weights(shapes, 2 if formats & {"BF16", "F16"} else 4, sizes, packed)


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    One file with all weights comes first, then the files in the index, as in transformers.
    """
    index = {} if (folder / "model.safetensors").is_file() else _read(folder / "model.safetensors.index.json")
    shards = index.get("weight_map")
    names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) and shards else ["model.safetensors"]
    return [folder / name for name in names]


def _headers(folder: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, tuple[int, ...]]]:
    """Return format, shape and bytes of each tensor in a folder's safetensors files.

    Also return the real shapes that are written beside packed tensors.
    """
    tensors, real = dict[str, tuple[str, tuple[int, ...], int]](), dict[str, tuple[int, ...]]()
    for file in _weight_files(folder):
        if not file.is_file():
            raise UserError("there are no weights, or they are no regular file", where=str(file), code="no-weights")
        try:
            with open(file, "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _HEADER_LIMIT)))
                header.pop("__metadata__", None)
                for name, item in header.items():
                    first, end = item["data_offsets"]
                    tensors[name] = item["dtype"], tuple(item["shape"]), end - first
                    stream.seek(8 + size + first)
                    if ".quant_state." in name:  # of bitsandbytes
                        shape = json.loads(stream.read(end - first))["shape"]
                        real[name.partition(".quant_state.")[0]] = tuple(map(int, shape))
                    elif name.endswith(".weight_shape"):  # of compressed-tensors: two integers
                        sides, half = stream.read(end - first), (end - first) // 2
                        shape = (int.from_bytes(side, "little") for side in (sides[:half], sides[half:]))
                        real[name.removesuffix("_shape")] = tuple(shape)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} cannot be read as safetensors", code="not-safetensors") from error
    return tensors, real


def _read(path: Path) -> Json:
    """Return the JSON object in a file, {} if the file is absent. Raises UserError for anything else."""
    return read_json(path) if os.path.lexists(path) else {}


def _from_sizes(sizes: Sizes) -> Shapes:
    """Return the weight shapes of a llama, mistral, qwen2 or qwen3 model with these sizes."""
    if sizes.get("model_type") not in _LLAMA_KIN:  # towers have weights, too
        raise UserError(
            f"the weights of model type {sizes.get('model_type')} are counted in its files", code="uncounted-weights"
        )
    layers = read_layers(sizes)
    bias = layers.kind == "qwen2" or (layers.kind != "mistral" and sizes.get("attention_bias", False))
    parts = {"input_layernorm": (layers.hidden,), "post_attention_layernorm": (layers.hidden,)}
    parts |= {f"mlp.{name}": (layers.inner, layers.hidden) for name in ("gate_proj", "up_proj")}
    parts |= {"mlp.down_proj": (layers.hidden, layers.inner), "self_attn.o_proj": (layers.hidden, layers.query)}
    parts |= {f"self_attn.{name}": (rows, layers.hidden) for name, rows in _rows(layers)}
    if layers.kind == "qwen3":
        parts |= {f"self_attn.{name}": (layers.head,) for name in ("q_norm", "k_norm")}
    layer = {f"{name}.weight": shape for name, shape in parts.items()}
    if bias:
        layer |= {f"self_attn.{name}.bias": (rows,) for name, rows in _rows(layers)}
        layer |= {"self_attn.o_proj.bias": (layers.hidden,)} if layers.kind != "qwen2" else {}
    outside = {"model.embed_tokens.weight": (layers.vocabulary, layers.hidden), "model.norm.weight": (layers.hidden,)}
    if not sizes.get("tie_word_embeddings", False):
        outside["lm_head.weight"] = (layers.vocabulary, layers.hidden)
    inside = {f"model.layers.{at}.{name}": shape for at in range(layers.number) for name, shape in layer.items()}
    return outside | inside


def _rows(layers: Layers) -> tuple[tuple[str, int], ...]:
    return ("q_proj", layers.query), ("k_proj", layers.key), ("v_proj", layers.key)


def _endings(layer: str) -> Iterator[str]:
    """Yield the names that peft knows a layer by: a.b.c, b.c and c."""
    while layer:
        yield layer
        layer = layer.partition(".")[2]
