"""Carries out instructions: commits rows, then starts what rests on them. No Ray in here.

What an instruction starts runs in the background (an ingestor reads a payload, a step is
aggregated, a dump becomes an operator table). Its outcome is rows and further instructions, which
are carried out the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, Final, NamedTuple

from stagescope.wire.errors import (
    CatalogueUnavailable,
    NotReady,
    StagescopeError,
    StoreError,
    Unreachable,
)
from stagescope.wire.keep import matching_selectors, read_keep
from stagescope.wire.links import Link
from stagescope_service.background import BackgroundTasks
from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.hang_watch import HangWatch
from stagescope_service.coordinator.node_watch import NodeWatch
from stagescope_service.coordinator.retention import Limits, Retention
from stagescope_service.coordinator.retries import RetriedWork
from stagescope_service.coordinator.trigger_actions import (
    Acting,
    RequestCapture,
)
from stagescope_service.coordinator.trigger_watch import StepOrdering, TriggerWatch
from stagescope_service.coordinator.webhooks import Webhooks
from stagescope_service.coordinator.weight_comparer import WeightComparer
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.catalogue_rows import integer
from stagescope_service.core.findings import NOT_AGGREGATED, describe, finding, refused_row
from stagescope_service.core.hang_detection import StuckRules
from stagescope_service.core.instructions import (
    Aggregate,
    Ask,
    BuildOperatorTable,
    CompareWeights,
    Delete,
    DumpKey,
    DumpReported,
    Ingest,
    IngestJob,
    Instruction,
    NonFiniteScalars,
    PayloadKey,
    Put,
    ReadWatchdogs,
    Rejudge,
    Settled,
)
from stagescope_service.core.operator_tables import refusal
from stagescope_service.ingest.ingestors import IngestorClient, IngestorDied
from stagescope_service.rules.watch import REACH
from stagescope_service.service_file import page_address
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import RefusedWrite, Write
from stagescope_service.store.queries.measurements import SettledPayloads

logger = logging.getLogger(__name__)

_LEFT_OVER_AT_ONCE: Final = 4
"""Steps of an earlier coordinator that are aggregated at a time."""
_ESSENTIAL: Final = frozenset({"payloads", "summaries"})
"""Tables without whose rows a payload does not count as ingested."""

_REJUDGE_SECONDS: Final = 1.0
"""For so long no event may have changed a verdict before it is written,"""
_REJUDGE_AT_LATEST: Final = 10.0
"""but no longer after the first that did."""


class Clock(NamedTuple):
    """The clocks of a coordinator."""

    wall: Callable[[], float] = time.time
    """Unix seconds."""
    mono: Callable[[], float] = time.monotonic
    """Monotonic seconds."""


REAL_CLOCK: Final = Clock()


class Effects:
    """Carries out instructions; used from one event loop.

    Args:
        settings: of the service.
        commits: commits rows; of the state machine whose instructions these are.
        plan: says what is kept of a payload.
        ingestors: of all nodes.
        request_capture: what triggers request captures by.
        clock: of the service.
    """

    def __init__(
        self,
        settings: Settings,
        commits: Commits,
        plan: Plan,
        ingestors: IngestorClient,
        request_capture: RequestCapture,
        clock: Clock,
    ) -> None:
        self.catalogue = catalogue = Catalogue(settings.catalogue_url)
        self.commits = commits
        self.clock = clock
        self.wall = clock.wall
        rules = StuckRules(min_seconds=settings.stuck_seconds, factor=settings.stuck_factor)
        self.hangs = HangWatch(commits.state, rules, late_seconds=1.5 * settings.poll_seconds)
        self.nodes = NodeWatch(commits.state)
        limits = Limits(
            settings.kept_bytes, settings.kept_days, settings.kept_steps, settings.keep_row_steps
        )
        self.retention = Retention(catalogue, ingestors, self.write, limits)
        webhooks = Webhooks(hosts=settings.webhook_hosts)
        page = functools.partial(page_address, settings)
        acting = Acting(catalogue, self.retention.pin, request_capture, webhooks, page=page)
        self.triggers = TriggerWatch(
            catalogue, self.write, acting, webhook_hosts=settings.webhook_hosts
        )
        self._settings = settings
        self._state = commits.state
        self._plan = plan
        self._ingestors = ingestors
        self._aggregator = Aggregator(catalogue, ingestors, self.write)
        self._step_ordering = StepOrdering(REACH)
        self._weight_comparer = WeightComparer(catalogue, self.write, settings.weight_names)
        self._payloads: dict[PayloadKey, object] = {}
        self._turns = asyncio.Semaphore(_LEFT_OVER_AT_ONCE)
        self._left_over: set[Aggregate] = set()
        """Steps that an earlier coordinator left, and that are still to be aggregated."""
        self._due: Counter[Aggregate] = Counter()
        """Steps to aggregate as soon as what makes them due is on disk."""
        self._aggregating = RetriedWork[Aggregate, Aggregate](
            "the aggregation of", self._aggregate, self._aggregation_failed
        )
        self._building = RetriedWork[DumpKey, BuildOperatorTable](
            "the operator table of",
            self._build_operator_table,
            self._building_failed,
            # A dump that takes more memory than there is ends the ingestor that reads it, and
            # with it the reading of payloads.
            costly=(IngestorDied,),
        )
        self._rejudged: dict[Rejudge, tuple[float, float]] = {}
        """Steps to judge anew -> when that was first and last asked for; monotonic seconds."""
        self._tasks = BackgroundTasks()

    def open(self, left_over: Iterable[Instruction] = ()) -> None:
        """Begin with the stored rules of triggers, and with what an earlier coordinator left.

        Steps that are aggregated before the rules are read wait for them.
        """
        left_over = list(left_over)
        self._left_over.update(each for each in left_over if isinstance(each, Aggregate))
        for instruction in left_over:
            self.start(instruction)
        self._run(self.triggers.open(self._settings.triggers))
        self._run(self._weight_comparer.catch_up())
        self._adopt_files(self._ingestors.home)

    # --- instructions -----------------------------------------------------------------------
    def hold(self, instructions: Iterable[Instruction], payload: object) -> None:
        """Keep a payload's refs for as long as an ingestor reads them, and no longer."""
        for instruction in instructions:
            if isinstance(instruction, Ingest):
                self._payloads[instruction.key] = payload

    async def carry_out(self, instructions: Sequence[Instruction]) -> Sequence[RefusedWrite]:
        """Commit the rows, and only then start what the other instructions say.

        Returns the rows that the catalogue can never accept, each of which is a finding.
        """
        rows: list[Put | Delete] = []
        settled: list[PayloadKey] = []
        started: list[Instruction] = []
        due: list[Aggregate] = []
        names: set[str] = set()
        for each in instructions:
            kind = type(each)  # an event makes a few rows: by far the most of a batch
            if kind is Put or kind is Delete:
                rows.append(each)  # type: ignore[arg-type]
            elif isinstance(each, Settled):
                settled.append(each.key)
                names.add(each.key.incarnation)
            elif isinstance(each, Ask):
                names.add(each.incarnation)
            elif isinstance(each, Aggregate):
                due.append(each)
                started.append(each)
            elif not isinstance(each, DumpReported):  # which `Intake` handles
                started.append(each)
        self._due.update(due)
        try:
            refused = await self.commits.commit(rows, settled)
            for each in started:
                self.start(each)
        finally:
            self._due -= Counter(due)
        self.commits.notify(names)
        if refused:
            await self.commits.commit(self._report(refused))
        return refused

    def _report(self, refused: Iterable[RefusedWrite]) -> list[Put]:
        """Return the findings of rows that the catalogue refused."""
        found: list[Put] = []
        for write, reason in refused:
            logger.error("a row of %s was left out: %s", write.table, reason)
            row = write.row if isinstance(write, Put) else {}
            attempt = self._state.attempt(integer(row.get("attempt_id")) or 0)
            run = None if attempt is None else attempt.run
            found.append(self._state.refusals.add(refused_row(write, reason, run, self.wall())))
        return found

    async def write(self, rows: Sequence[Write]) -> None:
        """Commit rows: all of them or none.

        Raises:
            StoreError: the catalogue can never accept one of them.
        """
        await self.commits.commit_all(rows)

    def start(self, instruction: Instruction) -> None:
        """Start one instruction that is no row.

        Work that is under way for the same step, dump or version of weights is not started
        beside it, but once more after it.
        """
        if isinstance(instruction, Ingest):
            self._start_ingest(instruction)
        elif isinstance(instruction, Aggregate):
            if self._aggregating.takes(instruction, instruction):
                self._run(self._aggregating.carry_out(instruction, instruction))
        elif isinstance(instruction, BuildOperatorTable):
            if self._building.takes(instruction.key, instruction):
                self._run(self._building.carry_out(instruction.key, instruction))
        elif isinstance(instruction, CompareWeights):
            if self._weight_comparer.takes(instruction):
                self._run(self._weight_comparer.compare(instruction))
        elif isinstance(instruction, NonFiniteScalars):
            self._run(self.triggers.warn_non_finite(instruction))
        elif isinstance(instruction, Rejudge):
            now = self.clock.mono()
            first, _ = self._rejudged.get(instruction, (now, now))
            self._rejudged[instruction] = first, now
        elif isinstance(instruction, ReadWatchdogs):
            self._run(self._read_watchdogs(instruction))

    async def rejudge(self) -> None:
        """Write the verdicts that events have changed, once no more come; to be called often."""
        now = self.clock.mono()
        due = [
            step
            for step, (first, last) in self._rejudged.items()
            if now - last >= _REJUDGE_SECONDS or now - first >= _REJUDGE_AT_LATEST
        ]
        for step in due:
            asked = self._rejudged[step]
            await self.carry_out(self._state.rejudge(*step))
            if self._rejudged[step] == asked:
                del self._rejudged[step]
            else:  # more events came meanwhile
                _, last = self._rejudged[step]
                self._rejudged[step] = last, last

    async def settled(self) -> None:
        """Wait until nothing that was started is under way (for tests)."""
        await self._tasks.settled()

    def _run(self, work: Coroutine[object, Any, None]) -> None:
        self._tasks.start(work)

    # --- payloads ---------------------------------------------------------------------------
    def _start_ingest(self, instruction: Ingest) -> None:
        key = instruction.key
        payload = self._payloads.get(key)
        if payload is None:
            logger.error("payload %s has no refs; its process may offer it again", key)
            self._state.unread(key)
            return
        # Before anything is awaited: the plan and the process's settings may change.
        self._run(self._ingest_or_release(instruction, payload, self._keep(instruction)))

    def _keep(self, instruction: Ingest) -> list[str]:
        """Return the sections and names that the plan and the run's settings keep of a payload."""
        job, process = instruction.job, self._state.registry.processes[instruction.key.incarnation]
        work: dict[str, Any] = {"stage": job["stage"], "step": job["step"]}
        work |= {"role": process.role, "rank": process.rank}
        policy = read_keep(process.settings.get("keep"))
        own = () if policy is None else matching_selectors(policy, **work)
        return [*self._plan.keeps(run=job["run"], **work), *own]

    async def _ingest_or_release(
        self, instruction: Ingest, payload: object, keep: list[str]
    ) -> None:
        try:
            await self._ingest(instruction, payload, keep)
        except Exception:
            # Its refs would pin its bytes until the coordinator ends; it may be offered again.
            self.release(instruction.key)
            self._state.unread(instruction.key)
            raise

    async def _ingest(self, instruction: Ingest, payload: object, keep: list[str]) -> None:
        key, node_id = instruction.key, instruction.node_id
        job: IngestJob = instruction.job
        reservation = None
        if keep:
            with contextlib.suppress(Unreachable):  # then the home node's has it
                await self._ingestors.learn_nodes([node_id])
            self._adopt_files(self._ingestors.node_of(node_id))
            reservation = await self.retention.make_room(node_id, job)
            job = {**job, "keep": keep, "no_room": reservation.refused}
        outcome = await self._ingestors.ingest(node_id, key, job, payload)
        await self.settle(key, outcome.state, outcome.reason, outcome.rows, **outcome.columns)
        if reservation is not None:
            try:
                await self.retention.settled(reservation, outcome.rows)
            except StagescopeError:
                logger.exception("old kept files could not be deleted")
        for again in self._aggregator.arrived(job, outcome.rows):
            self.start(again)

    async def settle(
        self,
        key: PayloadKey,
        state: str,
        reason: str | None,
        rows: Sequence[Put] = (),
        **columns: object,
    ) -> None:
        """Record the end of a payload, with the rows that came of it.

        If the catalogue can never accept its statistics or its end, the payload ends as refused.
        """
        self.release(key)
        payload = self._state.payload(key)
        settled = self._state.settle(key, state, reason, self.wall(), **columns)
        refused = await self.carry_out([*rows, *settled])
        essential = [each.reason for each in refused if each.write.table in _ESSENTIAL]
        if essential and payload is not None:
            reason = f"the catalogue refused what came of it: {essential[0]}"
            await self.carry_out(self._state.refuse(payload, reason, self.wall()))

    async def settled_payloads(self, incarnation: str, seqs: Collection[int]) -> SettledPayloads:
        """Return what the catalogue knows of payloads of a process.

        Raises:
            NotReady: it cannot be read now.
        """
        try:
            return await asyncio.to_thread(self.catalogue.settled_payloads, incarnation, seqs)
        except CatalogueUnavailable as error:
            raise NotReady(
                str(error), advice="nothing was taken in; make the same call again"
            ) from error

    def release(self, key: PayloadKey) -> None:
        """Let go of the refs of a payload that is not read any more."""
        self._payloads.pop(key, None)

    # --- dumps and watchdogs ----------------------------------------------------------------
    async def _build_operator_table(self, instruction: BuildOperatorTable) -> None:
        node_id, job = instruction.node_id, instruction.job
        await self.write(await self._ingestors.build_operator_table(node_id, job))

    async def _building_failed(
        self, instruction: BuildOperatorTable, error: Exception, tries: int
    ) -> None:
        reason = f"the service failed to read it ({tries} tries): {describe(error)}"
        await self.write(refusal(instruction.job, StoreError(reason)))

    async def _read_watchdogs(self, instruction: ReadWatchdogs) -> None:
        try:
            found = await self._ingestors.read_watchdogs(instruction.node_id, instruction.paths)
            for incarnation, fields in found.items():
                await self.carry_out(self.hangs.watchdog(incarnation, fields, self.wall()))
        except Unreachable:
            return  # the next check of processes asks again
        except Exception:
            logger.exception("watchdogs of node %s could not be read", instruction.node_id)

    # --- steps ------------------------------------------------------------------------------
    async def _aggregate(self, step: Aggregate) -> None:
        attempt = self._state.attempt(step.attempt_id)
        run = "" if attempt is None else attempt.run
        late = await self._too_late(step)
        if late is not None:  # its parts may be gone: what was aggregated of them stays
            await self.write(late)
        else:
            forgotten = attempt is None or step.step not in attempt.steps
            async with self._turn(step):
                await self._aggregator.aggregate(step, run, forgotten=forgotten)
            key = {"finding_id": self._not_aggregated(step).row["finding_id"]}
            await self.write([Delete("findings", key)])
            await self._retire(step)
        self._check_rules(step)

    @contextlib.asynccontextmanager
    async def _turn(self, step: Aggregate) -> AsyncIterator[None]:
        """Let a few of the steps at a time that an earlier coordinator left; others need not wait.

        Side by side, hundreds of them would all end at once: a coordinator that is killed before
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
        if attempt is None or closed is None or step.step > closed - self._settings.keep_steps:
            return None
        oldest = await self._newest_retired(step.attempt_id, closed)
        if oldest is None or step.step > oldest:
            return None
        return await asyncio.to_thread(
            assembly.too_late, self.catalogue, step.attempt_id, step.step, attempt.run
        )

    async def _aggregation_failed(self, step: Aggregate, error: Exception, tries: int) -> None:
        """Report that a step could not be aggregated; it delays nothing."""
        try:
            await self.write([self._not_aggregated(step, error, tries)])
        finally:
            self._check_rules(step)

    def _check_rules(self, step: Aggregate) -> None:
        attempt_id, unfinished = step.attempt_id, self._unfinished(step)
        for number in self._step_ordering.aggregated(attempt_id, step.step, unfinished):
            self._run(self.triggers.aggregated(attempt_id, number))

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
            wall=self.wall(),
            severity="error",
            evidence={"error": reason, "tries": tries},
            advice="its payloads, scalars and the statistics of its parts are kept; it is tried "
            "again when more of it arrives and when the service starts anew; the coordinator's log "
            "has the traceback",
            see=(
                Link.to_step("ranks", step.step),
                Link.to_step("stages", step.step, shows="what is kept"),
            ),
        )

    def _unfinished(self, step: Aggregate) -> list[int]:
        """Return the other steps of the attempt that are still to be aggregated.

        A step leaves `pending` before its last payload is on disk, and is in `_due` from then on.
        """
        attempt = self._state.attempt(step.attempt_id)
        unread = [] if attempt is None else [each for each in attempt.pending if each is not None]
        closed = [each for each in unread if attempt is None or each not in attempt.open]
        aggregating = {*self._aggregating, *self._due} - {step}
        return closed + [each.step for each in aggregating if each.attempt_id == step.attempt_id]

    async def _retire(self, step: Aggregate) -> None:
        """Delete the parts and weight records of steps that are too old now, a step at a time.

        Their step summaries and the verdicts on their weights stay. Mostly it is one step; where
        fewer are kept than before, one transaction of all of them would hold up others for seconds.
        """
        oldest = await self._newest_retired(step.attempt_id, step.step)
        if oldest is None:
            return
        summarised = functools.partial(self.catalogue.summarised_steps, through=oldest)
        for number in sorted({oldest, *await asyncio.to_thread(summarised, step.attempt_id)}):
            key = {"attempt_id": step.attempt_id, "step": number}
            await self.write([Delete("summaries", key), Delete("weights", key)])

    async def _newest_retired(self, attempt_id: int, step: int) -> int | None:
        """Return the newest step whose parts are not kept where `step` is the newest closed."""
        return await asyncio.to_thread(
            self.catalogue.oldest_but, attempt_id, step, self._settings.keep_steps
        )

    # --- nodes ------------------------------------------------------------------------------
    def lost_nodes(self) -> Mapping[str, str]:
        """Return the nodes that the cluster lost, and why each."""
        return self._ingestors.lost_nodes()

    # --- kept files -------------------------------------------------------------------------
    def retire_files(self) -> None:
        """Delete kept files that are too old; to be called often."""
        self._run(self.retention.check())

    def _adopt_files(self, node: str) -> None:
        if not self.retention.is_adopted(node):
            self._run(self.retention.adopt_once(node))
