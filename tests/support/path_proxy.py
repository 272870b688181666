"""A proxy that serves a service below a path and strips that path, as JupyterHub's does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import urlsplit

PREFIX: Final = "/user/ada/proxy/8700"
_OWN: Final = frozenset({"host", "origin", "connection", "transfer-encoding", "accept-encoding"})


@contextlib.contextmanager
def path_proxy(url: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a service below `PREFIX`.

    Yields:
        Its address there, and the paths that were asked for outside of it.
    """
    outside: list[str] = []
    service = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                outside.append(self.path)
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _OWN}
            connection = HTTPConnection(service, timeout=30)
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection.request(self.command, self.path.removeprefix(PREFIX), body, headers)
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _OWN:
                        self.send_header(name, value)
                self.end_headers()
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                    self.wfile.flush()

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}", outside
    finally:
        server.shutdown()
        server.server_close()
