"""Adapters on a base in 4 or 8 bits: the same training on several processes, in float32, and merged into what the weights stand for."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from matrix import needs
from running import LLAMA, Run, base_config, packtrain, train, write_jsonl
from safetensors.torch import load_file, save_file
from test_eval import PAIRS
from test_eval import config_of as evaluated_config
from tiny_models import save_model, with_files
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.config.compose import load_config
from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.model.load import load_model
from packtrain.plan.fit import Memory
from packtrain.plan.memory import estimate
from packtrain.serve.export import merge
from packtrain.serve.trained import find_trained, load_trained

NEEDS_BITSANDBYTES = needs("bitsandbytes")


def save_few(place: Path, base: Path, bits: str) -> Path:
    """The model in `base` in few bits, as a model that comes so."""
    few = Model(path=str(base), quantize=bits)
    load_model(few, Peft(), tokenizer := load_tokenizer(few), seed=0).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def json_of(*command: str) -> dict[str, Any]:
    return json.loads(packtrain(*command, "--json").stdout)


def config_of(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(Model(tokenizer="quickstart"))
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"vocab_size": len(tokenizer)}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings)).save_pretrained(folder / "model")
    config = base_config(folder, trainer={"max_steps": 3}, peft={"kind": "lora"})
    return {**config, "model": {"path": str(folder / "model"), "tokenizer": "quickstart"}}


@pytest.mark.sample("nf4-fsdp2")
@pytest.mark.parametrize(
    ("quantize", "strategy"),
    [("fp8", "ddp"), ("nf4", "fsdp2"), ("nf4", "ddp"), ("nf4", "zero2"), ("int8", "ddp"), ("int8", "zero2")],
)
def test_two_processes_train_as_one_and_adapters_stay_float32(tmp_path: Path, quantize: str, strategy: str) -> None:
    pytest.importorskip("torchao" if quantize == "fp8" else "bitsandbytes")
    config = config_of(tmp_path)
    alone = train(tmp_path, config, f"model.quantize={quantize}", name="alone")
    how = [f"model.quantize={quantize}", f"strategy={strategy}", f"peft.merge={strategy != 'fsdp2'}".lower()]
    two = train(tmp_path, config, *how, name="two", processes=2)
    counted = [re.search(r"\(LlamaForCausalLM, .*", run.log) for run in (alone, two)]
    assert counted[0] and counted[1] and counted[0][0] == counted[1][0]
    assert two.losses == pytest.approx(alone.losses, rel=1e-4 if quantize == "int8" else 1e-5)
    plain = train(tmp_path, config, name="plain")
    assert plain.losses[0] != alone.losses[0] == pytest.approx(plain.losses[0], rel=2e-2)
    saved = load_file(two.folder / "final" / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    if strategy == "fsdp2":
        return
    merged = AutoModelForCausalLM.from_pretrained(two.folder / "final-merged")
    assert merged.dtype == torch.float32 and not hasattr(merged.config, "quantization_config")


@NEEDS_BITSANDBYTES
@pytest.mark.sample("packed")
@pytest.mark.parametrize("mode", ["packed", "padding", "padding_free"])
def test_preferences_on_four_bits_are_held_to_the_base_itself(tmp_path: Path, mode: str) -> None:
    config = config_of(tmp_path)
    config["data"]["train"] = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    config["model"]["quantize"], config["batch"]["tokens_per_device"] = "nf4", 512
    share = ["packing.share_prefix=true"] if mode == "packed" else []
    alone = run_here(tmp_path, config, "objective.kind=dpo", "packing.mode=padding", name="alone")
    two = train(tmp_path, config, f"packing.mode={mode}", *share, command="dpo", name="two", processes=2)
    assert two.losses == pytest.approx(alone.losses, rel=1e-6) and len(alone.losses) == 3
    assert alone.losses[0] == pytest.approx(math.log(2), rel=1e-6) and alone.losses[-1] < alone.losses[0]
    assert "against the model with its adapters off" in two.log


@NEEDS_BITSANDBYTES
def test_a_model_that_comes_in_four_bits_trains_adapters_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    loaded = run_here(tmp_path, config, "model.quantize=nf4", name="loaded")
    quantized = Model(path=str(tmp_path / "model"), quantize="nf4")
    model = load_model(quantized, Peft(), load_tokenizer(Model(tokenizer="quickstart")), seed=0)
    config["model"]["path"] = str(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    assert run_here(tmp_path, config, name="saved-run").losses == pytest.approx(loaded.losses, rel=1e-6)
    with pytest.raises(UserError, match=r"bitsandbytes .*\[quantised\]"):
        run_here(tmp_path, config, "peft=none", name="full")


@pytest.fixture(scope="module", params=["nf4", "int8"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (`base`), its copy in few bits (`few`), and a `run`."""
    pytest.importorskip("bitsandbytes")
    (folder := tmp_path_factory.mktemp("few") / request.param).mkdir()
    few = save_few(folder / "few", save_model(folder / "base"), request.param)
    run_here(folder, evaluated_config(folder, model={"path": str(few)}, peft={"kind": "lora", "merge": True}))
    return folder


def test_a_model_in_few_bits_counts_as_many_weights_as_before(saved: Path) -> None:
    def planned(*more: str) -> dict[str, Any]:
        return json_of("plan", str(saved / "run.yaml"), *more)["memory"]

    base = f"model.path={saved / 'base'}"
    plain, base_in_few, few = planned(base), planned(base, f"model.quantize={saved.name}"), planned()
    assert [few[key] for key in ("parameters", "trained")] == [plain[key] for key in ("parameters", "trained")]
    assert plain["weights"] > few["weights"] == pytest.approx(base_in_few["weights"], rel=0.06)
    whole = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(saved / "base").parameters())
    log = Run(saved / "run").log
    assert whole == plain["parameters"] and f"{whole + plain['trained']:,} parameters" in log  # adapters included
    assert "100% of the weights in layers" in log


def test_a_model_that_comes_in_few_bits_is_evaluated_without_adapters(saved: Path) -> None:
    run, path = Run(saved / "run"), str(saved / "run.yaml")
    told = packtrain("eval", path, f"model.path={saved / 'few'}", "--json", "--generate", "1", "--max-tokens", "2")
    report = json.loads(told.stdout)
    assert report["figures"]["eval_loss"] == pytest.approx(run.evals[0]["eval_loss"], rel=1e-6)
    assert report["generated"]["rows"] == 1 and "MatMul8bitLt" not in told.stderr
    adapted = json_of("eval", str(saved / "run"))["figures"]["eval_loss"]
    assert adapted == pytest.approx(run.evals[-1]["eval_loss"], rel=1e-6)
    plain, same = (
        json_of("eval", path, f"model.path={saved / 'base'}", *more)["figures"]["eval_loss"]
        for more in ([], [f"model.quantize={saved.name}"])
    )
    assert plain != same == pytest.approx(run.evals[0]["eval_loss"], rel=1e-6), "a whole model is taken as it is"


def test_adapters_on_few_bits_are_merged_into_what_the_bits_stand_for(saved: Path) -> None:
    command = ["merge"] if saved.name == "nf4" else ["export", "--to", "merged"]
    done = packtrain(*command, str(saved / "run"), "--output", str(saved / "merged"))
    assert done.stdout == f"{saved / 'merged'}\n" and "converted back to float32" in done.stderr
    model: Any = AutoModelForCausalLM.from_pretrained(saved / "merged", dtype="auto")
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    first, second = (load_file(place / "model.safetensors") for place in (saved / "merged", saved / "run/final-merged"))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    adapted, _ = load_trained(find_trained(str(saved / "run")))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected, found = adapted(ids).logits, model(ids).logits
    allowed = 1e-5 if saved.name == "nf4" else 0.05  # int8 rounds the inputs of its layers, too
    assert (found - expected).norm() <= allowed * expected.norm()


@NEEDS_BITSANDBYTES
def test_bits_that_cannot_be_converted_back_are_named_before_anything_is_written(tmp_path: Path) -> None:
    config = evaluated_config(tmp_path, model={"path": str(save_model(tmp_path / "base", "gpt2")), "quantize": "nf4"})
    config["peft"] = {"kind": "lora", "merge": True}
    with pytest.raises(UserError, match=r"\[cannot-dequantise\]"):  # Conv1D: transposed, bitsandbytes forgets that
        run_here(tmp_path, config)
    assert not [*(tmp_path / "run").glob("final*")]
    few = save_few(tmp_path / "few", tmp_path / "base", "nf4")
    (tmp_path / "adapters").mkdir()
    named = {"peft_type": "LORA", "base_model_name_or_path": str(few)}
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(named))
    save_file({"none": torch.zeros(1)}, tmp_path / "adapters/adapter_model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"\[cannot-dequantise\]"):
        merge(str(tmp_path / "adapters"), None, None)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_in_mxfp4_trains_as_what_its_weights_stand_for(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    shape |= {"num_local_experts": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 1, "vocab_size": 4096}
    whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_oss"](**shape), dtype=torch.bfloat16)
    whole.save_pretrained(folder := tmp_path / "mxfp4")

    def in_mxfp4(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, width, rows = weights.pop(name).shape
            weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.full((experts, rows, width // 32), 121, dtype=torch.uint8)
        return weights

    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    with_files(folder, in_mxfp4, quantization_config=settings)
    config["model"]["path"] = str(folder)
    packed, padded = (run_here(tmp_path, config, f"packing.mode={mode}", name=mode) for mode in ("packed", "padding"))
    assert packed.losses == pytest.approx(padded.losses, rel=1e-6) and packed.losses[-1] != packed.losses[0]
    planned = estimate(load_config(str(tmp_path / "packed.yaml"), []), 1)
    assert isinstance(planned, Memory) and planned.parameters == whole.num_parameters()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.quantize=fp8", "peft=lora", "strategy=fsdp2"], "strategy.name"),
        (["model.quantize=fp8", "peft=lora", "strategy=zero3"], "strategy.name"),
        (["model.quantize=nf4", "peft=lora", "strategy=fsdp2", "peft.merge=true"], "peft.merge"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=key) as refused:
        load_config(None, ["model.path=some/model", "data.train=quickstart", "batch.examples_per_step=8", *overrides])
    assert "model.quantize" in str(refused.value)
