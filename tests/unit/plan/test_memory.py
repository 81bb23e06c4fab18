"""The memory estimate of a plan, against transformers' and peft's own counts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import packtrain
from huggingface_hub import constants
from tiny_models import SIZES

from packtrain.config.compose import load_config
from packtrain.config.schema import Strategy
from packtrain.objectives.spec import head_chunk
from packtrain.plan.fit import GIB, OUTSIDE, SPARE, Memory
from packtrain.plan.memory import CHECKPOINTING, NCCL, Found, estimate

MADE = ["model.init=random", "model.tokenizer=quickstart", "data.train=owner/data", "batch.examples_per_step=4"]
UNCHECKED = "verify.preflight=false"  # what is checked around step 1 would take more than these tiny models


def sized(kind: str, **more: object) -> list[str]:
    sizes = {"model_type": kind, **SIZES, **more}
    return [f"model.config.{name}={str(value).lower()}" for name, value in sizes.items()]


QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
QWEN3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
FULL, OFFLOAD = "trainer.gradient_checkpointing=full", "strategy=zero3_offload"
NONE, AUTO = "trainer.gradient_checkpointing=none", "trainer.gradient_checkpointing=auto"
SMALLER = "smaller micro-batches (batch.tokens_per_device, examples_per_device)"


def known(
    overrides: list[str],
    processes: int = 1,
    device: int | None = None,
    strategy: Any = "ddp",
    found: Found = Found(fused=False),  # noqa: B008
) -> Memory:
    config = load_config(None, [*MADE, *overrides])
    planned = estimate(replace(config, strategy=Strategy(name=strategy)), processes, device, found=found)
    assert isinstance(planned, Memory), planned
    return planned


def write_weights(folder: Path, *shape: int) -> None:
    """A safetensors file of one float32 tensor, without its numbers."""
    size = 4 * math.prod(shape)
    header = json.dumps({"a.proj.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_parameters_from_sizes_are_those_of_the_model_that_transformers_makes(kind, more, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))
    expected = sum(one.numel() for one in model.parameters())
    assert known(sized(kind, **more)).parameters == expected
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored = known(["model.init=pretrained", f"model.path={tmp_path}", "model.dtype=auto"])
    assert (stored.parameters, stored.weights, stored.optimizer) == (expected, 2 * expected, 12 * expected)
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
        listed = targets if isinstance(targets, str) else f"[{','.join(targets)}]"
        lora = known([*sized(kind, **more), "peft=lora", "peft.r=4", f"peft.target_modules={listed}"])
        assert (lora.trained, lora.gradients) == (trained, 4 * trained)
        model = adapted.unload()


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}], ids=["a head", "tied"])
def test_a_reward_model_has_a_score_for_its_output_head_which_is_trained_beside_adapters(more, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    settings, reward = AutoConfig.for_model("llama", **SIZES, num_labels=1, **more), "objective.kind=reward"
    model = AutoModelForSequenceClassification.from_config(settings)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "language")
    model.save_pretrained(tmp_path / "reward")
    expected = sum(one.numel() for one in model.parameters())
    assert known([*sized("llama", **more), reward]).parameters == expected
    for saved in ("language", "reward"):
        assert known(["model.init=pretrained", f"model.path={tmp_path / saved}", reward]).parameters == expected
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS"))
    trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    assert known([*sized("llama", **more), reward, "peft=lora", "peft.r=4"]).trained == trained
    wide = {"vocab_size": 100_000, **more}
    few = known([*sized("llama", **wide), "batch.tokens_per_device=2048"]).activations
    assert few and (known([*sized("llama", **wide), "batch.tokens_per_device=4096", reward]).activations or few) < few


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        (["model.init=pretrained", "model.path=owner/model"], "not on this machine yet; its sizes can be given: model"),
        (["model.config.model_type=mamba"], "model type mamba"),
        (["model.config.model_type=llama"], "model.config.hidden_size is left to the model type"),
        ([one for one in sized("llama") if "vocab" not in one], "model.config.vocab_size is left to the tokenizer"),
        ([*sized("llama"), "peft=lora", "peft.target_modules=[nope]"], "peft.target_modules"),
    ],
)
def test_what_is_missing_for_an_estimate_is_said(overrides, missing, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = estimate(load_config(None, [*MADE, *overrides]), 1)
    assert isinstance(found, str) and missing in found


@pytest.mark.parametrize("damage", [None, b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_folder_whose_weights_cannot_be_read_is_no_error(damage: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    if damage is not None:
        (tmp_path / "model.safetensors").write_bytes(damage)
    found = estimate(load_config(None, [*MADE, "model.init=pretrained", f"model.path={tmp_path}"]), 1)
    said = "there are no weights" if damage is None else "cannot be read as safetensors"
    assert isinstance(found, str) and said in found


def test_a_model_in_the_cache_of_the_hub_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--model"
    snapshot = repository / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    write_weights(snapshot, 3, 5)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert known(["model.init=pretrained", "model.path=owner/model"]).parameters == 15


GROUP = 32


def packed_as(method: str, outputs: int, inputs: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Number format and shape of the tensors that libraries write for a linear layer."""
    groups = ("F16", (inputs // GROUP, outputs))
    beside = {"qzeros": ("I32", (inputs // GROUP, outputs // 8)), "scales": groups}
    return {
        "gptq": {"qweight": ("I32", (inputs // 8, outputs)), **beside, "g_idx": ("I32", (inputs,))},
        "awq": {"qweight": ("I32", (inputs, outputs // 8)), **beside},
        "fp8": {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale_inv": ("F32", (outputs // GROUP, 1))},
        "mxfp4": {"weight": ("BF16", (outputs, inputs))},  # only experts are in four bits
        "nvfp4": {
            "weight_packed": ("U8", (outputs, inputs // 2)),
            "weight_scale": ("F8_E4M3", (outputs, inputs // 16)),
        },
    }[method]


def quantised(folder: Path, method: str) -> tuple[int, int]:
    """Write a tiny model with linear layers in few bits. Return how many weights it has, and the bytes of their tensors."""
    sizes = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,), "lm_head.weight": (96, 64)}
    tensors = {name: ("BF16", shape) for name, shape in sizes.items()}
    numbers = sum(map(math.prod, sizes.values()))
    for name, shape in {"self_attn.q_proj": (64, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}.items():
        layer = packed_as(method, *shape)
        tensors |= {f"model.layers.0.{name}.{part}": tensor for part, tensor in layer.items()}
        numbers += math.prod(shape)
    if method == "mxfp4":
        experts = "model.layers.0.mlp.experts.down_proj"
        tensors |= {f"{experts}_blocks": ("U8", (4, 64, 2, 16)), f"{experts}_scales": ("U8", (4, 64, 2))}
        tensors |= {f"{experts}_bias": ("BF16", (4, 64))}
        numbers += 4 * 64 * 64 + 4 * 64
    header, end = dict[str, Any](), 0
    width = {"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    for name, (kind, shape) in tensors.items():
        begin, end = end, end + width[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    written = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(written).to_bytes(8, "little") + written + bytes(end))
    how = {"quant_method": {"nvfp4": "compressed-tensors"}.get(method, method), "bits": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": how}))
    return numbers, end


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "nvfp4"])
def test_quantised_files_count_the_weights_that_their_bits_stand_for(method: str, tmp_path: Path) -> None:
    numbers, size = quantised(tmp_path / "few", method)
    lora = ["model.init=pretrained", f"model.path={tmp_path / 'few'}", "model.dtype=auto", "peft=lora", "peft.r=4"]
    for device, expanded in ((None, ("fp8", "mxfp4", "nvfp4")), (80 * GIB, ("mxfp4", "nvfp4"))):
        found = known(lora, device=device)
        assert found.parameters == numbers
        assert found.trained == 4 * (64 + 64 + 2 * (128 + 64))
        assert found.weights - 4 * found.trained == (2 * numbers if method in expanded else size)


@pytest.mark.parametrize(("method", "trains"), [("gptq", False), ("awq", False), ("fp8", True), ("mxfp4", True)])
def test_a_plan_to_train_weights_that_stay_quantised_is_refused(method: str, trains: bool, tmp_path: Path) -> None:
    """In the run's own words. Methods that are dequantised at loading train as whole weights."""
    quantised(tmp_path / "few", method)
    for more, expected in (((), trains), (("--gpu-memory", "80"), method == "mxfp4"), (("peft=lora",), True)):
        config = [f"model.path={tmp_path / 'few'}", "model.init=pretrained", "model.tokenizer=quickstart"]
        done = packtrain("plan", *config, "data.train=quickstart", "batch.examples_per_step=4", *more, folder=tmp_path)
        assert done.returncode == (0 if expected else 2), done.stderr
        assert expected or f"weights quantised by {method} cannot be trained" in done.stderr


UNFIT = [{"quant_method": "aqlm"}, {"quant_method": "gptq"}, {"quant_method": "gptq", "bits": 0}]


@pytest.mark.parametrize("settings", UNFIT)
def test_bits_in_an_unknown_layout_and_files_that_do_not_fit_their_quantization_are_not_guessed(settings, tmp_path):
    quantised(tmp_path / "few", "gptq")
    (tmp_path / "few/config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    config = load_config(None, [*MADE, "model.init=pretrained", f"model.path={tmp_path / 'few'}", "peft=lora"])
    said = "quantised by aqlm" if settings["quant_method"] == "aqlm" else "of their quantization"
    assert said in str(estimate(config, 1))


def test_a_reference_model_and_the_first_check_of_pairs_are_counted_where_there_is_one() -> None:
    llama = [*sized("llama"), "objective.kind=dpo"]
    assert known(llama).reference == known(llama).weights > 0
    for kept_elsewhere in (["peft=lora"], ["objective.reference=precomputed"], ["objective.kind=sft"]):
        assert known([*llama, *kept_elsewhere]).reference == 0
    few = [*sized("llama", vocab_size=100_000), "peft=lora", "data.max_length=64", "batch.tokens_per_device=128"]
    pairs = [*few, "objective.kind=dpo"]
    checked = known(pairs)
    # the pair of a micro-batch: as made, in float32, normalised
    assert checked.total - checked.weights == 12 * 2 * 64 * 100_000
    assert checked.buffers > 0
    assert all(known([*one, "verify.preflight=false"]).buffers == 0 for one in (pairs, few))
    longer = known([*pairs, "data.max_length=10000", "batch.tokens_per_device=20000"])
    assert longer.total - longer.weights < 12 * 2 * 2**27


def test_adapters_are_counted_on_their_base_and_as_what_they_are_to_the_run(tmp_path: Path) -> None:
    base, earlier, other = (tmp_path / name for name in ("base", "earlier", "other"))
    for folder, of in ((base, None), (earlier, base), (other, "another/model")):
        folder.mkdir()
        if of is not None:
            (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(of)}))
    (base / "config.json").write_text("{}")
    write_weights(base, 30, 50)
    dpo = ["model.init=pretrained", "objective.kind=dpo", "peft=lora"]
    for path, reference, strategy, expected in (
        (earlier, "auto", "ddp", "adapters"),
        (earlier, "auto", "zero3", "model"),
        (base, "auto", "ddp", "none"),
        (base, earlier, "ddp", "adapters"),
        (base, base, "ddp", "model"),
        (earlier, other, "ddp", "model"),
    ):
        given = [*dpo, f"model.path={path}", f"objective.reference={reference}"]
        found = known(given, strategy=strategy)
        assert found.parameters == 1500
        assert found.reference == {"adapters": 4 * found.trained, "model": found.parameters * 4, "none": 0}[expected]
    (other / "adapter_config.json").write_text("{}")
    for broken in (f"model.path={other}", f"objective.reference={other}"):
        said = estimate(load_config(None, [*MADE, *dpo, f"model.path={base}", broken]), 1)
        assert isinstance(said, str) and "the adapters name no base model" in said


@pytest.mark.parametrize(
    ("strategy", "dtype", "bytes_each"),
    [  # of weights, gradients and optimizer per parameter, as counted in DeepSpeed 0.19.8 and torch 2.13; P: over processes
        ("ddp", "float32", (4, 4, 8)),
        ("ddp", "bfloat16", (2, 2, 12)),
        ("ddp", "bfloat16 optim.bf16_rounding=stochastic", (2, 2, 4)),
        ("zero1", "float32", (4, 4, "12/P")),
        ("zero1", "bfloat16", (2, 4, "12/P")),
        ("zero2", "float32", (4, "4/P", "12/P")),
        ("zero2", "bfloat16", (2, "4/P", "12/P")),
        ("zero3", "float32", ("4/P", "4/P", "12/P")),
        ("zero3", "bfloat16", ("2/P", "4/P", "12/P")),
        ("fsdp2", "float32", ("4/P", "4/P", "8/P")),
        ("fsdp2", "bfloat16", ("2/P", "2/P", "12/P")),
        ("fsdp2", "bfloat16 optim.bf16_rounding=stochastic", ("2/P", "2/P", "4/P")),
    ],
)
@pytest.mark.parametrize("processes", [1, 2, 64])
def test_each_strategy_holds_what_its_framework_keeps(strategy, dtype, bytes_each, processes):
    found = known([*sized("llama"), *f"model.dtype={dtype}".split()], processes, strategy=strategy)
    for part, each in zip((found.weights, found.gradients, found.optimizer), bytes_each, strict=True):
        whole, _, spread = str(each).partition("/")
        assert part == -(-int(whole) * found.parameters // (processes if spread else 1))


def test_a_step_in_float32_takes_memory_for_a_part_of_the_weights_and_processes_on_a_cpu_are_told_of_all() -> None:
    large = [*sized("qwen3", **QWEN3_8B), "model.dtype=bfloat16", "batch.examples_per_step=1", "data.max_length=2"]
    head = QWEN3_8B["vocab_size"] * QWEN3_8B["hidden_size"]  # the largest tensor is stepped by itself
    for how, each in (("", 4), ("optim.bf16_rounding=stochastic", 20)):
        found = known([*large, *how.split(), "trainer.gradient_checkpointing=full"])
        assert found.buffers == max(each * head - (found.activations or 0), 0), how
    one = Memory(parameters=1, trained=1, weights=GIB, gradients=GIB, optimizer=0, buffers=0, activations=0)
    assert "(8.00 GiB for all 4 processes" in replace(one, processes=4).sentence() and "for all" not in one.sentence()
    assert "for all" not in replace(one, processes=4, device=80 * GIB).sentence()


def test_offloading_moves_everything_that_lasts_to_the_machines_own_memory() -> None:
    found = known([*sized("llama"), "model.dtype=bfloat16"], 2, strategy="zero3_offload")
    assert (found.weights, found.gradients, found.optimizer) == (0, 0, 0)
    assert found.host == pytest.approx(22 / 2 * found.parameters, rel=1e-3)
    assert found.buffers > 0 and "of the machine's own memory per process" in found.sentence()
    for strategy in ("zero3", "fsdp2"):  # every process makes the whole of a new model
        assert known(sized("llama"), 64, strategy=strategy).host == 4 * found.parameters
    assert known(sized("llama"), 64).host == 0


def test_copies_on_every_machine_take_more_memory_and_less_of_the_network() -> None:
    given = [*sized("llama"), "strategy=fsdp2", "trainer.mixed_precision=no"]
    one, all_of_them, copies = (
        estimate(load_config(None, [*MADE, *given, f"strategy.shard_within={within}"]), 16, None, machines)
        for within, machines in (("machine", 1), ("all", 4), ("machine", 4))
    )
    assert (one.weights, one.leaving) == (all_of_them.weights, None)
    assert copies.weights == pytest.approx(4 * all_of_them.weights, abs=8)
    number = all_of_them.parameters
    assert copies.leaving == 6 * number
    assert 10 * number < all_of_them.leaving <= 12 * number
    assert "leave each machine" in copies.sentence()


def test_ddp_copies_gradients_autocast_weights_and_adapters_are_in_the_models_format_under_deepspeed() -> None:
    alone, two = known([*sized("llama"), UNCHECKED]), known([*sized("llama"), UNCHECKED], 2)
    assert (alone.buffers, two.buffers) == (0, two.gradients)
    linear = alone.parameters - 2 * 97 * 64 - 7 * 64  # without the embeddings, the output head and the norms
    assert known([*sized("llama"), UNCHECKED, "trainer.mixed_precision=bf16"]).buffers == 2 * linear
    assert known([*sized("llama"), UNCHECKED, "trainer.mixed_precision=bf16", "model.dtype=bfloat16"]).buffers == 0
    lora = [*sized("llama"), "model.dtype=bfloat16", "peft=lora"]
    ddp, zero2 = known(lora), known(lora, strategy="zero2")
    assert (ddp.gradients, ddp.optimizer) == (4 * ddp.trained, 8 * ddp.trained)
    assert (zero2.gradients, zero2.optimizer) == (4 * ddp.trained, 12 * ddp.trained)
    assert ddp.weights == 2 * ddp.parameters + 4 * ddp.trained


def test_fsdp2_gathers_layers_beside_what_is_in_no_layer_in_the_precision_that_is_asked_for() -> None:
    found = known([*sized("llama"), UNCHECKED], 64, strategy="fsdp2")
    rest = 2 * 97 * 64 + 64
    layer = (found.parameters - rest) // 3
    gathered = rest - 97 * 64  # the embedding is gathered by itself
    assert found.buffers == 4 * (3 * layer + gathered) + 4 * (2 * layer + rest)  # weights, and gradients
    tied = known([*sized("llama"), UNCHECKED, "model.config.tie_word_embeddings=true"], 64, strategy="fsdp2")
    assert tied.buffers == 4 * (3 * layer + gathered) + 4 * (2 * layer + gathered)
    found = known([*sized("llama"), UNCHECKED, "trainer.mixed_precision=bf16"], 64, strategy="fsdp2")
    assert found.buffers == 2 * (3 * layer + rest - 97 * 64) + 2 * (layer + rest) + 4 * layer


def test_seventy_billion_weights_in_four_bits_fit_one_gpu_and_are_gathered_as_they_are() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama"}
    model = [f"model.config.{name}={value}" for name, value in sizes.items()]
    how = ["model.path=some/model", "model.init=pretrained", "model.dtype=bfloat16", "model.quantize=nf4", "peft=lora"]
    size = ["data.max_length=2048", "batch.examples_per_step=8", "batch.tokens_per_device=4096"]
    found = known([*model, *how, *size], device=80 * GIB)
    linear = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    others = found.parameters - linear  # embeddings, output head, norms
    nf4 = 0.5 + 1 / 64 + 4 / (64 * 256)
    assert found.weights == pytest.approx(nf4 * linear + 2 * others + 4 * found.trained, rel=1e-6)
    assert found.fits and found.weights < 38 * GIB
    gathered = known([*model, *how, *size], 2, 80 * GIB, "fsdp2").buffers
    assert gathered == pytest.approx(3 * nf4 * linear / 80 + 2 * others / 2, rel=1e-3)


def test_fsdp2_exchanges_gradients_once_a_step_where_whole_ones_fit() -> None:
    batch = ["batch.tokens_per_device=64", "data.max_length=64"]
    full, adapters = [*sized("llama"), *batch], [*sized("llama"), *batch, "peft=lora"]
    for config in (full, adapters):
        assert not known(config, 8, strategy="fsdp2").exchanges_once  # no GPU to compare with
        found = known(config, 8, strategy="fsdp2", device=400 * GIB)
        assert found.accumulated == 4 * found.trained
        enough = math.ceil((found.total + found.outside + found.accumulated) / (1 - SPARE))
        for device, once in ((enough, True), (enough - 1, False)):
            memory = known(config, 8, strategy="fsdp2", device=device)
            assert memory.fits and memory.exchanges_once is once
            assert ("once a step; " in memory.exchange()) is once and memory.to_json()["exchanges_once"] is once
    endless = [*sized("llama"), "packing.mode=padding", "data.max_length=null"]  # activations are not known
    unknown = known(endless, 8, strategy="fsdp2", device=40 * GIB)
    assert unknown.fits is None and not unknown.exchanges_once and "not known to fit" in unknown.exchange()
    for strategy, processes in (("ddp", 8), ("zero3", 8), ("fsdp2", 1)):
        assert known(full, processes, strategy=strategy).exchange() == ""


def test_mixed_precision_auto_is_bfloat16_where_the_plan_knows_of_a_gpu() -> None:
    def planned(precision: str, device: int | None = None) -> Memory:
        return known([*sized("llama"), UNCHECKED, f"trainer.mixed_precision={precision}"], device=device)

    for asked in ("auto", "fast"):
        assert planned(asked, 40 * GIB) == planned("bf16", 40 * GIB) != planned("no", 40 * GIB)
        assert planned(asked) == planned("no") != planned("bf16")


def test_activations_grow_with_a_micro_batch_and_shrink_by_checkpointing() -> None:
    config = [*sized("qwen3", **QWEN3_8B), "model.dtype=bfloat16", "batch.examples_per_step=64"]
    whole = known(config).activations
    half = known([*config, "batch.tokens_per_device=4096"]).activations
    checkpointed = known([*config, "trainer.gradient_checkpointing=full"]).activations
    assert whole and half and checkpointed
    assert 60 < whole / GIB < 64 and half < 0.55 * whole and checkpointed < 0.1 * whole
    few = known([*config, "batch.examples_per_step=1"]).activations  # a step is one document of data.max_length
    assert few and few < 0.3 * whole
    assert (known([*config, "model.attention=sdpa_mask"]).activations or 0) > 1.1 * whole  # masks of row × row
    padded = [*config, "packing.mode=padding", "batch.examples_per_device=4"]
    assert (known(padded).activations or 0) > whole  # its mask, and keys for every head


@pytest.mark.parametrize(("gib", "chunk"), [(None, 2048), (24, 2048), (80, 4096), (140, 8192)])
def test_the_head_makes_logits_of_more_tokens_where_two_percent_of_a_gpu_hold_them(gib, chunk) -> None:
    config = [*sized("qwen3", **QWEN3_8B), "model.dtype=bfloat16", "batch.examples_per_step=64", "data.max_length=8192"]
    config += ["trainer.gradient_checkpointing=full", "batch.tokens_per_device=8192"]
    smallest, found, words = known(config, device=GIB), known(config, device=gib and gib * GIB), QWEN3_8B["vocab_size"]
    more = (chunk - 2048) * 2 * words
    assert (found.activations or 0) - (smallest.activations or 0) == more <= 0.02 * (gib or 0) * GIB
    assert head_chunk(words, 4, 2 * (gib or 0) * GIB) == chunk  # float32 logits take twice the memory


def test_auto_computes_as_little_again_as_fits_with_a_tenth_to_spare() -> None:
    config = [*sized("qwen3", **QWEN3_8B), "model.dtype=bfloat16", "batch.examples_per_step=64"]
    config += ["data.max_length=2048", "batch.tokens_per_device=2048"]  # one chunk of the head on any device
    asked = {
        policy: known([*config, f"trainer.gradient_checkpointing={policy}"], 8, GIB, "fsdp2")
        for policy in CHECKPOINTING
    }
    kept = [memory.activations or 0 for memory in asked.values()]
    assert kept[0] == max(kept) and kept[-1] == min(kept) and asked["selective"].total < asked["every_2"].total
    for policy, memory in asked.items():
        device = round((memory.total + memory.outside / (1 - SPARE)) / (1 - SPARE)) + GIB // 100
        found = known(config, 8, device, "fsdp2")
        better = [one for one in CHECKPOINTING[: CHECKPOINTING.index(policy)] if asked[one].total <= memory.total]
        assert found.checkpointing == (better or [policy])[0] and found.fits, policy
        assert found.activations == asked[found.checkpointing].activations
        assert found.chosen == "auto: all fits" if policy == "none" else "auto: with none it would take" in found.chosen
    least = known(config, 8, GIB, "fsdp2")
    assert (least.checkpointing, least.fits) == ("full", False) and "gradient_checkpointing" not in least.advice
    compiled = known([*config, "trainer.torch_compile=true"], 8, asked["selective"].total + 20 * GIB, "zero2")
    assert compiled.checkpointing != "selective"


QWEN2_1B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151_936}
QWEN2_1B |= {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3_600M = {**QWEN3_8B, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3_600M |= {"num_attention_heads": 16, "tie_word_embeddings": True}
BIG, MIDDLE, SMALL = sized("qwen3", **QWEN3_8B), sized("qwen2", **QWEN2_1B), sized("qwen3", **QWEN3_600M)
BIG += ["peft=lora", "model.dtype=bfloat16", "trainer.gradient_checkpointing=every_4"]
MASTERS, PADDED, DPO = "model.dtype=bfloat16", "packing.mode=padding", "objective.kind=dpo"


@pytest.mark.parametrize(
    ("config", "found", "measured"),
    [
        ([*MIDDLE, MASTERS], Found(16_135, fused=False), 67.6),
        ([*MIDDLE], Found(16_135, fused=False), 74.4),
        ([*MIDDLE, MASTERS, PADDED, "data.max_length=8192"], Found(16_270, fused=False), 75.0),
        ([*MIDDLE, MASTERS], Found(16_135, fused=True), 55.0),
        ([*SMALL, DPO], Found(16_174, fused=True), 31.3),
        ([*SMALL, DPO, PADDED], Found(15_208, fused=True), 32.0),
        (BIG, Found(12_933, fused=False), 90.3),
        (SMALL, Found(12_766, fused=True), 26.4),
        (SMALL, Found(12_886, 8.15, fused=True), 35.2),  # sixteen documents about each text
        (SMALL, Found(16_336, fused=True), 30.3),
    ],
)
def test_plans_are_within_a_tenth_of_peaks_measured_on_an_h200(
    config: list[str], found: Found, measured: float
) -> None:
    """GiB of real runs (benchmarks/RESULTS.md); `found` is their largest micro-batch."""
    limits = ["batch.tokens_per_device=16384", "data.max_length=2048", "trainer.mixed_precision=bf16"]
    planned = known([*limits, *config], device=140 * GIB, found=found)
    assert planned.total / GIB == pytest.approx(measured, rel=0.1)
    assert planned.slots == found.slots and ("Liger" in planned.sentence()) == found.fused


def test_a_plan_expects_ligers_kernels_where_they_are_installed_or_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(kernels: Any = "auto", *changes: str, strategy: Any = "ddp", device: int | None = 140 * GIB) -> bool:
        config = load_config(None, [*MADE, *SMALL, *changes])
        config = replace(config, strategy=Strategy(name=strategy), model=replace(config.model, kernels=kernels))
        planned = estimate(config, 1, device)
        assert isinstance(planned, Memory)
        return planned.fused

    monkeypatch.setattr("packtrain.plan.memory.find_spec", lambda _: None)
    assert fused("liger") and not fused()
    assert not fused("liger", strategy="zero3") and not fused("liger", device=None)
    monkeypatch.setattr("packtrain.plan.memory.find_spec", lambda _: "here")
    assert fused() and not fused("none") and not fused("auto", "trainer.torch_compile=true")


def test_auto_keeps_all_where_nothing_is_known_to_be_too_much() -> None:
    config = [*sized("llama"), "data.max_length=null", "packing.mode=padding"]
    for device, why in ((None, "auto: no GPU"), (GIB, "auto: activations are not known")):
        found = known(config, device=device)
        assert (found.checkpointing, found.chosen) == ("none", why)
    asked = known([*config, "trainer.gradient_checkpointing=full"], device=GIB)
    assert (asked.checkpointing, asked.chosen) == ("full", "asked for")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["packing.mode=padding", "data.max_length=null"], "data.max_length"),
        (["model.init=pretrained", "model.path={folder}"], "model type gpt2"),
    ],
)
def test_where_activations_are_not_known_the_rest_is_counted(overrides: list[str], why: str, tmp_path: Path) -> None:
    write_weights(tmp_path, 3, 5)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    given = [] if "model.init=pretrained" in overrides else sized("llama")
    found = known([*given, *(one.format(folder=tmp_path) for one in overrides)], device=80 * GIB)
    assert found.activations is None and found.weights > 0 and found.fits is None
    assert "before activations (not known: " in found.sentence() and why in found.sentence()
    assert known([*given, *(one.format(folder=tmp_path) for one in overrides)], device=1).fits is False


DOES_NOT_FIT = [
    (8, [], "ddp", f"strategy=fsdp2, {SMALLER}, {OFFLOAD}, peft=lora, larger GPUs"),
    (8, [NONE], "zero2", f"strategy=zero3, {AUTO}, {SMALLER}, {OFFLOAD}, peft=lora, larger GPUs"),
    (8, [FULL], "fsdp2", f"{SMALLER}, {OFFLOAD}, peft=lora, larger GPUs"),
    (1, [NONE, "peft=lora"], "ddp", f"{AUTO}, {SMALLER}, {OFFLOAD}, larger GPUs"),
    (8, ["optim.name=adafactor"], "ddp", f"{SMALLER}, peft=lora, larger GPUs"),  # ddp alone has it
    (1, ["objective.kind=dpo", "objective.loss=aot"], "zero3_offload", "peft=lora, larger GPUs"),
]


@pytest.mark.parametrize(("processes", "overrides", "strategy", "tries"), DOES_NOT_FIT)
def test_what_does_not_fit_is_flagged_with_what_to_try(processes, overrides, strategy, tries):
    model = [*sized("qwen3", **QWEN3_8B), "model.dtype=bfloat16", "batch.examples_per_step=64"]
    found = known([*model, *overrides], processes, GIB, strategy)
    assert found.fits is False and found.total + found.outside > GIB
    assert found.advice == f"try {tries}"
    assert "of the 1.00 GiB of each GPU: DOES NOT FIT" in found.sentence() and found.advice in found.sentence()
    assert found.to_json()["fits"] is False
    assert known([*model, *overrides], processes, 500 * GIB, strategy).fits


def test_what_nccl_keeps_for_several_processes_counts_beside_what_cuda_does() -> None:
    alone, shared, twice = (
        ((1, "ddp"), (1, "zero2")),
        ((2, "ddp"), (8, "fsdp2"), (128, "fsdp2")),
        ((8, "zero1"), (8, "zero3")),
    )
    for communicators, runs in enumerate((alone, shared, twice)):
        for processes, strategy in runs:
            found = known(sized("llama"), processes, 80 * GIB, strategy)
            assert found.to_json()["outside"] == found.outside == OUTSIDE + communicators * NCCL
            needed = found.total + found.outside
            assert replace(found, device=needed).fits and not replace(found, device=needed - 1).fits


def test_documents_that_fit_no_device_are_split_over_as_few_as_are_enough() -> None:
    model = [*sized("qwen3", **QWEN3_8B), "model.dtype=float32", "data.max_length=262144"]
    model += ["batch.examples_per_step=8", "strategy.sequence_parallel=auto"]

    def planned(tokens: int, processes: int) -> Memory:
        return known([*model, AUTO, f"batch.tokens_per_device={tokens}"], processes, 80 * GIB, "fsdp2")

    advice = planned(262144, 8).advice
    over = "strategy.sequence_parallel=4 batch.tokens_per_device=65536"
    assert advice == f"try {over}, which splits documents of 262,144 tokens over 4 processes"
    assert planned(65536, 8).fits and planned(131072, 8).fits is False  # what it advises fits, and no fewer do
    assert "sequence_parallel" not in planned(262144, 1).advice
