"""What it takes of the machine's own memory until every process has its share of a model, and how long that takes.

    python benchmarks/loading_memory.py [--dtype float32] [--stored float32] [--processes 1 2 4 8] [--strategy fsdp2] [--vocabulary 32000]

As many processes over gloo load a llama of about 790 MiB (as float32), which was saved by save_pretrained, as a run does under fsdp2 or zero3:
read, hashed, compared, spread. Printed are the most of the sum of PSS over all processes (smaps_rollup, 50 times a second) less that
of the same processes before, as a multiple of the model's weights; of it what is no file mapped into memory (Pss_Anon); and the seconds of
the slowest process. With PYTHONPATH another packtrain is measured, of before reading by slices too. Needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}


class Tokens:
    """As much of a tokenizer as loading asks for."""

    pad_token_id = 0

    def __len__(self) -> int:
        return 1


def pss(pids: list[int], name: str) -> int:
    """The sum of an entry of smaps_rollup in MiB."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) // 1024


def load(rank: int, world: int, port: int, folder: str, dtype: str, strategy: str, pipe: Any, barrier: Any) -> None:
    """One process; it waits for the others before it loads and after it, while its memory is looked at."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    from packtrain.config.schema import Model, Peft
    from packtrain.model import spread as spreading
    from packtrain.model.load import load_model

    before = "packtrain.model.load"  # reading by slices
    weights_hash = import_module("packtrain.model.weights" if new() else before).weights_hash
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = spreading.Ranks(rank, world, torch.device("cpu"), strategy)
    mesh = {"mesh": spreading.reading_mesh(ranks)} if new() else {}
    import transformers

    if strategy != "fsdp2":  # what DeepSpeed imports and sets up is not the model's
        spreading.spread(transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL | SMALL)), ranks)

    barrier.wait()
    barrier.wait()
    began = time.perf_counter()
    model = load_model(Model(path=folder, dtype=dtype), Peft(), Tokens(), seed=0, **mesh)  # type: ignore[arg-type]
    weights_hash(model)
    spreading.spread(model, ranks)
    pipe.put(time.perf_counter() - began)
    barrier.wait()
    dist.destroy_process_group()


def new() -> bool:
    """Whether the packtrain that is measured reads by slices."""
    return find_spec("packtrain.model.weights") is not None


def measure(world: int, folder: str, dtype: str, strategy: str) -> tuple[int, int, float]:
    """MiB at most, of them anonymous, and seconds."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipe, barrier = context.Queue(), context.Barrier(world + 1)
    ranks = [
        context.Process(target=load, args=(rank, world, port, folder, dtype, strategy, pipe, barrier))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    pids = [process.pid or 0 for process in ranks]
    barrier.wait()
    before = {name: pss(pids, name) for name in ("Pss", "Pss_Anon")}
    most = dict(before)
    barrier.wait()
    seconds: list[float] = []
    over = False
    while not over:
        over = len(seconds) == world  # a last look, when all have what they keep
        for name in most:
            most[name] = max(most[name], pss(pids, name))
        while not pipe.empty():
            seconds.append(pipe.get())
        time.sleep(0.02)
    barrier.wait()
    for process in ranks:
        process.join()
    return most["Pss"] - before["Pss"], most["Pss_Anon"] - before["Pss_Anon"], max(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", help="model.dtype")
    parser.add_argument("--stored", default="float32", help="the format of the file")
    parser.add_argument("--strategy", default="fsdp2", choices=["fsdp2", "zero3"])
    parser.add_argument("--vocabulary", type=int, default=MODEL["vocab_size"], help="rows of the largest weight")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import packtrain

    print(packtrain.__file__)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**{**MODEL, "vocab_size": given.vocabulary}), dtype=getattr(torch, given.stored)
        )
        width = getattr(torch, given.dtype).itemsize
        size = sum(weight.numel() * width for weight in model.parameters()) / 2**20
        model.save_pretrained(folder)
        del model
        for world in given.processes:
            most, anonymous, seconds = measure(world, folder, given.dtype, given.strategy)
            print(
                f"{world} processes: {most} MiB, {most / size:.2f} x the model ({anonymous} MiB anonymous), {seconds:.1f} s"
            )


if __name__ == "__main__":
    main()
