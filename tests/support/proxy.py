"""A forward proxy on loopback that notes what it sees, and forwards or answers by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@dataclasses.dataclass
class Proxy:
    """What a proxy saw.

    Attributes:
        url: its own.
        status: with which it answers by itself; None: it forwards.
        tokens: the Authorization header of each request.
    """

    url: str = ""
    status: int | None = 503
    tokens: list[str | None] = dataclasses.field(default_factory=list)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        proxy = self.server.proxy
        proxy.tokens.append(self.headers["Authorization"])
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if proxy.status is not None:
            self._send(proxy.status, b"<html>a proxy</html>", "text/html")
            return
        headers = {k: v for k, v in self.headers.items() if not k.lower().startswith("proxy-")}
        asked = urllib.request.Request(
            self.path, data=body or None, headers=headers, method=self.command
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(asked, timeout=30) as answer:
                self._send(answer.status, answer.read(), answer.headers["content-type"])
        except urllib.error.HTTPError as error:
            with error:
                self._send(error.code, error.read(), error.headers["content-type"])

    def _send(self, status: int, body: bytes, media_type: str) -> None:
        self.send_response(status)
        self.send_header("Via", "1.1 squid.test")
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = do_CONNECT = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on the test's output."""


@contextlib.contextmanager
def running_proxy() -> Iterator[Proxy]:
    """Run a proxy on loopback for the duration of the block."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.proxy = proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def set_proxy(monkeypatch: pytest.MonkeyPatch, proxy: Proxy, no_proxy: str = "") -> None:
    """Name a proxy in the environment, as the images of many clusters do."""
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.setenv("no_proxy", no_proxy)
    monkeypatch.setenv("NO_PROXY", no_proxy)
