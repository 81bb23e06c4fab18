"""TRL's trainers on tiny models, with fixed rollouts: what each step's loss and gradient were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from packtrain import attach
from packtrain.library.attach import Attached

STEPS = 5
PROMPTS = [20, 1, 9, 33]
"""Tokens of the prompts: of a long one, of one token, of others."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Words `3` to `96` are tokens of these numbers."""
    raw = Tokenizer(
        models.WordLevel({"<pad>": 0, "<unk>": 1, "<eos>": 2, **{str(n): n for n in range(3, 97)}}, "<unk>")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(count: int, seed: int) -> str:
    return " ".join(map(str, torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()))


@dataclass
class Ran:
    """What a training did: each step's loss, its gradient, and what was logged of it."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    weights: torch.Tensor | None = None
    handle: Attached | None = None


def whole(weight: torch.Tensor) -> torch.Tensor:
    """All of a weight or a gradient, which processes may have in parts."""
    if isinstance(weight, DTensor):
        return weight.detach().full_tensor()
    if hasattr(weight, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(weight):
            return weight.detach().clone()
    return weight.detach().clone()


class _Watch(TrainerCallback):
    def __init__(self, ran: Ran) -> None:
        self._ran = ran

    def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
        self._ran.weights = torch.cat([whole(p).flatten() for p in model.parameters()])

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        gradients = [whole(p.grad).flatten() for p in model.parameters() if p.grad is not None]
        if gradients:  # DeepSpeed's engine has them elsewhere
            self._ran.gradients.append(torch.cat(gradients))

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self._ran.logged.append(dict(logs))


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "optim": "sgd"}
    usual |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1, "report_to": "none"}
    usual |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    return {"output_dir": str(folder), "activation_checkpointing": False, **usual, **given}


def _generated(group: int) -> Callable[..., Any]:
    """Completions of 1 to 16 tokens, the first of each group as short as they come; the same in every training."""
    calls = iter(range(10**6))

    def generate(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        rng = torch.Generator().manual_seed(next(calls))
        lengths = torch.randint(0, 16, (len(prompt_ids),), generator=rng).tolist()
        lengths = [0 if number % group == 0 else length for number, length in enumerate(lengths)]
        answers = [[*torch.randint(3, 97, (n,), generator=rng).tolist(), 2] for n in lengths]
        return (answers, None) if isinstance(self, trl.GRPOTrainer) else answers

    return generate


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(int, one.split())) % 7) for one in completions]


def make(
    kind: str,
    folder: Path,
    *,
    group: int = 4,
    model: Any = None,
    equal_prompts: bool = False,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """The trainer of that kind; `options` are its own, `given` settings of its config."""
    lengths = [PROMPTS[0]] * 4 if equal_prompts else PROMPTS
    prompts = [words(length, 0 if equal_prompts else length) for length in lengths] * 6
    if model is None:  # by its path, from which GRPO loads its reference
        if not (folder / "model").exists():
            tiny_model("llama").save_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    chosen, rejected = (
        [words(least + n % of, seed + n) for n in range(24)] for least, of, seed in ((5, 7, 0), (2, 9, 50))
    )
    labels = [number % 3 > 0 for number in range(24)]
    columns: dict[str, dict[str, Any]] = {
        "sft": {"text": [f"{prompt} {answer}" for prompt, answer in zip(prompts, chosen, strict=True)]},
        "kto": {"prompt": prompts, "completion": chosen, "label": labels},
        "dpo": {"prompt": prompts, "chosen": chosen, "rejected": rejected},
    }
    columns["reward"] = {**columns["dpo"], "margin": [number % 3 / 4 for number in range(24)]}
    name = {"distillation": "Distillation"}.get(kind, kind.upper() if kind != "reward" else "Reward")
    config_of, trainer_of = (getattr(trl, f"{name}{part}") for part in ("Config", "Trainer"))
    own, of_kind, generates = dict[str, Any](), dict[str, Any](), kind not in columns
    if generates:
        own = {"max_completion_length": 16, **({} if kind == "distillation" else {"num_generations": group})}
        of_kind = {"teacher_model": tiny_model("qwen3")} if kind == "distillation" else {"reward_funcs": _reward}
    rows = datasets.Dataset.from_dict(columns.get(kind, {"prompt": prompts}))
    given = {"processing_class": tokenizer(), **(options or {}), "args": config_of(**settings(folder, **own, **given))}
    trainer = trainer_of(model=model, train_dataset=rows, **of_kind, **given)
    if generates:
        trainer._generate_single_turn = _generated(group).__get__(trainer)
    return trainer


def ran(trainer: Any, *, attached: bool, **options: Any) -> Ran:
    """What its training did, with `attach` or without."""
    result = Ran()
    trainer.add_callback(_Watch(result))
    if attached:
        result.handle = attach(trainer, **options)
    compute = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        result.losses.append(loss.item())
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return result
