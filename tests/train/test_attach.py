"""`attach`: a padded call says, token by token, what it says without, and with the same gradients; packed rows; the page's examples."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_models import EXPERTS, FAMILIES, gradient, longrope_model, off, tiny_model
from trl.trainer.utils import add_fused_lm_head

from packtrain import PackedCollator, Segments, attach
from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed, UserError
from packtrain.library.attach import Attached

HYBRIDS = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, **EXPERTS},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 16, "n_groups": 2},
    "bloom": {},
}
SETTINGS = {"gpt2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "opt": {"dropout": 0.0}, **HYBRIDS}
LENGTHS = (40, 7, 20, 1, 33, 40)


def padded(side: str) -> dict[str, torch.Tensor]:
    """Documents of 1 to 40 tokens, padded on a side or on both; three begin with the same tokens."""
    ids = torch.randint(3, 97, (6, 40), generator=torch.Generator().manual_seed(0))
    ids[4, :22], ids[5, :30] = ids[0, :22], ids[0, :30]
    before = [{"left": 40 - length, "right": 0, "both": (40 - length) // 2}[side] for length in LENGTHS]
    batch = torch.zeros(2, 6, 40, dtype=torch.int64)
    for row, (start, length) in enumerate(zip(before, LENGTHS, strict=True)):
        batch[0, row, start : start + length] = ids[row, :length]
        batch[1, row, start : start + length] = 1
    return {"input_ids": batch[0], "attention_mask": batch[1]}


def labels_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All tokens but the first of each document."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[torch.arange(6), batch["attention_mask"].argmax(1)] = -100
    return labels


def said(family: str, side: str, *, attached: bool, **given: Any) -> tuple[list[torch.Tensor], Attached | None]:
    """Log-probabilities by TRL's call, logits and hidden states by a plain one, and the gradient through them all."""
    model = tiny_model(family, **SETTINGS.get(family, {})).train()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    handle = attach(model, **given) if attached else None
    model.activation_checkpointing_enable()
    batch = padded(side)
    real = batch["attention_mask"][..., None]
    fused = model(**batch, labels=labels_of(batch), fused_lm_head=True, use_cache=False)
    plain = model(**batch, use_cache=False, output_hidden_states=True, logits_to_keep=12)
    weights = torch.linspace(-1, 1, fused.log_probs.numel()).view_as(fused.log_probs)
    logits, first = plain.logits * real[:, -12:], plain.hidden_states[1] * real
    ((fused.log_probs * weights).sum() + logits.square().sum() * 1e-4 + first.sum()).backward()
    return [fused.loss, fused.log_probs, fused.entropy, fused.label_mask, logits, first, gradient(model)], handle


@pytest.mark.parametrize(
    ("family", "side"),
    [("llama", side) for side in ("left", "right", "both")]
    + [(family, "left") for family in [*FAMILIES, "opt", *HYBRIDS] if family != "llama"]
    + [pytest.param(one, side, marks=pytest.mark.exhaustive) for one in FAMILIES for side in ("right", "both")],
)
def test_a_padded_call_is_the_same_packed(family: str, side: str) -> None:
    expected, _ = said(family, side, attached=False)
    found, handle = said(family, side, attached=True)
    for theirs, ours in zip(expected[:-1], found[:-1], strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert (ours.float() - theirs.float()).abs().max() <= 1e-5 * max(1.0, theirs.float().abs().max())
    assert off(found[-1], expected[-1]) < 1e-4 and handle is not None
    if family == "gpt2" and side != "right":  # whose positions count the padding
        assert handle.stats.calls == 0 and handle.stats.unchanged.total() == 2
        return
    assert not handle.stats.unchanged
    assert handle.stats.calls == 2 and handle.stats.padded_slots == 480 and handle.stats.real_tokens == 282
    assert 0 < handle.stats.row_slots < 282 and handle.stats.shared_tokens == 282 - handle.stats.row_slots
    for given in ({"tokens_per_row": 64}, {"share_prefix": False}) if (family, side) == ("llama", "left") else ():
        found, handle = said(family, side, attached=True, **given)
        assert off(found[-1], expected[-1]) < 1e-4
        assert handle is not None and (handle.stats.shared_tokens == 0) == ("share_prefix" in given)


def test_what_is_no_padded_call_runs_as_it_came_and_detach_restores_bit_for_bit() -> None:
    model = tiny_model("llama")
    batch, ids = padded("left"), padded("right")["input_ids"][:2]
    before = model(**batch, use_cache=False).logits
    generated = model.generate(**batch, max_new_tokens=5, do_sample=False)
    own = [model.forward, model.model.forward, model.config._attn_implementation]
    handle = attach(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), generated)
    assert handle.stats.calls == 0 and list(handle.stats.unchanged) == ["generation with a cache"]
    holes = batch["attention_mask"].clone()
    holes[0, 20] = 0
    for reason, call in {
        "no attention mask of the shape of input_ids": {"input_ids": ids},
        "no batch of input_ids": {"inputs_embeds": torch.zeros(1, 4, 64), "attention_mask": torch.ones(1, 4)},
        "an attention mask with holes": {"input_ids": batch["input_ids"], "attention_mask": holes},
        "nothing padded and nothing shared": {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])},
        "position_ids of their own": {**batch, "position_ids": torch.arange(40)[None] * 2},
    }.items():
        model(**call, use_cache=False)
        assert handle.stats.unchanged[reason] == 1, reason
    assert handle.stats.calls == 0
    model(**batch, use_cache=False)
    assert handle.stats.calls == 1
    handle.detach()
    assert [model.forward, model.model.forward, model.config._attn_implementation] == own
    assert torch.equal(model(**batch, use_cache=False).logits, before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_label_that_padding_would_have_to_predict_leaves_the_call_alone(fused: bool) -> None:
    model = tiny_model("llama")
    add_fused_lm_head(model)
    batch = padded("left")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    before = model(**batch, labels=labels, fused_lm_head=fused).loss
    handle = attach(model)
    assert model(**batch, labels=labels, fused_lm_head=fused).loss == before
    assert handle.stats.unchanged == {"a label after padding": 1}
    model(**batch, labels=labels[:, -8:], logits_to_keep=8)
    assert handle.stats.unchanged["labels of another shape"] == 1 and handle.stats.calls == 0


def test_the_loss_of_the_model_itself_over_the_items_of_a_step_is_the_same_packed() -> None:
    model, batch = tiny_model("llama"), padded("right")
    batch["attention_mask"] = batch["attention_mask"].bfloat16()
    given = {"labels": labels_of(padded("right")), "num_items_in_batch": torch.tensor(200)}  # as Trainer calls
    before = model(**batch, **given).loss
    handle = attach(model)
    assert model(**batch, **given).loss.item() == pytest.approx(before.item(), rel=1e-5)
    assert handle.stats.calls == 1 and not handle.stats.unchanged


def test_a_deep_copy_has_its_own_weights_and_is_not_attached() -> None:
    model, batch = tiny_model("llama"), padded("right")
    handle = attach(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
        before = copied(**batch, use_cache=False).logits
        model.model.embed_tokens.weight.zero_()
    assert torch.equal(copied(**batch, use_cache=False).logits, before) and handle.stats.calls == 0
    again = attach(copied)
    copied(**batch, use_cache=False)
    assert again.stats.calls == 1 and handle.stats.calls == 0


def test_auto_shares_no_noise_of_dropout() -> None:
    model = tiny_model("llama", attention_dropout=0.1)
    handle = attach(model)
    model.train()(**padded("right"), use_cache=False)
    assert handle.stats.calls == 1 and handle.stats.shared_tokens == 0
    model.eval()(**padded("right"), use_cache=False)
    assert handle.stats.shared_tokens > 0


def test_the_balance_of_experts_is_that_of_the_padded_batch() -> None:
    results = []
    for attached in (False, True):
        model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1, **EXPERTS)
        add_fused_lm_head(model)
        handle, batch = attach(model) if attached else None, padded("left")
        fused = model(**batch, labels=labels_of(batch), fused_lm_head=True)
        plain = model(**batch, labels=labels_of(batch), use_cache=False)
        (fused.loss + plain.loss).backward()
        results.append(([fused.loss.item(), fused.aux_loss.item(), plain.loss.item()], gradient(model)))
    (losses, expected), (ours, found) = results
    assert ours == pytest.approx(losses, rel=1e-5) and handle is not None and handle.stats.calls == 2
    assert off(found, expected) < 1e-4


def test_what_cannot_be_attached_is_said() -> None:
    with pytest.raises(UserError, match=r"Linear.*\[not-attachable\]"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"\[attach-arguments\]"):
        attach(tiny_model("llama"), tokens_per_row=0)
    model = tiny_model("llama")
    handle = attach(model)
    for again in (model, model.model):
        with pytest.raises(UserError, match=r"\[attached-already\]"):
            attach(again)
    handle.detach()
    attach(model, proof=False)
    handle.detach()  # once more, of what is attached by another handle
    with pytest.raises(UserError, match=r"\[attached-already\]"):
        attach(model)
    with pytest.raises(CheckFailed, match=r"\[prefixes-not-shared\]"):
        attach(longrope_model(), share_prefix=True)


PAGE = Path(__file__).resolve().parents[2] / "docs/library.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny new models for those of the hub."""
    tokenizer = load_tokenizer(Model(tokenizer="quickstart"))
    made = tiny_model("llama", vocab_size=len(tokenizer))  # type: ignore[arg-type]
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    of_hub = {"Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"}
    monkeypatch.chdir(tmp_path)
    prompts = Dataset.from_dict({"prompt": ["What is a young cow called? " * 4] * 8})
    names: dict[str, Any] = {"documents": tokens(30, 12, 7, 25), "prompts": prompts}
    text = "\n".join(BLOCKS)
    assert len(BLOCKS) == 4 and all(name in text for name in of_hub)
    for name in of_hub:
        text = text.replace(name, str(tmp_path / "model"))
    text = text.replace('output_dir="grpo",', 'output_dir="grpo", max_completion_length=8, use_cpu=True,')
    text = text.replace('TrainingArguments("run",', 'TrainingArguments("run", use_cpu=True, max_steps=1,')
    exec(compile(text, str(PAGE), "exec"), names)
    assert names["handle"].stats.calls > 0 and names["logits"].shape[:2] == (1, 14)


def tokens(*lengths: int) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 97, (length,), generator=drawn).tolist()} for length in lengths]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "bloom", "mamba"])
def test_a_packed_row_of_an_attached_model_trains_what_its_documents_alone_do(family: str) -> None:
    model = tiny_model(family)
    data = tokens(9, 1, 21, 14)
    row, alone = PackedCollator()(data), [PackedCollator(return_segments=False)([one]) for one in data]
    trained = [int((one["labels"][:, 1:] != -100).sum()) for one in alone]
    expected = sum(model(**one).loss * count for one, count in zip(alone, trained, strict=True) if count) / sum(trained)
    expected.backward()
    gradients = gradient(model)
    model.zero_grad()
    handle = attach(model)
    loss = model(**row).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and off(gradient(model), gradients) <= 1e-4
    assert not handle.stats.unchanged


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba", "rwkv"])
def test_a_row_counts_its_own_positions_and_is_refused_with_other_tokens(family: str) -> None:
    model = tiny_model(family)
    attach(model)
    row = Segments((9, 14))
    ids = torch.randint(3, 97, (1, 23), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([model(one).logits for one in ids.split((9, 14), dim=1)], dim=1)
    found = model(input_ids=ids, segments=row).logits
    assert (found - alone).abs().max() <= 1e-5 * alone.abs().max()
    for wrong in (ids[:, :20], ids.repeat(2, 1)):
        with pytest.raises(UserError, match=r"\[1, 23\].*\[segments-of-another-row\]"):
            model(input_ids=wrong, segments=row)
