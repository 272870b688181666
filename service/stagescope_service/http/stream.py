"""Streams changes as server-sent events, from one watcher of the catalogue.

The watcher reads the newest rows once a second, for all listeners together, and only while there
are some. Each difference from the reading before becomes an event. Its id lets an interrupted
listener continue. A listener that reads too slowly is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Annotated, Final, NamedTuple, cast

import anyio
from fastapi import APIRouter, Header, Request, Response
from starlette.types import Receive, Scope, Send

from stagescope_service.background import BackgroundTasks
from stagescope_service.core.completeness import PARTIAL
from stagescope_service.http.access_tokens import Access
from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import Deps, Run
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.changes import ChangedRow, Recent
from stagescope_service.store.tables import StepState
from stagescope_service.views.encoding import JsonObject, encode
from stagescope_service.views.reading.completeness import verdicts
from stagescope_wire.errors import NotReady, StagescopeError
from stagescope_wire.links import Link

log = logging.getLogger(__name__)
router = APIRouter(tags=["page"])

MEDIA_TYPE: Final = "text/event-stream"
MAX_LISTENERS: Final = 200
POLL_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = 15.0
_ENDED_SECONDS: Final = 600.0
"""Seconds for which an ended attempt is watched: its last steps are aggregated later."""
_REMEMBERED: Final = 512
"""Number of events that an interrupted listener can still get."""
_MAX_BEHIND: Final = 30
"""Readings with changes that wait for a listener; one more, and it is closed."""
_PLACE_SECONDS: Final = 60.0
"""Seconds for which a listener keeps its place, however many others come."""
_RETRY: Final = 2000
"""Milliseconds after which an interrupted browser asks again."""

Key = tuple[str, object]
"""A noun, and the key of its row in the catalogue."""


@router.get(
    "/stream",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def stream(
    request: Request,
    deps: Deps,
    run: Run = None,
    last_event_id: Annotated[
        str | None,
        Header(max_length=100, description="The id of the last event that was received."),
    ] = None,
) -> Response:
    """Send what changes as server-sent events, until the client leaves.

    First comes `hello`: `resumed` says whether every event since `Last-Event-ID` follows; otherwise
    ask again for what is shown. Every later event has `run` and `attempt`. An `attempt` has begun,
    resumed or ended. A `step` has `step`, `closed`, `complete`, `aggregated` (its numbers are
    computed, if it has any), `measured` (it has some) and the `verdict` on its streams. A `finding`
    has `finding_id`, `step`, `kind`, `severity`, `message` and `over`. A `capture` has
    `capture_id`, `state`, `acknowledged` and `dumps` (state -> number). An `action` is an entry of
    the audit, with its `action`: a run was renamed or deleted, triggers were set, a step was pinned
    or an engine was registered. With `run` only events of this run, or of none, are sent. A comment
    is sent every 15 seconds. At most 200 clients may listen at a time. One more takes the place of
    the one that has listened longest, of the caller with the most places; that one may continue
    with its `Last-Event-ID`.
    """
    if run is not None:
        run = (await asyncio.to_thread(deps.finder.attempt, run)).run
    state, caller = request.app.state, caller_of(request)
    watcher: Watcher = state.watcher
    access: Access | None = state.access

    async def is_allowed() -> bool:
        if access is None or caller.token is None:
            return True
        await access.look()
        return access.is_valid(caller.token)

    subscription = Subscription(run, str(caller))
    return _EventStream(watcher, subscription, last_event_id, is_allowed)


# --- changes --------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change since the reading before."""

    event: str
    run: str | None
    fields: JsonObject
    row: ChangedRow
    """The row as it is now."""


def changes(before: Recent, after: Recent) -> Iterator[Change]:
    """Yield what differs between two readings, by attempt, step, finding, capture and action."""
    known = _index(before)
    attempts = {row["attempt_id"]: row for row in after.attempts}
    for key, row in _index(after).items():
        if known.get(key) != row:
            yield _change(key[0], row, attempts.get(row.get("attempt_id")))


def _index(recent: Recent) -> dict[Key, ChangedRow]:
    """Return the rows by noun and key, the oldest first."""
    found: dict[Key, ChangedRow] = {}
    found |= {("attempt", row["attempt_id"]): row for row in reversed(recent.attempts)}
    steps = reversed(recent.steps)
    found |= {("step", (row["attempt_id"], row["step"])): row for row in steps}
    # When it was seen last changes all the time, and is no news.
    findings = ({**row, "last_wall": None} for row in reversed(recent.findings))
    found |= {("finding", row["finding_id"]): row for row in findings}
    found |= {("capture", row["capture_id"]): row for row in reversed(recent.captures)}
    return found | {("action", row["audit_id"]): row for row in reversed(recent.actions)}


def _change(event: str, row: ChangedRow, attempt: ChangedRow | None) -> Change:
    run = row["run"] if "run" in row else None if attempt is None else attempt["run"]
    number = None if attempt is None else attempt["number"]
    return Change(event, run, {"run": run, "attempt": number, **_FIELDS[event](row)}, row)


def _attempt_fields(row: ChangedRow) -> JsonObject:
    return {
        "resumed_from_step": row["resumed_from_step"],
        "ended": row["ended_wall"],
        "end_reason": row["end_reason"],
    }


def _step_fields(row: ChangedRow) -> JsonObject:
    is_closed = row["closed_wall"] is not None
    return {
        "step": row["step"],
        "closed": is_closed,
        "complete": (row["completeness"] or "unknown") if is_closed else "open",
        "aggregated": is_closed and row["aggregated_wall"] is not None,
        "measured": row["summary_wall"] is not None,
        "verdict": row["verdict"],
    }


def _finding_fields(row: ChangedRow) -> JsonObject:
    names = ("finding_id", "step", "kind", "severity", "message")
    return {**{name: row[name] for name in names}, "over": row["over_wall"] is not None}


def _capture_fields(row: ChangedRow) -> JsonObject:
    names = ("capture_id", "state", "acknowledged", "dumps")
    return {name: row.get(name) for name in names}


def _action_fields(row: ChangedRow) -> JsonObject:
    return {"action": row["action"]}


_FIELDS: Final[Mapping[str, Callable[[ChangedRow], JsonObject]]] = {
    "attempt": _attempt_fields,
    "step": _step_fields,
    "finding": _finding_fields,
    "capture": _capture_fields,
    "action": _action_fields,
}


# --- listeners ------------------------------------------------------------------------------
class _Sent(NamedTuple):
    """An event as it is sent, one for all listeners."""

    number: int
    run: str | None
    text: bytes


class Subscription(NamedTuple):
    """The events that a listener gets."""

    run: str | None = None
    """The requested run; events of no run are included. None: all runs."""
    caller: str = ""
    """The caller, for its number of places."""

    def has(self, run: str | None) -> bool:
        """Return whether it gets events of a run."""
        return self.run is None or run in (None, self.run)


class _Listener:
    """A client, and the events that wait for it."""

    def __init__(self, subscription: Subscription, scope: anyio.CancelScope) -> None:
        self._subscription = subscription
        self._scope = scope
        self._since = time.monotonic()
        self._waiting: list[bytes] = []
        self._behind = 0
        self._has_some = asyncio.Event()

    @property
    def caller(self) -> str:
        """The caller, for its number of places."""
        return self._subscription.caller

    def leave_place(self, *, after: float) -> bool:
        """End if it has listened for so many seconds; return whether it did."""
        is_old = time.monotonic() - self._since >= after
        if is_old:
            self._scope.cancel()
        return is_old

    def put(self, events: Iterable[_Sent], greeting: bytes = b"") -> None:
        """Add the events of a reading that are of its run, unless so many readings wait."""
        texts = [greeting] if greeting else []
        texts += [each.text for each in events if self._subscription.has(each.run)]
        if not texts:
            return
        if self._behind >= _MAX_BEHIND:
            log.info("a listener of /stream reads too slowly: its connection is closed")
            self._scope.cancel()
            return
        self._behind += 1
        self._waiting += texts
        self._has_some.set()

    async def take(self) -> bytes:
        """Return the events that wait, once there are some."""
        await self._has_some.wait()
        self._has_some.clear()
        found = b"".join(self._waiting)
        self._waiting.clear()
        self._behind = 0
        return found


class Watcher:
    """Watches the catalogue for all listeners; for the server's event loop alone.

    Args:
        catalogue: is read in a thread.
        clock: returns Unix seconds.
    """

    def __init__(self, catalogue: Catalogue, clock: Callable[[], float]) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._name = secrets.token_hex(4)
        """Begins the ids of its events: those of another process mean nothing here."""
        self._number = 0
        self._recent: Recent | None = None
        self._remembered: deque[_Sent] = deque(maxlen=_REMEMBERED)
        self._listeners: dict[_Listener, None] = {}
        """The clients; the one that has listened longest is the first."""
        self._waiting: list[tuple[_Listener, str | None]] = []
        """Listeners that wait for the first reading, with their last event's id."""
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None

    @property
    def listeners(self) -> int:
        """Number of clients."""
        return len(self._listeners)

    @contextlib.contextmanager
    def listening(
        self, subscription: Subscription, last_id: str | None, scope: anyio.CancelScope
    ) -> Iterator[_Listener]:
        """Register a listener for the duration of the block.

        Args:
            subscription: the runs whose events it gets.
            last_id: the id of the last event that the client received.
            scope: is cancelled where the client reads too slowly.

        Raises:
            NotReady: there are too many listeners, and all of them are new.
        """
        if len(self._listeners) >= MAX_LISTENERS and not self._make_place():
            raise NotReady(
                f"{MAX_LISTENERS} clients listen already",
                advice="close other pages, or ask for the steps now and then instead",
                see=(Link("steps"),),
            )
        listener = _Listener(subscription, scope)
        self._listeners[listener] = None
        if self._recent is None:
            self._waiting.append((listener, last_id))
        else:
            self._greet(listener, last_id)
        if self._task is None:
            self._task = self._tasks.start(self._watch())
        try:
            yield listener
        finally:
            self._listeners.pop(listener, None)
            self._waiting = [each for each in self._waiting if each[0] is not listener]
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    def _make_place(self) -> bool:
        """End the oldest listener of the caller that has the most; return whether one ended.

        A client that reads nothing cannot be distinguished from one that has nothing to read. If
        clients never read, their places are taken by others before those of clients that come
        back.
        """
        counts = Counter(listener.caller for listener in self._listeners)
        caller = max(counts, key=counts.__getitem__)
        oldest = next(each for each in self._listeners if each.caller == caller)
        if not oldest.leave_place(after=_PLACE_SECONDS):
            return False
        del self._listeners[oldest]
        return True

    def _greet(self, listener: _Listener, last_id: str | None) -> None:
        """Send hello, and the events that an interrupted client missed."""
        missed = self._missed(last_id)
        number = self._number - len(missed or ())
        hello: JsonObject = {"resumed": missed is not None, "wall": self._clock()}
        text = f"retry: {_RETRY}\n".encode() + self._text("hello", number, hello)
        listener.put(missed or (), greeting=text)

    def _missed(self, last_id: str | None) -> list[_Sent] | None:
        """Return the events after one; None where some of them are forgotten."""
        name, _, digits = (last_id or "").partition("-")
        if name != self._name or not (digits.isascii() and digits.isdigit()):
            return None
        last = int(digits[:18])
        missed = [event for event in self._remembered if event.number > last]
        is_whole = last + len(missed) == self._number
        return missed if is_whole else None

    async def _watch(self) -> None:
        is_readable = True
        while True:
            try:
                since = self._clock() - _ENDED_SECONDS
                recent, found = await asyncio.to_thread(self._read, since, self._recent)
                self._publish(recent, found)
            except Exception as error:  # whatever it is, the next reading may succeed
                if is_readable:
                    is_known = isinstance(error, StagescopeError)
                    log.warning("the catalogue cannot be watched: %s", error, exc_info=not is_known)
                is_readable = False
            else:
                is_readable = True
            await asyncio.sleep(POLL_SECONDS)

    def _read(self, since: float, before: Recent | None) -> tuple[Recent, list[Change]]:
        """Return the newest rows, and what differs from those before; in a thread."""
        recent = self._catalogue.recent(since)
        found = [] if before is None else list(changes(before, recent))
        for change in found:
            # As every answer has it, without ranks that never run a stage.
            if change.fields.get("complete") == PARTIAL and change.run is not None:
                (complete,) = verdicts(self._catalogue, change.run, [cast(StepState, change.row)])
                change.fields["complete"] = complete
        return recent, found

    def _publish(self, recent: Recent, found: Iterable[Change]) -> None:
        self._recent = recent
        for listener, last_id in self._waiting:
            self._greet(listener, last_id)
        self._waiting.clear()
        events = []
        for change in found:
            self._number += 1
            text = self._text(change.event, self._number, change.fields)
            events.append(_Sent(self._number, change.run, text))
        self._remembered += events
        for listener in list(self._listeners):
            listener.put(events)

    def _text(self, event: str, number: int, fields: JsonObject) -> bytes:
        heading = f"event: {event}\nid: {self._name}-{number}\ndata: "
        return heading.encode() + encode(fields) + b"\n\n"


class _EventStream(Response):
    """The answer of `/stream`: ends when the client leaves, or reads too slowly."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        watcher: Watcher,
        subscription: Subscription,
        last_id: str | None,
        is_allowed: Callable[[], Awaitable[bool]],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._watcher = watcher
        self._subscription = subscription
        self._is_allowed = is_allowed
        self._last_id = last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with (
            anyio.CancelScope() as until,
            self._watcher.listening(self._subscription, self._last_id, until) as listener,
        ):
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            async with anyio.create_task_group() as group:
                group.start_soon(_leave, receive, until)
                while True:
                    text = b":\n\n"
                    with anyio.move_on_after(HEARTBEAT_SECONDS):
                        text = await listener.take()
                    is_allowed = await self._is_allowed()  # its token may be removed meanwhile
                    body = {"body": text if is_allowed else b"", "more_body": is_allowed}
                    await send({"type": "http.response.body", **body})
                    if not is_allowed:
                        until.cancel()
                        break


async def _leave(receive: Receive, until: anyio.CancelScope) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    until.cancel()
