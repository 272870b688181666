"""The way to the service over HTTP, for a process that never joins Ray."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from stagescope.discovery import is_loopback
from stagescope.wire.errors import NotFound, NotReady, StagescopeError, Unauthorized, Unreachable
from stagescope.wire.framing import MEDIA_TYPE, pack_batch
from stagescope_workers.transport.calls import in_thread

if TYPE_CHECKING:
    import httpx


_DRAIN_SECONDS: Final = 5.0
"""How long one request waits for receipts; the whole wait is made of several."""
_UNKNOWN_SECONDS: Final = 10.0
"""For which `drain` waits for the first word of a training: it may be on its way."""


_HTTP_LOGGERS: Final = (
    "httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "httpcore.proxy",
    "httpcore.socks",
)  # fmt: skip
"""Whose lines tell of each request."""
_calling = threading.local()


class _NotOurs(logging.Filter):
    """Drops what a call of this link would say below a warning; the training's own calls speak.

    Batches leave all the time: at level INFO each would put a line into the training's log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not getattr(_calling, "now", False)


_NOT_OURS: Final = _NotOurs()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    _calling.now = True
    try:
        yield
    finally:
        _calling.now = False


class HttpLink:
    """Calls to the service's API, each in a daemon thread of its own.

    The connections outlive `close` until the calls under way have ended: closing a socket that
    another thread reads from would let that thread read from whatever is opened next.
    """

    def __init__(
        self, url: str, token: str | None = None, *, found: str = "", timeout: float = 30.0
    ) -> None:
        """Make a link; nothing is sent yet.

        Args:
            url: of the API.
            token: the operate token; sent to `url` alone.
            found: where the URL comes from, for messages.
            timeout: seconds for an answer, beside what the service is asked to wait.
        """
        import httpx

        self.address = f"{url} (from {found})" if found else url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._has_token = bool(token)
        self._timeout = timeout
        self._errors = (httpx.HTTPError, OSError)
        # A proxy cannot reach our own loopback, and must not be shown the token.
        for name in _HTTP_LOGGERS:
            logging.getLogger(name).addFilter(_NOT_OURS)
        self._client = httpx.Client(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=timeout,
            trust_env=not is_loopback(url),
        )
        self._lock = threading.Lock()
        self._under_way = 0
        self._is_closed = False

    def pack(self, payload: dict[str, Any]) -> object:
        """Return `payload` as it is: it travels in the body."""
        return payload

    def record(
        self, sender: tuple[Any, ...], events: list[tuple[Any, ...]], payloads: dict[int, object]
    ) -> Future[dict[str, Any]]:
        """Send a batch to `POST /events`."""
        return self._start(lambda: self._record(sender, events, payloads))

    def _record(
        self, sender: Sequence[Any], events: Sequence[Sequence[Any]], payloads: Mapping[int, Any]
    ) -> dict[str, Any]:
        body = pack_batch(sender, events, payloads)
        return self._answer("/events", content=body, headers={"Content-Type": MEDIA_TYPE})

    def poll(
        self, sender: tuple[Any, ...], revision: int, unreceipted: list[int], wait: float
    ) -> Future[dict[str, Any]]:
        """Ask `POST /poll` for the plan and receipts, and renew the lease."""
        said = {
            "sender": sender,
            "revision": revision,
            "unreceipted": unreceipted,
            "wait": wait,
        }
        return self._start(lambda: self._answer("/poll", json=said, timeout=wait + self._timeout))

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[dict[str, Any]]:
        """Ask `GET /steps/{step}/metrics`."""
        return self._start(lambda: self._metrics(run, attempt_key, step))

    def _metrics(self, run: str, attempt_key: str | None, step: int) -> dict[str, Any]:
        asked = {"run": run, "attempt_key": attempt_key}
        params = {name: value for name, value in asked.items() if value is not None}
        response = self._send("GET", f"/steps/{step}/metrics", params=params)
        if response.status_code == NotFound.status and _code(response) == NotFound.code:
            raise NotFound(str(response.json().get("wrong")))
        if response.status_code == NotReady.status:
            raise NotReady(f"the service is not ready: {response.text[:500]}")
        return self._taken(response)

    def _answer(self, path: str, **options: Any) -> dict[str, Any]:
        response = self._send("POST", path, **options)
        if response.status_code == NotReady.status:
            return {"coordinator": None, "not_ready": response.text[:500]}
        answer = self._taken(response)
        for name in ("receipts", "refused"):
            answer[name] = {int(seq): text for seq, text in (answer.get(name) or {}).items()}
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            with _quietly():
                return self._client.request(method, path, **options)
        except self._errors as error:
            raise Unreachable(
                f"{method} {self._client.base_url}{path}: {type(error).__name__}: {error}",
                advice="is `stagescope serve` up, and STAGESCOPE_URL its address?",
            ) from error

    def _taken(self, response: httpx.Response) -> dict[str, Any]:
        """Return what a response says, where it is an answer."""
        status = response.status_code
        call = f"{response.request.method} {response.request.url.path}"
        if status in {401, 403}:
            raise Unauthorized(
                f"the service answered {status} to {call}",
                expected="the service's operate token",
                advice=f"{'another' if self._has_token else 'no'} token was sent; set "
                "STAGESCOPE_TOKEN_FILE (a path that this process can read) or STAGESCOPE_TOKEN in "
                "the environment of this process: on Ray, where `ray start` runs on each node",
            )
        if status >= 500 or status == 404:
            raise Unreachable(f"{call} was answered with {status}")
        if status >= 400:
            raise StagescopeError(f"{call} was refused: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer

    def moved(self) -> bool:
        """Never: an address stays."""
        return False

    def drain(
        self, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Mapping[str, Any]:
        """Wait, `timeout` seconds at most, for the receipts of a whole run; see `Link`.

        Raises:
            StagescopeError: the service does not answer, or refuses.
        """
        deadline = time.monotonic() + timeout
        unknown_until = time.monotonic() + _UNKNOWN_SECONDS
        while True:
            wait = max(0.0, min(deadline - time.monotonic(), _DRAIN_SECONDS))
            said = {"run": run, "timeout": wait, "attempt_key": attempt_key}
            response = self._send("POST", "/drain", json=said, timeout=wait + min(timeout, 5.0))
            answer = self._taken(response)
            until = deadline if answer.get("known", True) else min(deadline, unknown_until)
            if answer["drained"] or time.monotonic() >= until:
                return answer

    def close(self) -> None:
        """Take no more calls; the connections are closed when none is under way any more."""
        with self._lock:
            self._is_closed = True
            is_idle = not self._under_way
        if is_idle:
            with _quietly():
                self._client.close()

    def _start(self, call: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        with self._lock:
            if self._is_closed:
                future: Future[dict[str, Any]] = Future()
                future.set_exception(Unreachable("this way to the service was given up"))
                return future
            self._under_way += 1

        def run() -> dict[str, Any]:
            try:
                return call()
            finally:
                self._end_call()

        return in_thread(run)

    def _end_call(self) -> None:
        with self._lock:
            self._under_way -= 1
            is_last = self._is_closed and not self._under_way
        if is_last:
            with _quietly():
                self._client.close()


def _code(response: httpx.Response) -> object:
    """Return the code of a problem of this service; None of anything else."""
    try:
        problem = response.json()
    except ValueError:
        return None
    return problem.get("code") if isinstance(problem, dict) else None
