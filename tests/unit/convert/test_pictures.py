"""Configs for models with pictures, copied from the repositories of other trainers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from packtrain.errors import UserError
from tests.unit.command_line import packtrain
from tests.unit.convert.test_same_training import flat, note, of  # noqa: F401

LLAMA_FACTORY = """
### model
model_name_or_path: Qwen/Qwen3-VL-4B-Instruct
image_max_pixels: 262144
video_max_pixels: 16384
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: full
freeze_vision_tower: true
freeze_multi_modal_projector: true
freeze_language_model: false
deepspeed: examples/deepspeed/ds_z3_config.json

### dataset
dataset: mllm_demo,identity,alpaca_en_demo
template: qwen3_vl_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/qwen3-vl-4b/full/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
DATASET_INFO = {
    "mllm_demo": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "mllm_video_demo": {
        "file_name": "mllm_video_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "videos": "videos"},
    },
}
MS_SWIFT = r"""
# 4 * 50GiB
nproc_per_node=4

PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=$nproc_per_node \
MAX_PIXELS=1003520 \
swift rlhf \
    --rlhf_type dpo \
    --model Qwen/Qwen2.5-VL-7B-Instruct \
    --dataset 'swift/RLAIF-V-Dataset#20000' \
    --load_from_cache_file true \
    --split_dataset_ratio 0.01 \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --learning_rate 1e-5 \
    --freeze_vit true \
    --freeze_aligner true \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \
    --eval_steps 100 \
    --save_steps 100 \
    --save_total_limit 2 \
    --deepspeed zero3 \
    --logging_steps 5 \
    --max_length 4096 \
    --output_dir output \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 4 \
    --dataset_num_proc 4 \
    --rpo_alpha 0.1 \
    --save_only_model true
"""
AXOLOTL = """
base_model: Qwen/Qwen3.5-9B
processor_type: AutoProcessor

# Required for multimodal training
skip_prepare_dataset: true
remove_unused_columns: false
sample_packing: false

chat_template: qwen3_5
datasets:
  - path: HuggingFaceH4/llava-instruct-mix-vsft
    type: chat_template
    split: train[:1%]

dataset_prepared_path: last_run_prepared
val_set_size: 0.0
output_dir: ./outputs/out

sequence_len: 4096
pad_to_sequence_len: false

wandb_project:

gradient_accumulation_steps: 4
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002

bf16: auto
tf32: true

gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2

warmup_ratio: 0.1
evals_per_epoch: 1
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
"""
TRL = r"""
accelerate launch \
    --config_file examples/accelerate_configs/deepspeed_zero3.yaml \
    examples/scripts/sft_vlm.py \
    --dataset_name HuggingFaceH4/llava-instruct-mix-vsft \
    --model_name_or_path llava-hf/llava-1.5-7b-hf \
    --gradient_accumulation_steps 8 \
    --output_dir LLaVA-1.5-7B-SFT \
    --dtype bfloat16
"""
TRL_DPO = r"""
accelerate launch examples/scripts/dpo_vlm.py \
    --dataset_name HuggingFaceH4/rlaif-v_formatted \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 32 \
    --dataset_num_proc 32 \
    --output_dir dpo_qwen_2_5_rlaif-v \
    --dtype bfloat16 \
    --use_peft \
    --lora_target_modules all-linear
"""


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (LLAMA_FACTORY, "theirs.yaml", {
            "verb": "sft", "data.max_picture_tokens": 262144 // 32**2, "model.towers": None, "data.chat_template": "qwen3_vl",
        }),
        (MS_SWIFT, "train.sh", {"verb": "dpo", "data.max_picture_tokens": 1280, "model.towers": None}),
        (AXOLOTL, "theirs.yml", {"verb": "sft", "data.max_picture_tokens": None, "model.towers": "trained"}),
        (TRL, "train.sh", {"verb": "sft", "model.towers": "trained", "data.max_length": None}),  # which sft_vlm.py sets
        (TRL_DPO, "train.sh", {"verb": "dpo", "model.towers": None, "peft.target_modules": "all-linear"}),
    ],
    ids=["LLaMA-Factory", "ms-swift", "axolotl", "TRL", "TRL dpo"],
)  # fmt: skip
def test_examples_of_peers_are_converted_and_can_be_planned(
    text: str, name: str, expected: Any, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO))
    (tmp_path / name).write_text(text.replace("mllm_demo,identity,alpaca_en_demo", "mllm_demo"))
    told = json.loads(packtrain("convert", name, "--json", folder=tmp_path).stdout)
    ours = {f"{group}.{key}": value for group, values in told["config"].items() for key, value in values.items()}
    assert {key: ours.get(key) for key in expected if key != "verb"} == {
        key: value for key, value in expected.items() if key != "verb"
    }
    assert told["verb"] == expected["verb"]
    assert packtrain("convert", name, "-o", "ours.yaml", folder=tmp_path).returncode == 0
    assert yaml.safe_load((tmp_path / "ours.yaml").read_text()) == told["config"]
    planned = packtrain("plan", "ours.yaml", "--gpu-memory", "80", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr


QWEN = "--model Qwen/Qwen2.5-VL-7B-Instruct"
PROJECTOR, TOWER = (
    r"visual\.(deepstack_)?merger|multi_modal_projector|embed_(vision|audio)|connector",
    "visual|vision_|audio_",
)
TRAINED = {"model.towers": "trained"}


@pytest.mark.parametrize(
    ("trainer", "more", "expected"),
    [
        ("l", "freeze_vision_tower: false\nfreeze_multi_modal_projector: false", TRAINED | {"optim.groups": None}),
        ("l", "freeze_vision_tower: false", TRAINED | {"optim.groups": [{"match": PROJECTOR, "lr_scale": 0}]}),
        ("s", "--tuner_type full --freeze_aligner false --max_length 9", TRAINED | {"optim.groups": [
            {"match": PROJECTOR, "lr_scale": 1}, {"match": TOWER, "lr_scale": 0}
        ]}),
        ("s", "--tuner_type full --freeze_aligner false --freeze_llm true --max_length 9", TRAINED | {"optim.groups": [
            {"match": PROJECTOR, "lr_scale": 1}, {"match": TOWER, "lr_scale": 0}, {"match": ".", "lr_scale": 0}
        ]}),
        ("s", "--tuner_type full --freeze_vit false --freeze_aligner false --learning_rate 1e-5 --vit_lr 5e-6", TRAINED | {
            "optim.groups": [{"match": PROJECTOR, "lr_scale": 1}, {"match": TOWER, "lr_scale": 0.5}]
        }),
        ("s", "--columns '{\"picture\": \"images\", \"asked\": \"query\"}'", {
            "data.train": {"path": "o/d", "columns": {"images": "picture", "instruction": "asked"}}
        }),
        ("a", "processor_type: AutoProcessor", TRAINED),
        ("a", "processor_type: AutoProcessor\nfreeze_mm_modules: true", {"model.towers": None}),
        ("a", "processor_type: AutoProcessor\nadapter: lora\nlora_target_linear: true", {"model.towers": None}),
    ],
)  # fmt: skip
def test_what_is_trained_of_tower_projector_and_language_model(trainer: str, more: str, expected: Any, of: Any) -> None:  # noqa: F811
    done = of(trainer, more)
    assert {key: flat(done).get(key) for key in expected} == expected
    assert "freeze" not in more or "no counterpart" not in {one.kind for one in done.notes if "freeze" in one.key}


def test_the_patterns_of_parts_match_the_names_of_transformers_models() -> None:
    projectors = (
        "model.visual.merger.mlp.0.weight",
        "model.visual.deepstack_merger_list.0.norm.weight",
        "model.embed_vision.x",
    )
    projectors += ("model.multi_modal_projector.linear_1.weight", "model.connector.modality_projection.proj.weight")
    towers = ("model.visual.blocks.0.attn.qkv.weight", "model.vision_tower.layers.0.x", "model.vision_model.encoder.x")
    language = (
        "model.language_model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        "model.text_model.embed_tokens.weight",
    )
    assert all(re.search(PROJECTOR, name) for name in projectors)
    assert all(re.search(TOWER, name) and not re.search(PROJECTOR, name) for name in towers)
    assert not any(re.search(f"{PROJECTOR}|{TOWER}", name) for name in language)


@pytest.mark.parametrize(
    ("trainer", "more", "key", "kind"),
    [
        ("s", "--freeze_vit false", "freeze_vit", "no counterpart"),  # adapters on the tower
        ("s", "--tuner_type lora_llm --vit_lr 1e-5", "vit_lr", "no counterpart"),
        ("s", "--tuner_type full --freeze_llm true", "freeze_llm", "no counterpart"),  # all is frozen
        ("s", "--max_pixels 1003520", "max_pixels", "no counterpart"),  # nothing tells the size of a token of m/m
        ("s", f"{QWEN} --max_pixels 1003520", "max_pixels", "differs"),
        ("l", "image_max_pixels: 262144\ntemplate: qwen2_vl", "image_max_pixels", "differs"),
        ("l", "image_do_pan_and_scan: true", "image_do_pan_and_scan", "no counterpart"),
        ("l", "image_min_pixels: 9999", "image_min_pixels", "no counterpart"),
        ("l", "media_dir: pictures", "media_dir", "no counterpart"),
        ("a", "processor_type: AutoProcessor", "processor_type", "differs"),
        ("a", "processor_type: AutoProcessor\nimage_size: 512", "image_size", "no counterpart"),
        ("a", "processor_type: AutoProcessor\nadapter: lora\nlora_target_linear: true", "lora_target_linear", "differs"),
    ],
)  # fmt: skip
def test_what_trains_otherwise_on_pictures_is_marked(trainer: str, more: str, key: str, kind: str, of: Any) -> None:  # noqa: F811
    told = note(of(trainer, more), key)
    assert (told.kind, bool(told.why)) == (kind, True) and "does not know" not in told.why


def test_pixels_become_tokens_by_the_models_own_files_or_its_name(of: Any, tmp_path: Path) -> None:  # noqa: F811
    assert flat(of("s", f"{QWEN} --max_pixels 1003520"))["data.max_picture_tokens"] == 1003520 // 28**2 == 1280
    (tmp_path / "m/m").mkdir(parents=True)
    (tmp_path / "m/m/preprocessor_config.json").write_text(json.dumps({"patch_size": 16, "merge_size": 2}))
    assert flat(of("s", "--max_pixels 262144"))["data.max_picture_tokens"] == 262144 // 32**2
    done = of("l", "", **{"dataset: o/d": "dataset: mllm_demo"})
    assert "data.max_picture_tokens" not in flat(done)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO))
    done = of("l", "", **{"dataset: o/d": "dataset: mllm_demo"})
    assert flat(done)["data.max_picture_tokens"] == 768**2 // 32**2  # their default, of data with pictures


def test_variables_of_ms_swift_are_settings(of: Any) -> None:  # noqa: F811
    done = of("s", "", **{"swift sft": "IMAGE_MAX_TOKEN_NUM=1024 MIN_PIXELS=3136 swift sft"})
    assert flat(done)["data.max_picture_tokens"] == 1024
    assert note(done, "MIN_PIXELS").kind == "no counterpart"


def test_video_and_audio_are_refused_by_name(of: Any, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO))
    for trainer, changes in {"l": {"o/d": "mllm_video_demo"}, "s": {"o/d": "swift/VideoChatGPT:all"}}.items():
        with pytest.raises(UserError, match="video or sound"):
            of(trainer, **changes)
