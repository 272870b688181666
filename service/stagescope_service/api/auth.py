"""Authentication: two bearer tokens, the cookie of a login, and the checks of Host and Origin.

The read token allows GET and the POST routes of `READ_POSTS`. The operate token allows everything,
`POST /events` and `POST /poll` included: a client that may send numbers may mislead their readers.

A browser trades a token for a cookie (`POST /login`), because it can neither keep a token safely
nor send one with every request. The cookie holds an HMAC of the token, never the token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from stagescope.wire.errors import Forbidden, InvalidInput, StagescopeError, TooLarge, Unauthorized
from stagescope_service.api.problems import error_response
from stagescope_service.settings import Settings

log = logging.getLogger(__name__)

Grade = Literal["read", "operate"]

PREFIX: Final = "/v1"
"""The version of the API: below it every path is the one without it, see docs/api.md."""
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/login", "/logout", "/", "/docs"})
"""Need no token: a supervisor checks the first two, and the others come before a login."""
WHOAMI: Final = "/whoami"
"""Answers without a login too: that there is none."""
OPEN_FOLDER: Final = "/static/"
"""Paths below it need no token: the files of the page hold no data."""
READ_METHODS: Final = frozenset({"GET", "HEAD"})
READ_POSTS: Final = frozenset(
    {"/comparisons", "/operators/divergence", "/operators/tensors", "/triggers/test"}
)
"""POST routes that change nothing (their arguments are too long for a query): read is enough."""
USER_HEADER: Final = "x-stagescope-user"
TOKEN_BYTES: Final = 32
COOKIE: Final = "stagescope"
COOKIE_SECONDS: Final = 7 * 24 * 3600
_MAX_LOGINS: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class AccessTokens:
    """The two tokens of a service, left out of every repr and log."""

    read: str = dataclasses.field(repr=False)
    operate: str = dataclasses.field(repr=False)

    @classmethod
    def load(cls, settings: Settings) -> AccessTokens:
        """Read the tokens from the settings or from their files, which are created if missing.

        Raises:
            Forbidden: a token's file is not a plain file of this user.
            InvalidInput: a token is too short, or both are equal.
        """
        given = {"read": settings.read_token, "operate": settings.operate_token}
        tokens = {
            grade: secret.get_secret_value() if secret else _read_token_file(settings.home, grade)
            for grade, secret in given.items()
        }
        for grade, token in tokens.items():
            if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
                raise InvalidInput(
                    f"the {grade} token cannot be used",
                    expected="16 or more printable ASCII characters without spaces",
                    advice=f"delete {token_path(settings.home, grade)} to have a new one made",
                )
        if hmac.compare_digest(tokens["read"], tokens["operate"]):
            raise InvalidInput("the read and the operate token are one", expected="two tokens")
        return cls(**tokens)

    def grade(self, token: str) -> Grade | None:
        """Return what `token` allows, in constant time."""
        encoded = token.encode("utf-8", "surrogateescape")
        may_operate = hmac.compare_digest(encoded, self.operate.encode())
        may_read = hmac.compare_digest(encoded, self.read.encode())
        return "operate" if may_operate else "read" if may_read else None

    def login(self, grade: Grade, cookie: str = "") -> str:
        """Return the cookie of a browser that presented the token of `grade`.

        Browsers send a host's cookies to all of its ports, where tunnels may lead to several
        services. The logins of others that `cookie` (the one so far) holds are kept.
        """
        own = self._keys[grade]
        return ".".join([own, *self._others(cookie)][:_MAX_LOGINS])

    def logout(self, cookie: str) -> str:
        """Return a cookie without the logins of this service; empty where none is left."""
        return ".".join(self._others(cookie))

    def grade_of(self, cookie: str) -> Grade | None:
        """Return what the logins of a cookie allow, in constant time."""
        logins = [login.encode("utf-8", "surrogateescape") for login in cookie.split(".")]
        found: Grade | None = None
        for grade, key in self._keys.items():
            same = [hmac.compare_digest(login, key.encode()) for login in logins[:_MAX_LOGINS]]
            found = grade if any(same) else found
        return found

    def _others(self, cookie: str) -> list[str]:
        return [login for login in cookie.split(".") if login and login not in self._keys.values()]

    @property
    def _keys(self) -> dict[Grade, str]:
        """What a cookie holds for each grade, the higher one last."""
        tokens: dict[Grade, str] = {"read": self.read, "operate": self.operate}
        return {
            grade: hmac.new(token.encode(), f"login {grade}".encode(), hashlib.sha256).hexdigest()
            for grade, token in tokens.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, for the audit."""

    user: str
    grade: Grade | Literal["open"]
    address: str

    def __str__(self) -> str:
        return f"{self.user} ({self.grade} token, {self.address})"


def token_path(home: Path, grade: str) -> Path:
    """Return the file of the token of `grade`."""
    return home / f"{grade}.token"


def check_bind(settings: Settings, tokens: AccessTokens | None) -> None:
    """Refuse to serve other hosts without tokens.

    Raises:
        Forbidden: a bind beyond loopback, and no tokens.
    """
    if tokens is None and not _is_loopback(settings.host):
        raise Forbidden(
            f"a bind to {settings.host} without tokens would let anybody operate the service",
            expected="auth = true, or a loopback host",
            advice="leave STAGESCOPE_AUTH unset, or bind 127.0.0.1 and use a tunnel",
        )


class Guard:
    """ASGI middleware that checks Host, Origin, token and declared size of every request.

    As a middleware no route can forget it, and it runs before any body is read. It takes `/v1` off
    the path first: nothing behind it knows the prefix.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, tokens: AccessTokens | None) -> None:
        self.app = app
        self.tokens = tokens
        self.max_body_bytes = settings.max_body_bytes
        self.hosts = _own_names(settings)
        self.origins = {origin.rstrip("/").lower() for origin in settings.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with a problem."""
        if scope["type"] != "http":
            # There are no websockets, and their handshake could not send a token.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        if scope["path"].startswith(f"{PREFIX}/"):
            # Not in a copy: a server that stops looks for the path of `/stream` in its own scope.
            scope["path"] = scope["path"].removeprefix(PREFIX)
        try:
            scope.setdefault("state", {})["caller"] = self.check(scope)
        except StagescopeError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def check(self, scope: Scope) -> Caller:
        """Return the sender of a request.

        Raises:
            Forbidden: a foreign Host or Origin, or a token that may not do this.
            Unauthorized: no token, or a wrong one.
            TooLarge: a declared body over the limit.
        """
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        if (origin := headers.get("origin")) is not None:
            self._check_origin(origin, headers.get("host", ""))
        caller = self._caller(scope, headers)
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self.max_body_bytes:
            raise TooLarge(
                f"a body of {length[:20]} bytes", expected=f"at most {self.max_body_bytes} bytes"
            )
        return caller

    def _check_host(self, host: str) -> None:
        name = _host_name(host)
        # A DNS-rebinding page sends its own name as Host: IP addresses are safe.
        if name in self.hosts or _is_address(name):
            return
        raise Forbidden(
            f"the Host header says {host!r:.100}",
            expected=f"one of {sorted(self.hosts)}, or an IP address",
            advice="add the name with STAGESCOPE_ALLOWED_HOSTS when the service is started",
        )

    def _check_origin(self, origin: str, host: str) -> None:
        origin = origin.rstrip("/").lower()
        if origin.partition("://")[2] == host.lower() and "://" in origin:
            return
        if origin not in self.origins:
            raise Forbidden(
                f"a page of {origin!r:.100} may not ask this service",
                expected="the service's own page, or an origin of STAGESCOPE_ALLOWED_ORIGINS",
            )

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        user = headers.get(USER_HEADER, "") or "unknown"
        if len(user) > 100 or not user.isprintable():
            raise InvalidInput(
                f"{USER_HEADER} is {user!r:.100}", expected="up to 100 printable characters"
            )
        address = (scope.get("client") or ("local", 0))[0]
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER):
            return Caller(user, "open", address)
        if self.tokens is None:
            return Caller(user, "operate", address)
        cookie = Request(scope).cookies.get(COOKIE, "")
        try:
            if "authorization" in headers or not cookie:
                grade = self._grade(headers.get("authorization", ""))
            else:
                grade = self._grade_of_login(scope["method"], headers, cookie)
        except Unauthorized:
            if scope["path"] != WHOAMI:
                raise
            return Caller(user, "open", address)
        is_read = scope["method"] in READ_METHODS or scope["path"] in READ_POSTS
        if grade == "read" and not is_read:
            raise Forbidden(
                f"the read token may not {scope['method']} {scope['path']:.100}",
                expected="the operate token (home/operate.token)",
            )
        return Caller(user, grade, address)

    def _grade(self, authorization: str) -> Grade:
        assert self.tokens is not None
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized(
                "the request has no bearer token",
                expected="Authorization: Bearer <token>, or the cookie of a login on the page",
                advice="the tokens are in read.token and operate.token of the service's home",
            )
        grade = self.tokens.grade(token.strip())
        if grade is None:
            raise Unauthorized(
                "the bearer token is not one of this service",
                expected="the content of read.token or operate.token of the service's home",
            )
        return grade

    def _grade_of_login(self, method: str, headers: Headers, cookie: str) -> Grade:
        assert self.tokens is not None
        grade = self.tokens.grade_of(cookie)
        if grade is None:
            raise Unauthorized(
                "the login is not one of this service, or its token was replaced",
                expected="a login with a token of today",
                advice="log in again with the content of read.token or operate.token",
            )
        if method not in READ_METHODS and not _is_own_page(headers):
            raise Forbidden(
                "a login changes nothing on request of another page",
                expected="Sec-Fetch-Site: same-origin, or an Origin of this service",
                advice="programs send a bearer token instead of the cookie",
            )
        return grade


def _is_own_page(headers: Headers) -> bool:
    """Return whether a browser says that a page of this service sent the request."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    host = headers.get("origin", "").lower().partition("://")[2]
    return bool(host) and host == headers.get("host", "").lower()


def _read_token_file(home: Path, grade: str) -> str:
    """Return the content of a token's file, which is created if missing."""
    path = token_path(home, grade)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_symlink() and not path.exists():
        _create_token_file(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Forbidden(
            f"the token file {path} cannot be read ({error.strerror})",
            expected="a plain file of the service's user",
        ) from error
    with os.fdopen(descriptor, "r", encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Forbidden(
                f"the token file {path} is not a plain file of this user",
                expected=f"a file of user {os.geteuid()}",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            log.warning("token file %s was readable by others: its mode is now 0600", path)
            os.fchmod(file.fileno(), 0o600)
        return file.read(1000).strip()


def _create_token_file(path: Path) -> None:
    # Linked when complete: another service that starts now cannot read a part of a token.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _own_names(settings: Settings) -> frozenset[str]:
    public = urlsplit(settings.public_url or "").hostname or ""
    names: Iterable[str] = (
        "localhost", settings.host, socket.gethostname(), socket.getfqdn(), public,
    )  # fmt: skip
    return frozenset(name.lower() for name in (*names, *settings.allowed_hosts) if name)


def _host_name(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def caller_of(request: Request) -> Caller:
    """Return the sender of `request`, as the guard found it."""
    caller: Caller = request.state.caller
    return caller
