"""A proxy in front of an S3 API that refuses requests, or loses their answers, as a network and
a busy store do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LOST, RESET = "lost", "reset"
"""The request is done and its answer never arrives; the connection breaks before the request is
done."""
ANSWERS = {
    "conflict": (409, "ConditionalRequestConflict"),
    "throttled": (429, "TooManyRequests"),
    "internal": (500, "InternalError"),
    "slow down": (503, "SlowDown"),
    "bad gateway": (502, "BadGateway"),
}


@dataclass
class Proxy:
    """Forwards to the API at ``upstream``; the next ``times`` requests of ``method`` whose path
    has ``part`` fail.
    """

    upstream: str
    url: str = ""
    method: str = ""
    part: str = ""
    how: str = ""
    times: int = 0
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    server: ThreadingHTTPServer | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """Refuse connections from now on."""
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()

    def fail(self, how: str, method: str, part: str, times: int = 1) -> None:
        self.how, self.method, self.part, self.times = how, method, part, times

    def fault(self, method: str, path: str) -> str | None:
        """Return how this request fails, or None."""
        with self.lock:
            self.seen.append(f"{method} {path}")
            if not self.times or method != self.method or self.part not in path:
                return None
            self.times -= 1
            return self.how


@contextmanager
def proxied(upstream: str, port: int = 0) -> Iterator[Proxy]:
    """Yield a proxy to ``upstream`` that listens on loopback, on any free port for 0."""
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.fault(self.command, self.path)
            if fault == RESET:
                self.close_connection = True
            elif fault in ANSWERS:
                self.refuse(*ANSWERS[fault])
            else:
                self.answer(body, lose=fault == LOST)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        def refuse(self, status: int, code: str) -> None:
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def answer(self, body: bytes, *, lose: bool) -> None:
            connection = HTTPConnection(urlsplit(upstream).netloc)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() != "expect"
            }
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
            connection.close()
            if lose:
                self.close_connection = True
                return
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            if "Content-Length" not in response.headers:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    proxy.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    proxy.url = f"http://127.0.0.1:{proxy.server.server_port}"
    poll_interval = 0.01  # seconds until it sees that it is to end
    thread = threading.Thread(target=proxy.server.serve_forever, args=(poll_interval,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
