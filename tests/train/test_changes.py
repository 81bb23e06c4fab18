"""A change to how the model computes, such as Liger's kernels, stays only where losses and gradients are the model's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answer_runs import of_objective
from here import loaded, run_here, train_here
from peft import LoraConfig, get_peft_model
from running import Run, assert_same_bits, base_config, train
from tiny_models import EXPERTS, tiny_model
from torch import nn
from transformers.models.llama import modeling_llama

from packtrain.changes import liger as kernels
from packtrain.changes import spec
from packtrain.changes.liger import fuse_by_liger, why_no_liger
from packtrain.changes.residual import carry_in
from packtrain.changes.spec import Change, Proposal
from packtrain.errors import CheckFailed, PacktrainError, UserError
from packtrain.model.load import base_model
from packtrain.model.spread import embedding_apart, layers_of
from packtrain.proof.comparison import ChangeProof, MakeChange, prove_change, tolerance_of
from packtrain.train import loader, preflight
from packtrain.train import run as train_run
from tests.train import forked

ROW = torch.arange(40)[None] * 7 % 94 + 3


class Scaled(torch.autograd.Function):
    """x, and in the backward pass `by` times what is right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.by, None


def replaced(module: nn.Module, wrap: Callable[[torch.Tensor], torch.Tensor]) -> MakeChange:
    """A kernel in the place of a module's forward: what `wrap` makes of the module's own outputs."""

    def make() -> Callable[[], object]:
        own = module.forward
        module.forward = lambda *given, **named: wrap(own(*given, **named))
        return lambda: module.__dict__.pop("forward")

    return make


def of_norm(module: Any, by: float) -> MakeChange:
    """An RMSNorm with the right outputs, whose own weight gets `by` times its gradient."""

    def make() -> Callable[[], object]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            exact, weight = hidden.float(), Scaled.apply(module.weight, by)
            normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + module.variance_epsilon)
            return (weight * normed).to(hidden.dtype)  # rounded once, where the model's own is rounded twice

        module.forward = forward
        return lambda: module.__dict__.pop("forward")

    return make


def proved(make: Callable[[Any], MakeChange], dtype: torch.dtype = torch.float32) -> tuple[ChangeProof, bool]:
    """The proof of what `make` makes for a model, and whether the model is as before."""
    model = tiny_model("llama").to(dtype)
    weights = dict(model.named_parameters())
    layer = model.model.layers[1]
    given = (lambda: model(input_ids=ROW, labels=ROW).loss, weights, tolerance_of(dtype), lambda values: values)
    proof = prove_change(make(layer), *given)
    assert all(weight.grad is None for weight in weights.values())
    return proof, "forward" not in layer.mlp.__dict__ | layer.input_layernorm.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_kernel_stays(dtype: torch.dtype) -> None:
    proof, plain = proved(lambda layer: of_norm(layer.input_layernorm, 1.0), dtype)
    assert not proof.refusal and not plain
    assert max(proof.loss, proof.gradients) <= (1e-5 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make, said",
    [
        (lambda layer: replaced(layer.mlp, lambda x: x * 0.8), "the loss of the first rows is off by"),
        (lambda layer: replaced(layer.mlp, lambda x: Scaled.apply(x, 0.8)), "its gradients are off by 0."),
        (lambda layer: of_norm(layer.input_layernorm, 0.5), "those of model.layers.1.input_layernorm.weight by 0.5"),
        (lambda layer: replaced(layer.mlp, lambda x: x * torch.nan), "is off by nan"),
        (lambda layer: replaced(layer.mlp, lambda x: x[..., 1:]), "the model cannot compute by it: "),
        (lambda layer: lambda: layer.no_such_kernel, "AttributeError"),
    ],
    ids=["forward", "backward", "one small weight", "nan", "raises", "cannot be made"],
)
def test_a_wrong_kernel_is_taken_out_and_the_reason_says_what_is_off(make: Any, said: str, dtype: torch.dtype) -> None:
    proof, plain = proved(make, dtype)
    assert said in proof.refusal and plain, proof


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "qwen3_moe"])
def test_under_autocast_alone_the_residual_stream_is_bfloat16_until_it_is_undone(family: str) -> None:
    """gpt2 adds its positions after the embedding; the norms of qwen3_moe hand float32 to the experts."""
    model: Any = tiny_model(family, **(EXPERTS if family == "qwen3_moe" else {}))
    seen = list[torch.dtype]()
    for layer in layers_of(model)[1:]:
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))

    def run(autocast: bool) -> tuple[torch.Tensor, set[torch.dtype]]:
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=ROW).logits.detach(), {*seen}

    plain, rounded = run(False), run(True)
    assert rounded[1] == {torch.float32}
    undo = carry_in(model, torch.bfloat16)
    assert run(False)[0].equal(plain[0]) and run(False)[1] == {torch.float32}
    logits, dtypes = run(True)
    assert dtypes == {torch.bfloat16} and not logits.equal(rounded[0])
    assert (logits - plain[0]).norm() <= 4 * (rounded[0] - plain[0]).norm()
    undo()
    assert run(True)[0].equal(rounded[0])


def test_fsdp2_gathers_an_embedding_apart_only_if_nothing_else_has_its_weights() -> None:
    assert embedding_apart(tiny_model("llama")) is not None
    assert embedding_apart(tiny_model("llama", tie_word_embeddings=True)) is None
    adapted = get_peft_model(tiny_model("llama", tie_word_embeddings=True), LoraConfig(modules_to_save=["lm_head"]))
    assert embedding_apart(base_model(adapted)) is None


def test_without_a_loss_nothing_is_proved() -> None:
    weight = torch.ones(3, requires_grad=True)
    given = ({"weight": weight}, tolerance_of(torch.float32), lambda values: values)
    proof = prove_change(lambda: lambda: None, lambda: (weight * 0).sum(), *given)
    assert "no loss to compare" in proof.refusal


def changing(
    monkeypatch: pytest.MonkeyPatch,
    wrap: Callable[[torch.Tensor], torch.Tensor],
    before: Callable[[], object] = lambda: None,
    **more: Any,
) -> None:
    """Has runs of this process try a kernel in the second layer, after `before`."""

    def make(model: Any) -> Callable[[], object]:
        before()
        return replaced(model.model.layers[1].mlp, wrap)()

    kernel = Proposal(what="a fast MLP", make=make, **more)
    monkeypatch.setattr(train_run, "proposals", lambda situation: [("kernel", kernel)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("plain")
    return run_here(folder, base_config(folder, trainer={"max_steps": 3}))


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (0.8, "as the model comes; a fast MLP: its gradients are off by"),
        (1.0, "a fast MLP (loss off by 0, gradients by 0"),
    ],
)
def test_a_run_proves_a_kernel_says_so_and_trains_bit_for_bit_as_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: Run, by: float, said: str
) -> None:
    changing(monkeypatch, lambda x: Scaled.apply(x, by))
    run = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 3}), f"verify.preflight={by == 1}")
    assert_same_bits(run, plain)
    assert run.summary["changes"]["kernel"].startswith(said) and f"kernel     {said}" in run.log


@pytest.mark.parametrize("mode", ["packed", "padding"])
def test_of_documents_too_long_for_a_proof_the_end_of_what_is_trained_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: Run, mode: str
) -> None:
    changing(monkeypatch, lambda x: Scaled.apply(x, 1.0))
    proved, own = list[Any](), preflight.first_documents
    monkeypatch.setattr(loader, "_FIRST_TOKENS", 8)
    monkeypatch.setattr(preflight, "first_documents", lambda steps: proved.append(own(steps)) or proved[-1])
    run = run_here(tmp_path, base_config(tmp_path, packing={"mode": mode}, trainer={"max_steps": 3}))
    assert (proved[0].tokens, proved[0].inputs["input_ids"].shape) == (8, (1, 8)) and 0 < proved[0].trained <= 8
    assert run.summary["changes"]["kernel"].startswith("a fast MLP (loss off by 0, gradients by 0")
    if mode == "packed":
        assert_same_bits(run, plain)


def test_asked_for_by_name_a_wrong_or_absent_kernel_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changing(monkeypatch, lambda x: x * 0.8, key="model.kernel")
    with pytest.raises(CheckFailed, match=r"\[change-inexact\]"):
        run_here(tmp_path, base_config(tmp_path))
    monkeypatch.undo()
    changing(monkeypatch, lambda x: x, key="model.kernel", lacks="it is not installed")
    with pytest.raises(UserError, match=r"\[change-unavailable\]"):
        run_here(tmp_path, base_config(tmp_path))


def cannot_be_made_by_one(*given: Any) -> None:
    """packtrain's command, with a kernel that rank 1 cannot build."""

    def build(x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, 0.5)

    with pytest.MonkeyPatch.context() as patch:
        rank = given[1]["RANK"]
        changing(patch, build, before=lambda: {}["no compiler"] if rank == "1" else None)
        forked.run(*given)


def fails_in_its_forward(*given: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        changing(patch, lambda x: x[..., 1:])
        forked.run(*given)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "begin, said, other",
    [
        (cannot_be_made_by_one, "another process cannot compute by it", "KeyError: 'no compiler'"),
        (fails_in_its_forward, *2 * ["the model cannot compute by it"]),
    ],
)
def test_ranks_that_gather_their_weights_decide_alike_and_none_waits_for_another(
    tmp_path: Path, begin: Any, said: str, other: str
) -> None:
    config = base_config(tmp_path, strategy={"name": "fsdp2"}, trainer={"max_steps": 2})
    expected = train(tmp_path, config, name="plain", processes=2)
    run = train(tmp_path, config, processes=2, begin=begin)
    assert said in run.log and other in (run.folder / "logs/rank-00001.log").read_text()
    assert_same_bits(run, expected)


@pytest.mark.sample("dpo")
@pytest.mark.parametrize("verb", ["dpo", "kto", "reward"])
def test_other_objectives_prove_by_their_own_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str) -> None:
    config = of_objective(tmp_path, verb, 12, trainer={"max_steps": 2})
    expected = run_here(tmp_path, config, name="plain")
    for by, said in ((0.8, "its gradients are off"), (1.0, "a fast MLP (loss off by 0")):
        with monkeypatch.context() as patch:
            changing(patch, lambda x, by=by: Scaled.apply(x, by))
            run = run_here(tmp_path, config, name=f"changed-{by}")
        assert_same_bits(run, expected)
        assert said in run.summary["changes"]["kernel"]


@pytest.mark.parametrize(
    "propose, raised, code",
    [
        (lambda _: Proposal(what="none", make=lambda model: model.no_such), CheckFailed, "change-inexact"),
        (lambda _: None, UserError, "change-unavailable"),
    ],
    ids=["not exact", "not possible"],
)
def test_a_change_whose_name_is_the_value_of_model_kernels_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, propose: Any, raised: type[PacktrainError], code: str
) -> None:
    others = {name: Change(name=name, propose=propose) for name in ("acme", "another")}
    monkeypatch.setattr(spec, "CHANGES", SimpleNamespace(all=lambda: others))
    config = loaded(tmp_path, base_config(tmp_path, trainer={"max_steps": 1}))
    assert train_here(config, tmp_path / "auto").summary["changes"].keys() <= {"acme", "another"}
    with pytest.raises(raised, match=rf"model\.kernels: .*\[{code}\]"):
        train_here(replace(config, model=replace(config.model, kernels="acme")), tmp_path / "required")


ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
needs_liger = pytest.mark.skipif(
    not (find_spec("liger_kernel") and find_spec("triton")), reason="no liger-kernel: pip install -e '.[liger]'"
)
patched: list[Any] = []


class Norm(nn.RMSNorm):
    """In the place of Liger's class."""


def patch(model: Any, *, by: float = 1.0, **off: bool) -> None:
    """What Liger's function for Llama does to a model and to transformers' file, by torch."""
    assert off == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    patched.append(model)
    rotate = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *given, **named: rotate(*given, **named)
    modeling_llama.LlamaRMSNorm = Norm  # type: ignore[misc]
    for layer in model.base_model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.offset = 0.0
            norm.forward = lambda x, own=norm.forward: own(x) * by
    if by < 0:
        raise RuntimeError("no kernel for this device")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Liger that is not there, for the type llama alone; `auto` takes this CPU for a GPU."""
    named = {"_apply_liger_kernel_to_instance": patch, "MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": None}}
    of = {"": {"__spec__": object()}, ".transformers": {"LigerRMSNorm": Norm}, ".transformers.monkey_patch": named}
    for name, values in of.items():  # by a spec it counts as installed
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", SimpleNamespace(**values))  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    own = why_no_liger
    monkeypatch.setattr(kernels, "why_no_liger", lambda model, device: own(model, CUDA))
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    patched.clear()
    return monkeypatch


def state(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(place)) for place in (*model.modules(), modeling_llama)]


@pytest.mark.parametrize("by", [1.0, -1.0], ids=["asked to", "after an error"])
def test_undone_everything_is_as_before(liger: pytest.MonkeyPatch, by: float) -> None:
    model = tiny_model("llama")
    before = state(model)
    of_liger: Any = sys.modules["liger_kernel.transformers.monkey_patch"]
    of_liger._apply_liger_kernel_to_instance = partial(patch, by=by)
    if by < 0:
        with pytest.raises(RuntimeError, match="no kernel for this device"):
            fuse_by_liger(model)
    else:
        undo = fuse_by_liger(model)
        assert modeling_llama.LlamaRMSNorm is not Norm, "models loaded later are as they come"
        assert state(model) != before
        undo()
    assert state(model) == before


def test_where_they_cannot_be_it_is_said_why(liger: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert why_no_liger(model, CPU) == "they need a GPU"
    assert why_no_liger(model, CUDA) == ""
    assert why_no_liger(tiny_model("gpt2"), CUDA) == "liger-kernel has none for gpt2"
    liger.setattr(kernels, "find_spec", lambda name: None)
    assert "pip install 'packtrain[liger]'" in why_no_liger(model, CUDA)


def test_a_run_takes_them_by_proof_and_its_reference_as_well(liger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = of_objective(tmp_path, "dpo", 12, trainer={"max_steps": 2})
    plain = run_here(tmp_path, config, "model.kernels=none", name="plain")
    assert not patched and plain.summary["changes"] == {}
    assert run_here(tmp_path, config, name="auto").summary["changes"] == {} and not patched, "no GPU: not tried"
    run = run_here(tmp_path, config, "model.kernels=liger", name="liger")
    said = "norms, rotation and activations by Liger's kernels (loss off by 0"
    assert run.summary["changes"]["kernels"].startswith(said)
    assert_same_bits(run, plain)
    assert len({id(model) for model in patched}) == 2
    liger.setattr(kernels, "why_no_liger", why_no_liger)
    with pytest.raises(UserError, match=r"model\.kernels: .*GPU \[change-unavailable\]"):
        run_here(tmp_path, config, "model.kernels=liger", name="refused")


@needs_liger
def test_ligers_own_kernels_compute_the_models_losses_and_gradients_and_leave_no_trace() -> None:
    """In float32 to 1e-4, in bfloat16 beside float32; also checkpointed, and with adapters. Experts stay the model's own.
    A norm of Gemma that forgets its offset is refused. The last two also have sums in their norms."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/train")])}
    command = [sys.executable, "-m", "liger_models"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == 11
    for number, result in enumerate(results):
        assert bool(result["refusal"]) == (number == 8) and result["inside"] == [
            number != 8,
            number < 6 or number > 8,
        ], result
        assert ("from float32" in result["figures"] + result["refusal"]) == (number not in (0, 2, 3, 9)), result
        assert result["after"] == [False, False] and result["rotation"].startswith("transformers."), result
