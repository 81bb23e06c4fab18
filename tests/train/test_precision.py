"""The number formats of a run: decided alike on all ranks, kept by a resumed run, and IEEE's float32 in proofs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from here import ALONE
from running import Run, base_config, packtrain, train
from tiny_models import tiny_model

from packtrain.model import precision
from packtrain.model.precision import bf16_speed, decide_precision, multiply_without_tf32
from packtrain.model.spread import Ranks
from packtrain.plan.origin import origin_in
from packtrain.proof import isolation
from packtrain.train import run as run_module
from tests.train import forked

LOSS = 2e-3
"""How far losses of fsdp2 may be from those of ddp, both in bfloat16: fsdp2's residual stream is bfloat16 as well."""


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


def test_the_measurement_of_a_cpu_is_short_and_a_ratio() -> None:
    from time import perf_counter

    bf16_speed()
    started = perf_counter()
    assert bf16_speed() > 0
    assert perf_counter() - started < 1  # 0.2 s on a free machine


@pytest.fixture
def restored() -> Any:
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


@pytest.mark.usefixtures("restored")
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
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    assert settings() == ("high", True, True)
    assert isolation.prove_isolation(tiny_model("llama"), "segmented").verdict == "exact"
    assert set(seen) == {("highest", False, False)}
    assert settings() == ("high", True, True)
    multiply_without_tf32()
    assert settings() == ("highest", False, False) and "NVIDIA_TF32_OVERRIDE" not in os.environ


@pytest.mark.usefixtures("restored")
def test_answers_restore_the_random_state_of_their_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_of = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: forked_of.append(devices) or torch.no_grad())
    monkeypatch.setattr(run_module.results, "answer", lambda *_, **__: ["yes"])
    monkeypatch.setattr(run_module, "base_model", lambda model: model)
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        trainer: Any = type("Trainer", (), {"samples": ["?"]})
        config: Any = type("Config", (), {"trainer": trainer})
        run: Any = run_module.Run(config, Ranks(0, 1, device), None, *[None] * 4)  # type: ignore[arg-type]
        run.prepared = SimpleNamespace(model=None, tokenizer=None, attention="sdpa")
        assert run_module._answers(run) == ["yes"]
    assert forked_of == [[torch.device("cuda", 3)], []]


def test_a_run_says_what_it_computes_in_and_a_resumed_one_refuses_another_format(tmp_path: Path) -> None:
    trainer = {"max_steps": 2, "checkpoint_every": 1, "keep_checkpoints": None}
    config = base_config(tmp_path, trainer=trainer)
    run = train(tmp_path, config, "trainer.mixed_precision=fast")
    said = (run.folder / "logs" / "rank-00000.log").read_text()
    assert re.search(r"precision +float32 weights, computed in \w+ \(this CPU multiplies [\d.]+ times as fast", said)
    first = run.folder / "checkpoints" / "step-000001"
    decided = origin_in(first)["trainer.mixed_precision"]
    assert decided in ("no", "bf16")
    other = {"no": "bf16", "bf16": "no"}[decided]
    file, resumed = str(tmp_path / "run.yaml"), f"trainer.resume={first}"
    apart = f"trainer.output_dir={tmp_path / 'again'}"
    refused = packtrain("sft", file, f"trainer.mixed_precision={other}", resumed, apart, expect=2)
    assert "trainer.mixed_precision" in refused.stderr and f"made with {decided}" in refused.stderr
    done = packtrain("sft", file, "trainer.mixed_precision=auto", resumed, apart)
    assert "as before the checkpoint" in done.stdout
    assert Run(tmp_path / "again").losses == run.losses[1:]


def record_and_run(arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    """The command, which writes down what DDP and FSDP2 were asked for."""
    from torch.distributed import fsdp

    asked: list[str] = []
    inner, shard = torch.nn.parallel.DistributedDataParallel.__init__, fsdp.fully_shard

    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        policy = kwargs["mp_policy"]
        asked.append(f"{policy.param_dtype} {policy.reduce_dtype}")
        Path(environment["ASKED"]).write_text(json.dumps(asked))
        return shard(*args, **kwargs)

    def ddp(self: Any, *args: Any, **kwargs: Any) -> None:
        asked.append(f"gradient_as_bucket_view={kwargs.get('gradient_as_bucket_view')}")
        Path(environment["ASKED"]).write_text(json.dumps(asked))
        inner(self, *args, **kwargs)

    torch.nn.parallel.DistributedDataParallel.__init__ = ddp  # type: ignore[method-assign]
    fsdp.fully_shard = fully_shard  # type: ignore[assignment]
    forked.run(arguments, environment, cwd, outputs)


def test_two_processes_of_fsdp2_train_in_bfloat16_as_those_of_ddp(tmp_path: Path, monkeypatch: Any) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 5, "mixed_precision": "bf16"}, optim={"max_grad_norm": 0.5})
    runs, asked = {}, {}
    for name in ("ddp", "fsdp2"):
        monkeypatch.setitem(forked.ENVIRONMENT, "ASKED", str(tmp_path / f"{name}.asked"))
        runs[name] = train(tmp_path, config, f"strategy={name}", name=name, processes=2, begin=record_and_run)
        asked[name] = set(json.loads((tmp_path / f"{name}.asked").read_text()))
    assert asked == {"ddp": {"gradient_as_bucket_view=True"}, "fsdp2": {"torch.bfloat16 torch.float32"}}
    assert runs["fsdp2"].losses == pytest.approx(runs["ddp"].losses, rel=LOSS)
    norms = ([line["grad_norm"] for line in runs[name].steps] for name in ("fsdp2", "ddp"))
    assert next(norms) == pytest.approx(next(norms), rel=5e-2)
    assert {weight.dtype for weight in runs["fsdp2"].weights().values()} == {torch.float32}


def test_fsdp2_adds_up_gradients_of_bfloat16_weights_in_float32(tmp_path: Path, monkeypatch: Any) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1}, model={"dtype": "bfloat16"}, strategy={"name": "fsdp2"})
    monkeypatch.setitem(forked.ENVIRONMENT, "ASKED", str(tmp_path / "asked"))
    train(tmp_path, config, processes=2, begin=record_and_run)
    assert set(json.loads((tmp_path / "asked").read_text())) == {"None torch.float32"}
