"""What is asked of the stand-in GPUs themselves and of parts of packtrain on them; each function runs in a process that has them."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from tiny_models import off
from torch.distributed._functional_collectives import all_reduce
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from trl_trainers import STEPS, Ran, make, ran

from packtrain.attention import kernel_choice
from packtrain.attention.backends import deterministic
from packtrain.attention.kernel_choice import KernelChoice, LayerFeatures, choose_kernel, forget_kernels
from packtrain.changes.float8 import check_float8
from packtrain.cli import main
from packtrain.config.schema import RunConfig
from packtrain.diagnose import env
from packtrain.errors import CheckFailed, UserError
from packtrain.model import forward
from packtrain.model.forward import ChosenTokens, sum_losses
from packtrain.model.layers import recompute
from packtrain.model.spread import Ranks
from packtrain.objectives.spec import equal_weights, head_chunk
from packtrain.packing.segments import Segments
from packtrain.plan.memory import STASHED
from packtrain.system import holding
from packtrain.train.loop import StepTrainer
from packtrain.train.run import train
from packtrain.train.sync import limit_collectives
from tests.stand_in_kernels import flash_attention_3

CUDA = torch.device("cuda", 0)
SIZES: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MANY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12, "vocab_size": 97, "head_dim": 16}
MANY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
HALF = LayerFeatures(torch.bfloat16, 2, 16, 16, window=True)


def joins_on_the_gpu_of_its_local_rank() -> None:
    """Of LOCAL_RANK where a launcher has set it, or the first."""
    index = int(os.environ["LOCAL_RANK"]) if "RANK" in os.environ else 0

    def work(_: RunConfig, ranks: Ranks, peers: Any) -> int:
        assert peers is None and (ranks.rank, ranks.world_size) == (0, 1)
        assert ranks.device == torch.device("cuda", index) and torch.cuda.current_device() == index
        return 7

    assert train("sft", RunConfig(), work) == 7


def refuses_what_cuda_refuses() -> None:
    """On two devices."""
    first, second = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    for other in (second, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            first + other
    assert (first + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(2)
    with pytest.raises(TypeError, match=r"Tensor.cpu\(\)"):
        first.numpy()


def notes_touches_waits_and_bytes() -> None:
    from standin_gpus import device, tensor

    torch.cuda.set_device(1)
    torch.ones(1, device="cuda")
    beside = threading.Thread(target=lambda: torch.ones(1, device="cuda"), name="beside")
    beside.start()
    beside.join()
    assert device.touched == {1: "MainThread", 0: "beside"}

    row = torch.arange(1024.0, device="cuda")
    before, waits = torch.cuda.memory_allocated(), len(tensor.waits)
    twice = row * 2
    assert torch.cuda.memory_allocated() == before + 4096 and len(tensor.waits) == waits
    assert (twice.sum().item(), twice[row < 2].tolist()) == (1023 * 1024, [0, 2])
    assert tensor.waits[waits:] == ["_local_scalar_dense", "index", "tolist"]
    tensor.Bytes.resize(twice, 0)
    assert torch.cuda.memory_allocated() == before
    tensor.Bytes.resize(twice, 4096)
    assert torch.cuda.memory_allocated() == before + 4096 and torch.cuda.memory_allocated(1) > 0
    del twice
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() > before + 4096


def indexes_as_torch_does() -> None:
    row, there = torch.arange(12).view(4, 3), torch.arange(12, device="cuda").view(4, 3)
    for key in ([2, 0], range(2), (slice(None), [0, 2]), torch.tensor([True, False, True, False]), -1):
        assert there[key].cpu().equal(row[key]), key
    there[[1, 3]] = 0
    assert there.sum().item() == 0 + 1 + 2 + 6 + 7 + 8


def makes_tensors_of_their_size_where_they_belong() -> None:
    of_4 = (
        (torch.arange, 4),
        (torch.linspace, 0, 1, 4),
        (torch.eye, 4),
        (torch.randperm, 4),
        (torch.tensor, [1, 2, 3, 4]),
    )
    for build, *arguments in of_4:
        with torch.device("cuda"):
            inside = build(*arguments)
        for one in (inside, build(*arguments, device="cuda")):
            assert one.is_cuda and one.shape[0] == 4
            assert len(one.repeat_interleave(torch.full((4,), 2).cuda(), dim=0)) == 8
        assert not build(*arguments).is_cuda


def refuses_what_the_kernel_cannot_do() -> None:
    from torch.nn.attention.varlen import varlen_attn

    def attend(dtype=torch.bfloat16, size=16, borders=torch.int32, place="cuda", longest=4):
        q, k, v = (torch.ones(6, 2, size, dtype=dtype, device="cuda") for _ in range(3))
        starts = torch.tensor([0, 4, 6], dtype=borders, device=place)
        return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))

    assert attend().shape == (6, 2, 16)
    wrong: dict[str, Any] = {"fp16 and bf16": {"dtype": torch.float32}, "multiple of 8": {"size": 12}}
    wrong |= {"int32": {"borders": torch.int64}, "same device": {"place": "cpu"}, "longer": {"longest": 3}}
    for said, argument in wrong.items():
        with pytest.raises(RuntimeError, match=said):
            attend(**argument)


def sends_what_is_on_devices_alone() -> None:
    """In two ranks."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    with pytest.raises(ValueError, match="with index"):
        dist.init_process_group("nccl", device_id=torch.device("cuda"))
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    assert dist.get_backend() == dist.get_backend(dist.new_group([0, 1])) == "nccl"
    numbers = torch.ones(2, device="cuda") * (rank + 1)
    dist.all_reduce(numbers)
    each = torch.empty(4, device="cuda")
    dist.all_gather_into_tensor(each, numbers * (rank + 1))
    assert (numbers.tolist(), each.tolist()) == ([3, 3], [3, 3, 6, 6])
    summed = all_reduce(numbers, "sum", dist.group.WORLD)
    assert summed.device.index == rank and summed.tolist() == [6, 6]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, [rank] * 99 * rank)
    assert objects == [[], [1] * 99]
    dist.gather_object([rank] * 99 * rank, objects if rank == 0 else None)
    assert rank > 0 or objects == [[], [1] * 99]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


def limits_what_waits_for_another_rank() -> None:
    """In two ranks."""
    rank, done = int(os.environ["RANK"]), Path(os.environ["DONE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=600))
    limit_collectives(1)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.ones(2, device="cuda"))
        done.touch()
    while not done.exists():
        time.sleep(0.05)


def attends_by_the_kernels_of_a_gpu() -> None:
    """Those that torch takes for the format, the mask and the heads; outputs and gradients are the CPU's, and no scores are kept."""
    torch.manual_seed(0)
    heads, length = 4, 64
    for dtype, groups, masked in ((torch.bfloat16, 2, False), (torch.bfloat16, 1, True), (torch.float32, 1, True)):
        drawn = [torch.randn(2, number, length, 8).to(dtype) for number in (heads, heads // groups, heads // groups)]
        mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril() if masked else None
        results = []
        for device in ("cpu", "cuda"):
            inputs = [one.detach().to(device).requires_grad_() for one in drawn]
            before = torch.cuda.memory_allocated()
            given: Any = {"attn_mask": None if mask is None else mask.to(device), "is_causal": not masked}
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, **given, enable_gqa=groups > 1)
            kept = torch.cuda.memory_allocated() - before
            (out * out).sum().backward()
            results.append([one.detach().cpu().float() for one in (out, *(given.grad for given in inputs))])
        scores = 2 * heads * length * length * dtype.itemsize
        assert 0 < kept < scores
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


def makes_tensors_on_the_device_around() -> None:
    """As models are loaded: on `meta` first, so that what no file has is computed and not left as it came."""
    for place in ("meta", "cuda:0"):
        with torch.device(place):
            made = torch.empty(2), torch.zeros(2), torch.arange(2), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight
        assert [str(one.device) for one in made] == [place] * 5
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, **SIZES))
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert all(loaded.get_buffer(name).equal(buffer) for name, buffer in model.named_buffers())


def has_torchs_kernel_forward_and_backward() -> None:
    choice = choose_kernel(HALF, CUDA)  # by outputs and gradients of a dense reference, prefixes and window among it
    assert choice.kernel is not None and choice.kernel.name == "torch's varlen_attn", choice.why_not()
    in_place = choose_kernel(LayerFeatures(torch.bfloat16, 2, 16, 16, in_place=True), CUDA).kernel
    assert in_place is not None and in_place.in_place and not choice.kernel.in_place
    for window in (False, True):
        with_sinks = choose_kernel(LayerFeatures(torch.bfloat16, 2, 16, 16, window=window, sinks=True), CUDA)
        assert with_sinks.kernel is not None, with_sinks.why_not()
    assert choose_kernel(LayerFeatures(torch.bfloat16, 2, 16, 16, softcap=9.0), CUDA).kernel is None


def bring(kernel: Any) -> None:
    """FlashAttention 3, which computes by `kernel`."""

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size):
        return kernel(q, k, v)

    sys.modules["flash_attn_interface"] = types.SimpleNamespace(flash_attn_varlen_func=varlen)  # type: ignore[assignment]


def bring_flash_attention_3() -> None:
    """FlashAttention 3 as it should be."""
    sys.modules["flash_attn_interface"] = types.SimpleNamespace(flash_attn_varlen_func=flash_attention_3)  # type: ignore[assignment]


def ends_with_the_kernel_that_broke_the_device() -> None:
    """An illegal access ends a process's use of the GPU: every call after it fails, also those of kernels that are right."""
    from standin_gpus import device

    def kernel(q: Any, k: Any, v: Any) -> Any:
        device.broken = "CUDA error: an illegal memory access was encountered"
        return q + k.sum()

    bring(kernel)
    with pytest.raises(
        CheckFailed, match=r"FlashAttention 3 .*cuda:0 .*illegal memory access.*\[kernel-broke-gpu\]"
    ) as failed:
        choose_kernel(HALF, CUDA)
    assert failed.value.problems[0].where == "model.attention" and failed.value.problems[0].fix


def takes_the_fastest_of_the_right_kernels() -> None:
    """By a clock of this test. A few per cent are noise; ranks and runs agree."""
    clock: dict[str, list[float | Exception]] = {}

    def milliseconds(call: Any) -> float:
        call()
        time = clock[call.args[0].name].pop(0)
        if isinstance(time, Exception):
            raise time
        return time

    def chosen(threes: Sequence[float | Exception], torchs: Sequence[float | Exception]) -> KernelChoice:
        forget_kernels()
        clock.update({"FlashAttention 3": [*threes], "torch's varlen_attn": [*torchs]})
        return choose_kernel(HALF, CUDA)

    kernel_choice.milliseconds, kernel_choice._DOCUMENTS = milliseconds, Segments((70, 1, 57))
    no_time: list[float | Exception] = [torch.OutOfMemoryError("full")] * 4
    forget_kernels()
    assert choose_kernel(HALF, CUDA).kernel.name == "torch's varlen_attn"  # the only one: no clock is read
    bring_flash_attention_3()
    slower = chosen([9, 3, 5, 4], [9, 8, 2.5, 7])
    assert slower.kernel and slower.kernel.name == "torch's varlen_attn"
    why = "FlashAttention 3: 3 ms for 128 tokens, forward and backward, torch's varlen_attn 2.5"
    assert slower.why_not().endswith(why), slower.why_not()
    kernel_choice.kernel_error = lambda *_: 0.0  # both were right
    for threes, torchs in (([3] * 4, [2.95] * 4), ([3] * 4, no_time), (no_time, no_time)):
        choice = chosen(threes, torchs)
        assert choice.kernel and choice.kernel.name == "FlashAttention 3"
        assert choice.why_not().endswith("not timed") == (torchs is no_time)
    with deterministic():
        assert chosen([], []).kernel.name == "FlashAttention 3"  # the first, in every run
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for threes in ([2] * 4, [9] * 4):  # the second as on another rank
        choice = chosen(threes, [3] * 4)
        assert choice.kernel and choice.kernel.name == "FlashAttention 3"
        assert choice.why_not().endswith("as another rank chose") == (threes == [9] * 4)
    dist.destroy_process_group()


def takes_another_ranks_kernel_without_memory_to_try_it() -> None:
    """In two ranks. The second lacks memory to try the kernel that the first found faster."""
    lacks = int(os.environ["RANK"])
    tried = kernel_choice.kernel_error
    times = {"FlashAttention 3": 3.0, "torch's varlen_attn": 2.0}

    def error(kernel: Any, *given: Any) -> float:
        if lacks and kernel.name == "torch's varlen_attn":
            raise torch.OutOfMemoryError("full")
        return tried(kernel, *given)

    bring_flash_attention_3()
    kernel_choice.milliseconds, kernel_choice.kernel_error = lambda call: times[call.args[0].name], error
    assert choose_kernel(HALF, CUDA).kernel.name == ("FlashAttention 3" if lacks else "torch's varlen_attn")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    forget_kernels()
    for rank in range(2):
        if rank == lacks:
            assert choose_kernel(HALF, CUDA).kernel.name == "torch's varlen_attn"
        dist.barrier()
    dist.destroy_process_group()


def trains_by_the_fastest() -> None:
    """The command on a GPU whose clock favours the kernel FASTEST. It is killed in the step KILLED, with all checkpoints complete."""
    fastest, last, goes_on = os.environ["FASTEST"], int(os.environ.get("KILLED", "0")), StepTrainer.next_batches

    def next_batches(trainer: StepTrainer, *given: Any) -> Any:
        if trainer.state.step + 1 == last:
            trainer.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return goes_on(trainer, *given)

    StepTrainer.next_batches = next_batches  # type: ignore[method-assign]
    kernel_choice._DOCUMENTS = Segments((70, 1, 57))
    kernel_choice.milliseconds = lambda call: 2.0 if call.args[0].name == fastest else 3.0
    bring_flash_attention_3()
    sys.argv = ["packtrain", *os.environ["ARGUMENTS"].split()]
    main()


def passes_over_a_kernel_without_code_for_the_device() -> None:
    def kernel(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")

    bring(kernel)
    choice = choose_kernel(HALF, CUDA)
    assert choice.kernel is not None and "no kernel image" in dict(choice.lacks)["FlashAttention 3"]


def takes_its_time_over_env() -> None:
    """`packtrain env` with the ARGUMENTS, without its limit on time: a busy machine would say less."""
    env.TORCH_S = env.DRIVER_S = env.FOLDER_S = 100.0
    sys.argv = ["packtrain", "env", *os.environ["ARGUMENTS"].split()]
    main()


def passes_tests() -> None:
    """Those of the ARGUMENTS of pytest; as many as are not skipped."""
    raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", *os.environ["ARGUMENTS"].split()]))


def sums_losses_on_the_gpu_as_on_the_cpu() -> None:
    """In bfloat16 by autocast, with a vocabulary of no round number. The size of chunks changes nothing but the number of sums."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(3000, 32, generator=generator), torch.nn.Linear(32, 101)
    targets, kernels = torch.randint(101, (3000,), generator=generator), forward._kernels()
    add, sums = kernels._addmm_fp32, [0]

    def counted(*given: torch.Tensor) -> None:
        sums[0] += 1
        add(*given)

    def made(device: Any) -> list[torch.Tensor]:
        rows, there = hidden.to(device).requires_grad_(), copy.deepcopy(head).to(device)
        with torch.autocast("cuda", torch.bfloat16):
            total = sum_losses(rows, there, ChosenTokens(targets.to(device), equal_weights))
        (total / 3000).backward()
        gradients = [tensor.grad for tensor in (rows, *there.parameters())]
        return [tensor.cpu() for tensor in (total.detach(), *gradients) if tensor is not None]

    with holding(kernels, _addmm_fp32=counted):
        by_chosen = made(CUDA)
        assert sums == [1]  # 80 GiB hold more logits than 3,000 tokens have
        with holding(forward, head_chunk=lambda *given: head_chunk(*given[:2], 0)):
            by_smallest = made(CUDA)
    assert sums == [1 + 2]
    for own, other, expected in zip(by_chosen, by_smallest, made("cpu"), strict=True):
        assert own.dtype == other.dtype == expected.dtype == torch.float32
        assert (own - expected).norm() < 5e-3 * expected.norm()
        assert (own - other).norm() <= 1e-6 * expected.norm()


def refuses_products_in_8_bits_on_a_gpu_that_has_none() -> None:
    check_float8(CUDA)
    torch.cuda.get_device_capability = lambda device=None: (8, 0)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"\[no-fp8-device\]") as refused:
        check_float8(CUDA)
    assert refused.value.problems[0].where == "trainer.mixed_precision (fp8)"


def offloaded(offload: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Losses and gradients of two steps of two forward passes each before one backward pass, and the bytes kept after a forward pass."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MANY)).to("cuda").train()
    recompute(model, "full", offload=offload)
    results, kept = [], []
    for step in range(2):
        gc.collect()
        before, total = torch.cuda.memory_allocated(0), torch.zeros((), device="cuda")
        for part in range(2):
            ids = (torch.arange(401)[None] * (7 + part + step) % 97).cuda()
            total = total + model.model(input_ids=ids, use_cache=False).last_hidden_state.pow(2).mean()
            kept.append(torch.cuda.memory_allocated(0) - before)
        total.backward()
        with torch.no_grad():  # an evaluation between
            model.model(input_ids=ids, use_cache=False)
        results += [total.detach().cpu(), *(one.grad.cpu() for one in model.parameters() if one.grad is not None)]
    return results, kept


def keeps_inputs_of_layers_on_the_host() -> None:
    torch.cuda.set_device(0)
    PartialState()  # without it TRL's warning about a full memory is an error; a run has made one
    expected, kept = offloaded(False)
    moved, left = offloaded(True)
    assert len(moved) == len(expected) > 2 and all(one.equal(two) for one, two in zip(moved, expected, strict=True))
    inputs = MANY["num_hidden_layers"] * 401 * MANY["hidden_size"] * 4
    for whole, less in zip(kept, left, strict=True):
        assert whole - less > 0.9 * inputs * (1 - STASHED / MANY["num_hidden_layers"]), (kept, left, inputs)


def trained(kind: str, folder: Path, place: str) -> Ran:
    """What TRL's trainer of that kind does on that device, with `attach`."""
    given: Any = {"beta": 0.1} if kind == "grpo" else {}
    trainer = make(kind, folder, bf16=True, use_cpu=place == "cpu", **given)
    found = ran(trainer, attached=True)
    assert {weight.device for weight in trainer.model.parameters()} == {torch.device(place)}
    return found


def trains_by_trl() -> None:
    """The same losses and gradients as on the CPU, by flash attention, within the rounding of bfloat16."""
    kind = os.environ["KIND"]
    with tempfile.TemporaryDirectory() as folder:
        there, here = (trained(kind, Path(folder), place) for place in ("cuda:0", "cpu"))
    assert there.handle is not None and there.handle.stats.calls >= STEPS and not there.handle.stats.unchanged
    assert len(there.losses) == len(here.losses) >= STEPS
    assert there.losses == pytest.approx(here.losses, abs=2e-2)
    for ours, of_cpu in zip(there.gradients[:2], here.gradients[:2], strict=True):
        assert ours.device.type == "cuda" and off(ours.cpu(), of_cpu) < 0.05
