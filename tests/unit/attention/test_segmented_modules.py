"""Models whose attention is code of their own: flattened rows through their attention modules equal the documents alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.attention.backends import attend_by, attending_by
from packtrain.attention.segmented_modules import uses_attention_interface
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded, shifted_labels
from packtrain.packing.segments import Segments
from packtrain.proof.choice import choose_attention
from packtrain.proof.isolation import prove_isolation

LONGEST = 64  # positions that the models are made for: rows may be longer
LENGTHS = (1, 2, 17, 33, 33, 33, 5, LONGEST)
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "rotary_dim": 8}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LONGEST}
CASES: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "bloom, 3 heads": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 3}),
    "mpt": ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": LONGEST}),
    "falcon, ALiBi": ("falcon", {**_FALCON, "alibi": True, "multi_query": False}),
    "falcon, ALiBi, eager": ("falcon", {**_FALCON, "alibi": True, "attn_implementation": "eager"}),
    "falcon, rotary, multi-query": ("falcon", _FALCON),
    "falcon, eager": ("falcon", {**_FALCON, "attn_implementation": "eager"}),
    "falcon, new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("gptj", _GPT),
    "codegen": ("codegen", {**_GPT, "n_head": 8, "rotary_dim": 4}),
    "gpt_neo, local": (
        "gpt_neo",
        {
            "hidden_size": 64,
            "max_position_embeddings": LONGEST,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "gpt_neox_japanese": ("gpt_neox_japanese", {**_FALCON, "intermediate_multiple_size": 2}),
    "xglm": ("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}),
    "openai-gpt": ("openai-gpt", {key: value for key, value in _GPT.items() if key != "rotary_dim"}),
    "xlm": ("xlm", {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": LONGEST, "causal": True}),
}
CHECKPOINTED = ("bloom", "falcon, ALiBi", "gptj", "gpt_neo, local")


def tiny_model(case: str, **overrides) -> PreTrainedModel:
    kind, sizes = CASES[case]
    return _model(kind, **{**sizes, **overrides})


def _model(kind: str, **sizes) -> PreTrainedModel:
    torch.manual_seed(0)
    special = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**special, **sizes}), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()  # no dropout


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(0, 97, n, dtype=np.int32), rng.random(n) < 0.7) for n in lengths]


def alone(model: PreTrainedModel, item: Document) -> torch.Tensor:
    batch = collate_padded([item], 0)
    del batch["shift_labels"]
    return model(**batch).logits[0]


def logits_of_row(model: PreTrainedModel, items: Sequence[Document]) -> torch.Tensor:
    batch = collate_flat(items)
    del batch["shift_labels"]
    return model(**batch).logits[0]


def loss_and_gradients(
    model: PreTrainedModel, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def blocks_of(model: PreTrainedModel) -> list[Any]:
    """The layers of a bloom."""
    return list(cast(Any, model).transformer.h)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_a_row_gives_the_outputs_loss_and_gradients_of_its_documents_alone(case: str) -> None:
    model, items = tiny_model(case), documents()
    assert not uses_attention_interface(model)
    labels = torch.cat([shifted_labels(item) for item in items])
    expected = torch.cat([alone(model, item) for item in items])
    expected_loss, expected_gradients = loss_and_gradients(model, expected, labels)
    with attending_by(model, "segmented"):
        logits = logits_of_row(model, items)
        loss, gradients = loss_and_gradients(model, logits, labels)
    assert relative(logits, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(gradients, expected_gradients) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_auto_takes_it_by_proof_and_transformers_has_nothing_to_warn_of(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    names = CASES[case][1].keys() & {"max_position_embeddings", "n_positions", "max_seq_len"}
    model = tiny_model(case, **dict.fromkeys(names, 128))  # the proof runs 37 tokens as one document
    decision = choose_attention("auto", model, torch.device("cpu"))
    assert decision.backend.name == "segmented", decision.rejected
    assert "attention implementation" not in caplog.text


@pytest.mark.parametrize("tokens", [4, 16, LONGEST])  # heads, width of a head, width of the model; mpt's longest bias
@pytest.mark.parametrize("case", CASES)
def test_a_row_as_long_as_some_other_size_is_cut_along_its_tokens(case: str, tokens: int) -> None:
    model, items = tiny_model(case), documents((1, tokens // 2 - 1, tokens // 4, tokens // 4))
    with torch.no_grad():
        expected = torch.cat([alone(model, item) for item in items])
        with attending_by(model, "segmented"):
            assert relative(logits_of_row(model, items), expected) < 1e-5


@pytest.mark.parametrize("case", ["bloom", "mpt", "falcon, ALiBi", "falcon, ALiBi, eager"])
def test_alibi_in_16_bits_is_that_of_a_document_alone_however_far_back_in_the_row_it_is(case: str) -> None:
    lengths = (1501, 40, 40)
    model = tiny_model(case, **({"max_seq_len": 2048} if case == "mpt" else {})).bfloat16()
    items = documents(lengths)
    with torch.no_grad(), attending_by(model, "segmented"):
        row = logits_of_row(model, items).float().split(lengths)
    for got, item in zip(row[1:], items[1:], strict=True):
        # biases by position in the row would be off by 0.7 to 3 %
        assert relative(got, alone(model, item).float()) < 1e-3


@pytest.mark.parametrize("case", CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing_even_when_rows_and_padding_are_mixed_before_the_backward(
    case: str,
) -> None:
    # two rows of the same length with other borders, and a padded batch: what is recomputed must find its own
    first, second, padded = documents((20, 30, 10)), documents((5, 5, 50), seed=1), documents((60,), seed=2)
    results = []
    for checkpointing in (False, True):
        model = tiny_model(case)
        attend_by(model, "segmented")
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:  # as a trainer does: after the attention is in place
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = [logits_of_row(model, first), logits_of_row(model, second), alone(model, padded[0])]
        labels = torch.cat([shifted_labels(item) for item in [*first, *second, *padded]])
        results.append(loss_and_gradients(model, torch.cat(outputs), labels))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert relative(results[1][1], results[0][1]) < 1e-6


def test_a_layer_recomputed_by_other_means_fails_instead_of_guessing_its_documents() -> None:
    model = tiny_model("bloom")
    attend_by(model, "segmented")
    block = blocks_of(model)[0]
    inner = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)
    logits = logits_of_row(model, documents())
    with pytest.raises(CheckFailed, match="which documents its tokens belong to is not known"):
        logits.sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_padded_batches_go_through_untouched_and_the_model_can_be_had_back(case: str) -> None:
    model, batch = tiny_model(case), collate_padded(documents((3, 17, 9)), 0)
    del batch["shift_labels"]
    with torch.no_grad():
        before = model(**batch).logits
        undo = attend_by(model, "segmented")
        during = model(**batch).logits
        undo()
    assert torch.equal(before, during)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_segments_of_equal_length_go_through_in_one_call() -> None:
    model = tiny_model("bloom")
    shapes: list[tuple[int, ...]] = []
    attention = blocks_of(model)[0].self_attention
    attention.query_key_value.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    with torch.no_grad(), attending_by(model, "segmented"):
        logits_of_row(model, documents((5, 33, 33, 33, 5)))
    assert shapes == [(2, 5, 64), (3, 33, 64)]


@pytest.mark.parametrize("case", CASES)
def test_what_documents_share_is_seen_by_each_of_them_and_runs_once_outside_of_attention(case: str) -> None:
    segments = Segments((9, 5, 1, 7, 12, 1, 5), (None, 0, 1, 1, None, 0, 4))
    model, ids = tiny_model(case), torch.from_numpy(documents((segments.tokens,))[0].input_ids).long()
    labels = ids.roll(-1)
    paths = [ids[segments.tokens_along([number])][None] for number in range(len(segments.lengths))]
    outputs = [
        model(path, attention_mask=torch.ones_like(path)).logits[0, -n:]
        for path, n in zip(paths, segments.lengths, strict=True)
    ]
    expected = torch.cat(outputs)
    expected_loss, expected_gradients = loss_and_gradients(model, expected, labels)
    row = {"input_ids": ids[None], "segments": segments, "position_ids": segments.position_ids()}
    with attending_by(model, "segmented"):
        logits = model(**row).logits[0]
        loss, gradients = loss_and_gradients(model, logits, labels)
    assert relative(logits, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(gradients, expected_gradients) < 1e-4


class TiltedAttention(torch.nn.Module):
    """Attention with an argument that nobody here has heard of."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, tilt: object = None, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    ("tilt", "what"),
    [(torch.zeros(21, 21), r"shape \[21, 21\]"), (torch.zeros(1, 7, 21, 3), "shape"), ({21}, "a set")],
)
def test_an_argument_of_unknown_role_is_refused(tilt: object, what: str) -> None:
    model = tiny_model("bloom")
    for block in blocks_of(model):
        block.self_attention = TiltedAttention(block.self_attention)
        block.self_attention.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "tilt": tilt}), with_kwargs=True
        )
    with attending_by(model, "segmented"), pytest.raises(CheckFailed, match=f"takes 'tilt', .*{what}"):
        logits_of_row(model, documents((9, 5, 7)))


def test_tokens_that_are_no_part_of_a_batch_row_are_refused() -> None:
    sizes = {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96, "attn_type": "uni"}
    model = _model("xlnet", **sizes)  # [T, 1, width]
    with attending_by(model, "segmented"), pytest.raises(CheckFailed, match="cannot be cut by document"):
        logits_of_row(model, documents((9, 5, 7)))


def test_positions_counted_over_the_row_fail_the_proof_and_auto_goes_on() -> None:
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    model = _model("mvp", **sizes, max_position_embeddings=128)
    assert prove_isolation(model, "segmented").verdict == "leaks"
    assert choose_attention("auto", model, torch.device("cpu")).backend.name == "per_document"


def test_what_cannot_replace_the_attention_says_so() -> None:
    with pytest.raises(CheckFailed, match="code of its own"):
        attend_by(tiny_model("bloom"), "sdpa_mask")
