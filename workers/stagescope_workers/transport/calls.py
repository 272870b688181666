"""Calls to the service: their futures, answers, retries, and the clock offset they measure."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, Protocol, TypeAlias, TypedDict

from stagescope_wire.errors import StagescopeError
from stagescope_wire.framing import WirePayload
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.plan import SentPlan
from stagescope_workers import steady_clock

MAX_BACKOFF: Final = 2.0
"""Seconds; short, since the service may be back at any moment."""

MAX_PAUSE: Final = 60.0
"""The longest time for which an overloaded service may delay a sender's batches."""

Reply: TypeAlias = dict[str, Json]
"""The JSON object with which the service answers a call; `ServiceAnswer` has its fields."""
Wire: TypeAlias = tuple[object, ...]
"""A sender or an event, as its `wire` returns it."""
Payloads: TypeAlias = dict[int, object]
"""Sequence number -> payload, as the link's `pack` returned it."""


class ServiceAnswer(TypedDict, total=False):
    """The service's answer to a batch or a poll; a service of another version may lack a field."""

    coordinator: str | None
    """The incarnation of the coordinator."""
    not_ready: str
    """Present where the service cannot answer yet: the reason."""
    wall: float
    """The service's wall clock."""
    receipts: dict[int, str]
    """Receipts of payloads, by sequence number."""
    refused: dict[int, str]
    """Events that were refused, by sequence number."""
    pause: float
    """Seconds between batches that an overloaded service requests."""
    plan: SentPlan | None
    requests: list[dict[str, object]]
    poll_seconds: float
    attempt_key: str
    """The key of this process's attempt, where the process has none."""
    page: str
    """Address at which people open the page."""


class Call:
    """One call that was sent: its future, its link, and when it was sent."""

    def __init__(self, future: Future[Reply], link: ServiceLink, wake: Callable[[], None]) -> None:
        self.future = future
        self.link = link
        self.wall, self.mono = steady_clock.now()
        self.checked_at = self.mono
        self.answered = 0.0
        self._wake = wake
        future.add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self.answered = time.monotonic()
        self._wake()


class ServiceLink(Protocol):
    """A connection to the service, as the EventSender uses it; no call but `drain` waits."""

    _address: str

    @property
    def address(self) -> str:
        """A description of the address."""
        return self._address

    @property
    def page(self) -> str | None:
        """The address at which the page opens, where the link knows it; the answer's goes first."""
        return None

    @property
    def is_open(self) -> bool:
        """Whether calls can be made: not once this process has left the service's Ray cluster."""
        return True

    def pack(self, payload: WirePayload) -> object:
        """Return `payload` in the form in which `record` sends it."""
        return payload

    def record(self, sender: Wire, events: list[Wire], payloads: Payloads) -> Future[Reply]:
        """Send a batch; the future completes after its commit."""
        ...

    def poll(
        self, sender: Wire, revision: int, unreceipted: list[int], wait: float
    ) -> Future[Reply]:
        """Request the plan and receipts, and renew the lease."""
        ...

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[Reply]:
        """Request `GET /steps/{step}/metrics` from the API, not from the coordinator.

        The future fails with NotFound while the step has no measurements, and with another error
        where the API is dead, restarting or silent.
        """
        ...

    def moved(self) -> bool:
        """Return whether the coordinator is gone and a new link is needed."""
        return False

    def is_silent(self) -> bool:
        """Return whether what the calls go through does not answer; a new link avoids it."""
        return False

    def drain(
        self,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        *,
        ended_by: JsonObject | None = None,
    ) -> JsonObject:
        """Wait, `timeout` seconds at most, for all receipts of a run.

        With an attempt key, that attempt is over: its processes are requested to finish first.
        `ended_by` describes the exception that ended its driver (`error_fields`), if one did.
        """
        ...

    def close(self) -> None:
        """Close the connections."""


class PlanHolder(Protocol):
    """The receiver of the plan, which comes with the answers to polls and batches."""

    @property
    def revision(self) -> int:
        """The revision that this process has applied."""
        ...

    def apply(self, plan: SentPlan) -> None:
        """Activate a plan."""
        ...


class SenderHooks(NamedTuple):
    """The functions that an EventSender calls, all of them in its thread."""

    connect: Callable[[], ServiceLink | None]
    """Searches for the service once; None while there is none."""
    sender: Callable[[Clock, int], Wire]
    """Returns the sender's tuple, given the plan's revision; called before each batch and poll."""
    prepare: Callable[[], None]
    """Called once, before anything else."""
    on_requests: Callable[[Sequence[Mapping[str, object]]], None]
    """Called with the service's requests in a poll's answer."""
    feed_watchdog: Callable[[], float]
    """Called regularly once a service was reached; returns the seconds until the next call."""
    on_connected: Callable[[str, str | None], None]
    """Called once, at the first answer to a poll: the link's address, and the page's."""
    on_unconnected: Callable[[str], None]
    """Called once, with the last error, where no service answered in time."""


def requested_pause(answer: ServiceAnswer) -> float:
    """Return the seconds for which an overloaded service requests its senders to wait."""
    pause = answer.get("pause")
    return float(pause) if isinstance(pause, int | float) and 0 < pause <= MAX_PAUSE else 0.0


def is_refusal(error: Exception) -> bool:
    """Return whether the service ran the call and raised, so that the link works."""
    if isinstance(error, StagescopeError):
        return error.code in {"error", "invalid_input", "invalid_event"}
    # Ray raises a RayTaskError that is also the actor's exception; its own transport errors (dead,
    # unavailable, timed out) are not RayTaskErrors.
    return any(kind.__name__ == "RayTaskError" for kind in type(error).__mro__)


_jitter: Final = random.Random()
"""A generator of our own: draws from Python's global one would change the training's."""


class Backoff:
    """Exponential backoff with jitter, so that a thousand ranks do not retry at once."""

    def __init__(self, first: float = 0.05, maximum: float = MAX_BACKOFF) -> None:
        self._first = first
        self._maximum = maximum
        self._failures = 0
        self.until = 0.0

    def fail(self) -> None:
        """Wait longer than last time."""
        delay = min(self._maximum, self._first * 2.0 ** min(self._failures, 20))
        self._failures += 1
        self.until = time.monotonic() + delay * _jitter.uniform(0.5, 1.0)

    def hold(self, seconds: float) -> None:
        """Wait at least about `seconds`; each sender waits for a different time."""
        if seconds > 0:
            self.until = max(self.until, time.monotonic() + seconds * _jitter.uniform(0.75, 1.25))

    def succeed(self) -> None:
        """Reset the delay."""
        self._failures = 0
        self.until = 0.0


def in_thread(call: Callable[[], Reply]) -> Future[Reply]:
    """Run `call` in a daemon thread: an executor would join its threads at exit."""
    future: Future[Reply] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="stagescope-call", daemon=True).start()
    return future


_RECENT: Final = 32
_MAX_AGE: Final = 600.0  # seconds: clocks drift, so an old sample is no evidence
_DRIFT: Final = 0.1  # seconds by which clocks drift apart in that time, generously


class Offset(NamedTuple):
    """Service's wall clock minus this process's, in seconds, known to within `error`."""

    offset: float
    error: float


class Clock:
    """Measures the offset of the service's clock by the shortest of the recent round trips."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, Offset]] = collections.deque(maxlen=_RECENT)

    def add(self, *, sent: float, duration: float, service: float, mono: float) -> None:
        """Add one round trip.

        Args:
            sent: this process's wall clock when the call was sent.
            duration: seconds until the answer, by the monotonic clock.
            service: the service's wall clock, read at any moment in between.
            mono: this process's monotonic clock now.
        """
        half = duration / 2
        measured = Offset(service - (sent + half), half)
        if self._samples:
            last = self._samples[-1][1]
            if abs(measured.offset - last.offset) > measured.error + last.error + _DRIFT:
                self._samples.clear()  # a clock was set
        self._samples.append((mono, measured))

    def best(self, mono: float) -> Offset | None:
        """Return the offset with the smallest error among recent samples."""
        recent = [offset for at, offset in self._samples if mono - at <= _MAX_AGE]
        return min(recent, key=lambda offset: offset.error, default=None)
