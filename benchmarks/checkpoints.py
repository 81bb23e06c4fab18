"""How long a step waits for a checkpoint that is written in the background, against one that it waits for.

    python benchmarks/checkpoints.py MODEL [STRATEGY …]

A full fine-tune of MODEL (a folder or a hub id) on packtrain's own data, with a checkpoint at every second step; strategies other than ddp with
two processes. Printed are the seconds between the call and its return: of the first checkpoint, and of the later ones; of the same
run whose steps wait for the write; and of the forward and backward pass of the second step, beside which the copies' memory is made.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, EVERY = 8, 2
SECONDS = "SECONDS_OF_CHECKPOINTS"


def main(model: str, strategies: list[str]) -> None:
    """Prints a line for each strategy."""
    for strategy in strategies or ["ddp", "fsdp2", "zero2"]:
        (waited, _), (later, passes) = (_seconds(model, strategy, waits=waits) for waits in (True, False))
        usual, pause = statistics.median(waited), statistics.median(later[1:])
        print(
            f"{strategy}: {usual:.2f} s when the step waits, {pause:.2f} s in the background ({pause / usual:.1%}); "
            f"the first {later[0]:.2f} s ({later[0] / waited[0]:.1%}); step 2 {passes[1]:.2f} s, the later ones "
            f"{statistics.median(passes[2:]):.2f} s",
            flush=True,
        )


def _seconds(model: str, strategy: str, *, waits: bool) -> tuple[list[float], list[float]]:
    processes = 1 if strategy == "ddp" else 2
    with tempfile.TemporaryDirectory() as folder:
        config = [
            *(f"model.path={model}", "data.train=quickstart", "data.max_length=128", f"strategy={strategy}"),
            *("batch.examples_per_step=2", "verify.preflight=false", "optim.learning_rate=1e-5"),
            *(f"trainer.max_steps={STEPS}", f"trainer.checkpoint_every={EVERY}", "trainer.keep_checkpoints=1"),
            *(f"trainer.output_dir={folder}/run", f"data.cache_dir={folder}/cache"),
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        told = {**os.environ, SECONDS: f"{folder}/seconds.json", "OMP_NUM_THREADS": "1", "WAITS": str(int(waits))}
        made = subprocess.run([*torchrun, __file__, "of-a-rank", *config], env=told, capture_output=True, text=True)
        if made.returncode:
            sys.exit(made.stdout + made.stderr)
        return json.loads(Path(folder, "seconds.json").read_text())


def _run(arguments: list[str]) -> None:
    """The command itself, whose checkpoints are timed."""
    from packtrain.cli import main as command
    from packtrain.train.checkpoint import writer
    from packtrain.train.loop import StepTrainer

    write, step, seconds, passes = (
        StepTrainer.save_checkpoint,
        StepTrainer.forward_and_backward,
        list[float](),
        list[float](),
    )
    if int(os.environ["WAITS"]):
        writer.free_memory = lambda: 0

    def timed(self: Any, *given: Any) -> None:
        self.writer.wait()  # so that no pause has a write of the one before in it
        self.accelerator.wait_for_everyone()
        begun = time.perf_counter()
        write(self, *given)
        self.accelerator.wait_for_everyone()
        seconds.append(time.perf_counter() - begun)
        if self.accelerator.is_main_process:
            Path(os.environ[SECONDS]).write_text(json.dumps([seconds, passes]))

    def timed_step(self: Any, *given: Any) -> Any:
        begun = time.perf_counter()
        loss = step(self, *given)
        passes.append(time.perf_counter() - begun)
        return loss

    StepTrainer.forward_and_backward = timed_step
    StepTrainer.save_checkpoint = timed
    sys.argv = ["packtrain", "sft", *arguments]
    command()


if __name__ == "__main__":
    _run(sys.argv[2:]) if sys.argv[1] == "of-a-rank" else main(sys.argv[1], sys.argv[2:])
