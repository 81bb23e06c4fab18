"""What comes and goes is tried again: a disk in the middle of a file, and the hub by a stand-in that fails first."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from packtrain.data.sources.files import read_lines
from packtrain.monitor import retries


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(retries, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(retries, "listeners", [told.append])
    retries.counted.clear()
    return told


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_is_read_on_where_its_disk_went_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pauses: list[str], name: str
) -> None:
    lines = [f"{number} {os.urandom(500).hex()}\n".encode() for number in range(4000)]
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wb") as file:
        file.writelines(lines)
    read, calls = io.FileIO.readinto, []

    class Stale(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            calls.append(self.tell())
            if len(calls) in (2, 4):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return read(self, buffer)

    monkeypatch.setattr(retries, "open", lambda path, *_: Stale(path), raising=False)
    assert list(read_lines(tmp_path / name)) == lines
    assert retries.counted == {"storage": 2} and "Stale file handle; trying again" in without_pauses[0]
    calls[:] = [0] * 50


def test_what_does_not_pass_is_raised_at_once_and_what_stays_in_the_end() -> None:
    tried: list[int] = []

    def fails(error: Exception) -> Any:
        tried.append(1)
        raise error

    for error, times in (
        (FileNotFoundError(2, "x"), 1),
        (ValueError("x"), 1),
        (TimeoutError("x"), 3),
        (OSError(errno.EIO, "x"), 3),
    ):
        tried.clear()
        with pytest.raises(type(error)):
            retries.patiently("storage", "a file", lambda error=error: fails(error))
        assert len(tried) == times


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub with one tokenizer, whose first answers about files are 503."""

    files: dict[str, bytes]
    failures = 2

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        content = Hub.files.get(name)
        status = 200 if content is not None or self.path == "/" else 404
        if name and Hub.failures:
            Hub.failures, status = Hub.failures - 1, 503
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        content = content if status == 200 and content is not None else b""
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{len(content)}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_hub_that_fails_first_is_tried_again_counted_and_told(tmp_path: Path) -> None:
    from packtrain.data.sources.quickstart import tokenizer

    tokenizer().save_pretrained(tmp_path / "files")
    Hub.files = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    Hub.files["config.json"] = json.dumps({"model_type": "llama"}).encode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "from packtrain.config.schema import Model\n"
        "from packtrain.data.tokens.pretrained import load_tokenizer\n"
        "from packtrain.monitor import retries\n"
        "retries.PAUSES_S = (0.1, 0.1)\n"
        "retries.listeners.append(print)\n"
        "print(len(load_tokenizer(Model(path='someone/words'))), dict(retries.counted))"
    )
    own = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, capture_output=True, text=True)
    server.shutdown()
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert said[-1].startswith(f"{len(tokenizer())} {{'hub': ") and len(said) > 1, ran.stdout
