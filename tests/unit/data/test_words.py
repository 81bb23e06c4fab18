"""Tokens looked up word by word are those of the whole text, for every way of splitting it that is known, and for others."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from packtrain.data.tokens import words
from packtrain.data.tokens.tokenizer import PlainTokenizer, plain_tokenizer
from packtrain.data.tokens.words import Words

CONTROL = ["<|end|>", "<|start|>", "<|st"]
WORDS = [
    "it's",
    "The cat sat.",
    " on",
    " a mat,",
    "don't",
    "WE'LL",
    "e\u0301",
    "ſ",
    "日本語",
    "テスト",
    "😀",
    "123",
    " 45",
    "٣",
    "x/y",
]
SPACES = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\x1c", "\x85", "\u2028", "\u200b"]
MARKS = [*".,:;!?'\"-/()", "/\n", "://", " .", "...", *CONTROL, "<tag>"]
TEXTS = st.lists(st.one_of(st.sampled_from([*WORDS, *SPACES, *MARKS]), st.text(max_size=3))).map("".join)


@pytest.fixture(autouse=True)
def unproved(monkeypatch):
    """No text is encoded whole as well, which would hide a wrong cut."""
    monkeypatch.setattr(words, "PROVED", 0)


def byte_level(*before: pre_tokenizers.PreTokenizer, regex: bool = False) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    return pre_tokenizers.Sequence([*before, last])


def split(regex: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(regex), behavior, invert)


KNOWN = {
    "GPT-2": byte_level(regex=True),
    "SmolLM2": byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True),
    "quickstart": byte_level(split(" ?[0-9]"), regex=True),
    **{f"expression {number}": byte_level(split(regex)) for number, regex in enumerate(words._INTO_WORDS)},
    "what is left is dropped": byte_level(split(words._INTO_WORDS[1], "removed", invert=True)),
    "DeepSeek": byte_level(*map(split, (*words._WITHIN_WORDS[:2], words._INTO_WORDS[-1].replace(r"\r\n", "\r\n")))),
}
UNKNOWN = {
    "white space": pre_tokenizers.Whitespace(),
    "another expression": byte_level(split(r"\S+ \S+|\s+")),
    "metaspace": pre_tokenizers.Metaspace(),
}


def trained(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A BPE whose words are longer than what they are cut into would be, if it were cut in a wrong place."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = split
    alphabet = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte != "Ļ"]  # a byte without a token
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["".join((a, b, c)) for a in WORDS for b in [*SPACES, *MARKS, ""] for c in WORDS], trainer)
    bpe.add_tokens([AddedToken("<tag>", normalized=True), AddedToken("  ", normalized=True)])
    bpe.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 1), ("<|end|>", 0)]
    )
    return bpe


def plain_of(bpe: Tokenizer) -> PlainTokenizer:
    return plain_tokenizer(PreTrainedTokenizerFast(tokenizer_object=bpe))


def check(bpe: Tokenizer, plain: PlainTokenizer, text: str) -> None:
    for _ in range(2):  # words new to it, words it knows
        whole = bpe.encode(text, add_special_tokens=False)
        encoded = plain.encode(text)
        assert encoded.ids.tolist() == plain.ids(text).tolist() == whole.ids
        assert plain.ids(text, special=True).tolist() == bpe.encode(text).ids
        starts, ends = np.array(whole.offsets, int).reshape(-1, 2).T
        assert encoded.ends.tolist() == ends.tolist()
        covered = np.maximum.accumulate(np.append(0, ends))[:-1]
        assert encoded.starts.tolist() == np.minimum(starts, covered).tolist()


@pytest.mark.parametrize("split", [*KNOWN.values(), *UNKNOWN.values()], ids=[*KNOWN, *UNKNOWN])
def test_tokens_and_their_places_are_those_of_the_whole_text(split):
    bpe = trained(split)
    plain = plain_of(bpe)

    @settings(max_examples=30)
    @given(TEXTS)
    @example("")
    @example("\n\nThe cat sat.  On\n a mat /\nWE'LL\t\tx.\u200b 45")
    def compare(text: str) -> None:
        check(bpe, plain, text)

    compare()


@pytest.mark.parametrize("split", KNOWN.values(), ids=KNOWN)
def test_texts_are_cut_where_the_expression_is_known(split):
    known = Words(trained(split))
    known.of("The cat sat on a mat.<|end|>", special=False)
    assert {"The", " cat", " mat", ".", "<|end|>"} <= known.keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda bpe: bpe.add_tokens([AddedToken("cat sat", normalized=True)]),
        lambda bpe: bpe.add_tokens([AddedToken("t.", normalized=True)]),
        lambda bpe: bpe.add_special_tokens([AddedToken("<x>", lstrip=True)]),
        lambda bpe: bpe.add_special_tokens([AddedToken("<x>", rstrip=True)]),
        lambda bpe: bpe.add_special_tokens([AddedToken("cat", single_word=True)]),
        lambda bpe: setattr(bpe, "normalizer", normalizers.Prepend("▁")),
        lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda bpe: setattr(bpe, "post_processor", processors.ByteLevel(add_prefix_space=True, trim_offsets=True)),
        lambda bpe: setattr(bpe, "encode_special_tokens", True),
    ],
)
def test_texts_stay_whole_where_a_cut_might_change_them(change):
    bpe = trained(KNOWN["GPT-2"])
    change(bpe)
    whole = Words(bpe)
    whole.of("The cat sat on a mat.", special=False)
    assert not whole


def test_a_normaliser_that_composes_characters_does_not_keep_texts_whole():
    bpe = trained(KNOWN["expression 0"])
    bpe.normalizer = normalizers.NFC()
    check(bpe, plain_of(bpe), "cafe\u0301 a\u030a, e \u0301x")
    assert json.loads(bpe.to_str())["normalizer"] == {"type": "NFC"}


def test_memory_for_words_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "MOST", 10)
    bpe = trained(KNOWN["GPT-2"])
    known = Words(bpe)
    text = " ".join(map(str, range(100))) + " " + "x" * 1000
    assert known.of(text, special=False)[0].tolist() == bpe.encode(text).ids[1:-1]
    assert len(known) <= 10 and max(map(len, known)) <= words.LONGEST


def test_a_tokenizer_that_is_mistaken_for_a_known_one_is_found_out_by_its_first_texts(monkeypatch):
    monkeypatch.setattr(words, "_is_known", lambda rust: True)
    bpe = trained(UNKNOWN["another expression"])
    assert Words(bpe).of("The cat sat on a mat", special=False)[0].tolist() != bpe.encode("The cat sat on a mat").ids
    monkeypatch.setattr(words, "PROVED", 1)
    plain = plain_of(bpe)
    for text in ("The cat sat on a mat", "on a mat The cat sat"):
        check(bpe, plain, text)
