"""Reach an address directly, or through the proxy that STAGESCOPE_PROXY names.

Clusters set http_proxy for outside addresses. Such a proxy cannot reach the cluster's own
addresses, and it can read the access token of a plain HTTP request. By default httpx uses it, and
does not know networks (10.0.0.0/8) in no_proxy. So no client of this project reads these variables.

httpx is imported only where a connection is made: see `discovery`.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from stagescope_wire.discovery import is_loopback, load_httpx, without_password
from stagescope_wire.errors import InvalidInput

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

VARIABLE: Final = "STAGESCOPE_PROXY"
_PORTS: Final = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_NAMING: Final = ("server", "via", "location")
"""Headers of an answer that say who sent it, or where it leads."""
_SHOWN: Final = 100
_REASON: Final = 300
"""Characters of the text of an error."""
_CREDENTIAL: Final = re.compile(r"\b(bearer|basic)\s+[^\s'\"]+", re.IGNORECASE)


def proxy_of(url: str) -> str | None:
    """Return the proxy for requests to `url`, or None; this host's loopback never has one.

    Raises:
        InvalidInput: STAGESCOPE_PROXY is not the URL of a proxy.
    """
    proxy = os.environ.get(VARIABLE)
    if not proxy or is_loopback(url):
        return None
    try:
        parts = urlsplit(proxy)
        is_usable = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidInput(
            f"{VARIABLE} is {without_password(proxy)!r:.200}, which is not the URL of a proxy",
            expected="http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT",
        )
    return proxy


def way_to(url: str) -> str:
    """Return " through the proxy ..." for a message about `url`; empty if the way is direct."""
    proxy = proxy_of(url)
    return f" through the proxy {without_password(proxy)} ({VARIABLE})" if proxy else ""


def first_address(url: str) -> tuple[str, int]:
    """Return the host and port that a request to `url` connects to: the proxy's, else its own."""
    parts = urlsplit(proxy_of(url) or url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80)


def transport(url: str) -> httpx.HTTPTransport:
    """Return what connects to `url`, for `httpx.Client(transport=..., trust_env=False)`.

    Raises:
        InvalidInput: STAGESCOPE_PROXY cannot be used.
    """
    load_httpx()
    import httpx

    return _made(httpx.HTTPTransport, url)


def async_transport(url: str) -> httpx.AsyncHTTPTransport:
    """Return what connects to `url` from an event loop; see `transport`."""
    load_httpx()
    import httpx

    return _made(httpx.AsyncHTTPTransport, url)


def _made(kind: Callable[..., T], url: str) -> T:
    try:
        return kind(**_options(url))
    except (ImportError, ValueError) as error:
        raise _unusable(error) from error


def _options(url: str) -> dict[str, Any]:
    # Loading the system's certificates takes 40 ms and is useless without TLS; an empty context
    # trusts no server. With TLS, trust_env makes httpx use SSL_CERT_FILE.
    is_plain = url.startswith("http:")
    verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if is_plain else True
    return {"verify": verify, "proxy": proxy_of(url), "trust_env": True}


def _unusable(error: ImportError | ValueError) -> InvalidInput:
    """Return the error of a proxy for which httpx lacks a library, or whose scheme it lacks."""
    known = "http://, https:// or socks5://HOST:PORT"
    if isinstance(error, ImportError):
        wrong, advice = f"the proxy of {VARIABLE} cannot be used: {error}", "pip install socksio"
    else:  # its text may hold the password
        wrong, advice = f"this httpx has no proxies of the scheme in {VARIABLE}", "update httpx"
    return InvalidInput(wrong, expected=known, advice=advice)


def unused_variable(url: str) -> str | None:
    """Return the variable that names a proxy for the scheme of `url`; None if none is set."""
    scheme = urlsplit(url).scheme
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name)), None)


def unused_proxy(url: str) -> str:
    """Return a hint if a variable names a proxy that is not used for `url`, else an empty text."""
    name = unused_variable(url)
    if name is None or is_loopback(url) or os.environ.get(VARIABLE):
        return ""
    return f"{name} is set and not used for it: if only a proxy reaches it, name that in {VARIABLE}"


def reason_of(error: Exception) -> str:
    """Return the text of an error of httpx, for a message.

    It names hosts and errnos. But where the request itself is wrong, it quotes headers, and one of
    them holds a credential: then only the type is named.
    """
    load_httpx()
    import httpx

    hides = isinstance(error, (httpx.LocalProtocolError, UnicodeError))
    text = "" if hides else _printable(_CREDENTIAL.sub(r"\1 ...", str(error)), _REASON)
    return text or type(error).__name__


def is_foreign(response: httpx.Response) -> bool:
    """Return whether an error came from another server than stagescope, such as a proxy.

    Every error of the service is a JSON object with a `code` that is a text. Read the response's
    body first.
    """
    if response.is_success:
        return False
    try:
        body = response.json()
    except ValueError:
        return True
    return not (isinstance(body, dict) and isinstance(body.get("code"), str))


def describe_foreign(url: str, response: httpx.Response) -> tuple[str, str]:
    """Return what a foreign answer to a request to `url` was, and what to do about it."""
    status, way = response.status_code, way_to(url)
    if way:
        who, advice = way, f"check that this proxy may reach it, or unset {VARIABLE}"
    else:
        is_proxy = "via" in response.headers or status == 407
        who = f" from {'a proxy' if is_proxy else 'a proxy or another server'}"
        advice = "check the URL, and the proxies between here and the service"
    if status >= 500:
        advice = f"the service may have stopped: try again; if that fails, {advice}"
    answer = f"{status} {_printable(response.reason_phrase)}".rstrip()
    wrong = f"the answer {answer} is not from the service at {url}: it came{who}"
    return wrong + who_sent(response), advice


def who_sent(response: httpx.Response) -> str:
    """Return the headers of an answer that name its sender, in brackets; empty if there is none."""
    named = [
        f"{name}: {_printable(value)}" for name in _NAMING if (value := response.headers.get(name))
    ]
    return f" ({', '.join(named)})" if named else ""


def _printable(text: str, most: int = _SHOWN) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:most]
