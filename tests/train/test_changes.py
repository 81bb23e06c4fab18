"""A change to how the model computes stays only where losses and gradients are the model's own; else training is as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answer_runs import labelled, preferences
from here import loaded, run_here, train_here
from peft import LoraConfig, get_peft_model
from running import Run, assert_same_bits, base_config, train, write_jsonl
from tiny_models import tiny_model
from torch import nn

from packtrain.changes import spec
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
    proof = prove_change(
        make(model.model.layers[1]),
        lambda: model(input_ids=ROW, labels=ROW).loss,
        weights,
        tolerance_of(dtype),
        lambda values: values,
    )
    assert all(weight.grad is None for weight in weights.values())
    return proof, "forward" not in model.model.layers[1].mlp.__dict__ | model.model.layers[1].input_layernorm.__dict__


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
        (lambda layer: layer.no_such_kernel, ""),
    ],
    ids=["forward", "backward", "one small weight", "nan", "raises", "cannot be made"],
)
def test_a_wrong_kernel_is_taken_out_and_the_reason_says_what_is_off(make: Any, said: str, dtype: torch.dtype) -> None:
    if not said:
        made: Any = lambda layer: lambda: layer.no_such_kernel  # noqa: E731
        make, said = made, "AttributeError"
    proof, plain = proved(make, dtype)
    assert said in proof.refusal and plain, proof


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "qwen3_moe"])
def test_under_autocast_alone_the_residual_stream_is_bfloat16_until_it_is_undone(family: str) -> None:
    """gpt2 adds its positions after the embedding; the norms of qwen3_moe hand float32 to the experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model: Any = tiny_model(family, **(experts if family == "qwen3_moe" else {}))
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
    proof = prove_change(
        lambda: lambda: None,
        lambda: (weight * 0).sum(),
        {"weight": weight},
        tolerance_of(torch.float32),
        lambda values: values,
    )
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


def test_a_run_with_a_wrong_kernel_says_so_and_trains_bit_for_bit_as_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: Run
) -> None:
    changing(monkeypatch, lambda x: Scaled.apply(x, 0.8))
    run = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 3}), "verify.preflight=false")
    assert_same_bits(run, plain)
    assert "as the model comes; a fast MLP: its gradients are off by" in run.summary["changes"]["kernel"]
    assert "kernel     as the model comes; a fast MLP: its gradients" in run.log


def test_a_right_kernel_is_proved_and_trains_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: Run) -> None:
    changing(monkeypatch, lambda x: Scaled.apply(x, 1.0))
    run = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 3}))
    assert_same_bits(run, plain)
    assert run.summary["changes"]["kernel"].startswith("a fast MLP (loss off by 0, gradients by 0")


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
    with pytest.raises(
        CheckFailed, match="would not train as the model itself does: the loss of the first rows is off"
    ):
        run_here(tmp_path, base_config(tmp_path))
    monkeypatch.undo()
    changing(monkeypatch, lambda x: x, key="model.kernel", lacks="it is not installed")
    with pytest.raises(UserError, match="not available, it is not installed"):
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
    assert said in run.log and other in (run.folder / "logs" / "rank-00001.log").read_text()
    assert_same_bits(run, expected)


@pytest.mark.sample("dpo")
@pytest.mark.parametrize("verb", ["dpo", "kto", "reward"])
def test_other_objectives_prove_by_their_own_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str) -> None:
    rows = labelled(12, seed=0) if verb == "kto" else preferences(12, seed=0)
    config = base_config(tmp_path, objective={"kind": verb}, trainer={"max_steps": 2}, data={"max_length": 128})
    config["data"]["train"] = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    expected = run_here(tmp_path, config, name="plain")
    for by, said in ((0.8, "its gradients are off"), (1.0, "a fast MLP (loss off by 0")):
        with monkeypatch.context() as patch:
            changing(patch, lambda x, by=by: Scaled.apply(x, by))
            run = run_here(tmp_path, config, name=f"changed-{by}")
        assert_same_bits(run, expected)
        assert said in run.summary["changes"]["kernel"]


def broken(model: Any) -> Any:
    return model.no_such_kernel


@pytest.mark.parametrize(
    "propose, raised, said",
    [
        (lambda situation: Proposal(what="none", make=broken), CheckFailed, "would not train as"),
        (lambda situation: None, UserError, "acme cannot change this model"),
    ],
    ids=["not exact", "not possible"],
)
def test_a_change_whose_name_is_the_value_of_model_kernels_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, propose: Any, raised: type[PacktrainError], said: str
) -> None:
    others = {name: Change(name=name, propose=propose) for name in ("acme", "another")}
    monkeypatch.setattr(spec, "CHANGES", SimpleNamespace(all=lambda: others))
    config = loaded(tmp_path, base_config(tmp_path, trainer={"max_steps": 1}))
    assert train_here(config, tmp_path / "auto").summary["changes"].keys() <= {"acme", "another"}
    with pytest.raises(raised, match=said) as refused:
        train_here(replace(config, model=replace(config.model, kernels="acme")), tmp_path / "required")
    assert refused.value.problems[0].where == "model.kernels"
