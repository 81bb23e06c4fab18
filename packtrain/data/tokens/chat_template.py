"""Chooses the chat template, and finds its marked twin if there is one.

TRL ships the templates of many model families (`trl/chat_templates/NAME.jinja`) and, beside most, NAME_training.jinja:
the same template with `{% generation %}` marks around the model's turns. They are read as files, without importing
TRL. A template that equals one of TRL's gets the twin as `marked`; loss_mask.py uses it only for conversations that both
render alike, for some twins change the text.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.config.rules.paths_and_packages import as_name, template_files, template_names
from packtrain.data.sources.files import check_regular
from packtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The generation mark covers an answer and its end token, and not the header in front of it."""
OWN = "the tokenizer's own"
ADVICE = "Set data.chat_template to a .jinja file or a name (chatml, llama3, qwen3 …)."


@dataclass(frozen=True, slots=True)
class Template:
    """A template's text, and that of its marked twin (None where there is none, or the text has marks itself)."""

    text: str
    marked: str | None
    tools_text: str | None = None
    name: str = field(default="the chat template", compare=False)

    @property
    def words(self) -> frozenset[str]:
        """All quoted words of the texts: the roles they name, and harmless others."""
        return frozenset(re.findall(r"""['"](\w+)['"]""", self.text + (self.tools_text or "")))

    @property
    def has_marks(self) -> bool:
        """Whether the template itself marks the model's turns."""
        return has_marks(self.text)

    def for_tools(self) -> Template:
        """The variant for conversations with tools (tokenizers with several named templates have one)."""
        return Template(self.tools_text, _find_twin(self.tools_text), name=self.name) if self.tools_text else self

    @property
    def content(self) -> str:
        """Hash of the texts."""
        return hashlib.blake2b(repr((self.text, self.marked, self.tools_text)).encode(), digest_size=16).hexdigest()


@lru_cache
def has_marks(text: str) -> bool:
    """Whether the text of a template has generation marks."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def choose_template(name: str | None, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """The template that `name` (a .jinja file, or one of `template_names()`) stands for; the tokenizer's own if None.

    None when the tokenizer has none either: only conversations need one. Raises UserError for an unknown name, and a file
    that cannot be read or is no template.
    """
    if name is None:
        own = getattr(tokenizer, "chat_template", None)
        texts = own if isinstance(own, dict) else {"default": own} if own is not None else {}
        if odd := [text for text in texts.values() if not isinstance(text, str)]:
            what = f"the chat template of the tokenizer is no text: {odd[0]!r}"
            raise UserError(what, where="model.tokenizer", fix=f"Mend its tokenizer_config.json. {ADVICE}")
        text = texts.get("default") or next(iter(texts.values()), None)
        return _make_template(text, OWN, texts.get("tool_use")) if text else None
    path = Path(os.path.expanduser(name))
    if path.suffix in (".jinja", ".j2") or os.path.isfile(path):
        check_regular(path, "data.chat_template")
        try:
            return _make_template(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            what = f"cannot read the chat template: {error}"
            raise UserError(what, where="data.chat_template", fix=ADVICE) from error
    if (key := as_name(name)) not in template_names():
        raise UserError(f"no chat template is called {name!r}", where="data.chat_template", fix=ADVICE)
    return _make_template(CHATML if key == "chatml" else _read_shipped(key), key)


def give_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make the template that `name` stands for the tokenizer's own, so that the trained model is asked as it was trained.

    Its generation marks become `{% if true %}`: programs other than transformers do not know them.
    """
    template = choose_template(name, tokenizer)
    if template is not None:
        unmarked = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", template.text)
        tokenizer.chat_template = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", unmarked)


def _make_template(text: str, name: str, tools_text: str | None = None) -> Template:
    """The template with its twin; raises UserError for text that jinja2 cannot parse."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    for source in filter(None, (text, tools_text)):
        try:
            render_jinja_template([[{"role": "user", "content": ""}]], chat_template=source)
        except TemplateSyntaxError as error:
            place = f"{name}, line {error.lineno} of the chat template"
            raise UserError(f"broken chat template: {error.message}", where=place, fix=ADVICE) from error
        except Exception:
            continue  # templates raise errors of every kind for messages they do not take; real ones may be fine
    return Template(text, _find_twin(text), tools_text, name)


def _read_shipped(name: str) -> str:
    return template_files()[name].read_text(encoding="utf-8")


def _find_twin(text: str) -> str | None:
    names = () if has_marks(text) else template_names()
    pairs = ((name, f"{name}_training") for name in names if f"{name}_training" in names)
    return next((_read_shipped(twin) for name, twin in pairs if _read_shipped(name).strip() == text.strip()), None)
