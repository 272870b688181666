"""The server over streamable HTTP: every request brings an access token of the service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import anyio.to_thread
import uvicorn
from cachetools import LRUCache
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stagescope.cli.agents.serving.server import make_server
from stagescope.cli.agents.tools import tools_of
from stagescope.session import Session
from stagescope_wire.errors import StagescopeError, Unauthorized

PATH: Final = "/mcp"
_SESSIONS: Final = 64
"""Access tokens whose sessions are kept."""


class Sessions:
    """The sessions of requests, one for each access token; thread-safe.

    Args:
        open_session: connects to the service with a token; None: without one.
    """

    def __init__(self, open_session: Callable[[str | None], Session]) -> None:
        self._open = open_session
        self._known: LRUCache[str | None, Session] = LRUCache(_SESSIONS)
        self._lock = threading.Lock()

    def of(self, token: str | None) -> Session:
        """Return the session with a token.

        Raises:
            Unauthorized: the service does not accept it.
        """
        with self._lock:
            found = self._known.get(token)
        if found is None:
            found = self._open(token)
            with self._lock:
                self._known[token] = found
        return found

    def of_request(self, request: object | None) -> Session:
        """Return the session with the token of a request."""
        assert isinstance(request, Request)
        return self.of(_token(request.headers))


def make_app(sessions: Sessions, *, operate: bool, host: str) -> ASGIApp:
    """Return the application that answers at `/mcp`."""
    server = make_server(sessions.of_request, tools_of(operate=operate, is_remote=True))
    app = server.streamable_http_app(streamable_http_path=PATH, stateless_http=True, host=host)
    return _TokenCheck(app, sessions)


def serve(app: ASGIApp, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    uvicorn.run(app, host=host, port=port, log_level="warning", ws="none")


class _TokenCheck:
    """Refuses requests without a token that the service accepts."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                token = _token(Headers(scope=scope))
                await anyio.to_thread.run_sync(self._sessions.of, token)
            except StagescopeError as error:
                status = 401 if isinstance(error, Unauthorized) else 503
                headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
                answer = JSONResponse({"error": str(error)}, status, headers)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _token(headers: Headers) -> str | None:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
