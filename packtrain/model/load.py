"""Loading the model: hub id, folder, .gguf file, or a config with random weights.

`model.quantize` loads a base in 4 or 8 bits below adapters, by transformers' quantisation configs. nf4 (QLoRA, arXiv 2305.14314) and int8 are
bitsandbytes', fp8 is torchao's, only for weights. Output head and embeddings are not quantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from packtrain.attention.forwards import rotates_by_length
from packtrain.config import is_number
from packtrain.config.keys import suggest
from packtrain.config.schema import Model, Peft, Quantize
from packtrain.data.tokens.pretrained import check_model_folder, fix_of, hub, location
from packtrain.errors import Problem, UserError, boundary
from packtrain.model.adapters import (
    add_adapters,
    continue_adapters,
    embeddings_in,
    fit_to_layers,
    load_adapters,
    name_base,
    take_vocabulary,
)
from packtrain.model.layers import loop_over_experts
from packtrain.model.towers import let_run_text
from packtrain.model.weights import MTP, WeightFiles, judge, reading_files, source_of
from packtrain.plan.known_model import EXPANDED, below_adapters, known_sizes, untrainable
from packtrain.proof.isolation import max_positions

if TYPE_CHECKING:
    from peft import PeftModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}
SCORE_HEAD = "score"
"""The linear layer of a reward model over the last token of a document: the decoders among transformers' …ForSequenceClassification."""
_ROTARY_KEYS = ("head_dim", "partial_rotary_factor", "rope_scaling", "rope_theta")
"""Keys that a new config with rope_parameters accepts without a field of that name; most go into rope_parameters."""


def check_before_loading(
    config: Model, peft: Peft, tokenizer: PreTrainedTokenizerBase, despite: Iterable[str] = (), *, scores: bool = False
) -> None:
    """Raise UserError for errors in the model's config. Called before data is prepared and weights are read.

    Errors are: a type that does not train, keys that it does not have (also in `despite`, trainer.resume_despite), names in `peft` of no layer.
    Models with their own code and .gguf files are checked when they are loaded.
    """
    config, where = _below_adapters(adapted := config)
    if config.trust_remote_code or (config.path or "").endswith(".gguf"):
        return
    with _loading(config, where):
        model_config = _config_of(config, tokenizer, scores=scores)
        named = [key.split(".")[2] for key in despite if key.startswith("model.config.")]
        _check_keys(named, model_config, {*config.config, *_ROTARY_KEYS}, "trainer.resume_despite")
        with torch.device("meta"):
            model = _auto_class(model_config, scores=scores).from_config(model_config)
    loop_over_experts(model, config.experts)
    if peft.kind == "lora" and config is adapted:
        fit_to_layers(model, peft)


def load_model(
    config: Model,
    peft: Peft,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    scores: bool = False,
    mesh: DeviceMesh | None = None,
    dequantize: bool = False,
    apart: bool = False,
) -> PreTrainedModel:
    """Load the model to train, in `model.dtype`, with new or saved adapters.

    It is on the CPU, a quantised one on its compute device. `scores`: a reward model. `model.path` may be a folder of adapters (adapters.py).
    New weights (random model, adapters, a head) depend only on `seed`. On a `mesh` (model/spread.py) each process reads its own slices of the
    weights in files (weights.py); whole ones to merge adapters, or for DoRA. `apart` loads adapters of model.path frozen, not merged.
    `dequantize`: quantised weights become numbers in the model's format. Raises UserError for a model that cannot be loaded or lacks embeddings.
    """
    torch.manual_seed(seed)
    config, where = _below_adapters(adapted := config)
    with _loading(config, where):
        if config.init == "random":
            new = _config_of(config, tokenizer, scores=scores)
            dtype = None if config.dtype == "auto" else _DTYPES[config.dtype]
            model = _auto_class(new, scores=scores).from_config(
                new, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        else:
            held = embeddings_in(str(adapted.path)) if config is not adapted else {}
            grown = bool(held) and known_sizes(config).get("vocab_size") not in held.values()
            whole = grown or (config is not adapted and peft.kind != "lora")
            # DoRA starts from the norms of whole weights
            with reading_files(None if whole or peft.options.get("use_dora") else mesh):
                model = _load_pretrained(config, tokenizer, seed, scores=scores)
            take_vocabulary(model, held, str(adapted.path))
    keep_layout(model)
    let_run_text(model)
    model = dequantized(model) if dequantize else model
    loop_over_experts(model, config.experts)
    rows = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    if len(tokenizer) > rows:
        what = f"the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}"
        fix = "use the model's own tokenizer" if config.init == "pretrained" else "set model.config.vocab_size"
        raise UserError(what, where="model.tokenizer", fix=fix, code="vocabulary-too-small")
    for name, value in vars(model.config.get_text_config()).items():
        if "drop" in name and is_number(value) and not 0 <= value <= 1:  # else found by the first step in training mode
            what, fix = f"{value} is no probability", "give a number from 0 to 1"
            raise UserError(what, where=f"model.config.{name}", fix=fix, code="not-a-probability")
    if scores:
        check_score_head(model, tokenizer)
    if apart and config is not adapted:
        return cast(PreTrainedModel, load_adapters(model, str(adapted.path), scores=scores, trained=False))
    if config is not adapted:
        model = continue_adapters(model, str(adapted.path), peft, scores=scores)
    elif peft.kind == "lora":
        model = add_adapters(model, peft, seed, scores=scores)
    if peft.kind == "lora" and config.is_base_for_adapters:
        name_base(cast("PeftModel", model), str(config.path), config.revision)
    return model


def _below_adapters(config: Model) -> tuple[Model, str]:
    """Return the config of the model below a folder of adapters, and its place. Without a folder it is `config` itself."""
    if (base := below_adapters(config)) is not config:
        named = Path(cast(str, config.path)).expanduser() / "adapter_config.json"
        return base, f"{named}: base_model_name_or_path"
    return config, "model.config" if config.init == "random" else "model.path"


@contextmanager
def _loading(config: Model, where: str) -> Iterator[None]:
    """Turn errors of the hub and of libraries into a UserError at `where`."""
    if config.path is not None:
        check_model_folder(Path(config.path).expanduser())
    what = "cannot make a model of model.config" if config.init == "random" else f"cannot load the model {config.path}"
    with hub(config.path) as online, boundary(what, where, partial(_advice, config, online), code="cannot-load-model"):
        yield


def _auto_class(config: PreTrainedConfig, *, scores: bool) -> type[_BaseAutoModelClass]:
    """Return the loader of the class that `config` names. A multimodal model is loaded whole unless it names its text part."""
    if scores:
        return AutoModelForSequenceClassification
    kind, named, own_code = type(config), config.architectures or [], getattr(config, "auto_map", None) or {}
    of_text: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    whole = kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and not (of_text and of_text.__name__ in named)
    whole_code = "AutoModelForCausalLM" not in own_code and "AutoModelForImageTextToText" in own_code
    return AutoModelForMultimodalLM if whole else AutoModelForImageTextToText if whole_code else AutoModelForCausalLM


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside adapters, or the model itself."""
    return cast(PreTrainedModel, getattr(model, "get_base_model", lambda: model)())


def check_trainable(model: PreTrainedModel) -> None:
    """Raise UserError if quantised or float16 weights would be trained. Updates of float16 underflow or overflow.

    Also for adapters, on a kind of quantised weights that has no gradients.
    """
    base = base_model(model)
    quantizer = _quantizer_of(base) if getattr(base, "is_quantized", False) else None
    if quantizer and (base is model or not quantizer.is_trainable):
        raise untrainable(_method_of(quantizer), takes_adapters=bool(quantizer.is_trainable))
    if any(weight.requires_grad and weight.dtype == torch.float16 for weight in model.parameters()):
        fix = "set it to float32 or bfloat16, or train adapters (peft=lora)"
        raise UserError("float16 weights cannot be trained", where="model.dtype", fix=fix, code="float16-trained")


def check_positions(model: PreTrainedModel, longest: int, *, padded: bool, key: str = "") -> None:
    """Raise UserError if a document of `longest` tokens exceeds the model's positions. Also if rotary frequencies depend on the
    longest document of a `padded` batch (longrope): the others would not be exact. `key` names another model than the trained one."""
    config, named = model.config.get_text_config(), f"the model of {key}" if key else "the model"
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if padded and isinstance(original, int) and original < longest and rotates_by_length(base_model(model)):
        what = f"the longest document has {longest} tokens: beyond {original} {named} uses other rotary frequencies"
        fix = f"set it to packed, or data.max_length to {original}"
        what = f"{what} for all documents of a padded batch"
        raise UserError(what, where="packing.mode", fix=fix, code="frequencies-by-length")
    positions = max_positions(base_model(model))
    if positions is not None and positions < longest:
        name = "max_position_embeddings" if hasattr(config, "max_position_embeddings") else "max_seq_len"
        what = f"the longest document has {longest} tokens, {named} is made for {positions} positions"
        name = name if config is model.config else f"text_config.{name}"
        fix = f"set it to {positions}" + ("" if key else f", or model.config.{name} to the length that it should learn")
        raise UserError(what, where="data.max_length", fix=fix, code="too-few-positions")


def _load_pretrained(config: Model, tokenizer: PreTrainedTokenizerBase, seed: int, *, scores: bool) -> PreTrainedModel:
    dtype, place = _DTYPES[config.dtype], location(cast(str, config.path), config)
    model_config = _config_of(config, tokenizer, scores=scores)
    own = getattr(model_config, "quantization_config", None)
    if own and own.get("quant_method") in EXPANDED:
        own["dequantize"] = True
    if config.quantize != "no":
        if own:
            what, fix = "the weights of this model are quantised already", "remove it: peft=lora trains on them"
            raise UserError(what, where="model.quantize", fix=fix, code="already-quantised")
        computed = model_config.dtype or torch.float32 if dtype == "auto" else dtype
        place["quantization_config"] = quantization_config(config.quantize, cast(torch.dtype, computed))
    if of_gguf := "gguf_file" in place:
        dtype = torch.float32 if dtype == "auto" else dtype
    model = _all_weights(seed, model_config, scores=scores, **place, dtype=dtype)
    _judge_untaken(model, config, model_config.model_type, scores=scores, quantised=bool(own))
    if of_gguf:  # its weights are expanded, and it would refuse save_pretrained
        cast(HfQuantizer, _quantizer_of(model)).remove_quantization_config(model)
    return model


def _judge_untaken(model: PreTrainedModel, config: Model, named: str, *, scores: bool, quantised: bool) -> None:
    """Judge the weights that the model does not take (weights.py).

    These stay out of final/: a head that the objective does not use, layers that model.config leaves out, and towers if only a part of the
    model type `named` is loaded.
    """
    names, part, source = set[str](), model.config.model_type != named, cast(WeightFiles, source_of(model))
    if source.untaken:
        with suppress(Exception), torch.device("meta"):  # there may be no such model
            names = {*_auto_class(model.config, scores=not scores).from_config(model.config).state_dict()}
    fewer = any(re.search("layers?$", key) for key in config.config)
    judge(model, source, lambda name: fewer or name in names or (part and not MTP.search(name)), quantised=quantised)


def _all_weights(seed: int, config: PreTrainedConfig, *, scores: bool, **arguments: object) -> PreTrainedModel:
    """Call `from_pretrained`. Raise UserError for weights missing or misshapen in the files: the library would draw them.
    The head of a causal language model that becomes a reward model is drawn from `seed`."""
    auto_class = _auto_class(config, scores=scores)
    read = cast(Callable[..., tuple[PreTrainedModel, dict[str, set]]], auto_class.from_pretrained)
    model, info = read(**arguments, config=config, ignore_mismatched_sizes=True, output_loading_info=True)
    lacking = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    if scores and lacking == {f"{SCORE_HEAD}.weight"} and not is_reward_model(model.config):
        new_score(model, seed)
        return model
    if lacking:
        what = f"{len(lacking)} weights of {type(model).__name__} are not in its files, or in another shape: {min(lacking)} …"
        head = "" if scores else " with its output head"
        fix = f"name a causal language model{head}, and look at what model.config changes"
        raise UserError(what, where="model.path", fix=fix, code="weights-missing")
    return model


def is_reward_model(config: PreTrainedConfig) -> bool:
    """Return whether the saved model already has a classification head."""
    names = config.architectures if isinstance(config.architectures, list) else ()  # may be anything in the file
    return any("ForSequenceClassification" in str(name) for name in names)


def with_one_score(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set `config` to one score, and return it. Raises UserError if the saved model has another number of scores."""
    if is_reward_model(config) and config.num_labels != 1:
        what = f"this model was trained to give {config.num_labels} scores (num_labels), a reward model gives one"
        fix = "name a reward model, or a causal language model: it gets a new head"
        raise UserError(what, where="model.path", fix=fix, code="several-scores")
    config.num_labels = 1
    return config


def new_score(model: PreTrainedModel, seed: int) -> None:
    """Draw the weights of a new head from `seed`. They are the same on all processes, and independent of earlier draws."""
    torch.manual_seed(seed)
    head = getattr(model, SCORE_HEAD)
    for one in (head, *head.parameters()):
        one._is_hf_initialized = False
    model._init_weights(head)


def check_score_head(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the padding token; `model` finds the last token of a document by it. Raises UserError if there is none, or unless
    `model` scores the last token by one linear layer, as decoders do."""
    linear = isinstance(getattr(model, SCORE_HEAD, None), nn.Linear)
    if not linear or model.base_model is model or model.config.is_encoder_decoder:
        what = f"{type(model).__name__} has no linear layer `{SCORE_HEAD}` over the last token of a document"
        fix = "take a decoder such as Llama, Qwen, Mistral, Gemma or GPT-2 (docs/reward.md)"
        what = f"{what}: it pools or classifies in another way"
        raise UserError(what, where="model.path", fix=fix, code="no-score-head")
    if tokenizer.pad_token_id is None:
        what = "the tokenizer has neither a padding token nor EOS: a reward model finds the end of a document by it"
        raise UserError(what, where="model.tokenizer", fix="set pad_token on the tokenizer", code="no-padding-token")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _config_of(config: Model, tokenizer: PreTrainedTokenizerBase, *, scores: bool) -> PreTrainedConfig:
    """Return the model's config with the keys of model.config, and one score. A new config gets the tokenizer's special ids."""
    model_config = _new_config(dict(config.config), tokenizer) if config.path is None else _saved_config(config)
    return with_one_score(model_config) if scores else model_config


def _saved_config(config: Model) -> PreTrainedConfig:
    model_config = AutoConfig.from_pretrained(**location(cast(str, config.path), config))
    if config.init == "random":
        _check_keys(config.config, model_config)
        return type(model_config).from_dict(_merged(model_config.to_dict(), config.config))
    _set_keys(model_config, config.config)
    return model_config


def _set_keys(config: PreTrainedConfig, values: Mapping[str, object], place: str = "model.config") -> None:
    """Set keys of `config`, and of the configs in it. Raises UserError for unknown ones."""
    _check_keys(values, config, place=place)
    for name, value in values.items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig) and isinstance(value, Mapping):
            _set_keys(inner, cast(Mapping[str, object], value), f"{place}.{name}")
        else:
            setattr(config, name, value)


def _merged(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` with the values of `new`, also in configs within configs."""
    inner = {
        name: _merged(old[name], value) for name, value in new.items() if name.endswith("_config") and old.get(name)
    }
    return {**old, **new, **inner}


def _new_config(overrides: dict[str, object], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    model_type = str(overrides.pop("model_type"))
    if model_type not in CONFIG_MAPPING:
        fix = suggest(model_type, CONFIG_MAPPING.keys(), "docs/architectures.md lists what trains.")
        what = f"transformers knows no model type {model_type!r}"
        raise UserError(what, where="model.config.model_type", fix=fix, code="unknown-model-type")
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    defaults = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **special}
    plain = cast(PreTrainedConfig, CONFIG_MAPPING[model_type]())
    _check_keys(overrides, plain, _ROTARY_KEYS if hasattr(plain, "rope_parameters") else ())
    part = next((name for name in plain.sub_configs if getattr(plain, name, None) is plain.get_text_config()), None)
    if part is not None:  # the text part of a multimodal model
        defaults = {part: {**defaults, **cast(dict[str, object], overrides.get(part, {}))}}
    return CONFIG_MAPPING[model_type](**{**defaults, **overrides, **(defaults if part else {})})


def _check_keys(
    names: Iterable[str],
    config: PreTrainedConfig,
    taken: Iterable[str] = (),
    where: str = "",
    place: str = "model.config",
) -> None:
    """Raise UserError for keys of model.config that neither `config` nor `taken` has. transformers would ignore them."""
    known, problems = {*config.to_dict(), *config.attribute_map, *taken}, []
    parts = [f"model.config.{part}" for part in ("rope_parameters", "text_config") if hasattr(config, part)]
    elsewhere = f"Remove it, or write it into {' or '.join(parts)}." if parts else "Remove it."
    for name in (name for name in names if name not in known):
        what = f"the config of a {config.model_type} model has no {name!r}"
        fix = elsewhere if name in _ROTARY_KEYS else suggest(name, known, elsewhere)
        problems.append(Problem(what, where or f"{place}.{name}", fix, code="unknown-model-key"))
    if problems:
        raise UserError(problems)


def _advice(config: Model, online: bool, error: BaseException) -> str:
    """Return the fix to suggest if a model cannot be made or read."""
    if config.init == "random" or "Unrecognized configuration class" in str(error):
        return "see the keys of model.config; docs/architectures.md and docs/reward.md say which types train"
    return fix_of(online, error)


def quantization_config(quantize: Quantize, dtype: torch.dtype) -> QuantizationConfigMixin:
    """Return the argument of from_pretrained that quantises weights. `dtype`: the compute dtype."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if quantize == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,  # FSDP2 shards it with the weights that are not quantised
        )
    if quantize == "int8":
        # 0: outliers are not computed apart. Their columns depend on all tokens of a row, so on its other documents
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def keep_layout(model: nn.Module) -> None:
    """Stop bitsandbytes from converting weights for CPUs with AVX-512 in calls without training. Processes would differ."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False


def check_dequantizes(model: nn.Module) -> None:
    """Raise UserError if `model` is quantised and its weights cannot be converted back."""
    quantizer = _quantizer_of(model)
    if quantizer is None or _is_torchao(quantizer):
        return
    lacks = type(quantizer)._dequantize is HfQuantizer._dequantize
    # bitsandbytes stores a Conv1D transposed, and dequantises it to a Linear that nobody can load
    if lacks or any(getattr(module, "source_cls", None) is Conv1D for module in model.modules()):
        what = f"weights of {type(model).__name__} quantised by {_method_of(quantizer)} cannot be converted back"
        fix = "Keep the adapters apart (peft.merge=false): chat and eval load them on these weights."
        what = f"{what}, so nothing can be merged into them"
        raise UserError(what, where="model.path", fix=fix, code="cannot-dequantise")


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """Dequantise all weights of `model` in place, to its number format. Raises UserError if the quantised format cannot be converted back."""
    quantizer = _quantizer_of(model)
    if quantizer is None:
        return model
    check_dequantizes(model)
    what = "the quantised model cannot be dequantised, to merge adapters into it"
    with boundary(what, "model.path", code="cannot-dequantise"):
        if not _is_torchao(quantizer):
            return cast(PreTrainedModel, model.dequantize(model.dtype))
        for module in model.modules():  # transformers cannot convert torchao's back
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and type(weight).__module__.startswith("torchao."):
                module.weight = nn.Parameter(weight.dequantize().to(model.dtype), requires_grad=False)
        quantizer.remove_quantization_config(model)
    return model


def dequantized_in(dtype: torch.dtype) -> str:
    """Describe the format of a merged model."""
    return f"its quantised weights converted back to {str(dtype).removeprefix('torch.')}"


def _quantizer_of(model: nn.Module) -> HfQuantizer | None:
    return getattr(model, "hf_quantizer", None)


def _is_torchao(quantizer: HfQuantizer) -> bool:
    return type(quantizer).__name__ == "TorchAoHfQuantizer"


def _method_of(quantizer: HfQuantizer) -> str:
    return str(getattr(method := quantizer.quantization_config.quant_method, "value", method))
