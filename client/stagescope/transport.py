"""HTTP calls to the service: tokens, retries within a deadline, and answers or typed errors.

Every call is retried on 503 "not ready" and on 429, because the service did nothing. Reading calls
are also retried on a broken connection, 502, 503 and 504, so that a notebook survives a restart of
the service. A call that changes something is never retried once it may have arrived.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from stagescope.link_text import session_call
from stagescope_wire import proxies
from stagescope_wire.discovery import ServiceLocation, load_httpx
from stagescope_wire.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    StagescopeError,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    error_of_code,
)
from stagescope_wire.links import LinkText, links_from_json, without_links
from stagescope_wire.nonfinite import Json, JsonObject

load_httpx()
import httpx  # noqa: E402 - httpx's own command line, which is left out, imports rich

QueryValue: TypeAlias = str | int | float | bool | Sequence[str] | None
Params: TypeAlias = Mapping[str, QueryValue]
"""Query parameters; None is left out, a sequence is repeated."""


def given(**fields: Json) -> dict[str, Json]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


_INITIAL_BACKOFF: Final = 0.1
_MAX_BACKOFF: Final = 1.0
_CHUNK_BYTES: Final = 1 << 20

_BY_STATUS: Final[Mapping[int, type[StagescopeError]]] = {
    400: InvalidInput, 401: Unauthorized, 403: Forbidden, 404: NotFound, 405: NotFound,
    409: Conflict, 413: InvalidInput, 422: InvalidInput, 429: TooManyRequests, 502: Unreachable,
    503: NotReady, 504: Unreachable,
}  # fmt: skip
"""Status of an answer whose code this version does not know -> its error."""


_Retry = Callable[[StagescopeError, int | None], bool]
"""Whether to repeat a call after an error; the status is None if nothing answered."""


class Transport:
    """One service's HTTP connections.

    Args:
        location: the service's URL and tokens.
        timeout: deadline of a call with its retries [s].
        link_text: returns the words in which errors show their links.
    """

    def __init__(
        self, location: ServiceLocation, *, timeout: float, link_text: LinkText = session_call
    ) -> None:
        self.location = location
        self._link_text = link_text
        self.timeout = timeout
        self._client = httpx.Client(
            headers={"accept": "application/json", "x-stagescope-user": _user()},
            transport=proxies.transport(location.url),
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, params: Params | None = None, *, retry: bool = True) -> Json:
        """Return the JSON that `path` answers; without `retry` the request is sent once.

        Raises:
            Unreachable: nothing answered before the deadline.
            StagescopeError: the service refused; the answer's code selects the class.
        """
        return self._send(self._request("GET", path, params), _if_unavailable if retry else _never)

    def query(self, path: str, body: JsonObject, *, retry: bool = True) -> Json:
        """POST a question that is too long for a query string; return the JSON of the answer.

        Without `retry` the request is sent once: a caller that polls repeats it itself.

        Raises:
            StagescopeError: as `get`.
        """
        request = self._request("POST", path, body=body)
        return self._send(request, _if_unavailable if retry else _never)

    def change(
        self, method: str, path: str, body: JsonObject | None = None, *,
        timeout: float | None = None,
    ) -> Json:  # fmt: skip
        """Request a change with the operate token; return the JSON of the answer, or None.

        `timeout` replaces the usual deadline of a call [s].

        Raises:
            StagescopeError: as `get`; after `Unreachable` the change may have been made.
        """
        request = self._request(method, path, body=body, operate=True)
        return self._send(request, _if_not_ready, timeout)

    def post_events(self, path: str, body: bytes, media_type: str) -> Json:
        """Send events with the operate token; a repeated batch counts once, so it is retried.

        Raises:
            StagescopeError: as `get`.
        """
        headers = self._authorization(self.location.operate_token) | {"content-type": media_type}
        url = self.location.url + path
        request = self._client.build_request("POST", url, headers=headers, content=body)
        return self._send(request, _if_unavailable)

    def download(
        self, path: str, params: Params, write: Callable[[bytes, int], object], *, timeout: float
    ) -> None:
        """Call `write(chunk, total size)` for each chunk of the bytes that `path` answers.

        The request is repeated while the service is busy, for at most `timeout` seconds. The same
        limit applies to each chunk of the answer.

        Raises:
            Unreachable: nothing answered, or the answer broke off.
            StagescopeError: the service refused; the answer's code selects the class.
        """
        deadline = time.monotonic() + timeout
        request = self._request("GET", path, params=params)
        request.headers["accept-encoding"] = "identity"  # so that content-length is the size
        request.extensions["timeout"] = httpx.Timeout(timeout).as_dict()
        while True:
            try:
                return self._stream(request, write)
            except NotReady:  # noqa: PERF203 - the request is repeated
                if time.monotonic() + _MAX_BACKOFF >= deadline:
                    raise
                time.sleep(_MAX_BACKOFF)

    def _stream(self, request: httpx.Request, write: Callable[[bytes, int], object]) -> None:
        try:
            response = self._client.send(request, stream=True)
            with contextlib.closing(response):
                if not response.is_success:
                    response.read()
                    raise self._problem(response)
                size, received = int(response.headers.get("content-length", 0)), 0
                for chunk in response.iter_bytes(_CHUNK_BYTES):
                    received += len(chunk)
                    write(chunk, size)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if received != size:
            raise Unreachable(
                f"{self.location.url} sent {received} of {size} bytes", advice="ask again"
            )

    def _send(self, request: httpx.Request, retry: _Retry, timeout: float | None = None) -> Json:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        backoff = _INITIAL_BACKOFF
        refused: StagescopeError | None = None
        while True:
            left = max(deadline - time.monotonic(), 0.05)
            request.extensions["timeout"] = httpx.Timeout(left).as_dict()
            wait = backoff
            try:
                response = self._client.send(request)
            except httpx.TransportError as error:
                problem: StagescopeError = self._unreachable(error)
                again = retry(problem, None)
                if again and refused is not None and isinstance(error, httpx.TimeoutException):
                    problem = refused  # the last try has little time: this is the reason
            else:
                if response.is_success:
                    return self._json(response)
                problem = refused = self._problem(response)
                again = retry(problem, response.status_code)
                wait = _retry_after(response, backoff)
            if not again or time.monotonic() + wait >= deadline:
                raise problem
            time.sleep(wait)
            backoff = min(2 * backoff, _MAX_BACKOFF)

    def _request(
        self, method: str, path: str, params: Params | None = None, *,
        body: JsonObject | None = None, operate: bool = False,
    ) -> httpx.Request:  # fmt: skip
        token = self.location.operate_token if operate else self.location.read_token
        headers = self._authorization(token)
        if body is not None:
            headers["content-type"] = "application/json"
        content = None if body is None else json.dumps(body, allow_nan=False)
        return self._client.build_request(
            method, self.location.url + path, params=given(**(params or {})) or None,
            headers=headers, content=content,
        )  # fmt: skip

    def _authorization(self, token: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"} if token else {}

    def _json(self, response: httpx.Response) -> Json:
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            url = self.location.url
            raise Unreachable(
                f"the server at {url} is not a stagescope service: its answer came"
                f"{proxies.way_to(url)}{proxies.who_sent(response)} and is not JSON",
                expected="JSON",
                advice="check the URL",
            ) from error

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        service = f"the service at {self.location.url} (from {self.location.found})"
        if isinstance(error, httpx.ReadTimeout):
            return Unreachable(
                f"{service} does not answer within {self.timeout:g} s; it is running and may be "
                "busy",
                advice="ask again, or wait longer: timeout= of attach(), --timeout of a command",
            )
        reason = proxies.reason_of(error)
        if isinstance(error, httpx.TimeoutException):
            reason = f"no answer within {self.timeout:g} s"
        url = self.location.url
        hint = proxies.unused_proxy(url)
        other = self.location.other_url
        here = f"the service of this home is at {other}" if other else ""
        advice = "; ".join(
            filter(None, ["is it running? `stagescope serve` starts it", here, hint])
        )
        return Unreachable(
            f"{service} cannot be reached{proxies.way_to(url)}: {reason}", advice=advice
        )

    def _problem(self, response: httpx.Response) -> StagescopeError:
        if proxies.is_foreign(response):
            wrong, advice = proxies.describe_foreign(self.location.url, response)
            return Unreachable(wrong, advice=advice)
        body = response.json()
        status = response.status_code
        by_status = _BY_STATUS.get(status, StagescopeError)
        kind = error_of_code(str(body.get("code")), by_status)
        wrong = body.get("wrong") or body.get("detail") or body.get("title")
        advice, see = str(body.get("advice") or ""), links_from_json(body.get("see"))
        own = without_links(advice, see)
        # Another version may word the links differently: they then stay in the text as they are.
        advice, see = (advice, ()) if own is None else (own, see)
        if not isinstance(wrong, str):
            wrong = f"{self.location.url} answered {status} {response.reason_phrase}".rstrip()
        if kind is Unauthorized:
            advice = _token_advice(advice, self.location)
        expected = str(body.get("expected") or "")
        return kind(wrong, expected=expected, advice=advice, see=see, link_text=self._link_text)


def _never(problem: StagescopeError, status: int | None) -> bool:
    return False


def _if_not_ready(problem: StagescopeError, status: int | None) -> bool:
    return status == 429 or (status == 503 and type(problem) is NotReady)


def _if_unavailable(problem: StagescopeError, status: int | None) -> bool:
    return status in (None, 429, 502, 503, 504)


def _retry_after(response: httpx.Response, backoff: float) -> float:
    seconds = response.headers.get("retry-after", "")
    return max(backoff, float(seconds)) if seconds.isdecimal() else backoff


def _user() -> str:
    """Return this process's user name for the service's audit log; the token alone authorizes."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user id without a name, as in many containers
        name = ""
    return "".join(c for c in name if c.isascii() and c.isprintable())[:100] or "unknown"


def _token_advice(advice: str, location: ServiceLocation) -> str:
    hint = "give an access token: token=, STAGESCOPE_TOKEN or, on the command line, --token-file"
    return "; ".join(part for part in (advice, location.note, hint) if part)
