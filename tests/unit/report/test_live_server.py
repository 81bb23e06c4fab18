"""The server of `report --serve`: its answers, its cost and its end. tests/report has the page in a browser."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import packtrain

from packtrain.report import live
from packtrain.run_folder import RunFolder
from tests.ports import free_port
from tests.unit.report.run_folders import leave_run, lines_of
from tests.waiting import LONG_S

Answer = tuple[int, dict[str, str], bytes]


class Connection(http.client.HTTPConnection):
    """One that also sends what is not ASCII."""

    def _encode_request(self, request: str) -> bytes:
        return request.encode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[live._Server]:
    made = live._Server(0, [leave_run(tmp_path / "run")])
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server: live._Server, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = Connection("127.0.0.1", server.server_port, timeout=LONG_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_only_the_url_with_the_secret_under_a_name_of_this_machine_is_answered(
    server: live._Server, capfd: pytest.CaptureFixture[str]
) -> None:
    own, port = f"/{server.secret}", server.server_port
    refused = ["/", "/now", own[:-1], own[:-1] + "/now", f"/é{own[2:]}/", f"/?{server.secret}", "/../" + own]
    assert {path: ask(server, path)[0] for path in refused} == dict.fromkeys(refused, 403)
    unknown = [own, *(f"{own}/{path}" for path in ("run", "metrics.jsonl", "../../etc/passwd", "%2e%2e/", "now/", "?"))]
    assert {path: ask(server, path)[0] for path in unknown} == dict.fromkeys(unknown, 404)
    hosts = ["evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "", f"[::1]:{port}"]
    assert {host: ask(server, f"{own}/", Host=host)[0] for host in hosts} == dict.fromkeys(hosts, 403)
    others = ("POST", "PUT", "DELETE", "OPTIONS", "TRACE")
    assert {method: ask(server, f"{own}/", method)[0] for method in others} == dict.fromkeys(others, 501)
    # a browser names no port 80, and `ssh -L` may lead here from another port
    good = [f"localhost:{port}", f"LocalHost:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"]
    assert {host: ask(server, f"{own}/now", Host=host)[0] for host in good} == dict.fromkeys(good, 200)
    status, headers, body = ask(server, f"{own}/")
    assert status == 200 and body.endswith(b"</html>")
    wanted = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
    assert headers.items() >= wanted.items()
    assert "".join(capfd.readouterr()) == ""  # no request is logged, and so no secret


def test_no_other_address_of_this_machine_is_listened_to(server: live._Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for other in ("127.0.0.2", "::1"):
        with pytest.raises(OSError):
            socket.create_connection((other, server.server_port), 5)


def test_a_change_is_sent_once_and_without_plotly(server: live._Server, tmp_path: Path) -> None:
    own = f"/{server.secret}/"
    whole, (status, headers, body) = ask(server, own), ask(server, f"{own}now")
    assert status == 200 and len(body) < 200_000 < 1_000_000 < len(whole[2])
    assert b"connect-src 'self'; style" in body
    assert "connect-src" not in live.page(live.read_runs([RunFolder(tmp_path / "run")]))
    assert ask(server, f"{own}now", If_None_Match=headers["ETag"])[::2] == (304, b"")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": 1.0}\n{"step": 32, "lo')  # torn, as a line is that is being written
    server._made = (*server._made[:2], 0.0, 0.0)  # long ago
    status, again, body = ask(server, f"{own}now", If_None_Match=headers["ETag"])
    assert status == 200 and again["ETag"] != headers["ETag"] and b"31 of 30 steps" not in body and b"31 steps" in body


def test_a_page_is_made_for_changes_and_at_most_a_sixth_of_the_time(
    server: live._Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, made = [1000.0], list[float]()

    def slow(*given: object, live: bool) -> str:
        made.append(clock[0])
        clock[0] += 2
        return f"page {len(made)}"

    monkeypatch.setattr(live, "page", slow)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])

    def at(now: float) -> str:
        clock[0] = now
        return server.newest()

    assert [at(1000), at(1020)] == ["page 1", "page 1"]  # nothing has changed
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert [at(1011), at(1012), at(1013), at(1030)] == ["page 1", "page 1", "page 2", "page 2"]
    assert at(1100) == "page 3"  # a killed run changes no file
    (tmp_path / "run" / "logs" / "diagnosis.txt").write_text("rank 0 hangs\n")
    assert at(1113) == "page 4" and made == [1000, 1013, 1100, 1113]


def test_a_run_that_has_just_begun_has_no_step_yet_and_one_that_is_gone_gets_no_answer(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", lines=[], status=None)
    folder.metrics.unlink()
    server = live._Server(0, [folder])
    assert "No step yet" in server.newest() and 'id="plotly"' in server.newest()
    (tmp_path / "run").rename(tmp_path / "moved")
    server._made = (*server._made[:2], 0.0, 0.0)
    with pytest.raises(live.UserError, match="no such folder"):
        server.newest()
    server.server_close()


def test_a_run_that_cannot_be_read_is_not_read_at_each_request_and_is_back_when_it_can(
    server: live._Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, read = [1000.0], list[float]()

    def slow(folders: list[RunFolder]) -> list[object]:
        read.append(clock[0])
        clock[0] += 2
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(live, "read_runs", slow)
        patch.setattr(live.time, "monotonic", lambda: clock[0])
        for _ in range(3):
            status, _, body = ask(server, f"/{server.secret}/now")
            assert status == 503 and b"Permission denied" in body
        assert read == [1000]
        clock[0] = 1013
        (tmp_path / "run" / "metrics.jsonl").chmod(0o600)  # changes neither size nor time of the last line
        assert ask(server, f"/{server.secret}/")[0] == 503 and read == [1000, 1013]
    server._made = (*server._made[:2], 0.0, 0.0)
    assert ask(server, f"/{server.secret}/")[0] == 200


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", lines=lines_of(3))
    taken = socket.create_server(("127.0.0.1", free_port()))
    port = str(taken.getsockname()[1])
    cases = {
        ("none", "--serve"): "no-run",
        ("run", "none", "--serve"): "no-run",
        ("run", "--serve", "-o", "x.html"): "serve-options",
        ("s3://bucket/run", "--serve"): "serve-options",
        ("run", "--port", port): "report-port",  # which means --serve
    }
    with taken:
        for arguments, code in cases.items():
            done = packtrain("report", *arguments, folder=tmp_path)
            assert (done.returncode, done.stdout) == (2, ""), arguments
            assert f"[{code}]" in done.stderr, arguments
    assert not [*tmp_path.rglob("*.html")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.sample("2")
def test_the_command_prints_its_url_and_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    leave_run(tmp_path / "run")
    command = [sys.executable, "-m", "packtrain", "report", "run", "--serve"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout and process.stderr
        url = process.stdout.readline()
        _, _, address, secret, rest = url.split("/")
        port = int(address.removeprefix("127.0.0.1:"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
        connection.request("GET", f"/{secret}/now")
        assert connection.getresponse().read().endswith(b"</html>") and rest == "\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + number and out == ""
    assert err.count(f"ssh -L {port}:127.0.0.1:{port} ") == 1 and secret not in err and "Traceback" not in err
