"""The memory estimate of a plan against bytes that are really held: of a whole run, and of the passes through a model."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from here import train_here
from peft import LoraConfig, get_peft_model
from running import conversations, joined, write_jsonl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain.changes.tiles import tile_mlps
from packtrain.config.compose import load_config
from packtrain.config.schema import RunConfig
from packtrain.model.layers import recompute
from packtrain.model.save import return_freed_memory
from packtrain.model.spread import Ranks, spread
from packtrain.plan.fit import Memory
from packtrain.plan.known_model import Layers, read_layers
from packtrain.plan.memory import FullestBatch, count_layers, estimate
from packtrain.train.loop import StepTrainer
from tests.train import forked

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "head_dim": 16, "vocab_size": 64}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2}
TOKENS = 1024
TILES = "trainer.tokens_per_mlp_tile=128"


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


@pytest.mark.parametrize(
    "overrides",
    [[], ["peft=lora", "model.dtype=bfloat16", "optim.name=adamw_torch"], ["model.dtype=bfloat16"]],
)
def test_a_run_of_one_process_holds_what_was_estimated(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of weights, gradients and optimizer states after the second backward pass of a real run."""
    held: dict[str, int] = {}
    inner = StepTrainer.forward_and_backward

    def step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = inner(self, *args, **kwargs)
        weights = list(self.model.parameters())
        states = [one for state in self.engine.plain_optimizer.state.values() for one in state.values()]
        held["weights"] = size_of(weights)
        held["gradients"] = size_of(one.grad for one in weights if one.grad is not None)
        held["optimizer"] = size_of(one for one in states if isinstance(one, torch.Tensor))
        return loss

    monkeypatch.setattr(StepTrainer, "forward_and_backward", step)
    data = write_jsonl(tmp_path / "data.jsonl", conversations(8))
    sizes = {"model_type": "qwen3", **SIZES, "vocab_size": 4096, "max_position_embeddings": 512}
    arguments = [
        *(f"model.config.{name}={value}" for name, value in sizes.items()),
        *("model.init=random", "model.tokenizer=quickstart", f"data.train={data}", f"data.cache_dir={tmp_path}/cache"),
        *("batch.examples_per_step=4", "trainer.max_steps=2"),
        *("data.max_length=256", "batch.tokens_per_device=512", "verify.preflight=false", *overrides),
    ]
    config = load_config(None, arguments)
    train_here(config, tmp_path / "run")
    expected = estimate(config, 1)
    assert isinstance(expected, Memory) and len(held) == 3
    for part, size in held.items():
        assert getattr(expected, part) == pytest.approx(size, rel=0.02), part


class Watch(TorchDispatchMode):
    """Bytes of all tensors that are made within and live, and the most that lived at a time."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet(one.untyped_storage() for one in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_iter(made):
            if isinstance(one, torch.Tensor) and (storage := one.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, size: int) -> None:
        self.now -= size


def watched(kind: str, config: RunConfig, *, padded: bool) -> tuple[int, int]:
    """(bytes that the layers keep after a forward pass over TOKENS tokens, most bytes at a time until its backward ends)."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES), dtype=dtype, attn_implementation="sdpa"
    )
    base = model
    if config.peft.kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=config.peft.target_modules, task_type="CAUSAL_LM"))
    model.train()
    if (policy := config.trainer.gradient_checkpointing) != "none":
        recompute(base, policy)
        base.enable_input_require_grads()
    if config.trainer.tokens_per_mlp_tile:
        tile_mlps(base, config.trainer.tokens_per_mlp_tile)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    ids = torch.zeros(4 if padded else 1, TOKENS // 4 if padded else TOKENS, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    watch = Watch([*model.parameters(), *model.buffers()])
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.trainer.mixed_precision == "bf16")
    with watch:
        with autocast:
            hidden = base.model(
                input_ids=ids, attention_mask=mask if padded else None, use_cache=False
            ).last_hidden_state
        kept = watch.now
        hidden.sum().backward()
    return kept, watch.most


QUARTER, HALF = ["peft=lora", "peft.target_modules=[q_proj,v_proj]"], "model.dtype=bfloat16"
KEPT: dict[str, tuple[str, list[str], str]] = {  # the sample of policies; of MLPs on tiles none is selective
    "qwen3": ("qwen3", [], "none every_2 selective full"),
    "qwen2, bfloat16": ("qwen2", [HALF], "none selective"),
    "mistral, autocast": ("mistral", ["trainer.mixed_precision=bf16"], "none"),
    "llama, adapters": ("llama", [HALF, *QUARTER], "none full"),
    "llama, adapters of all": ("llama", ["trainer.mixed_precision=bf16", "peft=lora"], "none every_2 selective full"),
    "qwen3, padding": ("qwen3", [HALF, "packing.mode=padding"], "none"),
    "qwen3, tiles": ("qwen3", [TILES], "none every_2"),
    "qwen2, tiles": ("qwen2", [TILES, HALF], "full"),
    "llama, tiles": ("llama", [TILES, HALF, *QUARTER], "full"),
}


@pytest.mark.parametrize(
    ("kind", "overrides", "policy"),
    [
        pytest.param(kind, given, one, id=f"{name}, {one}", marks=[] if one in sampled else [pytest.mark.exhaustive])
        for name, (kind, given, sampled) in KEPT.items()
        for one in ("none", "every_2", "selective", "full")
        if one != "selective" or TILES not in given
    ],
)
def test_the_layers_keep_what_was_estimated(kind: str, overrides: list[str], policy: str) -> None:
    made = ["model.init=random", "model.tokenizer=quickstart", "data.train=x", "batch.examples_per_step=4"]
    switch = f"trainer.gradient_checkpointing={policy}"
    config = load_config(None, [*made, f"model.config.model_type={kind}", switch, *overrides])
    padded = config.packing.mode == "padding"
    layers = read_layers({"model_type": kind, **SIZES})
    assert isinstance(layers, Layers)
    weight = 2 if config.model.dtype == "bfloat16" else 4
    compute = 2 if config.trainer.mixed_precision == "bf16" else weight
    batch = FullestBatch(TOKENS, TOKENS // 4 if padded else None, weight, compute, weight)
    waiting, working = count_layers(config, layers, batch)
    kept, most = watched(kind, config, padded=padded)
    copies = kept_copies(config, layers)
    assert waiting + copies == pytest.approx(kept, rel=0.3)
    assert waiting + working + copies == pytest.approx(most, rel=0.3)


def kept_copies(config: RunConfig, layers: Layers) -> int:
    """bfloat16 copies of the linear layers' weights, which the estimate counts among its buffers."""
    if config.trainer.mixed_precision == "no" or config.trainer.gradient_checkpointing in ("selective", "full"):
        return 0
    of_one = layers.hidden * (2 * layers.query + 2 * layers.key + 3 * layers.inner)
    kept = layers.number // 2 if config.trainer.gradient_checkpointing == "every_2" else layers.number
    return 2 * kept * of_one


def grow(_: tuple[str, ...], environment: dict[str, str], cwd: Path, outputs: list[Path]) -> None:
    """Print the bytes of a llama, of this process's gradients, and the growth by two steps."""
    forked.enter(environment, cwd, outputs)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ids, ranks = torch.arange(16)[None], Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "fsdp2")
    for layers in (1, 12):  # libraries keep some memory with the first
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 4}
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **sizes))
        whole = size_of(model.parameters())
        spread(model, ranks)
        return_freed_memory()
        before = resident()
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        grown = resident() - before
    print(json.dumps([whole, size_of(weight.grad.to_local() for weight in model.parameters()), grown]))
    dist.destroy_process_group()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_processes_that_share_a_model_keep_nothing_of_what_they_gathered() -> None:
    for result in joined(2, begin=grow):
        whole, gradients, grown = json.loads(result.stdout)
        assert gradients == pytest.approx(whole / 2, rel=0.01)
        assert grown <= gradients + whole  # in glibc's heap holes as large as three and a half models stay
