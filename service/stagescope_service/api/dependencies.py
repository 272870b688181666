"""What every route works with, and the kinds of parameters that they share."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Final, Protocol, TypeVar

from fastapi import Depends, Path, Query, Request

from stagescope.wire.errors import NotReady
from stagescope_service.api.engine_health import EngineHealth
from stagescope_service.api.operator_files import OperatorFiles
from stagescope_service.api.prometheus import Counts
from stagescope_service.api.requests import pattern, step_number
from stagescope_service.api.step_summaries import StepSummaries
from stagescope_service.api.target import Finder, Target
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue

Reply = dict[str, Any]


class Commands(Protocol):
    """The coordinator's calls, as the routes make them.

    Each is made on the server's event loop and must not block it. A reply with `not_ready` says
    that nothing was taken. An error of `stagescope.wire.errors` becomes the answer's problem; where
    the coordinator cannot be reached, `Unreachable` or `NotReady` is expected.
    """

    async def record_events(
        self,
        *,
        sender: Sequence[Any],
        events: Sequence[Sequence[Any]],
        payloads: Mapping[int, Any] | None = None,
    ) -> Reply:
        """Take in a batch; returns after its commit."""
        ...

    async def poll(
        self, *, sender: Sequence[Any], revision: int, unreceipted: Sequence[int], wait: float
    ) -> Reply:
        """Renew the sender's lease; returns news of the plan and receipts, after `wait` at most."""
        ...

    async def drain(
        self, *, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Reply:
        """Wait until nothing of a run (None: of any) is still to be read.

        With an attempt key its processes are asked to take leave, and waited for. Returns
        `{"run", "drained", "pending", "known", "missing"}`.
        """
        ...

    async def plan(self) -> Reply:
        """Return the plan in force: `{"revision", "captures"}`."""
        ...

    async def add_capture(self, *, spec: Mapping[str, Any], by: str, wait: float = 0.0) -> Reply:
        """Order a validated capture and return it with its id, agreed on or after `wait` s."""
        ...

    async def remove_capture(self, *, capture_id: str, by: str) -> Reply:
        """Withdraw a capture and return it."""
        ...

    async def set_triggers(self, *, document: Mapping[str, Any], by: str) -> Reply:
        """Put a validated document of rules in force and return its revision."""
        ...

    async def pin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let what is held of a step stay.

        Returns `{"attempt_id", "step", "pinned", "payloads", "bytes", "gone", "reasons"}`.
        """
        ...

    async def unpin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let the payloads of a step leave the rings: `{"attempt_id", "step", "unpinned"}`."""
        ...

    async def add_engine(self, *, engine: Mapping[str, Any], by: str) -> Reply:
        """Register a long-lived engine, or register it anew, and return it."""
        ...

    async def remove_engine(self, *, name: str, by: str) -> Reply:
        """Take an engine out of the registry: `{"name"}`."""
        ...

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return a piece of a file on a node; called in a thread, see `operator_files.Nodes`."""
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
        """Ask processes for their stacks: `{"request_id", "deadline_wall", "asked", "refused"}`."""
        ...

    async def status(self) -> Reply:
        """Return the coordinator's state; `not_ready` in it is the reason why it cannot serve."""
        ...


T = TypeVar("T")

AT_ONCE: Final = 2
KEPT: Final = 8
"""Answers of long questions."""


class Comparisons:
    """Runs questions that read whole operator tables."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._free = threading.BoundedSemaphore(at_once)
        self._at_once = at_once
        self._known: dict[tuple[str, ...], tuple[float, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(at_once, "api-comparisons")

    async def run(self, question: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Answer a question in a thread.

        Raises:
            NotReady: so many are being answered already.
        """
        return await asyncio.wrap_future(self.start(question, *arguments, **named))

    def start(self, question: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        """Begin to answer a question; see `run`."""
        if not self._free.acquire(blocking=False):
            raise NotReady(
                f"{self._at_once} comparisons are being computed, no more at a time",
                advice="ask again in a moment",
            )
        future = self._threads.submit(functools.partial(question, *arguments, **named))
        # Not when the asker goes away: the thread is busy until it is done.
        future.add_done_callback(lambda _: self._free.release())
        return future

    def once(
        self, key: tuple[str, ...], question: Callable[..., T], *arguments: Any
    ) -> tuple[float, Future[T]]:
        """Begin a long question, once however often it is asked while it is known.

        Returns:
            When it began (monotonic), and its answer to come; the last few are kept. One that
            failed is begun anew.

        Raises:
            NotReady: see `run`.
        """
        with self._lock:
            known = self._known.pop(key, None)
            if known is None or (known[1].done() and known[1].exception() is not None):
                known = (time.monotonic(), self.start(question, *arguments))
            self._known[key] = known
            done = [key for key, (_, future) in self._known.items() if future.done()]
            for old in done[:-KEPT]:
                del self._known[old]
            return known


@dataclasses.dataclass(frozen=True, slots=True)
class Dependencies:
    """The collaborators of the routes."""

    catalogue: Catalogue
    commands: Commands
    settings: Settings
    clock: Callable[[], float]
    finder: Finder
    measures: StepSummaries
    operator_files: OperatorFiles
    comparisons: Comparisons
    long_comparisons: Comparisons
    engine_health: EngineHealth
    counts: Counts


async def dependencies_of(request: Request) -> Dependencies:
    """Return the app's desk."""
    deps: Dependencies = request.app.state.deps
    return deps


Deps = Annotated[Dependencies, Depends(dependencies_of)]

RUN_PATTERN: Final = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}$"
STEP_PATTERN: Final = "^(latest|-?[0-9]{1,18})$"

Run = Annotated[
    str | None,
    Query(
        description="A run's name; default: the run whose training stage began last.",
        json_schema_extra=pattern(RUN_PATTERN),
    ),
]
AttemptNumber = Annotated[
    int | None,
    Query(ge=1, lt=1 << 31, description="An attempt; default: the newest that has the step."),
]
AttemptKey = Annotated[
    str | None,
    Query(max_length=500, description="Only attempts of this key, as the processes gave it."),
]
Rank = Annotated[int | None, Query(ge=0, lt=1 << 31, description="Only this rank.")]
Role = Annotated[str | None, Query(max_length=200, description="Only this role.")]
Stage = Annotated[
    str | None,
    Query(
        max_length=200,
        description="Only this stage; for statistics, the stage that they are taken from.",
    ),
]
Round = Annotated[int | None, Query(ge=0, lt=1 << 31, description="Only this round, from 0.")]
StepWord = Annotated[
    str,
    Path(
        description="The trainer's step, or `latest`.",
        examples=["5", "latest"],
        json_schema_extra=pattern(STEP_PATTERN),
    ),
]


def step_target(
    deps: Deps,
    step: StepWord,
    run: Run = None,
    attempt: AttemptNumber = None,
    attempt_key: AttemptKey = None,
) -> Target:
    """Return the step that a path and its query name."""
    return deps.finder.step(run, attempt, step_number(step), key=attempt_key)


def attempt_target(deps: Deps, run: Run = None, attempt: AttemptNumber = None) -> Target:
    """Return the attempt that a query names."""
    return deps.finder.attempt(run, attempt)


StepTarget = Annotated[Target, Depends(step_target)]
AttemptTarget = Annotated[Target, Depends(attempt_target)]
Row = dict[str, Any]
