"""What is computed again, or on tiles of MLPs, changes losses and gradients by no bit or by rounding, and saves what it says."""

from __future__ import annotations

import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from matrix import SPARSE
from running import assert_same_bits, base_config
from test_experts import loss_and_gradients
from tiny_models import SIZES as TINY
from tiny_models import tiny_model
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain.attention.segmented import NAME
from packtrain.changes.tiles import check_tiles, mlps_of, tile_mlps
from packtrain.config.compose import load_config
from packtrain.errors import CheckFailed, UserError
from packtrain.model import layers
from packtrain.model.layers import recompute
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.packing.segments import Segments
from packtrain.plan.fit import GIB, Memory
from packtrain.plan.memory import CHECKPOINTING, Found, estimate
from packtrain.train import preparation
from packtrain.train.preparation import choose_checkpointing, plan_memory

SIZES = {**TINY, "num_hidden_layers": 5}


class Calls(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def passes(kind: str, attention: str, *policies: str) -> tuple[torch.Tensor, list[torch.Tensor | None], Calls]:
    """Loss and gradients of a model on a row of three documents (a plain one where attention is sdpa), and what ran."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).train()
    model.set_attn_implementation("eager" if (kind, attention) == ("gpt_oss", "sdpa") else attention)  # sinks: no sdpa
    ids = torch.randint(0, SIZES["vocab_size"], (1, 40))
    positions = torch.cat([torch.arange(length) for length in (10, 20, 10)])[None]
    row = {"segments": Segments((10, 20, 10), (None, None, None)), "position_ids": positions}
    for policy in policies:
        recompute(model, policy)
    with Calls() as calls:
        loss = model(input_ids=ids, labels=ids, use_cache=False, **(row if attention == NAME else {})).loss
        loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters()], calls


@pytest.mark.sample("sdpa-llama", f"{NAME}-llama", f"{NAME}-qwen2")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "gpt_oss"])  # the last adds biases in place
@pytest.mark.parametrize("attention", ["sdpa", NAME])
def test_losses_and_gradients_are_the_same_bits(kind: str, attention: str) -> None:
    loss, gradients, _ = passes(kind, attention, "none")
    for policy in CHECKPOINTING[1:]:
        other, theirs, _ = passes(kind, attention, policy)
        assert other.equal(loss), policy
        assert all(one is two is None or one.equal(two) for one, two in zip(gradients, theirs, strict=True)), policy


def test_a_policy_replaces_the_one_before() -> None:
    """Bits and operators are those of the last one."""
    for policies in (["every_4", "selective"], ["selective", "every_3"], ["full", "none"], ["every_2", "none", "full"]):
        loss, gradients, calls = passes("llama", "sdpa", policies[-1])
        other, theirs, made = passes("llama", "sdpa", *policies)
        assert other.equal(loss) and made.of == calls.of, policies
        assert all(
            one is not None and two is not None and one.equal(two) for one, two in zip(gradients, theirs, strict=True)
        ), policies


def test_compiled_layers_recompute_by_one_policy_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled anew when a policy comes back."""
    monkeypatch.setattr(layers, "BACKEND", "eager")
    plain, fast = (tiny_model("llama", num_hidden_layers=3).train() for _ in range(2))
    layers.compile_layers(fast)
    graphs = list[int]()
    for policy in ("every_2", "none", "full", "every_2", "none", "full"):
        recompute(plain, policy)
        recompute(fast, policy)
        (loss, gradients), (ours, our_gradients) = (loss_and_gradients(one, ROW) for one in (plain, fast))
        assert abs(ours - loss) <= 1e-6 * abs(loss)
        for name, gradient in our_gradients.items():
            assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), (name, policy)
        graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert graphs[2:] == graphs[2:3] * 4 and graphs[0] > 0


def test_what_is_computed_again_is_what_the_policy_says() -> None:
    """Of a layer's seven products the last is never made again: nothing in the backward pass needs its result."""
    calls = {policy: passes("llama", "sdpa", policy)[2].of for policy in CHECKPOINTING}
    product, attention = "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"
    layers = SIZES["num_hidden_layers"]
    again = {policy: of[product] - calls["none"][product] for policy, of in calls.items()}
    whole = {"none": 0, "every_4": 2, "every_3": 2, "selective": 0, "every_2": 3, "full": layers}
    assert again == {policy: 6 * number for policy, number in whole.items()} | {"selective": layers * 3}
    assert {policy: of[attention] - layers for policy, of in calls.items()} == whole


def test_trl_may_switch_it_off_and_on_again() -> None:
    """As it does around a pass of the reference."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    recompute(model, "every_2")
    before = [layer.gradient_checkpointing for layer in model.model.layers]
    model.activation_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert [layer.gradient_checkpointing for layer in model.model.layers] == before == [True, False, True, False, True]
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_a_model_whose_layers_cannot_is_refused() -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match=r"\[cannot-recompute\](.|\n)*gradient_checkpointing=none"):
        recompute(model, "full")


@pytest.mark.parametrize(
    ("value", "said"), [("true", "Set full"), ("always", r"none\|every_4"), ("every_5", "every_4")]
)
def test_what_cannot_be_is_refused_with_what_can(value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, ["model.path=owner/model", "data.train=d", f"trainer.gradient_checkpointing={value}"])


def test_auto_goes_by_the_gpu_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary, which the config leaves to the tokenizer, is the loaded model's."""
    sizes = [f"model.config.{name}={value}" for name, value in {"model_type": "qwen3", **SIZES}.items()]
    made = ["model.init=random", "model.tokenizer=quickstart", "data.train=x", "batch.examples_per_step=4"]
    made += [*sizes, "verify.preflight=false"]
    whose = [one for one in made if "vocab_size" not in one]
    config, precision = load_config(None, whose), Precision(torch.float32, torch.bfloat16)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    planned = estimate(load_config(None, [*made, "trainer.gradient_checkpointing=selective"]), 1, GIB)
    assert isinstance(planned, Memory)
    monkeypatch.setattr(preparation, "max_over_ranks", lambda number, _: number)  # one rank, without its GPU
    rooms = (("cuda", 1.01, "selective"), ("cuda", 0.9, "full"), ("cuda", 9, "none"), ("cpu", 0, "none"))
    for device, room, expected in rooms:
        gpu = types.SimpleNamespace(total_memory=(room * planned.total + planned.outside) / 0.9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        ranks = Ranks(0, 1, torch.device(device))
        run: Any = types.SimpleNamespace(config=config, precision=precision, ranks=ranks, model=model)
        assert choose_checkpointing("auto", plan_memory(run, Found()))[0] == expected


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_runs_train_the_same_bits(peft: str, tmp_path: Path) -> None:
    """As near as rounding under each strategy and of each objective: test_cells.py."""
    config = base_config(tmp_path, trainer={"max_steps": 2, "mixed_precision": "no"})
    config["model"]["config"] = {**config["model"]["config"], "num_hidden_layers": 3}
    plain, *runs = (
        run_here(tmp_path, config, f"peft={peft}", f"trainer.gradient_checkpointing={policy}", name=policy)
        for policy in ("none", "selective", "every_2")
    )
    for run in runs:
        assert_same_bits(run, plain)
        assert run.norms == plain.norms


ROW = Segments((17, 1, 33, 8))
FAMILIES = ["llama", "gpt2", "gemma3_text", "phi"]
MORE = ["qwen3", "gemma2", "mistral", "cohere", "glm", "olmo2"]


@pytest.mark.sample("llama-none", "llama-full", "llama-every_2", "gemma3_text-none", "gpt2-full")
@pytest.mark.parametrize("policy", ["none", "full", "every_2"])
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_losses_and_gradients_are_those_of_all_tokens_at_once(family: str, policy: str) -> None:
    model = tiny_model(family)
    check_tiles(model)
    model.train()
    for module in model.modules():
        module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)
    if policy != "none":
        recompute(model, policy)
    loss, gradients = loss_and_gradients(model, ROW)
    for tokens in (1, 7, ROW.tokens - 1, ROW.tokens, 1000):
        undo = tile_mlps(model, tokens)
        ours, our_gradients = loss_and_gradients(model, ROW)
        assert abs(ours - loss) <= 1e-6 * abs(loss)
        for name, gradient in our_gradients.items():
            assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), (name, tokens)
        assert tokens < ROW.tokens or ours.equal(loss)
        undo()
    assert loss_and_gradients(model, ROW)[0].equal(loss)


def kept(model: Any, segments: Segments) -> tuple[int, int]:
    """Bytes that a pass forward keeps in tensors as wide as the inside of an MLP, and in all."""
    storages, wide = dict[int, int](), dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.dim() > 1 and tensor.shape[-1] == model.config.intermediate_size and not tensor.is_leaf:
            wide[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_and_gradients(model, segments)
    return sum(wide.values()), sum(storages.values())


def test_of_what_is_inside_nothing_is_kept() -> None:
    model = tiny_model("llama", intermediate_size=768).train()
    before, whole = kept(model, Segments((200,)))
    tile_mlps(model, 50)
    after, tiled = kept(model, Segments((200,)))
    assert before >= 3 * 3 * 200 * 768 * 4 and after == 0 and whole - tiled > 0.9 * before


def test_experts_and_routers_are_left_alone() -> None:
    mixed = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1])
    assert [type(mlp).__name__ for mlp in mlps_of(mixed)] == ["Qwen3MoeMLP"]
    for family in ("gpt_oss", "mixtral", "opt"):
        with pytest.raises(UserError, match=r"\[no-mlps\]"):
            check_tiles(tiny_model(family))


def test_mlps_that_mix_tokens_are_refused() -> None:
    model: Any = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    for layer in model.model.layers:
        layer.mlp.forward = lambda hidden: own(hidden.cumsum(dim=-2))
    with pytest.raises(CheckFailed, match=r"LlamaForCausalLM.*\[mlps-mix-tokens\]"):
        check_tiles(model)


@pytest.mark.exhaustive
def test_of_a_mixture_the_dense_layers_are_tiled(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2})
    config["model"]["config"] = {**SPARSE, "mlp_only_layers": [0]}
    plain, run = (run_here(tmp_path, config, f"trainer.tokens_per_mlp_tile={n}", name=n) for n in ("null", "20"))
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert "1 MLP on tiles of 20 tokens" in run.summary["changes"]["tiles"]
