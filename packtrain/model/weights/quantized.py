"""`model.quantize`: a base in 4 or 8 bits below adapters, by transformers' quantisation configs.

nf4 (QLoRA, arXiv 2305.14314) and int8 are bitsandbytes', fp8 is torchao's, only for weights. Output head and embeddings are not quantised.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer

from packtrain.config.schema import Quantize
from packtrain.errors import UserError, boundary


def quantization_config(quantize: Quantize, dtype: torch.dtype) -> Any:
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
            cast(Any, module).support_avx512bf16_for_cpu = False


def check_dequantizes(model: nn.Module) -> None:
    """Raise UserError if `model` is quantised and its weights cannot be converted back."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or _is_torchao(quantizer):
        return
    method = quantizer.quantization_config.quant_method
    lacks = type(quantizer)._dequantize is HfQuantizer._dequantize
    # bitsandbytes stores a Conv1D transposed, and dequantises it to a Linear that nobody can load
    if lacks or any(getattr(module, "source_cls", None) is Conv1D for module in model.modules()):
        what = f"weights of {type(model).__name__} quantised by {getattr(method, 'value', method)} cannot be converted back"
        fix = "Keep the adapters apart (peft.merge=false): chat and eval load them on these weights."
        raise UserError(f"{what}, so nothing can be merged into them", where="model.path", fix=fix)


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """Dequantise all weights of `model` in place, to its number format. Raises UserError if the quantised format cannot be converted back."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return model
    check_dequantizes(model)
    with boundary("the quantised model cannot be dequantised, to merge adapters into it", "model.path"):
        if not _is_torchao(quantizer):
            return cast(PreTrainedModel, model.dequantize(model.dtype))
        for module in model.modules():  # transformers cannot convert torchao's back
            weight: Any = getattr(module, "weight", None)
            if type(weight).__module__.startswith("torchao."):
                module.weight = nn.Parameter(weight.dequantize().to(model.dtype), requires_grad=False)
        quantizer.remove_quantization_config(model)
    return model


def dequantized_in(dtype: torch.dtype) -> str:
    """Describe the format of a merged model."""
    return f"its quantised weights converted back to {str(dtype).removeprefix('torch.')}"


def _is_torchao(quantizer: Any) -> bool:
    return type(quantizer).__name__ == "TorchAoHfQuantizer"
