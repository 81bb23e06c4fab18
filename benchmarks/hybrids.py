"""Hybrid models packed: mixers beside the whole model per document, and padding.

    python benchmarks/hybrids.py FAMILY [--documents 20-60] [--tokens 2048] [--repeat 3] [--padding 0.1] [--device cuda]

FAMILY is a key of SIZES: random weights of about 100 million parameters, in float32 on one thread, or in bfloat16 on a GPU. The documents of one micro-batch, forward and
backward: as one row by model.attention=mixers (with each share of `--padding` that a call of a mixer may have) and per_document, padded
in batches of 8 by packtrain, and by the batches and the loss of TRL's SFTTrainer. They take turns; the first round is a short one, to warm up.

Real tokens a second: the median, the least and the most. On a CPU the seconds are CPU time of the process, so that other processes on the
machine take little from it. The loss shows that all do the same work.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attending_by
from packtrain.attention.mixers import install
from packtrain.changes.experts import group_experts
from packtrain.data.dataset import Document
from packtrain.model.forward import add_loss_sum, choose_head
from packtrain.model.layers import can_group
from packtrain.packing.collate import collate_flat, collate_padded, on_device
from packtrain.proof.mixer_search import mixing_of

VOCABULARY, BATCH = 32_000, 8
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
_LINEAR = {"linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 64}
_LINEAR |= {"linear_value_head_dim": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
_MAMBA = {
    "mamba_n_heads": 20,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_chunk_size": 64,
    "layer_types": (["mamba"] * 3 + ["attention"]) * 3,
}
_CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 4}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _HEADS | _LINEAR | {"hidden_size": 640, "num_hidden_layers": 12, "intermediate_size": 2304},
    "qwen3_next": _HEADS
    | _LINEAR
    | _EXPERTS
    | {"hidden_size": 512, "num_hidden_layers": 8, "shared_expert_intermediate_size": 512},
    "granitemoehybrid": _MAMBA
    | {"hidden_size": 640, "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 2}
    | {"num_local_experts": 0, "shared_intermediate_size": 2304},
    "lfm2": _CONVOLUTIONS
    | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    | {"intermediate_size": 2304, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVOLUTIONS
    | {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 2}
    | {"intermediate_size": 1536, "moe_intermediate_size": 512},
}


def build(family: str) -> PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "pad_token_id": 0, **SIZES[family]}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes)).float().train()


def documents(shortest: int, longest: int, tokens: int) -> list[Document]:
    """Documents of `shortest` to `longest` tokens, drawn evenly, until they have `tokens`."""
    rng, drawn = np.random.default_rng(0), list[Document]()
    while sum(len(document.input_ids) for document in drawn) < tokens:
        ids = rng.integers(3, VOCABULARY, rng.integers(shortest, longest + 1), dtype=np.int32)
        drawn.append(Document(ids, np.ones(len(ids), bool)))
    return drawn


def trl_loss(model: PreTrainedModel) -> Callable[[Sequence[Document]], torch.Tensor]:
    """The summed loss of a padded batch, by TRL's SFTTrainer and its collator."""
    import datasets
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=BATCH,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            activation_checkpointing=False,
            use_cpu=model.device.type == "cpu",
            bf16=False,
            router_aux_loss_coef=0.0,  # packtrain has no loss of routers either unless it is asked for
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list([{"input_ids": [3, 4], "labels": [3, 4]}]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )

    def loss(batch: Sequence[Document]) -> torch.Tensor:
        rows = [{"input_ids": ids, "labels": ids} for ids in (document.input_ids.tolist() for document in batch)]
        batch = on_device(trainer.data_collator(rows), model.device)
        return trainer.compute_loss(trainer.model, batch, num_items_in_batch=1)

    return loss


def contestants(model: PreTrainedModel, paddings: Sequence[float]) -> dict[str, Callable[[list[Document]], float]]:
    """Each runs both passes on documents and returns their summed loss."""
    theirs = copy.deepcopy(model)
    by_trl = trl_loss(theirs)
    if can_group(model):
        group_experts(model)
    add_fused_lm_head(model)
    head = add_loss_sum(model)
    choose_head(model, head, on_device(collate_padded(documents(20, 60, 100), 0), model.device))
    mixing = mixing_of(model)
    print(f"once per document: {mixing.words()}; attention by {mixing.attention or 'the model itself'}", flush=True)

    def both_passes(losses: Sequence[Callable[[], Any]]) -> float:
        total = 0.0
        for lose in losses:
            loss = lose()
            loss.backward()
            total += loss.item()
        for used in (model, theirs):
            used.zero_grad()
        return total

    def packed(items: list[Document]) -> float:
        return both_passes([lambda: model(**on_device(collate_flat(items), model.device), loss_sum=True)])

    def by_mixers(items: list[Document], padding: float) -> float:
        undo = install(model, mixing, padding=padding)
        try:
            return packed(items)
        finally:
            undo()

    def per_document(items: list[Document]) -> float:
        with attending_by(model, "per_document"):
            return packed(items)

    def padded(items: list[Document]) -> float:
        return both_passes(
            [
                lambda at=at: model(**on_device(collate_padded(items[at : at + BATCH], 0), model.device), loss_sum=True)
                for at in range(0, len(items), BATCH)
            ]
        )

    def by_trainer(items: list[Document]) -> float:
        return both_passes([lambda at=at: by_trl(items[at : at + BATCH]) for at in range(0, len(items), BATCH)])

    ways = {f"mixers, padding {share:g}": lambda items, share=share: by_mixers(items, share) for share in paddings}
    return ways | {"per_document": per_document, "padding": padded, "TRL's padding": by_trainer}


def seconds(model: PreTrainedModel) -> float:
    """Seconds so far: CPU time, or wall time on a GPU."""
    if model.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=SIZES)
    parser.add_argument("--documents", default="20-60", help="tokens of the shortest and the longest")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--padding", default="0.1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = build(asked.family)
    if asked.device == "cuda":
        model = model.to("cuda", torch.bfloat16)
    items = documents(*map(int, asked.documents.split("-")), asked.tokens)
    tokens = sum(len(document.input_ids) for document in items)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{asked.family}: {weights / 1e6:.0f} M parameters; {len(items)} documents, {tokens} tokens", flush=True)
    ways = contestants(model, [float(share) for share in asked.padding.split(",")])
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {}
    for turn in range(asked.repeat + 1):
        for name, both_passes in ways.items():
            started = seconds(model)
            losses[name] = both_passes(items if turn else items[:2])
            if turn:
                speeds[name].append(tokens / (seconds(model) - started))
    print(f"{'':<24}{'tokens/s':>10}{'least':>8}{'most':>8}{'loss':>14}")
    for name, measured in speeds.items():
        median = statistics.median(measured)
        print(f"{name:<24}{median:>10.0f}{min(measured):>8.0f}{max(measured):>8.0f}{losses[name] / tokens:>14.6f}")


if __name__ == "__main__":
    main()
