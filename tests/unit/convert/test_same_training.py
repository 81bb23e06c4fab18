"""A converted config trains as its trainer would, or the difference is marked.

The right values are from the sources of LLaMA-Factory 0.9.5, ms-swift 4.5.2, axolotl 0.19 and TRL 1.16.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import tokenizer_of

from packtrain.config.compose import load_config
from packtrain.convert.conversion import Conversion, Note, commented_yaml, convert_file, write_conversion
from packtrain.data.prepare import prepare

AXOLOTL = "base_model: m/m\ndatasets: [{path: o/d, type: chat_template}]\nlearning_rate: 1e-5\n"
FACTORY = "model_name_or_path: m/m\nstage: sft\nfinetuning_type: full\ndataset: o/d\n"
TRL = "model_name_or_path: m/m\ndataset_name: o/d\n"
SWIFT = "swift sft --model m/m --dataset o/d "
TOKENIZER = tokenizer_of("smollm")
OF = {"a": AXOLOTL, "l": FACTORY, "t": TRL, "s": SWIFT}


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Convert a small config of a trainer, named by its first letter, with more keys."""
    monkeypatch.chdir(tmp_path)

    def convert(trainer: str, more: str = "", **changes: str) -> Conversion:
        text = OF[trainer]
        for old, new in changes.items():
            text = text.replace(old, new)
        path = tmp_path / ("theirs.sh" if trainer == "s" else "theirs.yaml")
        path.write_text(f"{text}{more}\n")
        return convert_file(path)

    return convert


def note(done: Conversion, key: str) -> Note:
    return next(item for item in done.notes if item.key == key)


def head(done: Conversion) -> str:
    """The first sentences: how many keys became these, and whether some train otherwise."""
    return " ".join(commented_yaml(done).partition("THIS_FILE")[0].replace("#", " ").split())


def flat(done: Conversion) -> dict[str, Any]:
    return {f"{group}.{name}": value for group, values in done.config.items() for name, value in values.items()}


SAME: list[tuple[str, str, dict[str, Any]]] = [
    # LLaMA-Factory: data_args.__post_init__ sets packing where neat_packing is on
    ("l", "neat_packing: true", {"batch.tokens_per_step": 8 * 2048}),
    ("l", "neat_packing: true\ncutoff_len: 512\nper_device_train_batch_size: 2", {"batch.tokens_per_step": 1024}),
    ("l", "disable_shuffling: true", {"data.shuffle": False}),
    ("l", "val_size: 0.1\neval_steps: 5\neval_strategy: steps\nearly_stopping_steps: 3\nload_best_model_at_end: true", {"trainer.early_stop_patience": 3}),
    ("l", "template: qwen3_nothink", {"data.chat_template": "qwen3_instruct_2507"}),
    ("l", "train_from_scratch: true", {"model.init": "random"}),
    ("l", "", {"trainer.mixed_precision": "no", "optim.learning_rate": 5e-5, "optim.schedule": "linear"}),
    ("l", "bf16: true", {"trainer.mixed_precision": "bf16"}),
    ("a", "wandb_project: p\nwandb_entity: team\nwandb_mode: offline", {
        "topology.environment": {"WANDB_PROJECT": "p", "WANDB_ENTITY": "team", "WANDB_MODE": "offline"},
        "tracking.report_to": ["wandb"],
    }),
    ("a", "use_tensorboard: true\nuse_comet: true\nwandb_project: p", {
        "tracking.report_to": ["tensorboard", "comet", "wandb"]
    }),
    # sequence_len has the default 512, and longer rows are dropped (utils/data/utils.py)
    ("a", "", {"data.max_length": 512, "data.overlong": "drop", "optim.warmup_steps": 0.03}),
    ("a", "excess_length_strategy: truncate\nsequence_len: 1024", {"data.overlong": "truncate", "data.max_length": 1024}),
    ("a", "warmup_steps: 0", {"optim.warmup_steps": 0, "data.overlong": "drop"}),
    ("a", "curriculum_sampling: true", {"data.shuffle": False}),
    ("a", "shuffle_merged_datasets: false\ncurriculum_sampling: true", {"data.shuffle": False}),
    ("a", "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]", {
        "peft.target_modules": "all-linear"
    }),
    ("l", "template: qwen3\nenable_thinking: null", {"data.chat_template": "qwen3"}),  # an empty thought is prompt
    ("s", "--max_length 256", {"data.max_length": 256, "data.overlong": "drop"}),
    ("s", "--max_length 256 --truncation_strategy right", {"data.overlong": "truncate"}),
    ("s", "--dataset_shuffle false --train_dataloader_shuffle false", {"data.shuffle": False}),
    ("s", "--loss_scale last_round+ignore_empty_think", {"data.loss_on": "completion"}),
    ("s", "--rpo_alpha 0.1", {"objective.loss": ["sigmoid", "sft"]}),
    ("s", """--columns '{"asked": "question", "good": "answer", "worse": "rejected_response", "sys": "system_prompt"}'""", {
        "data.train": {
            "path": "o/d",
            "columns": {"instruction": "asked", "output": "good", "rejected": "worse", "system": "sys"},
        }
    }),
    ("s", """--columns '{"asked": "query", "said": "response"}'""", {
        "data.train": {"path": "o/d", "columns": {"instruction": "asked", "output": "said"}}
    }),
    ("a", "curriculum_sampling: true\nsample_packing: true\nsample_packing_sequentially: true", {
        "data.shuffle": False, "packing.strategy": "in_order"
    }),
    ("l", "use_swanlab: true\nswanlab_project: p", {"topology.environment": {"SWANLAB_PROJECT": "p"}}),
    ("t", "use_peft: true", {"peft.target_modules": ["q_proj", "v_proj"], "peft.r": 16, "peft.dropout": 0.05}),
    ("t", "use_peft: true\nlora_target_modules: all-linear", {"peft.target_modules": "all-linear"}),
    ("t", "train_sampling_strategy: sequential", {"data.shuffle": False}),
    ("t", "", {"data.max_length": 1024, "data.overlong": "truncate", "optim.schedule": "linear"}),
    # an iterable data set has no sampler
    ("t", "dataset_streaming: true\nmax_steps: 5", {"data.streaming": True, "data.shuffle": False}),
    ("s", "--dataset_shuffle false --streaming true --max_steps 5", {"data.streaming": True, "data.shuffle": False}),
    ("a", "shuffle_merged_datasets: false\nstreaming: true\nmax_steps: 5", {
        "data.shuffle": False, "data.shuffle_buffer": "not set"
    }),
    # buffers of streams, where theirs differ from ours
    ("l", "streaming: true\nmax_steps: 5", {"data.streaming": True, "data.shuffle_buffer": 16384}),
    ("l", "streaming: true\nmax_steps: 5\ndisable_shuffling: true", {"data.shuffle": "not set"}),
    ("l", "streaming: true\nmax_steps: 5\nbuffer_size: 7", {"data.shuffle_buffer": 7}),
    ("l", "streaming: true", {"data.streaming": "not set", "data.shuffle_buffer": "not set"}),  # no steps, no stream
    ("s", "--streaming true --max_steps 5", {"data.streaming": True, "data.shuffle_buffer": 1000}),
    ("s", "--dataset_shuffle false --streaming true --max_steps 5", {"data.shuffle_buffer": "not set"}),
    ("a", "streaming: true\nmax_steps: 5", {"data.streaming": True, "data.shuffle_buffer": 1000}),
    ("a", "streaming: true\nmax_steps: 5\npretraining_dataset: [{path: o/p}]", {"data.shuffle_buffer": "not set"}),
    ("a", "streaming: true\nmax_steps: 5\npretraining_dataset: [{path: o/p}]\nstreaming_multipack_buffer_size: 9", {
        "data.shuffle_buffer": 9
    }),
    # TRL: both masks hold together; a completion is masked by default
    ("t", "assistant_only_loss: true", {"data.loss_on": "auto"}),
    ("t", "assistant_only_loss: true\ncompletion_only_loss: true", {"data.loss_on": "auto"}),
    ("t", "completion_only_loss: false\nassistant_only_loss: true", {"data.loss_on": "assistant"}),
    ("t", "assistant_only_loss: false\ncompletion_only_loss: true", {"data.loss_on": "completion"}),
    ("t", "completion_only_loss: false", {"data.loss_on": "all"}),
    # ms-swift: DataArguments turns the share off where there is a val_dataset
    ("s", "--val_dataset o/v --split_dataset_ratio 0.1", {"data.eval": {"path": "o/v"}}),
    ("t", "dataset_text_field: text", {"data.columns": "not set"}),  # which conversations need not have
    ("t", "dataset_text_field: story", {"data.columns": {"text": "story"}}),
    ("t", "max_length:", {"data.max_length": None}),
    ("t", "packing: true\npacking_strategy: bfd_split", {"data.overlong": "split"}),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "more", "expected"), SAME)
def test_what_a_peer_does_is_what_our_keys_say(trainer: str, more: str, expected: dict[str, Any], of: Any) -> None:
    done = of(trainer, more, **({"sft": "rlhf --rlhf_type dpo"} if "rpo" in more else {}))
    ours = flat(done)
    assert {name: ours.get(name, "not set") for name in expected} == expected
    own = [line.split(":")[0].split(" ")[0].removeprefix("--") for line in more.splitlines()]
    told = {name: note(done, name).kind for name in own if name not in ("", "cutoff_len")}  # cut turn by turn there
    assert {*told.values()} <= {"converted", "not needed"}, told


OTHERWISE = [
    ("l", "packing: true", "packing"),  # documents of a row see each other
    ("l", "max_samples: 7", "max_samples"),
    ("l", "template: intern2", "template"),
    ("l", "template: qwen3", "enable_thinking"),  # its default trains an empty thought
    ("l", "template: qwen3\nenable_thinking: false", "enable_thinking"),
    ("l", "split_special_tokens: true", "split_special_tokens"),
    ("l", "quantization_bit: 4\nquantization_type: fp4", "quantization_type"),
    ("l", "group_by_length: true", "group_by_length"),
    ("l", "dataloader_drop_last: true", "dataloader_drop_last"),
    ("l", "average_tokens_across_devices: false", "average_tokens_across_devices"),
    ("l", "load_best_model_at_end: true", "load_best_model_at_end"),
    ("a", "warmup_ratio:", "warmup_ratio"),
    ("a", "plugins: [axolotl.integrations.kd.KDPlugin]", "plugins"),
    ("a", "pretrain_multipack_attn: false", "pretrain_multipack_attn"),
    ("a", "chat_template_kwargs: {enable_thinking: false}", "chat_template_kwargs"),
    ("s", "--use_chat_template false", "use_chat_template"),
    ("s", "--acc_strategy seq", "acc_strategy"),
    ("l", "template: lfm2", "template"),  # a default system prompt
    ("a", "chat_template: phi_3", "chat_template"),  # BOS and EOS
    ("s", "--train_dataloader_shuffle false", "train_dataloader_shuffle"),  # shuffled once
    ("l", "accelerator_config: {split_batches: true}", "accelerator_config"),
    ("a", "tokenizer_use_mistral_common: true", "tokenizer_use_mistral_common"),
    ("s", "--add_non_thinking_prefix false", "add_non_thinking_prefix"),
    ("s", "--external_plugins loss.py", "external_plugins"),
    ("s", "--system prompt.txt", "system"),
    ("s", "--system '' --max_length 9", "system"),  # none there, and what the chat template has by default here
    ("l", "default_system: ''", "default_system"),
    ("t", "packing: true\npacking_strategy: wrapped", "packing_strategy"),
    ("t", "train_sampling_strategy: group_by_length", "train_sampling_strategy"),
    ("t", "dataset_kwargs: {skip_prepare_dataset: true}", "dataset_kwargs"),
    ("t", "", "dataset_name"),  # every turn is trained
    ("t", "use_peft: true\nload_in_4bit: true", "use_bnb_nested_quant"),  # off by default
    ("t", "use_peft: false\ndatasets: [{path: o/e, fraction: 0.5}, {path: o/f, fraction: 0.5}]", "datasets"),
    ("a", "load_in_4bit: true\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4}", "bnb_config_kwargs"),
]


@pytest.mark.parametrize(("trainer", "more", "key"), OTHERWISE)
def test_what_trains_otherwise_is_marked_and_does_not_count(trainer: str, more: str, key: str, of: Any) -> None:
    done = of(trainer, more)
    told = note(done, key)
    assert told.kind in ("differs", "no counterpart") and told.why and "does not know" not in told.why
    assert told in done.told and f"{key}" in commented_yaml(done)
    assert told not in done.of_kind("converted")
    assert told.kind == "no counterpart" or "≠ marks what trains otherwise" in head(done)


NOT_NEEDED = [
    ("s", "--freeze_vit true --freeze_aligner true --vit_lr 1e-5", ["freeze_vit", "freeze_aligner", "vit_lr"]),
    ("l", "freeze_vision_tower: true\nfreeze_multi_modal_projector: true\nvideo_max_pixels: 16384", [
        "freeze_vision_tower", "freeze_multi_modal_projector", "video_max_pixels"
    ]),
    ("a", "freeze_mm_modules: true", ["freeze_mm_modules"]),
    ("a", "plugins: [axolotl.integrations.liger.LigerPlugin]", ["plugins"]),
    ("s", "--dataset_shuffle false", ["dataset_shuffle"]),  # its loader shuffles all the same
    ("a", "shuffle_merged_datasets: false", ["shuffle_merged_datasets"]),  # its sampler is random all the same
    ("s", "--enable_thinking false", ["enable_thinking"]),  # of inference alone
    ("t", "packing_strategy: wrapped", ["packing_strategy"]),  # without packing
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "more", "keys"), NOT_NEEDED)
def test_what_changes_nothing_there_is_not_needed(trainer: str, more: str, keys: list[str], of: Any) -> None:
    done = of(trainer, more)
    assert [note(done, key).kind for key in keys] == ["not needed"] * len(keys)
    assert "data.shuffle" not in flat(done)


def test_all_keys_became_ours_is_said_only_of_the_same_training(of: Any) -> None:
    same = of("s", "--max_length 9 --learning_rate 1e-5")
    assert "4 keys of 4 became these." in head(same) and "≠" not in head(same)
    assert "≠" in head(of("s", "--max_length 9 --tuner_type full"))  # weights are bfloat16 there
    assert "≠" in head(of("s"))  # the longest row is the model's
    assert "≠" in head(of("l"))  # which cuts long rows turn by turn
    done = of("l", "max_samples: 5").to_json()
    assert done["converted"] + done["listed"] == len(done["notes"])
    assert {item["key"]: item["kind"] for item in done["notes"]}["max_samples"] == "differs"


@pytest.mark.parametrize(("dropout", "trainer", "verb"), [
    (0.0, "t", "dpo"), (0.0, "t", "kto"), (0.0, "a", "dpo"), (0.0, "s", "dpo"), (0.0, "l", "dpo"), (0.1, "l", "rm"), (0.1, "t", "sft"),
])  # fmt: skip
def test_trainers_of_preferences_turn_dropout_off(dropout: float, trainer: str, verb: str, of: Any) -> None:
    """TRL's trainers do, and the trainers over them. LLaMA-Factory's reward trainer does not."""
    more = {
        "t": f"use_peft: true\nlora_dropout: 0.1\n{'' if verb == 'sft' else 'beta: 0.1' if verb == 'dpo' else 'desirable_weight: 1.0'}",
        "a": "rl: dpo\nadapter: lora\nlora_dropout: 0.1",
        "s": "--rlhf_type dpo --lora_dropout 0.1",
        "l": "lora_dropout: 0.1",
    }[trainer]
    done = of(trainer, more, **({"full": "lora", "stage: sft": f"stage: {verb}"} if trainer == "l" else {}))
    assert (done.verb, done.config["peft"]["dropout"]) == ({"rm": "reward"}.get(verb, verb), dropout)
    if trainer == "t" and verb == "dpo":
        assert of("t", f"{more}\ndisable_dropout: false").config["peft"]["dropout"] == 0.1


def test_long_pairs_and_the_order_of_answers_are_as_in_trl(of: Any) -> None:
    """RewardConfig filters what is longer than max_length; KTOConfig samples sequentially."""
    assert of("t", "center_rewards_coefficient: 0.1").config["data"]["overlong"] == "drop"
    # axolotl's completion strategy slices texts that are too long; rows of chats are dropped
    assert "overlong" not in of("a", chat_template="completion").config["data"]
    assert of("t", "desirable_weight: 1.0").config["data"]["shuffle"] is False
    assert of("l", "kto_chosen_weight: 1.0", sft="kto").config["data"].get("shuffle", True) is True  # its own sampler


def test_conversations_are_rendered_once_as_there(of: Any) -> None:
    assert {flat(of(trainer)).get("data.render") for trainer in "alst"} <= {"conversation"}
    for keys, render in (
        ("beta: 0.1", "conversation"),
        ("desirable_weight: 1.0", "conversation"),
        ("center_rewards_coefficient: 0.1", None),
    ):
        assert flat(of("t", keys)).get("data.render") == render


def test_the_step_of_ms_swift_has_sixteen_examples_whatever_the_devices(of: Any, tmp_path: Path) -> None:
    of("s")
    for devices in (1, 4, 16):
        done = convert_file(tmp_path / "theirs.sh", None, devices)
        assert done.config["batch"]["examples_per_step"] == 16


def test_long_texts_of_pretraining_lose_their_ends_in_llama_factory_too(of: Any) -> None:
    """Its supervised rows are cut turn by turn."""
    done = of("l", "packing: false\ncutoff_len: 64", sft="pt")
    assert (note(done, "cutoff_len").kind, done.config["data"]["overlong"]) == ("converted", "truncate")
    assert done.config["data"]["max_length"] == 64 and "≠" not in head(done)
    assert "≠" not in note(of("l", sft="pt"), "cutoff_len").why
    for stage in ("sft", "dpo", "rm"):
        assert note(of("l", "cutoff_len: 64", sft=stage), "cutoff_len").kind == "differs"


def test_lengths_are_the_model_s_where_ms_swift_is_given_none(of: Any, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/m").mkdir()
    (tmp_path / "m/m/config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 4096}}))
    done = of("s")
    assert done.config["data"]["max_length"] == 4096 and done.config["data"]["overlong"] == "drop"
    (tmp_path / "m/m/config.json").unlink()
    assert of("s").config["data"]["max_length"] is None


def test_files_of_the_current_folder_do_not_decide_of_max_samples(of: Any, tmp_path: Path) -> None:
    """Without dataset_info.json the folder itself was counted as the data set."""
    bare = of("l", "max_samples: 7").config["data"]["train"]
    (tmp_path / "few.jsonl").write_text('{"text": "a"}\n')
    assert of("l", "max_samples: 7").config["data"]["train"] == bare == {"path": "o/d", "samples": 7}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"mine": {"hf_hub_url": "o/d"}}))
    path = os.path.relpath(tmp_path / "data/dataset_info.json")
    done = of("l", "max_samples: 7", **{"o/d": "mine"})
    assert done.config["data"]["train"] == {"path": f"lf:{path}#mine", "samples": 7}


def test_variables_of_trackers_go_along_but_no_secrets(of: Any) -> None:
    done = of("s", **{"swift sft": "WANDB_PROJECT=p WANDB_API_KEY=k WANDB_ENTITY=e swift sft"})
    assert done.config["topology"]["environment"] == {"WANDB_PROJECT": "p", "WANDB_ENTITY": "e"}
    done = of("a", "mlflow_tracking_uri: https://joe:hunter2hunter2@host/x\nwandb_mode: offline")
    assert done.config["topology"]["environment"] == {"WANDB_MODE": "offline"}
    assert note(done, "mlflow_tracking_uri").kind == "no counterpart" and note(done, "wandb_mode").kind == "converted"


AXOLOTL_PAIRS = """
base_model: m/m
rl: dpo
datasets:
  - {path: a.jsonl, type: chat_template.default}
  - {path: b.jsonl, type: chat_template.default, field_messages: dialog, field_chosen: good, field_rejected: bad}
  - {path: c.jsonl, type: {field_prompt: question, field_chosen: good, field_rejected: bad}}
learning_rate: 1e-5
"""


def test_axolotl_names_columns_by_data_set(of: Any, tmp_path: Path) -> None:
    (tmp_path / "pairs.yaml").write_text(AXOLOTL_PAIRS)
    done = convert_file(tmp_path / "pairs.yaml")
    names = [source.get("columns") for source in done.config["data"]["train"]]
    assert note(done, "datasets").kind == "converted"  # texts without a format stand as they are
    assert names == [
        {"prompt": "messages"},
        {"prompt": "dialog", "chosen": "good", "rejected": "bad"},
        {"prompt": "question", "chosen": "good", "rejected": "bad"},
    ]
    assert "columns" not in done.config["data"]


CHATS, FORMAT = "type: chat_template", "type: {field_instruction: q, format: 'Q: {instruction}'}"
UNMARKED = (
    *(CHATS, "type: completion", f"{CHATS}, roles_to_train: [assistant], train_on_eos: turn"),
    f"{CHATS}, message_property_mappings: {{role: from, content: value}}",
    f"{CHATS}, roles: {{user: [human], assistant: [gpt]}}",
    f"{CHATS}, roles: , roles_to_train: , train_on_eos: ",
)
MARKED = (
    *("type: alpaca", "type: 'alpaca:chat'", "type: gpteacher", FORMAT, f"{CHATS}, roles: {{assistant: [pirate]}}"),
    *(f"{CHATS}, roles_to_train: [user, assistant]", f"{CHATS}, train_on_eos: last"),
    *(f"{CHATS}, message_field_training: learn", f"{CHATS}, chat_template: llama3"),
    f"{CHATS}, message_property_mappings: {{role: who, content: said}}",
    *(f"{CHATS}, roles_to_train: []", f"{CHATS}, roles_to_train: [], message_field_training: train"),
    *(f"{CHATS}, train_on_eos: none", f"{CHATS}, train_on_eot: none"),
    f"{CHATS}, roles: {{user: [gpt], assistant: [human]}}",
)


@pytest.mark.parametrize("settings", [*UNMARKED, *MARKED])
def test_what_axolotl_does_to_a_data_set_of_its_own_is_marked(settings: str, of: Any) -> None:
    done = of("a", **{"type: chat_template": settings})
    assert note(done, "datasets").kind == ("differs" if settings in MARKED else "converted")


def test_texts_are_cut_into_pieces_where_axolotl_cuts_them(of: Any) -> None:
    """Its completion strategy slices what is too long; rows of chats are dropped."""
    assert "overlong" not in of("a", chat_template="completion").config["data"]


@pytest.mark.parametrize(
    ("layers", "marked"),
    [
        ("", True),
        ("lora_target_linear: true", False),
        ("lora_target_modules: [q_proj]", False),
        ("lora_model_dir: a/b", False),
    ],
)
def test_adapters_of_axolotl_that_name_no_layers_are_marked(layers: str, marked: bool, of: Any) -> None:
    """Its target_modules is [] then."""
    done = of("a", f"adapter: lora\n{layers}")
    assert any("no layer has adapters there" in remark for remark in done.remarks) is marked


def test_a_template_for_tokenizers_without_one_is_named(of: Any) -> None:
    told = note(of("a", "chat_template: tokenizer_default_fallback_chatml"), "chat_template")
    assert told.kind == "converted" and "chatml there" in told.why and "data.chat_template" in told.why
    assert note(of("a", "chat_template: tokenizer_default"), "chat_template").why == "the tokenizer's own"


def prepared(folder: Path, *rows: dict[str, Any]) -> Any:
    """The documents that the converted config makes of these rows."""
    write_conversion(next(folder.glob("theirs.*")), None, None, ours := folder / "ours.yaml")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ours.write_text(ours.read_text().replace("path: o/d", f"path: {folder}/rows.jsonl"))
    config = load_config(str(ours), [f"data.cache_dir={folder}/cache"])
    return prepare(config.data, TOKENIZER, config.objective.kind, seed=0).train


def decoded(document: Any) -> tuple[str, str]:
    """The text of a document, and what is trained of it."""
    return str(TOKENIZER.decode(document.input_ids)), str(TOKENIZER.decode(document.input_ids[document.loss_mask]))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [turn("user", "Hi"), turn("assistant", "Yes."), turn("user", "So?"), turn("assistant", "No.")]
END = "<|im_end|>"  # the tokenizer's EOS
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
TEXTS = {  # of TURNS, as register_template of LLaMA-Factory and chat_templates of axolotl have them
    ("l", "alpaca"): ALPACA + "".join(
        f"### Instruction:\n{asked}\n\n### Response:\n{said}{END}\n\n" for asked, said in (("Hi", "Yes."), ("So?", "No."))
    ),
    ("l", "default"): f"Human: Hi{END}\nAssistant:Yes.{END}\nHuman: So?{END}\nAssistant:No.{END}\n",
    ("l", "vicuna"): "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    f"and polite answers to the user's questions.USER: Hi ASSISTANT:Yes.{END}USER: So? ASSISTANT:No.{END}",
    ("a", "alpaca"): f"{TOKENIZER.bos_token or ''}### Instruction:\nHi\n\n### Response:\nYes.{END}\n\n### Instruction:\nSo?\n\n"
    f"### Response:\nNo.{END}",
}  # fmt: skip


@pytest.mark.parametrize(("trainer", "name"), TEXTS)
def test_prompt_texts_of_their_own_are_written_as_a_template(trainer: str, name: str, of: Any, tmp_path: Path) -> None:
    more = f"{'template' if trainer == 'l' else 'chat_template'}: {name}"
    assert "data.chat_template is not set" in commented_yaml(of(trainer, more))
    assert decoded(prepared(tmp_path, {"messages": TURNS})[0]) == (TEXTS[trainer, name], f"Yes.{END}No.{END}")


def test_alpaca_rows_of_axolotl_have_its_prompt_text(of: Any, tmp_path: Path) -> None:
    """AlpacaPrompter's text; the row with an input is marked."""
    done = of("a", chat_template="alpaca")
    assert note(done, "datasets").kind == "differs" and "### Input" in note(done, "datasets").why
    text, trained = decoded(prepared(tmp_path, {"instruction": "Hi", "input": "", "output": "Yes."})[0])
    assert (
        text.removeprefix(str(TOKENIZER.bos_token or "")) == f"{ALPACA}### Instruction:\nHi\n\n### Response:\nYes.{END}"
    )
    assert trained == f"Yes.{END}"
    assert "chat_template" not in of("a", "chat_template: chatml", **{"type: chat_template": "type: alpaca"}).template


def test_a_system_prompt_stands_in_the_place_of_the_default_one(of: Any, tmp_path: Path) -> None:
    of("l", "template: alpaca\ndefault_system: Be kind.")
    text, _ = decoded(prepared(tmp_path, {"messages": TURNS[:2]})[0])
    assert [text] == [f"Be kind.### Instruction:\nHi\n\n### Response:\nYes.{END}\n\n"]


@pytest.mark.parametrize("more", ["", "--use_chat_template false --template qwen2_5"])
def test_plain_text_of_ms_swift_has_no_chat_template(more: str, of: Any, tmp_path: Path) -> None:
    """`swift pt` trains all of it, `swift sft` the answers; a system prompt is left out of both."""
    of("s", f"--system ignored {more}", **({} if more else {"swift sft": "swift pt"}))
    documents = prepared(tmp_path, {"messages": [turn("system", "S"), *TURNS[:2]]}, {"messages": TURNS[1:2]})
    (text, trained), (answer, _) = map(decoded, (documents[0], documents[1]))
    assert (text, answer) == (f"HiYes.{END}", f"Yes.{END}")
    assert trained == (f"Yes.{END}" if more else text.removeprefix(str(TOKENIZER.decode(documents[0].input_ids[:1]))))


def test_pairs_of_axolotl_s_messages_are_read(of: Any, tmp_path: Path) -> None:
    text = AXOLOTL.replace("type: chat_template", "type: chat_template.default, field_messages: dialog") + "rl: dpo\n"
    (tmp_path / "theirs.yaml").write_text(text)
    row = {"dialog": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[3]}
    pairs = prepared(tmp_path, row)
    answers = [decoded(part)[1].strip() for part in (pairs[0].chosen, pairs[0].rejected)]
    assert len(pairs) == 1 and answers == [f"Yes.{END}", f"No.{END}"]
