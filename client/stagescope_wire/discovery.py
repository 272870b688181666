"""Find the service: by arguments, this process's Ray cluster, the environment, the file of `serve`.

`$STAGESCOPE_HOME/service.json` (default `~/.stagescope/service.json`, mode 0600) holds
`{"url", "host", "read_token_file", "operate_token_file", "cluster_address", "started"}`. Its
tokens are sent to its own URL only, never to a URL from another source. A loopback URL is valid on
one host: a process on another host that reads the file (a shared home) ignores it.

httpx is imported only where a URL is parsed: every training process checks for the file, and most
find none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

from stagescope_wire.errors import InvalidInput, Unauthorized, Unreachable
from stagescope_wire.nonfinite import JsonObject

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
NAMESPACE: Final = "stagescope"
"""Ray's namespace of the service's actors."""
COORDINATOR_NAME: Final = "DebugCoordinator"
"""Name of the coordinator's actor."""
API_NAME: Final = "ApiServer"
"""Name of the actor that serves the API in Ray."""
_RAY_SECONDS: Final = 5.0
_PASSWORD: Final = re.compile(r"""((?<=//)|^['"]?(?!['"]?\w+://))[^\s?#]*@""")
"""Up to the last @: a password may hold one, and a proxy may be named without a scheme."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceLocation:
    """A service's URL, where the URL comes from, and its tokens (None: unknown)."""

    url: str
    found: str
    read_token: str | None = dataclasses.field(default=None, repr=False)
    operate_token: str | None = dataclasses.field(default=None, repr=False)
    note: str = ""
    """A file that could not be read, for the message of an error that follows from it."""
    other_url: str = ""
    """The URL of this home's service, if it is another."""


def service_file() -> Path:
    """Return the path of service.json, whether it exists or not."""
    return Path(os.environ.get("STAGESCOPE_HOME") or "~/.stagescope").expanduser() / "service.json"


def ingestor_name(node_id: str) -> str:
    """Return the name of a node's ingestor, an actor."""
    return f"ingestor-{node_id}"


def relay_name(node_id: str) -> str:
    """Return the name of a node's relay, an actor."""
    return f"relay-{node_id}"


def find(url: str | None = None, token: str | None = None) -> ServiceLocation:
    """Return the URL and the tokens of the service to connect to.

    Raises:
        Unreachable: no service is known on this host.
        InvalidInput: a URL that is not http or https.
        Unauthorized: a text that cannot be a token was given, or STAGESCOPE_TOKEN_FILE cannot be
            read and another token would be used in its place.
    """
    location, written = _locate(url)
    return _with_tokens(location, token, written)


def locate(url: str | None = None) -> ServiceLocation:
    """Return the URL of the service to connect to, as `find`, without looking for tokens.

    Raises:
        Unreachable: no service is known on this host.
        InvalidInput: a URL that is not http or https.
    """
    return _locate(url)[0]


def _locate(url: str | None) -> tuple[ServiceLocation, JsonObject | None]:
    """Return the location without tokens, and what service.json holds."""
    path = service_file()
    written, problem = _read(path)
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
    problem = f"{path} has tokens for another URL" if written else problem
    location = ServiceLocation(check_url(url), found, note=problem)
    if (
        written
        and not _same_service(location.url, written["url"])
        and not _other_host(written, path)
    ):
        location = dataclasses.replace(location, other_url=str(written["url"]))
    return location, written


def find_in_ray(token: str | None = None) -> ServiceLocation | None:
    """Return the service of the Ray cluster that this process has joined; it never joins one.

    None: it has joined none, no service answers there, or its API serves only another host.
    """
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    found: list[JsonObject] = []
    # In a forked child of a process that joined a cluster, calls of Ray never return.
    asking = threading.Thread(target=_ask_ray, args=(ray, found), daemon=True)
    asking.start()
    asking.join(_RAY_SECONDS)
    if not found or not found[0].get("url"):
        return None
    url, home = str(found[0]["url"]), Path(str(found[0]["home"]))
    if found[0]["host"] != socket.gethostname() and is_loopback(url):
        return None
    found_in = "the Ray cluster that this process has joined"
    written, problem = _read(home / "service.json")
    return _with_tokens(ServiceLocation(check_url(url), found_in, note=problem), token, written)


def _with_tokens(
    location: ServiceLocation, token: str | None, written: JsonObject | None
) -> ServiceLocation:
    """Return a location with `token`, else the environment's, else its service.json's tokens.

    `location.note` says why the file has no token for it.

    Raises:
        Unauthorized: as `find`.
    """
    token = check_token(token, "the token given") or check_token(
        os.environ.get("STAGESCOPE_TOKEN"), "STAGESCOPE_TOKEN"
    )
    note = ""
    if token is None:
        token, note = _token(os.environ.get("STAGESCOPE_TOKEN_FILE"))
    if token is not None:
        return dataclasses.replace(location, read_token=token, operate_token=token, note="")
    if written and _same_service(location.url, written["url"]):
        if note:  # another token may allow more, or less, than the one that was meant
            raise Unauthorized(
                f"{note}: STAGESCOPE_TOKEN_FILE names it",
                expected="a file that holds the token alone",
                advice=f"unset STAGESCOPE_TOKEN_FILE to use the tokens that {service_file()} names",
            )
        read, read_problem = _token(written.get("read_token_file"))
        operate, operate_problem = _token(written.get("operate_token_file"))
        # Both tokens allow reading: an operator's machine may hold the operate token alone.
        if not (read and operate):
            note = read_problem or operate_problem
        return dataclasses.replace(
            location, read_token=read or operate, operate_token=operate, note=note
        )
    return dataclasses.replace(location, note=note or location.note)


def _ask_ray(ray: Any, found: list[JsonObject]) -> None:
    """Append where the API of the cluster's service serves, if there is one."""
    with contextlib.suppress(Exception):  # Ray's errors: the service is looked for elsewhere
        api = ray.get_actor(API_NAME, namespace=NAMESPACE)
        found.append(ray.get(api.where.remote(), timeout=_RAY_SECONDS))


def load_httpx() -> None:
    """Import httpx without its command line.

    The command line imports rich, which draws a number from Python's global generator. In a
    training that has seeded the generator, this would change every number that follows.
    """
    if "httpx" not in sys.modules:
        sys.modules["httpx._main"] = None  # type: ignore[assignment] # its import fails, as httpx allows
        try:
            importlib.import_module("httpx")
        finally:
            sys.modules.pop("httpx._main", None)


def check_url(url: str) -> str:
    """Return `url` without its trailing slash.

    Raises:
        InvalidInput: not an http or https URL, or one with a query or a password.
    """
    load_httpx()
    import httpx

    shown = without_password(repr(url))
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidInput(f"{shown} is not a URL", expected="http://HOST:8700") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.userinfo:
        raise InvalidInput(
            f"{shown} is not the URL of a service", expected="http://HOST:8700 or https://HOST/PATH"
        )
    return str(parsed).rstrip("/")


def without_password(url: str) -> str:
    """Return a URL for a message, without the name and password in it."""
    return _PASSWORD.sub("...@", url, count=1)


def is_loopback(url: str) -> bool:
    """Return whether `url` names this machine by a loopback name."""
    load_httpx()
    import httpx

    return httpx.URL(url).host in _LOOPBACK


def _other_host(written: JsonObject, path: Path) -> str:
    """Return why the file's URL cannot be used on this host; empty if it can."""
    host = written.get("host")
    if not isinstance(host, str) or host == socket.gethostname() or not is_loopback(written["url"]):
        return ""
    return f"{path} names {written['url']} of the host {host}, which this host cannot reach"


def _same_service(one: str, other: str) -> bool:
    load_httpx()
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


_TOKEN_FILES: Final = "this home's service has {}/read.token and operate.token, if it ran here"


def read_token(path: str | Path) -> str:
    """Return the token in a file.

    Raises:
        Unauthorized: the file cannot be read, or does not contain exactly one word.
    """
    what = f"the token file {str(path)!r}"
    try:
        token = check_token(Path(path).expanduser().read_text(encoding="utf-8"), what)
    except (OSError, UnicodeDecodeError) as error:
        raise Unauthorized(
            f"{what} cannot be read ({_reason(error)})",
            expected="a file that holds the token alone",
            advice=_TOKEN_FILES.format(service_file().parent),
        ) from error
    if token is None:
        raise Unauthorized(
            f"{what} is empty",
            expected="a file that holds the token alone",
            advice=_TOKEN_FILES.format(service_file().parent),
        )
    return token


def check_token(text: str | None, what: str) -> str | None:
    """Return a credential without surrounding white space; None if nothing is left.

    Args:
        text: the credential as given.
        what: its source, for the error, which does not show the credential.

    Raises:
        Unauthorized: no HTTP header can hold it.
    """
    token = (text or "").strip()
    if not all("!" <= character <= "~" for character in token):
        raise Unauthorized(
            f"{what} holds no access token: it has white space inside, or characters that are not "
            "printable ASCII",
            expected="one word of printable ASCII characters",
            advice="copy the access token again, alone",
        )
    return token or None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
