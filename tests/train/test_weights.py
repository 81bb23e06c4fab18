"""Weights of a model's files that training does not take: carried into final/ or refused; those that text never reaches are frozen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from here import run_here
from running import config_on, train
from safetensors.torch import load_file, save_file
from tiny_models import Weights, bring_code, save_model, tiny_model, with_files
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from packtrain.config.schema import Model, Peft
from packtrain.data.sources.quickstart import tokenizer
from packtrain.errors import UserError
from packtrain.model.load import load_model
from packtrain.model.weights import carry
from packtrain.serve.export import merge

MOE: dict[str, Any] = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
MOE |= {"topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}


def nextn(weights: Weights) -> Weights:
    """With a third layer, for the token after the next, in bfloat16: as glm4_moe and deepseek_v3 store it."""
    layer = {name: one for name, one in weights.items() if name.startswith("model.layers.1.")}
    more = {name.replace(".1.", ".2.", 1): one.bfloat16() for name, one in layer.items()}
    return weights | more | {"model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16()}


def mtp(weights: Weights) -> Weights:
    """With a module of its own, as qwen3_next stores it; the library is told to pass over it."""
    return weights | {f"mtp.layers.0.{name}.weight": torch.randn(8, 8) for name in ("fc", "norm")}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(save_model(tmp_path_factory.mktemp("glm") / "base", "glm4_moe", **MOE), nextn)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(save_model(tmp_path_factory.mktemp("llama") / "base"), mtp, num_nextn_predict_layers=1)


def all_weights(folder: Path) -> tuple[Weights, dict[str, str]]:
    """The weights of a folder, by its files and by its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    assert index["metadata"]["total_size"] == sum(one.numel() * one.itemsize for one in held.values())
    return held, index["weight_map"]


def same_as_they_were(final: Path, base: Path, own: str, number: int) -> None:
    held, index = all_weights(final)
    was = {name: one for name, one in load_file(base / "model.safetensors").items() if own in name}
    assert held.keys() == index.keys() == load_file(base / "model.safetensors").keys() and len(was) == number
    for name, one in was.items():
        assert held[name].dtype == one.dtype and torch.equal(held[name], one), name
    AutoModelForCausalLM.from_pretrained(final)
    assert AutoTokenizer.from_pretrained(final).chat_template


def test_layers_for_more_tokens_are_in_final_as_they_were(glm: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, config_on(glm, tmp_path, trainer={"max_steps": 2}))
    number, total = 24, len(load_file(glm / "model.safetensors"))
    assert f"{number} of {total} weights are not the model's: model.layers.2.* ({number})" in run.log
    same_as_they_were(run.folder / "final", glm, ".layers.2.", number)
    assert json.loads((run.folder / "final/config.json").read_text())["num_nextn_predict_layers"] == 1


def test_modules_that_the_library_passes_over_in_silence_are_in_final_and_a_merged_model(
    llama: Path, tmp_path: Path
) -> None:
    config = {**config_on(llama, tmp_path, trainer={"max_steps": 2}), "peft": {"kind": "lora", "merge": True}}
    run = run_here(tmp_path, config)
    assert "2 of 23 weights are not the model's: mtp.* (2)" in run.log
    same_as_they_were(run.folder / "final-merged", llama, "mtp.", 2)
    assert not (run.folder / "final/model.safetensors.index.json").exists()
    merge(str(run.folder / "final"), tmp_path / "merged", None)
    same_as_they_were(tmp_path / "merged", llama, "mtp.", 2)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=pytest.mark.exhaustive)])
def test_they_are_there_where_no_process_has_the_whole_model(llama: Path, tmp_path: Path, strategy: str) -> None:
    run = train(tmp_path, config_on(llama, tmp_path, trainer={"max_steps": 2}), f"strategy={strategy}", processes=2)
    same_as_they_were(run.folder / "final", llama, "mtp.", 2)


def load(model: Path, **config: Any) -> Any:
    return load_model(Model(path=str(model), config=config), Peft(), tokenizer(), seed=0)


@pytest.mark.parametrize(
    ("place", "biased", "key"), [("self_attn", "q k v o", "attention_bias"), ("mlp", "gate up down", "mlp_bias")]
)
def test_weights_that_trained_layers_lack_are_an_error_that_names_the_key(
    place: str, biased: str, key: str, tmp_path: Path
) -> None:
    kinds = [f"{place}.{one}_proj" for one in biased.split()]

    def with_biases(weights: Weights) -> Weights:
        names = [f"model.layers.{at}.{kind}" for at in range(2) for kind in kinds]
        return weights | {f"{name}.bias": torch.ones(len(weights[f"{name}.weight"])) for name in names}

    base = with_files(save_model(tmp_path / "base"), with_biases)
    with pytest.raises(UserError) as refused:
        load(base)
    (problem,) = refused.value.problems
    assert f"{2 * len(kinds)} of {21 + 2 * len(kinds)} weights" in problem.what
    assert f"model.config.{key}=true" in problem.fix
    taken = load(base, **{key: True})
    assert taken.state_dict()[f"model.layers.1.{kinds[0]}.bias"].tolist()[0] == 1.0


def test_a_switch_that_needs_more_weights_than_there_are_is_no_advice(tmp_path: Path) -> None:
    def with_one_bias(weights: Weights) -> Weights:
        return weights | {
            "model.layers.0.mlp.up_proj.bias": torch.ones(len(weights["model.layers.0.mlp.up_proj.weight"]))
        }

    with pytest.raises(UserError) as refused:
        load(with_files(save_model(tmp_path / "base"), with_one_bias))
    assert "mlp_bias" not in refused.value.problems[0].fix and "take these weights out" in refused.value.problems[0].fix


OLD = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 16, 8),
    "model.layers.0.self_attn.masked_bias": torch.tensor(-1e4),
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 16, 16).tril(),
    "model.layers.0.self_attn.mask": torch.ones(16, dtype=torch.uint8),
    "model.position_ids": torch.arange(16)[None],
}


@pytest.mark.parametrize("stored", ["safetensors", "two files", "bin"])
def test_buffers_of_old_files_are_left_out_and_modules_kept_however_they_are_stored(
    stored: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base")
    weights = mtp(load_file(base / "model.safetensors")) | OLD
    (base / "model.safetensors").unlink()
    if stored == "bin":
        torch.save(weights, base / "pytorch_model.bin")
    elif stored == "safetensors":
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    else:
        places = {name: f"{'ab'['mtp' in name]}.safetensors" for name in weights}
        for file in ("a.safetensors", "b.safetensors"):
            own = {name: one for name, one in weights.items() if places[name] == file}
            save_file(own, base / file, metadata={"format": "pt"})
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model = load(base)
    assert sorted(model.source.kept) == ["mtp.layers.0.fc.weight", "mtp.layers.0.norm.weight"]
    assert sum(model.source.left.values()) == len(OLD) and model.source.total == 23 + len(OLD)
    model.save_pretrained(tmp_path / "saved")
    assert carry(model, tmp_path / "saved") == ", with 2 weights as they came"
    held, _ = all_weights(tmp_path / "saved")
    assert torch.equal(held["mtp.layers.0.fc.weight"], weights["mtp.layers.0.fc.weight"])
    assert not OLD.keys() & held.keys()


def test_layers_that_the_config_leaves_away_and_the_head_of_a_reward_model_stay_away(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    scores: Any = load_model(Model(path=str(base)), Peft(), tokenizer(), seed=0, scores=True)
    left = {"model.layers.1.*": load(base, num_hidden_layers=1).source, "lm_head.*": scores.source}
    assert [source.left for source in left.values()] == [{"model.layers.1.*": 9}, {"lm_head.*": 1}]
    assert not any(source.kept for source in left.values())


def test_a_config_does_not_promise_layers_that_no_file_has(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe", **MOE)
    model.save_pretrained(tmp_path)
    assert carry(model, tmp_path) == ", num_nextn_predict_layers 0 in its config.json"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_nextn_predict_layers == 0


def gguf_file(file: Path, *more: tuple[str, tuple[int, ...]]) -> Path:
    """A llama of one layer, with `more` weights, by names and shapes."""
    writer, layer = gguf.GGUFWriter(str(file), "llama"), "blk.0."
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96}
    sizes |= {"head_count": 4, "head_count_kv": 4, "layer_norm_rms_eps": 1e-6, "vocab_size": len(tokenizer())}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (len(tokenizer()), 64), "output": (len(tokenizer()), 64), "output_norm": (64,)}
    shapes |= {f"{layer}attn_{part}": (64, 64) for part in ("q", "k", "v", "output")}
    shapes |= {f"{layer}{part}_norm": (64,) for part in ("attn", "ffn")}
    shapes |= {f"{layer}ffn_gate": (96, 64), f"{layer}ffn_up": (96, 64), f"{layer}ffn_down": (64, 96)}
    for name, shape in (*((f"{name}.weight", shape) for name, shape in shapes.items()), *more):
        writer.add_tensor(name, np.ones(shape, np.float32))
    for part in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, part)()
    return file


def test_weights_of_gguf_files_are_counted_and_refused_as_well(tmp_path: Path) -> None:
    nextn = ("blk.1.nextn.eh_proj.weight", (64, 128))
    source = load(gguf_file(tmp_path / "a.gguf", ("rope_freqs.weight", (8,)), nextn)).source
    assert (source.total, sum(source.left.values()), source.kept) == (14, 2, {})
    with pytest.raises(UserError, match=r"1 of 13 .*blk\.\*\.attn_q\.bias.*\[weights-without-place\]"):
        load(gguf_file(tmp_path / "b.gguf", ("blk.0.attn_q.bias", (64,))))


def test_a_base_that_is_gone_at_the_end_leaves_a_final_that_loads(tmp_path: Path, glm: Path) -> None:
    shutil.copytree(glm, base := tmp_path / "base")
    loaded = load(base)
    loaded.save_pretrained(final := tmp_path / "final")
    (base / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        carry(loaded, final)
    AutoModelForCausalLM.from_pretrained(final)


WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDLE = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 64)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(64))

    def forward(self, hidden):
        share, chosen = self.gate(hidden).softmax(-1).max(-1)
        return sum((share * (chosen == i))[..., None] * self.experts[i](hidden) for i in chosen.unique().tolist())

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Experts(config.hidden_size)
        self.tower = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()
"""


def gemma3(folder: Path) -> None:
    """A language model with a tower for pictures."""
    words = tokenizer()
    own = {**WIDTHS, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(words), "sliding_window": 64}
    tower = {**WIDTHS, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=own, vision_config=tower, mm_tokens_per_image=4)
    config.text_config.pad_token_id = config.text_config.eos_token_id = words.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


def idle(folder: Path) -> None:
    """A model whose code came with it: of 64 experts, each a module, a token chooses one; and a tower."""
    words = tokenizer()
    ids: dict[str, Any] = {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": words.eos_token_id}
    config = LlamaConfig(**WIDTHS, **ids)
    scope: dict[str, Any] = {}
    exec(IDLE, scope)
    torch.manual_seed(0)
    scope["OwnForCausalLM"](config).save_pretrained(folder)
    bring_code(folder, IDLE, json.loads((folder / "config.json").read_text()))
    words.save_pretrained(folder)


SGD = ["optim.name=sgd", "optim.learning_rate=0.5"]
EXHAUSTIVE = [pytest.mark.exhaustive, pytest.mark.slow]


@pytest.mark.parametrize(
    ("made", "overrides", "frozen"),
    [
        (idle, ["model.trust_remote_code=true"], ": tower"),
        *(  # sgd: they give experts that idle on all ranks a gradient of zero, and Adam moves on by that
            pytest.param(idle, [f"strategy={name}", "model.trust_remote_code=true", *SGD], ": tower", marks=EXHAUSTIVE)
            for name in ("fsdp2", "zero3")
        ),
        *(
            pytest.param(gemma3, [f"strategy={name}", *more], "model.vision_tower", marks=EXHAUSTIVE)
            for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
            for more in ([], ["peft=lora"])
        ),
    ],
)
def test_two_processes_train_as_one(
    tmp_path: Path, made: Callable[[Path], None], overrides: list[str], frozen: str
) -> None:
    made(tmp_path / "model")
    config = config_on(tmp_path / "model", tmp_path, trainer={"max_steps": 3, "checkpoint_every": 2})
    two = train(tmp_path, config, *overrides, name="two", processes=2)
    one = train(tmp_path, config, *(item for item in overrides if not item.startswith("strategy")), name="one")
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    kind = "adapter_model" if "peft=lora" in overrides else "model"
    start = {} if kind == "adapter_model" else load_file(tmp_path / "model/model.safetensors")
    ours, theirs = (load_file(run.folder / f"final/{kind}.safetensors") for run in (two, one))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-4, rtol=0)
        if start and "tower" in name:
            assert torch.equal(weight, start[name])
    said = [line for line in two.log.splitlines() if " frozen " in line]
    assert [frozen in line for line in said] == [True]
    if made is idle:
        moved = [not weight.equal(start[name]) for name, weight in ours.items() if ".experts." in name]
        assert any(moved) and not all(moved), "some idle in each step"
