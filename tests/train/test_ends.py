"""A model stops where its trained answers end, in samples, chat and eval."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from here import run_here
from running import LLAMA, Run, config_on, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from packtrain.data.dataset import TokenDataset
from packtrain.data.tokens.cache import Document
from packtrain.inspect.audit import sample_answers
from packtrain.serve.export import merge
from packtrain.serve.trained import find_trained, load_trained

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>", "<|note|>"]
EOS, START, END, CALL, NOTE = range(5)
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A base model's tokenizer: it has the tokens of turns, but its EOS is another."""
    names = [*SPECIAL, *LETTERS]
    rust = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    rust.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=SPECIAL[EOS], pad_token=SPECIAL[EOS])
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})  # type: ignore[dict-item]
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, words: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("base")
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(words), pad_token_id=EOS, bos_token_id=None, eos_token_id=EOS, **settings)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def config_of(base: Path, folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Chats that all have one answer, learned by heart in a few steps."""
    row = {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "ab"}]}
    data = {"train": str(write_jsonl(folder / "chats.jsonl", [row] * 8)), "chat_template": "chatml"}
    return config_on(base, folder, data=data, **groups)


def ends(folder: Path) -> list[int]:
    found = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return [found] if isinstance(found, int) else found


def said(run: Run) -> list[str]:
    return [line for line in run.log.splitlines() if " ends  " in line]


LEARN = {"trainer": {"max_steps": 40, "log_every": 40, "samples": ["say"]}, "optim": {"learning_rate": 1e-2}}


def test_a_base_model_that_was_trained_on_chats_stops(base: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, config_of(base, tmp_path, **LEARN))
    assert ends(run.folder / "final") == [EOS, END]
    assert len(said(run)) == 1 and "<|im_end|>" in said(run)[0]
    assert run.summary["answers"][0]["after"] == "ab"  # of up to 64 tokens
    model, tokenizer = load_trained(find_trained(str(run.folder)))
    turn = [{"role": "user", "content": "say"}]
    asked = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert made.tolist()[-1] == END and len(made) == 3


def test_adapters_bring_the_end_that_they_were_trained_on(base: Path, tmp_path: Path) -> None:
    lora = {"peft": {"kind": "lora", "merge": True}, "trainer": {"max_steps": 1, "checkpoint_every": 1}}
    run = run_here(tmp_path, config_of(base, tmp_path, **lora))
    assert ends(run.folder / "final") == ends(run.folder / "final-merged") == [EOS, END]
    model, _ = load_trained(find_trained(str(run.folder)))
    assert model.generation_config.eos_token_id == [EOS, END]
    assert ends(merge(str(run.folder), tmp_path / "merged", None)) == [EOS, END]
    # trained further, and merged to be trained in full
    for peft in ("lora", "none"):
        again = config_of(run.folder / "final", tmp_path, peft={"kind": peft}, trainer={"max_steps": 1})
        other = run_here(tmp_path, again, name=peft)
        assert ends(other.folder / "final") == [EOS, END] and not said(other)


def test_a_model_that_knows_its_end_keeps_its_own_list(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.generation_config.eos_token_id = [END, EOS, NOTE]
    model.save_pretrained(tmp_path / "chat")
    PreTrainedTokenizerFast.from_pretrained(base).save_pretrained(tmp_path / "chat")
    run = run_here(tmp_path, config_of(tmp_path / "chat", tmp_path, trainer={"max_steps": 1}))
    assert ends(run.folder / "final") == [END, EOS, NOTE] and not said(run)


class Documents(list):
    """Documents as a data set has them."""

    report = SimpleNamespace(dropped={}, rows=0)

    @property
    def lengths(self) -> list[int]:
        return [len(document.input_ids) for document in self]


def document(*parts: tuple[list[int], bool]) -> Any:
    ids = [token for part, _ in parts for token in part]
    return Document(np.array(ids, np.int32), np.array([trained for part, trained in parts for _ in part]))


A, NEWLINE = 10, len(SPECIAL) + len(LETTERS) - 1
ASKED, SAID = ([START, A, A], False), ([A, A, END], True)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([document(ASKED, SAID)], [END]),
        ([document(ASKED, ([A, END, NEWLINE], True))], [END]),  # dpo's targets go to the end of the text
        ([document(ASKED, ([A, A], True))], []),  # an end in plain text
        ([document(([A, A, EOS], True))], [EOS]),
        ([document(([START, A, END, NEWLINE, START, A, END, NEWLINE], True))], [END]),  # data.loss_on=all
        # a call of a tool ends in another token; one within an answer ends none, as <|end|> of gpt-oss after the thoughts
        ([document(ASKED, ([A, CALL], True), ASKED, SAID)], [END, CALL]),
        ([document(ASKED, ([A, NOTE, A, NOTE], True), ASKED, ([A, NOTE, A, END], True))], [END]),
        # two that were cut
        ([document(ASKED, ([A] * 60, True)), document(ASKED, ([A] * 59 + [NOTE], True)), document(ASKED, SAID)], [END]),
    ],
)
def test_the_end_of_trained_answers(words: Any, documents: list[Any], expected: list[int]) -> None:
    held: Any = Documents(documents)
    assert not isinstance(held, TokenDataset)
    assert sample_answers(held, words, 63)[1] == expected
