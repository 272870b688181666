"""Where the service is: arguments, then the environment, then the file that `serve` wrote.

`$STAGESCOPE_HOME/service.json` (default `~/.stagescope/service.json`, mode 0600) holds
`{"url", "host", "read_token_file", "operate_token_file", "cluster_address", "started"}`. Its
tokens go to its own URL only: a URL that is named otherwise never receives them. A loopback URL
is that of one host: where the file is read on another (a shared home), it names no service.

httpx is imported where a URL is read: a training process looks for the file, and most find none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import InvalidInput, Unauthorized, Unreachable

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_PASSWORD: Final = re.compile(r"//[^/@\s]*@")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A service's URL, how it was found, and the tokens for it (None: none is known)."""

    url: str
    found: str
    read_token: str | None = dataclasses.field(default=None, repr=False)
    operate_token: str | None = dataclasses.field(default=None, repr=False)
    note: str = ""
    """What could not be read on the way, for the message of an error that follows from it."""


def service_file() -> Path:
    """Return the place of service.json, whether it exists or not."""
    return Path(os.environ.get("STAGESCOPE_HOME") or "~/.stagescope").expanduser() / "service.json"


def find(url: str | None = None, token: str | None = None) -> Place:
    """Return the service to talk to.

    Raises:
        Unreachable: no service is known here.
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
    elif written and not (problem := _elsewhere(written, path)):
        url, found = str(written["url"]), str(path)
    else:
        raise Unreachable(
            f"no service is known here: no URL was given, STAGESCOPE_URL is not set, {problem}",
            expected="one of the three",
            advice="start one with `stagescope serve`, or name one: http://HOST:8700",
        )
    base = check_url(url)
    if token is not None:
        return Place(base, found, token, token)
    if written and _same_service(base, written["url"]):
        read, read_problem = _token(written.get("read_token_file"))
        operate, operate_problem = _token(written.get("operate_token_file"))
        # Either token reads: an operator's machine may keep only the one that operates.
        if not (read and operate):
            note = note or read_problem or operate_problem
        return Place(base, found, read or operate, operate, note)
    other = f"{path} has tokens for another URL" if written else problem
    return Place(base, found, note=note or other)


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


def _elsewhere(written: Mapping[str, Any], path: Path) -> str:
    """Return why the file's URL is of no use on this host; empty where it is."""
    host = written.get("host")
    if not isinstance(host, str) or host == socket.gethostname() or not is_loopback(written["url"]):
        return ""
    return f"{path} names {written['url']} of the host {host}, which this host cannot reach"


def _same_service(one: str, other: str) -> bool:
    import httpx

    def key(url: str) -> tuple[Any, ...]:
        parsed = httpx.URL(url)
        host = "localhost" if parsed.host in _LOOPBACK else parsed.host
        port = parsed.port or {"http": 80, "https": 443}.get(parsed.scheme)
        return parsed.scheme, host, port, parsed.path.rstrip("/")

    return key(one) == key(other)


def _read(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return what the file says, or None and why not."""
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


def _token(path: Any) -> tuple[str | None, str]:
    """Return a token's text, or None and why there is none."""
    if not isinstance(path, str) or not path:
        return None, ""
    try:
        return read_token(path), ""
    except Unauthorized as error:
        return None, error.wrong


def read_token(path: str | Path) -> str:
    """Return the token in a file.

    Raises:
        Unauthorized: the file cannot be read, or does not hold one word.
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
