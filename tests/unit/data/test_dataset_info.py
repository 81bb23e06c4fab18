"""Data sets by their names: LLaMA-Factory's dataset_info.json, hub ids with subset and split, globs of several kinds of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import TOKENIZER, ready, texts, write

from packtrain.config.compose import load_config
from packtrain.config.schema import DataSource, sources
from packtrain.errors import UserError

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
OPENAI = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4."}]
ALPACA = {"instruction": "2 + 2?", "output": "4."}
PAIR = {"chosen": {"from": "gpt", "value": "4."}, "rejected": {"from": "gpt", "value": "5."}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # entry and a row, all of which mean the same
    "alpaca": ({}, ALPACA),
    "names": ({"columns": {"prompt": "q", "response": "a"}}, {"q": "2 + 2?", "a": "4.", "input": "not named, so not read"}),
    "query": ({"columns": {"query": "q", "response": "a"}}, {"q": "2 + 2?", "a": "4."}),
    "sharegpt": ({"formatting": "sharegpt"}, {"conversations": SHAREGPT}),
    "tags": ({"formatting": "sharegpt", "columns": {"messages": "said"}, "tags": TAGS}, {"said": OPENAI}),
    "speakers": (
        {"formatting": "sharegpt", "tags": {**TAGS, "user_tag": "Q", "assistant_tag": "A"}},
        {"conversations": [{"role": "Q", "content": "2 + 2?"}, {"role": "A", "content": "4."}]},
    ),
    "openai": ({"formatting": "openai", "columns": {"messages": "messages"}, "tags": TAGS}, {"messages": OPENAI}),
}  # fmt: skip


def listed(folder: Path, entries: dict[str, tuple[dict[str, Any], Any]]) -> Path:
    """A data/ folder as LLaMA-Factory has it."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    info = {name: {"file_name": f"{name}.json", **entry} for name, (entry, _) in entries.items()}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    for name, (_, rows) in entries.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows if isinstance(rows, list) else [rows]))
    return folder


def read(folder: Path, name: str, kind: Any = "sft", **keys: Any) -> Any:
    return ready(folder, f"lf:{folder}/data/dataset_info.json#{name}", kind, chat_template="chatml", **keys).train


@pytest.mark.parametrize("name", CASES)
def test_rows_of_every_form_become_the_same_document(tmp_path: Path, name: str) -> None:
    expected = ready(tmp_path, write(tmp_path / "x.jsonl", ALPACA), chat_template="chatml").train[0]
    document = read(listed(tmp_path, CASES), name)[0]
    assert document.input_ids.tolist() == expected.input_ids.tolist()
    assert document.loss_mask.tolist() == expected.loss_mask.tolist()


def test_pairs_labels_and_running_text_are_read(tmp_path: Path) -> None:
    ranked = {"formatting": "sharegpt", "ranking": True}
    ranked["columns"] = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    labelled = {"formatting": "sharegpt", "columns": {"messages": "said", "kto_tag": "good"}, "tags": TAGS}
    entries = {
        "pairs": (ranked, {"conversations": SHAREGPT[:1], **PAIR}),
        "labels": (labelled, [{"said": OPENAI, "good": good} for good in (True, False)]),
        "text": ({"columns": {"prompt": "body"}}, {"body": "two and two"}),
    }
    folder = listed(tmp_path, entries)
    pairs, labels, text = read(folder, "pairs", "dpo"), read(folder, "labels", "kto"), read(folder, "text")
    assert "5." in TOKENIZER.decode(pairs[0].rejected.input_ids)
    assert labels.labels.tolist() == [True, False]
    assert "two and two" in TOKENIZER.decode(text[0].input_ids) and text.report.format == "text"
    with pytest.raises(UserError, match=r"\[row-unwanted-answer\]"):
        read(folder, "labels")


def test_a_text_file_has_a_text_a_line_and_columns_that_an_entry_leaves_out_are_named(tmp_path: Path) -> None:
    listed(tmp_path, {"wiki": ({"file_name": "wiki.txt", "columns": {"prompt": "text"}}, [])})
    (tmp_path / "data" / "wiki.txt").write_text("One two.\n\nThree.\n")
    data = read(tmp_path, "wiki")
    texts = [TOKENIZER.decode(data[at].input_ids) for at in range(len(data))]
    assert texts == ["One two.<|im_end|>", "Three.<|im_end|>"]
    assert len(read(tmp_path, "wiki", split_text="paragraph")) == 2
    name, row = "names", CASES["names"]
    listed(tmp_path, {name: (row[0], {**row[1], "id": 7})})
    (unread,) = read(tmp_path, name).report.unread.values()
    assert unread == {"input (not in dataset_info.json)": "", "id (not in dataset_info.json)": "note"}


def test_num_samples_are_the_documents_of_an_epoch(tmp_path: Path) -> None:
    rows = [{**ALPACA, "output": f"{n}."} for n in range(10)]
    entries: dict[str, Any] = {f"n{number}": ({"num_samples": number}, rows) for number in (3, 10, 25)}
    folder = listed(tmp_path, entries)
    assert [len(read(folder, name)) for name in entries] == [3, 10, 25]
    assert len({*read(folder, "n3").rows.tolist()}) == 3
    assert {*read(folder, "n25").rows.tolist()} == {*range(10)}


def test_a_name_is_found_below_the_config_or_where_the_command_runs(tmp_path, monkeypatch):
    listed(tmp_path / "repo", CASES)
    (tmp_path / "repo" / "examples").mkdir()
    text = "model: {path: x/y}\nbatch: {examples_per_step: 1}\ndata: {train: [{path: lf:alpaca, weight: 2}]}\n"
    for place, cwd in (("repo", tmp_path), ("repo/examples", tmp_path / "repo")):
        monkeypatch.chdir(cwd)
        (tmp_path / place / "run.yaml").write_text(text)
        (source,) = sources(load_config(str(tmp_path / place / "run.yaml"), []).data.train)
        assert source.path.endswith("data/dataset_info.json#alpaca") and source.weight == 2
        assert Path(source.path.removeprefix("lf:").partition("#")[0]).is_file()
    with pytest.raises(UserError, match="Did you mean alpaca") as refused:
        load_config(str(tmp_path / "repo" / "run.yaml"), ["data.train=lf:alpacca"])
    assert refused.value.problems[0].where == "data.train"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    listed(tmp_path / "other", {"alpaca": CASES["alpaca"]})
    with pytest.raises(UserError, match="both have 'alpaca'"):
        load_config(str(tmp_path / "run.yaml"), [])


def test_an_entry_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for what, entry in {
        "a hub that packtrain does not read": {"ms_hub_url": "a/b"},
        "made by a script": {"script_url": "a"},
        "formatting is 'vicuna'": {"file_name": "x.json", "formatting": "vicuna"},
        r"\[unknown-entry-key\]": {"file_name": "x.json", "colums": {}},
        r"\[hub-folder\]": {"hf_hub_url": "a/b", "folder": "python"},
    }.items():
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"x": entry}))
        with pytest.raises(UserError, match=what):
            read(tmp_path, "x")
    entry = {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "pictures"}, "tags": TAGS}
    folder = listed(tmp_path, {"seen": (entry, {"messages": OPENAI, "pictures": ["a.png"]})})
    with pytest.raises(UserError, match=r"\[row-no-image-processor\]"):
        read(folder, "seen")


def test_a_hub_id_brings_subset_and_split() -> None:
    for name, parts in {
        "o/n": ("o/n", None, "train"),
        "o/n:c@test": ("o/n", "c", "test"),
        "o/n@train[:10%]": ("o/n", None, "train[:10%]"),
        "o/n:2022.en": ("o/n", "2022.en", "train"),
        "data/x:y.jsonl": ("data/x:y.jsonl", None, "train"),
    }.items():
        for given in (name, DataSource(path=name)):
            (source,) = sources([given])
            assert (source.path, source.subset, source.split) == parts


def test_one_glob_takes_files_of_several_kinds(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    table = pa.table({"text": ["two"]})
    write(tmp_path / "rows/e.jsonl", {"text": "one"})
    (tmp_path / "rows" / "a.json").write_text(json.dumps([{"text": "three"}]))
    (tmp_path / "rows" / "b.csv").write_text("text\nfour\n")
    pq.write_table(table, tmp_path / "rows" / "c.parquet")
    with pa.OSFile(str(tmp_path / "rows" / "d.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(pa.table({"text": ["five"]}))
    for place in ("rows", "rows/*"):
        words = {text.removesuffix("<|im_end|>") for text in texts(ready(tmp_path, tmp_path / place))}
        assert words == {"one", "two", "three", "four", "five"}
