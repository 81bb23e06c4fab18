"""Templates that write message by message: what is proved of them is what rendering every beginning shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from packtrain.data.tokens.chat_template import CHATML
from packtrain.data.tokens.turn_by_turn import turn_by_turn

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REMEMBERING = """{{ bos_token }}{%- set ns = namespace(asked=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endif %}
    {{- '[' ~ ns.asked ~ message.role ~ (loop.previtem.role if not loop.first else '') ~ ']' }}
    {%- for word in message.content.split() %}{{ word }}{% if not loop.last %} {% endif %}{% endfor %}
{%- endfor %}"""
ALTERNATING = """{% set all = messages %}{% for message in all %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}
  {% if loop.index0 == 3 %}{% break %}{% endif %}
  {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}"""
SHIPPED = {file.stem: file.read_text() for file in Path(trl.__file__).parent.glob("chat_templates/*.jinja")}
PROVED = {name: text for name, text in SHIPPED.items() if turn_by_turn(text)}
TALK = [
    {"role": role, "content": content}
    for role, content in zip(
        ("user", "assistant") * 3,
        ("Hi", "\n Yes? ", "", "<think>\nhm\n</think>\nNo.", "{{ x }}", "bye\n\n"),
        strict=True,
    )
]


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", [*PROVED, "chatml", "smollm2", "remembering", "alternating"])
def test_one_rendering_shows_what_rendering_every_beginning_does(name: str, with_system: bool) -> None:
    template = {
        **SHIPPED,
        "chatml": CHATML,
        "smollm2": SMOLLM2,
        "remembering": REMEMBERING,
        "alternating": ALTERNATING,
    }[name]
    takes_system = name not in ("gemma", "gemma_training", "alternating")
    messages = [{"role": "system", "content": "Be kind."}, *TALK] if with_system and takes_system else TALK
    if name.startswith(("llava", "smolvlm", "idefics")):  # take parts only
        messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    found = turn_by_turn(template)
    assert found is not None
    text, begins = found.render(messages, dict(SPECIAL))
    whole = render_jinja_template([messages], chat_template=template, **SPECIAL)[0][0]
    assert text == whole
    assert len(begins) == (4 if name == "alternating" else len(messages))
    for number in range(1, len(begins)):
        beginning = render_jinja_template([messages[:number]], chat_template=template, **SPECIAL)[0][0]
        assert beginning == text[: begins[number]]
        asked = render_jinja_template(
            [messages[:number]], chat_template=template, add_generation_prompt=True, **SPECIAL
        )
        assert asked[0][0] == beginning + found.prompt


def test_the_common_templates_are_proved() -> None:
    assert PROVED.keys() >= {"gemma", "llama3"}
    assert PROVED.keys().isdisjoint({"qwen3", "qwen2_5", "llama3_1", "phi3", "gptoss", "deepseekv3"})


def loop(within: str = "", after: str = "") -> str:
    """A template with a loop over the messages."""
    return f"{{% for message in messages %}}{{{{ message.content }}}}{within}{{% endfor %}}{after}"


@pytest.mark.parametrize(
    "template",
    [
        loop("{% if loop.last %}!{% endif %}"),
        loop("{{ loop.length }}"),
        loop("{{ loop.nextitem }}"),
        loop("{{ loop.revindex0 }}"),
        loop("{% set outer = loop %}{% for part in [1] %}{{ outer.last }}{% endfor %}"),
        loop("{{ messages[-1].content }}"),
        loop("{{ messages[loop.index0 - 1].content }}"),
        loop("{{ messages | length }}"),
        loop("{{ [1, 2] | random }}"),
        loop("{{ lipsum() }}"),
        loop("{% for other in messages %}{{ other.role }}{% endfor %}"),
        loop("{% if add_generation_prompt %}?{% endif %}"),
        loop("", "the end"),
        loop("", "{% if add_generation_prompt %}a{% else %}b{% endif %}"),
        loop("", "{% if add_generation_prompt %}{{ messages[-1].role }}{% endif %}"),
        loop("", "{% if add_generation_prompt %}{{ ns.said }}{% endif %}"),
        loop("", "{% if add_generation_prompt and x %}a{% endif %}"),
        loop("", loop()),
        "{{ messages | length }}" + loop(),
        "{% set last = messages[-1] %}" + loop("{{ last.role }}"),
        "{% set last = messages | last %}" + loop("{{ last.role }}"),
        "{% set rest = messages[1:] %}{% for message in rest %}{{ message.content }}{% endfor %}",
        "{% set a = messages %}{% set b = a %}" + loop("{{ b | length }}"),
        "{% set (a, b) = (messages, 1) %}" + loop("{{ a | length }}"),
        "{% set ns = namespace(all=messages) %}" + loop("{{ ns.all | length }}"),
        "{% set ns = namespace() %}{% set ns.all = messages %}" + loop("{{ ns.all | length }}"),
        "{% set a, b = messages %}" + loop("{{ b.role }}"),
        loop("{% for part in [1] if loop.last %}!{% endfor %}"),
        "{% macro f() %}{{ messages | length }}{% endmacro %}" + loop("{{ f() }}"),
        "{% if add_generation_prompt %}?{% endif %}" + loop(),
        "{% for message in messages if message.content %}{{ message.content }}{% endfor %}",
        "{% for message in messages recursive %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content }}{% else %}none{% endfor %}",
        "{% for message in messages | reverse %}{{ message.content }}{% endfor %}",
        "{% if true %}" + loop() + "{% endif %}",
        "{{ messages[0].content }}",
        "{% block a %}{% endblock %}" + loop(),
    ],
)  # fmt: skip
def test_what_looks_ahead_or_behind_the_loop_is_not_proved(template: str) -> None:
    assert turn_by_turn(template) is None


def test_messages_are_watched_and_not_changed() -> None:
    found = turn_by_turn(re.sub("loop.first and ", "", SMOLLM2))
    assert found is not None
    before = [dict(one) for one in TALK]
    found.render(TALK, {})
    assert before == TALK
