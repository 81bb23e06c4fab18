"""Pairs in a row say, token by token, what TRL's padded call says; rows of a reward model score as the model's own call does."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from here import train_here
from running import LLAMA, WORDS, write_jsonl
from tiny_dpo import trl_batch
from tiny_models import FAMILIES, SIZES, a_pair, gradient, off, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attend_by
from packtrain.config.compose import load_config
from packtrain.config.schema import Model, Peft
from packtrain.data.dataset import Preference
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.model.forward import add_answer_scores, add_scores, outputs_of_tokens
from packtrain.model.load import load_model
from packtrain.model.weights import weights_hash
from packtrain.packing.collate import RowLayout, collate_pairs, collate_scored
from packtrain.proof.choice import choose_attention

OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
PAIRED = ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"]
BACKENDS: dict[RowLayout, tuple[str | None, ...]] = {
    "padding": (None,),
    "flat": ("segmented", "per_document"),
    "shared": ("segmented", "sdpa_mask", "per_document"),
}


def odd_pairs() -> list[Preference]:
    """A prompt of one token (nothing to share) and of two, a long one, answers of one token and of equal lengths."""
    rng = np.random.default_rng(0)
    shapes = [(10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (1, 1, 1), (4, 1, 1)]
    return [a_pair(rng, *shape) for shape in shapes]


def said(family: str, layout: RowLayout | None, backend: str | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Figures of the targets of the odd pairs, and the gradient of a weighted sum of log-probabilities.

    Without a layout by TRL's own padded call, which knows nothing of ours.
    """
    model = tiny_model(family)
    add_fused_lm_head(model, outputs=OUTPUTS)
    if layout is None:
        batch = trl_batch(odd_pairs())
        mask = batch.pop("completion_mask")
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        figures = model(**batch, labels=labels, fused_lm_head=True, use_cache=False)
        found = {name: figures[name][mask[:, 1:].bool()] for name in OUTPUTS}
    else:
        add_answer_scores(model, OUTPUTS)
        if backend:
            attend_by(model, backend)
        batch = collate_pairs(odd_pairs(), 0, layout)
        places, counts = batch.pop("target_places"), batch.pop("target_counts")
        assert counts.sum() == len(places)
        figures = model(**batch, answer_scores=True)
        found = {name: figures[name].flatten()[places] for name in OUTPUTS}
    log_probs = found["log_probs"]
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return found, gradient(model)


@lru_cache
def padded(family: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return said(family, None, None)


@pytest.mark.parametrize(("layout", "backend"), [(one, by) for one, backends in BACKENDS.items() for by in backends])
@pytest.mark.parametrize("family", PAIRED)
def test_a_row_of_pairs_equals_the_padded_call_of_trl(family: str, layout: RowLayout, backend: str | None) -> None:
    expected, theirs = padded(family)
    found, ours = said(family, layout, backend)
    for name in OUTPUTS:
        assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape, name
        assert (found[name].float() - expected[name].float()).abs().max() <= 1e-5, name
    assert off(ours, theirs) < 1e-4


@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_a_filler_trains_nothing_and_reaches_every_parameter(layout: RowLayout) -> None:
    model = tiny_model("llama")
    add_fused_lm_head(model, outputs=OUTPUTS)
    add_answer_scores(model, OUTPUTS)
    attend_by(model, "segmented")
    batch = collate_pairs([], 0, layout)
    assert not len(batch.pop("target_places")) and batch.pop("target_counts").tolist() == [0, 0]
    model(**batch, answer_scores=True).log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


TOKENIZER = load_tokenizer(Model(tokenizer="quickstart"))
MODELS: dict[str, dict[str, Any]] = {
    **{name: FAMILIES[name] for name in ("llama", "mistral", "gemma2", "gpt2")},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 96},
    "gpt_neox": {},
    "bloom": {},  # attention code of its own
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
}
HYBRIDS = ("jamba", "bloom")
PAD, EOS = 0, 2


def tiny_scorer(family: str, **given: Any) -> PreTrainedModel:
    """Of `family`, with weights large enough that what a token sees shows in its score."""
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 256, "pad_token_id": PAD, "num_labels": 1}
    model = AutoModelForSequenceClassification.from_config(
        CONFIG_MAPPING[family](**{**sizes, **MODELS[family], **given})
    )
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def pairs_ending_in(*ends: int) -> list[Any]:
    """Four pairs, one of which has no common prompt, each document with these tokens at its end."""
    rng = np.random.default_rng(3)
    pairs = [a_pair(rng, *shape) for shape in ((10, 5, 9), (1, 4, 4), (21, 1, 2), (2, 7, 7))]
    for pair in pairs:
        for document in (pair.chosen, pair.rejected):
            document.input_ids[document.input_ids == PAD] = 3
            document.input_ids[len(document.input_ids) - len(ends) :] = ends
    return pairs


def scored(
    model: PreTrainedModel, rows: RowLayout, pairs: list[Any], pad: int, **left_out: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [2 × pairs], and the gradient of a sum that weighs them differently."""
    batch = collate_scored(pairs, [0.0] * len(pairs), pad, rows)
    for name in left_out:
        del batch[name]
    ends = batch.pop("ends", None)
    if ends is None:
        scores = model(**batch, use_cache=False).logits[:, 0]
    else:
        del batch["margin"]
        scores = model(**batch, every_token=True).logits[0, ends, 0]
    (scores * torch.linspace(-1, 2, len(scores))).sum().backward()
    gradient = torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()]
    )
    model.zero_grad()
    return scores.detach(), gradient


@pytest.mark.parametrize("family", MODELS)
def test_rows_score_as_padded_batches(family: str) -> None:
    model, pairs = tiny_scorer(family), pairs_ending_in()
    with outputs_of_tokens(model):
        choice = choose_attention("auto", model, model.device, pairs=True)
    assert choice.proof is not None and choice.proof.verdict == "exact"
    assert choice.backend.name == ("mixers" if family in HYBRIDS else "segmented") and choice.why_not_shared == ""
    expected, gradient = scored(model, "padding", pairs, PAD, margin=None)
    add_scores(model)
    attend_by(model, choice.backend.name)
    layouts: tuple[RowLayout, ...] = ("flat", "shared")
    for layout in layouts:
        scores, own = scored(model, layout, pairs, PAD)
        assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        assert (own - gradient).norm() <= 1e-4 * gradient.norm()


@pytest.mark.parametrize("ends", [(EOS,), (EOS, EOS), (EOS,) * 13], ids=["one", "two", "into the shared prompt"])
def test_where_eos_pads_too_the_last_token_before_it_is_scored_as_by_the_model_itself(ends: tuple[int, ...]) -> None:
    model = tiny_scorer("llama", pad_token_id=EOS)
    pairs = pairs_ending_in(*ends[:1]) if len(ends) < 13 else [pairs_ending_in()[0]]
    if len(ends) == 13:
        for document in (pairs[0].chosen, pairs[0].rejected):
            document.input_ids[8:] = EOS
    expected, gradient = scored(model, "padding", pairs, EOS, margin=None)
    add_scores(model)
    attend_by(model, "segmented")
    layouts: tuple[RowLayout, ...] = ("flat", "shared")
    for layout in layouts:
        scores, own = scored(model, layout, pairs, EOS)
        assert torch.allclose(scores, expected, atol=1e-6)
        assert (own - gradient).norm() <= 1e-4 * gradient.norm()


def saved(folder: Path, kind: Any, model_type: str = "llama", **given: Any) -> str:
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    vocabulary = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}
    torch.manual_seed(1)
    kind.from_config(CONFIG_MAPPING[model_type](**sizes, **vocabulary, **given)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def test_a_language_model_gets_a_head_by_the_seed_and_a_reward_model_keeps_its_own(tmp_path: Path) -> None:
    def loaded(path: str, seed: int, **peft: Any) -> Any:
        return load_model(Model(path=path), Peft(**peft), TOKENIZER, seed=seed, scores=True)

    language = saved(tmp_path / "language", AutoModelForCausalLM)
    one, again, other = (loaded(language, seed) for seed in (0, 0, 1))
    assert weights_hash(one) == weights_hash(again) != weights_hash(other)
    assert 0.01 < one.score.weight.std() < 0.03 and torch.equal(one.model.norm.weight, other.model.norm.weight)
    assert torch.equal(loaded(language, 0, kind="lora").base_model.model.score.weight, one.score.weight)
    one.save_pretrained(tmp_path / "scorer")
    assert weights_hash(loaded(str(tmp_path / "scorer"), 1)) == weights_hash(one)


@pytest.mark.parametrize(
    ("model_type", "given", "said"),
    [
        ("llama", {"num_labels": 3}, "3 scores .*several-scores"),
        ("bert", {"num_labels": 1}, "BertForSequenceClassification"),
        ("t5", {"num_labels": 1}, "T5ForSequenceClassification"),
        ("ctrl", {"num_labels": 1}, "CTRLForSequenceClassification"),
    ],
)
def test_other_classifiers_are_refused(tmp_path: Path, model_type: str, given: dict[str, Any], said: str) -> None:
    small = {"t5": {"d_model": 32, "d_kv": 8, "d_ff": 32}, "ctrl": {"n_embd": 32, "dff": 32, "n_head": 2, "n_layer": 2}}
    path = saved(tmp_path, AutoModelForSequenceClassification, model_type, **small.get(model_type, {}), **given)
    with pytest.raises(UserError, match=said):
        load_model(Model(path=path), Peft(), TOKENIZER, seed=0, scores=True)


def test_what_is_no_reward_training_is_refused(tmp_path: Path) -> None:
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": WORDS[0]}]}])
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    model = saved(tmp_path / "model", AutoModelForSequenceClassification, num_labels=2)
    new = ["model.init=random", "model.tokenizer=quickstart", "model.config.model_type=llama"]
    given = ["objective.kind=reward", f"data.cache_dir={tmp_path}", "batch.examples_per_step=1"]
    for overrides, said in {
        (f"data.train={chats}", *new): "chats.jsonl",
        (f"data.train={pairs}", f"model.path={model}"): "2 scores",
        (f"data.train={pairs}", *new, "trainer.samples=[hi]"): "trainer.samples",
        (f"data.train={pairs}", *new, "objective.beta=1"): "objective.beta",
        (f"data.train={pairs}", *new[:2], "model.config.model_type=cohere"): "CohereConfig",  # has no classifier
    }.items():
        with pytest.raises(UserError) as refused:
            train_here(load_config(None, [*given, *overrides]), tmp_path / "run")
        assert said in str(refused.value)
