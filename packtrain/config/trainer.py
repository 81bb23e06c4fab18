"""The group `trainer`: length, precision and memory of the training; checkpoints, evaluations and logs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from packtrain.config.objective import advanced, key

Checkpointing = Literal["auto", "none", "every_4", "every_3", "selective", "every_2", "full"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Trainer:
    """Length, precision and memory of the training; checkpoints, evaluations and logs."""

    output_dir: str = key("runs/sft", "Run folder.", resume=None)
    max_steps: int | None = key(None, "Optimizer steps, in place of trainer.epochs.", minimum=1, resume="decisive")
    epochs: float = key(1.0, "Passes over the data.", resume=None, above=0, maximum=10**6)
    seed: int = key(0, "Seed of data order, dropout and new weights.", minimum=0, maximum=2**32 - 1, resume="decisive")
    resume: str = key("auto", "auto continues an unfinished run, never starts anew; or a checkpoint.", resume=None)
    resume_despite: list[str] = advanced([], "Keys that may have changed since the checkpoint (docs/resume.md).")
    checkpoint_every: int | None = key(None, "Steps between checkpoints; none for none.", minimum=1)
    keep_checkpoints: int | None = key(2, "Newest checkpoints that are kept, and the best; none for all.", minimum=1)
    mirror: str | None = advanced(
        None,
        "URL of a folder in a bucket (s3://…, gs://…, any protocol of fsspec). It gets a copy of the run. A fresh machine can "
        "resume from it (docs/resume.md).",
    )
    on_spike: Literal["stop", "skip", "rollback"] = advanced(
        "stop", "Reaction to a spike, before its update is made: stop, skip the update, or roll back (docs/resume.md)."
    )
    spike_factor: float | None = advanced(None, "A loss or gradient norm above this × its median is a spike.", above=1)
    restarts: int = advanced(
        0, "Most times to start again after a dead or hung process, or a lost machine (docs/resume.md).", minimum=0
    )
    eval_every: int | None = key(None, "Steps between evaluations; none for only before and after training.", minimum=1)
    early_stop_patience: int | None = advanced(
        None, "Stop after this many evaluations without a better one (best_by); the best weights are kept.", minimum=1
    )
    best_by: str = advanced(
        "lowest eval_loss",
        "Figure that early_stop_patience and the best checkpoint go by: lowest or highest, and a name in metrics.jsonl, such as "
        "highest eval_right (docs/report.md).",
    )
    tasks: list[str] = advanced(
        [], "Tasks of lm_eval (pip install lm-eval) to measure with evaluations, such as gsm8k."
    )
    answers: str | None = advanced(
        None,
        "Score of generated answers to data.eval, measured with evaluations: exact, regex:PATTERN, or a function, module:function or "
        "FILE.py:function (docs/after-training.md).",
    )
    answer_tokens: int = advanced(256, "Most tokens of a generated answer.", minimum=1)
    measured_rows: int | None = advanced(
        None, "Rows of data.eval that trainer.answers asks, and of each task, from the first; none for all.", minimum=1
    )
    measure_every: int | None = advanced(
        None,
        "Steps between figures of tasks and answers, a multiple of eval_every; none for every evaluation.",
        minimum=1,
    )
    measure_timeout: float = advanced(
        600.0,
        "Seconds for all tasks and answers of an evaluation; figures that are not ready then are left out.",
        above=0,
    )
    log_every: int = key(10, "Steps between logged lines; first, last, evaluated and saved steps have one.", minimum=1)
    ledger: bool = advanced(
        True, "Write the loss of each document, each time that it is trained, into ledger.jsonl (docs/report.md)."
    )
    mixed_precision: Literal["auto", "no", "bf16", "fast", "fp8"] = key(
        "auto",
        "Compute in bfloat16 over weights in model.dtype. auto: on GPUs that have it; fast: also on a CPU where a measurement finds it "
        "faster; fp8: products of layers in 8 bits (docs/precision.md).",
        resume="decisive",
    )
    deterministic: bool = advanced(
        False, "Use only operations that give the same bits every time; slower. Models with others are refused."
    )
    gradient_checkpointing: Checkpointing = key(
        "auto",
        "Layers that compute their activations again in the backward pass, to save memory: none, every fourth to every second, all (full), "
        "or all but their costliest results (selective). auto: as few as fit the GPU, measured before step 1 (docs/planning.md).",
    )
    activation_offload: bool = advanced(
        False,
        "Keep the inputs of layers in the host's memory until the backward pass (docs/long-documents.md); needs a GPU, and "
        "trainer.gradient_checkpointing=full.",
    )
    tokens_per_mlp_tile: int | None = advanced(
        None,
        "Tokens that an MLP runs on at a time, again in the backward pass, so that the inner activations of a whole row never exist at once "
        "(docs/long-documents.md); none for all tokens at once.",
        minimum=1,
    )
    torch_compile: bool = advanced(
        False, "Compile the layers, except attention, at the first step (docs/planning.md); needs a C++ compiler."
    )
    ema: float = advanced(
        0.0,
        "Decay of an average of the trained weights over the steps, such as 0.999, written to final-ema/; 0 for none (docs/fitting.md).",
        minimum=0,
        below=1,
    )
    samples: list[int | str] = key(
        [],
        "Prompts answered in up to 64 tokens before and after training, printed at the end: texts, or numbers of examples of data.eval "
        "(0 is the first), with their pictures.",
    )

    def bare(self) -> Trainer:
        """Return these settings without checkpoints, measurements and samples."""
        saved = ("mirror", "checkpoint_every", "early_stop_patience", "best_by", "samples", "tasks", "answers")
        measured = ("eval_every", "answer_tokens", "measured_rows", "measure_every", "measure_timeout")
        plain: dict[str, Any] = {name: getattr(Trainer(), name) for name in (*saved, *measured)}
        return replace(self, resume="never", **plain)
