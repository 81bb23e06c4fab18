"""Work that every process which trains does alike, done once in the process that the others are forked from."""

import os

from transformers import conversion_mapping

from packtrain.config.compose import load_config, to_yaml
from packtrain.data.sources.quickstart import tokenizer
from packtrain.inspect import rendering
from packtrain.report import page
from packtrain.run_folder import environment

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forks could not use its threads, and would say so
conversion_mapping.get_checkpoint_conversion_mapping("llama")
tokenizer().apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
page._scripts()
page._templates().get_template("page.html.j2")
rendering._templates().get_template("data_section.html.j2")
environment()
model = ("model.init=random", "model.config.model_type=llama", "model.tokenizer=quickstart")
to_yaml(load_config(None, [*model, "data.train=quickstart", "batch.examples_per_step=1"]))
