"""Authentication: bearer tokens, the cookie of a login, a proxy's header, and Host and Origin.

A token of the role read may GET, and POST what `READ_POSTS` names. The role operate may do
everything except read the audit. That includes `POST /events` and `POST /poll`, because a client
that sends numbers can mislead their readers. An admin may read the audit, too.

A browser trades a token for a cookie (`POST /login`), because it can neither keep a token safely
nor send one with every request. The cookie holds an HMAC, never the token. The settings may name a
header in which a reverse proxy reports who logged in. It is trusted only from that proxy.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stagescope_service.http.access_token_file import PERSON, RateLimits, Role, Token
from stagescope_service.http.access_tokens import Access, AccessTokens, token_path
from stagescope_service.http.problems import error_response
from stagescope_service.settings import Settings
from stagescope_wire.errors import (
    Forbidden,
    InvalidInput,
    StagescopeError,
    TooLarge,
    TooManyRequests,
    Unauthorized,
)

PREFIX: Final = "/v1"
"""Prefix of the API's version; without it every path means the same, see docs/api.md."""
HOME: Final = "the service's home (~/.stagescope, or STAGESCOPE_HOME)"
"""The folder of the tokens, for errors of those who have none: they are not told its path."""
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/login", "/logout", "/", "/docs", "/guide"})
"""Paths without a token: a supervisor checks the first two, and the others come before a login."""
WHOAMI: Final = "/whoami"
"""Answers without a login too, and then says that there is none."""
OPEN_FOLDERS: Final = ("/static/", "/guide/")
"""Paths below them need no token: the files of the page and the guide hold no data."""
READ_METHODS: Final = frozenset({"GET", "HEAD"})
READ_POSTS: Final = frozenset(
    {"/comparisons", "/operators/divergence", "/operators/tensors", "/triggers/test"}
)
"""POST routes that change nothing (their arguments are too long for a query): read is enough."""
REPORTS: Final = frozenset({"/events", "/poll", "/drain"})
"""Routes of trainings; their own limit keeps other requests from slowing a training."""
USER_HEADER: Final = "x-stagescope-user"
COOKIE: Final = "stagescope"
COOKIE_SECONDS: Final = 7 * 24 * 3600
_SAID: Final = str.maketrans("", "", "()")
"""Removes the parentheses, which end the service's own part of a name in the audit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; the audit stores it as text."""

    user: str
    """Name that the sender gives itself."""
    grade: Role | Literal["open"]
    address: str
    token: Token | None = None
    """None: it sent none, or one of the two of the home."""
    person: str | None = None
    """Person that the proxy named."""

    def __str__(self) -> str:
        if self.token is None and self.person is None:
            return f"{self.user} ({self.grade} token, {self.address})"
        also = "" if self.user == "unknown" else f", as {self.user.translate(_SAID)}"
        if self.person is None and self.token is not None:
            return f"token {self.token.name} ({self.grade}{also}, {self.address})"
        return f"person {self.person} ({self.grade} by proxy{also}, {self.address})"


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

    As a middleware no route can forget it, and it runs before any body is read. It takes the
    prefixes off the path first, `public_path` and `/v1`: nothing behind it knows them.

    Args:
        app: what answers.
        settings: limits, names, the proxy.
        access: checks tokens and logins; None: everybody may operate.
        public_path: path below which a proxy serves the API and that it may leave in requests,
            such as `/scope`; "": none.
    """

    def __init__(
        self, app: ASGIApp, *, settings: Settings, access: Access | None, public_path: str = ""
    ) -> None:
        self.app = app
        self.access = access
        self.public_path = public_path
        self.limits = RateLimits()
        self.proxy = None if settings.trusted_proxy_header is None else _Proxy(settings)
        self.max_body_bytes = settings.max_body_bytes
        self._operate_file = token_path(settings.home, "operate")
        self.hosts = _own_names(settings)
        self.origins = {origin.rstrip("/").lower() for origin in settings.allowed_origins}
        self.public_origin = _origin_of(settings.public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with a problem."""
        if scope["type"] != "http":
            # There are no websockets, and their handshake could not send a token.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        if self.public_path and scope["path"] == self.public_path:
            await RedirectResponse(f"{self.public_path}/")(scope, receive, send)
            return
        for prefix in (self.public_path, PREFIX):
            if scope["path"].startswith(f"{prefix}/"):
                # Not in a copy: a server that stops looks for `/stream` in its own scope.
                scope["path"] = scope["path"].removeprefix(prefix)
        if self.access is not None:
            await self.access.look()
        try:
            scope.setdefault("state", {})["caller"] = self.check(scope)
        except StagescopeError as error:
            seconds = error.seconds if isinstance(error, _OverLimit) else None
            await error_response(error, scope["path"], seconds)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def check(self, scope: Scope) -> Caller:
        """Return the sender of a request.

        Raises:
            Forbidden: a foreign Host or Origin, or a token without this right.
            Unauthorized: no token, or a wrong one.
            TooLarge: a declared body over the limit.
            TooManyRequests: the token has sent as many as it may.
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
        if not self._is_own_origin(origin, host) and origin not in self.origins:
            raise Forbidden(
                f"a page of {origin!r:.100} may not ask this service",
                expected="the service's own page, or an origin of STAGESCOPE_ALLOWED_ORIGINS",
                advice="behind a proxy, set STAGESCOPE_PUBLIC_URL to the address that people open",
            )

    def _is_own_origin(self, origin: str, host: str) -> bool:
        """Return whether a page of `origin` is this service's: a proxy may send another Host."""
        _, scheme_end, name = origin.partition("://")
        return origin == self.public_origin or (bool(scheme_end) and name == host.lower())

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        user = headers.get(USER_HEADER, "") or "unknown"
        if len(user) > 100 or not user.isprintable():
            raise InvalidInput(
                f"{USER_HEADER} is {user!r:.100}", expected="up to 100 printable characters"
            )
        address = (scope.get("client") or ("local", 0))[0]
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
            return Caller(user, "open", address)
        if self.access is None:
            return Caller(user, "operate", address)
        try:
            caller = self._authenticate(scope, headers, self.access, user, address)
        except Unauthorized:
            if scope["path"] != WHOAMI:
                raise
            return Caller(user, "open", address)
        is_read = scope["method"] in READ_METHODS or scope["path"] in READ_POSTS
        if caller.grade == "read" and not is_read:
            raise Forbidden(
                f"the read token may not {scope['method']} {scope['path']:.100}",
                expected=f"the operate token (by default in {self._operate_file} on the service's "
                "host), or another of this role",
            )
        if caller.token is not None:
            self._count(caller.token, is_report=scope["path"] in REPORTS)
        return caller

    def _authenticate(
        self, scope: Scope, headers: Headers, access: Access, user: str, address: str
    ) -> Caller:
        """Return the sender by its bearer token, else by the proxy's header, else by its cookie."""
        person = self.proxy.person(headers, address) if self.proxy else None
        cookie = Request(scope).cookies.get(COOKIE, "")
        if "authorization" in headers or (person is None and not cookie):
            token = _of_bearer(access, headers.get("authorization", ""))
            return _caller(user, token, address)
        if person is not None and self.proxy is not None:
            own = access.of_person(person)
            grade = self.proxy.role if own is None else own.role
            if grade is None:
                raise Forbidden(
                    f"{person} may not use this service",
                    expected="a person of `stagescope token add NAME --proxy-user PERSON`",
                )
            caller = Caller(user, grade, address, own, person)
        else:
            caller = _caller(user, _of_cookie(access, cookie), address)
        # The browser sends both automatically, whichever page asks it to.
        if scope["method"] not in READ_METHODS and not self._is_own_page(headers):
            raise Forbidden(
                "a login changes nothing on request of another page",
                expected="Sec-Fetch-Site: same-origin, or an Origin of this service",
                advice="programs send a bearer token instead of the cookie",
            )
        return caller

    def _is_own_page(self, headers: Headers) -> bool:
        """Return whether a browser says that a page of this service sent the request."""
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        origin = headers.get("origin", "").rstrip("/").lower()
        return self._is_own_origin(origin, headers.get("host", ""))

    def _count(self, token: Token, *, is_report: bool) -> None:
        seconds = self.limits.wait(token, is_report=is_report)
        if seconds:
            limit = token.reports_per_minute if is_report else token.per_minute
            what = "reports of a training" if is_report else "requests"
            raise _OverLimit(token.name, f"{limit} {what}", seconds)


class _OverLimit(TooManyRequests):
    """The error of a token over its limit, with the seconds until it may send again."""

    def __init__(self, name: str, limit: str, seconds: int) -> None:
        super().__init__(
            f"{name} has sent more than the {limit} that it may in a minute",
            advice=f"nothing was done; send the same again in {seconds} s",
        )
        self.seconds = seconds


class _Proxy:
    """Reads the person that a trusted reverse proxy names."""

    def __init__(self, settings: Settings) -> None:
        self.header = (settings.trusted_proxy_header or "").lower()
        role = settings.trusted_proxy_role
        self.role: Role | None = None if role == "none" else role
        """Role of people who are in no file."""
        self._networks = [ipaddress.ip_network(each) for each in settings.proxy_networks]

    def person(self, headers: Headers, address: str) -> str | None:
        """Return the person that the header names; None where the request has none.

        Raises:
            Forbidden: it does not come from the proxy.
            InvalidInput: it names several people, or is no valid name.
        """
        names = [name.strip() for name in headers.getlist(self.header)]
        if not any(names):
            return None
        if not self._is_trusted(address):
            raise Forbidden(
                f"{self.header} is not believed of {address}",
                expected="the address of the proxy, as STAGESCOPE_TRUSTED_PROXIES has it",
                advice="send a bearer token instead, and not this header",
            )
        if len(names) > 1 or not PERSON.fullmatch(names[0]):
            raise InvalidInput(
                f"{self.header} is {', '.join(names)!r:.200}", expected="the name of one person"
            )
        return names[0]

    def _is_trusted(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self._networks)


def _caller(user: str, token: Token, address: str) -> Caller:
    return Caller(user, token.role, address, token if token.name else None)


def _of_bearer(access: Access, authorization: str) -> Token:
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise Unauthorized(
            "the request has no bearer token",
            expected="Authorization: Bearer <token>, or the cookie of a login on the page",
            advice=f"the tokens are in read.token and operate.token of {HOME}",
        )
    token = access.of_bearer(text.strip())
    if token is None:
        raise Unauthorized(
            "the bearer token is not one of this service",
            expected=f"the content of read.token or operate.token of {HOME}, or a token of "
            "`stagescope token add` that was neither rotated nor removed",
        )
    return token


def _of_cookie(access: Access, cookie: str) -> Token:
    token = access.of_cookie(cookie)
    if token is None:
        raise Unauthorized(
            "the login is not one of this service, or its token was replaced",
            expected="a login with a token of today",
            advice=f"log in again with the content of read.token or operate.token of {HOME}",
        )
    return token


def _own_names(settings: Settings) -> frozenset[str]:
    public = urlsplit(settings.public_url or "").hostname or ""
    names: Iterable[str] = (
        "localhost", settings.host, socket.gethostname(), socket.getfqdn(), public,
    )  # fmt: skip
    return frozenset(name.lower() for name in (*names, *settings.allowed_hosts) if name)


def _origin_of(url: str | None) -> str | None:
    """Return the origin that browsers name for pages of an address."""
    parts = urlsplit(url or "")
    return f"{parts.scheme}://{parts.netloc}".lower() if url else None


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
