"""Changes of runs by people: names for lists, and the deletion of a run with its files.

A deletion is marked in the catalogue first. Then the run leaves the coordinator's memory, its files
leave the nodes, and its rows the catalogue, its own row last. Until then, processes that report
under its name wait. Whoever comes after a crash finds the mark, and continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from typing import Final

from stagescope_service.background import BackgroundTasks
from stagescope_service.coordinator.answers import Deleted
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.plan_changes import PlanChanges
from stagescope_service.coordinator.retention import Retention
from stagescope_service.coordinator.rules.watch import TriggerWatch
from stagescope_service.coordinator.runner import Clock
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.catalogue_rows import audit_row
from stagescope_service.core.findings import ATTEMPT_BUNDLED, describe
from stagescope_service.dumps.records import IMPORTED_CAPTURE
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.ingest.run_files import RunFiles
from stagescope_service.settings import Settings
from stagescope_service.store.artifacts import ring_directory
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.connect import free_pages
from stagescope_service.store.contract import Delete, Put, RemoveRun
from stagescope_service.store.queries.removal import RunHoldings
from stagescope_service.store.snapshot import USED_NUMBERS
from stagescope_wire.errors import Conflict, NotFound, Unreachable
from stagescope_wire.links import Link
from stagescope_wire.names import display_name
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import counted

logger = logging.getLogger(__name__)

_ROWS: Final = 2000
"""Rows that are removed in one transaction."""
_RETRY_SECONDS: Final = 5.0


@dataclasses.dataclass(slots=True)
class _Deletion:
    """A deletion that is under way."""

    figures: Deleted
    task: asyncio.Task[None]


class RunChanges:
    """Hides, names and deletes runs; used from one event loop.

    Args:
        settings: where the data directory and the catalogue are.
        catalogue: the store's reading side.
        ingestors: delete the files of their nodes.
        commits: commits rows, and leaves out those of deleted attempts.
        requests: the active captures.
        plan_changes: withdraws captures.
        retention: knows how many bytes are kept.
        triggers: has the newest steps of runs in memory.
        clock: the service's clock.
    """

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        ingestors: IngestorClient,
        commits: Commits,
        requests: CaptureRequests,
        plan_changes: PlanChanges,
        retention: Retention,
        triggers: TriggerWatch,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._ingestors = ingestors
        self._commits = commits
        self._state = commits.state
        self._requests = requests
        self._plan_changes = plan_changes
        self._retention = retention
        self._triggers = triggers
        self._wall, self._mono = clock
        self._deletions: dict[str, _Deletion] = {}
        self._tasks = BackgroundTasks()

    async def change(self, run: str, changes: JsonObject, by: str) -> None:
        """Set columns of a run that lists use: `hidden` and `display_name`.

        Raises:
            NotFound: there is no such run.
            Conflict: it is being deleted, or another run has this name or is shown so.
        """
        await self._check(run)
        if run in self._state.deleting:
            raise Conflict(f"run {run} is being deleted", advice="wait for its end")
        detail = {"run": run, **changes}
        if (name := changes.get("display_name")) is not None:
            shown = detail["display_name"] = display_name(str(name))
            await self._check_free(run, shown or "")
        audit = audit_row(self._wall(), by, "change_run", detail)
        await self._commits.commit_all([Put("runs", detail), audit])

    async def delete(self, run: str, by: str, *, dry_run: bool, wait: float) -> Deleted:
        """Delete a run, or continue; return once it is gone, or after `wait` seconds.

        With `dry_run` nothing is deleted, and the answer says what would be.

        Raises:
            NotFound: there is no such run.
            Conflict: it is live, or payloads of it are being read.
        """
        deletion = self._deletions.get(run)
        if deletion is None:
            await self._check(run)
            if run not in self._state.deleting:  # else an earlier coordinator began
                self._check_over(run)
            if dry_run:
                holdings = await self._holdings(run)
                return await self._counted(run, holdings, self._figures(run, holdings))
            self._check_over(run)  # it may have begun again meanwhile
            self._state.deleting.add(run)
            mark = Put("runs", {"run": run, "deleting_wall": self._wall()})
            last = {
                "attempt_id": self._state.registry.last_id,
                "revision": self._requests.plan.revision,
            }
            numbers = Put("meta", {"key": USED_NUMBERS, "value": last})
            audit = audit_row(self._wall(), by, "delete_run", {"run": run})
            try:
                await self._commits.commit_all([mark, numbers, audit])
            except BaseException:
                self._state.deleting.discard(run)
                raise
            deletion = self._begin(run)
        if not dry_run:
            await asyncio.wait([deletion.task], timeout=wait)
        return deletion.figures

    def resume(self, runs: Iterable[str]) -> None:
        """Continue the deletions that an earlier coordinator began."""
        for run in runs:
            self._begin(run)

    def _begin(self, run: str) -> _Deletion:
        self._state.deleting.add(run)
        empty = RunHoldings([], [], 0, 0, 0, 0, [], [], [], [], [])
        figures = self._figures(run, empty)
        task = self._tasks.start(self._delete(run, figures))
        self._deletions[run] = deletion = _Deletion(figures, task)
        return deletion

    async def _check(self, run: str) -> None:
        if not await asyncio.to_thread(self._catalogue.has_run, run):
            raise NotFound(f"there is no run {run!r:.200}", see=(Link("runs"),))

    async def _check_free(self, run: str, shown: str) -> None:
        """Refuse a display name by which people would mean another run."""
        names = await asyncio.to_thread(self._catalogue.run_names)
        other = next((name for name, text in names if name != run and shown in (name, text)), None)
        if other is not None:
            raise Conflict(
                f"run {other} has the name {shown!r:.200} or is shown so",
                expected="a display name of no other run",
                advice=f"choose another one, or rename run {other} first",
            )

    def _check_over(self, run: str) -> None:
        """Refuse a run that still reports, or whose payloads are being read."""
        live = [
            process
            for process in self._state.registry.processes.values()
            if process.live and self._state.registry.attempt_of(process).run == run
        ]
        if live:
            left = max(process.lease_until for process in live) - self._mono()
            one = live[0]
            raise Conflict(
                f"run {run} is live: {counted(len(live), 'process', 'processes')} of it may still "
                f"report, {one.role} rank {one.rank} among them",
                expected="a run that is over",
                advice="end the training first. A process that was killed counts as live for "
                f"{max(left, 0.0):.0f} s more, unless its probe finishes it",
            )
        if pending := self._state.pending(run):
            raise Conflict(
                f"{counted(len(pending), 'payload')} of run {run} is still to be read",
                expected="a run whose payloads are read",
                advice="wait a moment, and delete it then",
            )

    async def _holdings(self, run: str) -> RunHoldings:
        return await asyncio.to_thread(
            self._catalogue.run_holdings, run, imported=IMPORTED_CAPTURE, bundled=ATTEMPT_BUNDLED
        )

    def _figures(self, run: str, holdings: RunHoldings) -> Deleted:
        size = self._catalogue.bytes_on_disk()
        return {
            "run": run,
            "deleted": False,
            "attempts": len(holdings.attempt_ids),
            "steps": holdings.steps,
            "catalogue_rows": holdings.rows,
            "files": holdings.files,
            "bytes": holdings.bytes,
            "previous_catalogue_bytes": size,
            "catalogue_bytes": size,
            "left": [],
            "problem": None,
        }

    async def _delete(self, run: str, figures: Deleted) -> None:
        """Delete a run, with as many tries as it takes."""
        await self._withdraw_captures(run)
        while True:
            try:
                await self._delete_once(run, figures)
                break
            except Exception as error:
                if figures["problem"] is None:
                    logger.exception("run %s could not be deleted yet; it is tried again", run)
                figures["problem"] = describe(error)
                await asyncio.sleep(_RETRY_SECONDS)
        figures["problem"], figures["deleted"] = None, True
        self._state.deleting.discard(run)
        del self._deletions[run]

    async def _delete_once(self, run: str, figures: Deleted) -> None:
        holdings = await self._holdings(run)
        if not figures["catalogue_rows"]:
            figures.update(self._figures(run, holdings))
            figures["files"] = figures["bytes"] = 0  # from here on, those that are gone
        # What still works on it finds no attempt, and its rows are left out.
        self._commits.removed |= {*holdings.attempt_ids}
        self._state.remove(run, holdings.findings)
        self._triggers.forget(run)
        await self._delete_files(run, holdings, figures)
        ids = holdings.attempt_ids
        while await asyncio.to_thread(self._catalogue.has_rows_of, run, ids):
            began = self._mono()
            await self._commits.commit_all([RemoveRun(run, tuple(ids), _ROWS)])
            await asyncio.sleep(min(1.0, max(0.0, self._mono() - began)))
        await asyncio.to_thread(free_pages, self._settings.catalogue_url)
        figures["catalogue_bytes"] = self._catalogue.bytes_on_disk()
        done = {name: figures[name] for name in ("run", "catalogue_rows", "files", "bytes", "left")}
        audit = audit_row(self._wall(), "service", "run_deleted", done)
        await self._commits.commit_all([Delete("runs", {"run": run}), audit])

    async def _withdraw_captures(self, run: str) -> None:
        for entry in [*self._requests.plan.entries.values()]:
            if entry.request["run"] == run:
                _, rows = self._requests.remove(entry.capture_id, by="service", wall=self._wall())
                await self._plan_changes.change(rows)

    async def _counted(self, run: str, holdings: RunHoldings, figures: Deleted) -> Deleted:
        """Return figures with the files that the nodes have, in place of those of the catalogue.

        The catalogue lacks bundles, copies of operator tables, and what captures wrote beside their
        dumps. Its own count stays where a node does not answer.
        """
        files = self._files_of(run, holdings)
        try:
            await self._ingestors.learn_nodes(holdings.nodes)
            nodes = [node for node in self._nodes_of(holdings) if self._reaches(node)]
            counts = [await self._ingestors.count_run(node, files) for node in nodes]
        except Unreachable:
            return figures
        figures["files"] = sum(each.files for each in counts)
        figures["bytes"] = sum(each.bytes for each in counts)
        return figures

    def _files_of(self, run: str, holdings: RunHoldings) -> RunFiles:
        copies = self._settings.data_path / "copies"
        others = [str(copies / f"{each}.parquet") for each in holdings.checksums]
        return RunFiles(
            run, holdings.attempt_ids, holdings.keys, holdings.dumps, [*holdings.bundles, *others]
        )

    def _nodes_of(self, holdings: RunHoldings) -> Iterable[str]:
        return dict.fromkeys([self._ingestors.home, *holdings.nodes])

    def _reaches(self, node: str) -> bool:
        """Return whether a node has its own ingestor: its files are not another one's."""
        return self._ingestors.node_of(node) == node

    async def _delete_files(self, run: str, holdings: RunHoldings, figures: Deleted) -> None:
        """Delete the files on the home node, and on each other node that lives.

        Raises:
            Unreachable: the ingestor of a living node does not answer.
        """
        files = self._files_of(run, holdings)
        await self._ingestors.learn_nodes(holdings.nodes)
        figures["left"].clear()
        # A node that was started again has another id, and takes over what its disk holds.
        data = self._settings.data_path
        here = {node for node in holdings.nodes if ring_directory(data, node).is_dir()}
        for node in self._nodes_of(holdings):
            if not self._reaches(node):
                if node not in here:
                    figures["left"].append(f"node {node} is gone: files on its own disk stay there")
                continue
            removed = await self._ingestors.remove_run(node, files)
            figures["files"] += removed.files
            figures["bytes"] += removed.bytes
            figures["left"] += removed.problems
        await self._retention.recount()
