"""Backends attend by Segments: the same outputs and gradients from every one of them, shared prefixes included; the choice."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EXPERTS, FAMILIES, break_borders, gradient, longrope_model, off, tiny_model, whole
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention import flattened, segmented
from packtrain.attention.backends import OWN_CODE, attend_by, attending_by, attention_by
from packtrain.attention.flattened import chunks
from packtrain.errors import CheckFailed, UserError
from packtrain.model.forward import add_loss_sum
from packtrain.model.load import check_positions
from packtrain.packing.collate import IGNORE, label_positions
from packtrain.packing.segments import Segments
from packtrain.proof import isolation, mixer_search
from packtrain.proof.choice import NotExact, choose_attention
from packtrain.proof.comparison import evaluating
from packtrain.proof.isolation import DOCUMENTS, TREE, check_causal_and_padding, find_leak, prove_isolation
from packtrain.proof.mixer_search import mixing_of

# two prompts, the first one shared twice and once more later, and a lone document; equal lengths, neighbours and not
SHARED = Segments((13, 7, 7, 21, 5, 1, 13, 7), (None, 0, 0, None, 3, 3, None, 0))
# a tree five segments deep, wide at its root and narrow below, beside a second one and a lone document
DEEP = Segments((9, 4, 1, 3, 12, 4, 6, 1, 5, 11, 2, 8, 8, 1), (None, 0, 1, 2, 3, 3, 1, 0, None, None, 9, 10, 10, 0))
SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
OWN_ATTENTION = {"bloom": {"n_layer": 2, "n_head": 4}, "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4}}
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    **OWN_ATTENTION,
}
CPU = torch.device("cpu")


def mamba() -> PreTrainedModel:
    return tiny_model("mamba", **SMALL, **HYBRIDS["mamba"])


def row(segments: Segments) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(3, 97, segments.tokens)
    return {"input_ids": torch.from_numpy(ids)[None], "position_ids": segments.position_ids(), "segments": segments}


def gradients_of(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """Of one fixed function of all logits [T, vocabulary]."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape).sin()
    (logits.float() * weights).sum().backward()
    return gradient(model)


def alone(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """[T, vocabulary]: every segment behind its own copy of what is before it on its path, by the model's own attention."""
    segments, ids = batch["segments"], batch["input_ids"][0]
    paths = [ids[segments.tokens_along([number])][None] for number in range(len(segments.lengths))]
    return torch.cat([model(path).logits[0, -n:] for path, n in zip(paths, segments.lengths, strict=True)])


def assert_as_alone(model: PreTrainedModel, batch: dict[str, Any], backend: str) -> None:
    """Outputs and gradients of the row by `backend` are those of its segments alone."""
    expected = alone(model, batch)
    expected_gradients = gradients_of(model, expected)
    with attending_by(model, backend):
        logits = model(**batch, use_cache=False).logits[0]
        gradients = gradients_of(model, logits)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
    assert off(gradients, expected_gradients) < 1e-4


@pytest.mark.parametrize("backend", ["segmented", "sdpa_mask", "per_document"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_before_a_segment_is_seen_by_it_as_if_it_had_its_own(family: str, backend: str) -> None:
    """Windows of 8 positions end inside the path."""
    model = tiny_model(family)
    for segments in (SHARED, DEEP):
        assert_as_alone(model, row(segments), backend)


def test_gradients_of_a_shared_prefix_are_summed_in_float32() -> None:
    segments = Segments((8, *[3] * 256), (None, *[0] * 256))
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, segments.tokens, 16).bfloat16() for heads in (4, 2, 2)]
    weights = torch.randn(1, segments.tokens, 4, 16).bfloat16() + 0.5
    model: Any = tiny_model("llama")
    layer = model.model.layers[0].self_attn

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        output, _ = segmented.segmented_attention(layer, *leaves, None, segments=segments, scaling=0.25)
        return [one[:, :, :8].float() for one in torch.autograd.grad(output, leaves, weights.to(dtype))]

    for ours, exact in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert off(ours, exact) < 5e-3  # summed in bfloat16 they are off by 2e-2


def test_segments_of_equal_length_go_through_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are in the row: of the attention function in each layer, or of the whole model."""
    model, batch, shapes = tiny_model("llama", num_hidden_layers=2), row(Segments((5, 9, 5, 5, 3, 9))), []
    attend = flattened.sdpa_attention_forward

    def counted(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append((query.shape[0], query.shape[2]))
        return attend(module, query, *args, **kwargs)

    monkeypatch.setattr(flattened, "sdpa_attention_forward", counted)
    with attending_by(model, "segmented"):
        model(**batch, use_cache=False)
    assert shapes == [(3, 5), (2, 9), (1, 3)] * 2
    shapes.clear()
    model.model.register_forward_pre_hook(lambda _, __, call: shapes.append(call["input_ids"].shape), with_kwargs=True)
    with attending_by(model, "per_document"):
        model(**batch, use_cache=False)
    assert shapes == [(3, 5), (2, 9), (1, 3)]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_that_mixes_tokens_elsewhere_runs_by_its_mixers_and_is_exact(family: str) -> None:
    """Shared prefixes included, and documents of one token, alone in their row, and of as many tokens as there are heads or channels."""
    model = tiny_model(family, **SMALL, **HYBRIDS[family])
    decision = choose_attention("auto", model, CPU, pairs=True)
    assert decision.backend.name == "mixers" and [name for name, _ in decision.rejected] == ["flash", "segmented"]
    assert decision.proof is not None and decision.proof.verdict == "exact" and decision.why_not_shared == ""
    if family == "rwkv":
        model.train()
    for segments in (SHARED, DEEP, Segments((1,)), Segments((32, 4, 1, 1, 32, 2))):
        assert_as_alone(model, row(segments), "mixers")
    assert_as_alone(model, row(DEEP), "per_document")
    assert all("forward" not in module.__dict__ for module in model.modules())
    if family in OWN_ATTENTION:
        assert [why for _, why in decision.rejected] == [OWN_CODE] * 2
        with pytest.raises(UserError, match=r"model\.attention"):
            choose_attention("segmented", model, CPU)
        with pytest.raises(CheckFailed):
            attend_by(model, "sdpa_mask")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_where_attention_alone_mixes_tokens_no_module_is_wrapped(family: str) -> None:
    model = tiny_model(family)
    assert not mixing_of(model).mixers and mixing_of(model).attention == "segmented"
    decision = choose_attention("mixers", model, CPU)
    assert decision.kernel == "" and decision.proof is not None and decision.proof.verdict == "exact"


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
@pytest.mark.parametrize(
    ("weights", "autocast"), [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float64, None)]
)
def test_mixers_are_found_in_any_format(family: str, weights: torch.dtype, autocast: torch.dtype | None) -> None:
    model = tiny_model(family, **SMALL, **HYBRIDS[family])
    expected = [mixer.name for mixer in mixing_of(model).mixers]
    again = tiny_model(family, **SMALL, **HYBRIDS[family]).to(weights)
    decision = choose_attention("auto", again, CPU, autocast=autocast, pairs=True)
    assert decision.backend.name == "mixers" and [mixer.name for mixer in mixing_of(again).mixers] == expected
    if weights == torch.float64:
        assert_as_alone(again, row(DEEP), "mixers")


def test_a_mixer_that_is_left_out_is_found_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mamba()
    mixing = mixing_of(model)
    monkeypatch.setitem(mixer_search._found, model, replace(mixing, mixers=mixing.mixers[:1]))
    assert prove_isolation(model, "mixers").verdict == "leaks"
    assert find_leak(model, "mixers") == ("backbone.layers.1.mixer", "MambaMixer")


def test_a_model_that_counts_positions_itself_takes_rows_longer_than_its_table() -> None:
    """roberta counts them from another number than 0."""
    model = tiny_model("roberta", is_decoder=True, vocab_size=951, max_position_embeddings=64, num_hidden_layers=2)
    assert [mixer.name for mixer in mixing_of(model).mixers] == ["roberta.embeddings"]
    assert_as_alone(model, row(Segments((20, 61, 20, 1))), "mixers")


class Remembering(torch.nn.Module):
    """Adds the sum of all tokens before it, by a state that its model resets in each call."""

    state: torch.Tensor | float = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        sums = self.state + hidden.cumsum(1)
        self.state = sums[:, -1:].mean(0, keepdim=True)
        return hidden + sums / 8


def test_a_module_whose_state_outlives_its_call_runs_in_calls_of_the_whole_model() -> None:
    """One batch of documents would begin with the state of another."""
    model: Any = tiny_model("llama", num_hidden_layers=2)
    module = model.model.layers[0].mlp = Remembering().eval()
    model.model.register_forward_pre_hook(lambda *_: setattr(module, "state", 0.0))
    decision = choose_attention("auto", model, CPU)
    assert decision.backend.name == "per_document" and "differ from each alone" in dict(decision.rejected)["mixers"]
    assert_as_alone(model, row(Segments((5, 9, 5, 1))), "per_document")


def test_a_cache_carries_no_state_from_one_batch_of_documents_to_the_next() -> None:
    """Models make one by default."""
    model, batch = mamba(), row(DEEP)
    with attending_by(model, "mixers"):
        assert torch.equal(model(**batch, use_cache=True).logits, model(**batch, use_cache=False).logits)


def test_a_small_leak_of_bfloat16_weights_is_one_too() -> None:
    """Nothing moves a document by rounding: all shapes stay the same."""
    model = mamba()
    for layer in model.backbone.layers:
        layer.mixer.out_proj.weight.data *= 0.02
    model.to(torch.bfloat16)
    proof = prove_isolation(model, "segmented")
    assert 0 < proof.max_difference < proof.tolerance
    assert proof.verdict == "leaks"
    assert choose_attention("auto", model, CPU).backend.name in ("mixers", "per_document")


def test_a_checkpoint_of_the_models_own_does_not_run_the_documents_of_a_row_together() -> None:
    model = tiny_model("lfm2", **SMALL, **HYBRIDS["lfm2"])
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *given, **named: checkpoint(forward, *given, use_reentrant=False, **named)
    with attending_by(model, "mixers"), pytest.raises(CheckFailed, match=r"\[foreign-checkpoint\]"):
        model(**row(Segments((5, 7))), use_cache=False).logits.sum().backward()


def test_a_padded_call_before_a_row_is_computed_again_as_it_was() -> None:
    model = tiny_model("lfm2", **SMALL, **HYBRIDS["lfm2"]).train()
    ids = row(Segments((12,)))["input_ids"].view(2, 6)

    def loss() -> torch.Tensor:
        padded = model(ids, use_cache=False).logits.square().sum()
        return padded + model(**row(Segments((5, 7))), use_cache=False).logits.sum()

    attention_by("mixers").install_when_packed(model)
    loss().backward()
    expected = gradient(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss().backward()
    assert off(gradient(model), expected) < 1e-6


def test_a_copy_of_a_model_refuses_rows_that_it_would_not_keep_apart() -> None:
    model = tiny_model("lfm2", **SMALL, **HYBRIDS["lfm2"])
    with attending_by(model, "mixers"):
        twin = copy.deepcopy(model)
    with pytest.raises(CheckFailed, match=r"\[copy-with-segments\]"):
        twin(**row(Segments((5, 7))))


def test_a_module_that_runs_in_training_mode_alone_does_not_end_the_search() -> None:
    model = tiny_model("lfm2", **SMALL, **HYBRIDS["lfm2"])
    norm = model.model.layers[1].operator_norm
    norm.extra = torch.nn.Conv1d(32, 32, 4)
    forward, padding = norm.forward, torch.nn.functional.pad
    norm.forward = lambda x: forward(x) + (norm.extra(padding(x.mT, (3, 0))).mT if norm.training else 0)
    assert_as_alone(model, row(SHARED), "mixers")


def test_a_layer_that_chooses_its_keys_is_not_flattened() -> None:
    """MiniMax-M3 gives its attention function the blocks of keys, of which short documents have one."""
    query = torch.randn(1, 2, 12, 4)
    attend = AttentionInterface()["packtrain_segmented"]
    with pytest.raises(CheckFailed, match=r"\[layer-chooses-keys\]"):
        attend(torch.nn.Module(), query, query, query, None, segments=Segments((5, 7)), block_indices=torch.zeros(1))


def test_a_label_of_what_is_shared_counts_once() -> None:
    """By every backend, told where the labels are or not: one document's beginning has no loss for each that has it."""
    model, batch = tiny_model("llama"), row(DEEP)
    add_fused_lm_head(model)
    add_loss_sum(model)
    labels = batch["input_ids"].roll(-1).masked_fill(torch.arange(DEEP.tokens) % 3 == 0, IGNORE)
    batch |= {"shift_labels": labels}
    losses = []
    for backend in ("sdpa_mask", "segmented", "per_document"):
        for told in ({}, {"label_places": label_positions(labels)}):
            with attending_by(model, backend):
                losses.append(model(**batch, **told, loss_sum=True).item())
                one_by_one = model(**batch, **told, token_losses=True)[0]
            assert one_by_one.sum().item() == pytest.approx(losses[0], rel=1e-5)
    assert losses == pytest.approx(losses[:1] * 6, rel=1e-5)


def test_what_was_put_in_place_can_be_taken_back() -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 20)[None]
    before = model(ids).logits
    for backend in ("segmented", "sdpa_mask", "per_document"):
        with attending_by(model, backend):
            pass
        assert torch.equal(model(ids).logits, before)
        assert "forward" not in model.__dict__


def test_a_leak_is_named_by_its_innermost_module_and_kind() -> None:
    assert find_leak(mamba(), "segmented") == ("backbone.layers.0.mixer", "MambaMixer")
    assert find_leak(mamba(), "per_document") is None
    with pytest.raises(NotExact, match=r"\[not-exact\]") as caught:
        choose_attention("segmented", mamba(), CPU)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems  # for another process


def test_a_layer_that_forgets_its_segments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is exact in all layers but one, which sees the whole row."""
    model = tiny_model("llama")
    break_borders(monkeypatch, lambda layer, row: whole(row) if layer.layer_idx == 1 else row)
    assert prove_isolation(model, "segmented").verdict == "leaks"
    leak = find_leak(model, "segmented")
    assert leak is not None and leak.module == "model.layers.1.self_attn"
    with pytest.raises(CheckFailed, match=r"model\.layers\.1\.self_attn"):
        choose_attention("segmented", model, CPU)
    assert choose_attention("auto", model, CPU).backend.name == "mixers"


@pytest.mark.parametrize("segments", [DOCUMENTS, TREE], ids=["documents", "tree"])
def test_the_proof_sees_any_segment_that_reaches_any_other(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    model, exact = tiny_model("llama", num_hidden_layers=1), segmented.segmented_attention
    for source, target in itertools.permutations(range(len(segments.lengths)), 2):
        if source in segments.paths[target]:
            continue

        def reaching(*args: Any, source: int = source, target: int = target, **kwargs: Any) -> Any:
            parts = list(exact(*args, **kwargs)[0].split(segments.lengths, dim=1))
            parts[target] = parts[target] + parts[source].mean(dim=1, keepdim=True)
            return torch.cat(parts, dim=1), None

        monkeypatch.setitem(AttentionInterface._global_mapping, segmented.NAME, reaching)
        proof = prove_isolation(model, "segmented", segments=segments)
        assert proof.verdict == "leaks", (source, target)
        assert proof.figures()[f"max_abs_diff_{'after' if source < target else 'before'}"] > proof.tolerance


@pytest.mark.parametrize(("pairs", "calls", "rows"), [(False, 9, 3), (True, 18, 5)])
def test_the_proof_before_step_1_costs_no_more_than_a_few_rows(pairs: bool, calls: int, rows: int) -> None:
    """Of 128 tokens, causality included; whatever the model, since it is always the same rows."""
    model, tokens = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda _, __, call: tokens.append(call["input_ids"].numel()), with_kwargs=True)
    decision = choose_attention("auto", model, CPU, pairs=pairs)
    check_causal_and_padding(model, padding=False)
    assert decision.backend.name == "segmented" and decision.why_not_shared == ("" if pairs else None)
    assert len(tokens) == calls and sum(tokens) <= rows * 128


def test_what_is_exact_for_short_documents_alone_is_not_taken_with_shared_prefixes_either(monkeypatch) -> None:
    """Attention by blocks of 16 tokens of the row: a tree of short documents fits into them."""
    model: Any = tiny_model("llama")
    exact = segmented.segmented_attention

    def blind(*args: Any, segments: Segments, **kwargs: Any) -> Any:
        long = max(map(sum, zip(segments.lengths, segments.prefix_lengths, strict=True))) > 16
        return exact(*args, segments=segments, sliding_window=16 if long else None, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, segmented.NAME, blind)
    assert choose_attention("auto", model, CPU, pairs=True).backend.name == "mixers"


def test_a_backend_that_is_asked_for_is_never_replaced() -> None:
    with pytest.raises(UserError, match=r"model\.attention"):
        choose_attention("flash", tiny_model("llama"), CPU)
    decision = choose_attention("sdpa_mask", tiny_model("llama"), CPU)
    assert (decision.backend.name, decision.why, decision.rejected) == ("sdpa_mask", "asked for", ())


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_chunks_of_a_tree_continue_the_chunk_that_they_begin_in(size: int) -> None:
    positions, visible = DEEP.position_ids()[0], DEEP.visible()
    same_chunk = positions[:, None] // size == positions[None, :] // size
    assert torch.equal(chunks(DEEP, size).visible(), visible & same_chunk)


def test_a_layer_that_brings_a_mask_of_its_own_is_not_flattened() -> None:
    """doge learns its mask from values; with its parameter at 0, as new models have it, short documents show nothing of it."""
    model = tiny_model("doge", num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            torch.nn.init.zeros_(parameter)
    for backend in ("segmented", "sdpa_mask"):
        with pytest.raises(CheckFailed, match="a mask of its own"):
            choose_attention(backend, model, CPU)
    assert choose_attention("auto", model, CPU).backend.name == "mixers"


@pytest.mark.parametrize("backend", ["segmented", "sdpa_mask"])
@pytest.mark.parametrize("lengths", [(110, 9, 5), (5, 110, 101, 9), (20, 9), (110, 105)])
def test_a_long_document_leaves_the_rotary_frequencies_of_the_others_alone(
    lengths: tuple[int, ...], backend: str
) -> None:
    """The proof's documents are shorter than the original context, so it cannot see this."""
    model, batch = longrope_model(), row(Segments(lengths))
    assert_as_alone(model, batch, backend)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_rotary_frequencies_by_length_share_no_prefix_and_no_padded_batch_with_a_long_document() -> None:
    model = longrope_model()
    with attending_by(model, "segmented"), pytest.raises(CheckFailed, match=r"\[rotary-by-length\]"):
        model(**row(SHARED), use_cache=False)
    assert prove_isolation(model, "per_document", segments=TREE).verdict == "exact"
    check_positions(model, 100, padded=True)
    check_positions(model, 101, padded=False)
    with pytest.raises(UserError, match=r"packing\.mode"):
        check_positions(model, 101, padded=True)


def test_a_leak_in_training_mode_alone_is_seen_and_dropout_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of state-space layers, for one, run other code where there are gradients to make."""
    model = tiny_model("llama", attention_dropout=0.3)
    assert prove_isolation(model, "segmented").verdict == "exact"
    break_borders(monkeypatch, lambda layer, row: whole(row) if layer.training else row)
    proof = prove_isolation(model, "segmented")
    assert proof.verdict == "leaks" and proof.alone < proof.tolerance < proof.most_moved()
    decision = choose_attention("auto", model, CPU)
    assert decision.backend.name == "mixers" and "model.layers.0.self_attn" in decision.why
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_router_that_takes_another_expert_by_rounding_is_no_leak_and_hides_none(family: str) -> None:
    model = tiny_model(family, **EXPERTS).bfloat16()
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    usual, turned = [], []

    def turn(module: torch.nn.Module, given: tuple[Any, ...]) -> Any:
        """As rounding does: where the rest of the row is another one, a token in each document gets another expert."""
        hidden, chosen, weights = given
        usual[:] = usual or [hidden.sum()]
        if len(hidden) != DOCUMENTS.tokens or torch.equal(hidden.sum(), usual[0]):
            return None
        chosen = chosen.clone()
        for token in (3, 15, 34):
            chosen[token] = (chosen[token] + 1) % 4
        turned.append(token)
        return hidden, chosen, weights

    usual.append(torch.zeros(()))
    experts[0].register_forward_pre_hook(turn)
    with evaluating(model), attending_by(model, "segmented"):  # the row as it is in the proof
        model.train()
        usual.clear()
        isolation.logits_in_row(model, isolation.random_ids(model, DOCUMENTS)[0], DOCUMENTS)
        turned.clear()
    proof = prove_isolation(model, "segmented")
    assert turned and proof.verdict == "exact", proof

    def mix(_: Any, __: Any, out: Any) -> Any:
        hidden, *rest = out if isinstance(out, tuple) else (out,)
        mixed = hidden + hidden.mean(1, keepdim=True)
        return (mixed, *rest) if rest else mixed

    model.model.layers[1].mlp.register_forward_hook(mix)
    assert prove_isolation(model, "segmented").verdict == "leaks"
