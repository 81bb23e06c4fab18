"""`packtrain report --serve`: the report of runs that go on, for a browser on this machine.

The open page asks for a newer one (page.js). Only then are changed files read. The URL has a secret, against other users of the
machine. The Host header must be ours, against a web site that lets its own domain point here.
"""

from __future__ import annotations

import hmac
import os
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from packtrain.errors import UserError, boundary
from packtrain.plan.network_settings import LOOPBACK
from packtrain.report.page import page, read_runs, scripts
from packtrain.run_folder import RunFolder

_PAUSE, _LONGEST_S = 5, 60  # a pause is 5 times as long as making the page; a killed run changes no file
_Made = tuple[str | Exception, list[tuple[int, int]], float, float]  # the page, its files, when it was begun and done
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class _Server(ThreadingHTTPServer):
    def __init__(self, port: int, folders: list[RunFolder]) -> None:
        super().__init__((LOOPBACK, port), _Request)
        self.secret, self._folders, self._lock = secrets.token_urlsafe(24), folders, threading.Lock()
        self._made: _Made = "", [], 0.0, 0.0

    def newest(self) -> str:
        """Return the page of the runs, the same for all browsers. Raises UserError if there is no run."""
        with self._lock:
            (text, before, began, done), now = self._made, time.monotonic()
            places = [place for run in self._folders for place in (run.root, run.logs, run.attempt.root, *run.records)]
            seen = [(at.st_size, at.st_ctime_ns) for place in places if place.exists() and (at := place.stat())]
            if not text or (now > done + _PAUSE * (done - began) and (seen != before or now > done + _LONGEST_S)):
                try:
                    text = page(read_runs(self._folders), live=True)
                except Exception as error:  # kept as long as a page: it took time, too
                    text = error
                self._made = text, seen, now, time.monotonic()
        if isinstance(text, Exception):
            raise text
        return text

    def handle_error(self, request: object, client_address: object) -> None:
        """Close the connection: the browser has gone."""


class _Request(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with the page (/SECRET/), or with a newer one without plotly.js (/SECRET/now)."""
        secret, found, name = self.path[1:].partition("/")
        # of any port: `ssh -L` may use another one, and a browser leaves out port 80
        ours = self.headers.get("Host", "").partition(":")[0].lower() in (LOOPBACK, "localhost")
        if not ours or not hmac.compare_digest(secret.encode(), self.server.secret.encode()):
            return self.send_error(403)
        if not found or name not in ("", "now"):
            return self.send_error(404)
        try:
            body = self.server.newest().replace(scripts()[1] if name else "", "").encode()
        except Exception as error:
            return self.send_error(503, "The run cannot be read now", str(error))
        tag = f'"{hash(body)}"'
        known = self.headers.get("If-None-Match") == tag
        own = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body)), "ETag": tag}
        self.send_response(304 if known else 200)
        for header, value in (own | _HEADERS).items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(b"" if known else body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: requests have the secret."""


def serve_runs(places: list[str], output: Path | None, port: int) -> int:
    """Serve the page of runs, and print its URL. Ends only by a signal or a UserError. Port 0 takes a free one."""
    if output or any("://" in place for place in places):
        raise UserError("it takes no -o and no URL", where="--serve", fix="Leave it out.", code="serve-options")
    with boundary(f"port {port} cannot be used", "--port", "Name another one, or 0 for a free one.", "report-port"):
        server = _Server(port, [RunFolder(Path(os.path.expanduser(place))) for place in dict.fromkeys(places)])
    server.newest()
    port = server.server_port
    print(f"http://{LOOPBACK}:{port}/{server.secret}/", flush=True)
    print(f"from another machine: ssh -L {port}:{LOOPBACK}:{port} HOST", file=sys.stderr)
    server.serve_forever()
    return 0
