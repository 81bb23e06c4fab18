"""Adapted layers as one function each compute what PEFT computes, by fewer operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answer_runs import of_objective
from here import ALONE, loaded, run_here
from peft import LoraConfig, get_peft_model
from running import LLAMA, Run, base_config, train
from safetensors.torch import load_file
from tiny_models import off, tiny_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from packtrain.changes import lora
from packtrain.changes.lora import CHANGE, AdaptedProduct, fuse_adapters, plain_layers
from packtrain.changes.spec import Situation
from packtrain.config.schema import Peft
from packtrain.errors import UserError
from packtrain.model.adapters import _ready, add_adapters
from packtrain.model.layers import recompute
from packtrain.model.load import base_model
from packtrain.model.precision import Precision
from tests.train import forked

BF16, F32 = torch.bfloat16, torch.float32


def plain(family: str) -> Any:
    return tiny_model(family)


def adapted(family: str = "qwen3", dtype: torch.dtype = F32, **options: Any) -> Any:
    """A tiny model whose adapters change its outputs. PEFT makes them float32, also on bfloat16 weights."""
    peft = Peft(kind="lora", r=4, alpha=10, options=options)
    model = add_adapters(plain(family).to(dtype), peft, seed=0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.double() if dtype == torch.float64 else model


class Two(nn.Module):
    """Layers up, with a bias, and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def two(dtype: torch.dtype = F32, adapters: torch.dtype | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = get_peft_model(
        Two().to(dtype), LoraConfig(target_modules=["up", "down"], r=8, lora_alpha=20, **options)
    )  # type: ignore[arg-type]
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(adapters or dtype)
            if "lora_A" not in name:
                nn.init.normal_(weight, std=0.3)
    return model


def computed(model: Any, x: torch.Tensor, autocast: torch.dtype | None = None, **given: Any) -> list[Any]:
    """Outputs, and the gradients of x and of all trained weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        out = model(x, **given)
    (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
    return [out.detach(), *(one.grad for one in (x, *model.parameters()) if one.requires_grad)]


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The widths of the layers that compute as one function."""
    seen, own = list[int](), AdaptedProduct.apply
    with monkeypatch.context() as patch:
        patch.setattr(AdaptedProduct, "apply", lambda *given: seen.append(given[1].shape[0]) or own(*given))
        yield seen


def trained(model: Any, autocast: torch.dtype | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of two rows, and the gradients of a loss by name."""
    ids = torch.arange(66).view(2, 33) * 7 % 94 + 3
    model.zero_grad()
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        logits = model(input_ids=ids, use_cache=False).logits
    nn.functional.cross_entropy(logits.double().flatten(0, 1), ids.flatten() * 5 % 97).backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi"])
def test_in_float64_outputs_and_all_gradients_are_those_of_peft_and_undone_the_same_bits(family: str) -> None:
    model = adapted(family, torch.float64)
    names, state = [*model.state_dict()], [dict(vars(module)) for module in model.modules()]
    logits, gradients = trained(model)
    layers = [*plain_layers(model)]
    assert len(layers) == 3 * (6 if family == "phi" else 7)
    undo = fuse_adapters(base_model(model))
    ours, our_gradients = trained(model)
    assert off(ours, logits) <= 1e-12 and our_gradients.keys() == gradients.keys()
    assert len(gradients) == 2 * len(layers) and [*model.state_dict()] == names
    assert all(off(one, gradients[name]) <= 1e-12 for name, one in our_gradients.items())
    undo()
    assert [dict(vars(module)) for module in model.modules()] == state
    assert trained(model)[0].equal(logits)


FORMATS = {
    "float32": (F32, F32, None),
    "bfloat16": (BF16, BF16, None),
    "float32 adapters on bfloat16, autocast": (BF16, F32, BF16),
    "float32, autocast": (F32, F32, BF16),
    "float16 autocast": (F32, F32, torch.float16),
}


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("rslora", [False, True])
def test_in_every_format_it_is_as_near_to_float64_as_peft(
    formats: tuple[torch.dtype, torch.dtype, torch.dtype | None], rslora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, adapters, autocast = formats
    x = torch.randn(3, 101, 48, dtype=weights, generator=torch.Generator().manual_seed(0))
    exact = computed(two(weights, adapters, use_rslora=rslora).double(), x.double())
    theirs = computed(two(weights, adapters, use_rslora=rslora), x, autocast)
    model = two(weights, adapters, use_rslora=rslora)
    fuse_adapters(model.get_base_model())
    with counting(monkeypatch) as seen:
        ours = computed(model, x, autocast)
    assert seen == [96, 48] and len(ours) == 6
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]
    errors = [[off(one.double(), right) for one, right in zip(found, exact, strict=True)] for found in (theirs, ours)]
    assert all(own <= 1.25 * other for own, other in zip(errors[1], errors[0], strict=True)), errors
    assert sum(errors[1]) <= 1.05 * sum(errors[0])


@pytest.mark.parametrize(("weights", "autocast"), [(F32, None), (BF16, BF16), (F32, BF16)])
@pytest.mark.parametrize("family", ["qwen3", "phi"])
def test_new_adapters_change_no_bit_of_the_model(family: str, weights: torch.dtype, autocast: Any) -> None:
    """So first margins of preferences are zero: a reference with adapters off runs by PEFT."""
    model = add_adapters(plain(family).to(weights), Peft(kind="lora", r=4), seed=0)
    logits, gradients = trained(model, autocast)
    fuse_adapters(base_model(model))
    ours, our_gradients = trained(model, autocast)
    assert ours.equal(logits) and our_gradients.keys() == gradients.keys()


def bases(model: Any) -> list[Any]:
    return [getattr(model.get_base_model(), name).base_layer for name in ("up", "down")]


def add_another(model: Any) -> None:
    model.add_adapter("other", LoraConfig(target_modules=["up", "down"], r=4, init_lora_weights=False))


def hook(model: Any) -> None:
    for base in bases(model):
        base.register_forward_hook(lambda _, given, out: out * 2)


def wrap(model: Any) -> None:
    """Weights as tensor subclasses, as quantised and sharded ones are."""
    for base in bases(model):
        base.weight = nn.Parameter(TwoTensor(base.weight.detach(), base.weight.detach()), requires_grad=False)


NEVER: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "dropout": ({"lora_dropout": 0.1}, lambda model: model.eval()),
    "DoRA": ({"use_dora": True}, id),
    "biases of adapters": ({"lora_bias": True}, id),
    "hooks on the base": ({}, hook),
    "another forward": ({}, lambda model: [vars(base).update(forward=base.forward) for base in bases(model)]),
}
NOT_NOW: dict[str, tuple[Callable[[Any], object], dict[str, Any], torch.dtype | None]] = {
    "off": (lambda model: model.base_model.disable_adapter_layers(), {}, None),
    "merged": (lambda model: model.merge_adapter(), {}, None),
    "two at a time": (lambda model: (add_another(model), model.base_model.set_adapter(["default", "other"])), {}, None),
    "one for each row": (lambda model: add_another(model.eval()), {"adapter_names": ["default", "other"]}, None),
    "weights as subclasses": (wrap, {}, None),
    "float32 adapters on bfloat16": (lambda model: [base.bfloat16() for base in bases(model)], {}, None),
    "float64 under autocast": (lambda model: model.double(), {}, BF16),
    "compiled": (lambda model: model.get_base_model().compile(backend="eager", fullgraph=True), {}, None),
}


@pytest.mark.parametrize(("options", "prepare"), NEVER.values(), ids=NEVER.keys())
def test_layers_that_are_more_than_a_product_stay_as_peft_has_them(options: Any, prepare: Any) -> None:
    model = two(**options)
    prepare(model)
    fuse_adapters(model.get_base_model())
    base = model.get_base_model()
    assert not [*plain_layers(model)] and not any("forward" in vars(one) for one in (base.up, base.down))


@pytest.mark.parametrize(("prepare", "given", "autocast"), NOT_NOW.values(), ids=NOT_NOW.keys())
def test_calls_that_are_out_of_the_ordinary_are_computed_by_peft(
    prepare: Any, given: Any, autocast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = [], torch.randn(2, 11, 48, generator=torch.Generator().manual_seed(0))
    for fuse in (fuse_adapters, id):
        model = two()
        undo: Any = fuse(model.get_base_model())
        torch.manual_seed(1)
        prepare(model)
        kind = bases(model)[0].weight.dtype
        with counting(monkeypatch) as seen:
            found.append(computed(model, x.to(kind), autocast, **given))
        assert not seen
        if fuse is fuse_adapters:
            undo()
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or ours.equal(theirs))


@pytest.mark.parametrize("trains", ["nothing more", "biases", "the base"])
@pytest.mark.parametrize("shape", [(48,), (0, 48), (5, 48), (2, 3, 5, 48), "not contiguous", "no gradient"])
def test_inputs_of_every_shape_and_bases_that_train_get_the_gradients_of_peft(shape: Any, trains: str) -> None:
    def run(*, fuse: bool) -> list[torch.Tensor | None]:
        model = two(torch.float64, bias="all" if trains == "biases" else "none")
        for base in bases(model):
            base.weight.requires_grad_(trains == "the base")
        if fuse:
            fuse_adapters(model.get_base_model())
        torch.manual_seed(0)
        x = torch.randn(48, 9).t() if isinstance(shape, str) else torch.randn(shape)
        x = x.double().requires_grad_(shape != "no gradient")
        out = model(x)
        doubled = out.mul_(2)  # results may be changed in place, as PEFT's
        (doubled * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        return [out.detach(), x.grad, *(one.grad for one in model.parameters())]

    for ours, theirs in zip(run(fuse=True), run(fuse=False), strict=True):
        assert (ours is None) == (theirs is None)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("autocast", [None, BF16])
@pytest.mark.parametrize("family", ["qwen3", "phi"])
def test_recomputed_layers_compute_the_same_bits(family: str, autocast: torch.dtype | None) -> None:
    """Selective checkpointing keeps results of products: the adapter may not be added into them."""
    found = []
    for policy in ("none", "full", "selective", "every_2"):
        model = adapted(family).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        fuse_adapters(base_model(model))
        if policy != "none":
            model.enable_input_require_grads()
            recompute(base_model(model), policy)
        found.append(trained(model, autocast))
    (logits, gradients), *others = found
    for ours, our_gradients in others:
        assert ours.equal(logits) and our_gradients.keys() == gradients.keys() != set()
        assert all(one.equal(gradients[name]) for name, one in our_gradients.items())


class Operators(TorchDispatchMode):
    """The operators that compute or copy, by name: on a GPU about one kernel each.

    `moved`: bytes of a token that sums and scalings read and write, and products read to add into.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not func.is_view and name not in ("detach", "_unsafe_view", "empty_like"):
            self.names[name] += 1
            given = [one for one in args if isinstance(one, torch.Tensor)]
            read = {"mul": given, "add": given, "addmm_": given[:1]}.get(name, [])
            self.moved += sum(one.nbytes for one in (*read, *([out] if read == given else []))) // 1000
        return out


def operators(*, fuse: bool) -> tuple[Operators, Operators, int]:
    """Forward and backward of a bfloat16 layer, and the bytes kept for a token."""
    torch.manual_seed(0)
    adapted: Any = get_peft_model(nn.Sequential(nn.Linear(64, 96, False, dtype=BF16)), LoraConfig(target_modules=["0"]))  # type: ignore[arg-type]
    _ready(adapted, SimpleNamespace(get_output_embeddings=lambda: None))  # type: ignore[arg-type]
    if fuse:
        fuse_adapters(adapted.get_base_model())
    kept: list[torch.Tensor] = []
    x = torch.randn(1, 1000, 64, dtype=BF16, requires_grad=True)
    hooks = saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with hooks, Operators() as forward, torch.autocast("cpu", BF16):
        out = adapted(x)
    ones = torch.ones_like(out)
    with Operators() as backward:
        out.backward(ones)
    storages = {one.data_ptr(): one.untyped_storage().nbytes() for one in kept if 1000 in one.shape}
    return forward, backward, sum(storages.values()) // 1000


def test_a_layer_takes_fewer_operators_and_keeps_no_more_bytes_of_a_token() -> None:
    theirs, ours = operators(fuse=False), operators(fuse=True)
    casts = {"_to_copy": 2}  # of A and B to bfloat16, of their gradients back
    assert [one.names for one in theirs[:2]] == [casts | {"mm": many, "mul": 1, "add": 1} for many in (3, 5)]
    assert [one.names for one in ours[:2]] == [casts | {"mm": 2, "addmm_": 1} | more for more in ({}, {"addmm": 2})]
    assert [one.moved for one in theirs[:2]] == [10 * 96, 4 * 96 + 6 * 64]
    assert [one.moved for one in ours[:2]] == [2 * 96, 2 * 64]
    assert theirs[2] == ours[2] == 2 * (64 + 8)
    found = []
    for fuse in (fuse_adapters, id):
        model, kept = adapted("qwen3", BF16), list[torch.Tensor]()
        fuse(base_model(model))
        with saved_tensors_hooks(lambda one, kept=kept: kept.append(one) or one, lambda one: one):
            trained(model, BF16)
        of_tokens = {one.data_ptr(): one.untyped_storage().nbytes() for one in kept if {33, 66} & {*one.shape}}
        found.append(sum(of_tokens.values()))
    assert found[0] == found[1] > 0


def test_auto_proposes_it_on_gpus_and_its_name_anywhere(tmp_path: Path) -> None:
    def proposed(kernels: str, device: str, model: Any, **peft: Any) -> Any:
        config = loaded(tmp_path, base_config(tmp_path, peft={"kind": "lora", **peft}, model={"kernels": kernels}))
        ranks = replace(ALONE, device=torch.device(device))
        return CHANGE.propose(Situation(config, base_model(model), ranks, Precision(F32, None)))

    model = adapted()
    assert proposed("auto", "cpu", model) is None
    assert proposed("auto", "cuda", tiny_model("qwen3"), kind="none") is None
    for kernels, device in (("auto", "cuda"), ("lora", "cpu")):
        found = proposed(kernels, device, model)
        assert not found.lacks and found.what == "21 adapted layers as one function each"
    assert "none has a plain adapter" in proposed("auto", "cuda", adapted("gpt2")).lacks
    assert "none has a plain adapter" in proposed("auto", "cuda", adapted(use_dora=True)).lacks
    model.get_base_model().model.layers[0].mlp.compile(backend="eager")
    assert "torch_compile" in proposed("auto", "cuda", model).lacks


FILE = "final-adapters/adapter_model.safetensors"
FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "head_dim": 12, "sliding_window": 8},
}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4}


def assert_same_training(run: Run, expected: Run, file: str = FILE, tolerance: float = 1e-6) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=tolerance)
    assert run.norms == pytest.approx(expected.norms, rel=20 * tolerance)
    ours, theirs = load_file(run.folder / file), load_file(expected.folder / file)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_a_run_trains_the_same_adapters_and_goes_on_from_those_of_peft(family: str, tmp_path: Path) -> None:
    trainer = {"max_steps": 3, "checkpoint_every": 1, "keep_checkpoints": None, "mixed_precision": "no"}
    config = base_config(tmp_path, trainer=trainer, peft={"kind": "lora"})
    config["model"]["config"] = {**LLAMA, **FAMILIES[family]}
    expected = run_here(tmp_path, config, name="plain")
    assert expected.summary["changes"] == {}, "on a CPU it is not tried"
    run = run_here(tmp_path, config, "model.kernels=lora", name="lora")
    assert run.summary["changes"]["lora"].startswith("14 adapted layers as one function each (loss off by 0,")
    assert_same_training(run, expected)
    on = run_here(tmp_path, config, "model.kernels=lora", expected.resume(2), name="on")
    assert on.losses == pytest.approx(expected.losses[2:], rel=1e-6)
    settings = "final-adapters/adapter_config.json"
    assert (run.folder / settings).read_text() == (expected.folder / settings).read_text()


def test_preferences_begin_with_a_zero_margin_against_the_model_with_its_adapters_off(tmp_path: Path) -> None:
    """Preferences turn dropout off: those layers are plain, too."""
    peft = {"kind": "lora", "dropout": 0.1}
    config = of_objective(tmp_path, "dpo", 12, trainer={"max_steps": 2}, peft=peft)
    expected = run_here(tmp_path, config, name="plain")
    run = run_here(tmp_path, config, "model.kernels=lora", name="lora")
    assert "adapters off" in run.log and "lora" in run.summary["changes"]
    assert run.losses[0] == pytest.approx(0.6931472, abs=1e-7)
    assert_same_training(run, expected, tolerance=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        (GPT2, [], "none has a plain adapter"),
        (LLAMA, ["peft.dropout=0.1"], "none has a plain adapter"),
        (LLAMA, ["peft=none"], "lora cannot change this model"),
    ],
    ids=["Conv1D", "dropout", "no adapters"],
)
def test_asked_for_by_name_where_it_cannot_be_it_ends_the_run(
    family: dict[str, Any], options: list[str], said: str, tmp_path: Path
) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1})
    config["model"]["config"] = family
    with pytest.raises(UserError, match=rf"model\.kernels: .*{said}.*\[change-unavailable\]"):
        run_here(tmp_path, config, "peft=lora", "model.kernels=lora", *options)


def without_exceptions(*given: Any) -> None:
    """packtrain's command; it fails if a layer sees sharded weights or unlike formats."""
    own = lora._format_of

    def format_of(tensors: list[torch.Tensor]) -> torch.dtype:
        dtype = own(tensors)
        assert dtype is not None
        return dtype

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "_format_of", format_of)
        forked.run(*given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["trainer.mixed_precision=bf16", "model.dtype=bfloat16"]], ids=["f32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_under_every_strategy_that_can_prove_it_adapters_train_the_same(
    strategy: str, options: list[str], tmp_path: Path
) -> None:
    trainer = {"max_steps": 3, "mixed_precision": "no", "gradient_checkpointing": "selective"}
    config = base_config(tmp_path, trainer=trainer, strategy={"name": strategy}, peft={"kind": "lora"})
    config["model"]["config"] = {**LLAMA, **FAMILIES["qwen3"]}
    expected = train(tmp_path, config, *options, name="plain", processes=2)
    run = train(tmp_path, config, *options, "model.kernels=lora", name="lora", processes=2, begin=without_exceptions)
    assert run.summary["changes"]["lora"].startswith("14 adapted layers as one function each (loss off by 0")
    if options:
        assert run.losses == pytest.approx(expected.losses, rel=5e-3)
    else:
        assert_same_training(run, expected)
