"""Closed steps: their aggregation, the work after it, and verdicts that later events change."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.retries import RetriedWork
from stagescope_service.coordinator.rules.watch import TriggerWatch
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core.findings import NOT_AGGREGATED, describe, finding
from stagescope_service.core.instructions import Aggregate, Delete, Put, Rejudge
from stagescope_service.core.state import State
from stagescope_service.rules.watch import REACH
from stagescope_service.store.catalogue import Catalogue
from stagescope_wire.links import Link

_LEFT_OVER_AT_ONCE: Final = 4
"""Steps of an earlier coordinator that are aggregated at a time."""
_REJUDGE_SECONDS: Final = 1.0
"""A changed verdict is written once no event has changed it for this long,"""
_REJUDGE_AT_LATEST: Final = 10.0
"""or this long after the first event that changed it."""


class StepOrdering:
    """Aggregated steps of each attempt that wait for earlier ones.

    Args:
        most: steps of an attempt that may wait; beyond, the lowest are released.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[int, list[int]] = {}

    def aggregated(self, attempt_id: int, step: int, owed: Iterable[int]) -> list[int]:
        """Add an aggregated step; return the steps whose turn it is, in order.

        Args:
            attempt_id: the step's attempt.
            step: the aggregated step.
            owed: steps of the attempt that are still to be aggregated; each ends in such a call.
        """
        waiting = self._waiting.setdefault(attempt_id, [])
        at = bisect.bisect_left(waiting, step)
        if waiting[at : at + 1] != [step]:
            waiting.insert(at, step)
        first = min(owed, default=None)
        count = len(waiting) if first is None else bisect.bisect_right(waiting, first)
        count = max(count, len(waiting) - self._most)
        due, left = waiting[:count], waiting[count:]
        if left:
            self._waiting[attempt_id] = left
        else:
            del self._waiting[attempt_id]
        return due


class StepWork:
    """Aggregates closed steps and judges them again; used from one event loop.

    Args:
        runner: carries out the resulting instructions.
        state: the coordinator's state.
        catalogue: the store's reading side.
        aggregator: computes the summaries.
        triggers: evaluates the rules for each aggregated step.
        keep_steps: how many closed steps of an attempt keep the statistics of their parts.
        clock: the service's clock.
    """

    def __init__(
        self,
        runner: Runner,
        state: State,
        catalogue: Catalogue,
        aggregator: Aggregator,
        triggers: TriggerWatch,
        keep_steps: int,
        clock: Clock,
    ) -> None:
        self.keep_steps = keep_steps
        self._runner = runner
        self._state = state
        self._catalogue = catalogue
        self._aggregator = aggregator
        self._triggers = triggers
        self._clock = clock
        self._step_ordering = StepOrdering(REACH)
        self._turns = asyncio.Semaphore(_LEFT_OVER_AT_ONCE)
        self._left_over: set[Aggregate] = set()
        """Steps that an earlier coordinator left, and that are still to be aggregated."""
        self._aggregating = RetriedWork[Aggregate, Aggregate](
            "the aggregation of", self._aggregate, self._aggregation_failed
        )
        self._rejudged: dict[Rejudge, tuple[float, float]] = {}
        """Step -> first and last time that a new verdict on it was requested; monotonic seconds."""

    def adopt(self, left_over: Iterable[Aggregate]) -> None:
        """Note the steps that an earlier coordinator left: few of them run at a time."""
        self._left_over.update(left_over)

    # --- aggregation ------------------------------------------------------------------------
    def aggregate(self, step: Aggregate) -> None:
        """Start the aggregation of a step; once more after it if it is under way."""
        if self._aggregating.takes(step, step):
            self._runner.run(self._aggregating.carry_out(step, step))

    async def _aggregate(self, step: Aggregate) -> None:
        attempt = self._state.attempt(step.attempt_id)
        run = "" if attempt is None else attempt.run
        late = await self._too_late(step)
        if late is not None:  # its parts may be gone: their aggregated numbers stay
            await self._runner.write(late)
        else:
            forgotten = attempt is None or step.step not in attempt.steps
            async with self._turn(step):
                await self._aggregator.aggregate(step, run, forgotten=forgotten)
            key = {"finding_id": self._not_aggregated(step).row["finding_id"]}
            await self._runner.write([Delete("findings", key)])
            await self._retire(step)
        self._check_rules(step)

    @contextlib.asynccontextmanager
    async def _turn(self, step: Aggregate) -> AsyncIterator[None]:
        """Let a few of an earlier coordinator's steps run at a time; other steps need not wait.

        In parallel, hundreds of them would all end at once: a coordinator that is killed before
        would have done nothing.
        """
        if step not in self._left_over:
            yield
            return
        async with self._turns:
            try:
                yield
            finally:
                self._left_over.discard(step)

    async def _too_late(self, step: Aggregate) -> Sequence[Put | Delete] | None:
        attempt = self._state.attempt(step.attempt_id)
        closed = None if attempt is None else attempt.last_closed_step
        if attempt is None or closed is None or step.step > closed - self.keep_steps:
            return None
        oldest = await self._newest_retired(step.attempt_id, closed)
        if oldest is None or step.step > oldest:
            return None
        return await asyncio.to_thread(
            assembly.too_late, self._catalogue, step.attempt_id, step.step, attempt.run
        )

    async def _aggregation_failed(self, step: Aggregate, error: Exception, tries: int) -> None:
        """Report that a step could not be aggregated; it delays nothing."""
        try:
            await self._runner.write([self._not_aggregated(step, error, tries)])
        finally:
            self._check_rules(step)

    def _check_rules(self, step: Aggregate) -> None:
        attempt_id, unfinished = step.attempt_id, self._unfinished(step)
        for number in self._step_ordering.aggregated(attempt_id, step.step, unfinished):
            self._runner.run(self._triggers.aggregated(attempt_id, number))

    def _not_aggregated(
        self, step: Aggregate, error: Exception | None = None, tries: int = 0
    ) -> Put:
        attempt = self._state.attempt(step.attempt_id)
        reason = "" if error is None else describe(error)
        return finding(
            NOT_AGGREGATED,
            f"the summary of step {step.step} could not be aggregated ({tries} tries): {reason}",
            run="" if attempt is None else attempt.run,
            attempt_id=step.attempt_id,
            step=step.step,
            wall=self._clock.wall(),
            severity="error",
            evidence={"error": reason, "tries": tries},
            advice="its payloads, scalars and the statistics of its parts are kept. The service "
            "tries again when more of the step arrives, and when it restarts. The coordinator's "
            "log has the traceback",
            see=(
                Link.to_step("ranks", step.step),
                Link.to_step("stages", step.step, shows="what is kept"),
            ),
        )

    def _unfinished(self, step: Aggregate) -> list[int]:
        """Return the other steps of the attempt that are still to be aggregated.

        A step leaves `pending` before its last payload is on disk, and is `due` from then on.
        """
        attempt = self._state.attempt(step.attempt_id)
        unread = [] if attempt is None else [each for each in attempt.pending if each is not None]
        closed = [each for each in unread if attempt is None or each not in attempt.open]
        aggregating = {*self._aggregating, *self._runner.due()} - {step}
        return closed + [each.step for each in aggregating if each.attempt_id == step.attempt_id]

    async def _retire(self, step: Aggregate) -> None:
        """Delete the parts and weight records of steps that are too old now, a step at a time.

        Their step summaries and the verdicts on their weights stay. Usually it is one step. If
        fewer are kept than before, one transaction of all of them would block others for seconds.
        """
        oldest = await self._newest_retired(step.attempt_id, step.step)
        if oldest is None:
            return
        summarised = functools.partial(self._catalogue.summarised_steps, through=oldest)
        for number in sorted({oldest, *await asyncio.to_thread(summarised, step.attempt_id)}):
            key = {"attempt_id": step.attempt_id, "step": number}
            await self._runner.write([Delete("summaries", key), Delete("weights", key)])

    async def _newest_retired(self, attempt_id: int, step: int) -> int | None:
        """Return the newest step whose parts are not kept if `step` is the newest closed one."""
        return await asyncio.to_thread(
            self._catalogue.oldest_but, attempt_id, step, self.keep_steps
        )

    # --- verdicts ---------------------------------------------------------------------------
    def judge_again(self, step: Rejudge) -> None:
        """Note that events have changed the verdict on a closed step."""
        now = self._clock.mono()
        first, _ = self._rejudged.get(step, (now, now))
        self._rejudged[step] = first, now

    async def rejudge(self) -> None:
        """Write the verdicts that events have changed, once no more come; call it often."""
        now = self._clock.mono()
        due = [
            step
            for step, (first, last) in self._rejudged.items()
            if now - last >= _REJUDGE_SECONDS or now - first >= _REJUDGE_AT_LATEST
        ]
        for step in due:
            asked = self._rejudged[step]
            await self._runner.carry_out(self._state.rejudge(*step))
            if self._rejudged[step] == asked:
                del self._rejudged[step]
            else:  # more events came meanwhile
                _, last = self._rejudged[step]
                self._rejudged[step] = last, last
