"""Folders with the config and the weight shapes of a large model.

Files have the safetensors header of the model on the hub, and no weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

_MXFP4 = {"quant_method": "mxfp4"}
Shape = tuple[int, ...]


def write_shapes(folder: Path, model_type: str, sizes: dict[str, Any], *, mxfp4: bool = False) -> str:
    """Write config.json and the header of model.safetensors. Return the folder.

    `mxfp4` stores experts as blocks with scales, as gpt-oss does.
    """
    kind = CONFIG_MAPPING[model_type](**sizes)
    whole = model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    with torch.device("meta"):
        model = (AutoModelForMultimodalLM if whole else AutoModelForCausalLM).from_config(kind)
    shapes: dict[str, tuple[str, Shape]] = {}
    for name, weight in model.named_parameters():
        shape: Shape = tuple(weight.shape)
        if mxfp4 and re.search(r"experts\.\w+_proj$", name):  # a block has 32 numbers in 16 bytes, and a scale
            experts, inputs, outputs = shape
            shapes[f"{name}_blocks"] = "U8", (experts, outputs, inputs // 32, 16)
            shapes[f"{name}_scales"] = "U8", (experts, outputs, inputs // 32)
        else:
            shapes[name] = "BF16", shape
    header, end = dict[str, Any](), 0
    for name, (form, shape) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * (1 if form == "U8" else 2)
        header[name] = {"dtype": form, "shape": shape, "data_offsets": [start, end]}
    folder.mkdir(parents=True, exist_ok=True)
    config = kind.to_dict() | ({"quantization_config": _MXFP4} if mxfp4 else {})
    (folder / "config.json").write_text(json.dumps(config, default=str))
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return str(folder)
