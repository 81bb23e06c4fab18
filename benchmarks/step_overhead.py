"""packtrain's own share of a training step: what is neither forward, backward, clipping nor optimizer.

    python benchmarks/step_overhead.py CONFIG.yaml [key=value …]

Runs `packtrain sft` in this process with clocks around the model's forward, the backward and the optimizer step, and
compares their sum with the time between the ends of steps. The first step (warm-up) is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from packtrain.config.compose import load_config
from packtrain.model.load import base_model
from packtrain.run_folder import RunFolder
from packtrain.train import run
from packtrain.train.loop import StepTrainer
from packtrain.train.run_state import Listener, RunState

inside = {"forward": 0.0, "backward": 0.0, "clipping": 0.0, "optimizer": 0.0}


def timed(name: str, function: Callable) -> Callable:
    """`function`, with its time added to `inside[name]`."""

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **keywords)
        inside[name] += time.perf_counter() - started
        return result

    return wrapper


class StepClock(Listener):
    """Time from the end of the first step to the end of the last one, and what was inside then."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step_end(self, state: RunState) -> None:
        if not self.ends:
            inside.update(dict.fromkeys(inside, 0.0))
        self.ends.append(time.perf_counter())


def main() -> None:
    clock = StepClock()
    Accelerator.backward = timed("backward", Accelerator.backward)
    Accelerator.clip_grad_norm_ = timed("clipping", Accelerator.clip_grad_norm_)
    AcceleratedOptimizer.step = timed("optimizer", AcceleratedOptimizer.step)
    init = StepTrainer.__init__

    def with_clocks(self: StepTrainer, *arguments: Any) -> None:
        init(self, *arguments)
        self.listeners.append(clock)
        base = base_model(self.model)
        base.forward = timed("forward", base.forward)

    StepTrainer.__init__ = with_clocks
    config = load_config(sys.argv[1], sys.argv[2:])
    RunFolder.of(config.trainer).open_attempt("never")  # as the launcher does
    run.train("sft", config)
    total = clock.ends[-1] - clock.ends[0]
    steps = len(clock.ends) - 1
    for name, seconds in inside.items():
        print(f"{name:<12}{seconds / steps:>9.3f} s a step {seconds / total:>8.2%}")
    outside = total - sum(inside.values())
    print(f"{'outside':<12}{outside / steps:>9.3f} s a step {outside / total:>8.2%}   ({steps} steps)")


if __name__ == "__main__":
    main()
