"""Settings that each trainer words differently: data sets, method, computed defaults."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path

from packtrain.config.schema import LISTED, DataSource, name_sources
from packtrain.convert.counterparts import (
    DIFFERS,
    Outcome,
    Theirs,
    count,
    is_off,
    listed,
    names,
    number,
    refuse,
    whole,
)
from packtrain.convert.foreign_file import Foreign, Settings, Value
from packtrain.convert.foreign_pictures import PICTURES, VIDEOS, with_towers
from packtrain.data.formats.messages import SPEAKERS
from packtrain.errors import UserError
from packtrain.objectives.spec import OBJECTIVES

_LARGE = 2**26
"""Size in bytes: rows of files this large are not counted."""

_READ = re.compile(
    r"path|type|name|split|data_files|ds_type|field(_(?!human|model|thinking)\w+)?|text_column|trust_remote_code|shards"
)
"""Settings of axolotl's data sets that are read."""
_AS_HERE: dict[str, tuple[Value, ...]] = {
    "roles_to_train": (["assistant"],),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "chat_template": ("tokenizer_default",),
    "field_thinking": ("reasoning_content", "reasoning", "thinking"),
    "message_field_training": ("weight", "loss_weight", "train", "loss"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
}
"""Settings of axolotl's data sets that change nothing with these values."""
_ON = ("roles_to_train", "train_on_eos", "train_on_eot")
"""Settings of axolotl's data sets that are on by default."""
_OWN_TEXTS = "has prompt texts of its own there (such as ### Instruction), here they are the chat template's: see packtrain inspect"
_PLAIN_TYPE = re.compile(r"(bradley_terry\.)?chat_template(\.\w+)?|completion|pretrain|sharegpt|None")
_OWN_PROMPTS = f"{DIFFERS}code of ms-swift may write prompts of such rows there: see packtrain inspect"
_FIELDS = ("chosen", "rejected", "instruction", "output", "system", "input", "prompt", "completion", "label", "tools")
_EVERY_TURN = f"{DIFFERS}without assistant_only_loss every turn of conversations is trained there, the assistant's here: data.loss_on=all"
_SHARE = "a fraction is a share of the mixture there, and of the source here: set samples in its place"
_OURS: dict[str, str] = {"pt": "sft", "pretrain": "sft", "ipo": "dpo", "rm": "reward"}
_BY_KEYS = {
    "desirable_weight": "kto",
    "center_rewards_coefficient": "reward",
    "beta": "dpo",
    "max_prompt_length": "dpo",
}
_METHODS = re.compile(
    r"(?<![a-z])(orpo|grpo|ppo|cpo|bco|gkd|rloo|nash|xpo|online_dpo|dpo_online|sdpo|prm|distillation|diffusion|dpo|kto|reward|sft)"
)


def _sources(key: str, found: list[Settings], theirs: Theirs, *remarks: str) -> Outcome:
    short = [{name: item for name, item in source.items() if item not in (None, "train", 1, {})} for source in found]
    values: Settings = {key: short[0] if len(short) == 1 else short}
    shares = [number(share) for share in names(theirs.get("interleave_probs", "interleave_prob") or [])]
    if key == "data.train" and _by_steps(theirs) and len(shares) == len(found) > 1 and not theirs.get("cached_dataset"):
        labels = name_sources([DataSource(path=source["path"].rpartition("#")[2]) for source in found])
        values[key] = [{"name": label, **source} for label, source in zip(labels, short, strict=True)]
        values["data.stages"] = [{"weights": dict(zip(labels, shares, strict=True))}]
    marked = sorted(dict.fromkeys(remarks), key=lambda remark: not remark.startswith(DIFFERS))
    return Outcome(values, "; ".join(marked))


def _by_steps(theirs: Theirs) -> bool:
    """Return whether the run is a fixed number of steps of documents. Streams and shares need it."""
    packed = not is_off(theirs.get("packing", "sample_packing") or 0)
    return number(theirs.get("max_steps") or -1) > 0 and not packed and theirs.verb != "kto"


def axolotl_data(key: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert sources with field names. Their type is read off the columns here."""
    found, remarks = [], ["data.format=auto reads rows by their columns"]
    for item in listed(value):
        item = item if isinstance(item, dict) else {"path": item}
        weight = 1 / item["shards"] if item.get("shards") else None
        kind = item.get("type")
        fields = kind if isinstance(kind, dict) else item
        role = (item.get("message_property_mappings") or {}).get("role", item.get("message_field_role"))
        named = {at: fields.get(f"field_{at}") for at in _FIELDS}
        named["conversations" if role == "from" else "messages"] = item.get("field_messages")
        named["text"] = item.get("field", item.get("text_column"))
        if theirs.verb == "dpo" and re.fullmatch(r"chat_template(\.default)?", str(kind)):
            named["prompt"] = named.pop("messages", None) or "messages"  # it does not contain the answers
        columns = {ours: name for ours, name in named.items() if name not in (None, ours, "conversations")}
        more = {"subset": item.get("name"), "split": item.get("split"), "weight": weight, "columns": columns}
        found += [{"path": str(path), **more} for path in names(item.get("data_files") or item["path"])]
        as_they_are = isinstance(kind, dict) and theirs.verb != "sft" and "format" not in str([*kind])
        plain = as_they_are or _PLAIN_TYPE.fullmatch(str(kind))
        marked = [] if plain else [f"{'type' if isinstance(kind, dict) else kind} {_OWN_TEXTS}"]
        marked += [f"{name} has no counterpart" for name, given in item.items() if not _means_the_same(name, given)]
        marked += ["the first rows of a shard are taken there"] if weight else []
        remarks += [DIFFERS + what for what in marked]
    outcome = _sources(key, found, theirs, *remarks)
    kinds = {str(item.get("type")) for item in value} if isinstance(value, list) else {}
    if kinds != {"alpaca"} or theirs.get("chat_template", "chat_template_jinja"):
        return outcome
    why = f"{DIFFERS}rows with an input have it under '### Input:' there, and behind the instruction here"
    return Outcome({**outcome.values, "data.chat_template": theirs.templates["type alpaca"]}, why)


def axolotl_train(name: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert the sources of `name`. A pretraining_dataset replaces datasets there, and packed streams read one source."""
    if name == "datasets" and theirs.get("pretraining_dataset"):
        return Outcome(why="pretraining_dataset is trained on in its place", kind="not needed")
    is_one = name != "datasets" or not is_off(theirs.get("streaming") and theirs.get("sample_packing"))
    done = axolotl_data("data.train", listed(value)[:1] if is_one else value, theirs)
    why = "of several sources the first alone is read there; " if is_one and len(listed(value)) > 1 else ""
    return Outcome(done.values, why + done.why)


def _means_the_same(name: str, value: Value) -> bool:
    """Return whether a setting of axolotl's data set is read, or changes nothing."""
    if name == "roles":
        return all(SPEAKERS.get(str(said)) == role for role, given in (value or {}).items() for said in given)
    off = value is None or (is_off(value) and name not in _ON)
    return bool(_READ.fullmatch(name)) or value in _AS_HERE.get(name, ()) or off


def llamafactory_data(key: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert names in dataset_info.json, at most max_samples rows each."""
    folder, info = _find_info(theirs.file)
    most, known, found, remarks = theirs.get("max_samples"), theirs.file.settings_of(info), [], []
    for name in names(value):
        entry = known.get(name) or {}
        if {"videos", "audios"} & {*_columns_of(known, name)}:
            refuse("video or sound", theirs.file)
        listed = f"{LISTED}{os.path.relpath(info)}#{name}" if info and entry else f"{LISTED}{name}"
        file = info.parent / str(entry["file_name"]) if info and "file_name" in entry else None
        limit = whole(most) if most and not (file and _has_fewer(file, whole(most))) else None
        found.append({"path": listed if entry or "/" not in name else name, "samples": limit})
        remarks += [] if entry or "/" in name else [f"{name} is in no {folder}/dataset_info.json near this config"]
    return _sources(key, found, theirs, *remarks)


def _find_info(file: Foreign) -> tuple[str, Path | None]:
    """Return the name of LLaMA-Factory's data folder, and its dataset_info.json if it is there."""
    folder = str(file.values.get("dataset_dir") or "data").removeprefix("REMOTE:")
    return folder, file.find(f"{folder}/dataset_info.json")


def _columns_of(known: Settings, name: Value) -> Settings:
    return (known.get(name) or {}).get("columns") or {}


def at_most(value: Value, theirs: Theirs) -> Outcome:
    """Convert a limit of rows: the first rows of each source. A source with fewer rows gives all."""
    sources = [
        llamafactory_data(key, theirs.get(key), theirs).values[key]
        for key in ("dataset", "eval_dataset")
        if theirs.get(key)
    ]
    limited = "samples" in str(sources)
    why = f"{DIFFERS}the first {value} rows of each source there, or fewer if it has no more; {value} by chance here"
    return Outcome(why=why if limited else "no source has more", became="data.train")


def _has_fewer(file: Path, rows: int) -> bool:
    """Return whether such a file or folder exists and has fewer rows."""
    from packtrain.data.sources.locate import locate

    with suppress(UserError):
        source = locate(DataSource(path=str(file)), "train", 0, "sft", "document") if file.exists() else None
        return source is not None and source.size < _LARGE and sum(map(len, source.chunks())) < rows
    return False


_SWIFT_NAMES = {
    **dict.fromkeys(("query", "prompt", "question", "problem"), "instruction"),
    **dict.fromkeys(("response", "answer", "answers", "answer_key", "target", "targets", "solution"), "output"),
    **dict.fromkeys(("text", "completion", "content"), "output"),
    **dict.fromkeys(("rejected_response", "rejected_messages"), "rejected"),
    "system_prompt": "system",
    "conversation": "conversations",
    "image": "images",
}
"""Names in ms-swift's --columns (its ResponsePreprocessor reads them), with our columns."""


def swift_data(key: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert ID:SUBSET#ROWS, by default from another hub. The rows are drawn at random, repeatedly if there are fewer."""
    found, remarks = [], ["names are those of the Hugging Face hub"]
    named = {} if isinstance(value, list) else dict(theirs.get("columns") or {})
    columns = {_SWIFT_NAMES.get(ours, ours): name for name, ours in named.items()}
    streams = not is_off(theirs.get("streaming") or 0) and _by_steps(theirs)
    for text in map(str, names(value)):
        if VIDEOS.search(text):
            refuse("video or sound", theirs.file)
        remarks += [_OWN_PROMPTS] if PICTURES.search(text) else []
        path, _, rows = re.sub("^(hf|ms|HF|MS)::", "", text).partition("#")
        found.append({"path": path, "samples": whole(rows) if rows and not streams else None, "columns": columns})
        remarks += (
            [f"{DIFFERS}the first {rows} rows there, drawn here"]
            if rows and is_off(theirs.get("dataset_shuffle"))
            else []
        )
        remarks += ["a stream has all rows"] if rows and streams else []
    return _sources(key, found, theirs, *remarks)


def tokenised(key: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert documents that are tokenised already."""
    parts = [str(path).partition("#") for path in names(value)]
    found = [{"path": path, "samples": whole(rows) if rows else None} for path, _, rows in parts]
    return _sources(key, found, theirs, "name the documents instead of what was made of them")


def trl_data(value: Value, theirs: Theirs) -> Outcome:
    """Convert a hub data set and its splits."""
    if theirs.get("datasets", "dataset_mixture", "dataset_mixer"):
        return Outcome(why="the mixture is trained on in its place", kind="not needed")
    source = {"path": str(value), "subset": theirs.get("dataset_config"), "split": theirs.get("dataset_train_split")}
    train = with_towers(_sources("data.train", [source], theirs, *_turns(theirs)), theirs)
    if is_off(theirs.get("eval_strategy", "evaluation_strategy")):
        return train
    held_out = _sources("data.eval", [{**source, "split": theirs.get("dataset_test_split") or "test"}], theirs)
    return Outcome({**train.values, **held_out.values}, train.why)


def _turns(theirs: Theirs) -> list[str]:
    chosen = theirs.verb != "sft" or theirs.get("assistant_only_loss", "completion_only_loss") is not None
    return [] if chosen else [_EVERY_TURN]


def mixture(value: Value, theirs: Theirs) -> Outcome:
    """Convert several data sets with shares, from a list of settings or name: share."""
    settings = {"datasets": value} if isinstance(value, list) else dict(value)
    split = names(theirs.get("dataset_splits") or "train")[0]
    found, guess = [], _turns(theirs)
    for item in settings.get("datasets", [{"id": name, "weight": at, "split": split} for name, at in settings.items()]):
        path = str(item.get("id") or item.get("path") or "")
        builds = bool(item.get("data_files")) and "/" not in path  # `json` is no data set
        more = {"subset": item.get("config", item.get("name")), "split": item.get("split")}
        more["weight"] = item.get("weight", item.get("fraction"))
        files = item.get("data_files")
        if isinstance(files, dict):  # by split
            files = files.get(item.get("split") or "train") or next(iter(files.values()))
        found += [{"path": str(part), **more} for part in (names(files) if builds else [path])]
        lost = [_SHARE] if item.get("fraction") else []
        unread = ("data_dir",) if builds else ("data_dir", "data_files")
        lost += [f"{name} has no counterpart" for name in unread if item.get(name)]
        lost += (
            [f"columns other than {', '.join(names(item['columns']))} are dropped there, and read here"]
            if item.get("columns")
            else []
        )
        guess += [DIFFERS + what for what in lost]
    size = number(settings.get("test_split_size", theirs.get("test_split_size")) or 0)
    guess += [f"test_split_size is {size:g} rows, ours a share: 0.01 is a guess"] if size >= 1 else []
    train = with_towers(_sources("data.train", found, theirs, *guess), theirs)
    return Outcome({**train.values, "data.eval": size if size < 1 else 0.01} if size else train.values, train.why)


def verb_of(origin: str, file: Foreign) -> tuple[str, str]:
    """Return our verb, and the way of guessing it if it is a guess. Raises UserError for a method that packtrain does not have."""
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
        method = values.get("rlhf_type") or {"rlhf": "dpo", "main": "sft", "": "sft"}.get(called, called)
        if (task := values.get("task_type") or "causal_lm") != "causal_lm":
            method = task
        if file.program.startswith("megatron") or {"tensor_model_parallel_size", "train_iters"} & {*values}:
            method = "Megatron"
    else:
        words = file.program.split("/")[-1] or "/".join(file.path.absolute().parts[-4:]).lower()
        method = next((verb for key, verb in _BY_KEYS.items() if key in values), "sft")
        how = "by its keys; else set objective.kind"
        if named := _METHODS.search(words):
            method, how = named[1], "" if file.program else "by the names of file and folders"
    method = _OURS.get(str(method), str(method))
    return method if method in OBJECTIVES.all() else refuse(method, file), how


def defaults_of(origin: str, file: Foreign, devices: int) -> Settings:
    """Return defaults that are computed from other settings."""
    values = file.values
    micro = count(values.get("per_device_train_batch_size"), 1)
    if origin == "axolotl":
        steps = count(values.get("batch_size"), 1) // count(values.get("micro_batch_size"), 1)
        return {"gradient_accumulation_steps": max(steps, 1)}
    if origin == "llamafactory":
        known = file.settings_of(_find_info(file)[1])
        seen = any("images" in _columns_of(known, name) for name in names(values.get("dataset") or []))
        rank = {"lora_alpha": 2 * count(values.get("lora_rank"), 8)}
        most = {"image_max_pixels": 768 * 768} if seen else {}
        return {**most, **(rank if values.get("finetuning_type", "lora") == "lora" else {})}
    if origin != "ms-swift":
        return {}
    rest = {"gradient_accumulation_steps": math.ceil(16 / micro / devices), "eval_steps": values.get("save_steps", 500)}
    config = file.settings_of(f"{values.get('model')}/config.json")
    longest = config.get("text_config", config).get("max_position_embeddings")
    return {**rest, **({"max_length": longest} if longest else {})}
