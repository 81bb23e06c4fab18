"""The control channel: who may call, and that no call waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from packtrain.monitor.channel import Client, NoAnswer, Rejected, Server, new_secret


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(secret=new_secret())
    server.serve("sum", lambda body: {"sum": sum(body["of"])})
    server.serve("join", lambda body: {"welcome": body["name"]}, open=True)
    yield server
    server.close()


def test_a_call_is_answered_by_its_handler_and_one_that_fails_is_an_error_of_the_call(server: Server) -> None:
    client = Client("127.0.0.1", server.port, secret=server.secret)
    assert client.call("sum", {"of": [1, 2, 3]}) == {"sum": 6}
    assert Client("localhost", server.port, secret=server.secret).call("sum", {"of": []}) == {"sum": 0}
    with pytest.raises(Rejected, match="KeyError"):
        client.call("sum", {})


def test_only_joining_is_open_to_those_without_the_secret(server: Server) -> None:
    stranger = Client("127.0.0.1", server.port, secret="guessed")
    assert stranger.call("join", {"name": "n1"}) == {"welcome": "n1"}
    with pytest.raises(Rejected, match="another run"):
        stranger.call("sum", {"of": [1]})
    with pytest.raises(Rejected, match="no handler is called"):
        stranger.call("stop", {})


def test_what_is_being_answered_is_answered_before_the_server_ends(server: Server) -> None:
    begun, done, answers = threading.Event(), threading.Event(), []

    def slow(_: object) -> dict[str, bool]:
        begun.set()
        time.sleep(0.5)
        done.set()
        return {"answered": True}

    server.serve("slow", slow, open=True)
    caller = threading.Thread(target=lambda: answers.append(Client("127.0.0.1", server.port).call("slow", {})))
    caller.start()
    assert begun.wait(5)
    server.close()
    assert done.is_set()
    caller.join(5)
    assert answers == [{"answered": True}]


@pytest.mark.parametrize("sent", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])
def test_another_program_at_the_port_is_known_as_one(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(sent)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(NoAnswer):
            Client("127.0.0.1", listener.getsockname()[1]).call("join", {}, timeout_s=5)


def test_a_stopped_server_costs_no_more_than_the_limit() -> None:
    code = "from packtrain.monitor.channel import Server; s = Server(secret=''); print(s.port, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(NoAnswer):
            Client("127.0.0.1", port).call("join", {}, timeout_s=0.5)
        assert time.monotonic() - begun < 30
        process.kill()


def test_nobody_there_is_said_at_once_and_junk_is_refused_and_the_server_lives_on(server: Server) -> None:
    for junk in (
        b"\x00\xff\n\n",
        b"POST /sum HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /join HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(junk)
            assert b"200" not in connection.recv(2**10).split(b"\r\n")[0]
    assert Client("127.0.0.1", server.port).call("join", {"name": "n1"}) == {"welcome": "n1"}
    server.close()
    with pytest.raises(NoAnswer, match="refused"):
        Client("127.0.0.1", server.port).call("join", {})
