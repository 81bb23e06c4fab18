"""Small tokenizers and real chat templates of five model families, made on the spot: no hub, no files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "What is the weather in Paris? It is sunny, 25 degrees.",
    "You are a helpful assistant. Answer with care.",
    "system user assistant model tool\n\nname arguments city content",
    "Hello there! How are you? I am fine, thanks. Tell me more about it.",
] * 8


def shipped(name: str) -> str:
    """A chat template as its model family publishes it (TRL keeps copies)."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


MISTRAL = (  # mistralai/Mistral-7B-Instruct-v0.1, word for word
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
SMOLLM = (  # HuggingFaceTB/SmolLM2-135M-Instruct, word for word
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """A family: its template, its control tokens, the one that ends a turn, and how its tokenizer splits text."""

    template: str
    control: tuple[str, ...]
    end: str
    bos: str | None
    spaces: str = "byte"  # or "metaspace", as in SentencePiece models


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
STYLES = {
    "llama3": Style(
        shipped("llama3"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "qwen2_5": Style(shipped("qwen2_5"), CHATML_TOKENS, "<|im_end|>", None),
    "qwen3": Style(shipped("qwen3"), CHATML_TOKENS, "<|im_end|>", None),
    "mistral": Style(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", "metaspace"),
    "gemma": Style(
        shipped("gemma"), ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<bos>", "metaspace"
    ),
    "smollm": Style(SMOLLM, CHATML_TOKENS, "<|im_end|>", None),
}


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer in small: its control tokens and its way with spaces, with a tiny vocabulary."""
    style = STYLES[name]
    control = [AddedToken(token, special=True, normalized=False) for token in style.control]
    if style.spaces == "byte":
        raw = Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        raw.post_processor = processors.ByteLevel(trim_offsets=True)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        raw.normalizer = normalizers.Replace(" ", "▁")
        raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [*map(chr, range(32, 127)), "é", "中"]
        control = [AddedToken("<unk>", special=True), *control]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=style.bos, eos_token=style.end, chat_template=style.template
    )


@lru_cache
def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose control tokens are those in the template's text."""
    found = set(
        re.findall(
            r"<[|｜][^<>\n'\"]+>|<[^<>\n'\"|]+\|>|</?s>|</?think>|<\w+_of_\w+>|\[/?(?:INST|[A-Z]+_[A-Z]+)\]", template
        )
    )
    thoughts = found & {"<think>", "</think>"}  # tokens of their own, but no control tokens
    control = [AddedToken(token, special=True, normalized=False) for token in sorted(found - thoughts)]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?\p{L}+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<BOS>", "<EOS>", *control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens([AddedToken(token, normalized=False) for token in sorted(thoughts)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<BOS>", eos_token="<EOS>", chat_template=template)
