"""The way to the service over HTTP, for a process that never joins Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from stagescope.errors import NotFound, NotReady, StagescopeError, Unauthorized, Unreachable
from stagescope.framing import MEDIA_TYPE, pack_batch
from stagescope_workers.calls import in_thread

if TYPE_CHECKING:
    import httpx


class HttpLink:
    """Calls to the service's API, each in a daemon thread of its own."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 30.0) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._errors = (httpx.HTTPError, OSError)
        self._client = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout)

    def pack(self, payload: dict[str, Any]) -> object:
        """Return `payload` as it is: it travels in the body."""
        return payload

    def record(
        self, sender: tuple[Any, ...], events: list[tuple[Any, ...]], payloads: dict[int, object]
    ) -> Future[dict[str, Any]]:
        """Send a batch to `POST /events`."""
        return in_thread(lambda: self._record(sender, events, payloads))

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
        return in_thread(lambda: self._answer("/poll", json=said, timeout=wait + self._timeout))

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[dict[str, Any]]:
        """Ask `GET /steps/{step}/metrics`."""
        return in_thread(lambda: self._metrics(run, attempt_key, step))

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
                expected="STAGESCOPE_TOKEN with the service's operate token",
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

    def drain(self, run: str | None, timeout: float) -> Mapping[str, Any]:
        """Nothing more to wait for than this process's own receipts, which `close` awaits."""
        return {"run": run, "drained": True}

    def close(self) -> None:
        """Close the connections; a call in flight fails, in its own thread."""
        self._client.close()


def _code(response: httpx.Response) -> object:
    """Return the code of a problem of this service; None of anything else."""
    try:
        problem = response.json()
    except ValueError:
        return None
    return problem.get("code") if isinstance(problem, dict) else None
