"""`model.quantize`: a base in 4 or 8 bits below adapters, by transformers' quantisation configs.

nf4 (QLoRA, arXiv 2305.14314) and int8 are bitsandbytes', fp8 is torchao's, only for weights. Output head and embeddings are not quantised.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.boundary import boundary
from packtrain.config.schema import Quantize


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


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """Dequantise all weights of `model` in place, to its number format. Raises UserError if the quantised format cannot be converted back."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return model
    with boundary("the quantised model cannot be merged with adapters", "peft.merge", "Set it to false."):
        if type(quantizer).__name__ != "TorchAoHfQuantizer":
            return cast(PreTrainedModel, model.dequantize(model.dtype))
        for module in model.modules():  # transformers cannot convert torchao's back
            weight: Any = getattr(module, "weight", None)
            if type(weight).__module__.startswith("torchao."):
                module.weight = nn.Parameter(weight.dequantize().to(model.dtype), requires_grad=False)
        quantizer.remove_quantization_config(model)
    return model
