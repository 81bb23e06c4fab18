"""Hostile data: files of other shapes and encodings, rows that mean something else, names that no file may have."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.corpus.case import Case, each_of
from tests.corpus.tiny_run import ROWS, gone, lines, link, trains

SAID = 'text\n"one two three"\n"four five six"\n'


def data(name: str, file: str, content: Any, *arguments: str, **more: Any) -> Case:
    """Data of its own, in `file`."""
    files = {"data.jsonl": gone} | {file: lines(content) if isinstance(content, list) else content}
    train = f"data.train={json.dumps(file, ensure_ascii=False)}"
    return trains(f"data, {name}", files, train, *arguments, **more)


def four(name: str, row: Any, verb: str = "sft", **more: Any) -> Case:
    """Four equal rows for a verb."""
    groups = {} if verb == "sft" else {"objective": {"kind": verb}}
    return data(name, "data.jsonl", [row] * 4, verb=verb, groups=groups, **more)


def chat(said: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}], **more}


ODD = {
    "a FIFO": os.mkfifo,
    "/dev/zero": link("/dev/zero"),
    "an empty folder": lambda at: at.mkdir(),
    "a folder with a link to /dev/zero": lambda at: (at.mkdir(), os.symlink("/dev/zero", at / "a.jsonl")),
}
CONTENTS = {
    "nothing": b"",
    "a list": b"[1, 2]\n",
    "NUL bytes": b"\0" * 1000,
    "latin-1": '{"text": "café"}\n'.encode("latin-1"),
    "a lone surrogate": b'{"text": "\\ud800"}\n',
    "a number of 5000 digits": b'{"text": ' + b"9" * 5000 + b"}\n",
    "nested 100000 deep": b"[" * 100_000 + b"\n",
    "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n",
    "NaN as text": b'{"text": NaN}\n',
    "doubled keys": b'{"text": "one two", "text": "three four"}\n',
}
FILES = {
    "csv in latin-1": ("d.csv", 'text\n"café crème"\n'.encode("latin-1")),
    "csv with doubled columns": ("d.csv", "text,text\na,b\n"),
    "csv with an open quote": ("d.csv", 'text\n"one two\n'),
    "parquet of text": ("d.parquet", b"not parquet"),
    "arrow cut": ("d.arrow", b"ARROW1\0\0" + b"\xff" * 50),
    "gzip cut": ("d.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03abc"),
    "text with NUL": ("d.txt", b"one\0two"),
    "a saved data set of null": ("d/state.json", "null"),
    "a name that is not UTF-8": ("d/\udcff.jsonl", "no rows\n"),
    "an unknown kind": ("d.xyz", "text"),
}
IDS = {
    "negative": [1, -2, 3],
    "beyond the vocabulary": [1, 10**7],
    "a null": [1, None, 2],
    "a text": "1 2 3",
    "empty": [],
}
ROWS_OF = {
    "messages a text": {"messages": "hello"},
    "content a number": chat(5),
    "a weight of text": {
        "messages": [*chat("a")["messages"][:1], {"role": "assistant", "content": "b", "weight": "x"}]
    },
    "tools a number": chat("ok", tools=5),
    "template variables a list": chat("ok", chat_template_kwargs=[1]),
    "two formats": {"text": "a b", "messages": []},
    "labels of other lengths": {"input_ids": [1, 2, 3], "labels": [1]},
}
PAIRS = {
    "equal answers": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "a number chosen": {"prompt": "a", "chosen": 5, "rejected": "b"},
    "null rejected": {"prompt": "a", "chosen": "b", "rejected": None},
    "no prompt": {"chosen": "b", "rejected": "c"},
}
LABELS = {"a text": "good", "two": 2, "null": None, "a list": [True]}
ARGUMENTS = ("tools", "conversation", "tokenize", "add_generation_prompt", "return_dict", "chat_template")
CASES = [
    *(data(f"a file that is {name}", "data.jsonl", make) for name, make in ODD.items()),
    *(data(name, "data.jsonl", content) for name, content in CONTENTS.items()),
    *(data(name, file, content, *([f"data.train={file.split('/')[0]}"])) for name, (file, content) in FILES.items()),
    *(four(f"token ids, {name}", {"input_ids": ids}) for name, ids in IDS.items()),
    *(four(f"rows, {name}", row) for name, row in ROWS_OF.items()),
]
for name, value in (*((name, [1]) for name in ARGUMENTS), ("tools", None)):
    how = {"expect": (2,), "says": ("chat_template_kwargs", name)} if value else {"expect": (0,)}
    CASES.append(four(f"a template variable {name} = {value}", chat("ok", chat_template_kwargs={name: value}), **how))
CASES += [
    *(
        four(f"pairs, {name}", row, verb)
        for name, row in PAIRS.items()
        for verb in ("dpo", "reward")
        if (name, verb) != ("no prompt", "reward")
    ),
    *(four(f"labels, {name}", {"prompt": "a", "completion": "b", "label": one}, "kto") for name, one in LABELS.items()),
    four("margins of text", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "reward"),
    data(
        "evaluated on what is trained", "data.jsonl", ROWS, "data.eval=data.jsonl", expect=(0, 2), says=("data.eval",)
    ),
    data("a split that a file has not", "data.jsonl", ROWS, "data.train={path: data.jsonl, split: nope}"),
    data("a path of 5000 bytes", "data.jsonl", ROWS, f"data.train={'a/' * 2500}b.jsonl"),
    data("a cache that is a file", "data.jsonl", ROWS, "data.cache_dir=c.yaml"),
]
test_case = each_of(CASES, one_in=6)
