"""A real nginx before a service, configured as docs/behind-a-proxy.md says."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pytest
from tests.support.ray_nodes import free_port

Style: TypeAlias = Literal["removes", "keeps"]
"""What a proxy does with the path below which it serves."""
DOCUMENTED: Final = Path(__file__).parents[2] / "docs/behind-a-proxy.md"
PATH: Final = "/scope"
_REQUIRED: Final = "TEST_NGINX"
"""Set to `required` where a missing nginx is a failure and not a reason to skip."""
_SECONDS: Final = 30.0
_BLOCK: Final = re.compile(r"^```nginx\n(.*?)^```", re.M | re.S)
_LOCATION: Final = re.compile(r"^  location .*?^  \}\n", re.M | re.S)
# nginx's own defaults are files of the system. `user` counts for root alone.
_AROUND: Final = """\
user root; pid {0}/pid; error_log {0}/log; worker_processes 1;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fastcgi;
  uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;
{1}
}}
"""


@dataclasses.dataclass(frozen=True)
class Front:
    """Where a proxy will serve: a service must know it when it starts."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        """The address that people open."""
        return f"https://localhost:{self.port}{PATH}"

    @property
    def certificate(self) -> Path:
        """It signs itself."""
        return self.folder / "tls.crt"


def front(folder: Path) -> Front:
    """Choose where to serve; skip, or fail where it is required, if nginx is missing."""
    if not (_program("nginx") and _program("openssl")):
        (pytest.fail if os.environ.get(_REQUIRED) == "required" else pytest.skip)(
            "nginx or openssl is not installed: Debian has them as `nginx` and `openssl`"
        )
    return Front(folder, free_port())


@contextlib.contextmanager
def nginx(before: str, at: Front, style: Style = "removes") -> Iterator[None]:
    """Serve the service of the address `before` at `at`."""
    (at.folder / "nginx.conf").write_text(_AROUND.format(at.folder, _server(before, at, style)))
    subprocess.run(
        [_program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", at.folder / "tls.key", "-out", at.certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    command = [_program("nginx"), "-p", str(at.folder), "-c", "nginx.conf", "-g", "daemon off;"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _await_port(running, at.port)
        yield
    finally:
        running.terminate()
        running.communicate(timeout=_SECONDS)


def _server(before: str, at: Front, style: Style) -> str:
    """Return the documented configuration with the names, files and ports of a test."""
    blocks: list[str] = _BLOCK.findall(DOCUMENTED.read_text(encoding="utf-8"))
    server, kept = blocks
    if style == "keeps":
        server = _LOCATION.sub(lambda _: kept, server)
    for documented, own in (
        ("listen 443 ssl", f"listen 127.0.0.1:{at.port} ssl"),
        ("server_name HOST", "server_name localhost"),
        ("/etc/nginx/tls", str(at.folder)),
        ("http://127.0.0.1:8700", before),
        (f"location {PATH}/", f"location {PATH}/"),
    ):
        assert documented in server, f"{DOCUMENTED.name} has no {documented!r}"
        server = server.replace(documented, own)
    return server


def _await_port(running: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while running.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    running.kill()
    raise AssertionError(f"nginx does not serve: {running.communicate()[1]}")


def _program(name: str) -> str:
    """Return the path of a program; "" if it is not installed."""
    return shutil.which(name, path="/usr/sbin:/usr/bin") or ""
