"""The control channel of a run: JSON over HTTP, served by one process and called by all others, each call with a time limit.

It is served on topology.main_port by the launcher of machine 0, on a free port by rank 0 of a launch that is not ours.
`POST /NAME` with a JSON object is answered with an object by the handler of that name; `GET /` with a line of text, for people
with curl. Who calls must know the run's secret (a header), so that no other program can give orders; names that are `open` to
those who do not know it yet are for joining. Nothing is pickled, and no call waits for ever: a server that is stopped, or
another program at that port, is an error after `timeout_s`.

torch's TCPStore would serve too, but a call to one that is stopped has no time limit (and importing it takes a second).
"""

from __future__ import annotations

import hmac
import http.client
import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = "PACKTRAIN_SECRET"
"""Environment variable with the run's secret, where a launcher or a batch script gives one to all machines."""
ADDRESS = "PACKTRAIN_CHANNEL"
"""Environment variable of a worker: HOST:PORT of the channel."""
PUBLISHED = "channel.json"
CALL_S = 5.0
MOST_BYTES = 16 * 2**20
_IDLE_S = 30
_HEADER = "X-Packtrain-Secret"
_NAME = "packtrain"  # what the server calls itself: how a client tells another program

Handler = Callable[[dict[str, Any]], Mapping[str, Any]]


class NoAnswer(OSError):
    """There is no server (`refused`), or it has not answered in time."""

    def __init__(self, what: str, *, refused: bool = False) -> None:
        super().__init__(what)
        self.refused = refused


class NotOurs(NoAnswer):
    """Another program listens there."""


class Refused(OSError):
    """The server is a packtrain's, but not of this run, or does not know what it was asked (`unknown`: not yet, maybe)."""

    def __init__(self, what: str, *, unknown: bool = False) -> None:
        super().__init__(what)
        self.unknown = unknown


def new_secret() -> str:
    """A secret for a run."""
    return secrets.token_urlsafe(24)


class Server:
    """Serves the channel from its creation to `close`, in threads of its own.

    `port` 0 takes a free one. Raises OSError (EADDRINUSE, EACCES) where the port cannot be had.
    """

    def __init__(self, port: int = 0, *, secret: str, host: str = "") -> None:
        self.secret = secret
        self.about: Callable[[], str] = lambda: "a run of packtrain"
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        self._http = _Http(host, port, self._answer, lambda: self.about())
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="channel", daemon=True)
        self._thread.start()

    def serve(self, name: str, handler: Handler, *, open: bool = False) -> None:
        """Has `POST /name` answered by `handler`, which runs in a thread of its own; `open`: without the secret, too."""
        self._handlers[name] = (handler, open)

    def close(self) -> None:
        """Stops listening; calls that are being answered are."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(CALL_S)

    def _answer(self, name: str, secret: str, body: bytes) -> tuple[int, Mapping[str, Any]]:
        handler, is_open = self._handlers.get(name, (None, False))
        if handler is None:
            return 404, {"error": f"nothing is called {name!r} here"}
        if not is_open and not hmac.compare_digest(secret.encode(), self.secret.encode()):
            return 403, {"error": "this is the channel of another run"}
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            return 400, {"error": "a JSON object is wanted"}
        return 200, handler(asked)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[str, str, bytes], tuple[int, Mapping[str, Any]]],
        about: Callable[[], str],
    ) -> None:
        self.answer, self.about = answer, about
        dual = not host and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
        self._dual = dual
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        """Not as HTTPServer does, which asks the name server for the host's full name: it may be silent."""
        if self._dual:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who calls may hang up: nothing to say."""


class _Request(BaseHTTPRequestHandler):
    server: _Http
    timeout = _IDLE_S
    server_version = _NAME
    sys_version = ""

    def do_GET(self) -> None:
        if self.path == "/":
            self._reply(200, self.server.about().encode() + b"\n", "text/plain; charset=utf-8")
        else:
            self._reply(404, b"{}")

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= MOST_BYTES:
            self._reply(413, b"{}")
            return
        body = self.rfile.read(length)
        try:
            status, answer = self.server.answer(self.path[1:], self.headers.get(_HEADER, ""), body)
        except Exception as error:  # a bug of ours must not leave the caller without an answer
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        self._reply(status, json.dumps(answer).encode())

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not on stderr."""


class Client:
    """Calls the channel at `address`:`port`, never through a proxy; any number of threads may."""

    def __init__(self, address: str, port: int, *, secret: str = "") -> None:
        self.address, self.port, self.secret = address, port, secret

    def call(self, name: str, body: Mapping[str, Any], *, timeout_s: float = CALL_S) -> dict[str, Any]:
        """What the handler `name` answers. Raises NoAnswer, NotOurs or Refused."""
        headers = {"Content-Type": "application/json", _HEADER: self.secret}
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout_s)
        try:
            connection.request("POST", f"/{name}", json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            content = reply.read(MOST_BYTES)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise NoAnswer(error.strerror or str(error) or type(error).__name__, refused=refused) from error
        except http.client.HTTPException as error:  # what came is no HTTP
            raise self._not_ours() from error
        finally:
            connection.close()
        if not str(reply.headers.get("Server", "")).startswith(_NAME):
            raise self._not_ours()
        if reply.status != 200:
            raise Refused(_error_in(content) or f"HTTP {reply.status}", unknown=reply.status == 404)
        return json.loads(content)

    def _not_ours(self) -> NotOurs:
        return NotOurs(f"another program answers at {self.address}, port {self.port}")


def _error_in(said: bytes) -> str:
    try:
        return str(json.loads(said)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


@contextmanager
def published(logs: Path, server: Server, address: str) -> Iterator[None]:
    """Inside the block logs/channel.json says, to the user alone, where `server` is reached; packtrain doctor reads it."""
    file = logs / PUBLISHED
    about = {"address": address, "port": server.port, "secret": server.secret, "host": socket.gethostname()}
    with suppress(OSError):
        aside = file.with_name(f".{PUBLISHED}")
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            json.dump({**about, "pid": os.getpid()}, opened)
        os.replace(aside, file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
