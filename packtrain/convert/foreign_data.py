"""What trainers say each in a way of their own: data sets, the method, and defaults that depend on other settings."""

from __future__ import annotations

import math
import re
from typing import Any

from packtrain.config.objective import ObjectiveKind
from packtrain.config.rules.paths_and_packages import DATA_SUFFIXES
from packtrain.convert.counterparts import Outcome, Theirs, count, is_off, names, number, refuse, whole
from packtrain.convert.foreign_file import Foreign

_PICTURES = re.compile(
    "coco|latex_ocr|rlaif-v|videochat|clevr|textcaps|garbage|-vl-|multimodal|captcha|tts|visual", re.IGNORECASE
)
_READ = re.compile(
    r"path|type|name|split|data_files|ds_type|field\w*|roles|message_\w+|text_column|chat_template|shards"
)
_TYPES = re.compile(
    r"(alpaca|chat_template|completion|pretrain|sharegpt|chatml|llama3|bradley_terry|input_output|None)([.:].*)?"
)
_FIELDS = ("chosen", "rejected", "instruction", "output", "system", "input")
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_EVERY_TURN = "without assistant_only_loss every turn of conversations is trained there, only the assistant's here: data.loss_on=all"
_OURS: dict[str, ObjectiveKind] = {"pt": "sft", "pretrain": "sft", "ipo": "dpo", "rm": "reward"}
_OURS |= {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward"}
_BY_KEYS = {
    "desirable_weight": "kto",
    "center_rewards_coefficient": "reward",
    "beta": "dpo",
    "max_prompt_length": "dpo",
}
_METHODS = re.compile(
    r"(?<![a-z])(orpo|grpo|ppo|cpo|bco|gkd|rloo|nash|xpo|online_dpo|dpo_online|sdpo|prm|distillation|diffusion|dpo|kto|reward|sft)"
)


def _sources(key: str, found: list[dict[str, Any]], columns: dict[str, str], *remarks: str) -> Outcome:
    short = [{name: item for name, item in source.items() if item not in (None, "train", 1)} for source in found]
    values: dict[str, Any] = {key: short[0] if len(short) == 1 else short}
    renamed = {ours: name for ours, name in columns.items() if name not in (ours, "messages", "conversations")}
    return Outcome({**values, **({"data.columns": renamed} if renamed else {})}, "; ".join(dict.fromkeys(remarks)))


def axolotl_data(key: str, value: Any, theirs: Theirs) -> Outcome:
    """Sources with a type, which here is read off the columns, and names of fields."""
    found, columns, remarks = [], {}, ["data.format=auto reads rows by their columns"]
    for item in value if isinstance(value, list) else [value]:
        item = item if isinstance(item, dict) else {"path": item}
        weight = 1 / item["shards"] if item.get("shards") else None
        more = {"subset": item.get("name"), "split": item.get("split"), "weight": weight}
        found += [{"path": str(path), **more} for path in names(item.get("data_files") or item["path"])]
        kind = item.get("type")
        fields = kind if isinstance(kind, dict) else item
        role = (item.get("message_property_mappings") or {}).get("role", item.get("message_field_role"))
        named = {at: fields.get(f"field_{at}") for at in _FIELDS}
        named["conversations" if role == "from" else "messages"] = item.get("field_messages")
        named["text"] = item.get("field", item.get("text_column"))
        columns |= {ours: name for ours, name in named.items() if name}
        if isinstance(kind, dict) and kind.get("format"):
            remarks += ["the chat template renders the prompt, not type.format"]
        elif not isinstance(kind, dict) and not _TYPES.fullmatch(str(kind)):
            remarks += [f"type {kind} is not known: see packtrain inspect"]
        remarks += [f"{name} has no counterpart" for name in item if not _READ.fullmatch(name)]
    return _sources(key, found, columns, *remarks)


def llamafactory_data(key: str, value: Any, theirs: Theirs) -> Outcome:
    """Names in data/dataset_info.json, which has path and columns."""
    folder = str(theirs.get("dataset_dir") or "data").removeprefix("REMOTE:")
    known, most = theirs.file.settings_of(f"{folder}/dataset_info.json"), theirs.get("max_samples")
    found, columns, remarks = [], {}, []
    for name in map(str.strip, names(value)):
        entry = known.get(name) or {}
        named = {_COLUMNS.get(ours, ours): column for ours, column in (entry.get("columns") or {}).items()}
        if {"images", "videos", "audios"} & {*named}:
            refuse("pictures or sound", theirs.file)
        columns |= named
        hub = entry.get("hf_hub_url") or (name if "/" in name else None)
        file = f"{folder}/{entry.get('file_name', f'{name}.json')}"
        split = entry.get("split") or "train"
        first = f"{split}[:{whole(most)}]" if hub and most else split
        found.append(
            {"path": str(hub or theirs.file.find(file) or file), "subset": entry.get("subset"), "split": first}
        )
        if not entry and not hub:
            remarks += [f"{name} is in no {folder}/dataset_info.json near this config: give its path"]
    return _sources(key, found, columns, *remarks)


def most_rows(value: Any, theirs: Theirs) -> Outcome:
    """A limit of rows, which only hub data sets have."""
    if "/" in str(theirs.get("dataset")):
        return Outcome(became="data.train", why="the first rows of hub data sets")
    return Outcome(why="all rows of files are trained on; the weight of a source takes a share", kind="no counterpart")


def swift_data(key: str, value: Any, theirs: Theirs) -> Outcome:
    """ID:SUBSET#ROWS, looked up on another hub by default."""
    found, remarks = [], ["names are those of the Hugging Face hub"]
    for text in map(str, names(value)):
        if _PICTURES.search(text):
            refuse("pictures or sound", theirs.file)
        path, _, rows = re.sub("^(hf|ms|HF|MS)::", "", text).partition("#")
        local = path.lower().endswith(DATA_SUFFIXES) or theirs.file.find(path)
        path, _, subset = (path, "", "") if local else path.partition(":")
        split = f"train[:{rows}]" if rows and not local else None
        found.append({"path": path, "subset": subset or None, "split": split})
        remarks += ["#N takes N rows by chance; ours the first N of a hub data set, all of a file"] if rows else []
    return _sources(key, found, {}, *remarks)


def tokenised(key: str, value: Any, theirs: Theirs) -> Outcome:
    """Documents that were tokenised before."""
    found = [{"path": str(path)} for path in names(value)]
    return _sources(key, found, {}, "name the documents instead of what was made of them")


def trl_data(value: Any, theirs: Theirs) -> Outcome:
    """A hub data set and its splits."""
    source = {"path": str(value), "subset": theirs.get("dataset_config"), "split": theirs.get("dataset_train_split")}
    chosen = theirs.verb != "sft" or theirs.get("assistant_only_loss", "completion_only_loss") is not None
    train = _sources("data.train", [source], {}, *([] if chosen else [_EVERY_TURN]))
    if is_off(theirs.get("eval_strategy", "evaluation_strategy")):
        return train
    held_out = _sources("data.eval", [{**source, "split": theirs.get("dataset_test_split") or "test"}], {})
    return Outcome({**train.values, **held_out.values}, train.why)


def mixture(value: Any, theirs: Theirs) -> Outcome:
    """Several data sets with shares, as a list of settings or as name: share."""
    settings = {"datasets": value} if isinstance(value, list) else dict(value)
    split = names(theirs.get("dataset_splits") or "train")[0]
    found = []
    for item in settings.get("datasets", [{"id": name, "weight": at, "split": split} for name, at in settings.items()]):
        path = str(item.get("id") or item.get("path") or item["data_files"])
        source = {"path": path, "subset": item.get("config", item.get("name"))}
        found.append({**source, "split": item.get("split"), "weight": item.get("weight", item.get("fraction"))})
    size = number(settings.get("test_split_size") or 0)
    guess = [f"test_split_size is {size:g} rows, ours a share: 0.01 is a guess"] if size >= 1 else []
    train = _sources("data.train", found, {}, *guess)
    return Outcome({**train.values, "data.eval": size if size < 1 else 0.01} if size else train.values, train.why)


def own_name(value: Any, theirs: Theirs) -> Outcome:
    """A name that is written into the rows of one data set."""
    named = "self-cognition" in str(theirs.get("dataset"))
    why = "write the name into the rows of self-cognition" if named else "only the data set self-cognition has it"
    return Outcome(why=why, kind="no counterpart" if named else "not needed")


def verb_of(origin: str, file: Foreign) -> tuple[ObjectiveKind, str]:
    """Our verb, and how it was found if that is a guess. Raises UserError for a method that packtrain does not have."""
    values, how = file.values, ""
    if origin == "axolotl":
        method = "reward" if values.get("reward_model") else values.get("rl") or "sft"
    elif origin == "llamafactory":
        apart = {"export_dir": "export", "infer_backend": "inference", "do_predict": "prediction"}
        other = next((name for key, name in apart.items() if key in values and not values.get("do_train")), None)
        loss = values.get("pref_loss")
        method = other or (loss if loss in ("orpo", "simpo") else values.get("stage", "sft"))
    elif origin == "ms-swift":
        called = re.split(r"[ /]", file.program.removesuffix(".py"))[-1]
        task = values.get("task_type") or "causal_lm"
        method = values.get("rlhf_type") or {"rlhf": "dpo", "pt": "sft", "main": "sft", "": "sft"}.get(called, called)
        method = method if task == "causal_lm" else task
        if file.program.startswith("megatron") or {"tensor_model_parallel_size", "train_iters"} & {*values}:
            method = "Megatron"
    else:
        words = file.program.split("/")[-1] or "/".join(file.path.absolute().parts[-4:]).lower()
        if named := _METHODS.search(words):
            method, how = named[1], "" if file.program else "by the names of file and folders"
        else:
            method = next((verb for key, verb in _BY_KEYS.items() if key in values), "sft")
            how = "by its keys; else set objective.kind"
        method = "pictures or sound" if "vlm" in words else method
    return _OURS.get(str(method)) or refuse(method, file), how


def defaults_of(origin: str, file: Foreign, verb: str) -> dict[str, Any]:
    """Defaults that depend on other settings."""
    values = file.values
    if origin == "axolotl":
        steps = count(values.get("batch_size"), 1) // count(values.get("micro_batch_size"), 1)
        rates = {} if {"warmup_steps", "warmup_ratio"} & {*values} else {"warmup_ratio": 0.03}
        return {"gradient_accumulation_steps": max(steps, 1), **rates}
    if origin == "llamafactory":
        lora = {"lora_rank": 8, "lora_alpha": 2 * count(values.get("lora_rank"), 8), "lora_target": "all"}
        packing = {"packing": values.get("stage") == "pt"}
        return {**packing, **(lora if values.get("finetuning_type", "lora") == "lora" else {})}
    if origin == "ms-swift":
        tuner = next((values[key] for key in ("tuner_type", "train_type", "sft_type") if key in values), "lora")
        accumulation = math.ceil(16 / count(values.get("per_device_train_batch_size"), 1) / (file.devices or 1))
        lora = {
            "lora_rank": 8,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "target_modules": "all-linear",
            "learning_rate": 1e-4,
        }
        rest = {"gradient_accumulation_steps": accumulation, "eval_steps": values.get("save_steps", 500)}
        return {**rest, **(lora if tuner == "lora" else {"learning_rate": 1e-5})}
    lora = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05} if not is_off(values.get("use_peft")) else {}
    cut = {} if "max_seq_length" in values else {"max_length": 1024}
    return {"learning_rate": {"sft": 2e-5, "reward": 1e-4}.get(verb, 1e-6), **cut, **lora}
