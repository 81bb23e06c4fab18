"""Configs of other trainers, with pictures in each trainer's own form, are converted and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eyes import encoded, make_processor, picture
from running import packtrain, write_jsonl
from safetensors.torch import load_file
from tiny_seeing import FAMILIES
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

FACTORY = """{model_name_or_path: ./model, stage: sft, do_train: true, finetuning_type: full, freeze_vision_tower: false,
dataset: mllm_demo, template: qwen3_vl_nothink, image_max_pixels: 4096, cutoff_len: 256, per_device_train_batch_size: 4,
learning_rate: 1.0e-3, output_dir: run}"""
SWIFT = r"""MAX_PIXELS=4096 swift sft --model ./model --tuner_type lora --dataset swift.jsonl --max_length 256 \
    --columns '{"shown": "images"}' --per_device_train_batch_size 2 --learning_rate 1e-3 --output_dir run"""
AXOLOTL = """{base_model: ./model, processor_type: AutoProcessor, freeze_mm_modules: true, sequence_len: 256,
datasets: [{path: parts.jsonl, type: chat_template, field_messages: dialog}], sample_packing: false, micro_batch_size: 2,
learning_rate: 0.001, bf16: auto, output_dir: run}"""
TRL = r"""accelerate launch sft_vlm.py --model_name_or_path ./model --dataset_name parts.jsonl --learning_rate 1e-3 \
    --max_length 256 --output_dir run"""
LEARNS = {  # what the first step may change: of the projector, the tower, and the language model
    "LLaMA-Factory": (False, True, True),  # whose projector is frozen by default
    "ms-swift": (False, False, False),  # adapters
    "axolotl": (False, False, True),
    "TRL": (True, True, True),
}
PARTS = ("visual.merger", "visual.blocks", "language_model")


def save_seeing_model(folder: Path) -> dict[str, torch.Tensor]:
    """Save a tiny Qwen3-VL with its processor."""
    make_processor(folder, "qwen3_vl")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    settings = FAMILIES["qwen3_vl"].config
    text = settings["text_config"] | {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**{**settings, "text_config": text}, **ids))
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_data(folder: Path) -> None:
    """Write the same rows as each trainer has them, beside their pictures."""
    rows: dict[str, list[dict[str, Any]]] = {"parts": [], "swift": [], "data/mllm_demo": []}
    (folder / "data").mkdir()
    for number in range(8):
        name, said = f"{number}.png", {"role": "assistant", "content": f"It is {number}."}
        for place in (folder, folder / "data"):
            (place / name).write_bytes(encoded(picture(64, 96 + 32 * (number % 2), seed=number)))
        parts = [{"type": "image", "path": name}, {"type": "text", "text": "What is it?"}]
        turns = [{"role": "user", "content": parts}, said]
        rows["parts"].append({"dialog": turns})
        marked = [{"role": "user", "content": "<image>What is it?"}, said]
        rows["swift"].append({"messages": marked, "shown": [name]})
        rows["data/mllm_demo"].append({"messages": marked, "images": [name]})
    for name in ("parts", "swift"):
        write_jsonl(folder / f"{name}.jsonl", rows[name])
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "mllm_demo.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    for name, content in {"mllm_demo": rows["data/mllm_demo"], "dataset_info": {"mllm_demo": entry}}.items():
        (folder / f"data/{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (FACTORY, "theirs.yaml"),
        (SWIFT, "train.sh"),
        (AXOLOTL, "theirs.yml"),
        (TRL.replace("parts", "swift"), "train.sh"),
    ],
    ids=LEARNS,
)
def test_a_converted_config_trains_on_pictures_what_its_trainer_would(
    text: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    before = save_seeing_model(tmp_path / "model")
    write_data(tmp_path)
    (tmp_path / name).write_text(text)
    packtrain("convert", name, "-o", "ours.yaml", cwd=tmp_path)
    keys = ["data.columns.images=shown"] if "sft_vlm" in text else []
    packtrain(
        "sft", "ours.yaml", "trainer.max_steps=1", "optim.warmup_steps=0", "data.cache_dir=cache", *keys, cwd=tmp_path
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["data"]["documents"]) == ("done", 1, 8)
    trainer = request.node.callspec.id
    if trainer == "ms-swift":
        adapted = load_file(tmp_path / "run/final/adapter_model.safetensors")
        assert adapted and not any("visual" in key for key in adapted)
        return
    after = load_file(tmp_path / "run/final/model.safetensors")
    moved = [any(not torch.equal(before[key], after[key]) for key in before if part in key) for part in PARTS]
    assert (after.keys(), tuple(moved)) == (before.keys(), LEARNS[trainer])
