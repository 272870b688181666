"""Find the service: from arguments, then the environment, then the file that `serve` wrote.

`$STAGESCOPE_HOME/service.json` (default `~/.stagescope/service.json`, mode 0600) holds
`{"url", "host", "read_token_file", "operate_token_file", "cluster_address", "started"}`. Its
tokens are sent to its own URL only, never to a URL from another source. A loopback URL is valid on
one host: a process on another host that reads the file (a shared home) ignores it.

httpx is imported only where a URL is parsed: every training process checks for the file, and most
find none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from pathlib import Path
from typing import Final

from stagescope.wire.errors import InvalidInput, Unauthorized, Unreachable
from stagescope.wire.nonfinite import JsonObject

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_PASSWORD: Final = re.compile(r"//[^/@\s]*@")


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceLocation:
    """A service's URL, where the URL comes from, and its tokens (None: unknown)."""

    url: str
    found: str
    read_token: str | None = dataclasses.field(default=None, repr=False)
    operate_token: str | None = dataclasses.field(default=None, repr=False)
    note: str = ""
    """A file that could not be read, for the message of an error that follows from it."""


def service_file() -> Path:
    """Return the path of service.json, whether it exists or not."""
    return Path(os.environ.get("STAGESCOPE_HOME") or "~/.stagescope").expanduser() / "service.json"


def find(url: str | None = None, token: str | None = None) -> ServiceLocation:
    """Return the URL and the tokens of the service to connect to.

    Raises:
        Unreachable: no service is known on this host.
        InvalidInput: a URL that is not http or https.
    """
    path = service_file()
    written, problem = _read(path)
    token = token or os.environ.get("STAGESCOPE_TOKEN") or None
    note = ""
    if token is None:
        token, note = _token(os.environ.get("STAGESCOPE_TOKEN_FILE"))
    if url is not None:
        found = "the URL given"
    elif os.environ.get("STAGESCOPE_URL"):
        url, found = os.environ["STAGESCOPE_URL"], "STAGESCOPE_URL"
    elif written and not (problem := _other_host(written, path)):
        url, found = str(written["url"]), str(path)
    else:
        raise Unreachable(
            f"no service is known here: no URL was given, STAGESCOPE_URL is not set, {problem}",
            expected="one of the three",
            advice="start one with `stagescope serve`, or name one: http://HOST:8700",
        )
    base = check_url(url)
    if token is not None:
        return ServiceLocation(base, found, token, token)
    if written and _same_service(base, written["url"]):
        read, read_problem = _token(written.get("read_token_file"))
        operate, operate_problem = _token(written.get("operate_token_file"))
        # Both tokens allow reading: an operator's machine may hold the operate token alone.
        if not (read and operate):
            note = note or read_problem or operate_problem
        return ServiceLocation(base, found, read or operate, operate, note)
    other = f"{path} has tokens for another URL" if written else problem
    return ServiceLocation(base, found, note=note or other)


def check_url(url: str) -> str:
    """Return `url` without its trailing slash.

    Raises:
        InvalidInput: not an http or https URL, or one with a query or a password.
    """
    import httpx

    shown = _PASSWORD.sub("//...@", repr(url))
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidInput(f"{shown} is not a URL", expected="http://HOST:8700") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.userinfo:
        raise InvalidInput(
            f"{shown} is not the URL of a service", expected="http://HOST:8700 or https://HOST/PATH"
        )
    return str(parsed).rstrip("/")


def is_loopback(url: str) -> bool:
    """Return whether `url` names this machine by a loopback name."""
    import httpx

    return httpx.URL(url).host in _LOOPBACK


def _other_host(written: JsonObject, path: Path) -> str:
    """Return why the file's URL cannot be used on this host; empty if it can."""
    host = written.get("host")
    if not isinstance(host, str) or host == socket.gethostname() or not is_loopback(written["url"]):
        return ""
    return f"{path} names {written['url']} of the host {host}, which this host cannot reach"


def _same_service(one: str, other: str) -> bool:
    import httpx

    def key(url: str) -> tuple[str, str, int | None, str]:
        parsed = httpx.URL(url)
        host = "localhost" if parsed.host in _LOOPBACK else parsed.host
        port = parsed.port or {"http": 80, "https": 443}.get(parsed.scheme)
        return parsed.scheme, host, port, parsed.path.rstrip("/")

    return key(one) == key(other)


def _read(path: Path) -> tuple[JsonObject | None, str]:
    """Return the content of the file and "", or None and why it cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, f"{path} does not exist"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path} cannot be read ({_reason(error)})"
    try:
        written = json.loads(text)
        check_url(written["url"])
    except (ValueError, KeyError, TypeError, InvalidInput):
        return None, f"{path} does not name a service"
    return written, ""


def _token(path: object) -> tuple[str | None, str]:
    """Return the token in a file and "", or None and why there is none."""
    if not isinstance(path, str) or not path:
        return None, ""
    try:
        return read_token(path), ""
    except Unauthorized as error:
        return None, error.wrong


def read_token(path: str | Path) -> str:
    """Return the token in a file.

    Raises:
        Unauthorized: the file cannot be read, or does not contain exactly one word.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unauthorized(
            f"the token file {str(path)!r} cannot be read ({_reason(error)})",
            expected="a file that holds the token alone",
        ) from error
    if not text or len(text.split()) != 1:
        raise Unauthorized(
            f"the token file {str(path)!r} does not hold one word",
            expected="a file that holds the token alone",
        )
    return text


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
