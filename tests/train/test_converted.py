"""A config of each of the other trainers, with data in that trainer's own form, is converted and trained, as its user would do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import packtrain, write_jsonl
from tiny_models import save_model

QUESTIONS = [(f"What is {a} + {b}?", f"It is {a + b}.") for a in range(1, 5) for b in range(1, 5)]


def turns(asked: str, said: str = "") -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in (("user", asked), ("assistant", said)) if text]


AXOLOTL = """{
base_model: ./model, datasets: [{path: chats.jsonl, type: chat_template, field_messages: dialog}], val_set_size: 0.1,
adapter: lora, lora_target_linear: true, sequence_len: 256, sample_packing: true, micro_batch_size: 1,
optimizer: adamw_torch, learning_rate: 0.0002, bf16: auto, output_dir: run}
"""
LLAMA_FACTORY = """{
model_name_or_path: ./model, stage: sft, do_train: true, finetuning_type: lora, lora_target: all,
dataset: "identity, alpaca_en_demo", max_samples: 8, cutoff_len: 256, default_system: You are kind.,
per_device_train_batch_size: 4, output_dir: run}
"""
LLAMA_FACTORY_DPO = LLAMA_FACTORY.replace("stage: sft", "stage: dpo").replace("identity, alpaca_en_demo", "pairs")
MS_SWIFT = r"""
NPROC_PER_NODE=1 \
swift sft --model ./model --tuner_type full --torch_dtype float32 \
    --dataset 'swift.jsonl#40' own.jsonl --max_length 256 --system 'You are kind.' \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-4 --output_dir run
"""
MS_SWIFT_STREAM = MS_SWIFT.replace("#40", "").replace("--max_length", "--streaming true --max_steps 9 --max_length")
TRL = "trl {} --model_name_or_path ./model --dataset_name {} --max_length 256 --eval_strategy epoch --output_dir run"


@pytest.mark.sample(without=("LLaMA-Factory", "TRL dpo", "TRL"))
@pytest.mark.parametrize(
    ("text", "name", "verb"),
    [
        (AXOLOTL, "theirs.yml", "sft"),
        (LLAMA_FACTORY, "theirs.yaml", "sft"),
        (LLAMA_FACTORY_DPO, "theirs.yaml", "dpo"),
        (MS_SWIFT, "train.sh", "sft"),
        (MS_SWIFT_STREAM, "train.sh", "sft"),
        (TRL.format("sft", "answers"), "train.sh", "sft"),
        (TRL.format("dpo", "pairs"), "train.sh", "dpo"),
    ],
    ids=["axolotl", "LLaMA-Factory", "LLaMA-Factory dpo", "ms-swift", "ms-swift, a stream", "TRL", "TRL dpo"],
)
def test_a_converted_config_trains(text: str, name: str, verb: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    write_data(tmp_path)
    (tmp_path / name).write_text(text)
    packtrain("convert", name, "-o", "ours.yaml", cwd=tmp_path)
    packtrain(verb, "ours.yaml", "trainer.max_steps=2", "verify.preflight=false", cwd=tmp_path)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 2)
    if "default_system" in text and verb == "sft":
        assert summary["data"]["documents"] == 3 + 8  # three rows of identity, and eight of the sixteen


def write_data(folder: Path) -> None:
    """Data as each trainer has it."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for asked, said in QUESTIONS:
        human, gpt, worse = (
            {"from": who, "value": what} for who, what in (("human", asked), ("gpt", said), ("gpt", "No."))
        )
        made: dict[str, dict[str, Any]] = {
            "chats": {"dialog": turns(asked, said)},
            "swift": {"messages": turns(asked, said)},
            "own": {"query": asked, "response": said},
            "alpaca_en_demo": {"instruction": asked, "input": "", "output": said},
            "dpo_en_demo": {"conversations": [human], "chosen": gpt, "rejected": worse},
            "answers": {"prompt": asked, "completion": f" {said}"},
            "pairs": {"prompt": turns(asked), "chosen": turns("", said), "rejected": turns("", "No.")},
        }
        for name, row in made.items():
            rows.setdefault(name, []).append(row)
    for name in ("chats", "swift", "own"):
        write_jsonl(folder / f"{name}.jsonl", rows[name])
    for name in ("data", "answers", "pairs"):
        (folder / name).mkdir()
    of_files = {
        "identity": rows["alpaca_en_demo"][:3],
        **{name: rows[name] for name in ("alpaca_en_demo", "dpo_en_demo")},
    }
    info: dict[str, Any] = {name: {"file_name": f"{name}.json"} for name in ("identity", "alpaca_en_demo")}
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info["pairs"] = {"file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt", "columns": columns}
    for name, content in {**of_files, "dataset_info": info}.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(content))
    for split, part in {"train": slice(0, 12), "test": slice(12, 16)}.items():
        for name in ("answers", "pairs"):
            write_jsonl(folder / name / f"{split}.jsonl", rows[name][part])
