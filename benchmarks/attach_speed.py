"""Forward and backward of TRL's trainers with `packtrain.attach` and without, on one micro-batch of each, in turns.

    python benchmarks/attach_speed.py --model MODEL_FOLDER --data PREFERENCES.jsonl [--only grpo,reward,kto] [--turns 3]
        [--recompute] [--threads 2] [--memory] [--prompt 512] [--completion 32 256]
        [--pairs 4]

grpo: a group of 8 completions of 32 to 256 made-up tokens after a prompt of 512. reward and kto: real pairs, two answers to a
prompt each; kto with its KL batch and its reference. Loss and norm of the gradient show that both do the same work. `--memory` adds
the largest memory of a process of its own for each. Time that others take from the machine falls on both sides of a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GROUP, PROMPT, COMPLETIONS = 8, 512, (32, 256)
PAIRS, LONGEST = 4, 1024


def arguments(recompute: bool) -> dict[str, Any]:
    """What all configs of TRL have in common here."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "activation_checkpointing": recompute,
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "report_to": "none",
    }


def loaded(model: str) -> tuple[Any, Any]:
    """A model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)


def grpo(
    model: Any,
    tokenizer: Any,
    recompute: bool,
    prompt: int,
    completions: tuple[int, int],
    words: int = 40_000,
    **changes: Any,
) -> tuple[Any, list[Any]]:
    """The trainer and one group of ids below `words`, as `_compute_loss` gets it."""
    import datasets
    import torch
    from trl import GRPOConfig, GRPOTrainer

    settings = {**arguments(recompute), **changes}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**settings, per_device_train_batch_size=GROUP, num_generations=GROUP),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * GROUP}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    rng = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*completions, GROUP).long()
    mask = (torch.arange(max(completions))[None] < lengths[:, None]).long()
    return trainer, [
        {
            "prompt_ids": torch.randint(100, words, (1, prompt), generator=rng).repeat(GROUP, 1),
            "prompt_mask": torch.ones(GROUP, prompt, dtype=torch.int64),
            "completion_ids": torch.randint(100, words, mask.shape, generator=rng) * mask,
            "completion_mask": mask,
            "advantages": torch.linspace(-1, 1.5, GROUP),
            "num_items_in_batch": mask.sum(),
        }
    ]


def of_pairs(kind: str, model: str, data: str, recompute: bool, count: int) -> tuple[Any, list[Any]]:
    """The trainer of reward models or of labelled answers, and one micro-batch of real pairs."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

    with open(data) as source:
        pairs = [json.loads(line) for _, line in zip(range(count), source, strict=False)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    usual = {**arguments(recompute), "max_length": LONGEST, "train_sampling_strategy": "sequential"}
    if kind == "reward":
        torch.manual_seed(0)
        scorer = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32, num_labels=1)
        rows = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in pairs]
        config = RewardConfig(**usual, per_device_train_batch_size=count)
        trainer: Any = RewardTrainer(
            model=scorer, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
    else:
        rows = [
            {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
            for pair in pairs
            for name in ("chosen", "rejected")
        ]
        whole = {"dtype": torch.float32}
        trainer = KTOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, **whole),
            ref_model=AutoModelForCausalLM.from_pretrained(model, **whole),
            args=KTOConfig(**usual, per_device_train_batch_size=2 * count),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
    return trainer, [next(iter(trainer.get_train_dataloader()))]


def once(trainer: Any, batches: list[Any]) -> tuple[float, float, float]:
    """Seconds of forward and backward, the loss, and the norm of the gradient."""
    import torch

    trainer.model.train()
    trainer.model.zero_grad()
    started, losses = time.perf_counter(), []
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm().item()
    return seconds, sum(losses), norm


def in_turns(kind: str, options: argparse.Namespace, only: str = "") -> None:
    """Padded and attached, one after the other; `only` one of them once, for its memory."""
    import resource

    import torch

    from packtrain import attach

    torch.set_num_threads(options.threads)
    group = options.recompute, options.prompt, options.completion
    made = grpo(*loaded(options.model), *group) if kind == "grpo" else None
    trainer, batches = made or of_pairs(kind, options.model, options.data, options.recompute, options.pairs)
    if only:
        if only == "attached":
            attach(trainer)
        once(trainer, batches)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    seconds: dict[str, list[float]] = {"padded": [], "attached": []}
    said: dict[str, tuple[float, float]] = {}
    for turn in range(options.turns):
        for way in ("padded", "attached") if turn % 2 == 0 else ("attached", "padded"):
            handle = attach(trainer, proof=turn == 0) if way == "attached" else None
            took, *said[way] = once(trainer, batches)
            seconds[way].append(took)
            if handle is not None:
                stats, backends = handle.stats, handle.backends
                handle.detach()
    best = {way: min(times) for way, times in seconds.items()}
    every = [padded / attached for padded, attached in zip(*seconds.values(), strict=True)]
    print(f"\n{kind}: {stats.row_slots:,} slots for {stats.padded_slots:,}, attention {backends[0]}")
    for way, times in seconds.items():
        listed = " ".join(f"{one:.2f}" for one in times)
        print(f"{way:<10}{best[way]:>8.2f} s ({listed})  loss {said[way][0]:.6f}  |gradient| {said[way][1]:.6f}")
    print(
        f"ratio {best['padded'] / best['attached']:.2f}; of each turn {', '.join(f'{one:.2f}' for one in every)}",
        flush=True,
    )
    if options.memory:
        del trainer, batches, made  # so that two processes fit
        gib = [f"{memory([kind, way], options):.2f} GiB {way}" for way in seconds]
        print(", ".join(gib), flush=True)


def memory(child: list[str], options: argparse.Namespace) -> float:
    """The largest memory, in GiB, of a process that does it once."""
    shared = ["--model", options.model, "--data", options.data, "--threads", str(options.threads)]
    shared += [
        "--pairs",
        str(options.pairs),
        "--prompt",
        str(options.prompt),
        "--completion",
        *map(str, options.completion),
    ]
    shared += ["--recompute"] if options.recompute else []
    run = [sys.executable, __file__, *shared, "--child", *child]
    said = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    # not ru_maxrss of a child: Linux begins it with what this process had taken
    return float(said.splitlines()[-1])


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--only", default="grpo,reward,kto")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--completion", type=int, nargs=2, default=COMPLETIONS)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--child", nargs=2, default=None)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if options.child:
        in_turns(options.child[0], options, options.child[1])
        return
    for kind in options.only.split(","):
        in_turns(kind, options)


if __name__ == "__main__":
    main()
