"""The parts of benchmarks/gpu.py: each is a function that runs in processes of its own and returns plain values.

Training goes through packtrain's command, as a user starts it, and through TRL's trainers on the same rows; both are measured
by the same callback, which waits for the device twice: after the steps that warm up, and after the last one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Part:
    """`work(folder, tiny=…, **given)` in `processes`, within `limit_s`; `group` are those that train on the same rows."""

    name: str
    work: Callable[..., Any]
    given: dict[str, Any] = field(default_factory=dict)
    limit_s: int = 100
    processes: int = 1
    group: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Task:
    """A model to train: its `objective`, its sizes, and how many `examples` a step and a padded micro-batch (`at_once`) have."""

    objective: str
    sizes: dict[str, Any]
    examples: int
    at_once: int
    row: int
    lora: bool = False
    longest: int = 2048


QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
SMALL = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL |= {"tie_word_embeddings": True, "max_position_embeddings": 40_960}
LARGE = QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
LARGE |= {"tie_word_embeddings": False, "max_position_embeddings": 40_960}
TINY = QWEN3 | {"vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
TINY |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512}
TASKS = {
    "sft 0.6B": Task("sft", SMALL, examples=128, at_once=16, row=16_384),
    "dpo 0.6B": Task("dpo", SMALL, examples=16, at_once=4, row=16_384),
    "LoRA 8B": Task("sft", LARGE, examples=64, at_once=16, row=16_384, lora=True),
}


def task_of(name: str, *, tiny: bool) -> Task:
    """The task of this name; a tiny one has the same shape in everything but size."""
    task = TASKS[name]
    return Task(task.objective, TINY, 4, 2, 1024, task.lora, longest=128) if tiny else task


def steps_of(*, tiny: bool) -> tuple[int, int]:
    """Steps of a run, and how many of them warm up; a line is logged as often."""
    return (2, 1) if tiny else (15, 5)


def write_inputs(folder: Path, *, tiny: bool) -> None:
    """The rows of both objectives, of as many random tokens as real conversations have, and a tokenizer whose words are tokens.

    `lengths.json` has tokens of SmolLM2 in ChatML: 999 conversations as (prompt, answer), 300 preferences as (prompt,
    chosen, rejected).
    """
    import random

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(500))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tokenizer")
    lengths, drawn = json.loads((ROOT / "benchmarks/lengths.json").read_text()), random.Random(0)
    shorter, steps = 16 if tiny else 1, steps_of(tiny=tiny)[0]
    with (folder / "sft.jsonl").open("w") as file:
        for number in range(steps * task_of("sft 0.6B", tiny=tiny).examples):
            prompt, answer = (1 + n // shorter for n in lengths["sft"][number % len(lengths["sft"])])
            ids = [drawn.randrange(3, len(words)) for _ in range(prompt + answer)]
            file.write(json.dumps({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}) + "\n")
    task = task_of("dpo 0.6B", tiny=tiny)
    with (folder / "dpo.jsonl").open("w") as file:
        for number in range(steps * task.examples):
            prompt, *answers = (1 + n // shorter for n in lengths["dpo"][number % len(lengths["dpo"])])
            prompt = min(prompt, task.longest // 2)
            counts = prompt, *(min(answer, task.longest - prompt - 1) for answer in answers)
            texts = [" ".join(f"w{drawn.randrange(500)}" for _ in range(count)) for count in counts]
            row = {"prompt": texts[0], "chosen": f" {texts[1]}", "rejected": f" {texts[2]}"}
            file.write(json.dumps(row) + "\n")


def tokens_of_steps(folder: Path, task: Task, *, tiny: bool) -> int:
    """Real tokens of the steps that are timed; of preferences those of both documents, prompts twice."""
    steps, warm = steps_of(tiny=tiny)
    with (folder / f"{task.objective}.jsonl").open() as file:
        rows = [json.loads(line) for line in file][warm * task.examples : steps * task.examples]
    if task.objective == "sft":
        return sum(len(row["input_ids"]) for row in rows)
    return sum(2 * len(r["prompt"].split()) + len((r["chosen"] + r["rejected"]).split()) + 2 for r in rows)


def versions(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """The devices, and what is installed."""
    import torch

    from packtrain.run_folder import installed_version

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else ["CPU"]
    packages = (
        "torch",
        "transformers",
        "trl",
        "accelerate",
        "triton",
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "kernels",
        "deepspeed",
        "peft",
    )
    found = {name: installed_version(name) for name in packages}
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else None
    return {"devices": names, "memory": memory, "cuda": torch.version.cuda, "python": sys.version.split()[0], **found}


def gpu_tests(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """tests/gpu, by pytest."""
    import pytest

    class Results:
        """What became of each test."""

        def __init__(self) -> None:
            self.passed, self.failed, self.skipped = 0, [], Counter()

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.failed.append([report.nodeid, first_line(crash.message if crash else str(report.longrepr))])
            elif report.skipped:
                self.skipped[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")] += 1
            elif report.when == "call":
                self.passed += 1

    os.chdir(ROOT)
    results = Results()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests/gpu"], plugins=[results])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
    return {"passed": results.passed, "failed": results.failed, "skipped": dict(results.skipped)}


def kernels(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Every attention of packed rows: how far it is off the definition, and how fast (benchmarks/attention.py)."""
    import attention
    import torch

    from packtrain.attention.kernels.selection import LayerFeatures, dense_attention
    from packtrain.attention.kernels.varlen import Kernel
    from packtrain.packing.segments import Segments

    def definition(q, k, v, borders, scoring, sinks):
        outputs, lengths = [], (borders.queries.diff().tolist(), *[borders.keys.diff().tolist()] * 2)
        for one, key, value in zip(
            *(tensor.split(by) for tensor, by in zip((q, k, v), lengths, strict=True)), strict=True
        ):
            before = one.new_zeros(len(key) - len(one), *one.shape[1:])  # queries of the tokens before
            whole = dense_attention(torch.cat([before, one]), key, value, sinks, Segments((len(key),)), scoring)
            outputs.append(whole[len(before) :])
        return torch.cat(outputs)

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    heads, kv_heads, width, dtype = (4, 2, 16, torch.float32) if tiny else (32, 8, 128, torch.bfloat16)
    usable, found = attention.usable_kernels(LayerFeatures(dtype, heads // kv_heads, width, width), device)
    if tiny:  # in place of kernels that no CPU has
        usable.append(Kernel("the definition", definition))
    rows, documents = ([128], ["32", "groups"]) if tiny else ([8192, 32_768], ["512", "2048", "mixed", "groups"])
    measured = [
        {"row": row, "documents": kind, **one}
        for row in rows
        for kind in documents
        for one in attention.compare_row(row, kind, usable, 1 if tiny else 5, device, (heads, kv_heads, width), dtype)
    ]
    return {"kernels": found, "rows": measured}


def stopwatch(steps: int, warm: int) -> Any:
    """A TrainerCallback with `seconds` of the steps after the first `warm` ones, and the `peak` GiB of the training."""
    import torch
    from transformers import TrainerCallback

    cuda = torch.cuda.is_available()

    class Stopwatch(TrainerCallback):
        seconds = peak = 0.0
        history: list[dict[str, Any]]
        _started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if cuda:
                torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step not in (warm, steps):
                return
            if cuda:
                torch.cuda.synchronize()
            self.seconds, self._started = time.perf_counter() - self._started, time.perf_counter()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.history = state.log_history
            usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
            self.peak = (torch.cuda.max_memory_reserved() if cuda else usage) / 2**30

    return Stopwatch()


def figures_of(watch: Any, tokens: int, steps: int, warm: int) -> dict[str, Any]:
    """What a run is compared by."""
    lines = [line for line in watch.history if "loss" in line]
    mfu = [line["mfu"] for line in lines if line.get("mfu") and line["step"] > warm]
    return {
        "tokens_per_second": tokens / watch.seconds,
        "seconds_per_step": watch.seconds / (steps - warm),
        "peak": watch.peak,
        "mfu": sum(mfu) / len(mfu) if mfu else None,
        "losses": [lines[0]["loss"], lines[-1]["loss"]],
    }


def train(folder: Path, *, tiny: bool, task: str, changes: list[str]) -> dict[str, Any]:
    """`packtrain sft|dpo` in this process, one of those that a launcher may have started."""
    import torch

    from packtrain import cli
    from packtrain.model import compiled, reference
    from packtrain.train import preparation
    from packtrain.train.loop import StepTrainer

    what, (steps, warm) = task_of(task, tiny=tiny), steps_of(tiny=tiny)
    watch, init = stopwatch(steps, warm), StepTrainer.__init__

    def with_watch(self: StepTrainer, *given: Any) -> None:
        init(self, *given)
        self.listeners.append(watch)

    StepTrainer.__init__ = with_watch
    if tiny:
        compiled.BACKEND = "eager"  # graphs are made, and not compiled: that takes a CPU a minute
    alone = "WORLD_SIZE" not in os.environ
    if alone:  # drawing 8 billion numbers takes minutes on a CPU
        preparation.load_model = reference.load_model = drawn_on_device(preparation.load_model)
    output = folder / f"run-{os.getpid() if alone else os.environ['MASTER_PORT']}"
    arguments = [
        "model.init=random",
        f"model.tokenizer={folder / 'tokenizer'}",
        *(f"+model.config.{name}={str(value).lower()}" for name, value in what.sizes.items()),
        f"data.train={folder / what.objective}.jsonl",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={what.longest}",
        "data.shuffle=false",
        f"batch.examples_per_step={what.examples}",
        f"batch.tokens_per_device={what.row}",
        *([] if "packing.mode=packed" in changes else [f"batch.examples_per_device={what.at_once}"]),
        f"optim.learning_rate={LEARNING_RATE}",
        "optim.schedule=constant",
        "trainer.mixed_precision=bf16",
        f"trainer.log_every={warm}",
        f"trainer.output_dir={output}",
        *(["topology=single"] if alone else []),  # also inside a Slurm job
        *(["peft=lora", "model.dtype=bfloat16", "trainer.gradient_checkpointing=true"] if what.lora else []),
        *changes,
    ]
    sys.argv = ["packtrain", what.objective, *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(output, ignore_errors=True)  # the weights of all runs are many gigabytes
    return figures_of(watch, tokens_of_steps(folder, what, tiny=tiny), steps, warm)


def drawn_on_device(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, with new weights made on the GPU if there is one."""
    import torch

    def load_there(*arguments: Any, **keywords: Any) -> Any:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return load(*arguments, **keywords)

    return load_there


def train_by_trl(folder: Path, *, tiny: bool, task: str, padding_free: bool = False) -> dict[str, Any]:
    """The same rows through TRL's trainer, in the same order and as many a step."""
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from packtrain.run_folder import installed_version

    what, (steps, warm), cuda = task_of(task, tiny=tiny), steps_of(tiny=tiny), torch.cuda.is_available()
    sizes = {name: value for name, value in what.sizes.items() if name != "model_type"}
    config = CONFIG_MAPPING["qwen3"](**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "flash_attention_2" if cuda and installed_version("flash-attn") else "sdpa"

    def model() -> Any:
        torch.manual_seed(0)
        with torch.device("cuda" if cuda else "cpu"):
            dtype = torch.bfloat16 if what.lora else torch.float32
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

    common: dict[str, Any] = {
        "output_dir": str(folder / f"trl-{os.getpid()}"),
        "per_device_train_batch_size": what.at_once,
        "gradient_accumulation_steps": what.examples // what.at_once,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": what.lora,
        "use_cpu": not cuda,
        "bf16": True,
        "seed": 0,
        "logging_steps": warm,
        "logging_first_step": True,  # as packtrain
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    rows = datasets.Dataset.from_json(str(folder / f"{what.objective}.jsonl"))
    watch = stopwatch(steps, warm)
    given = {"train_dataset": rows, "processing_class": AutoTokenizer.from_pretrained(folder / "tokenizer")}
    if what.objective == "sft":
        own = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}, "padding_free": padding_free}
        lora = (
            LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if what.lora else None
        )
        trainer: Any = SFTTrainer(model=model(), args=SFTConfig(**common, **own), peft_config=lora, **given)
    else:
        args = DPOConfig(**common, max_length=what.longest)
        trainer = DPOTrainer(model=model(), ref_model=model(), args=args, **given)
    trainer.add_callback(watch)
    trainer.train()
    return figures_of(watch, tokens_of_steps(folder, what, tiny=tiny), steps, warm)


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def reason_in(log: Path) -> str:
    """The lines of a process' output that say why it ended: packtrain's error, else the exception."""
    lines = (
        [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    )
    for number in reversed(range(len(lines))):
        if lines[number] == "error:":
            return " ".join(lines[number + 1 : number + 3])[:300]
    said = [line for line in lines if "Error" in line and not line.startswith("File ")]
    return ([*lines[-1:], *said] or ["it ended without a word"])[-1][:300]


def lacks(package: str) -> bool:
    """Whether a package is not installed."""
    from importlib.util import find_spec

    return find_spec(package) is None
