"""What a run leaves for use: final/, which from_pretrained loads wherever it is copied to.

Adapters alone are of use where their base model can be named: a hub id or a folder. A .gguf file, or weights that were new
at the start, cannot be, so final/ then holds the merged model and final-adapters/ the adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.config.rules.strategies import SHARDED_WEIGHTS
from packtrain.config.schema import RunConfig
from packtrain.model.load import load_model
from packtrain.model.spread import loading_whole
from packtrain.plan.reference import base_of
from packtrain.run_folder import RunFolder
from packtrain.train.checkpoint import tidy
from packtrain.train.whole_steps import WholeSteps


def save_final(
    config: RunConfig,
    folder: RunFolder,
    trainer: WholeSteps,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Writes final/ and what belongs beside it; called by all processes. Returns a line for each folder: what it holds."""
    saved = {folder.final: "the trained model"}
    merged: list[Path] = []
    adapters = folder.final
    if config.peft.kind == "lora":
        saved = {folder.final: f"the adapters of {base_of(config.model.path) or config.model.path}"}
        if _base_has_no_name(config):
            adapters = folder.final.with_name("final-adapters")
            base = "a .gguf file" if config.model.init == "pretrained" else "new weights"
            saved = {
                folder.final: f"the merged model: adapters do not load by themselves on {base}",
                adapters: "the adapters",
            }
            merged.append(folder.final)
        if config.peft.merge:
            merged.append(folder.final.with_name("final-merged"))
            saved[merged[-1]] = "the merged model"
    trainer.save_model(str(adapters))
    if not trainer.accelerator.is_main_process:
        return []
    if merged:
        whole = _loaded_again(config, tokenizer, adapters) if config.strategy.name in SHARDED_WEIGHTS else model
        whole = cast(Any, whole).merge_and_unload()
        for place in merged:
            whole.save_pretrained(place)
            tokenizer.save_pretrained(place)
    for place in saved:
        tidy(place)
    return [f"{place.name}/ holds {what}" for place, what in saved.items()]


def _loaded_again(config: RunConfig, tokenizer: PreTrainedTokenizerBase, adapters: Path) -> PreTrainedModel:
    """The model with the trained adapters, whole on the CPU: the trainer's has only this process's share of its weights."""
    with loading_whole():
        model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
    set_peft_model_state_dict(cast(Any, model), load_file(adapters / "adapter_model.safetensors"))
    return model


def _base_has_no_name(config: RunConfig) -> bool:
    return config.model.init == "random" or str(config.model.path).endswith(".gguf")
