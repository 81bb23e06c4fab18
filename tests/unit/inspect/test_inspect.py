"""`packtrain inspect` as a user sees it: statistics, modes, documents, the rows of a step, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inspecting import MODEL, chat, clean, inspect, report, write

from packtrain.config.compose import load_config
from packtrain.inspect.mode_costs import attention_cost
from packtrain.inspect.show_data import lay_out_step
from packtrain.inspect.summary import inspection

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
    assert data["modes"]["padding"]["slots"] > data["modes"]["packed"]["slots"] == data["tokens"]
    assert data["truncated"] == data["cuts"][0]["documents"] > 0
    assert data["cut_tokens"] == data["cuts"][0]["tokens"]
    assert sum(one["documents"] for one in data["histogram"]) == 60
    assert sum(one["tokens"] for one in data["roles"]) == data["tokens"]
    assert {one["role"]: one["trained"] for one in data["roles"]} == {"user": 0, "assistant": data["trained_tokens"]}
    assert {"name", "count", "share", "where", "fix"} <= set(data["audit"][0])
    assert len(data["shown"]) == 3


def test_documents_left_out_for_their_length_count_among_those_that_a_limit_cuts(folder: Path) -> None:
    cut = report(folder, TRAIN, "data.max_length=64")["truncated"]
    options = (TRAIN, "data.max_length=64", "data.overlong=drop")
    data = report(folder, *options)
    [own] = data["cuts"]
    assert own["max_length"] == 64
    assert own["documents"] == data["dropped"] == cut
    assert own["share"] == pytest.approx(cut / 60, abs=1e-4)
    assert own["tokens"] is None
    assert "tokens lost" in inspect(folder, *options).stdout
    assert inspect(folder, *options, "--html", "dropped.html").returncode == 0


def test_a_page_is_not_written_over_data(folder: Path) -> None:
    before = (folder / "pairs.jsonl").read_bytes()
    done = inspect(folder, TRAIN, "--html", "pairs.jsonl")
    assert done.returncode == 2
    assert "is not overwritten" in done.stderr
    assert (folder / "pairs.jsonl").read_bytes() == before
    assert [inspect(folder, TRAIN, "--html", "twice.html").returncode for _ in range(2)] == [0, 0]


def test_what_each_mode_costs_is_what_its_steps_come_to(folder: Path) -> None:
    """By the longest document of each batch, over all steps of the epoch, on two processes."""
    config = load_config(None, [*MODEL, f"data.train={folder}/chats.jsonl", "batch.examples_per_step=8"], print)
    found = inspection(config, processes=2)
    summary = found.summary()["modes"]
    lengths = found.corpus.train.lengths
    for step in (1, 3):
        lay_out_step(found, step)
    assert summary["padding"]["rows"] == len(lengths)
    assert summary["padding_free"]["slots"] == lengths.sum()
    assert summary["packed"]["micro_batches"] == [1, 1]
    assert 0 <= summary["packed"]["imbalance"] < 0.5


def test_a_step_is_laid_out_as_training_does(folder: Path) -> None:
    from packtrain.model.load import load_model
    from packtrain.train.loader import attention_cost as of_model

    config = load_config(None, [*MODEL, f"data.train={folder}/chats.jsonl", "batch.examples_per_step=8"], print)
    found = inspection(config, processes=2)
    from packtrain.config.schema import Peft
    from packtrain.data.tokens.pretrained import load_tokenizer
    from packtrain.packing.schedule import make_schedule

    tokenizer = load_tokenizer(config.model)
    cost = of_model(load_model(config.model, Peft(), tokenizer, seed=0))
    assert attention_cost(config.model, config.peft, len(tokenizer)) == pytest.approx(cost)
    scorer = load_model(config.model, Peft(), tokenizer, seed=0, scores=True)
    told = attention_cost(config.model, config.peft, len(tokenizer), scores=True)
    assert told == pytest.approx(of_model(scorer)) != pytest.approx(cost)
    schedule = make_schedule(
        found.corpus.train.lengths, config.packing, config.batch, seed=0, shuffle=True, attention_cost=cost
    )
    step = lay_out_step(found, 2)
    for rank, parts in zip(step["ranks"], schedule.layout(1, 2), strict=True):
        for batch, part in zip(rank["micro_batches"], parts, strict=True):
            assert [one["where"] for one in batch["shown"]] == [f"{folder}/chats.jsonl:{at + 1}" for at in part]
            starts = [one["parts"][0]["start"] for one in batch["shown"]]
            assert starts == [sum(found.corpus.train.lengths[part[:at]]) for at in range(len(part))]


def test_a_step_shows_every_rank_and_the_shared_prompts(folder: Path) -> None:
    settings = ("objective.kind=dpo", "data.train=pairs.jsonl", "data.max_length=512")
    said = inspect(folder, *settings, "--step", "1", "topology=local", "topology.gpus_per_node=2").stdout
    assert "rank 0, micro-batch 1: 4 examples" in said
    assert "rank 1, micro-batch 1: 4 examples" in said
    assert "prompt, once for both answers · tokens 0 to" in said
    apart = inspect(folder, *settings, "--step", "1", "packing.share_prefix=false").stdout
    assert "once for both answers" not in apart
    assert "chosen · tokens 0 to" in apart
    padded = inspect(folder, *settings, "--step", "1", "packing.mode=padding").stdout
    assert "padding included" in padded


def test_trained_text_is_told_without_colours_and_roles_beside_it(folder: Path) -> None:
    (folder / "one.jsonl").write_text(json.dumps(chat("Why?", "Because.", "Be brief.")) + "\n")
    said = inspect(folder, "data.train=one.jsonl", "--rows", "1").stdout
    assert "⟦Because.<|im_end|>⟧" in said
    assert [line.split()[0] for line in said.splitlines() if "<|im_start|>" in line] == ["system", "user", "assistant"]


def test_what_was_cut_is_struck_out(folder: Path) -> None:
    (folder / "long.jsonl").write_text(
        json.dumps(chat("Count.", "one two three four five six seven eight nine")) + "\n"
    )
    said = inspect(folder, "data.train=long.jsonl", "data.max_length=20", "--source", "long.jsonl:1").stdout
    kept, cut, _ = said.split("\n", 1)[1].split("~~")  # below the legend
    assert "⟦one" in kept
    assert "nine<|im_end|>" in cut
    assert "20 tokens" in kept


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "61"], "--rows: 61 of 60 documents"),
        (["--rows", "-1"], "--rows: -1 of 60 documents"),
        (["--step", "0"], "--step: step 0, but the run has 8 steps"),
        (["--step", "9"], "Give a number from 1 to 8"),
        (["--source", "chats.jsonl:61"], "chats.jsonl has no row on line 61"),
        (["--source", "chats.jsonl"], "is no place of a row"),
        (["--source", "other.jsonl:1"], "the data has no file 'other.jsonl'"),
        (["--source", "chats.jsonl:1", "--rows", "2"], "does not go with"),
        (["--html", "missing/page.html"], "there is no such folder"),
    ],
)
def test_options_that_cannot_be_are_refused_with_a_sentence(folder: Path, options: list[str], said: str) -> None:
    done = inspect(folder, TRAIN, *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_row_that_was_left_out_is_shown_with_the_reason(folder: Path) -> None:
    rows = [chat("Why?", "Because."), chat("Again?", "Never.")]
    rows[1]["messages"][1]["weight"] = 0
    write(folder, rows, "weights.jsonl")
    said = inspect(folder, "data.train=weights.jsonl", "--source", "weights.jsonl:2").stdout
    assert "dropped: no trained token" in said
    assert "Never." in said


def test_documents_count_as_often_as_they_are_trained_on(folder: Path) -> None:
    write(folder, clean(1, seed=5), "single.jsonl")
    data = report(folder, "data.train=[{path: chats.jsonl, weight: 2.5}, single.jsonl]")
    assert data["documents"] == 151 == sum(one["documents"] for one in data["histogram"])
    assert sum(one["tokens"] for one in data["roles"]) == data["tokens"]
    assert sum(one["trained"] for one in data["roles"]) == data["trained_tokens"]


def test_what_was_decided_about_a_source_is_told(folder: Path) -> None:
    (folder / "lines.txt").write_text("One line of a text.\nAnother line of it.\n")
    said = inspect(folder, "data.train=lines.txt").stdout
    assert "each .txt file is a row (data.split_text)" in said
