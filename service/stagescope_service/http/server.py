"""Runs uvicorn in a thread, for a process that also does other work, such as an actor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from stagescope_wire.errors import Conflict, InvalidInput, NotReady, StagescopeError

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 2
"""How long running requests (mostly polls) may still take when the server stops."""
BACKLOG: Final = 2048
_LISTENING: Final = "0A"
"""The state of a listening socket in Linux's /proc/net/tcp."""
HEADER_SECONDS: Final = 10.0
ENDLESS_PATHS: Final = frozenset({"/stream"})
"""Answers that only the client ends: a server that stops does not wait for them."""
UNREAD_SECONDS: Final = 60
"""A connection whose peer acknowledges no bytes of an answer for so long is closed."""


class _Protocol(H11Protocol):
    """HTTP/1.1 without an access log (a URL may hold a secret), with a deadline for each head.

    uvicorn's own timeout starts after the first answer, and each byte resets it. A connection that
    sends half of a head, or nothing, would stay open for ever.
    """

    header_seconds = HEADER_SECONDS

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline, and let the kernel close a connection whose peer reads nothing."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # the connection is closed already
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000
                )
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """Process bytes; a running request has its own limits."""
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        """Continue with the next request of the connection, which may have arrived already."""
        super().on_response_complete()
        if self._is_answering():
            self._cancel_deadline()

    def shutdown(self) -> None:
        """Let a running request finish, unless it has no end."""
        super().shutdown()
        if self._is_answering() and self.cycle.scope["path"] in ENDLESS_PATHS:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._cancel_deadline()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        # uvicorn declares it as always set: before the first request it is None.
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _update_deadline(self) -> None:
        """Have a deadline while a head is expected, and none during a request."""
        if self._is_answering():
            self._cancel_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class ApiServer:
    """Serves one app on one address; `start` and `stop` may be called repeatedly, in any thread.

    Usage:
        >>> server = ApiServer(app, host="127.0.0.1", port=8700)
        >>> server.start()
        >>> server.url
        >>> server.stop()
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        host: str = "127.0.0.1",
        port: int = 8700,
        header_seconds: float = HEADER_SECONDS,
    ) -> None:
        self.app = app
        self._protocol = type("_Protocol", (_Protocol,), {"header_seconds": header_seconds})
        self.host = host
        self._requested_port = port
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the server accepts connections."""
        thread, server = self._thread, self._server
        return thread is not None and thread.is_alive() and server is not None and server.started

    @property
    def port(self) -> int:
        """The bound port; the requested one while none is bound."""
        return self._requested_port if self._socket is None else int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL for a client on this host."""
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        if ":" in name and not name.startswith("["):
            name = f"[{name}]"
        return f"http://{name}:{self.port}"

    def start(self, *, wait_for_port: float = 0.0, timeout: float = 15.0) -> None:
        """Bind and serve; does nothing on a running server.

        Args:
            wait_for_port: seconds to wait for a port that another process still holds, such as
                the predecessor of this one.
            timeout: seconds until the server must have started.

        Raises:
            Conflict: the port is taken.
            InvalidInput: the address is not one of this host.
            NotReady: the server did not start in time.
        """
        with self._lock:
            if self.running:
                return
            self._stop(timeout=1.0)
            self._socket = _bind_with_retries(self.host, self._requested_port, wait_for_port)
            config = uvicorn.Config(
                self.app,
                http=self._protocol,
                lifespan="off",
                ws="none",
                log_config=None,  # keep the process's own logging
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
            self._server = uvicorn.Server(config)
            self._thread = threading.Thread(
                target=self._server.run, args=([self._socket],), name="api-server", daemon=True
            )
            self._thread.start()
            self._await_start(timeout)
        log.info("The API answers at %s", self.url)

    def stop(self, *, timeout: float = 10.0) -> None:
        """Let running requests finish within `GRACE_SECONDS`, and release the port."""
        with self._lock:
            self._stop(timeout)

    def _await_start(self, timeout: float) -> None:
        assert self._server is not None
        assert self._thread is not None
        deadline = time.monotonic() + timeout
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._stop(timeout=1.0)
                raise NotReady(
                    f"the API did not begin to serve {self.host}:{self._requested_port}",
                    advice="the log says why",
                )
            self._thread.join(0.005)

    def _stop(self, timeout: float) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive() and self._server is not None:
                self._server.force_exit = True
                self._thread.join(timeout)
        if self._socket is not None:
            self._socket.close()
        self._socket = self._server = self._thread = None


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the system's: each connection is a file.

    At the limit no connection can be accepted, and asyncio logs a traceback a second.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind_with_retries(host: str, port: int, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            return bind(host, port)
        except Conflict:
            if time.monotonic() >= deadline:
                raise
        pause.wait(0.1)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        Conflict: the port is taken, or needs rights that this user lacks.
        InvalidInput: the address is not one of this host.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            # Take over the port of a killed owner at once; that of a living one stays taken.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.set_inheritable(False)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise _bind_error(error, host, port) from error
    return listening


_API_PROCESS: Final = "ray::ApiActor"
"""What Ray names the process of a service's API."""


def holder_of(port: int) -> str | None:
    """Return which process listens on a port of this host; None where that is unknown.

    Linux shows it for processes of the same user only.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").strip().split("\n")[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # another user's, or ended in between
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                arguments = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                command = arguments.decode("utf-8", "replace").strip()[:200]
                return f"pid {process.name} ({command or 'no command line'})"
    return None


def _bind_error(error: OSError, host: str, port: int) -> StagescopeError:
    """Return the error that explains why an address cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        is_ours = holder is not None and _API_PROCESS in holder
        end = "`STAGESCOPE_HOME=... stagescope stop` of its home ends it" if is_ours else "stop it"
        return Conflict(
            f"port {port} of {host} is taken by {holder or 'another process'}"
            + (", another home's stagescope" if is_ours else ""),
            expected="a free port",
            advice=f"{end}, or choose another with --port or STAGESCOPE_PORT (0 = any free one)",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Conflict(
            f"port {port} of {host} may not be bound by this user", expected="a port over 1023"
        )
    return InvalidInput(
        f"{host}:{port} cannot be bound ({error.strerror or error})",
        expected="an address of this host",
        advice="set STAGESCOPE_HOST",
    )
