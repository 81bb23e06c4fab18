"""Flash attention by Segments, with stand-ins for the kernels: the same signatures, computed one sequence at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from packtrain.attention import flash
from packtrain.attention.backends import Service, deterministic, serve
from packtrain.attention.kernel_choice import LayerFeatures, choose_kernel, dense_attention, forget_kernels
from packtrain.attention.spec import BACKENDS
from packtrain.attention.varlen import Kernel, Scoring, attend_by_segments, from_torch
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments
from tests.stand_in_kernels import KERNELS, MODULES, attend, flash_attention_2, flash_attention_3

CPU = torch.device("cpu")
TORCH = "torch's varlen_attn"
PLAIN = Segments((5, 1, 17, 8, 8))
SHARED = Segments((7, 1, 9, 4, 1, 3, 2), (None, 0, 0, None, 3, None, 4))


def torchs_operator(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale, window_size_left, window_size_right,
):  # fmt: skip
    assert (not dropout_p and (window_size_left, window_size_right) == (-1, -1)) or window_size_right == 0
    assert is_causal == (window_size_left == -1 and window_size_right == 0)
    assert query.shape[-1] % 8 == 0 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    output, log_sums = attend(query, key, value, *lengths, scale, window_size_left, causal=window_size_right == 0)
    return output, log_sums, torch.zeros(2), torch.zeros(()), torch.empty(0)


def torchs_backward(
    gradient, query, key, value, output, log_sums, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, state, unused, *,
    scale, window_size_left, window_size_right,
):  # fmt: skip
    """Backward pass of each segment, from the given output and log-sums."""
    group = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(group, dim=1) for one in (key, value))
    found = [torch.zeros_like(one) for one in (query, keys, values)]
    for i in range(len(cum_seq_q) - 1):
        rows, columns = slice(*cum_seq_q[i : i + 2].tolist()), slice(*cum_seq_k[i : i + 2].tolist())
        behind = torch.arange(rows.stop - rows.start)[:, None] - torch.arange(columns.stop - columns.start)[None]
        behind = behind + (columns.stop - columns.start) - (rows.stop - rows.start)
        hidden = ((window_size_right == 0) & (behind < 0)) | ((window_size_left >= 0) & (behind > window_size_left))
        scores = torch.einsum("qhd,khd->hqk", query[rows], keys[columns]) * scale
        weights = (scores.masked_fill(hidden, -torch.inf) - log_sums[:, rows, None]).exp()
        mean = (gradient[rows] * output[rows]).sum(-1).T[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", gradient[rows], values[columns]) - mean) * scale
        found[0][rows] += torch.einsum("hqk,khd->qhd", of_scores, keys[columns])
        found[1][columns] += torch.einsum("hqk,qhd->khd", of_scores, query[rows])
        found[2][columns] += torch.einsum("hqk,qhd->khd", weights, gradient[rows])
    return found[0], *(one.unflatten(1, (-1, group)).sum(2) for one in found[1:])


ALL = {**KERNELS, TORCH: torchs_operator}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """A machine without any kernel (torch's own does not run on a CPU); gives the function that installs a stand-in for one."""
    forget_kernels()
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "kernels"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it now raises ModuleNotFoundError

    def install(name: str, function: Any) -> None:
        if name == TORCH:
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", function)
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", torchs_backward)
        else:
            monkeypatch.setitem(sys.modules, MODULES[name], SimpleNamespace(flash_attn_varlen_func=function))

    yield install
    forget_kernels()


def attention_layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.config = LlamaConfig()
    module.projection = torch.nn.Linear(2, 2)
    return module


def through_flash(segments: Segments, tensors: list[torch.Tensor], **asked: Any) -> torch.Tensor:
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in tensors)
    output, weights = flash.flash_attention(attention_layer(), q, k, v, None, segments=segments, **asked)
    assert weights is None and output.shape == (1, segments.tokens, q.shape[1], v.shape[-1])
    return output[0]


CASES = {
    "plain": {},
    "grouped queries": {"heads": 6},
    "one key head": {"heads": 4, "kv_heads": 1},
    "window": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "soft-cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "sliding_window": 4, "heads": 6},
    "scaling": {"scaling": 0.3},
    "odd width": {"head_dim": 5},
    "latent attention": {"head_dim": 12, "value_dim": 8},
    "wide values": {"head_dim": 8, "value_dim": 20},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ALL)
def test_outputs_and_gradients_equal_the_dense_masked_reference(no_kernels: Callable, kernel: str, case: str) -> None:
    no_kernels(kernel, ALL[kernel])
    asked = {"heads": 2, "kv_heads": 2, "head_dim": 8, **CASES[case]}
    heads, kv_heads, width = (asked.pop(name) for name in ("heads", "kv_heads", "head_dim"))
    values, with_sinks = asked.pop("value_dim", width), asked.pop("sinks", False)
    lacking = {"FlashAttention 3": ["sinks"], "FlashAttention 2": ["sinks"], TORCH: ["softcap"]}
    for segments in (PLAIN, SHARED, Segments((1,))):
        shapes = [(heads, width), (kv_heads, width), (kv_heads, values)]
        tensors = [torch.randn(segments.tokens, *shape, requires_grad=True) for shape in shapes]
        sinks = torch.randn(heads, requires_grad=True) if with_sinks else None
        if any(CASES[case].get(word) for word in lacking.get(kernel, [])):
            with pytest.raises(CheckFailed, match=f"{kernel}: no (attention sinks|soft-cap)"):
                through_flash(segments, tensors, s_aux=sinks, **asked)
            return
        ours = through_flash(segments, tensors, s_aux=sinks, **asked)
        scoring = Scoring(asked.get("scaling", width**-0.5), asked.get("sliding_window"), asked.get("softcap"))
        reference = dense_attention(tensors[0], tensors[1], tensors[2], sinks, segments, scoring)
        torch.testing.assert_close(ours, reference, atol=2e-6, rtol=1e-5)
        leaves = tensors if sinks is None else [*tensors, sinks]
        gradient = torch.randn_like(reference)
        ours_back, exact_back = (torch.autograd.grad(output, leaves, gradient) for output in (ours, reference))
        for a, b in zip(ours_back, exact_back, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("segments", [PLAIN, SHARED, Segments((1, 1, 1))], ids=["plain", "shared", "single tokens"])
def test_sinks_by_the_log_sums_of_a_kernel_without_any_are_exact(
    no_kernels: Callable, segments: Segments, window: int | None
) -> None:
    """In float64; some sinks outweigh all keys, some nothing."""
    no_kernels(TORCH, torchs_operator)
    scoring = Scoring(0.4, window)
    shapes = [(segments.tokens, 6, 8), (segments.tokens, 2, 8), (segments.tokens, 2, 8)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    leaves.append(torch.tensor([-30.0, -1, 0, 1, 3, 30], dtype=torch.float64, requires_grad=True))
    q, k, v, sinks = leaves
    ours = attend_by_segments(Kernel(TORCH, from_torch()), q, k, v, segments, scoring, sinks)
    reference = dense_attention(q, k, v, sinks, segments, scoring)
    gradient = torch.randn_like(reference)
    torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-12)
    back = [torch.autograd.grad(output, leaves, gradient) for output in (ours, reference)]
    for mine, exact in zip(*back, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-12, rtol=1e-12)


GROUPS = {
    "two answers": Segments((7, 3, 4), (None, 0, 0)),
    "tokens": Segments((1, 1, 1, 1), (None, 0, 0, 0)),
    "groups and documents": Segments(
        (4, 9, 1, 2, 5, 3, 6, 1, 2, 1, 1, 8), (None, None, 1, 1, 1, 1, 1, None, 7, None, 9, None)
    ),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("row", GROUPS)
def test_shared_keys_read_in_place_give_exact_outputs_and_gradients_without_copies_of_them(
    no_kernels: Callable, row: str, heads: int, sinks: bool
) -> None:
    """In float64. The rows have 1 to 5 answers, prompts and answers of one token, and documents between."""
    segments, calls = GROUPS[row], list[tuple[int, int]]()

    def counting(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append((len(q), len(k)))
        return torchs_operator(q, k, *args, **options)

    no_kernels(TORCH, counting)
    shapes = [(segments.tokens, heads, 8), (segments.tokens, 2, 8), (segments.tokens, 2, 8), (heads,)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes[: 3 + sinks]]
    q, k, v, *rest = leaves
    kernel, sink = Kernel(TORCH, from_torch(), in_place=True), rest[0] if sinks else None
    ours = attend_by_segments(kernel, q, k, v, segments, Scoring(0.4), sink)
    assert calls == [(segments.tokens, segments.tokens)] * 2
    reference = dense_attention(q, k, v, sink, segments, Scoring(0.4))
    gradient = torch.randn_like(reference)
    torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-12)
    back = [torch.autograd.grad(output, leaves, gradient) for output in (ours, reference)]
    for mine, exact in zip(*back, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("segments", "heads", "window", "calls"),
    [
        (Segments((12, *[1] * 8), (None, *[0] * 8)), 2, None, 2),  # 96 keys more than the row's 20
        (Segments((12, *[1] * 8), (None, *[0] * 8)), 16, None, 1),  # queries of more heads cost more than these keys
        (Segments((12, *[1] * 8), (None, *[0] * 8)), 2, 7, 1),  # it may end within the prompt
        (Segments((9, 9, 9), (None, 0, 0)), 2, None, 1),
        (Segments((40, *[1] * 9), (None, *[0] * 8, 1)), 2, None, 1),  # an answer that is continued
        (Segments((40, 3, *[1] * 8), (None, None, *[0] * 8)), 2, None, 1),  # another document between
        (Segments((40, 8)), 2, None, 1),
    ],
)
def test_keys_are_read_in_place_where_that_moves_fewer_bytes(
    no_kernels: Callable, segments: Segments, heads: int, window: int | None, calls: int
) -> None:
    tensors = [torch.randn(segments.tokens, count, 8) for count in (heads, 2, 2)]
    seen = []
    no_kernels(TORCH, lambda *args, **options: seen.append(0) or torchs_operator(*args, **options))
    for _ in range(2):  # the first call tries the kernel
        seen.clear()
        ours = through_flash(segments, tensors, sliding_window=window)
    assert len(seen) == calls
    expected = dense_attention(tensors[0], tensors[1], tensors[2], None, segments, Scoring(8**-0.5, window))
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)


def test_keys_are_gathered_if_a_kernel_is_wrong_in_place(no_kernels: Callable) -> None:
    def without_borders(*args: Any, **options: Any) -> Any:
        if options["window_size_right"] == -1:
            raise RuntimeError("no empty segments")
        return torchs_operator(*args, **options)

    no_kernels(TORCH, without_borders)
    segments = Segments((12, *[1] * 8), (None, *[0] * 8))
    tensors = [torch.randn(segments.tokens, 2, 8) for _ in range(3)]
    expected = dense_attention(tensors[0], tensors[1], tensors[2], None, segments, Scoring(8**-0.5))
    torch.testing.assert_close(through_flash(segments, tensors), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("width", "copies"), [(8, False), (5, True)])
def test_heads_of_a_width_that_kernels_take_are_not_copied(width: int, copies: bool) -> None:
    """A pad by nothing is a copy, forwards and backwards."""
    given = [torch.randn(PLAIN.tokens, 2, width, requires_grad=True) for _ in range(3)]
    seen: list[torch.Tensor] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.extend((q, k, v))
        return v

    attend_by_segments(Kernel("recording", kernel), *given, PLAIN, Scoring(1.0))
    assert [one is not other for one, other in zip(seen, given, strict=True)] == [copies] * 3
    assert {one.shape[-1] for one in seen} == {8}


def test_the_first_kernel_that_is_right_is_taken_and_the_better_ones_say_what_they_lack(no_kernels: Callable) -> None:
    def off_by_one(q, k, v, *args, window_size=(-1, -1), **options):
        return flash_attention_2(q, k, v, *args, window_size=(1, 0), **options)

    def without_backward(*args, **options):
        return flash_attention_3(*args, **options).detach()

    no_kernels("FlashAttention 4", without_backward)
    no_kernels("FlashAttention 3", off_by_one)
    no_kernels(TORCH, torchs_operator)
    choice = choose_kernel(LayerFeatures(torch.float32, 2, 16, 16), CPU)
    assert choice.kernel and choice.kernel.name == TORCH
    lacks = dict(choice.lacks)
    assert "does not require grad" in lacks["FlashAttention 4"]
    assert lacks["FlashAttention 3"].startswith("wrong by ")
    assert "not installed" in lacks["FlashAttention 2"]
    assert lacks["FlashAttention 2 of the hub"] == "the kernels package is not installed"
    assert "FlashAttention 4 of the hub, FlashAttention 3 of the hub" in choice.why_not()


@pytest.mark.parametrize("wrong", ["gradient", "nan", "softcap", "prefix", "no code for this device"])
def test_a_kernel_that_is_wrong_anywhere_is_refused(no_kernels: Callable, wrong: str) -> None:
    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, softcap=0.0):
        if wrong == "no code for this device":
            raise RuntimeError("no kernel image is available for execution on the device\nmore lines")
        if wrong == "gradient":
            k = k.detach() + 0 * k
        if wrong == "prefix":  # aligned at the top left, as FlashAttention before 2.1
            length = (cu_seqlens_k[1:] - cu_seqlens_k[:-1] - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])).tolist()
            shift = [n for n, rows in zip(length, cu_seqlens_q.diff().tolist(), strict=True) for _ in range(rows)]
            q = torch.where(torch.tensor(shift)[:, None, None] > 0, q.roll(1, 0), q)
        capped = None if wrong == "softcap" else softcap or None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        output = attend(q, k, v, *lengths, softmax_scale, -1, capped)[0]
        return output * torch.nan if wrong == "nan" else output

    no_kernels("FlashAttention 2", kernel)
    needs = LayerFeatures(torch.bfloat16, 1, 32, 32, softcap=50.0)
    choice = choose_kernel(needs, CPU)
    assert choice.kernel is None
    expected = "no kernel image is available for execution on the device" if "device" in wrong else "wrong by"
    assert dict(choice.lacks)["FlashAttention 2"].startswith(expected)


def test_gradients_of_a_shared_prefix_are_summed_in_float32(no_kernels: Callable) -> None:
    many = 40
    segments = Segments((1, *[1] * many), (None, *[0] * many))
    no_kernels("FlashAttention 3", flash_attention_3)
    values = torch.ones(segments.tokens, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros(segments.tokens, 1, 8, dtype=torch.bfloat16)
    output = through_flash(segments, [zeros, zeros, values])  # each answer takes half of the prefix's value
    weights = 1 + torch.arange(many) / 128  # eight bits each, their sum is not
    (gradient,) = torch.autograd.grad(output[1:, 0], values, weights.bfloat16()[:, None].expand(many, 8))
    assert torch.equal(gradient[0, 0], (weights.sum() / 2).bfloat16().expand(8))


def test_gradients_of_gathered_keys_are_summed_without_wider_copies(no_kernels: Callable) -> None:
    made = set()

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = operator(*args, **(kwargs or {}))
            made.update(one.dtype for one in tree_leaves(results) if isinstance(one, torch.Tensor))
            return results

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        return q + k.sum() + v.sum()

    given = [torch.ones(SHARED.tokens, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with Recording():
        output = attend_by_segments(Kernel("sum", kernel), *given, SHARED, Scoring(1.0))
        of_keys = torch.autograd.grad(output.sum(), given)[1]
    assert made <= {torch.bfloat16, torch.int64, torch.int32} and torch.int64 in made
    times = torch.tensor(SHARED.tokens_along(range(len(SHARED.lengths)))).bincount()
    assert torch.equal(of_keys[:, 0, 0] / of_keys[-1, 0, 0], times.bfloat16())


def test_a_kernel_that_cannot_be_deterministic_is_not_taken_where_that_is_asked_for(no_kernels: Callable) -> None:
    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, -1, None)[0]

    no_kernels("FlashAttention 3", kernel)
    assert choose_kernel(LayerFeatures(torch.float32, 1, 8, 8), CPU).kernel
    with deterministic():
        choice = choose_kernel(LayerFeatures(torch.float32, 1, 8, 8), CPU)
    assert "no deterministic backward pass" in dict(choice.lacks)["FlashAttention 3"]


@pytest.mark.parametrize("first_asked", ["forward", "run again"])
def test_a_layer_that_is_run_again_may_be_the_first_to_ask_for_its_kernel(no_kernels, first_asked):
    no_kernels("FlashAttention 3", flash_attention_3)
    tensors = [torch.randn(PLAIN.tokens, 2, 8, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(through_flash(PLAIN, tensors).square().sum(), tensors)
    if first_asked == "forward":
        forget_kernels()
    output = checkpoint(lambda *given: through_flash(PLAIN, list(given)), *tensors, use_reentrant=False)
    if first_asked == "run again":
        forget_kernels()
    for ours, theirs in zip(torch.autograd.grad(output.square().sum(), tensors), expected, strict=True):
        assert torch.equal(ours, theirs)
    kernel = choose_kernel(LayerFeatures(torch.float32, 1, 8, 8), CPU).kernel
    assert kernel and kernel.name == "FlashAttention 3"


def test_a_full_device_says_nothing_of_a_kernel_and_is_not_remembered(no_kernels: Callable) -> None:
    failures = [torch.OutOfMemoryError("full"), None]

    def once_in_a_while(*args: Any, **options: Any) -> torch.Tensor:
        if failures and (failure := failures.pop(0)):
            raise failure
        return flash_attention_3(*args, **options)

    no_kernels("FlashAttention 3", once_in_a_while)
    plain = LayerFeatures(torch.float32, 1, 8, 8)
    with pytest.raises(torch.OutOfMemoryError):
        choose_kernel(plain, CPU)
    assert choose_kernel(plain, CPU).kernel


def test_kernels_of_the_hub_are_used_only_when_they_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    asked = []
    monkeypatch.setitem(sys.modules, "kernels", ModuleType("kernels"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    loaded = SimpleNamespace(flash_attn_varlen_func=flash_attention_3)
    get_kernel = "transformers.integrations.hub_kernels.get_kernel"
    monkeypatch.setattr(get_kernel, lambda name, version: asked.append((name, version)) or loaded)
    (tmp_path / "kernels--kernels-community--flash-attn3").mkdir()
    choice = choose_kernel(LayerFeatures(torch.float32, 1, 8, 8), CPU)
    assert choice.kernel and choice.kernel.name == "FlashAttention 3 of the hub"
    assert [name for name, _ in asked] == ["kernels-community/flash-attn3"]
    assert dict(choice.lacks)["FlashAttention 4 of the hub"] == "kernels-community/flash-attn4 is not downloaded"


def test_float32_states_under_autocast_reach_the_kernel_in_half_precision(no_kernels: Callable) -> None:
    seen = set()

    def kernel(q, k, v, *args, **options):
        seen.update(tensor.dtype for tensor in (q, k, v))
        return flash_attention_2(q, k, v, *args, **options)

    no_kernels("FlashAttention 2", kernel)
    tensors = [torch.randn(PLAIN.tokens, 2, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = through_flash(PLAIN, tensors)
    assert seen == {torch.bfloat16} and output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in tensors)


def test_what_no_kernel_can_express_is_refused(no_kernels: Callable) -> None:
    no_kernels("FlashAttention 2", flash_attention_2)
    tensors = {name: torch.zeros(1, 2, 4, 8) for name in ("query", "key", "value")}
    for code, what in {
        "layer-has-mask": {"attention_mask": torch.zeros(1, 1, 4, 4)},
        "keys-of-other-tokens": {"key": torch.zeros(1, 2, 9, 8)},
        "layer-has-bias": {"position_bias": torch.zeros(1)},
    }.items():
        given = {"attention_mask": None, **tensors, **what}
        with pytest.raises(CheckFailed, match=code):
            flash.flash_attention(attention_layer(), **given, segments=Segments((3, 1)))


def test_without_a_gpu_in_float32_or_with_dropout_flash_is_not_available() -> None:
    """Dropout is looked up in the config, since proofs run without it."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert serve(BACKENDS["flash"], model, CPU) == Service(None, "the device is cpu")
    service = serve(BACKENDS["flash"], model, torch.device("cuda"))
    assert service.kernel is None and "torch.float32" in service.why
    service = serve(BACKENDS["flash"], model, torch.device("cuda"), torch.bfloat16)
    assert service.kernel is None and "attention_dropout=0" in service.why
    assert flash.plain_features(config, torch.bfloat16) == LayerFeatures(torch.bfloat16, 2, 16, 16)


_QUERIES = "Tensor query, Tensor key, Tensor value"
_ROW = "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal"
_SCORING = "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
_UNTIL_2_11 = f"Tensor? cum_seq_q, Tensor? cum_seq_k, {_ROW}, bool return_debug_mask, *, {_SCORING}, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
_FROM_2_12 = f"{_UNTIL_2_11}, Tensor? block_table=None, int? num_splits=None"
SCHEMAS = {
    "installed": str(torch.ops.aten._flash_attention_forward.default._schema),
    **{
        version: f"aten::_flash_attention_forward({_QUERIES}, {rest}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
        for version, rest in {"2.10 and 2.11": _UNTIL_2_11, "2.12 and 2.13": _FROM_2_12}.items()
    },
}
"""Torch's operator in each version, from its native_functions.yaml."""


@pytest.mark.parametrize("version", SCHEMAS)
def test_torchs_operator_is_called_as_each_version_of_torch_takes_it(no_kernels: Callable, version: str) -> None:
    arguments = torch._C.parse_schema(SCHEMAS[version]).arguments

    def operator(*given: Any, **named: Any) -> Any:
        assert len(given) == sum(not one.kwarg_only for one in arguments)
        assert named.keys() <= {one.name for one in arguments if one.kwarg_only}
        return torchs_operator(*given, **named)

    no_kernels(TORCH, operator)
    tensors = [torch.randn(SHARED.tokens, 2, 8, requires_grad=True) for _ in range(3)]
    through_flash(SHARED, tensors, sliding_window=4).sum().backward()
