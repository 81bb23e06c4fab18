"""The number formats of a run: decided alike on all ranks, kept by a resumed run, IEEE's float32 in proofs, and bfloat16 within its rounding."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from here import ALONE
from running import Run, after, base_config, packtrain, train
from tiny_models import EXPERTS, documents, gradient, off, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.changes.experts import group_experts
from packtrain.config.schema import Peft
from packtrain.model import precision
from packtrain.model.adapters import add_adapters
from packtrain.model.forward import add_loss_sum
from packtrain.model.precision import decide_precision, settle_kernels, weights_cast_once
from packtrain.model.spread import Ranks
from packtrain.packing.collate import collate_padded
from packtrain.plan.origin import origin_in
from packtrain.proof import isolation
from tests.train import forked


def test_the_ranks_take_bfloat16_only_if_each_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model, two = tiny_model("llama"), Ranks(0, 2, torch.device("cpu"))
    monkeypatch.setattr(precision, "bf16_speed", lambda: 3.0)
    assert decide_precision(model, "fast", ALONE).mixed == "bf16"
    monkeypatch.setattr(precision, "gather_object", lambda found: [*found, ("no", "the other is slow")])
    decided = decide_precision(model, "fast", two)
    assert (decided.mixed, decided.autocast, decided.why) == ("no", None, "the other is slow")


@pytest.mark.parametrize(("asked", "expected"), [("auto", "bf16"), ("fast", "bf16"), ("no", "no")])
def test_a_resumed_run_keeps_what_was_decided_unless_another_is_asked_for(asked: str, expected: str) -> None:
    assert decide_precision(tiny_model("llama"), asked, ALONE, recorded="bf16").mixed == expected


def test_training_computes_in_ieee_float32_and_so_do_proofs_in_a_process_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settings() -> tuple[str, bool, bool]:
        matmul = torch.backends.cuda.matmul.allow_tf32
        return torch.get_float32_matmul_precision(), matmul, torch.backends.cudnn.allow_tf32

    seen = []
    inner = isolation.logits_of
    monkeypatch.setattr(isolation, "logits_of", lambda *given: seen.append(settings()) or inner(*given))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    assert settings() == ("high", True, True)
    assert isolation.prove_isolation(tiny_model("llama"), "segmented").verdict == "exact"
    assert set(seen) == {("highest", False, False)}
    assert settings() == ("high", True, True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    settle_kernels()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # a plan for each new length takes 0.1 to 1 s
    assert settings() == ("highest", False, False) and "NVIDIA_TF32_OVERRIDE" not in os.environ


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_of_autocast_compute_the_same_bits_without_copies_of_their_inputs(options: dict) -> None:
    """PEFT casts the input of each adapted layer to float32; autocast casts it back, to a copy of its own."""
    ids = torch.randint(3, 97, (2, 33), generator=torch.Generator().manual_seed(0))
    found = []
    for ours in (False, True):
        model: Any = add_adapters(tiny_model("qwen3").bfloat16(), Peft(kind="lora", r=4, options=options), seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(1))
        if not ours:
            for layer in model.modules():
                vars(layer).pop("_cast_input_dtype", None)
        kept: list[torch.Tensor] = []
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(lambda one, kept=kept: kept.append(one) or one, lambda one: one),
        ):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        storages = [one.untyped_storage() for one in kept]
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found.append((loss, gradients, sum({one.data_ptr(): one.nbytes() for one in storages}.values())))
        with torch.no_grad():  # without autocast PEFT's cast is needed
            assert model(input_ids=ids, use_cache=False).logits.isfinite().all()
    (theirs, their_gradients, most), (loss, gradients, held) = found
    assert loss.equal(theirs) and gradients.keys() == their_gradients.keys() and len(gradients) > 40
    assert all(gradient.equal(their_gradients[name]) for name, gradient in gradients.items())
    assert held == most if options else held < 0.95 * most


def test_a_run_says_what_it_computes_in_and_a_resumed_one_refuses_another_format(tmp_path: Path) -> None:
    trainer = {"max_steps": 2, "checkpoint_every": 1, "keep_checkpoints": None}
    config = base_config(tmp_path, trainer=trainer)
    run = train(tmp_path, config, "trainer.mixed_precision=fast")
    assert re.search(r"precision +float32 weights, computed in \w+ \(this CPU multiplies [\d.]+ times", run.log)
    decided = origin_in(run.checkpoint(1))["trainer.mixed_precision"]
    assert decided in ("no", "bf16")
    other = {"no": "bf16", "bf16": "no"}[decided]
    file, resumed = str(tmp_path / "run.yaml"), run.resume(1)
    apart = f"trainer.output_dir={tmp_path / 'again'}"
    refused = packtrain("sft", file, f"trainer.mixed_precision={other}", resumed, apart, expect=2)
    assert "trainer.mixed_precision" in refused.stderr and decided in refused.stderr
    packtrain("sft", file, "trainer.mixed_precision=auto", resumed, apart)
    assert Run(tmp_path / "again").losses == run.losses[1:]


def record_and_run(arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    """The command, which writes down what DDP and FSDP2 were asked for."""
    from torch.distributed import fsdp

    asked: list[str] = []

    def note(*_: Any, mp_policy: Any = None, gradient_as_bucket_view: Any = None, **__: Any) -> None:
        bucket = f"gradient_as_bucket_view={gradient_as_bucket_view}"
        asked.append(f"{mp_policy.param_dtype} {mp_policy.reduce_dtype}" if mp_policy else bucket)
        Path(environment["ASKED"]).write_text(json.dumps(asked))

    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp.__init__, fsdp.fully_shard = after(note, ddp.__init__), after(note, fsdp.fully_shard)  # type: ignore[assignment]
    forked.run(arguments, environment, cwd, outputs)


@pytest.mark.sample("fsdp2-model.dtype=bfloat16-None torch.float32")
@pytest.mark.parametrize(
    ("strategy", "changes", "asked"),
    [
        ("ddp", "trainer.mixed_precision=bf16", "gradient_as_bucket_view=True"),
        ("fsdp2", "trainer.mixed_precision=bf16", "torch.bfloat16 torch.float32"),
        ("fsdp2", "model.dtype=bfloat16", "None torch.float32"),
    ],
)
def test_gradients_are_added_up_in_float32_and_not_copied(
    strategy: str, changes: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(forked.ENVIRONMENT, "ASKED", str(tmp_path / "asked"))
    config = base_config(tmp_path, trainer={"max_steps": 1}, strategy={"name": strategy})
    train(tmp_path, config, changes, processes=2, begin=record_and_run)
    assert set(json.loads((tmp_path / "asked").read_text())) == {asked}


LENGTHS = (17, 33, 64, 5)
LOSS, GRADIENT = 1e-2, 5e-2
"""How far bfloat16 may be from float32: losses, and gradients relative to their norm."""


def loss_sum_model(family: str, **overrides) -> PreTrainedModel:
    model = tiny_model(family, **overrides)
    for weight in model.parameters():  # as wide as those of real models, whose rounding errors average out
        weight.data *= 0.5 if weight.dim() > 1 else 1
    add_fused_lm_head(model)
    add_loss_sum(model)
    return model


def step(model: PreTrainedModel, *, bf16: bool, keep: bool = False) -> tuple[float, torch.Tensor]:
    """The loss and all gradients over three padded micro-batches."""
    model.zero_grad()
    total = 0.0
    with weights_cast_once() if keep else nullcontext():
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**collate_padded(documents(LENGTHS, seed), 0), loss_sum=True)
            (loss / 300).backward()
            total += loss.item()
    return total, gradient(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "cohere", "gemma2"])
def test_losses_and_gradients_are_those_of_float32(family: str) -> None:
    model = loss_sum_model(family)
    loss, exact = step(model, bf16=False)
    ours, rounded = step(model, bf16=True, keep=True)
    assert ours == pytest.approx(loss, rel=LOSS) and off(rounded, exact) <= GRADIENT


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_head_computes_in_float32(weights: torch.dtype) -> None:
    model = loss_sum_model("phi").to(weights)  # its head has a bias
    batch = collate_padded(documents(LENGTHS), 0)
    seen: list[torch.Tensor] = []
    cast(Any, model.base_model).register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        loss = model(**batch, loss_sum=True)
    loss.backward()
    head: Any = model.get_output_embeddings()
    logits = F.linear(seen[0].float(), head.weight.float(), head.bias.float())
    expected = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    assert (loss.dtype, loss.item()) == (torch.float32, pytest.approx(expected.item(), rel=1e-5))
    assert head.weight.grad.dtype == weights


class Casts(TorchDispatchMode):
    """Counts how often a tensor of one of `shapes` is cast to bfloat16."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += (kwargs or {}).get("dtype") == torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_weights_are_cast_once_a_step_with_the_same_gradients(family: str, checkpointing: bool) -> None:
    """Linear layers by autocast, grouped experts by their own code."""
    model = loss_sum_model(family, **(EXPERTS if family == "mixtral" else {})).train()
    if family != "llama":
        group_experts(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    layers = [weight for name, weight in model.named_parameters() if re.search(r"_proj(\.weight)?$", name)]
    shapes = {weight.shape for weight in layers}
    with Casts(shapes) as casts:
        loss, expected = step(model, bf16=True)
    assert casts.count >= 3 * len(layers)
    with Casts(shapes) as casts:
        again, same = step(model, bf16=True, keep=True)
    assert (again, casts.count) == (loss, len(layers)) and torch.equal(same, expected)
    with torch.no_grad():
        layers[0].mul_(1.5)
    assert step(model, bf16=True, keep=True)[0] != loss  # what an optimizer did between two steps is seen
