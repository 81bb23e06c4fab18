"""What is wrong with the values of a model's config before it is loaded, and what only loading shows: no torch, no hub.

Values come from model.config and from config.json in the model's folder or in the hub's cache. Which keys and layers a model has,
the library says when it is loaded (model/load.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packtrain.config.schema import Model, Peft
from packtrain.errors import Problem, UserError
from packtrain.plan.known_model.shapes import MOST_LAYERS, known_sizes
from packtrain.wording import shortened

_SIZE = re.compile(
    r"vocab_size|(moe_)?intermediate_size|hidden_size|head_dim|num_(hidden_layers|attention_heads|key_value_heads)"
    r"|max_position_embeddings|n_(positions|embd|layer|head|ctx)"
)
_LAYERS = ("num_hidden_layers", "n_layer")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")


def check_model(model: Model) -> None:
    """Raises UserError with the values of model.config that no model can have."""
    if problems := [*_problems(model)]:
        raise UserError(problems)


def left_to_loading(model: Model, peft: Peft) -> str:
    """What of the model a plan cannot know, beside its memory, in words; "" if it knows all that the config asks for."""
    named = peft.kind == "lora" and (peft.target_modules != "all-linear" or peft.modules_to_save)
    unknown = {
        "the keys of model.config": model.config,
        "the names of layers in peft": named,
        "how many positions the model has": positions_of_config(model) is None,
    }
    return ", ".join(what for what, left in unknown.items() if left)


def positions_of_config(model: Model) -> int | None:
    """The most positions that the model is made for; None where its config does not say."""
    sizes = known_sizes(model)
    return next((sizes[name] for name in _POSITIONS if type(sizes.get(name)) is int), None)


def _problems(model: Model) -> Iterator[Problem]:
    for name, value in known_sizes(model).items():
        ours = name in model.config
        where = f"model.config.{name}" if ours else f"{model.path}/config.json: {name}"
        several = value if isinstance(value, list) else [value]  # a list has the width of each layer
        if name in _LAYERS and type(value) is int and value > MOST_LAYERS:
            yield Problem(f"found {shortened(value)}", where, f"Allowed: at most {MOST_LAYERS:,}.")
        elif ours and _SIZE.fullmatch(name) and value is not None:
            if any(type(one) is not int or one < 1 for one in several):
                yield Problem(f"found {shortened(value)}", where, "Allowed: whole number ≥ 1.")
        elif name == "model_type" and not isinstance(value, str):
            yield Problem(f"found {shortened(value)}", where, "Allowed: text, such as llama.")
