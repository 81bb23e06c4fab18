"""Control channel of a run: JSON over HTTP. One process serves it, all others call it.

The launcher of machine 0 serves it on topology.main_port; in a run of another launcher rank 0 serves it on a free port.
The handler called NAME answers `POST /NAME` with a JSON object. Each call has a JSON object, too, and a time limit.
A caller sends the run's secret in a header, so that no other program can give orders. Only handlers marked `open`, which are for
joining, accept calls without it. Nothing is pickled, and no call blocks for ever: if the server is stopped, or another program
listens at that port, the call fails after `timeout_s`.

torch's TCPStore is not used: a call to a stopped store has no time limit, and importing torch takes a second.
"""

from __future__ import annotations

import hmac
import http.client
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from packtrain.errors import Json, UserError
from packtrain.system import in_time

SECRET = "PACKTRAIN_SECRET"
"""Environment variable with the run's secret. A launcher or a batch script may give one to all machines."""
ADDRESS = "PACKTRAIN_CHANNEL"
"""Environment variable of a worker: HOST:PORT of the channel."""
PUBLISHED = "channel.json"
CALL_S = 5.0
MAX_BYTES = 16 * 2**20
_IDLE_S = 5  # for a caller that connects and sends nothing
_HEADER = "X-Packtrain-Secret"
# like Slurm's ports (plan/surroundings.py), below Linux's range for outgoing connections
_FIRST_PORT, _PORTS = 20_000, 10_000
_NAME = "packtrain"  # the Server header; a client recognises packtrain by it

Handler = Callable[[Json], Json]


class NoAnswer(OSError):
    """Nothing listens there (`nothing_listens`), or no answer came in time, or another program answered."""

    def __init__(self, what: str, *, nothing_listens: bool = False) -> None:
        super().__init__(what)
        self.nothing_listens = nothing_listens


class Rejected(OSError):
    """packtrain answered with an error. The server belongs to another run, or lacks the handler (`unknown`; it may come later)."""

    def __init__(self, what: str, *, unknown: bool = False) -> None:
        super().__init__(what)
        self.unknown = unknown


def new_secret() -> str:
    return secrets.token_urlsafe(24)


def free_port() -> int:
    """Find a free port below the range of outgoing connections. There it most likely stays free until it is used."""
    for port in (*(_FIRST_PORT + secrets.randbelow(_PORTS) for _ in range(50)), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise UserError("no port of this machine is free", where="topology.main_port", code="no-free-port")


class Server(ThreadingHTTPServer):
    """HTTP server of the channel, from its creation to `close`, in its own threads.

    `port` 0 takes a free one. Raises OSError (EADDRINUSE, EACCES) if the port cannot be bound.
    """

    address = "127.0.0.1"  # for callers of this machine
    daemon_threads = False  # so that `close` waits for them

    def __init__(self, port: int = 0, *, secret: str, host: str = "") -> None:
        super().__init__((host, port), _Request, bind_and_activate=False)
        self.socket.close()
        dual = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
        # HTTPServer's own bind looks up the host's full name, and blocks if the name server does not answer
        self.socket = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=dual)
        self.secret = secret
        self.port: int = self.socket.getsockname()[1]
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        threading.Thread(target=self.serve_forever, args=(0.1,), name="channel", daemon=True).start()

    def serve(self, name: str, handler: Handler, *, open: bool = False) -> None:
        """Register `handler` for `POST /name`. It runs in its own thread. `open` handlers need no secret."""
        self._handlers[name] = (handler, open)

    def close(self) -> None:
        """Answer the calls in progress and stop listening. The process may end after this."""
        self.shutdown()
        self.server_close()

    def answer(self, name: str, secret: str, body: bytes) -> tuple[int, Json]:
        """Return the HTTP status and the result of the handler `name`."""
        handler, is_open = self._handlers.get(name, (None, False))
        if handler is None:
            return 404, {"error": f"no handler is called {name!r} here"}
        if not is_open and not hmac.compare_digest(secret.encode(), self.secret.encode()):
            return 403, {"error": "this is the channel of another run"}
        try:
            return 200, handler(dict(json.loads(body)))
        except Exception as error:  # any error of a handler becomes HTTP 500
            return 500, {"error": f"{type(error).__name__}: {error}"}

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class _Request(BaseHTTPRequestHandler):
    server: Server
    timeout = _IDLE_S
    server_version = _NAME
    sys_version = ""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BYTES:
            self.send_error(413)
            return
        body = self.rfile.read(int(length))
        status, answer = self.server.answer(self.path[1:], self.headers.get(_HEADER, ""), body)
        reply = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the base class would write every request to stderr."""


class Client:
    """Thread-safe client of the channel at `address`:`port`. It never uses a proxy."""

    def __init__(self, address: str, port: int, *, secret: str = "") -> None:
        self.address, self.port, self.secret = address, port, secret

    def call(self, name: str, body: Json, *, timeout_s: float = CALL_S) -> Json:
        """Return the answer of the handler `name`. Raises NoAnswer or Rejected."""
        headers = {"Content-Type": "application/json", _HEADER: self.secret}
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout_s)
        try:
            connection.request("POST", f"/{name}", json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            content = reply.read(MAX_BYTES)
        except OSError as error:
            why, refused = error.strerror or str(error), isinstance(error, ConnectionRefusedError)
            raise NoAnswer(why or type(error).__name__, nothing_listens=refused) from error
        except http.client.HTTPException:
            reply, content = None, b""
        finally:
            connection.close()
        if reply is None or not str(reply.headers.get("Server", "")).startswith(_NAME):
            raise NoAnswer("something other than packtrain is listening there")
        answer = json.loads(content) if content.startswith(b"{") else {}
        if reply.status != 200:
            raise Rejected(answer.get("error", f"HTTP {reply.status}"), unknown=reply.status == 404)
        return answer


@dataclass(frozen=True, slots=True)
class Channel:
    """Content of logs/channel.json: address and secret of a run's server, and its process."""

    address: str
    port: int
    secret: str
    host: str
    pid: int


@contextmanager
def published(logs: Path, server: Server, address: str) -> Iterator[None]:
    """Keep the address of `server` in logs/channel.json inside the block, for packtrain doctor. Only the user can read it."""
    file, partial = logs / PUBLISHED, logs / f".{PUBLISHED}"
    channel = Channel(address, server.port, server.secret, socket.gethostname(), os.getpid())
    with suppress(OSError):
        partial.unlink(missing_ok=True)
        partial.touch(0o600, exist_ok=False)
        partial.write_text(json.dumps(asdict(channel)))
        partial.replace(file)
    try:
        yield
    finally:
        in_time(file.unlink, None)
