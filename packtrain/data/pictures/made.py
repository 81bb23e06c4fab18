"""Processor files for a model made from model.config.

A published model has the same files beside its weights. From the config we take the size of patches, the number of patches in a
token, and the size of pictures if the model has only one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that describe a processor: its image processor, and the processor itself."""


def make_files(settings: Mapping[str, object]) -> dict[str, bytes]:
    """Return the content of the processor's files by name; none for a model without pictures. `settings`: model.config."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = str(settings.get("model_type"))
    named, images = PROCESSOR_MAPPING_NAMES.get(kind), IMAGE_PROCESSOR_MAPPING_NAMES.get(kind, {})
    if not (named and images.get("pil")):
        return {}
    make: Any = CONFIG_MAPPING[kind]
    config: Any = make(**{name: value for name, value in settings.items() if name != "model_type"})
    vision = getattr(config, "vision_config", config)
    image_processor, takes = (
        getattr(transformers, str(images["pil"])),
        inspect.signature(getattr(transformers, named).__init__),
    )
    merged = getattr(vision, "spatial_merge_size", getattr(config, "spatial_merge_size", None))
    known = {name: getattr(vision, name, None) for name in ("patch_size", "temporal_patch_size")}
    known |= {"merge_size": merged, "spatial_merge_size": merged}
    known["vision_feature_select_strategy"] = getattr(config, "vision_feature_select_strategy", None)
    if "height" in (getattr(image_processor, "size", None) or {}) and (side := getattr(vision, "image_size", None)):
        sides = side if isinstance(side, list | tuple) else (side, side)
        known |= {key: dict(zip(("height", "width"), sides, strict=True)) for key in ("size", "crop_size")}
    of_pictures = {name: value for name, value in known.items() if value and getattr(image_processor, name, None)}
    own = {name: value for name, value in known.items() if value and name in takes.parameters}
    described = (
        {"image_processor_type": images.get("torchvision") or images["pil"], "processor_class": named, **of_pictures},
        {"processor_class": named, **own},
    )
    return {name: json.dumps(one, indent=2).encode() for name, one in zip(FILES, described, strict=True)}
