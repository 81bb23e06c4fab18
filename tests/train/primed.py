"""Imports and work of every training process, done once before the others are forked."""

import functools
import gc
import os
from contextlib import suppress
from importlib import import_module

from tests.train.forked import WARM

gc.disable()  # imports are a quarter faster
for name in WARM:
    with suppress(ImportError):
        import_module(name)

import typer.main  # noqa: E402
from transformers import conversion_mapping  # noqa: E402

from packtrain.cli import app  # noqa: E402
from packtrain.config.compose import load_config, to_yaml  # noqa: E402
from packtrain.data.sources.quickstart import tokenizer  # noqa: E402
from packtrain.inspect import rendering  # noqa: E402
from packtrain.plan import model_types  # noqa: E402
from packtrain.report import page  # noqa: E402
from packtrain.run_folder import environment  # noqa: E402

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forks could not use its threads, and would say so
conversion_mapping.get_checkpoint_conversion_mapping("llama")
tokenizer().apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
page.scripts()
page._templates().get_template("page.html.j2")
rendering._templates().get_template("data_section.html.j2")
environment()
model_types._tables()
typer.main.get_command = functools.cache(typer.main.get_command)  # all commands with their options
typer.main.get_command(app)
model = ("model.init=random", "model.config.model_type=llama", "model.tokenizer=quickstart")
to_yaml(load_config(None, [*model, "data.train=quickstart", "batch.examples_per_step=1"]))
gc.freeze()  # imported objects are never garbage
gc.enable()
