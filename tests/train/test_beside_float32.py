"""In 16 bits a change is compared with float32: a kernel that rounds elsewhere stays in models of any depth, a wrong one does not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from answer_runs import of_objective
from here import run_here
from peft import LoraConfig, get_peft_model
from running import assert_same_bits, base_config, train
from test_changes import ROW, Scaled, changing
from tiny_models import EXPERTS, gradient, off, tiny_model
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packtrain.model.layers import recompute_in_eval
from packtrain.proof.comparison import ChangeProof, MakeChange, prove_change, tolerance_of
from packtrain.proof.upcast import in_float32
from tests.train import forked

BF16 = torch.bfloat16
Change = Callable[[Any], MakeChange]


def parts(model: nn.Module, name: str) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__.endswith(name)]


def forwards(name: str, run: Callable[..., torch.Tensor]) -> Change:
    """Another forward for all modules of a class whose name ends so."""

    def of(model: nn.Module) -> MakeChange:
        def make() -> Callable[[], object]:
            for part in parts(model, name):
                part.forward = MethodType(run, part)
            return lambda: [vars(part).pop("forward") for part in parts(model, name)]

        return make

    return of


def norm(offset: float, eps: float = 0.0) -> Change:
    """A norm in float32, rounded once where the model's own is rounded twice; its weights count from `offset`."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        exact, own = x.float(), getattr(self, "variance_epsilon", None) or self.eps
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + own + eps)
        return (normed * (offset + self.weight.float())).to(x.dtype)

    return forwards("RMSNorm", run)


def rotation(run: Callable[..., tuple[torch.Tensor, ...]]) -> Change:
    """Another function in transformers' file."""

    def of(model: nn.Module) -> MakeChange:
        file = __import__(type(parts(model, "Attention")[0]).__module__, fromlist=["_"])
        own = file.apply_rotary_pos_emb

        def make() -> Callable[[], object]:
            file.apply_rotary_pos_emb = lambda *given, **named: run(own, *given)
            return lambda: setattr(file, "apply_rotary_pos_emb", own)

        return make

    return of


def in_exact(own: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return tuple(one.to(q.dtype) for one in own(q.float(), k.float(), cos.float(), sin.float()))


def half(own: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    width, turned = q.shape[-1] // 2, own(q, k, cos, sin)
    return tuple(torch.cat([a[..., :width], b[..., width:]], -1) for a, b in zip(turned, (q, k), strict=True))


def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The activation in float32, rounded once; the last product in two sums."""
    inside = (self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()).to(x.dtype)
    first, last = inside.tensor_split(2, dim=-1)
    zeros = torch.zeros_like
    return self.down_proj(torch.cat([first, zeros(last)], -1)) + self.down_proj(torch.cat([zeros(first), last], -1))


def scaled(by: float) -> Change:
    def of(model: nn.Module) -> MakeChange:
        attentions = parts(model, "Attention")
        own = attentions[0].scaling

        def scale(to: float) -> None:
            for part in attentions:
                part.scaling = to

        return lambda: (scale(own * by), lambda: scale(own))[1]

    return of


def without_bias(model: nn.Module) -> MakeChange:
    queries = [getattr(part.q_proj, "base_layer", part.q_proj) for part in parts(model, "Attention")]

    def make() -> Callable[[], object]:
        for part in queries:
            part.forward = lambda x, weight=part.weight: F.linear(x, weight)
        return lambda: [vars(part).pop("forward") for part in queries]

    return make


@cache
def a_model(family: str, layers: int, how: str) -> tuple[PreTrainedModel, Any]:
    """A model with norms that are not trivial, and a small bias of queries; the model to train, with adapters if `how` is lora."""
    extra = {"attention_bias": True} if family == "llama" else {}
    model = tiny_model(family, num_hidden_layers=layers, **extra)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += (0.02 if name.endswith("bias") else 0.1) * torch.randn(weight.shape, generator=random)
    model = model if how == "autocast" else model.bfloat16()
    return model, get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")) if how == "lora" else model


def proved(change: Change, family: str, layers: int, how: str = "full") -> ChangeProof:
    model, trained = a_model(family, layers, how)
    weights = {name: weight for name, weight in trained.named_parameters() if weight.requires_grad}

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", BF16, enabled=how != "full"):
            return trained(input_ids=ROW, labels=ROW).loss

    undos: list[Callable[[], object]] = []

    def make() -> Callable[[], object]:
        undos.append(change(model)())
        return lambda: undos.pop()()

    before = [dict(vars(part)) for part in model.modules()]
    proof = prove_change(make, loss, weights, tolerance_of(BF16), lambda values: values, model, BF16)
    assert all(weight.grad is None for weight in weights.values())
    assert len(undos) == (not proof.refusal), "it stays if it is right, and is made once"
    for undo in undos:  # the model serves other tests
        undo()
    assert [dict(vars(part)) for part in model.modules()] == before
    return proof


OFFSETS = {"llama": 0.0, "qwen3": 0.0, "gemma2": 1.0}


def settings(*cheap: tuple[str, int, str]) -> Any:
    """All combinations of family, layers and what is trained; all but the `cheap` ones are exhaustive."""
    every = [(f, n, how) for f in OFFSETS for n in (1, 12, 36) for how in ("full", "lora", "autocast")]
    marks = {True: (), False: (pytest.mark.exhaustive,)}
    cases = [pytest.param(*case, marks=marks[case in cheap], id=f"{case[0]}-{case[1]}-{case[2]}") for case in every]
    return pytest.mark.parametrize(("family", "layers", "how"), cases)


@settings(("llama", 1, "autocast"), ("gemma2", 1, "lora"), ("qwen3", 12, "full"), ("llama", 36, "full"))
def test_kernels_that_round_elsewhere_stay(family: str, layers: int, how: str) -> None:
    """Two bfloat16 results of a deep model would differ by more than is allowed between them."""
    changes = [norm(OFFSETS[family]), rotation(in_exact), forwards("MLP", mlp)]

    def all_of_them(model: nn.Module) -> MakeChange:
        def make() -> Callable[[], object]:
            undos = [change(model)() for change in changes]
            return lambda: [undo() for undo in reversed(undos)]

        return make

    proof = proved(all_of_them, family, layers, how)
    assert not proof.refusal and proof.own is not None and proof.module, proof
    assert layers < 36 or proof.own[1] > 0.5 * tolerance_of(BF16).gradients


FAULTS: dict[str, tuple[str, Callable[[float], Change]]] = {
    "offset": ("RMSNorm (", lambda offset: norm(1 - offset)),
    "epsilon": ("RMSNorm (", lambda offset: norm(offset, eps=0.05)),
    "rotation": ("Attention (", lambda offset: rotation(half)),
    "scale": ("Attention (", lambda offset: scaled(1.03)),
    "bias": ("Linear (model.layers.*.self_attn.q_proj", lambda offset: without_bias),
}


@settings(("llama", 1, "full"), ("gemma2", 1, "autocast"), ("qwen3", 1, "lora"), ("llama", 12, "lora"))
def test_faults_are_found_in_the_module_that_has_them(family: str, layers: int, how: str) -> None:
    """Epsilon is off by some percent of the mean square, the scale by 3 %, the bias by 2 % of the queries."""
    for name, (kind, change) in FAULTS.items():
        if name == "bias" and family != "llama":
            continue
        proof = proved(change(OFFSETS[family]), family, layers, how)
        assert kind in proof.refusal and "from float32" in proof.refusal, (name, proof)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "checkpoints"])
def test_in_float32_gradients_are_those_of_a_float32_model_and_no_copy_of_a_weight_is_kept(
    family: str, how: str
) -> None:
    def of_family() -> Any:
        model: Any = tiny_model(family, **(EXPERTS if family == "qwen3_moe" else {}))
        return model if how == "autocast" else model.bfloat16()

    def loss_of(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", BF16, enabled=how == "autocast" and model is not exact):
            return model(input_ids=ROW, labels=ROW, use_cache=False).loss

    def gradients(model: Any) -> torch.Tensor:
        model.zero_grad()
        loss_of(model).backward()
        return gradient(model).float()

    exact, model = of_family().float(), of_family()
    if how == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        recompute_in_eval(model)
    sizes = {weight.shape for weight in model.parameters() if weight.dim() > 1 and weight.dtype == BF16}
    kept: list[torch.Tensor] = []
    true, own = gradients(exact), gradients(model)
    with (
        in_float32(model, BF16),
        torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one),
    ):
        raised = gradients(model)
    assert off(raised, true) < 0.6 * off(own, true)
    assert not [
        one
        for one in kept
        if one.dtype == torch.float32 and {one.shape, one.t().shape if one.dim() == 2 else one.shape} & sizes
    ]
    assert gradients(model).equal(own), "afterwards it computes as before"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_layers_in_float32_keep_only_their_inputs_until_the_backward_pass(family: str) -> None:
    """Else a run could need twice its memory before step 1."""
    model: Any = tiny_model(family, num_hidden_layers=4, **(EXPERTS if family == "qwen3_moe" else {})).bfloat16()
    backbone, weights = model.base_model, {id(weight) for weight in model.parameters()}
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.extend([] if id(one) in weights or not one.is_floating_point() else [one])
        return one

    def kept_numbers() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            backbone(input_ids=ROW, use_cache=False).last_hidden_state.sum().backward()
        return sum(one.numel() for one in {one.data_ptr(): one for one in kept}.values())

    own = kept_numbers()
    with in_float32(model, BF16):
        assert kept_numbers() < 0.5 * own
    assert kept_numbers() == own


def test_what_single_modules_were_compared_by_is_freed_before_the_whole_model_runs_again() -> None:
    """Else a proof would take the most memory of some runs."""
    model: Any = tiny_model("llama", num_hidden_layers=2).bfloat16()
    held: list[int] = []

    def loss() -> torch.Tensor:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.is_floating_point()]
        gradients = {weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None}
        storages = {one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        held.append(sum(size for place, size in storages.items() if place not in gradients))
        return model(input_ids=ROW, labels=ROW, use_cache=False).loss

    weights, tolerance = dict(model.named_parameters()), tolerance_of(BF16)
    proof = prove_change(norm(0.0)(model), loss, weights, tolerance, lambda values: values, model, BF16)
    assert not proof.refusal and proof.module
    first, *captured, last = held
    inputs = ROW.numel() * model.config.hidden_size * BF16.itemsize
    assert len(captured) == 2 and min(captured) > first + inputs
    assert last < first + inputs / 2


def test_kernels_without_float32_get_their_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flash(module: Any, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        seen.append(query.dtype)
        return sdpa(module, query, *given, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_of_a_test", flash)
    model: Any = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_of_a_test"
    with in_float32(model, BF16):
        assert model(input_ids=ROW, use_cache=False).logits.dtype == torch.float32
    assert {*seen} == {BF16}
    model(input_ids=ROW)
    assert seen[-1] == torch.float32


def test_a_model_that_cannot_compute_in_float32_is_compared_with_itself() -> None:
    model: Any = tiny_model("llama").bfloat16()
    own = model.model.layers[0].mlp.forward

    def picky(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == BF16
        return own(x)

    model.model.layers[0].mlp.forward = picky
    weights = dict(model.named_parameters())
    for by in (1.0, 0.8):
        change = forwards(
            "Attention",
            lambda self, *given, by=by, **named: scaled_output(type(self).forward(self, *given, **named), by),
        )
        given = (
            lambda: model(input_ids=ROW, labels=ROW, use_cache=False).loss,
            weights,
            tolerance_of(BF16),
            lambda values: values,
        )
        proof = prove_change(change(model), *given, model, BF16)
        assert proof.own is None and bool(proof.refusal) == (by != 1), proof


def scaled_output(output: Any, by: float) -> Any:
    return Scaled.apply(output[0], by), *output[1:]


def right_kernel(*given: Any) -> None:
    """packtrain's command, with a right kernel."""
    with pytest.MonkeyPatch.context() as patch:
        changing(patch, lambda x: Scaled.apply(x, 1.0))
        forked.run(*given)


def wrong_kernel(*given: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        changing(patch, lambda x: Scaled.apply(x, 0.97))
        forked.run(*given)


LORA = {"model": {"dtype": "bfloat16"}, "peft": {"kind": "lora"}, "trainer": {"gradient_checkpointing": "selective"}}
costly = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("sft", LORA),
        pytest.param("sft", {"model": {"dtype": "bfloat16"}}, marks=costly),
        pytest.param("sft", {"packing": {"mode": "padding"}}, marks=costly),
        pytest.param("dpo", {}, marks=costly),
        pytest.param("kto", {}, marks=costly),
        pytest.param("reward", {"trainer": {"gradient_checkpointing": "full"}}, marks=costly),
    ],
    ids=str,
)
def test_runs_in_bfloat16_keep_a_right_kernel_and_refuse_one_whose_gradients_are_three_percent_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, more: dict[str, Any]
) -> None:
    trainer = {"max_steps": 1, "mixed_precision": "bf16", **more.get("trainer", {})}
    if more.get("model") and not more.get("peft"):
        trainer["mixed_precision"] = "auto"
    config, runs = of_objective(tmp_path, verb, 12, **more | {"trainer": trainer}), []
    for by, said in (
        (1.0, "a fast MLP (loss off by "),
        (0.97, "as the model comes; a fast MLP: the gradient of "),
    ):
        with monkeypatch.context() as patch:
            changing(patch, lambda x, by=by: Scaled.apply(x, by))
            run = run_here(tmp_path, config, name=f"by-{by}")
        assert run.summary["changes"]["kernel"].startswith(said), run.summary["changes"]
        runs.append(run)
    assert_same_bits(*runs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "strategy",
    [{"name": "ddp"}, {"name": "fsdp2"}, {"name": "fsdp2", "sequence_parallel": 2}, {"name": "zero2"}],
    ids=str,
)
def test_ranks_compare_with_float32_together(tmp_path: Path, strategy: dict[str, Any]) -> None:
    config = base_config(tmp_path, strategy=strategy, trainer={"max_steps": 1, "mixed_precision": "bf16"})
    right = train(tmp_path, config, name="right", processes=2, begin=right_kernel)
    wrong = train(tmp_path, config, name="wrong", processes=2, begin=wrong_kernel)
    assert "from float32" in right.log and "of LlamaMLP (model.layers.*.mlp) is off" in wrong.log
