"""Requests and withdraws captures; resolves baselines and the worst ranks of a request.

With a baseline, msprobe writes only the tensors of operators whose outputs differ for equal inputs.
It compares the checksums that both dumps have (summary_mode md5).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.plan_changes import PlanChanges
from stagescope_service.coordinator.runner import Clock
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.catalogue_rows import audit_row
from stagescope_service.settings import Settings
from stagescope_service.statistics import StepSummary, publish_cell
from stagescope_service.store.artifacts import confine
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import CaptureRow
from stagescope_wire.captures import validate_capture
from stagescope_wire.errors import Conflict
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.plan import BaselineDump, CaptureSpec, StoredCapture
from stagescope_wire.schema import Part

_MAX_DUMPS: Final = 100_000
_MAX_WAIT: Final = 60.0
"""Seconds that one call waits for an agreement."""


class CaptureCommands:
    """Requests and withdraws captures.

    Args:
        settings: the service's settings.
        catalogue: the store's reading side.
        commits: says whether the catalogue can be written.
        requests: the active capture requests.
        plan_changes: commits a change, and informs every rank.
        clock: the service's clock.
    """

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        commits: Commits,
        requests: CaptureRequests,
        plan_changes: PlanChanges,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._commits = commits
        self._requests = requests
        self._plan_changes = plan_changes
        self._wall, self._mono = clock

    async def add(self, spec: JsonObject, *, by: str, wait: float) -> dict[str, Json]:
        """Request a capture; return it once it is agreed on, or after `wait` seconds.

        Raises:
            InvalidInput: the request is wrong.
            NotReady: the catalogue cannot be written; nothing changed.
            Conflict: the request refers to something that does not exist.
        """
        settings, requests = self._settings, self._requests
        # In a thread: resolving the links of a path may wait for a slow file system.
        roots = [str(root) for root in settings.roots]
        valid = await asyncio.to_thread(validate_capture, spec, allowed_roots=roots)
        self._commits.check_ready()  # before the plan changes: a refused caller may try again
        if valid["data_dir"] is None:
            valid["data_dir"] = str(settings.data_path)
        valid = await asyncio.to_thread(with_ranks, self._catalogue, valid)
        valid = await asyncio.to_thread(with_baseline, self._catalogue, valid, settings.roots)
        entry = requests.add(valid, by=by, mono=self._mono(), wall=self._wall())
        audit = audit_row(self._wall(), by, "add_capture", entry.stored())
        await self._plan_changes.change([requests.row(entry), audit])
        await self._plan_changes.check()
        found = await self._plan_changes.agreed(entry.capture_id, min(wait, _MAX_WAIT))
        remarks = {"notes": requests.notes(entry), "warnings": requests.warnings(entry)}
        if found is not None:
            return {**found.stored(), **remarks}
        # It ended at once: the catalogue has its outcome.
        row = await asyncio.to_thread(self._catalogue.capture, entry.capture_id)
        return {**(entry.stored() if row is None else row["spec"]), **remarks}

    async def add_for_trigger(self, spec: JsonObject, by: str) -> JsonObject:
        """Request a capture for a firing, without waiting for its agreement."""
        return await self.add(spec, by=by, wait=0.0)

    async def remove(self, capture_id: str, *, by: str) -> StoredCapture:
        """Withdraw a capture and return it."""
        self._commits.check_ready()
        entry, rows = self._requests.remove(capture_id, by=by, wall=self._wall())
        audit = audit_row(self._wall(), by, "remove_capture", entry.stored())
        await self._plan_changes.change([*rows, audit])
        return entry.stored()


def with_baseline(catalogue: Catalogue, capture: CaptureSpec, roots: Iterable[Path]) -> CaptureSpec:
    """Return a request with the directories of the dumps that its `bench` names.

    Each rank selects its own: `bench["dumps"]` holds rows of stage, part, role, ranks and `path`,
    the directory for msprobe's bench_path.

    Raises:
        Conflict: that capture has no dump of that step, or none with checksums.
        Forbidden: a dump lies outside `roots`.
    """
    baseline = capture.get("bench")
    if baseline is None:
        return capture
    _check_checksums(catalogue.capture(baseline["capture_id"]), baseline["capture_id"])
    rows = [
        (row, Path(row["path"]))
        for row in catalogue.captured(baseline["capture_id"], limit=_MAX_DUMPS)
        if row["step"] == baseline["step"] and row["state"] == "complete" and row["path"]
    ]
    if not rows:
        raise Conflict(
            f"capture {baseline['capture_id']} left no dump in step {baseline['step']}",
            expected="a capture, and a step that it collected",
            see=(Link("captures", name=baseline["capture_id"], shows="the dumps of its steps"),),
        )
    allowed = list(roots)
    ranks: dict[tuple[str, str, str, str], set[int]] = {}
    for row, path in rows:
        # msprobe appends step0/rank{R}.
        directory = confine(path.parent.parent, allowed)
        part = str(Part.of_columns(row))
        place = (row["stage"], part, row["role"], str(directory))
        ranks.setdefault(place, set()).add(row["rank"])
    dumps: list[BaselineDump] = [
        {"stage": stage, "part": part, "role": role, "path": path, "ranks": sorted(found)}
        for (stage, part, role, path), found in ranks.items()
    ]
    return {**capture, "bench": {**baseline, "dumps": dumps}}


def _check_checksums(row: CaptureRow | None, capture_id: str) -> None:
    """Refuse a baseline without checksums, because msprobe compares them."""
    config = None if row is None else row["spec"].get("config")
    if config is None:
        return  # the configuration is a file that only its ranks have read
    task = config.get("task") or "statistics"
    if (config.get(task) or {}).get("summary_mode") != "md5":
        raise Conflict(
            f"capture {capture_id} has no checksums for msprobe to compare",
            expected=f"a capture with {task}.summary_mode 'md5' in its config",
        )


def worst_ranks(step_summary: StepSummary, count: int) -> list[int]:
    """Return the ranks with the highest mean |d|, the worst first; non-finite means come first."""
    found: dict[int, float] = {}
    for row in step_summary.ranks:
        mean = publish_cell(row.cell, step_summary.summary.pair)["logprob_abs_diff/mean"]
        found[row.rank] = max(found.get(row.rank, -math.inf), math.inf if mean != mean else mean)
    return sorted(found, key=lambda rank: (-found[rank], rank))[:count]


def with_ranks(catalogue: Catalogue, capture: CaptureSpec) -> CaptureSpec:
    """Return a request with the ranks that `worst(k)` selects now, in a run's newest attempt.

    Raises:
        Conflict: there is no measurement to sort the ranks by.
    """
    ranks = capture["ranks"]
    if not isinstance(ranks, Mapping):
        return capture
    row = catalogue.newest_summary(capture["run"])
    if row is None or row["step_summary"] is None:
        raise Conflict(
            "no step has numbers yet, so there is no worst rank",
            expected="ranks by number, or 'all'",
        )
    chosen = worst_ranks(StepSummary.from_bytes(row["step_summary"]), ranks["worst"])
    return {**capture, "ranks": sorted(chosen)}
