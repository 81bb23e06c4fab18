"""What is trained by benchmarks/gpu.py: models, their rows, and runs of packtrain and TRL on them.

Training goes through packtrain's command, as a user starts it, but for the weights that it would write at its end, and through
TRL's trainers on the same rows; both are measured by the same callback, which waits for the device twice: after the steps that
warm up, and after the last one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gpu_profile

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATE = 1e-6
WEIGHTS = {
    "float32 + autocast": ["model.dtype=float32", "trainer.mixed_precision=bf16"],
    "bf16 + masters": ["model.dtype=bfloat16", "trainer.mixed_precision=bf16"],
}
LAYERS = {
    "eager": ["model.kernels=none"],
    "compiled": ["model.kernels=none", "trainer.torch_compile=true"],
    "Liger": ["model.kernels=liger"],
}
"""How layers are computed; runs that do not say take packtrain's defaults."""


@dataclass(frozen=True)
class Task:
    """A model to train: its `objective`, its sizes, and how many `examples` a step and a padded micro-batch (`at_once`) have.

    Documents are as long as real conversations; or, by `documents`, from a quarter of the `longest` to it (long), just the
    `longest` (longest), or sixteen about one text of 3,072 tokens each (groups). Of the `steps` of a run the first ones warm up,
    at least those three that packtrain checks document by document; a line is logged as often.
    """

    objective: str
    sizes: dict[str, Any]
    examples: int
    at_once: int
    row: int
    lora: bool = False
    longest: int = 2048
    documents: Literal["conversations", "long", "longest", "groups"] = "conversations"
    steps: tuple[int, int] = (15, 5)

    @property
    def data(self) -> str:
        """The file of its rows."""
        return f"{self.objective}-{self.documents}.jsonl"


QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
SMALL = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL |= {"tie_word_embeddings": True, "max_position_embeddings": 40_960}
LARGE = QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
LARGE |= {"tie_word_embeddings": False, "max_position_embeddings": 40_960}
MIDDLE = {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960}
MIDDLE |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
MIDDLE |= {"tie_word_embeddings": True, "max_position_embeddings": 32_768}
TINY = QWEN3 | {"vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
TINY |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512}
EXPERTS = SMALL | {"model_type": "qwen3_moe", "num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8}
EXPERTS |= {"moe_intermediate_size": 512, "norm_topk_prob": True}
TINY_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONGEST = SMALL | {"max_position_embeddings": 131_072}
TASKS = {
    "sft 1.5B": Task("sft", MIDDLE, examples=12, at_once=2, row=16_384, longest=8192, documents="long", steps=(8, 3)),
    "sft 0.6B": Task("sft", SMALL, examples=128, at_once=16, row=16_384),
    "dpo 0.6B": Task("dpo", SMALL, examples=16, at_once=4, row=16_384),
    "LoRA 8B": Task("sft", LARGE, examples=64, at_once=16, row=16_384, lora=True, steps=(7, 3)),
    "one document 0.6B": Task("sft", LONGEST, 1, 1, row=98_304, longest=98_304, documents="longest", steps=(5, 3)),
    "groups 0.6B": Task(
        "sft", SMALL, examples=32, at_once=4, row=16_384, longest=8192, documents="groups", steps=(6, 3)
    ),
    "experts 2B": Task("sft", EXPERTS, examples=64, at_once=8, row=16_384, steps=(7, 3)),
}


def task_of(name: str, *, tiny: bool) -> Task:
    """The task of this name; a tiny one has the same shape in everything but size."""
    task = TASKS[name]
    sizes = TINY | (TINY_EXPERTS if "num_experts" in task.sizes else {})
    small = {"sizes": sizes, "examples": 4, "at_once": 2, "row": 1024, "longest": 128, "steps": (2, 1)}
    return replace(task, **small) if tiny else task


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
    shorter = 16 if tiny else 1
    for name in ("sft 0.6B", "sft 1.5B", "one document 0.6B", "groups 0.6B"):
        task, text = task_of(name, tiny=tiny), []
        with (folder / task.data).open("w") as file:
            for number in range((task.steps[0] + gpu_profile.STEPS) * task.examples):
                prompt, answer = (1 + n // shorter for n in lengths["sft"][number % len(lengths["sft"])])
                if task.documents == "long":
                    prompt, answer = 8, drawn.randrange(task.longest // 4, task.longest + 1) - 8
                elif task.documents == "longest":
                    prompt, answer = 8, task.longest - 8
                elif task.documents == "groups":  # of lengths that are alike in each
                    if number % 16 == 0:
                        text = [drawn.randrange(3, len(words)) for _ in range(task.longest * 3 // 8)]
                    prompt, answer = (1 + n // shorter for n in lengths["sft"][number % 16])
                ids = [drawn.randrange(3, len(words)) for _ in range(prompt + answer)]
                ids, prompt = text + ids, len(text) + prompt
                file.write(json.dumps({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}) + "\n")
    task = task_of("dpo 0.6B", tiny=tiny)
    with (folder / task.data).open("w") as file:
        for number in range(task.steps[0] * task.examples):
            prompt, *answers = (1 + n // shorter for n in lengths["dpo"][number % len(lengths["dpo"])])
            prompt = min(prompt, task.longest // 2)
            counts = prompt, *(min(answer, task.longest - prompt - 1) for answer in answers)
            texts = [" ".join(f"w{drawn.randrange(500)}" for _ in range(count)) for count in counts]
            row = {"prompt": texts[0], "chosen": f" {texts[1]}", "rejected": f" {texts[2]}"}
            file.write(json.dumps(row) + "\n")


def tokens_of_steps(folder: Path, task: Task) -> int:
    """Real tokens of the steps that are timed; of preferences those of both documents, prompts twice."""
    steps, warm = task.steps
    with (folder / task.data).open() as file:
        rows = [json.loads(line) for line in file][warm * task.examples : steps * task.examples]
    if task.objective == "sft":
        return sum(len(row["input_ids"]) for row in rows)
    return sum(2 * len(r["prompt"].split()) + len((r["chosen"] + r["rejected"]).split()) + 2 for r in rows)


def stopwatch(steps: int, warm: int, profiled: bool = False) -> Any:
    """A TrainerCallback with `seconds` of the steps after the first `warm` ones, and the `peak` GiB of the training.

    With `profiled` the steps after the first `steps` are profiled, and `profile` holds what gpu_profile.py makes of them.
    """
    import torch
    from transformers import TrainerCallback

    cuda = torch.cuda.is_available()

    class Stopwatch(TrainerCallback):
        seconds = peak = reserved = 0.0
        history: list[dict[str, Any]]
        profile: dict[str, Any] | None = None
        _started = 0.0
        _profiler: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if cuda:
                torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (warm, steps):
                if cuda:
                    torch.cuda.synchronize()
                self.seconds, self._started = time.perf_counter() - self._started, time.perf_counter()
            if profiled and state.global_step == steps:
                self._profiler = gpu_profile.start()
            elif profiled and state.global_step == steps + gpu_profile.STEPS:
                self.profile = gpu_profile.stop(self._profiler)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.history = state.log_history
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
            self.peak = (torch.cuda.max_memory_allocated() if cuda else resident) / 2**30
            self.reserved = (torch.cuda.max_memory_reserved() if cuda else resident) / 2**30

    return Stopwatch()


def figures_of(watch: Any, tokens: int, steps: int, warm: int) -> dict[str, Any]:
    """What a run is compared by."""
    lines = [line for line in watch.history if "loss" in line]
    mfu = [line["mfu"] for line in lines if line.get("mfu") and warm < line["step"] <= steps]
    return {
        "tokens_per_second": tokens / watch.seconds,
        "seconds_per_step": watch.seconds / (steps - warm),
        "peak": watch.peak,
        "reserved": watch.reserved,
        "mfu": sum(mfu) / len(mfu) if mfu else None,
        "losses": [lines[0]["loss"], lines[-1]["loss"]],
    }


def train(folder: Path, *, tiny: bool, task: str, changes: list[str], profiled: bool = False) -> dict[str, Any]:
    """`packtrain sft|dpo` in this process, one of those that a launcher may have started; weights are not written."""
    import torch

    from packtrain import cli
    from packtrain.model import compiled, reference
    from packtrain.train import preparation, run
    from packtrain.train.loop import StepTrainer

    what = task_of(task, tiny=tiny)
    steps, warm = what.steps
    watch, init, said = stopwatch(steps, warm, profiled), StepTrainer.__init__, {}

    def with_watch(self: StepTrainer, *given: Any) -> None:
        init(self, *given)
        self.listeners.append(watch)

    def finish(run: Any, trainer: Any, summary: Any) -> None:
        said["attention"] = summary.to_json("done")["attention"]

    StepTrainer.__init__ = with_watch
    run.train_in = partial(run.train_in, finish=finish)
    if tiny:
        compiled.BACKEND = "eager"  # graphs are made, and not compiled: that takes a CPU a minute
    alone = "WORLD_SIZE" not in os.environ
    if alone:  # drawing 8 billion numbers takes minutes on a CPU
        preparation.load_model = reference.load_model = drawn_on_device(preparation.load_model)
    cuda = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else None
    output = folder / f"run-{os.getpid() if alone else os.environ['MASTER_PORT']}"
    arguments = [*arguments_of(folder, what, changes), f"trainer.log_every={warm}", f"trainer.output_dir={output}"]
    arguments.append(f"trainer.max_steps={steps + gpu_profile.STEPS * profiled}")
    arguments += ["topology=single"] if alone else []  # also inside a Slurm job
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
            shutil.rmtree(output, ignore_errors=True)
    figures = figures_of(watch, tokens_of_steps(folder, what), steps, warm)
    plan = planned([f"objective.kind={what.objective}", *arguments], memory) if alone else {}
    return {**figures, **said, **plan, "profile": watch.profile}


def arguments_of(folder: Path, what: Task, changes: list[str]) -> list[str]:
    """What packtrain is told to train a task, but for the length of the run and its folder."""
    return [
        "model.init=random",
        f"model.tokenizer={folder / 'tokenizer'}",
        *(f"+model.config.{name}={str(value).lower()}" for name, value in what.sizes.items()),
        f"data.train={folder / what.data}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={what.longest}",
        *([] if any("shuffle" in change for change in changes) else ["data.shuffle=false"]),
        f"batch.examples_per_step={what.examples}",
        f"batch.tokens_per_device={what.row}",
        *([] if "packing.mode=packed" in changes else [f"batch.examples_per_device={what.at_once}"]),
        f"optim.learning_rate={LEARNING_RATE}",
        "optim.schedule=constant",
        "trainer.mixed_precision=bf16",
        *(["peft=lora", "model.dtype=bfloat16"] if what.lora else []),
        *changes,
    ]


def bench(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """What `packtrain bench` reports of the small model, in processes of its own."""
    what = task_of("sft 0.6B", tiny=tiny)
    arguments = arguments_of(folder, what, ["packing.mode=packed", "topology=single"])
    command = [sys.executable, "-m", "packtrain", "bench", *arguments, "--json", "--seconds", "5" if tiny else "20"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=folder)
    return json.loads(done.stdout)


def planned(arguments: list[str], memory: int | None) -> dict[str, Any]:
    """What `packtrain plan` says of a device of so many bytes: the peak GiB (`planned`), and the gradient checkpointing."""
    from packtrain.config.compose import load_config
    from packtrain.plan.memory import GIB, estimate

    plan = estimate(load_config(None, arguments), 1, memory)
    return {} if isinstance(plan, str) else {"planned": plan.total / GIB, "checkpointing": plan.checkpointing}


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

    what, cuda = task_of(task, tiny=tiny), torch.cuda.is_available()
    steps, warm = what.steps
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
    rows = datasets.Dataset.from_json(str(folder / what.data))
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
    return figures_of(watch, tokens_of_steps(folder, what), steps, warm)


def attach_to_grpo(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """TRL's GRPOTrainer with `attach` and without: forward and backward of one group, in turns (attach_speed.py)."""
    import attach_speed
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from packtrain import attach

    what, cuda = task_of("sft 0.6B", tiny=tiny), torch.cuda.is_available()
    sizes = {name: value for name, value in what.sizes.items() if name != "model_type"}
    torch.manual_seed(0)
    with torch.device("cuda") if cuda else nullcontext():
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**sizes, pad_token_id=0), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    prompt, completions = (40, (8, 32)) if tiny else (2048, (256, 2048))
    on_device = {"use_cpu": not cuda, "bf16": True}
    trainer, batches = attach_speed.grpo(model, tokenizer, False, prompt, completions, words=500, **on_device)
    batches = [{name: value.to(model.device) for name, value in one.items()} for one in batches]
    tokens = int(sum(one["prompt_mask"].sum() + one["completion_mask"].sum() for one in batches))
    measured: dict[str, Any] = {"tokens": tokens}
    for turn in range(2 if tiny else 5):
        for way in ("padded", "attached"):
            handle = attach(trainer, proof=turn == 0) if way == "attached" else None
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            with torch.autocast(model.device.type, torch.bfloat16):
                seconds, loss, norm = attach_speed.once(trainer, batches)
            best = min(seconds, measured.get(way, {}).get("seconds", seconds))
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            measured[way] = {"seconds": best, "loss": loss, "norm": norm, "peak": peak}
            if handle is not None:
                measured["attention"] = handle.backends[0]
                handle.detach()
    return measured
