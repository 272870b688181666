"""Carries out instructions: commits their rows, then starts the dependent work. No Ray.

The work runs in the background: an ingestor reads a payload, a step is aggregated, a dump becomes
an operator table. Its outcome is rows and further instructions, carried out the same way.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from stagescope_service.background import BackgroundTasks
from stagescope_service.coordinator.commits import Commits
from stagescope_service.core.catalogue_rows import integer
from stagescope_service.core.findings import refused_row
from stagescope_service.core.instructions import (
    Aggregate,
    AnswerPoll,
    Delete,
    DumpReported,
    Instruction,
    PayloadKey,
    Put,
    Settled,
)
from stagescope_service.store.contract import RefusedWrite, Write

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Instruction)


class Clock(NamedTuple):
    """The clocks of a coordinator."""

    wall: Callable[[], float] = time.time
    """Unix seconds."""
    mono: Callable[[], float] = time.monotonic
    """Monotonic seconds."""


REAL_CLOCK: Final = Clock()


class Runner:
    """Carries out instructions; used from one event loop.

    Args:
        commits: commits the rows.
        clock: the service's clock.
    """

    def __init__(self, commits: Commits, clock: Clock) -> None:
        self._commits = commits
        self._state = commits.state
        self._wall = clock.wall
        self._starters: dict[type, Callable[[Any], None]] = {}
        self._due: Counter[Aggregate] = Counter()
        self._tasks = BackgroundTasks()

    def on(self, kind: type[T], start: Callable[[T], None]) -> None:
        """Let `start` begin the instructions of one kind; it must not wait."""
        self._starters[kind] = start

    async def carry_out(self, instructions: Sequence[Instruction]) -> Sequence[RefusedWrite]:
        """Commit the rows, and only then start the work of the other instructions.

        Returns the rows that the catalogue can never accept; each has become a finding.
        """
        rows: list[Put | Delete] = []
        settled: list[PayloadKey] = []
        started: list[Instruction] = []
        names: set[str] = set()
        for each in instructions:
            kind = type(each)  # an event makes a few rows: by far the most of a batch
            if kind is Put or kind is Delete:
                rows.append(each)  # type: ignore[arg-type]
            elif isinstance(each, Settled):
                settled.append(each.key)
                names.add(each.key.incarnation)
            elif isinstance(each, AnswerPoll):
                names.add(each.incarnation)
            elif not isinstance(each, DumpReported):  # `Intake` handles it
                started.append(each)
        due = [each for each in started if isinstance(each, Aggregate)]
        if due:
            self._due.update(due)
        try:
            refused = await self._commits.commit(rows, settled)
            for each in started:
                self.start(each)
        finally:
            if due:
                self._due -= Counter(due)
        self._commits.notify(names)
        if refused:
            await self._commits.commit(self._report(refused))
        return refused

    def due(self) -> list[Aggregate]:
        """Return the steps whose aggregation starts as soon as the rows before it are on disk."""
        return [*self._due]

    def _report(self, refused: Iterable[RefusedWrite]) -> list[Put]:
        """Return the findings of rows that the catalogue refused."""
        found: list[Put] = []
        for write, reason in refused:
            logger.error("a row of %s was left out: %s", write.table, reason)
            row = write.row if isinstance(write, Put) else {}
            attempt = self._state.attempt(integer(row.get("attempt_id")) or 0)
            run = None if attempt is None else attempt.run
            found.append(self._state.refusals.add(refused_row(write, reason, run, self._wall())))
        return found

    async def write(self, rows: Sequence[Write]) -> None:
        """Commit rows: all of them or none.

        Raises:
            StoreError: the catalogue can never accept one of them.
        """
        await self._commits.commit_all(rows)

    def start(self, instruction: Instruction) -> None:
        """Start the work of one instruction that is no row."""
        self._starters[type(instruction)](instruction)

    def run(self, work: Coroutine[object, Any, None]) -> None:
        """Run work in the background."""
        self._tasks.start(work)

    async def settled(self) -> None:
        """Wait until no work is under way (for tests)."""
        await self._tasks.settled()
