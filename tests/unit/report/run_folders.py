"""Run folders as runs leave them, without running any."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from packtrain.run_folder import RunFolder

FACTS = {
    "model": "tiny (LlamaForCausalLM, 1,000 parameters, 1,000 trained)",
    "data": "10 documents of 10 rows (messages), 900 tokens, 400 trained; truncated 0; dropped: none; 2 rows are alike",
    "attention": "segmented (no flash: the device is cpu)",
    "isolation": "exact: outputs of documents in a row are off by 7e-07",
}


def lines_of(steps: int, *, every: int = 1, eval_every: int = 10, **more: float) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    made: list[dict[str, Any]] = [{"step": 0, "epoch": 0.0, "eval_loss": 7.25, "eval_tokens": 40, "seconds": 0.5}]
    for step in range(every, steps + 1, every):
        loss, at = 7 / (1 + step) + 0.01 * math.sin(step), {"step": step, "epoch": step / 10}
        line = {**at, "loss": loss, "grad_norm": 1 / step, "lr": 1e-3, "tokens": 90 * step, "examples": 1, "mfu": None}
        line |= {"tokens_per_second": 900.0, "padding_fraction": 0.0, "memory_bytes": 3 << 30}
        made.append({**line, "seconds": 0.5 + step / 10, **more})
        if step % eval_every == 0:
            made.append({**at, "eval_loss": loss + 0.5, "seconds": 0.6 + step / 10})
    return made


def leave_run(
    root: Path,
    *,
    lines: list[dict[str, Any]] | None = None,
    status: str | None = "done",
    config: dict[str, Any] | None = None,
    facts: dict[str, Any] = FACTS,
    **summary: Any,
) -> RunFolder:
    """A run folder; `status` None: without summary.json."""
    folder = RunFolder(root)
    folder.logs.mkdir(parents=True)
    folder.mark.touch()
    lines = lines_of(30) if lines is None else lines
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"data": {"train": "chats.jsonl"}, "trainer": {"max_steps": 30, "log_every": 1, "output_dir": str(root)}}
    folder.config.write_text(yaml.safe_dump(config or settings))
    folder.plan.write_text(json.dumps({"num_processes": 1, "batch": {"steps": 30}}))
    folder.environment.write_text(json.dumps({"python": "3.11.7", "platform": "Linux", "versions": {"torch": "2.13"}}))
    folder.facts.write_text(json.dumps({"started": "2026-03-01 10:00", "facts": facts}))
    folder.log(0).write_text("2026-03-01 10:00:02 step 1/30  loss 7.0000\n")
    if status:
        answers = [{"prompt": "How are you?", "before": "###", "after": "Fine."}]
        known = {"status": status, "steps": 30, "seconds": 4.0, "answers": answers, "verify": None, **summary}
        folder.summary.write_text(json.dumps(known))
    return folder
