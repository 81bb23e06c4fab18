"""The loss mask of conversations, token by token, on the chat templates of real model families."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
from data_tokenizers import SMOLLM, STYLES, shipped, tokenizer_for, tokenizer_of
from tokenizers import normalizers
from transformers import CanineTokenizer

from packtrain.config.rules.paths_and_packages import template_names
from packtrain.data.formats.conversations import Conversation
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens import chat_template
from packtrain.data.tokens.chat_template import CHATML, Template, choose_template, give_template
from packtrain.data.tokens.loss_mask import REFUSED, ChatEncoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import UserError

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
TURNS = [
    {"role": "user", "content": "Hello there!"},
    {"role": "assistant", "content": "How are you? é 中"},
    {"role": "user", "content": "I am fine."},
    {"role": "assistant", "content": "Tell me more about it."},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
WITH_TOOLS = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "25 degrees"},
    {"role": "assistant", "content": "It is sunny."},
]


def encoder(style: str, template: Template | None = None) -> ChatEncoder:
    tokenizer = tokenizer_of(style)
    chosen = template or choose_template(None, tokenizer)
    assert chosen is not None
    return ChatEncoder(plain_tokenizer(tokenizer), chosen)


def trained(
    style: str, conversation: Conversation, template: Template | None = None, loss_on: Any = "assistant"
) -> list[str]:
    """The text of each run of trained tokens."""
    ids, mask, _ = encoder(style, template).encode(conversation, loss_on)
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    return [tokenizer_of(style).decode(ids[start:end]) for start, end in borders]


FIRST, SECOND = TURNS[1]["content"], TURNS[3]["content"]
WANTED = {
    "llama3": [f"{FIRST}<|eot_id|>", f"{SECOND}<|eot_id|>"],
    "qwen2_5": [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"],
    "mistral": [f" {FIRST}</s>", f" {SECOND}</s>"],
    "gemma": [f"{FIRST}<end_of_turn>", f"{SECOND}<end_of_turn>"],
    "smollm": [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"],
}
HAS_SYSTEM = ("llama3", "qwen2_5", "smollm")


@pytest.mark.parametrize("style", WANTED)
def test_every_assistant_turn_is_trained_through_its_end_token_and_nothing_else(style):
    messages = [SYSTEM, *TURNS] if style in HAS_SYSTEM else TURNS
    assert trained(style, Conversation(messages)) == WANTED[style]


@pytest.mark.parametrize("style", WANTED)
def test_the_tokens_are_those_of_apply_chat_template(style):
    ids, *_ = encoder(style).encode(Conversation(TURNS), "assistant")
    assert ids.tolist() == tokenizer_of(style).apply_chat_template(TURNS, return_dict=False)


@pytest.mark.parametrize("style", [*WANTED, "qwen3"])
def test_completion_trains_only_the_last_answer(style):
    think = "<think>\n\n</think>\n\n" if style == "qwen3" else ""
    lead = " " if style == "mistral" else ""
    assert trained(style, Conversation(TURNS), loss_on="completion") == [f"{lead}{think}{SECOND}{STYLES[style].end}"]


@pytest.mark.parametrize("style", ["llama3", "qwen2_5", "gemma"])
def test_marks_of_the_twin_and_prefixes_agree(style):
    text = STYLES[style].template
    own = choose_template(None, tokenizer_of(style))
    assert own is not None and own.marked is not None
    by_twin = encoder(style, own).encode(Conversation(TURNS), "assistant")
    by_prefix = encoder(style, Template(text, None)).encode(Conversation(TURNS), "assistant")
    assert by_twin[1].any()
    np.testing.assert_array_equal(by_twin[1], by_prefix[1])


@pytest.mark.parametrize("style", ["llama3", "qwen2_5", "gemma"])
def test_own_marks_are_taken_at_their_word_but_for_header_and_white_space(style):
    """Gemma's mark holds the newline after the turn, Qwen's also the one in front of the answer."""
    marked = shipped(f"{style}_training")
    ids, mask, _ = encoder(style, Template(marked, None)).encode(Conversation(TURNS), "assistant")
    wanted = tokenizer_of(style).apply_chat_template(
        TURNS, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == wanted["input_ids"]
    off = np.flatnonzero(mask != np.array(wanted["assistant_masks"], dtype=bool))
    assert {tokenizer_of(style).decode(ids[at]) for at in off} <= {"\n"}
    assert trained(style, Conversation(TURNS), Template(marked, None)) == WANTED[style]


NAMES = [name for name in template_names() if not name.startswith(("idefics3", "llava_next", "smolvlm"))]  # of images
REFUSED_NAMES = {
    "diffusion_gemma",
    "diffusion_gemma_training",
    "glm4moe",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
}  # no end token; rewritten history
SPOKEN = ("<think>", "<|channel|>", " to=user", "\n<think>")  # what a model says before its answer


@pytest.mark.parametrize("name", NAMES)
def test_no_template_there_is_trains_the_role_header(name):
    tokenizer = tokenizer_for(CHATML if name == "chatml" else shipped(name))
    template = choose_template(name, tokenizer)
    assert template is not None
    chat = ChatEncoder(plain_tokenizer(tokenizer), template)
    if name in REFUSED_NAMES:
        with pytest.raises(BadRow, match=REFUSED):
            chat.encode(Conversation(TURNS), "assistant")
        return
    ids, mask, _ = chat.encode(Conversation(TURNS), "assistant")
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    found = [tokenizer.decode(ids[start:end]) for start, end in borders]
    assert len(found) == 2 + name.startswith("phi3")  # Phi-3 ends the whole in EOS
    for text, answer in zip(found, (FIRST, SECOND), strict=False):
        before, after = text.split(answer)
        assert not before or before.startswith(SPOKEN)
        assert not re.search(r"assistant|model|chatbot", before.lower())
        end = tokenizer(after, add_special_tokens=False)["input_ids"]
        assert end and set(end) <= chat.tokenizer.special_ids


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
@pytest.mark.parametrize("messages", [TURNS[:2], TURNS], ids=["one turn", "two turns"])
def test_marks_around_what_everybody_says_never_train_the_user(messages, loss_on):
    every = "{% for m in messages %}{% generation %}{{ m.role + m.content + eos_token }}{% endgeneration %}{% endfor %}"
    try:
        found = trained("smollm", Conversation(messages), Template(every, None, name="own.jinja"), loss_on)
    except BadRow as bad:
        assert "the generation marks of the chat template (own.jinja) cover what the user says" in bad.what
    else:  # all marks are of no use, so the last turn is found without them
        assert loss_on == "completion" and found == [f"assistant{SECOND}<|im_end|>"]


def test_tools_that_the_template_leaves_out_are_refused():
    with pytest.raises(BadRow, match=r"the chat template \(the tokenizer's own\) leaves out the tools") as caught:
        trained("smollm", Conversation(TURNS, tools=TOOLS))
    assert caught.value.reason == "tools left out"


BEGIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'user' %}{{ m.content }}{% else %}"
MARKS = "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        BEGIN + MARKS + "{% endfor %}",
        BEGIN + MARKS + "{{ '<|im_end|>\n' }}{% endfor %}",
    ],
    ids=["no end", "no end behind marks", "an end outside the marks"],
)
def test_a_template_that_trains_no_end_of_turn_is_refused(template):
    with pytest.raises(BadRow, match="would not learn to stop"):
        trained("smollm", Conversation(TURNS), Template(template, None))


@pytest.mark.parametrize("messages", [TURNS, WITH_TOOLS], ids=["turns", "tools"])
def test_a_template_that_rewrites_history_is_refused_with_advice(messages):
    with pytest.raises(BadRow) as caught:
        trained("qwen3", Conversation(messages))
    assert caught.value.reason == REFUSED
    assert caught.value.field == "messages[1]"
    assert "data.loss_on=completion" in caught.value.fix


@pytest.mark.parametrize("style", ["smollm", "qwen2_5"])
@pytest.mark.parametrize("white", ["\n", "\n\n", " \n", "  "])
def test_an_answer_that_begins_with_white_space_is_tokenised_apart_from_the_header(style, white):
    """ "\n" of the header and "\n" of the answer would be one token, which the model never sees when it is asked."""
    messages = [TURNS[0], {"role": "assistant", "content": f"{white}Hello"}, *TURNS[2:]]
    wanted = [f"{white}Hello<|im_end|>", f"{SECOND}<|im_end|>"]
    tokenizer = tokenizer_of(style)
    whole, asked = (
        tokenizer.apply_chat_template(messages[:turns], return_dict=False, add_generation_prompt=turns == 1)
        for turns in (4, 1)
    )
    for template in (None, Template(STYLES[style].template, None), Template(CHATML, None)):
        ids, mask, apart = encoder(style, template).encode(Conversation(messages), "assistant")
        assert trained(style, Conversation(messages), template) == wanted
        if template is None or template.text != CHATML:
            assert tokenizer.decode(ids) == tokenizer.decode(whole)
            assert ids[: len(asked)].tolist() == asked and mask[len(asked)] and not mask[: len(asked)].any()
            assert apart == (ids.tolist() != whole) and (apart or white != "\n")


def test_a_border_inside_a_token_is_refused_by_name_where_the_tokenizer_puts_a_space_before_each_text():
    tokenizer = copy.deepcopy(tokenizer_of("mistral"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    colons = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    template = Template(colons + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", None)
    chat = ChatEncoder(plain_tokenizer(tokenizer), template)
    messages = [*TURNS[:3], {"role": "assistant", "content": "in Paris."}]
    with pytest.raises(
        BadRow, match=r"inside a token, in '>assistant: in Paris.</s', .*a space before each text"
    ) as caught:
        chat.encode(Conversation(messages), "completion")
    assert "Trim the white space" in caught.value.fix


def test_a_template_that_drops_the_answer_is_refused():
    """Templates for images walk over a list of parts and render nothing of a string."""
    with pytest.raises(BadRow, match="leaves out or rewrites the answer 'How are you"):
        trained("smollm", Conversation(TURNS), Template(shipped("smolvlm"), None))


def test_white_space_that_a_tokenizer_leaves_out_of_its_offsets_is_not_overlooked():
    """Byte-level tokenizers that trim offsets hide that " Hello" is one token across the border."""
    template = Template("{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
                        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", None)  # fmt: skip
    chat = encoder("qwen2_5", template)
    ids, mask, apart = chat.encode(Conversation([TURNS[0], TURNS[3]]), "assistant")
    assert apart and tokenizer_of("qwen2_5").decode(ids[mask]) == f"{SECOND}<|im_end|>"


def test_the_last_message_may_be_the_users():
    assert trained("smollm", Conversation(TURNS[:3])) == WANTED["smollm"][:1]


def test_a_template_file_is_read_and_an_unknown_name_gets_suggestions(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(SMOLLM)
    template = choose_template(str(path), tokenizer_of("llama3"))
    assert template is not None and template.text == SMOLLM
    with pytest.raises(UserError, match="llama3"):
        choose_template("lama3", tokenizer_of("llama3"))


@pytest.mark.parametrize("name", ["qwen3_training", "chatml", "gptoss_training"])
def test_a_template_that_data_names_goes_with_the_model_without_its_marks(name):
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    template = choose_template(name, tokenizer)
    give_template(tokenizer, name)
    assert (
        template is not None
        and chat_template.has_marks(template.text)
        and not chat_template.has_marks(str(tokenizer.chat_template))
    )
    marked = tokenizer.apply_chat_template(TURNS, chat_template=template.text, tokenize=False)
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == marked


def test_a_tokenizer_written_in_python_is_refused():
    with pytest.raises(UserError, match="CanineTokenizer is a tokenizer written in Python") as caught:
        plain_tokenizer(CanineTokenizer())
    assert caught.value.problems[0].where == "model.tokenizer"
