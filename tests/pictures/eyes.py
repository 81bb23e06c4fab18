"""Small processors of real families, as a hub has them, and pictures made on the spot."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from data_tokenizers import byte_level, shipped, trained
from PIL import Image
from prepared import write
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from packtrain.config.schema import Data, Model
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.tokens.pretrained import load_tokenizer

LLAVA = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
"""llava-hf's way with strings, which it leaves out, and pictures, which it puts first; its answers end in EOS."""
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else '[IMG]' }}{% endfor %}{% endif %}{{ '[/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else IMAGE }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PICTURES = {"cat.png": (40, 60), "dog.jpg": (120, 50), "cow.webp": (57, 56)}
"""Height and width of the pictures beside the data."""
QWEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
SMOLVLM = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", *ROWS)
SMALL_CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "processor": "Qwen2VLProcessor",
        "images": ("Qwen2VLImageProcessorPil", {"min_pixels": 28 * 28, "max_pixels": 112 * 112}),
        "template": shipped("qwen2_5_vl"),
        "tokens": QWEN,
        "end": "<|im_end|>",
    },
    "qwen3_vl": {
        "processor": "Qwen3VLProcessor",
        "images": ("Qwen2VLImageProcessorPil", {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 160 * 160}}),
        "template": shipped("qwen3_vl"),
        "tokens": QWEN,
        "end": "<|im_end|>",
    },
    "pixtral": {
        "processor": "PixtralProcessor",
        "images": ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}}),
        "own": {"patch_size": 16, "spatial_merge_size": 1},
        "template": BRACKETS,
        "tokens": ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "</s>"),
        "end": "</s>",
    },
    "llava": {
        "processor": "LlavaProcessor",
        "images": ("CLIPImageProcessorPil", SMALL_CLIP),
        "own": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "template": LLAVA,
        "tokens": ("<image>", "</s>"),
        "end": "</s>",
    },
    "llava_next": {
        "processor": "LlavaNextProcessor",
        "images": ("LlavaNextImageProcessorPil", {**SMALL_CLIP, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}),
        "own": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "template": shipped("llava_next"),
        "tokens": ("<image>", "</s>", "[INST]", "[/INST]"),
        "end": "</s>",
    },
    "gemma3": {
        "processor": "Gemma3Processor",
        "images": ("Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
        "own": {"image_seq_length": 4},
        "template": shipped("gemma3"),
        "tokens": ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "named": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "end": "<end_of_turn>",
    },
    "smolvlm": {
        "processor": "SmolVLMProcessor",
        "images": ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}),
        "own": {"image_seq_len": 4},
        "template": shipped("smolvlm"),
        "tokens": SMOLVLM,
        "end": "<end_of_utterance>",
    },
    "idefics3": {
        "processor": "Idefics3Processor",
        "images": ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}),
        "own": {"image_seq_len": 4},
        "template": shipped("idefics3"),
        "tokens": SMOLVLM,
        "end": "<end_of_utterance>",
    },
    "gemma4": {
        "processor": "Gemma4Processor",
        "images": ("Gemma4ImageProcessorPil", {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}),
        "template": CHATML.replace("IMAGE", "'<|image|>'"),
        "tokens": ("<|im_start|>", "<|im_end|>", "<|image|>", "<|image>", "<image|>", "<|audio|>", "<|video|>", "<|audio>", "<audio|>"),
        "named": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>"},
        "end": "<|im_end|>",
    },
    "glm4v": {
        "processor": "Glm4vProcessor",
        "images": ("Glm4vImageProcessorPil", {"size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}, "temporal_patch_size": 2}),
        "template": CHATML.replace("IMAGE", "'<|begin_of_image|><|image|><|end_of_image|>'"),
        "tokens": ("<|im_start|>", "<|im_end|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "end": "<|im_end|>",
    },
    "internvl": {
        "processor": "InternVLProcessor",
        "images": ("GotOcr2ImageProcessorPil", {"size": {"height": 56, "width": 56}, "max_patches": 4}),
        "own": {"image_seq_length": 4},
        "template": CHATML.replace("IMAGE", "'<IMG_CONTEXT>'"),
        "tokens": ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "named": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "end": "<|im_end|>",
    },
}  # fmt: skip


def make_processor(folder: Path, name: str) -> str:
    """The files of a family's processor and tokenizer."""
    family = FAMILIES[name]
    control = [AddedToken(token, special=True, normalized=False) for token in family["tokens"]]
    raw = trained(byte_level(r"\s*[\r\n]+|\s?\p{L}+|\s+"), 600, control, pre_tokenizers.ByteLevel.alphabet())
    named = {"eos_token": family["end"], "pad_token": family["end"], "extra_special_tokens": family.get("named", {})}
    bos = {"bos_token": family["tokens"][0]} if name in ("gemma3", "smolvlm", "idefics3") else {}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=family["template"], **named, **bos)
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    kind, settings = family["images"]
    getattr(transformers, kind)(**settings).save_pretrained(folder)
    own = {"processor_class": family["processor"], **family.get("own", {})}
    (folder / "processor_config.json").write_text(json.dumps(own))
    return str(folder)


def picture(height: int, width: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of smooth noise."""
    values = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def shown(*names: str, text: str = "What is this?", **keys: Any) -> dict[str, Any]:
    """A user's turn with pictures in front of the text."""
    parts = [{"type": "image", "path": name} for name in names]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}], **keys}


def said(text: str = "A cat.") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def see(folder: Path, model: Model, *rows: Any, kind: str = "sft", **keys: Any) -> PreparedData:
    train = keys.pop("train", None) or write(folder / "train.jsonl", *rows)
    data = Data(train=train, cache_dir=str(folder / "cache"), **keys)
    return prepare(data, load_tokenizer(model), kind, seed=0, model=model)
