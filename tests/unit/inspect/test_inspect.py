"""`packtrain inspect` as a user sees it: statistics, modes, documents, the rows of a step, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from inspecting import MODEL, chat, clean, inspect, report, write

from packtrain.config.compose import load_config
from packtrain.inspect.corpus import estimate_attention_cost, open_corpus
from packtrain.inspect.summary import lay_out_step

TRAIN = "data.train=chats.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inspect")
    write(made, clean(60))
    rows = [{"prompt": f"Question {n}? ", "chosen": f"Yes, {n}.", "rejected": f"No, not {n + 1}."} for n in range(20)]
    write(made, rows, "pairs.jsonl")
    return made


def test_the_json_has_what_is_promised(folder: Path) -> None:
    data = report(folder, TRAIN, "data.max_length=64")
    assert data["rows"] == 60 == data["kept"] + data["dropped"]
    assert set(data["modes"]) == {"padding", "padding_free", "packed"}
    for mode in data["modes"].values():
        assert mode["rows"] > 0
        assert 0 < mode["efficiency"] <= 1
    assert data["modes"]["padding"]["rows"] == 60
    assert data["modes"]["padding"]["slots"] > data["modes"]["packed"]["slots"] == data["tokens"]
    assert data["truncated"] == data["cuts"][0]["documents"] > 0
    assert data["cut_tokens"] == data["cuts"][0]["tokens"]
    assert sum(bin["documents"] for bin in data["histogram"]) == 60
    assert {"name", "count", "share", "where", "fix"} <= set(data["audit"][0])
    assert (data["audit"][0]["name"], data["audit"][0]["count"]) == ("answer_cut", data["truncated"])
    assert len(data["shown"]) == 3


def test_skipped_rows_and_unread_columns_are_named(folder: Path) -> None:
    bad = {"instruction": 3, "output": "x"}
    odd = {"instruction": "Add.", "input": "1", "output": "x", "remark": "a b", "id": 7}
    files = [write(folder, [bad, odd, odd, bad, {**odd, "output": ""}], "odd.jsonl")]
    files.append(write(folder, [odd, bad, odd], "more.jsonl"))
    page, options = folder / "odd.html", (f"data.train=[{','.join(files)}]", "data.bad_rows=skip")
    data = report(folder, *options, "--html", str(page))
    wrong = [(place, "wrong type") for place in ("odd.jsonl:1", "odd.jsonl:4", "more.jsonl:2")]
    places = [(bad["where"], bad["reason"]) for bad in data["skipped"]]
    assert places == [*wrong[:2], ("odd.jsonl:5", "empty"), *wrong[2:]]
    assert data["unread"] == {file: {"remark": "", "id": "note"} for file in files}
    said = [f"{file}: not read{what}" for file in files for what in (": remark", ", about the rows only: id")]
    assert data["remarks"] == said and all(line in page.read_text() for line in said)
    text = inspect(folder, *options).stdout
    assert "dropped 4: 3 wrong type, 1 empty" in text and all(line in text for line in said)
    for shown in (("--rows", "1"), ("--step", "1"), ("--source", "more.jsonl:1")):
        assert all(line in inspect(folder, *options, *shown).stdout for line in said)


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_a_step_is_laid_out_as_training_does(folder: Path, kind: str) -> None:
    from packtrain.data.tokens.pretrained import load_tokenizer
    from packtrain.model.load import load_model
    from packtrain.packing.schedule import make_schedule
    from packtrain.train.loader import attention_cost as cost_in_training

    file = "chats" if kind == "sft" else "pairs"
    settings = [*MODEL, f"data.train={folder}/{file}.jsonl", "batch.examples_per_step=8", f"objective.kind={kind}"]
    config = load_config(None, settings, print)
    corpus = open_corpus(config)
    tokenizer = load_tokenizer(config.model)
    cost = cost_in_training(load_model(config.model, config.peft, tokenizer, seed=0, scores=kind == "reward"))
    assert estimate_attention_cost(corpus) == pytest.approx(cost)
    lengths = corpus.pairs.shared_lengths if corpus.pairs else corpus.train.lengths
    schedule = make_schedule(lengths, config.packing, config.batch, seed=0, shuffle=True, attention_cost=cost)
    for rank, parts in zip(lay_out_step(corpus, 2, 2)["ranks"], schedule.layout(1, 2), strict=True):
        for batch, part in zip(rank["micro_batches"], parts, strict=True):
            assert [shown["where"] for shown in batch["shown"]] == [f"{folder}/{file}.jsonl:{at + 1}" for at in part]
            starts = [shown["parts"][0]["start"] for shown in batch["shown"]]
            assert starts == [sum(lengths[part[:at]]) for at in range(len(part))]


def test_a_step_shows_every_rank_and_the_shared_prompts(folder: Path) -> None:
    settings = ("objective.kind=dpo", "data.train=pairs.jsonl", "data.max_length=512")
    said = inspect(folder, *settings, "--step", "1", "topology=local", "topology.gpus_per_node=2").stdout
    assert "rank 0, micro-batch 1: 4 examples" in said
    assert "rank 1, micro-batch 1: 4 examples" in said
    assert "prompt, once for both answers · tokens 0 to" in said
    why_not_shared = inspect(folder, *settings, "--step", "1", "packing.share_prefix=false").stdout
    assert "once for both answers" not in why_not_shared
    assert "chosen · tokens 0 to" in why_not_shared
    padded = inspect(folder, *settings, "--step", "1", "packing.mode=padding").stdout
    assert "padding included" in padded


def test_trained_text_is_in_brackets_without_colours_and_the_loss_to_a_limit_is_counted(folder: Path) -> None:
    chats = [chat("Why?", "Because.", "Be brief."), chat("Count.", "one two three four five six seven eight nine ten")]
    write(folder, chats, "two.jsonl")
    said = inspect(folder, "data.train=two.jsonl", "data.max_length=32", "--rows", "2").stdout
    whole, cut = said.split("── document ")[1:]
    assert "⟦Because.<|im_end|>⟧" in whole and " cut" not in whole
    assert sum("<|im_start|>" in line for line in whole.splitlines()) == 3
    assert "32 tokens" in cut and re.search(r"\d+ cut", cut) and "⟦one" in cut


def test_text_of_the_data_cannot_act(folder: Path) -> None:
    hostile = "\x1b[31mred\x1b[0m \x07 [bold]markup[/] \u202eturned\u2066 \u200bzero \r over <script>alert(1)</script>"
    (folder / "hostile.jsonl").write_text(json.dumps(chat(hostile, hostile)) + "\n")
    done = inspect(folder, "data.train=hostile.jsonl", "--rows", "1")
    assert "␛[31mred␛[0m ␇ [bold]markup[/] ⟨U+202E⟩turned⟨U+2066⟩ ⟨U+200B⟩zero ␍ over" in " ".join(done.stdout.split())
    assert not set(done.stdout) & set("\x1b\x07\u202e\u2066\u200b\r")
    (folder / "names").mkdir()
    (folder / "names" / "<b>\x1b[31m\u202e.jsonl").write_text(json.dumps(chat("Where?", "There \ufffd.")) + "\n")
    named = inspect(folder, "data.train=names")
    assert "<b>␛[31m⟨U+202E⟩.jsonl:1" in named.stdout
    assert not set(named.stdout) & set("\x1b\u202e")
    page = folder / "page.html"
    assert inspect(folder, "data.train=[hostile.jsonl, names]", "--html", str(page)).returncode == 0
    text = page.read_text()
    assert "<b>␛" not in text
    assert "&lt;b&gt;␛[31m⟨U+202E⟩.jsonl:1" in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert not set(text) & set("\x1b\x07\u202e\u2066\u200b\r")


def test_options_that_cannot_be_are_refused(folder: Path) -> None:
    for options, said in {
        "--rows 61": "--rows 60",
        "--rows -1": "--rows 60",
        "--step 0": "--step 8",
        "--step 9": "--step 1 8",
        "--source chats.jsonl:61": "--source chats.jsonl 61",
        "--source chats.jsonl": "--source FILE:LINE",
        "--source other.jsonl:1": "--source 'other.jsonl' chats.jsonl",
        "--source chats.jsonl:1 --rows 2": "--source --rows",
        "--html missing/page.html": "--html missing/page.html",
        "--html pairs.jsonl": "--html pairs.jsonl",
    }.items():
        done = inspect(folder, TRAIN, *options.split())
        assert done.returncode == 2
        assert [text for text in said.split() if text not in done.stderr] == [], options
        assert "chosen" in (folder / "pairs.jsonl").read_text()


def test_the_work_of_attention_is_what_the_config_says(folder: Path) -> None:
    def spread(*more: str) -> tuple[float, float]:
        data = report(folder, TRAIN, "topology=local", "topology.gpus_per_node=3", *more)
        return data["attention_cost"], data["modes"]["packed"]["imbalance"]

    (light, even), (heavy, uneven) = spread("packing.attention_cost=0"), spread("packing.attention_cost=100")
    assert (light, heavy) == (0, 100) and even != uneven
