"""The ledger of a run, whole or torn, and rows in its order."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import Done, packtrain
from inspecting import MODEL, write

from packtrain.inspect.document_losses import DocumentLosses, read_ledger

KNOWN, HARD, LOST = (3.0, 0.5, 0.1), (3.0, 3.1, 2.9), (3.0, 0.2, 2.0)


def line(step: int, document: int, loss: float | None, row: str | None = "", **more: float) -> str:
    """A line of ledger.jsonl."""
    row = f"a.jsonl:{document + 1}" if row == "" else row
    return json.dumps({"step": step, "document": document, "row": row, "tokens": 5 + document, "loss": loss, **more})


def lines(*documents: tuple[float, ...], **more: float) -> list[str]:
    """The ledger of a run whose steps are whole passes."""
    steps = range(len(documents[0]))
    return [line(step + 1, at, own[step], **more) for step in steps for at, own in enumerate(documents)]


def read(folder: Path, text: list[str]) -> DocumentLosses:
    (folder / "ledger.jsonl").write_text("".join(f"{line}\n" for line in text))
    found = read_ledger(folder / "ledger.jsonl")
    assert found is not None
    return found


def rows(found: DocumentLosses, sort: Any, **how: Any) -> list[int]:
    """The numbers of the chosen rows' lines."""
    return [int(row["row"].removeprefix("a.jsonl:")) for row in found.choose(sort, **how)]


def test_documents_are_hard_easy_forgotten_or_never_learned(tmp_path: Path) -> None:
    found = read(tmp_path, lines(KNOWN, HARD, LOST, *[KNOWN] * 15))
    assert rows(found, "hardest", top=2) == [2, 3] and rows(found, "easiest", top=1) == [1]
    assert rows(found, "forgotten") == [3]
    assert rows(found, "alike", top=1) == [2] == rows(found, "alike", above=2.0)
    assert rows(found, "hardest", above=1.0) == [2, 3] and rows(found, "hardest", above=3.0) == []
    (hard,) = found.choose("hardest", top=1)
    assert hard["losses"] == [*HARD] and hard["tokens"] == 6 and "margin" not in hard
    assert hard["excess"] == pytest.approx(sum(HARD) / 3 - sum(KNOWN) / 3)
    (lost,) = found.choose("forgotten")
    assert (lost["first"], lost["last"], lost["forgotten"]) == (3.0, 2.0, 1.8)
    assert lost["change"] == pytest.approx(1 - 0.2 / 3, abs=1e-6)


def test_a_document_of_an_early_step_is_not_hard_since_all_losses_were_large_then(tmp_path: Path) -> None:
    falling = [line(at // 8 + 1, at, 10 * 0.99**at + (1.0 if at == 700 else 0.0)) for at in range(800)]
    found = read(tmp_path, falling)
    assert rows(found, "hardest", top=1) == [701] and found.choose("alike") == []
    assert max(range(800), key=lambda at: found.figures["last"][at]) == 0


def test_torn_lines_and_lines_written_again_count_once(tmp_path: Path) -> None:
    whole = lines(KNOWN, HARD)
    torn = ['{"step": 1, "docu', "", "7", "[]", '{"step": 1}', line(9, 0, None), '{"step": "x"}']
    again = [line(2, 0, 0.25), line(2, 1, 3.5), *whole[4:]]
    found = read(tmp_path, [*whole[:4], line(3, 0, 9.0), *torn, *again])
    assert [own.tolist() for own in found.losses] == [[3.0, 0.25, 0.1], [3.0, 3.5, 2.9]]
    (tmp_path / "ledger.jsonl").write_bytes(b"\xff{\n" + (tmp_path / "ledger.jsonl").read_bytes()[:-3])
    torn_at_both_ends = read_ledger(tmp_path / "ledger.jsonl")
    assert torn_at_both_ends is not None and [*map(len, torn_at_both_ends.losses)] == [3, 2]


def test_without_lines_there_is_no_ledger(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger.jsonl") is None
    (tmp_path / "ledger.jsonl").write_bytes(b"\xff{\n")
    assert read_ledger(tmp_path / "ledger.jsonl") is None


def test_passes_of_a_stream_belong_together_though_it_numbers_documents_anew(tmp_path: Path) -> None:
    stream = [line(number // 2 + 1, number, KNOWN[number // 2], f"a.jsonl:{number % 2 + 1}") for number in range(6)]
    stream = [text.replace(f'"tokens": {5 + at}', '"tokens": 5') for at, text in enumerate(stream)]
    found = read(tmp_path, stream)
    assert [own.tolist() for own in found.losses] == [[*KNOWN]] * 2


def test_parts_of_a_row_are_no_passes_even_if_they_are_equally_long(tmp_path: Path) -> None:
    found = read(tmp_path, [line(step, at, 1.0, "a.jsonl:1", tokens=5) for step, at in ((1, 2), (2, 0), (3, 1))])
    assert [own.tolist() for own in found.losses] == [[1.0]] * 3


def test_rows_of_several_documents_are_listed_once_and_rows_without_a_name_all(tmp_path: Path) -> None:
    found = read(tmp_path, [line(step, at, 1.0 + at, "a.jsonl:1") for step in (1, 2) for at in range(3)])
    (only,) = found.choose("hardest")
    assert only["last"] == 3.0 and len(found.rows) == 3
    found = read(tmp_path, [line(1, at, 1.0 + at, None) for at in range(3)])
    assert [row["row"] for row in found.choose("hardest")] == ["document 2", "document 1", "document 0"]


def test_sources_have_means_and_pairs_margins(tmp_path: Path) -> None:
    more = [line(step, 7, 4.0, "b.parquet, row 3", margin=-0.5) for step in (1, 2, 3)]
    found = read(tmp_path, [*lines(KNOWN, HARD, margin=0.25), *more])
    assert [(one["source"], one["documents"], one["first"]) for one in found.by_source()] == [
        ("a.jsonl", 2, 3.0),
        ("b.parquet", 1, 4.0),
    ]
    assert [row["margin"] for row in found.choose("hardest")] == [-0.5, 0.25, 0.25]


def inspect(folder: Path, *arguments: str, train: str = "a.jsonl") -> Done:
    settings = [*MODEL, f"data.train={train}", "topology=single", "batch.examples_per_step=2"]
    return packtrain("inspect", *settings, *arguments, folder=folder, PACKTRAIN_CACHE=str(folder / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with three rows, and the run folder `run` that has trained them."""
    write(tmp_path, [{"text": f"text {n} \x1b[31m"} for n in (1, 2, 3)], "a.jsonl")
    (tmp_path / "run").mkdir()
    read(tmp_path / "run", lines(KNOWN, HARD, LOST))
    return tmp_path


def test_rows_are_shown_with_their_losses_and_texts(run: Path) -> None:
    done = inspect(run, "--ledger", "run", "--top", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("a.jsonl:2 · loss 3 → 3.1 → 2.9") < done.stdout.index("a.jsonl:3 · loss 3 → 0.2 → 2")
    assert "text 2 ␛[31m" in done.stdout and "\x1b" not in done.stdout and "a.jsonl:1" not in done.stdout
    (row,) = json.loads(inspect(run, "--ledger", "run", "--sort", "forgotten", "--json").stdout)["rows"]
    assert (row["row"], row["forgotten"], row["text"]) == ("a.jsonl:3", 1.8, "text 3 \x1b[31m")
    assert not (run / "cache").exists(), "nothing was tokenised"


def test_a_written_list_leaves_the_rows_out_and_no_other_file_is_overwritten(run: Path) -> None:
    assert inspect(run, "--ledger", "run", "--above", "1", "--write", "bad.txt").returncode == 0
    assert (run / "bad.txt").read_text() == "a.jsonl:2\na.jsonl:3\n"
    summary = json.loads(inspect(run, "data.leave_out=bad.txt", "--json").stdout)
    assert (summary["rows"], summary["documents"], summary["dropped_for"]) == (3, 1, {"left out": 2})
    assert summary["skipped"] == []
    assert "dropped: left out" in inspect(run, "data.leave_out=bad.txt", "--source", "a.jsonl:3").stdout
    assert inspect(run, "--ledger", "run", "--top", "1", "--write", "bad.txt").returncode == 0
    assert (run / "bad.txt").read_text() == "a.jsonl:2\n"
    done = inspect(run, "--ledger", "run", "--write", "a.jsonl")
    assert done.returncode == 2 and "[not-file-and-line]" in done.stderr and "text 1" in (run / "a.jsonl").read_text()
    assert "[file-not-writable]" in inspect(run, "--ledger", "run", "--write", "no/bad.txt").stderr
    assert "[no-such-path]" in inspect(run, "data.leave_out=gone.txt").stderr


def test_only_lists_are_written_over_and_links_to_them_stay_links(run: Path) -> None:
    os.mkfifo(run / "pipe")
    for name in ("pipe", "to the pipe"):
        (run / "to the pipe").unlink(missing_ok=True)
        (run / "to the pipe").symlink_to("pipe")
        done = inspect(run, "--ledger", "run", "--write", name)
        assert done.returncode == 2 and "[not-a-file]" in done.stderr
        assert (run / "pipe").is_fifo() and (run / "to the pipe").is_symlink()
    (run / "link").symlink_to("bad.txt")
    for _ in range(2):
        assert inspect(run, "--ledger", "run", "--top", "1", "--write", "link").returncode == 0
        assert (run / "link").is_symlink() and (run / "bad.txt").read_text() == "a.jsonl:2\n"


def test_a_place_with_a_zero_byte_is_none(run: Path) -> None:
    (run / "zero.txt").write_bytes(b"a\0.jsonl:2\na.jsonl:3\n")
    assert "[not-file-and-line]" in inspect(run, "data.leave_out=zero.txt").stderr
    read(run / "run", [line(1, 0, 1.0, "a\0.jsonl:2"), line(1, 1, 2.0)])
    done = inspect(run, "--ledger", "run", "--write", "bad.txt")
    assert done.returncode == 0, done.stderr
    assert (run / "bad.txt").read_text() == "a.jsonl:2\n"


def test_the_commands_of_the_docs_run_as_written(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[3] / "docs/inspect.md").read_text().partition("## Which documents hurt")[2]
    first, *shows, again = [shlex.split(text, comments=True) for text in docs.split("```")[1].splitlines()[1:]]
    folder = tmp_path / "runs/quickstart-sft"
    folder.mkdir(parents=True)
    read(folder, [line(step, at, 3.0 + at / 10, f"quickstart:{at + 1}") for step in (1, 2) for at in range(60)])
    assert first[1] == "sft" and len(shows) == 3 and all(show[:2] == ["packtrain", "inspect"] for show in shows)
    for command in (*shows, [*again, "--dry-run"]):
        done = packtrain(*command[1:], folder=tmp_path, PACKTRAIN_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (tmp_path / "bad.txt").read_text().splitlines()[0] == "quickstart:60"


def test_rows_of_a_table_and_of_a_stream_are_found(run: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"text": f"text {n}"} for n in (1, 2, 3)]), run / "a.parquet")
    read(run / "run", [line(1, at, 1.0 + at, f"a.parquet, row {at + 1}") for at in range(3)])
    stream = ("data.streaming=true", "trainer.max_steps=2")
    for more in ((), stream):
        done = inspect(run, "--ledger", "run", "--top", "1", "--write", "bad.txt", "--json", *more, train="a.parquet")
        assert done.returncode == 0, done.stderr
        assert [(row["row"], row["text"]) for row in json.loads(done.stdout)["rows"]] == [
            ("a.parquet, row 3", "text 3")
        ]
    summary = json.loads(inspect(run, "data.leave_out=bad.txt", "--json", train="a.parquet").stdout)
    assert summary["dropped_for"] == {"left out": 1}
    assert "xt 3" in inspect(run, "--source", "a.parquet, row 3", train="a.parquet").stdout


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--top", "3"), "ledger-options"),
        (("--write", "x.txt"), "ledger-options"),
        (("--ledger", "run", "--rows", "2"), "ledger-options"),
        (("--ledger", "run", "--html", "x.html"), "ledger-options"),
        (("--ledger", "nowhere"), "no-ledger"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run: Path, options: tuple[str, ...], code: str) -> None:
    done = inspect(run, *options)
    assert done.returncode == 2 and f"[{code}]" in done.stderr
