"""The link to the service over HTTP, for processes whose Ray has no service."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, cast

from stagescope_wire import proxies
from stagescope_wire.discovery import load_httpx
from stagescope_wire.errors import (
    NotFound,
    NotReady,
    StagescopeError,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from stagescope_wire.framing import MEDIA_TYPE, WirePayload, pack_batch
from stagescope_wire.nonfinite import Json, JsonObject, spell
from stagescope_workers.transport.calls import Payloads, Reply, ServiceLink, Wire, in_thread

if TYPE_CHECKING:
    import httpx

_DRAIN_SECONDS: Final = 5.0
"""How long one request waits for receipts; `drain` makes several."""
_UNKNOWN_SECONDS: Final = 10.0
"""Seconds that `drain` waits for an unknown run, whose first event may not have arrived yet."""
_HTTP_LOGGERS: Final = (
    "httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "httpcore.proxy",
    "httpcore.socks",
)  # fmt: skip
"""Loggers that write a line for each request."""
_thread = threading.local()


class _RequestFilter(logging.Filter):
    """Drops the records of this link's requests below a warning, not those of other requests.

    Batches are sent all the time: at level INFO each would add a line to the training's log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not getattr(_thread, "is_quiet", False)


_REQUEST_FILTER: Final = _RequestFilter()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    _thread.is_quiet = True
    try:
        yield
    finally:
        _thread.is_quiet = False


class HttpLink(ServiceLink):
    """Calls to the service's API, each in its own daemon thread.

    The connections stay open after `close` until the running calls have ended. If a socket were
    closed while a thread reads from it, that thread could read from the next socket instead.
    """

    def __init__(
        self, url: str, token: str | None = None, *, found: str = "", timeout: float = 30.0
    ) -> None:
        """Make a link; nothing is sent yet.

        Args:
            url: URL of the API.
            token: the operate token; sent only to `url`.
            found: the source of the URL, for messages.
            timeout: seconds for an answer, beyond the time that the service itself may wait.
        """
        load_httpx()
        import httpx

        self._url = url
        self._address = (f"{url} (from {found})" if found else url) + proxies.way_to(url)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._has_token = bool(token)
        self._timeout = timeout
        self._errors = (httpx.HTTPError, OSError)
        for name in _HTTP_LOGGERS:
            logging.getLogger(name).addFilter(_REQUEST_FILTER)
        self._client = httpx.Client(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=timeout,
            transport=proxies.transport(url),
            trust_env=False,
        )
        self._lock = threading.Lock()
        self._users = 1
        """The link itself until `close`, and each running call."""
        self._is_closed = False

    @property
    def page(self) -> str:
        """The URL of the API: the page opens there, too."""
        return self._url

    def record(self, sender: Wire, events: list[Wire], payloads: Payloads) -> Future[Reply]:
        """Send a batch to `POST /events`."""
        packed = cast("dict[int, WirePayload]", payloads)
        headers = {"Content-Type": MEDIA_TYPE}
        return self._start(
            lambda: self._answer(
                "/events", content=pack_batch(sender, events, packed), headers=headers
            )
        )

    def poll(
        self, sender: Wire, revision: int, unreceipted: list[int], wait: float
    ) -> Future[Reply]:
        """Request the plan and receipts from `POST /poll`, and renew the lease."""
        body = spell(
            {"sender": sender, "revision": revision, "unreceipted": unreceipted, "wait": wait}
        )
        return self._start(lambda: self._answer("/poll", json=body, timeout=wait + self._timeout))

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[Reply]:
        """Request `GET /steps/{step}/metrics`."""
        return self._start(lambda: self._metrics(run, attempt_key, step))

    def _metrics(self, run: str, attempt_key: str | None, step: int) -> Reply:
        params = {"run": run} if attempt_key is None else {"run": run, "attempt_key": attempt_key}
        response = self._send("GET", f"/steps/{step}/metrics", params=params)
        if response.status_code == NotFound.status and response.json()["code"] == NotFound.code:
            raise NotFound(str(response.json().get("wrong")))
        if response.status_code in (NotReady.status, TooManyRequests.status):
            raise NotReady(f"the service is not ready: {_wrong(response)}")
        return self._checked(response)

    def _answer(self, path: str, **options: object) -> Reply:  # httpx's keywords
        response = self._send("POST", path, **options)
        if response.status_code in (NotReady.status, TooManyRequests.status):
            return {"coordinator": None, "not_ready": _wrong(response)}
        answer = self._checked(response)
        for name in ("receipts", "refused"):
            answer[name] = {int(seq): text for seq, text in (answer.get(name) or {}).items()}
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the service's response to a request.

        Raises:
            Unreachable: nothing answers, or a proxy or another server does.
            StagescopeError: what answers refuses this body alone, for its size.
        """
        try:
            with _quietly():
                response = self._client.request(method, path, **options)
        except self._errors as error:
            hint = proxies.unused_proxy(self._url)
            raise Unreachable(
                f"{method} {self._url}{path}{proxies.way_to(self._url)}: "
                f"{type(error).__name__}: {proxies.reason_of(error)}",
                advice="check that `stagescope serve` runs, and that STAGESCOPE_URL is its address"
                + (f"; {hint}" if hint else ""),
            ) from error
        if proxies.is_foreign(response):
            wrong, advice = proxies.describe_foreign(self._url, response)
            is_too_large = response.status_code == TooLarge.status
            raise (StagescopeError if is_too_large else Unreachable)(
                f"{method} {path}: {wrong}", advice=advice
            )
        return response

    def _checked(self, response: httpx.Response) -> Reply:
        """Return the JSON of a successful response; raise for any other."""
        status = response.status_code
        call = f"{response.request.method} {response.request.url.path}"
        if status in {401, 403}:
            sent = "a" if self._has_token else "no"
            raise Unauthorized(
                f"the service returned {status} for {call}: {_wrong(response)}",
                expected="the service's operate token",
                advice=f"{sent} token was sent. Set "
                "STAGESCOPE_TOKEN_FILE (a path that this process can read) or STAGESCOPE_TOKEN in "
                "this process's environment. On Ray, set it where `ray start` runs on each node",
            )
        if status >= 500 or status in {404, TooManyRequests.status}:
            raise Unreachable(f"the service returned {status} for {call}")
        if status >= 400:
            raise StagescopeError(f"the service refused {call}: {response.text[:500]}")
        answer: Json = None
        with contextlib.suppress(ValueError):
            answer = response.json()
        if not isinstance(answer, dict):
            raise Unreachable(
                f"the server returned no JSON object for {call}{proxies.way_to(self._url)}"
                f"{proxies.who_sent(response)}",
                advice=f"is {self._url} the address of a stagescope service?",
            )
        return answer

    def drain(
        self,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        *,
        ended_by: JsonObject | None = None,
    ) -> JsonObject:
        """Wait, `timeout` seconds at most, for all receipts of a run; see `Link`.

        Raises:
            StagescopeError: the service does not answer, or refuses.
        """
        deadline = time.monotonic() + timeout
        unknown_until = time.monotonic() + _UNKNOWN_SECONDS
        while True:
            wait = max(0.0, min(deadline - time.monotonic(), _DRAIN_SECONDS))
            body: dict[str, object] = {"run": run, "timeout": wait, "attempt_key": attempt_key}
            if ended_by is not None:  # a service of an earlier version does not know it
                body["ended_by"] = ended_by
            response = self._send("POST", "/drain", json=body, timeout=wait + min(timeout, 5.0))
            answer = self._checked(response)
            until = deadline if answer.get("known", True) else min(deadline, unknown_until)
            if answer["drained"] or time.monotonic() >= until:
                return answer

    def close(self) -> None:
        """Refuse further calls; the connections are closed when the last running call ends."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._end_use()

    def _start(self, call: Callable[[], Reply]) -> Future[Reply]:
        with self._lock:
            if self._is_closed:
                future: Future[Reply] = Future()
                future.set_exception(Unreachable("this link to the service is closed"))
                return future
            self._users += 1

        def run() -> Reply:
            try:
                return call()
            finally:
                self._end_use()

        return in_thread(run)

    def _end_use(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            with _quietly():
                self._client.close()


def _wrong(response: httpx.Response) -> str:
    try:
        return str(response.json()["wrong"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
