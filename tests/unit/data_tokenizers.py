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
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
STYLES = {
    "llama3": Style(shipped("llama3"), LLAMA_TOKENS, "<|eot_id|>", "<|begin_of_text|>"),
    "qwen2_5": Style(shipped("qwen2_5"), CHATML_TOKENS, "<|im_end|>", None),
    "qwen3": Style(shipped("qwen3"), CHATML_TOKENS, "<|im_end|>", None),
    "mistral": Style(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", "metaspace"),
    "gemma": Style(shipped("gemma"), GEMMA_TOKENS, "<end_of_turn>", "<bos>", "metaspace"),
    "smollm": Style(SMOLLM, CHATML_TOKENS, "<|im_end|>", None),
}
CONTROL = r"<[|｜][^<>\n'\"]+>|<[^<>\n'\"|]+\|>|</?s>|</?think>|<\w+_of_\w+>|\[/?(?:INST|[A-Z]+_[A-Z]+)\]"


def byte_level(words: str) -> Tokenizer:
    """A tokenizer over bytes that splits text into `words` first."""
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(words), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    raw.decoder = decoders.ByteLevel()
    return raw


def trained(raw: Tokenizer, size: int, special: list, alphabet: list[str]) -> Tokenizer:
    how = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, **how))
    return raw


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer in small: its control tokens and its way with spaces, with a tiny vocabulary."""
    style = STYLES[name]
    control = [AddedToken(token, special=True, normalized=False) for token in style.control]
    if style.spaces == "byte":
        raw = byte_level(r"\s*[\r\n]+|\s?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+")
        raw.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        raw.normalizer = normalizers.Replace(" ", "▁")
        raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [*map(chr, range(32, 127)), "é", "中"]
        control = [AddedToken("<unk>", special=True), *control]
    raw = trained(raw, 500, control, alphabet)
    own = {"bos_token": style.bos, "eos_token": style.end, "chat_template": style.template}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **own)


@lru_cache
def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose control tokens are those in the template's text."""
    found = {*re.findall(CONTROL, template)}
    thoughts = found & {"<think>", "</think>"}  # tokens of their own, but no control tokens
    control = [AddedToken(token, special=True, normalized=False) for token in sorted(found - thoughts)]
    raw = byte_level(r"\s*[\r\n]+|\s?\p{L}+|\s+")
    raw = trained(raw, 700, ["<BOS>", "<EOS>", *control], pre_tokenizers.ByteLevel.alphabet())
    raw.add_tokens([AddedToken(token, normalized=False) for token in sorted(thoughts)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<BOS>", eos_token="<EOS>", chat_template=template)
