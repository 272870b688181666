"""What views are made from: the collaborators, and the queries that several views have."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar

from stagescope_service.rules.memory import RunMemories
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.views.models.runs import Sparkline
from stagescope_service.views.reading.answers import Answers
from stagescope_service.views.reading.engine_health import EngineHealth
from stagescope_service.views.reading.judgements import Judgements
from stagescope_service.views.reading.operator_files import OperatorFiles
from stagescope_service.views.reading.prometheus import Counts
from stagescope_service.views.reading.step_summaries import StepSummaries
from stagescope_service.views.reading.target import Finder
from stagescope_wire.errors import InvalidInput, NotReady
from stagescope_wire.framing import WirePayload
from stagescope_wire.nonfinite import Json, JsonObject

Reply = dict[str, Json]
"""A reply of the coordinator; the models of the routes that pass it on name its fields."""


class Commands(Protocol):
    """The coordinator's methods that the routes call.

    They run on the server's event loop and must not block it. A reply with `not_ready` means that
    the coordinator did nothing. Errors of `stagescope_wire.errors` become problems. An
    implementation raises `Unreachable` or `NotReady` where it cannot reach the coordinator.
    """

    async def record_events(
        self,
        *,
        sender: Sequence[object],
        events: Sequence[Sequence[object]],
        payloads: Mapping[int, WirePayload] | None = None,
    ) -> Reply:
        """Record a batch of events; returns after their commit."""
        ...

    async def poll(
        self, *, sender: Sequence[object], revision: int, unreceipted: Sequence[int], wait: float
    ) -> Reply:
        """Renew the sender's lease; returns changes of the plan and receipts within `wait` s."""
        ...

    async def drain(
        self,
        *,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        ended_by: JsonObject | None = None,
    ) -> Reply:
        """Wait until all payloads of a run (None: every run) are read.

        With an attempt key, also ask the processes of these attempts to finish, and wait for them.
        Returns `{"run", "drained", "pending", "known", "missing"}`, with `lost` where something
        will never arrive.
        """
        ...

    async def plan(self) -> Reply:
        """Return the active plan: `{"revision", "captures"}`."""
        ...

    async def add_capture(self, *, spec: Mapping[str, object], by: str, wait: float = 0.0) -> Reply:
        """Validate and request a capture; returns it with its id, once agreed or after `wait` s."""
        ...

    async def remove_capture(self, *, capture_id: str, by: str) -> Reply:
        """Withdraw a capture and return it."""
        ...

    async def set_triggers(self, *, document: Mapping[str, object], by: str) -> Reply:
        """Make a validated document of rules the active one and return its revision."""
        ...

    async def test_webhook(self, *, rule: str, by: str) -> Reply:
        """Send a test message to the webhook of a rule: a `coordinator...WebhookTest`."""
        ...

    async def pin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Keep the payloads and files of a step until it is unpinned.

        Returns `{"attempt_id", "step", "pinned", "payloads", "bytes", "gone", "reasons"}`.
        """
        ...

    async def unpin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let the rings drop the payloads of a step: `{"attempt_id", "step", "unpinned"}`."""
        ...

    async def change_run(self, *, run: str, changes: Mapping[str, object], by: str) -> Reply:
        """Set `hidden` or `display_name` of a run: `{"run"}`."""
        ...

    async def delete_run(self, *, run: str, dry_run: bool, by: str, wait: float) -> Reply:
        """Delete a run with its files, once it is over: a `coordinator...Deleted`."""
        ...

    async def add_engine(self, *, engine: Mapping[str, object], by: str) -> Reply:
        """Register a long-lived engine, or replace it, and return it."""
        ...

    async def remove_engine(self, *, name: str, by: str) -> Reply:
        """Remove an engine from the registry: `{"name"}`."""
        ...

    async def note_bundle(
        self, *, run: str, attempt_id: int, step: int | None, message: str, path: str | None
    ) -> Reply:
        """Write where the bundle of an attempt is (None: why there is none): `{"finding_id"}`."""
        ...

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return a part of a file on a node; called in a thread, see `operator_files.Nodes`."""
        ...

    async def ask_stacks(
        self,
        *,
        attempt_id: int,
        role: str | None,
        ranks: Sequence[int] | None,
        seconds: float,
        by: str,
    ) -> Reply:
        """Request stacks of processes: `{"request_id", "deadline_wall", "asked", "refused"}`."""
        ...

    async def status(self) -> Reply:
        """Return the coordinator's state; its `not_ready` is the reason why it cannot serve."""
        ...


P = ParamSpec("P")

T = TypeVar("T")

MAX_RUNNING: Final = 2

MAX_CACHED: Final = 8
"""Finished computations whose results are kept."""

WAIT_SECONDS: Final = 5.0
"""Longest wait of a request for a long computation, in seconds; then it raises NotReady."""


class Computations:
    """Runs slow computations, such as those that read operator tables, in few threads."""

    def __init__(self, max_running: int = MAX_RUNNING) -> None:
        self._free = threading.BoundedSemaphore(max_running)
        self._max_running = max_running
        self._cached: dict[tuple[str, ...], tuple[float, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_running, "api-computations")

    async def run(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Call a function in a thread.

        Raises:
            NotReady: all threads are busy.
        """
        return await asyncio.wrap_future(self.start(function, *arguments, **keywords))

    def start(
        self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
    ) -> Future[T]:
        """Start a call in a thread; see `run`."""
        if not self._free.acquire(blocking=False):
            raise NotReady(
                f"{self._max_running} long computations are running, no more at a time",
                advice="ask again in a moment",
            )
        future = self._threads.submit(functools.partial(function, *arguments, **keywords))
        # A cancelled request does not release it: the thread is busy until the call returns.
        future.add_done_callback(lambda _: self._free.release())
        return future

    def start_once(
        self,
        key: tuple[str, ...],
        function: Callable[P, T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> tuple[float, Future[T]]:
        """Start a call, or return the running or finished one of the same key.

        Returns:
            The monotonic time at which it started, and its future. The last few finished calls
            are kept; one that failed is started again.

        Raises:
            NotReady: see `run`.
        """
        with self._lock:
            cached = self._cached.pop(key, None)
            if cached is None or (cached[1].done() and cached[1].exception() is not None):
                cached = (time.monotonic(), self.start(function, *arguments, **keywords))
            self._cached[key] = cached
            done = [key for key, (_, future) in self._cached.items() if future.done()]
            for old in done[:-MAX_CACHED]:
                del self._cached[old]
            return cached


async def wait_for(future: Future[T]) -> bool:
    """Wait `WAIT_SECONDS` at most for a future; return whether it is done."""
    waiting = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([waiting], timeout=WAIT_SECONDS)
    if not done:
        # The next request raises its error; asyncio must not log that it was never retrieved.
        waiting.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
    return bool(done)


@dataclasses.dataclass(frozen=True, slots=True)
class Dependencies:
    """The collaborators of the routes."""

    catalogue: Catalogue
    commands: Commands
    settings: Settings
    clock: Callable[[], float]
    finder: Finder
    step_summaries: StepSummaries
    operator_files: OperatorFiles
    computations: Computations
    long_computations: Computations
    """Those that may take minutes: one at a time."""
    answers: Answers
    judgements: Judgements
    memories: RunMemories
    sparklines: dict[int, tuple[int, Sparkline]]
    """attempt_id -> its last closed step, and the sparkline up to it."""
    engine_health: EngineHealth
    counts: Counts
    comparing: dict[tuple[str, ...], tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Key of a running comparison -> pieces that are done, pieces that are planned so far."""

    @classmethod
    def build(
        cls,
        *,
        catalogue: Catalogue,
        commands: Commands,
        settings: Settings,
        clock: Callable[[], float],
    ) -> Dependencies:
        """Return the collaborators of routes that read this catalogue."""
        return cls(
            catalogue=catalogue,
            commands=commands,
            settings=settings,
            clock=clock,
            finder=Finder(catalogue),
            step_summaries=StepSummaries(catalogue, settings.cache_steps),
            operator_files=OperatorFiles(commands, settings.data_path / "copies"),
            computations=Computations(),
            long_computations=Computations(1),
            answers=Answers(),
            judgements=Judgements(),
            memories=RunMemories(),
            sparklines={},
            engine_health=EngineHealth(clock),
            counts=Counts(catalogue),
        )

    def close(self) -> None:
        """End the work in the background and close the catalogue, once no request comes."""
        self.judgements.close()
        self.catalogue.close()


class RankQuery(TypedDict):
    """The query parameters that select a stage and ranks; None: no filter."""

    stage: str | None
    role: str | None
    rank: int | None


ALL_RANKS: Final[RankQuery] = {"stage": None, "role": None, "rank": None}


class AttemptQuery(NamedTuple):
    """The query parameters that name an attempt; None: the defaults that they document."""

    run: str | None = None
    attempt: int | None = None


class Window(TypedDict):
    """The steps that are requested; None: no bound."""

    first: int | None
    last: int | None


ALL_STEPS: Final[Window] = {"first": None, "last": None}


def check_window(window: Window) -> None:
    """Raise InvalidInput where the first step is after the last."""
    first, last = window["first"], window["last"]
    if first is not None and last is not None and first > last:
        raise InvalidInput(f"from is {first} and to is {last}", expected="from at most to")
