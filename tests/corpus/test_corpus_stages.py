"""Hostile tokenizers, models, adapters, optimizers and trackers: what libraries and code of others raise while they are loaded."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.corpus.case import Case, each_of
from tests.corpus.tiny_run import LLAMA, changed, cut, gone, put, trains


def from_here() -> None:
    """Packages of the current folder count."""
    sys.path.insert(0, os.getcwd())


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abcd\nsize 123456\n"
NOT_OBJECTS = {"null": "null", "a list": "[1]", "an LFS pointer": LFS, "nested 100000 deep": "[" * 100_000}
READ = {"model/config.json": "config.json", "model/tokenizer.json": "tokenizer"}
READ |= {"model/tokenizer_config.json": "tokenizer", "adapters/adapter_config.json": "adapter_config.json"}


FILES_OF_OTHERS = [
    trains(f"{path} is {name}", {path: content}, adapters=path.startswith("adapters"), says=(said,))
    for path, said in READ.items()
    for name, content in NOT_OBJECTS.items()
]


def with_config(name: str, **values: Any) -> Case:
    return trains(f"config.json, {name}", {"model/config.json": changed(**values)}, says=("model",))


def with_tokenizer(name: str, **values: Any) -> Case:
    return trains(f"tokenizer_config.json, {name}", {"model/tokenizer_config.json": changed(**values)}, says=("model",))


def with_template(name: str, text: Any, *says: str, **more: Any) -> Case:
    """The tokenizer's own chat template, in the file where text is, else in its config."""
    files = {"model/chat_template.jinja": gone, "model/tokenizer_config.json": changed(chat_template=text)}
    return trains(f"chat template, {name}", files, says=says, **more)


CLASS = "from transformers import LlamaForCausalLM, LlamaConfig\nimport os, sys\n"
MODEL = f"{CLASS}class Mine(LlamaForCausalLM):\n    def __init__(self, *a, **k):\n        super().__init__(*a, **k)\n        "
FORWARD = f"{CLASS}class Mine(LlamaForCausalLM):\n    def forward(self, *a, **k):\n        "
SAVING = f"{CLASS}class Mine(LlamaForCausalLM):\n    def save_pretrained(self, *a, **k):\n        "


def with_code(name: str, code: str, expect: tuple[int, ...] = (2,), *says: str) -> Case:
    """A model with code of its own."""
    files = {"model/config.json": changed(auto_map={"AutoModelForCausalLM": "mine.Mine"}), "model/mine.py": code}
    return trains(f"code of a model, {name}", files, "model.trust_remote_code=true", expect=expect, says=says)


def with_code_of_a_tokenizer(name: str, code: str) -> Case:
    own = changed(auto_map={"AutoTokenizer": ["tok.T", "tok.T"]}, tokenizer_class="T")
    files = {"model/tokenizer_config.json": own, "model/tok.py": code}
    return trains(f"code of a tokenizer, {name}", files, "model.trust_remote_code=true", says=("model.path",))


def with_adapters(name: str, **values: Any) -> Case:
    files = {"adapters/adapter_config.json": changed(**values)}
    return trains(f"adapters, {name}", files, adapters=True, says=("adapter",))


def lora(name: str, *says: str, **keys: Any) -> Case:
    return trains(f"new adapters, {name}", groups={"peft": {"kind": "lora", **keys}}, says=("peft", *says))


def new_model(name: str, config: dict[str, Any], *says: str, **groups: Any) -> Case:
    model = {"path": None, "init": "random", "tokenizer": "quickstart", "config": {"model_type": "llama", **config}}
    return trains(f"a new model, {name}", groups={"model": model, **groups}, says=says)


def schedule(kind: str, **options: Any) -> Case:
    keys = {"schedule": kind, "schedule_options": options}
    return trains(f"schedule, {kind} with {json.dumps(options)}", groups={"optim": keys}, says=("schedule",))


def with_reference(name: str, file: str, content: Any) -> Case:
    """Preference training with other adapters as the reference."""
    row = {"prompt": "a", "chosen": "b c", "rejected": "d"}
    files = {"reference": put("adapters"), f"reference/{file}": content, "data.jsonl": json.dumps(row) + "\n"}
    kind = {"kind": "dpo", "reference": "reference"}
    return trains(f"reference, {name}", files, verb="dpo", adapters=True, groups={"objective": kind})


WEIGHTS, ADAPTERS = "model/model.safetensors", "adapters/adapter_model.safetensors"
CASES = [
    *FILES_OF_OTHERS,
    with_config("another kind of model", model_type="bert"),
    trains("config.json, architectures that are a number", {"model/config.json": changed(architectures=5)}, expect=(0,)),
    with_config("a size of text", hidden_size="big"),
    with_config("no heads", num_attention_heads=0),
    with_config("an unheard of activation", hidden_act="nope"),
    with_config("padding beyond the vocabulary", pad_token_id=99_999),
    with_tokenizer("a class that is a number", tokenizer_class=5),
    with_tokenizer("added tokens of no number", added_tokens_decoder={"x": {"content": "a"}}),
    trains("tokenizer.json of a wrong schema", {"model/tokenizer.json": '{"model": {"type": "BPE", "vocab": 5}}'}),
    with_template("a number", 5, "chat template"),
    with_template("a text of 100 GB", "{{ 'a' * 99999999999 }}", "MemoryError"),
    with_template("calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    with_template("says nothing of the messages", "hello"),
    trains("a template file in latin-1", {"t.jinja": b"caf\xe9"}, "data.chat_template=t.jinja"),
    trains("weights that are quantised", {"model/config.json": changed(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})}, says=("quantised by bitsandbytes",)),
    trains("an optimizer whose package does not work", {"bitsandbytes.py": "raise ImportError('libcudart is not there')"}, "optim.name=adamw_8bit", begin=from_here, says=("is installed, but does not work",), writes=("__pycache__*",)),
    trains("weights that are a pointer of LFS", {WEIGHTS: LFS}, says=("git lfs pull",)),
    trains("weights cut", {WEIGHTS: cut(1000)}),
    trains("no weights", {WEIGHTS: gone}),
    trains("an index without its parts", {WEIGHTS: gone, f"{WEIGHTS}.index.json": '{"weight_map": {"a": "b"}}'}),
    trains("a model that is a GGUF file of noise", {"m.gguf": b"noise"}, "model.path=m.gguf"),
    trains("a model that is an empty folder", {"empty": lambda at: at.mkdir()}, "model.path=empty"),
    with_code("raises", f"{MODEL}raise ValueError('mine is broken')", (2,), "mine is broken"),
    with_code("exit(0) at its import", "import sys; sys.exit(0)", (2,), "model.path"),
    with_code("a forward that raises", f"{FORWARD}raise ValueError('no forward')", (2, 3), "no forward"),
    with_code("saving that raises", f"{SAVING}raise ValueError('no saving')", (2,), "no saving"),
    with_code_of_a_tokenizer("exit(0)", "import sys; sys.exit(0)"),
    with_adapters("a rank of text", r="four"),
    with_adapters("an unheard of kind", peft_type="NOPE"),
    with_adapters("a base that is nowhere", base_model_name_or_path="/nowhere"),
    trains("adapters cut", {ADAPTERS: cut(500)}, adapters=True),
    trains("adapters gone", {ADAPTERS: gone}, adapters=True),
    trains("adapters of a model", {ADAPTERS: lambda at: at.write_bytes((at.parent.parent / WEIGHTS).read_bytes())}, adapters=True),
    with_reference("a rank of text", "adapter_config.json", changed(r="four")),
    with_reference("cut", "adapter_model.safetensors", cut(500)),
    lora("a broken expression", target_modules="("),
    lora("one name of nothing", "Did you mean q_proj", target_modules=["q_porj", "v_proj"]),
    lora("nothing saved in full", "modules_to_save", modules_to_save=["nothing"]),
    new_model("a key that its type does not have", {**LLAMA, "hidden_sise": 8}, "model.config.hidden_sise", "Did you mean hidden_size"),
    new_model("a type that nobody has", {"model_type": "lama"}, "model.config.model_type", "Did you mean llama"),
    new_model("a type that is no causal language model", {"model_type": "t5"}, "model.config", "docs/architectures.md"),
    new_model("the id of a token is true", {**LLAMA, "pad_token_id": True}, "pad_token_id"),
    new_model("a key of no config in resume_despite", LLAMA, "rope_teta", trainer={"resume_despite": ["model.config.rope_teta"]}),
    schedule("cosine_with_min_lr", min_lr_rate=5),
    schedule("warmup_stable_decay", num_decay_steps=-5),
    trains(
        "not hostile: keys of a new model that are no fields of its type",
        groups={"model": {"path": None, "init": "random", "tokenizer": "quickstart", "config": {
            **LLAMA, "model_type": "qwen3_moe", "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 8, "head_dim": 4, "rope_theta": 5e5,
        }}},
        expect=(0,),
    ),
]  # fmt: skip
test_case = each_of(CASES, one_in=4)
