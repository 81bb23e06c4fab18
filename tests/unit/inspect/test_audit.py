"""Each fault that is planted is found, where it is, and a clean set has none."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from data_tokenizers import tokenizer_of
from inspecting import WORDS, audit, chat, clean, write


@pytest.fixture(scope="module")
def rng() -> random.Random:
    return random.Random(3)


def test_a_clean_set_has_no_finding(tmp_path: Path) -> None:
    write(tmp_path, clean(150))
    write(tmp_path, clean(20, seed=1), "eval.jsonl")
    assert audit(tmp_path, "data.train=chats.jsonl", "data.eval=eval.jsonl") == {}


def test_what_texts_show_is_found_where_it_is(tmp_path: Path) -> None:
    rows = clean(150)
    rows[4] = chat("Is this the end? <|im_end|> No.", "Yes it is a marker.")
    rows[19], rows[29] = chat("Say nothing.", "Nothing."), chat("Say it twice.", "Said.<|im_end|>")
    rows[19]["messages"][1]["weight"] = 0
    (tmp_path / "before.jsonl").write_text("\n\n" + json.dumps(chat("Why?", "Because.")) + "\n")
    findings = audit(tmp_path, f"data.train=[before.jsonl, {write(tmp_path, rows)}]")
    lines = {name: finding["where"] for name, finding in findings.items()}
    assert lines == {
        "marker_in_content": ["chats.jsonl:5", "chats.jsonl:30"],
        "no_trained_token": ["chats.jsonl:20"],
        "end_trained_twice": ["chats.jsonl:30"],
    }
    assert findings["marker_in_content"]["share"] == pytest.approx(2 / 151, abs=1e-6)
    assert all(finding["fix"] and finding["what"] for finding in findings.values())


def test_equal_documents_are_found_within_train_and_in_eval_but_not_what_weights_repeat(tmp_path: Path) -> None:
    rows, held = clean(150), clean(20, seed=1)
    rows.append(rows[2])
    held[4] = rows[9]
    write(tmp_path, rows)
    write(tmp_path, held, "eval.jsonl")
    findings = audit(tmp_path, "data.train=[{path: chats.jsonl, weight: 2.5}]", "data.eval=eval.jsonl")
    assert {name: finding["where"] for name, finding in findings.items()} == {
        "exact_duplicates": ["chats.jsonl:151 (as chats.jsonl:3)"],
        "eval_in_train": ["eval.jsonl:5 (as chats.jsonl:10)"],
    }


def test_a_system_prompt_that_the_template_drops_is_found(tmp_path: Path) -> None:
    template = (
        "{% for message in messages if message['role'] != 'system' %}{{ '<|im_start|>' + message['role'] + '\\n' +"
        " message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (tmp_path / "silent.jinja").write_text(template)
    write(tmp_path, [chat("Who are you?", "I am.", "You are a tutor."), chat("And you?", "Me too.")])
    findings = audit(tmp_path, "data.train=chats.jsonl", "data.chat_template=silent.jinja")
    assert findings["dropped_system_prompt"]["where"] == ["chats.jsonl:1"]
    assert audit(tmp_path, "data.train=chats.jsonl") == {}


def test_faults_of_tokens_are_found(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama3")
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ("model.init=random", f"model.tokenizer={tmp_path}/tokenizer", "model.config={model_type: llama}")
    bos, end, unknown = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    words = tokenizer.encode("what is the weather", add_special_tokens=False)
    bodies = ([*words, end], [bos, *words, end], [*words, unknown, end], [*words, end, end], words)
    write(tmp_path, [{"input_ids": [bos, *body]} for body in bodies])
    findings = audit(tmp_path, "data.train=chats.jsonl", model=model)
    assert {name: (finding["where"], finding["severity"]) for name, finding in findings.items()} == {
        "doubled_bos": (["chats.jsonl:2"], "warn"),
        "unknown_tokens": (["chats.jsonl:3"], "warn"),
        "end_trained_twice": (["chats.jsonl:4"], "warn"),
        "end_never_trained": (["chats.jsonl:5"], "warn"),
    }
    write(tmp_path, [{"input_ids": [bos, *words]} for _ in range(4)], "endless.jsonl")
    findings = audit(tmp_path, "data.train=endless.jsonl", model=model)
    assert findings["end_never_trained"]["severity"] == "bad"


def test_pairs_with_the_same_answers_are_found(tmp_path: Path) -> None:
    pairs = [(" ".join(WORDS[n : n + 5]), " ".join(WORDS[n + 1 : n + 7])) for n in range(20)]
    rows = [{"prompt": f"{n}?", "chosen": f" {one}.", "rejected": f" {other}."} for n, (one, other) in enumerate(pairs)]
    rows[3] |= {"rejected": rows[3]["chosen"]}
    write(tmp_path, [*rows, rows[8]])
    findings = audit(tmp_path, "objective.kind=dpo", "data.train=chats.jsonl", "data.max_length=512")
    assert {name: (finding["where"], finding["unit"]) for name, finding in findings.items()} == {
        "identical_answers": (["chats.jsonl:4"], "rows"),
        "exact_duplicates": (["chats.jsonl:21 (as chats.jsonl:9)"], "pairs"),
    }
