"""Steps by AdamW's kernel beside plain ones, on a CPU.

Triton's interpreter runs the kernel (`python -m fused_steps steps`, or `runs`), or torch does its work.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from here import run_here
from running import Run, assert_same_bits, base_config
from torch.utils._python_dispatch import TorchDispatchMode

from packtrain.system import holding
from packtrain.train.optim import dither, fused_adamw
from packtrain.train.optim.float32_step import AVERAGE, MASTER, stepping_in_float32
from tests.train import forked

CPU = torch.device("cpu")
FIRST, LAST = 3, 5
HOW = {"masters": [], "stochastic": ["optim.bf16_rounding=stochastic"]}
SPECIAL = [0.0, -0.0, 1e-40, -9e-41, 1e-38, 3.3e38, -3.3e38, 1.0, -1.0, 2.0**-126, torch.inf, -torch.inf, torch.nan]


def adamw_(tensors: list[torch.Tensor], group: dict[str, Any], count: float, streams: list[int], first: int) -> None:
    """The kernel's work, by torch."""
    weight, *moments, master, gradient, step = tensors
    exact, *states = (one.float() for one in (master, *moments))
    arguments = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    beta1, beta2 = group["betas"]
    lists = [exact], [gradient.float()], [states[0]], [states[1]], [], [step.data.fill_(count)]
    torch._fused_adamw_(*lists, beta1=beta1, beta2=beta2, **arguments)
    if master.dtype == torch.bfloat16:
        for to, value, stream in zip((weight, *moments), (exact, *states), streams, strict=True):
            with holding(dither, stream_of=lambda *_, stream=stream: stream):
                to.copy_(dither.dithered(value, 0, "", first))
    else:
        weight.copy_(exact)


def by_torch(update: Any = adamw_) -> dict[str, ModuleType]:
    """Modules for sys.modules, in which `update` is the kernel."""
    module: Any = ModuleType("packtrain.train.optim.adamw_kernel")
    module.adamw_ = update
    return {module.__name__: module, "triton": ModuleType("triton")}


class Fused:
    """A weight that one optimizer steps by the kernel, and another not."""

    def __init__(self, start: torch.Tensor, *, masters: bool, **group: Any) -> None:
        self.weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
        self.optimizers: list[Any] = []
        for weight in self.weights:
            names: dict[torch.Tensor, str] = {weight: "a.b"}
            moved = dither.Dither({"a.b": weight}, {"a.b": weight}, 5)
            kind: Any = stepping_in_float32(torch.optim.AdamW, masters=masters, seed=5, names=names, dither=moved)
            self.optimizers.append(kind([weight], **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **group}))
        self.optimizers[0].kernel = fused_adamw.FusedAdamW(CPU)

    def step(self, gradient: torch.Tensor, *, same: slice = slice(None)) -> None:
        """A step of both; afterwards all is equal bit for bit."""
        for weight, optimizer in zip(self.weights, self.optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        ours, plain = (optimizer.state[weight] for weight, optimizer in zip(self.weights, self.optimizers, strict=True))
        assert list(ours) == list(plain)
        for name, value in (*plain.items(), ("weight", self.weights[1].detach())):
            own = self.weights[0].detach() if name == "weight" else ours[name]
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                assert own == value, name
            else:
                assert own.dtype == value.dtype, name
                torch.testing.assert_close(own[same], value[same], rtol=0, atol=0, equal_nan=True, msg=name)


def steps_alike(*, masters: bool) -> None:
    """Assert equal bits over orders of magnitude and special numbers, with both ways in turn."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, generator=random) * 10 ** torch.linspace(-30, 3, 4096)
    weight[:13] = torch.tensor(SPECIAL)
    for group in ({}, {"lr": 0.5, "weight_decay": 0.0, "betas": (0.95, 0.9)}):
        both = Fused(weight.bfloat16(), masters=masters, **group)
        for number in range(5):
            gradient = torch.randn(4096, generator=random) * 10 ** (torch.rand(4096, generator=random) * 50 - 40)
            gradient[number : number + 13] = torch.tensor(SPECIAL[: 13 if number == 3 else 10] + [1.0] * 3)[:13]
            both.step(gradient.bfloat16())
            both.optimizers.reverse()  # each goes on from the other's states
            both.weights.reverse()
            both.optimizers[0].kernel, both.optimizers[1].kernel = both.optimizers[1].kernel, None


def parts_are_those_of_the_whole() -> None:
    """Assert that parts of a weight, from any index on, are rounded like the whole."""
    random = torch.Generator().manual_seed(1)
    start, gradient = torch.randn(2, 5000, generator=random).bfloat16()
    group, streams = {"betas": (0.9, 0.999), "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}, [7, -(2**31), 2**31 - 1]
    group |= {"amsgrad": False, "maximize": False}
    update = fused_adamw.FusedAdamW(CPU)._adamw_

    def stepped(begin: int, end: int, origin: int = 0) -> list[torch.Tensor]:
        own = [one.clone() for one in (start[begin:end], gradient[begin:end] / 10, gradient[begin:end] ** 2)]
        update([*own, own[0], gradient[begin:end].clone(), torch.zeros(())], group, 3.0, streams, origin + begin)
        return own

    for origin in (0, 2**33 + 4):
        whole = stepped(0, 5000, origin)
        for begin, end in ((0, 1008), (1, 17), (1003, 2043), (2046, 2046), (4095, 4991)):
            for ours, expected in zip(stepped(begin, end, origin), whole, strict=True):
                assert torch.equal(ours, expected[begin:end]), (origin, begin, end)


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += function.overloadpacket.__name__ in ("_local_scalar_dense", "item", "is_nonzero", "equal")
        return function(*args, **(kwargs or {}))


def reads_of_a_step(*, masters: bool) -> list[int]:
    """Count the reads of five steps by the kernel, the fourth after a resume."""
    both, gradient = Fused(torch.ones(64).bfloat16(), masters=masters), torch.ones(64).bfloat16()
    optimizer, found = both.optimizers[0], []
    optimizer.kernel._adamw_ = lambda *given: None
    for number in range(6):
        if number == 4:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        both.weights[0].grad = gradient
        with Reads() as reads:
            optimizer.step()
        found.append(reads.found)
    return found[1:]


@contextmanager
def taken_on_cpus() -> Iterator[list[int]]:
    """Has runs on a CPU take the kernel. Yields how many weights each step by it had."""
    taken: list[int] = []
    step = fused_adamw.FusedAdamW.step

    def noted(self: Any, optimizer: Any) -> Any:
        began = len(optimizer.state) > 0
        taken.append(len(found := step(self, optimizer)))
        assert found or not began, "only a first step is plain"
        return found

    with holding(fused_adamw, _DEVICE="cpu"), holding(fused_adamw.FusedAdamW, step=noted):
        yield taken


def runs_go_on_from_each_other(folder: Path, *overrides: str) -> list[Run]:
    """Assert equal bits of runs with and without the kernel, also from each other's checkpoints."""
    trainer = {"max_steps": LAST, "checkpoint_every": FIRST, "keep_checkpoints": None, "ema": 0.9}
    config = base_config(folder, trainer=trainer, optim={"weight_decay": 0.1, "max_grad_norm": 0.5})
    # of a multiple of 16 numbers each: torch's CPU code treats the rest in another order
    config["model"] |= {"dtype": "bfloat16", "config": {**config["model"]["config"], "num_hidden_layers": 1}}
    config["optim"]["groups"] = [{"match": "mlp", "lr_scale": 3}]
    plain = run_here(folder, config, *overrides, name="plain")
    with taken_on_cpus() as taken:
        ours = run_here(folder, config, *overrides, name="kernel")
        assert max(taken) == len(ours.states(LAST)["state"]) and taken[:3].count(0) == 1
        ours_on = run_here(folder, config, *overrides, plain.resume(FIRST), name="kernel-on")
    plain_on = run_here(folder, config, *overrides, ours.resume(FIRST), name="plain-on")
    assert_same_bits(ours, plain)
    for run in (ours_on, plain_on):
        assert_same_bits(run, plain, after=FIRST)
    for one, other in zip(ours_on.states(LAST)["state"].values(), plain_on.states(LAST)["state"].values(), strict=True):
        assert one.keys() == other.keys() and AVERAGE in one
        assert all(one[name].dtype == other[name].dtype for name in one if isinstance(one[name], torch.Tensor))
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
        assert (MASTER in one) == (overrides == ())
    seen = [[line.get("updates_seen") for line in run.steps] for run in (ours, plain)]
    assert seen[0] == seen[1] and (seen[0][1] is None) == (overrides != ())
    return [ours, plain]


def in_interpreter() -> None:
    """Make Triton interpret the kernel. It decides when the kernel is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.standin.site import triton_interpreter

    triton_interpreter.install()
    import_module("packtrain.train.optim.adamw_kernel")


def run(*given: Any) -> None:
    """`forked.run` with the kernel on a CPU, in Triton's interpreter where triton is installed."""
    if fused_adamw.find_spec("triton"):
        in_interpreter()
    else:
        sys.modules |= by_torch()
        setattr(fused_adamw, "find_spec", str)  # noqa: B010
    with taken_on_cpus():
        forked.run(*given)


def check_steps() -> None:
    """Every claim about single steps."""
    for masters in (True, False):
        assert fused_adamw._refusal(CPU, masters=masters) == ""
        steps_alike(masters=masters)
        assert reads_of_a_step(masters=masters) == [1, 0, 0, 1, 0]
    parts_are_those_of_the_whole()


def check_runs() -> None:
    """Every claim about runs."""
    for how in HOW.values():
        with tempfile.TemporaryDirectory() as made:
            runs_go_on_from_each_other(Path(made), *how)


def check_by_triton(what: str) -> None:
    """Check `steps` or `runs` with the kernel itself."""
    in_interpreter()
    torch.set_num_threads(1)
    {"steps": check_steps, "runs": check_runs}[what]()
