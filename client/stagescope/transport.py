"""HTTP to the service: tokens, retries inside a deadline, answers or errors of this project.

What is retried: any call on 503 "not ready" (nothing was taken), and reading calls also on a
broken connection, 502, 503 and 504, so that a notebook outlives a restart of the service. Never a
call that changes something and may have arrived.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from stagescope.discovery import Place, is_loopback
from stagescope.wire.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    StagescopeError,
    Unauthorized,
    Unreachable,
    error_of_code,
)

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
_PIECE: Final = 1 << 20

_BY_STATUS: Final[Mapping[int, type[StagescopeError]]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: NotFound,
    409: Conflict,
    413: InvalidInput,
    422: InvalidInput,
    502: Unreachable,
    503: NotReady,
    504: Unreachable,
}


_Retry = Callable[[StagescopeError, int | None], bool]
"""Whether to ask again after a problem; the status is None where nothing answered."""


class Transport:
    """One service's HTTP connections; `timeout` is the deadline of a whole call, in seconds."""

    def __init__(self, place: Place, *, timeout: float) -> None:
        self.place = place
        self.timeout = timeout
        # A cluster's images often set HTTP_PROXY, and a proxy cannot reach our own loopback.
        near = is_loopback(place.url)
        # Loading the system's certificates takes 40 ms, in vain where nothing is encrypted; this
        # context trusts nobody.
        plain = near and place.url.startswith("http:")
        self._client = httpx.Client(
            headers={"accept": "application/json", "x-stagescope-user": _user()},
            trust_env=not near,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(
        self, path: str, params: Mapping[str, Any] | None = None, *, patient: bool = True
    ) -> Any:
        """Return the JSON that `path` answers; not `patient` asks once only.

        Raises:
            Unreachable: nothing answered before the deadline.
            StagescopeError: the service refused, as the class of its code.
        """
        return self._call("GET", path, params=params, retry=_any_gap if patient else _never)

    def ask(self, path: str, body: Any, *, patient: bool = True) -> Any:
        """Ask a question that is too long for a query; return the JSON of the answer.

        Without `patient` it is asked once: whoever may have to wait long asks again itself.

        Raises:
            StagescopeError: as `get`.
        """
        return self._call("POST", path, body=body, retry=_any_gap if patient else _never)

    def change(self, method: str, path: str, body: Any = None) -> Any:
        """Ask for a change with the operator's token; return the JSON of the answer, or None.

        Raises:
            StagescopeError: as `get`; after `Unreachable` the change may have been made.
        """
        return self._call(method, path, body=body, operate=True, retry=_not_taken)

    def deliver(self, path: str, body: bytes, media_type: str) -> Any:
        """Hand over events with the operator's token; sent again it counts once, so it is retried.

        Raises:
            StagescopeError: as `get`.
        """
        headers = self._authorization(self.place.operate_token) | {"content-type": media_type}
        url = self.place.url + path
        request = self._client.build_request("POST", url, headers=headers, content=body)
        return self._sent(request, _any_gap)

    def download(
        self,
        path: str,
        params: Mapping[str, Any],
        write: Callable[[bytes, int], object],
        *,
        timeout: float,
    ) -> None:
        """Hand the bytes that `path` answers to `write`, piece by piece, with their whole size.

        Until `timeout` seconds are over it is asked again while the service is busy; bytes that
        come are waited for, each piece as long.

        Raises:
            Unreachable: nothing answered, or it broke off.
            StagescopeError: the service refused, as the class of its code.
        """
        deadline = time.monotonic() + timeout
        request = self._request("GET", path, params=params, body=None, operate=False)
        request.headers["accept-encoding"] = "identity"  # its size is what will come
        request.extensions["timeout"] = httpx.Timeout(timeout).as_dict()
        while True:
            try:
                return self._stream(request, write)
            except NotReady:  # noqa: PERF203 - it is asked again
                if time.monotonic() + _LONGEST_PAUSE >= deadline:
                    raise
                time.sleep(_LONGEST_PAUSE)

    def _stream(self, request: httpx.Request, write: Callable[[bytes, int], object]) -> None:
        try:
            response = self._client.send(request, stream=True)
            with contextlib.closing(response):
                if not response.is_success:
                    response.read()
                    raise self._problem(response)
                size, come = int(response.headers.get("content-length", 0)), 0
                for piece in response.iter_bytes(_PIECE):
                    come += len(piece)
                    write(piece, size)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if come != size:
            raise Unreachable(f"{self.place.url} sent {come} of {size} bytes", advice="ask again")

    def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        operate: bool = False,
        retry: _Retry,
    ) -> Any:
        request = self._request(method, path, params=params, body=body, operate=operate)
        return self._sent(request, retry)

    def _sent(self, request: httpx.Request, retry: _Retry) -> Any:
        deadline = time.monotonic() + self.timeout
        pause = _FIRST_PAUSE
        while True:
            left = max(deadline - time.monotonic(), 0.05)
            request.extensions["timeout"] = httpx.Timeout(left).as_dict()
            wait = pause
            try:
                response = self._client.send(request)
            except httpx.TransportError as error:
                problem: StagescopeError = self._unreachable(error)
                again = retry(problem, None)
            else:
                if response.is_success:
                    return self._json(response)
                problem = self._problem(response)
                again = retry(problem, response.status_code)
                wait = _asked_pause(response, pause)
            if not again or time.monotonic() + wait >= deadline:
                raise problem
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None,
        body: Any,
        operate: bool,
    ) -> httpx.Request:
        token = self.place.operate_token if operate else self.place.read_token
        headers = self._authorization(token)
        if body is not None:
            headers["content-type"] = "application/json"
        given = {name: value for name, value in (params or {}).items() if value is not None}
        return self._client.build_request(
            method,
            self.place.url + path,
            params=given or None,
            headers=headers,
            content=None if body is None else json.dumps(body, allow_nan=False),
        )

    def _authorization(self, token: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"} if token else {}

    def _json(self, response: httpx.Response) -> Any:
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise Unreachable(
                f"what answers at {self.place.url} is not a stagescope service",
                expected="JSON",
                advice="check the URL",
            ) from error

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        # The text names hosts and errno only: no header, hence no token, is in it.
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            reason = f"no answer within {self.timeout:g} s"
        advice = "is it running? `stagescope serve` starts it"
        if not is_loopback(self.place.url) and _proxy(self.place.url):
            advice += f"; a proxy is set ({_proxy(self.place.url)}): NO_PROXY leaves it out"
        return Unreachable(
            f"the service at {self.place.url} (from {self.place.found}) cannot be reached: "
            f"{reason}",
            advice=advice,
        )

    def _problem(self, response: httpx.Response) -> StagescopeError:
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            body = {}
        status = response.status_code
        by_status = _BY_STATUS.get(status, StagescopeError)
        kind = error_of_code(str(body.get("code")), by_status)
        wrong = body.get("wrong") or body.get("detail") or body.get("title")
        advice = str(body.get("advice") or "")
        if not isinstance(wrong, str):
            wrong = f"{self.place.url} answered {status} {response.reason_phrase}".rstrip()
            if status < 400 or not body:
                advice = advice or "check the URL: something else may answer there"
        if kind is Unauthorized:
            advice = _token_advice(advice, self.place)
        return kind(wrong, expected=str(body.get("expected") or ""), advice=advice)


def _never(problem: StagescopeError, status: int | None) -> bool:
    return False


def _not_taken(problem: StagescopeError, status: int | None) -> bool:
    return status == 503 and type(problem) is NotReady


def _any_gap(problem: StagescopeError, status: int | None) -> bool:
    return status in (None, 502, 503, 504)


def _asked_pause(response: httpx.Response, pause: float) -> float:
    asked = response.headers.get("retry-after", "")
    return max(pause, float(asked)) if asked.isdecimal() else pause


def _user() -> str:
    """Return who asks, for the service's audit; what it is worth the token says."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user id without a name, as in many containers
        name = ""
    return "".join(c for c in name if c.isascii() and c.isprintable())[:100] or "unknown"


def _proxy(url: str) -> str | None:
    scheme = httpx.URL(url).scheme
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name)), None)


def _token_advice(advice: str, place: Place) -> str:
    hint = "give token=, STAGESCOPE_TOKEN or, on the command line, --token-file"
    return "; ".join(part for part in (advice, place.note, hint) if part)
