"""What becomes of the configs of other trainers, as `packtrain convert` prints it: examples of each in its own style."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from packtrain.config.keys import keys
from packtrain.convert import conversion
from packtrain.convert.conversion import table
from tests.unit.command_line import packtrain

AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
datasets:
  - path: owner/chats
    type: chat_template
    field_messages: dialog
    split: train[:10%]
  - path: json
    data_files: [a.jsonl]
    type: alpaca
val_set_size: 0.05
output_dir: ./outputs/out
adapter: qlora
load_in_4bit: true
load_in_8bit: false
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
wandb_project:
special_tokens: {pad_token: <|end|>}
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.2
pref_loss: sigmoid
dataset: pairs, owner/pairs
template: qwen3
cutoff_len: 2048
max_samples: 1000
output_dir: saves/dpo
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
save_steps: 500
"""
MS_SWIFT = r"""
# 22GB
nproc_per_node=4

CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type lora \
    --dataset 'owner/chats:zh#500' \
              "own.jsonl" \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \
    --learning_rate 1e-4 \
    --target_modules all-linear \
    --max_length 2048 \
    --system 'It is "you", said
he.' \
    --save_steps ${SAVE:-50} \
    --warmup_ratio 0.05 \
    --deepspeed zero2 \
    --hub_token $HUB \
    --output_dir "out/$nproc_per_node"  # the end
"""
TRL = """
model_name_or_path: owner/model
dataset_name: owner/data
dtype: bfloat16
learning_rate: 2.0e-5
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
eval_strategy: steps
eval_steps: 100
max_length: 1024
optim: adamw_torch
report_to: [wandb, neptune]
max_steps: -1
num_train_epochs: 1
use_peft: false
lora_r: 8
"""


def convert(folder: Path, text: str, name: str = "theirs.yaml", *options: str) -> dict[str, Any]:
    (folder / name).write_text(text)
    done = packtrain("convert", name, "--json", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def note(done: dict[str, Any], key: str) -> dict[str, Any]:
    return next(item for item in done["notes"] if item["key"] == key)


def test_axolotl_packed_rows_become_tokens_of_a_step(tmp_path: Path) -> None:
    done = convert(tmp_path, AXOLOTL, "theirs.yml", "--devices", "8")
    config = done["config"]
    assert (done["origin"], done["verb"]) == ("axolotl", "sft")
    assert config["batch"] == {"tokens_per_step": 2 * 4 * 8 * 4096, "tokens_per_device": 2 * 4096}
    chats = {"path": "owner/chats", "split": "train[:10%]", "columns": {"messages": "dialog"}}
    assert config["data"]["train"] == [chats, {"path": "a.jsonl"}]
    assert "columns" not in config["data"] and config["data"]["eval"] == 0.05
    assert config["peft"] == {"kind": "lora", "r": 32, "alpha": 16, "target_modules": "all-linear"}
    assert config["optim"]["warmup_steps"] == 0.1 and config["optim"]["name"] == "adamw_torch"
    assert config["trainer"]["gradient_checkpointing"] == "full"
    assert config["model"]["quantize"] == "nf4" and note(done, "load_in_8bit")["why"] == "as without the key"
    assert note(done, "special_tokens")["became"] is None
    assert "guess" in note(done, "evals_per_epoch")["why"]


def test_llama_factory_names_of_data_are_ours_and_at_most_so_many_rows(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, rows in {"few": 3, "many": 2000}.items():
        (tmp_path / f"data/{name}.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * rows))
    entries = {name: {"file_name": f"{name}.json", "ranking": True} for name in ("few", "many")}
    heard = {"heard": {"file_name": "few.json", "columns": {"audios": "sounds"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({**entries, **heard}))
    done = convert(tmp_path, LLAMA_FACTORY.replace("dataset: pairs, ", "dataset: few, many, missing, "))
    assert (done["origin"], done["verb"]) == ("llamafactory", "dpo")
    assert done["config"]["data"]["train"] == [
        {"path": "lf:data/dataset_info.json#few"},
        {"path": "lf:data/dataset_info.json#many", "samples": 1000},
        {"path": "lf:missing", "samples": 1000},
        {"path": "owner/pairs", "samples": 1000},
    ]
    assert "missing is in no data/dataset_info.json" in note(done, "dataset")["why"]
    assert done["config"]["batch"] == {"examples_per_step": 8, "tokens_per_device": 2 * 2048}
    assert done["config"]["objective"] == {"kind": "dpo", "loss": "sigmoid", "beta": 0.2}
    assert done["config"]["strategy"] == {"name": "zero3"}
    assert done["config"]["peft"]["alpha"] == 16  # twice the rank, where nothing is said
    (tmp_path / "theirs.yaml").write_text(LLAMA_FACTORY.replace("dataset: pairs, ", "dataset: heard, "))
    assert "video or sound" in packtrain("convert", "theirs.yaml", folder=tmp_path).stderr


STREAM = "streaming: true\nmax_steps: 10\nbuffer_size: 50\nmix_strategy: interleave_under\ninterleave_probs: 0.3,0.7\n"


def test_streams_and_shares_of_sources_are_ours_where_the_run_has_steps_of_documents(tmp_path: Path) -> None:
    text = LLAMA_FACTORY.replace("dataset: pairs, ", "dataset: o/a, ").replace("max_samples: 1000\n", "") + STREAM
    data = convert(tmp_path, text)["config"]["data"]
    assert (data["streaming"], data["shuffle_buffer"]) == (True, 50)
    assert [source["name"] for source in data["train"]] == ["o/a", "owner/pairs"]
    assert data["stages"] == [{"weights": {"o/a": 0.3, "owner/pairs": 0.7}}]
    done = convert(tmp_path, text.replace("max_steps: 10\n", ""))
    assert not {"streaming", "shuffle_buffer", "stages"} & {*done["config"]["data"]}
    assert note(done, "interleave_probs")["became"] is None and "data.stages" in note(done, "interleave_probs")["why"]
    assert packtrain("plan", "theirs.yaml", folder=tmp_path).returncode == 2  # it is theirs
    swift = "swift sft --model m/m --streaming true --max_steps 9 --shuffle_buffer_size 7 --dataset o/d#5"
    data = convert(tmp_path, f"{swift} --system hello", "x.sh")["config"]["data"]
    expected = {"train": {"path": "o/d"}, "system": "hello", "streaming": True, "shuffle_buffer": 7}
    assert {name: data[name] for name in expected} == expected


def test_a_shell_command_is_read_with_its_variables_quotes_and_sums_and_json_like_yaml(tmp_path: Path) -> None:
    done = convert(tmp_path, MS_SWIFT, "train.sh")
    config = done["config"]
    assert (done["origin"], done["verb"]) == ("ms-swift", "sft")
    assert config["batch"]["examples_per_step"] == 1 * 4 * 4
    assert config["data"]["train"] == [{"path": "owner/chats:zh", "samples": 500}, {"path": "own.jsonl"}]
    assert config["data"]["system"] == 'It is "you", said\nhe.'
    assert config["trainer"]["checkpoint_every"] == 50 and config["trainer"]["output_dir"] == "out/4"
    assert note(done, "system")["value"] == 'It is "you", said\nhe.'
    assert config["strategy"] == {"name": "zero2"}
    assert config["optim"]["weight_decay"] == 0.1  # their default
    done = convert(tmp_path, json.dumps(yaml.safe_load(LLAMA_FACTORY)), "theirs.json")
    assert done["origin"] == "llamafactory" and done["config"]["model"]["path"] == "Qwen/Qwen3-4B"
    (tmp_path / "sft.yaml").write_text(TRL)
    done = convert(tmp_path, "trl sft --config sft.yaml --learning_rate 1e-5", "run.sh")
    assert done["config"]["optim"]["learning_rate"] == 1e-5 and done["config"]["model"]["path"] == "owner/model"


def test_an_empty_value_of_an_option_stays_empty_and_the_command_goes_on_behind_it(tmp_path: Path) -> None:
    text = "swift sft --model m/m --run_name '' --template \"\" --dataset o/d --learning_rate 1e-3"
    done = convert(tmp_path, text, "x.sh")
    assert [note(done, key)["value"] for key in ("run_name", "template", "learning_rate")] == ["", "", "1e-3"]
    assert done["config"]["data"]["train"] == {"path": "o/d"} and done["config"]["tracking"] == {"run_name": ""}


def test_tokens_that_are_added_are_no_secrets(tmp_path: Path) -> None:
    done = convert(tmp_path, f"{LLAMA_FACTORY}add_tokens: <a>,<b>\nadd_special_tokens: <c>\nhub_token: abcdefgh\n")
    added = [note(done, key) for key in ("add_tokens", "add_special_tokens")]
    assert [item["value"] for item in added] == ["<a>,<b>", "<c>"] and note(done, "hub_token")["value"] == "***"
    assert {item["why"] for item in added} == {"tokens are those of the tokenizer and its chat template"}


def test_trl_yaml_takes_the_test_split_and_a_template_in_the_config_becomes_a_file_beside_the_output(tmp_path):
    done = convert(tmp_path, TRL)
    assert (done["origin"], done["verb"]) == ("trl", "sft")
    assert done["config"]["data"]["eval"] == {"path": "owner/data", "split": "test"}
    assert done["config"]["trainer"]["epochs"] == 1 and "max_steps" not in done["config"]["trainer"]
    assert done["config"]["optim"]["schedule"] == "linear"  # their default
    assert done["config"]["tracking"] == {"report_to": ["wandb"]} and "neptune" in note(done, "report_to")["why"]
    assert "peft" not in done["config"] and note(done, "lora_r")["became"] is None
    text = "{% for message in messages %}${x}{{ message.content }}{% endfor %}"
    (tmp_path / "theirs.yaml").write_text(f"{TRL.replace('[wandb, neptune]', 'none')}\nchat_template: '{text}'\n")
    assert packtrain("convert", "theirs.yaml", "-o", "ours.yaml", folder=tmp_path).returncode == 0
    assert (tmp_path / "ours.jinja").read_text() == text
    assert packtrain("plan", "ours.yaml", folder=tmp_path).returncode == 0


MIXTURE = "model_name_or_path: o/m\nlearning_rate: 1e-5\nmax_length: 512\nper_device_train_batch_size: 4\n"


@pytest.mark.parametrize(
    ("datasets", "train", "marked"),
    [
        ("{path: o/a}, {path: o/b, name: c, split: test}", [{"path": "o/a"}, {"path": "o/b", "subset": "c", "split": "test"}], ""),
        ("{path: json, data_files: [a.jsonl, b.jsonl]}", [{"path": "a.jsonl"}, {"path": "b.jsonl"}], ""),
        ("{path: json, data_files: {test: b.jsonl, train: a.jsonl}}", {"path": "a.jsonl"}, ""),
        ("{path: o/a, data_files: a.jsonl}", {"path": "o/a"}, "data_files"),
        ("{path: o/a, columns: [messages]}", {"path": "o/a"}, "columns"),
    ],
)  # fmt: skip
def test_the_list_of_data_sets_that_trl_documents_is_not_axolotls(
    datasets: str, train: Any, marked: str, tmp_path: Path
) -> None:
    text = f"{MIXTURE}datasets: [{datasets}]\ntest_split_size: 0.1\n"
    done = convert(tmp_path, f"{text}completion_only_loss: false")
    assert (done["origin"], done["config"]["data"]["loss_on"]) == ("trl", "all")
    assert (done["config"]["data"]["train"], done["config"]["data"]["eval"]) == (train, 0.1)
    assert note(done, "datasets")["kind"] == ("differs" if marked else "converted")
    assert marked in note(done, "datasets")["why"]
    done = convert(tmp_path, text)
    assert done["origin"] == "trl" and "every turn" in note(done, "datasets")["why"]


COMMANDS = {  # each with GIVEN: verb and devices
    "trl dpo GIVEN": ("dpo", 1),
    "python trl/scripts/kto.py --model_name_or_path=o/m --dataset_name=o/d": ("kto", 1),
    "accelerate launch --num_processes 4 sft.py GIVEN --packing": ("sft", 4),
    "torchrun --nproc_per_node=2 --nnodes=2 reward_modeling.py GIVEN": ("reward", 4),
    "cd x && CUDA_VISIBLE_DEVICES=0,1 accelerate launch sft.py GIVEN": ("sft", 2),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_trl_say_the_verb_and_how_many_devices(command: str, tmp_path: Path) -> None:
    verb, devices = COMMANDS[command]
    command = command.replace("GIVEN", "--model_name_or_path o/m --dataset_name o/d")
    done = convert(tmp_path, f"Train:\n\n```bash\n{command}\n```\n", "page.md")
    batch = done["config"]["batch"]
    assert done["verb"] == verb
    assert batch.get("examples_per_step", batch.get("tokens_per_step", 0) / 1024) == 8 * devices


def test_the_strategy_of_accelerates_own_config_is_taken(tmp_path: Path) -> None:
    (tmp_path / "z2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    command = "accelerate launch --config_file acc.yaml sft.py --model_name_or_path o/m --dataset_name o/d"
    for strategy, settings in {
        "zero3": {"deepspeed_config": {"zero_stage": 3}},
        "zero2": {"deepspeed_config": {"deepspeed_config_file": "z2.json"}},
        "zero3_offload": {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}},
        "fsdp2": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
        "ddp": {"distributed_type": "MULTI_GPU"},
    }.items():
        settings = {"distributed_type": "DEEPSPEED", "num_processes": 8, **settings}
        (tmp_path / "acc.yaml").write_text(yaml.safe_dump(settings))
        done = convert(tmp_path, command, "run.sh")
        assert done["config"].get("strategy", {}).get("name", "ddp") == strategy
    missing = convert(tmp_path, command.replace("acc.yaml", "gone.yaml"), "run.sh")
    assert note(missing, "accelerate_config")["kind"] == "no counterpart"


@pytest.mark.parametrize(
    ("text", "name"), [(AXOLOTL, "a.yaml"), (LLAMA_FACTORY, "b.yaml"), (MS_SWIFT, "c.sh"), (TRL, "d.yaml")]
)
def test_every_key_is_converted_or_listed_and_the_result_can_be_planned(text: str, name: str, tmp_path: Path) -> None:
    for file in ("a.jsonl", "own.jsonl"):
        (tmp_path / file).write_text('{"text": "a"}\n')
    text = text.replace("[wandb, neptune]", "none").replace("dataset: pairs, ", "dataset: ")
    done = convert(tmp_path, text, name)
    written = packtrain("convert", name, "-o", "ours.yaml", folder=tmp_path)
    assert written.returncode == 0 and written.stdout == ""
    ours = (tmp_path / "ours.yaml").read_text()
    assert yaml.safe_load(ours) == done["config"]
    assert done["converted"] + done["listed"] == len(done["notes"])
    assert [item["key"] for item in done["notes"] if item["key"] not in ours] == []
    planned = packtrain("plan", "ours.yaml", "--gpu-memory", "80", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr


def test_what_is_not_known_or_of_another_form_is_listed_and_not_guessed(tmp_path: Path) -> None:
    done = convert(tmp_path, f"{TRL}\nflux_capacitor: 3\nuse_flux: false\n")
    unknown = note(done, "flux_capacitor")
    assert (unknown["value"], unknown["became"]) == (3, None) and "does not know" in unknown["why"]
    assert "does not know" in note(done, "use_flux")["why"]  # it may be on without the key
    done = convert(tmp_path, MS_SWIFT.replace("--learning_rate 1e-4", "--learning_rate $LR --lora_rank many"), "x.sh")
    assert note(done, "learning_rate")["became"] is None and "variable" in note(done, "learning_rate")["why"]
    assert note(done, "lora_rank")["became"] is None


def test_the_order_of_keys_decides_neither_of_the_warm_up_nor_of_adapters_in_the_place_of_the_model(tmp_path):
    for text in ("warmup_steps: 0\nwarmup_ratio: 0.1", "warmup_ratio: 0.1\nwarmup_steps: 0"):
        assert convert(tmp_path, TRL + text)["config"]["optim"]["warmup_steps"] == 0.1
    for order in ("--adapters a/b --model m/m", "--model m/m --adapters a/b"):
        assert convert(tmp_path, f"swift sft --dataset o/d {order}", "x.sh")["config"]["model"]["path"] == "a/b"


def test_the_loss_of_the_chosen_answer_itself_is_a_loss_with_a_weight(tmp_path: Path) -> None:
    text = "swift rlhf --rlhf_type dpo --model m/m --dataset o/d --rpo_alpha 0.1"
    objective = convert(tmp_path, text, "x.sh")["config"]["objective"]
    assert objective == {"kind": "dpo", "loss": ["sigmoid", "sft"], "options": {"loss_weights": [1, 0.1]}}
    assert note(convert(tmp_path, f"{text} --loss_type hinge", "x.sh"), "rpo_alpha")["became"] is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.yaml", None, "[no-such-config]"),
        ("broken.yaml", "a: [1\nb: 2", "broken.yaml:2: "),
        ("broken.json", '{"a": 1,}', "broken.json:1: "),
        ("list.yaml", "- a\n- b", "[not-a-mapping]"),
        ("bytes.yaml", b"\xff\xfe\x00", "[not-utf8]"),
        ("other.yaml", "name: CI\non: push", "[unknown-trainer]"),
        ("both.yaml", "base_model: a\nstage: sft", "it may be of axolotl or llamafactory"),
        ("empty.sh", "ls -l\n", "[no-training-command]"),
        ("far.sh", "trl sft --config far.yaml", "the config file far.yaml, which is not there"),
        ("grpo.sh", "swift rlhf --rlhf_type grpo --model a", "it is for grpo"),
        ("orpo.yaml", "base_model: a\nrl: orpo\ndatasets: []", "it is for orpo"),
        ("megatron.sh", "megatron sft --model a", "it is for Megatron"),
        ("infer.sh", "swift infer --model a", "it is for infer"),
        ("heard.sh", "swift sft --model a --dataset speech_asr/speech_asr_aishell1_trainsets", "[not-trained-here]"),
        ("laugh.yaml", "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"{to}: &{to} [{', '.join([f'*{of}'] * 10)}]\n" for of, to in zip("abcdef", "bcdefg", strict=True)
        ), "[too-large]"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_said_with_exit_code_2(name: str, text: Any, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    done = packtrain("convert", name, folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and name in done.stderr and "→" in done.stderr and "Traceback" not in done.stderr


def test_whose_config_it_is_can_be_said_and_secrets_are_not_written(tmp_path: Path) -> None:
    text = "base_model: a\nstage: sft\ndatasets: [{path: o/d}]\nsequence_len: 10"
    assert convert(tmp_path, text, "theirs.yaml", "--from", "axolotl")["config"]["model"]["path"] == "a"
    text = TRL.replace("dataset_name: owner/data", "dataset_name: https://me:aB3secret@host/data")
    (tmp_path / "theirs.yaml").write_text(f"{text}\nhub_token: hf_{'aB3' * 8}\n")
    assert packtrain("convert", "theirs.yaml", "-o", "ours.yaml", folder=tmp_path).returncode == 0
    assert "aB3" not in (tmp_path / "ours.yaml").read_text()


@pytest.mark.parametrize("origin", ["axolotl", "llamafactory", "ms-swift", "trl"])
def test_tables_name_keys_that_packtrain_has(origin: Any) -> None:
    """Their rules are found by name when the table is read."""
    folder = Path(str(conversion.__file__)).with_name("tables")
    for text in (folder / f"{name}.yaml" for name in (origin, "common")):
        content = yaml.safe_load(text.read_text())
        rows = [(ours, names) for group in content["same"].values() for ours, names in group.items()]
        named = {ours.replace("*", name) for ours, names in rows for name in names.split()}
        named |= {path for values in content.get("switches", {}).values() for path in values if path != "why"}
        named |= {choice["to"] for choice in content.get("choices", {}).values() if "to" in choice}
        cases = [row for rows in content.get("cases", {}).values() for row in rows]
        named |= {path for row in cases for path in row.get("set", {})}
        rows = [*cases, *content.get("defaults when", []), *content.get("remarks", [])]
        assert {name for row in rows for name in row} <= {"if", "set", "why", "kind", "became"}
        inside = ("objective.options.", "optim.schedule_options.", "peft.options.")
        inside += ("data.columns.", "topology.environment.")
        assert {path for path in named if path not in keys() and not path.startswith(inside)} == set()
    assert table(origin).marks


def test_the_page_names_keys_that_are_converted() -> None:
    """Each row of a trainer's table: what stands on the left has a rule, and what stands on the right is a key or a group of ours."""
    page = (Path(__file__).resolve().parents[3] / "docs/coming-from.md").read_text()
    titles = {"axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "ms-swift": "ms-swift", "TRL": "trl"}
    groups = {f"{path.split('.')[0]}.*" for path in keys()}
    for title, origin in titles.items():
        section = page.partition(f"## From {title}\n")[2].partition("\n## ")[0]
        rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ") and "their" not in line]
        assert len(rows) > 8
        for theirs, ours in rows:
            names = re.findall(r"`-?-?([a-z]\w+)[^`]*`", re.sub(r"\([^)]*\)", "", theirs))
            names = [name for name in names if name not in ("swift", "num_processes")]
            unknown = [name for name in names if str(table(origin).rule(name)).count("does not know")]  # type: ignore[arg-type]
            assert unknown == [], title
            found = re.findall(r"`([a-z]+\.[\w.*]+)`", ours)
            assert {name for name in found if name not in keys() and name not in groups} <= {"config.yaml"}, title


def test_other_adapters_and_learning_rates_by_name_are_converted(tmp_path: Path) -> None:
    more = {
        "lora_target_linear": False,
        "lora_target_modules": ["q_proj"],
        "loraplus_lr_ratio": 16,
        "optimizer": "muon",
    }
    more |= {"peft_use_dora": True, "peft_use_rslora": True, "peft_layers_to_transform": [0, 1]}
    more |= {"peft_init_lora_weights": "gaussian"}
    ours = convert(tmp_path, yaml.safe_dump(yaml.safe_load(AXOLOTL) | more))["config"]
    options = {"use_dora": True, "use_rslora": True, "layers_to_transform": [0, 1], "init_lora_weights": "gaussian"}
    assert ours["peft"]["options"] == options and ours["peft"]["target_modules"] == ["q_proj"]
    assert ours["optim"]["groups"] == [{"match": "lora_B", "lr_scale": 16}] and ours["optim"]["name"] == "muon"
    more = {"adapter": None, "load_in_4bit": False, "unfrozen_parameters": ["^lm_head.weight$"]}
    groups = convert(tmp_path, yaml.safe_dump(yaml.safe_load(AXOLOTL) | more))["config"]["optim"]["groups"]
    assert groups == [{"match": "^(?:^lm_head.weight$)"}, {"match": ".", "lr_scale": 0}]


LF_ADAPTERS = "model_name_or_path: m/m\nstage: sft\ndataset: o/d\nfinetuning_type: lora\ncutoff_len: 9\n"
SOURCES = "base_model: m/m\nsequence_len: 9\nval_set_size: 0\n"
TWO = "{path: o/a, type: completion, field: body}, {path: o/b, type: completion}"


@pytest.mark.parametrize(
    ("name", "text", "key", "kind", "path"),
    [
        ("new.yaml", f"{LF_ADAPTERS}adapter_name_or_path: a/b\ncreate_new_adapter: true", "create_new_adapter", "differs", "a/b"),
        ("zero3.yaml", f"{LF_ADAPTERS}adapter_name_or_path: a/b\ncreate_new_adapter: true\ndeepspeed: ds_z3_config.json",
         "create_new_adapter", "not needed", "a/b"),
        ("none.yaml", f"{LF_ADAPTERS}create_new_adapter: true", "create_new_adapter", "not needed", "m/m"),
        ("two.yaml", f"{LF_ADAPTERS}adapter_name_or_path: a/b,c/d", "adapter_name_or_path", "differs", "c/d"),
        ("one.yaml", f"{LF_ADAPTERS}adapter_name_or_path: a/b", "adapter_name_or_path", "converted", "a/b"),
        ("full.sh", "swift sft --model m/m --dataset o/d --tuner_type full --adapters a/b", "adapters", "not needed", "m/m"),
        ("whole.yaml", f"{AXOLOTL.replace('adapter: qlora', '')}lora_model_dir: a/b", "lora_model_dir", "not needed",
         "meta-llama/Llama-3.2-1B"),
        ("dpo.yaml", f"{AXOLOTL}rl: dpo\nlora_model_dir: a/b", "lora_model_dir", "differs", "a/b"),
    ],
)  # fmt: skip
def test_earlier_adapters_that_theirs_treats_otherwise_are_marked(name, text, key, kind, path, tmp_path):
    done = convert(tmp_path, text, name)
    assert (note(done, key)["kind"], done["config"]["model"]["path"]) == (kind, path)


@pytest.mark.parametrize(
    ("name", "text", "train"),
    [
        ("x.sh", "swift sft --model m/m --dataset o/d --cached_dataset 'a/train' 'b/train#5'",
         [{"path": "o/d"}, {"path": "a/train"}, {"path": "b/train", "samples": 5}]),
        ("a.yaml", f"{SOURCES}datasets: [{{path: o/c, type: alpaca}}]\npretraining_dataset: [{TWO}]\nmax_steps: 9",
         {"path": "o/a", "columns": {"text": "body"}}),
        ("b.yaml", f"{SOURCES}datasets: [{TWO}]\nstreaming: true\nsample_packing: true",
         {"path": "o/a", "columns": {"text": "body"}}),
        ("c.yaml", f"{SOURCES}datasets: [{TWO}]\nstreaming: true", [{"path": "o/a", "columns": {"text": "body"}}, {"path": "o/b"}]),
        ("d.yaml", f"{TRL}datasets: [{{path: o/e}}]", {"path": "o/e"}),
        ("e.yaml", f"datasets: [{{path: o/e}}]\n{TRL}", {"path": "o/e"}),
    ],
)  # fmt: skip
def test_two_keys_with_training_data_give_what_theirs_trains_on(name, text, train, tmp_path):
    done = convert(tmp_path, text, name, *(["--from", "trl"] if name in ("d.yaml", "e.yaml") else []))
    assert done["config"]["data"]["train"] == train


def test_shares_and_rows_held_out_beside_cached_rows_are_not_dropped_in_silence(tmp_path: Path) -> None:
    text = "swift sft --model m/m --dataset o/d o/e --interleave_prob 0.3 0.7 --max_steps 9"
    assert "stages" in convert(tmp_path, text, "x.sh")["config"]["data"]
    done = convert(tmp_path, f"{text} --cached_dataset a/train", "x.sh")
    assert "stages" not in done["config"]["data"] and note(done, "interleave_prob")["became"] is None
    text = "swift sft --model m/m --dataset o/d --split_dataset_ratio 0.1 --cached_val_dataset a/val"
    done = convert(tmp_path, f"{text} --val_dataset o/v", "x.sh")
    assert sorted(source["path"] for source in done["config"]["data"]["eval"]) == ["a/val", "o/v"]
    assert note(convert(tmp_path, text, "x.sh"), "split_dataset_ratio")["kind"] == "no counterpart"


def test_patterns_of_trained_weights_freeze_adapters_there_and_keep_ranges_of_digits(tmp_path: Path) -> None:
    done = convert(tmp_path, f"{AXOLOTL}unfrozen_parameters: ['^lm_head.weight$']")
    assert "groups" not in done["config"]["optim"] and note(done, "unfrozen_parameters")["kind"] == "no counterpart"
    patterns = "['layers.2[0-9]+.mlp', '^model.embed_tokens.weight$[:32000]']"
    done = convert(tmp_path, f"{AXOLOTL.replace('adapter: qlora', '')}unfrozen_parameters: {patterns}")
    matched = [group["match"] for group in done["config"]["optim"]["groups"]]
    assert matched == ["^(?:layers.2[0-9]+.mlp)", "^(?:^model.embed_tokens.weight$)", "."]
    assert note(done, "unfrozen_parameters")["kind"] == "differs"
