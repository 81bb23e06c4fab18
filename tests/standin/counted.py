"""Count launches and bytes of a micro-batch without a GPU.

    python -m tests.standin.counted     # writes today's figures into counted_costs.json

packtrain trains by a config, from loading to the backward pass, but tensors on a GPU are torch's fake ones: they have shapes and formats, and
no values. So models have their real widths, and take no memory. Code that reads a value gets 1. Nothing can be proved without values, so
attention and changes of the model are taken unproved. The cost of a layer is the difference between a model of two layers and of one.

A view is no launch; each other operator is one. It moves its arguments and results. `bytes` leaves out products and attention, which do not
wait for memory. TRL's kernels of the output head, written in Triton, count as one launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packtrain.attention import flash, varlen
from packtrain.attention.kernel_choice import KernelChoice
from packtrain.changes import lora
from packtrain.config.compose import load_config
from packtrain.config.schema import RunConfig
from packtrain.model import adapters
from packtrain.model.spread import Ranks
from packtrain.objectives.sft import run as sft
from packtrain.proof import choice
from packtrain.proof.comparison import ChangeProof
from packtrain.run_folder import RunFolder
from packtrain.system import holding
from packtrain.train import loop, preflight, preparation, run
from packtrain.train.objectives import training_objective

HERE = Path(__file__).parent
COSTS = HERE / "counted_costs.json"
RENEW = "python -m tests.standin.counted"
ROW = 16_384
"""Tokens of a row."""
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
LARGE = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8}
MIDDLE = {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960}
MIDDLE |= {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
EXPERTS = {**QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
EXPERTS |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BFLOAT16 = "model.dtype=bfloat16"
SHAPES: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {  # verb, model, tokens of a document, changes
    "sft 1.5B": ("sft", {**MIDDLE, **TIED}, 4096, (BFLOAT16,)),
    "sft 0.6B": ("sft", {**QWEN3, **SMALL, **TIED}, 256, ()),
    "LoRA 8B": ("sft", {**QWEN3, **LARGE, **UNTIED}, 256, (BFLOAT16, "peft=lora")),
    "dpo 0.6B": ("dpo", {**QWEN3, **SMALL, **TIED}, 256, ()),
    "experts 30B": ("sft", {**EXPERTS, **UNTIED}, 256, (BFLOAT16,)),
}
_VIEWS = {"detach", "_unsafe_view", "reshape", "_reshape_alias", "lift_fresh", "set_", "resize_", "record_stream"}
_VIEWS |= {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "is_pinned", "device"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_FILLS = {
    "fill_",
    "zero_",
    "zeros_like",
    "zeros",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "new_zeros",
    "scalar_tensor",
}
Fault = Callable[[], AbstractContextManager[Any]]
Costs = dict[str, dict[str, float]]
"""The figures of a shape by name, and of each operator its launches and bytes."""


class Ghosts(TorchDispatchMode):
    """Tensors of GPUs become fake. Tensors of the CPU stay real. While `phase` is set, what runs on a GPU is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase = ""
        self.launches, self.bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        ghosts, device = [one for one in given if isinstance(one, FakeTensor)], kwargs.get("device")
        if not ghosts and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return torch.ones((), dtype=ghosts[0].dtype).item()
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].fill_(1)
        if device is not None and torch.device(device).type == "cpu":
            return torch.ones(ghosts[0].shape, dtype=kwargs.get("dtype") or ghosts[0].dtype)
        if name == "equal":
            return False
        with self.fake:
            result = func(*args, **kwargs)
        if name not in _VIEWS and not func.is_view:
            made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            self.note(name, [] if name in _FILLS else given, made)
        return result

    def note(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Counts a launch, in a phase."""
        if not self.phase:
            return
        self.launches[self.phase, name] += 1
        self.bytes[self.phase, name] += sum(map(size, {id(one): one for one in given}.values())) + sum(map(size, made))
        if all(isinstance(one, torch.nn.Parameter) for one in given if one.dim()):
            return  # a weight in another format is no activation
        for one in made:
            storage = one.untyped_storage()
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def kept(self) -> int:
        """Return the bytes of made tensors that still exist."""
        return sum(bytes for storage, bytes in self._made.values() if not storage.expired())


def size(tensor: torch.Tensor) -> int:
    """Bytes in memory of a tensor. An expanded one has fewer than it shows."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) if tensor.numel() else 0


class TritonKernel:
    """Stands for a kernel of the output head that is written in Triton."""

    def __init__(self, ghosts: Ghosts, name: str) -> None:
        self._ghosts, self._name = ghosts, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            # the first is the logits, which the backward kernel overwrites
            self._ghosts.note(self._name, tensors, tensors[:1] if self._name == "head_backward" else [])

        return launch


class Counted(Exception):
    """The step has been counted; the run ends."""


def documents(verb: str, length: int) -> Iterator[dict[str, Any]]:
    """Rows that fill ROW tokens. Half of the `length` of a pair is its shared prompt."""
    random = np.random.default_rng(0)
    words = ["river", "stone", "cloud", "green"]

    def said(tokens: int) -> str:
        return "".join(f" {word}" for word in random.choice(words, tokens))

    for _ in range(ROW // length if verb == "sft" else ROW // (2 * length)):
        if verb == "sft":
            ids = random.integers(3, 500, length).tolist()
            yield {"input_ids": ids, "labels": [-100] * (length // 8) + ids[length // 8 :]}
        else:
            yield {"prompt": said(length // 2), "chosen": said(length // 2), "rejected": said(length // 2)}


def config_of(shape: str, layers: int, folder: Path) -> RunConfig:
    """The config of a run of one micro-batch, with its data in `folder`."""
    verb, model, length, changes = SHAPES[shape]
    rows = [json.dumps(row) for row in documents(verb, length)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    sizes = {**model, "num_hidden_layers": layers}
    return load_config(
        None,
        [
            *(f"+model.config.{name}={str(value).lower()}" for name, value in sizes.items()),
            *("model.init=random", "model.tokenizer=quickstart", f"objective.kind={verb}", "packing.mode=packed"),
            *(f"data.train={folder / 'rows.jsonl'}", f"data.cache_dir={folder}", "data.max_length=8192"),
            *(f"batch.tokens_per_device={ROW}", f"batch.examples_per_step={len(rows)}", "trainer.max_steps=1"),
            *("verify.preflight=false", "trainer.gradient_checkpointing=none", f"trainer.output_dir={folder / 'run'}"),
            *changes,
        ],
    )


def count(shape: str, layers: int, fault: Fault = nullcontext) -> tuple[Ghosts, int, int]:
    """Run one micro-batch of a `shape` with so many layers. Return the counts, bytes kept for the backward pass, and tokens."""
    ghosts, folder, found = Ghosts(), Path(tempfile.mkdtemp(dir=os.environ.get("COUNTED_IN"))), list[int]()

    def run_step(trainer: Any, checkpoint: Path | None) -> None:
        trainer.prepare(checkpoint)
        batch = next(trainer.load_steps(checkpoint))[0]
        counts = trainer.sum_counts([batch])

        def enter(phase: str, **_: Any) -> None:
            if phase == "backward":
                found.append(ghosts.kept())
            ghosts.phase = phase

        trainer.clock.enter = trainer.loss.report_phase = enter
        trainer.forward_and_backward([batch], counts)
        found.append(batch.tokens)
        raise Counted

    config = config_of(shape, layers, folder)
    with ExitStack() as stack:
        for place, name, value in [*without_values(ghosts), (run, "run_steps", run_step)]:
            assert hasattr(place, name) or name == "triton", f"{place.__name__} has no {name} any more"
            stack.enter_context(holding(place, **{name: value}))
        stack.enter_context(fault())
        RunFolder.of(config.trainer).open_attempt("auto")
        with suppress(Counted), ghosts:
            run.train_in(config, Ranks(0, 1, torch.device("cuda", 0)))
    kept, tokens = found
    return ghosts, kept, tokens


def without_values(ghosts: Ghosts) -> list[tuple[Any, str, Any]]:
    """Return replacements for code that needs values: module, name, replacement."""
    load, kernels = preparation.load_model, import_module("trl.kernels.chunked_logprob")
    flash_kernel = KernelChoice(varlen.Kernel("torch", varlen.from_torch()), ())

    def load_on_gpu(*given: Any, **named: Any) -> Any:
        with torch.device("cuda"):
            return load(*given, **named)

    def make_unproved(loss: Any, proposal: Any) -> ChangeProof:
        preflight._on_all(loss, proposal.make)()
        return ChangeProof()

    return [
        (preparation, "load_model", load_on_gpu),
        (training_objective, "load_model", load_on_gpu),
        (training_objective, "weights_hash", lambda _: ""),
        (run, "origin_of", lambda *_: {}),
        (run, "freeze_unreached", lambda *_: ("", False)),
        (run, "_try_saving", lambda *_: None),
        (loop, "try_largest", lambda trainer: None),
        # proofs, and choices by measurement
        (choice, "prove_backend", lambda *_, **__: ("", None)),
        (training_objective, "prove_backend", lambda *_, **__: ("", None)),
        (preflight, "_prove", make_unproved),
        (sft, "choose_head", lambda *_, **__: None),
        (flash, "choose_kernel", lambda layer, device: flash_kernel),
        # torch exchanges fake parameters, which fails if somebody refers to one
        (torch.utils, "swap_tensors", lambda own, other: setattr(own, "data", other.data)),
        (kernels, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))),
        (kernels, "_use_triton", lambda device: device.type == "cuda"),
        (kernels, "_forward_kernel", TritonKernel(ghosts, "head_forward")),
        (kernels, "_backward_kernel", TritonKernel(ghosts, "head_backward")),
    ]


def costs_of(shape: str, fault: Fault = nullcontext) -> Costs:
    """Count the costs of one layer, and of the rest (embeddings, head, loss). Bytes are per token.

    Below adapters the first layer has no gradient of its input: the rest is less by that, and may be negative.
    """
    (one, kept_by_one, tokens), (two, kept_by_two, _) = (count(shape, layers, fault) for layers in (1, 2))
    costs: Costs = {"figures": {}, "launches": {}, "bytes": {}}
    kept = kept_by_two - kept_by_one
    costs["figures"] |= {"layer: bytes kept": kept / tokens, "rest: bytes kept": (kept_by_one - kept) / tokens}
    for phase, name in sorted({*one.launches, *two.launches}):
        waits_for_memory = name.rstrip("_") not in _PRODUCTS and "attention" not in name
        for figure, per in (("launches", 1), ("bytes", tokens)):
            ours, theirs = (getattr(counts, figure)[phase, name] / per for counts in (one, two))
            for part, value in (("layer", theirs - ours), ("rest", 2 * ours - theirs)):
                costs[figure][f"{part} {phase}: {name}"] = value
                if figure == "launches" or waits_for_memory:
                    total = f"{part} {phase}: {figure}"
                    costs["figures"][total] = costs["figures"].get(total, 0) + value
    return {kind: {name: round(value, 1) for name, value in own.items() if value} for kind, own in costs.items()}


def growth(now: Costs, before: Costs, most: float = 0.01) -> list[str]:
    """Return a line for each figure that grew by more than `most`. Its fastest growing operators follow."""
    lines = []
    for figure, value in now["figures"].items():
        ceiling = before["figures"].get(figure, 0)
        if value <= ceiling + most * abs(ceiling):
            continue
        place, _, kind = figure.partition(": ")
        lines.append(f"{figure}: {ceiling:,.0f} → {value:,.0f}{'' if kind == 'launches' else ' a token'}")
        own, theirs = now.get(kind, {}), before.get(kind, {})
        by_growth = sorted(
            (name for name in own if name.startswith(f"{place}: ")), key=lambda name: theirs.get(name, 0) - own[name]
        )
        lines += [
            f"    {name.partition(': ')[2]}: {theirs.get(name, 0):,.0f} → {own[name]:,.0f}"
            for name in by_growth[:8]
            if own[name] > theirs.get(name, 0)
        ]
    return lines


def pad_by_nothing() -> AbstractContextManager[None]:
    """A fault: queries, keys and values are copied before attention."""
    attend = flash.attend_by_segments

    def padded(kernel: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
        return attend(kernel, *(torch.nn.functional.pad(one, (0, 0)) for one in (q, k, v)), *given)  # pyright: ignore

    return holding(flash, attend_by_segments=padded)


@contextmanager
def cast_inputs() -> Iterator[None]:
    """A fault: adapters run by PEFT's own code, which casts their inputs to float32."""
    casting = holding(adapters, _cast_unless_autocast=lambda x, dtype: x.to(dtype))
    with casting, holding(lora, plain_layers=lambda model: iter(())):
        yield


@contextmanager
def with_faults() -> Iterator[None]:
    """Both faults."""
    with pad_by_nothing(), cast_inputs():
        yield


def versions() -> dict[str, str]:
    """The packages that decide what operators a model is made of."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers", "peft", "trl")}


def count_all() -> None:
    """Count every shape, and one with faults, into the file $COUNTED. This process needs stand-in GPUs."""
    found = {shape: costs_of(shape) for shape in SHAPES}
    if "COUNTED_FAULTS" in os.environ:
        found["faults"] = costs_of("LoRA 8B", with_faults)
    lines = json.dumps({"made by": versions(), **found}, indent=1, sort_keys=True)
    Path(os.environ["COUNTED"]).write_text(lines + "\n")


if __name__ == "__main__":
    from tests.standin.gpus import variables

    if "STANDIN_GPUS" in os.environ:
        count_all()
    else:
        folder = tempfile.mkdtemp()
        environment = {
            **os.environ,
            **variables(1),
            "COUNTED": str(COSTS),
            "COUNTED_IN": folder,
            "OMP_NUM_THREADS": "1",
        }
        sys.exit(subprocess.run([sys.executable, "-m", "tests.standin.counted"], env=environment).returncode)
