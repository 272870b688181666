"""What is not a row: payloads go to ingestors, steps are aggregated. A thin Ray shell."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any, Final

from ray import exceptions

from stagescope.wire.errors import StagescopeError, StoreError, Unreachable
from stagescope_service.coordinator.aggregation import assembly as wholes
from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.coordinator.retention import Limits, Retention
from stagescope_service.coordinator.retries import RetriedWork
from stagescope_service.coordinator.trigger_actions import (
    Acting,
    Order,
    PinAnswer,
    Webhooks,
    gone_of,
)
from stagescope_service.coordinator.trigger_watch import StepOrdering, Triggers
from stagescope_service.coordinator.weight_comparer import WeightComparer
from stagescope_service.core.findings import NOT_AGGREGATED, describe, finding
from stagescope_service.core.instructions import (
    Aggregate,
    BuildOperatorTable,
    CompareWeights,
    Delete,
    DumpKey,
    Ingest,
    PayloadKey,
    Put,
    ReadWatchdogs,
)
from stagescope_service.core.operator_tables import refusal
from stagescope_service.ingest.actor import Ingestors
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.pins import Pinned
from stagescope_service.triggers.watch import REACH


class RayNodeFiles:
    """What `retention.Disks` promises; every call raises `Unreachable` where a node is gone."""

    def __init__(self, ingestors: Ingestors) -> None:
        self._ingestors = ingestors

    def place(self, node_id: str | None) -> str:
        """Return the node that stands in for one that is unknown or gone."""
        return self._ingestors.place(node_id)

    async def kept_files(self, node_id: str) -> list[str]:
        """Return the paths of the kept files that a node sees."""
        found: list[str] = await self._ask(node_id, "kept_files")
        return found

    async def describe_kept(
        self, node_id: str, paths: Sequence[str]
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (row of artifacts, job) of those files that can be read."""
        found: list[tuple[dict[str, Any], dict[str, Any]]]
        found = await self._ask(node_id, "describe_kept", paths)
        return found

    async def discard(self, node_id: str, paths: Sequence[str]) -> list[str]:
        """Delete files; return those that are gone."""
        gone: list[str] = await self._ask(node_id, "discard", paths)
        return gone

    async def _ask(self, node_id: str, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._ingestors.on(node_id), method).remote(*arguments)
        except exceptions.RayError as error:
            self._ingestors.forget(node_id)
            raise Unreachable(
                f"the ingestor of node {node_id} cannot be asked: {type(error).__name__}",
                advice="Ray is restarting it; it is asked again",
            ) from error


logger = logging.getLogger(__name__)

Reply = dict[str, Any]


_MOST_FILES: Final = 100_000


class RayEffects:
    """Carries out what is not a row: payloads go to ingestors, steps are aggregated."""

    reception: Coordinator

    def __init__(self, settings: Settings, order: Order) -> None:
        self._catalogue = Catalogue(settings.catalogue_url)
        self._ingestors = Ingestors(settings)
        limits = Limits(settings.kept_bytes, settings.kept_days, settings.kept_steps)
        self.retention = Retention(
            self._catalogue, RayNodeFiles(self._ingestors), self._write, limits
        )
        self._adopted: set[str] = set()
        self._keep_steps = settings.keep_steps
        self._former = Aggregator(self._catalogue, self, self._write)
        acting = Acting(self._catalogue, self, order, Webhooks())
        self._turns = StepOrdering(REACH)
        self.triggers = Triggers(self._catalogue, self._write, acting)
        self._weigher = WeightComparer(self._catalogue, self._write, settings.weight_names)
        self._aggregating = RetriedWork[Aggregate, Aggregate](
            "the aggregation of", self._aggregate, self._aggregation_failed
        )
        self._digesting = RetriedWork[DumpKey, BuildOperatorTable](
            "the operator table of",
            self._digest,
            self._digest_failed,
            # A dump that takes more memory than there is ends the ingestor that reads it, and
            # with it the reading of payloads.
            costly=(exceptions.RayActorError,),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, settings: Settings) -> None:
        """Take up the rules of triggers; steps that are aggregated meanwhile wait for them."""
        self._start(self.triggers.open(settings.triggers))
        self._start(self._weigher.catch_up())
        self._adopt(self._ingestors.home)

    def ingest(self, order: Ingest, payload: object) -> None:
        """Have the ingestor of the payload's node read it."""
        self._start(self._ingest(order, payload))

    def aggregate(self, order: Aggregate) -> None:
        """Aggregate a step; asked again meanwhile, it is aggregated once more after."""
        if self._aggregating.takes(order, order):
            self._start(self._aggregating.carry_out(order, order))

    def build_operator_table(self, order: BuildOperatorTable) -> None:
        """Have the ingestor of the dump's node make its table; asked again, once more after."""
        if self._digesting.takes(order.key, order):
            self._start(self._digesting.carry_out(order.key, order))

    def compare_weights(self, order: CompareWeights) -> None:
        """Compare the recorded weights of a version; asked again meanwhile, once more after."""
        if self._weigher.takes(order):
            self._start(self._weigher.compare(order))

    def read_watchdogs(self, order: ReadWatchdogs) -> None:
        """Have the ingestor of a node read the files of its watchdogs."""
        self._start(self._read_watchdogs(order))

    def look(self) -> None:
        """Look after what is kept; to be called often."""
        self._start(self.retention.look())

    def _adopt(self, node: str) -> None:
        """Take up the files that lie on a node, once."""
        if node not in self._adopted:
            self._adopted.add(node)
            self._start(self._adopt_now(node))

    async def _adopt_now(self, node: str) -> None:
        try:
            await self.retention.adopt(node)
        except StagescopeError:
            logger.exception("the kept files of node %s could not be looked through", node)
            self._adopted.discard(node)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ingest(self, order: Ingest, payload: object) -> None:
        key, node = order.key, order.node_id
        outcome: Reply | None = None
        reason = ""
        if order.job.get("keep"):
            self._adopt(self._ingestors.place(node))
            order.job["no_room"] = await self.retention.make_room(node, order.job)
        for _ in range(2):
            try:
                ingestor = self._ingestors.on(node)
                outcome = await ingestor.ingest.remote(tuple(key), order.job, payload)
                break
            except exceptions.RayActorError as error:
                reason = f"its ingestor died while reading it: {describe(error)}"
                self._ingestors.forget(node)
            except Exception as error:  # whatever it was, the payload ends here
                reason = f"it could not be handed to an ingestor: {describe(error)}"
                break
        if outcome is None:
            outcome = {"state": "lost", "reason": reason, "rows": [], "columns": {}}
        rows = [Put(table, row) for table, row in outcome["rows"]]
        try:
            await self.reception.settle(
                key, outcome["state"], outcome["reason"], rows, **outcome["columns"]
            )
        except StagescopeError as error:
            # Rows that the catalogue refuses must not leave the payload without an end.
            logger.exception("the outcome of %s was refused", key)
            reason = f"the catalogue refused what came of it: {describe(error)}"
            await self.reception.settle(key, "refused", reason)
        if order.job.get("keep"):
            await self._settle_kept(order, rows)
        for again in self._former.arrived(order.job, rows):
            self.aggregate(again)

    async def _settle_kept(self, order: Ingest, rows: Sequence[Put]) -> None:
        try:
            await self.retention.settled(order.node_id, order.job, rows)
        except StagescopeError:
            logger.exception("old kept files could not be deleted")

    async def _digest(self, order: BuildOperatorTable) -> None:
        try:
            rows = await self._ingestors.on(order.node_id).digest.remote(order.job)
        except exceptions.RayActorError:
            self._ingestors.forget(order.node_id)
            raise
        await self.reception.write([Put(table, row) for table, row in rows])

    async def _digest_failed(self, order: BuildOperatorTable, error: Exception, tried: int) -> None:
        reason = f"the service failed to read it ({tried} tries): {describe(error)}"
        await self.reception.write(refusal(order.job, StoreError(reason)))

    async def _read_watchdogs(self, order: ReadWatchdogs) -> None:
        try:
            ingestor = self._ingestors.on(order.node_id)
            found = await ingestor.read_watchdogs.remote(order.paths)
            for incarnation, fields in found.items():
                await self.reception.watchdog(incarnation, fields)
        except exceptions.RayActorError:
            self._ingestors.forget(order.node_id)  # the next look asks again
        except Exception:
            logger.exception("watchdogs of node %s could not be read", order.node_id)

    async def _write(self, rows: Sequence[Put | Delete]) -> None:
        await self.reception.write(rows)

    async def _aggregate(self, order: Aggregate) -> None:
        await self._form_once(order)
        self._hold_against_rules(order)

    async def _aggregation_failed(self, order: Aggregate, error: Exception, tried: int) -> None:
        """Say that a step could not be aggregated; it holds up nothing."""
        try:
            await self.reception.write([self._not_aggregated(order, error, tried)])
        finally:
            self._hold_against_rules(order)

    def _hold_against_rules(self, order: Aggregate) -> None:
        for step in self._turns.formed(order.attempt_id, order.step, self._owed(order)):
            self._start(self.triggers.formed(order.attempt_id, step))

    def _not_aggregated(
        self, order: Aggregate, error: Exception | None = None, tried: int = 0
    ) -> Put:
        attempt = self.reception.state.attempt(order.attempt_id)
        reason = "" if error is None else describe(error)
        return finding(
            NOT_AGGREGATED,
            f"the summary of step {order.step} could not be aggregated ({tried} tries): {reason}",
            run="" if attempt is None else attempt.run,
            attempt_id=order.attempt_id,
            step=order.step,
            wall=self.reception.wall(),
            severity="error",
            evidence={"error": reason, "tries": tried},
            advice="its payloads, scalars and the statistics of its parts are kept (/ranks, "
            "/stages); it is tried again when more of it arrives and when the service starts "
            "anew; the coordinator's log has the traceback",
        )

    async def _form_once(self, order: Aggregate) -> None:
        attempt = self.reception.state.attempt(order.attempt_id)
        closed = None if attempt is None else attempt.last_closed_step
        if closed is not None and order.step <= closed - self._keep_steps:
            oldest = await self._oldest_but(order.attempt_id, closed)
            if oldest is not None and order.step <= oldest:
                run = "" if attempt is None else attempt.run
                late = await asyncio.to_thread(
                    wholes.too_late, self._catalogue, order.attempt_id, order.step, run
                )
                if late is not None:  # its parts may be gone: what was aggregated of them stays
                    await self.reception.write(late)
                    return
        forgotten = attempt is None or order.step not in attempt.steps
        await self._former.form(order, "" if attempt is None else attempt.run, forgotten=forgotten)
        said = {"finding_id": self._not_aggregated(order).row["finding_id"]}
        await self.reception.write([*await self._retired(order), Delete("findings", said)])

    def _owed(self, order: Aggregate) -> list[int]:
        """Return the other steps of the attempt that are still to be aggregated.

        A step leaves `pending` before its last payload is on disk, and is in `due` from then on.
        """
        attempt = self.reception.state.attempt(order.attempt_id)
        unread = [] if attempt is None else [step for step in attempt.pending if step is not None]
        closed = [step for step in unread if attempt is None or step not in attempt.open]
        forming = {*self._aggregating, *self.reception.executor.due} - {order}
        return closed + [each.step for each in forming if each.attempt_id == order.attempt_id]

    async def _retired(self, order: Aggregate) -> list[Delete]:
        """Let the summaries of steps that are now too old go; their step summaries stay.

        So do their records of weights; what they were found to be stays.
        """
        oldest = await self._oldest_but(order.attempt_id, order.step)
        if oldest is None:
            return []
        summarised = functools.partial(self._catalogue.summarised_steps, through=oldest)
        steps = {oldest, *await asyncio.to_thread(summarised, order.attempt_id)}
        old = [{"attempt_id": order.attempt_id, "step": step} for step in sorted(steps)]
        return [Delete(table, each) for each in old for table in ("summaries", "weights")]

    async def _oldest_but(self, attempt_id: int, step: int) -> int | None:
        """Return the newest step whose parts are too old to be kept where `step` is the newest."""
        below = self._catalogue.oldest_but
        return await asyncio.to_thread(below, attempt_id, step, self._keep_steps)

    async def pin(self, attempt_id: int, step: int) -> PinAnswer:
        """Pin the payloads of a step on every node that has some (`Hands` of triggers).

        Kept files of a pinned step stay by themselves: they count among what it holds.
        """
        kept = await self._in_rings(attempt_id, step)
        payloads, size, gone = 0, 0, 0
        reasons: list[str] = []
        for node, rows in kept.items():
            try:
                said = await self._ingestors.on(node).pin.remote(attempt_id, step)
                pinned = Pinned(*said) if said else Pinned(0, 0, f"node {node} has no usable ring")
            except exceptions.RayError as error:
                reason = f"the ingestor of node {node} cannot be reached: {describe(error)}"
                pinned = Pinned(0, 0, reason)
            payloads, size = payloads + pinned.payloads, size + pinned.bytes
            reasons += [pinned.reason] if pinned.reason else []
            gone += 0 if pinned.reason else gone_of(rows, pinned.payloads)
        files = await asyncio.to_thread(
            self._catalogue.artifacts, attempt_id, step, kind="kept", limit=_MOST_FILES
        )
        payloads, size = payloads + len(files), size + sum(row["bytes"] or 0 for row in files)
        return PinAnswer(payloads, size, gone, tuple(reasons))

    async def unpin(self, attempt_id: int, step: int) -> bool:
        """Let the payloads of a step go; return whether every node's ring did."""
        done = True
        for node in await self._in_rings(attempt_id, step):
            try:
                done = await self._ingestors.on(node).unpin.remote(attempt_id, step) and done
            except exceptions.RayError:  # noqa: PERF203 - the other nodes' go all the same
                done = False
        return done

    async def _in_rings(self, attempt_id: int, step: int) -> dict[str | None, list[dict[str, Any]]]:
        """Return, by node, what the catalogue knows of a step's payloads in rings."""
        rows = await asyncio.to_thread(
            self._catalogue.artifacts,
            attempt_id, step, kind="ring", deleted=None, limit=_MOST_FILES,
        )  # fmt: skip
        found: dict[str | None, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["node_id"] or ""):
            found.setdefault(row["node_id"], []).append(row)
        return found

    async def restate(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: dict[str, Any],
        pair: tuple[str, str],
        skips: Sequence[tuple[int, int, int]],
    ) -> bytes | None:
        """Take a payload's statistics again without tokens that count elsewhere (`Hands`)."""
        try:
            ingestor = self._ingestors.on(node_id)
            summary: bytes | None = await ingestor.restate.remote(tuple(key), job, pair, skips)
        except exceptions.RayError:
            return None
        return summary

    async def join(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: dict[str, Any],
        sources: Sequence[tuple[Any, ...]],
    ) -> Reply | None:
        """Join a trainer's payload with rollouts (`Hands`)."""
        try:
            ingestor = self._ingestors.on(node_id)
            answer: Reply | None = await ingestor.join.remote(tuple(key), job, sources)
        except exceptions.RayError:
            return None
        return answer
