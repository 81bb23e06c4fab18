"""What writing final/ takes of the machine's own memory where no process has the whole model.

    python benchmarks/final_memory.py [LAYERS [MIB_OF_A_FILE]]

Two processes over gloo train a llama with new weights for one step, each with half of it, under fsdp2 and zero3. Printed are
the resident memory of each before final/ is written and the most while it is, as a multiple of the model's weights, too.
Needs Linux (it resets the high-water mark of /proc/self/status).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "vocab_size": 8192,
}
PROCESSES = 2


def resident(name: str) -> int:
    """Bytes of this process by their name in /proc/self/status: VmRSS now, VmHWM at most."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def rank_main(
    rank: int, strategy: str, layers: int, file_bytes: int, folder: str, port: int, results: multiprocessing.SimpleQueue
) -> None:
    """One process of the run: (rank, bytes of the whole model, bytes before, most bytes while final/ is written)."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES), LOCAL_WORLD_SIZE=str(PROCESSES))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0")
    from packtrain.cli import main
    from packtrain.model import save as stream
    from packtrain.train import results as writing

    save, stream.FILE_BYTES = writing.save_final, file_bytes

    def measured(run_folder: Any, trainer: Any, model: Any, *given: Any, **named: Any) -> list[str]:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free but kept would hide what is asked for
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        saved = save(run_folder, trainer, model, *given, **named)
        whole = sum(getattr(one, "ds_numel", one.numel()) * one.element_size() for one in model.parameters())
        results.put((rank, whole, before, resident("VmHWM")))
        return saved

    writing.save_final = measured
    given = {
        **{f"model.config.{name}": value for name, value in {**MODEL, "num_hidden_layers": layers}.items()},
        "model.init": "random",
        "model.tokenizer": "quickstart",
        "strategy": strategy,
        "data.train": "quickstart",
        "data.max_length": 256,
        "data.cache_dir": f"{folder}/cache",
        "batch.examples_per_step": 2,
        "batch.tokens_per_device": 256,
        "trainer.max_steps": 1,
        "trainer.output_dir": f"{folder}/run",
    }
    sys.argv = ["packtrain", "sft", *(f"{key}={value}" for key, value in given.items())]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        main()


def main() -> None:
    layers, mib = (int(given) for given in [*sys.argv[1:], *("6", "4768")[len(sys.argv) - 1 :]])
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[tuple[int, int, int, int]] = context.SimpleQueue()
    for strategy in ("fsdp2", "zero3"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            given = (strategy, layers, mib * 2**20, folder, port, results)
            ranks = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(PROCESSES)]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
        if any(one.exitcode for one in ranks):
            sys.exit(f"{strategy}: a process failed")
        for rank, whole, before, most in sorted(results.get() for _ in ranks):
            sizes = [f"{size / 2**20:.0f} MiB" for size in (whole, before, most)]
            more = f"{(most - before) / whole:.2f} models more"
            print("{}, rank {}: model {}; {} before, at most {}: {}".format(strategy, rank, *sizes, more))


if __name__ == "__main__":
    main()
