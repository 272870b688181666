"""Lists captures with their states, and finds the run of a request that names none."""

from __future__ import annotations

from collections.abc import Iterable

from stagescope_service.core.captures.agreement import AGREED, DONE
from stagescope_service.store.tables import CaptureRow
from stagescope_service.views.captures.progress import progress
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import LiveRun
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link
from stagescope_wire.names import requested_run


def captures(deps: Dependencies, page: Page, run: str | None = None) -> JsonObject:
    """List all captures that were ever requested, newest first, withdrawn ones too."""
    name = None if run is None else requested_run(run)
    every = deps.catalogue.captures(run=name)
    if run is not None and not every:  # a capture may wait for a run that has not reported yet
        every = deps.catalogue.captures(run=deps.finder.run(run))
    listed = every[page.offset : page.offset + page.limit]
    numbers: dict[int | None, int] = {
        attempt["attempt_id"]: attempt["number"]
        for each in {row["run"] for row in listed if row["run"] is not None}
        for attempt in deps.catalogue.attempts(each)
    }
    rows = [
        {
            **row,
            "state": progress(deps.catalogue, row).state
            if row["state"] in (AGREED, DONE)
            else row["state"],
            "attempt": numbers.get((row["spec"].get("agreement") or {}).get("attempt_id")),
        }
        for row in listed
    ]
    return page.answer(rows, more=len(every) > page.offset + page.limit)


def capture(deps: Dependencies, capture_id: str) -> JsonObject:
    """Return the progress of a capture: who acknowledged it, who collected, missed or failed."""
    row = deps.catalogue.capture(capture_id)
    if row is None:
        raise NotFound(
            f"no capture {capture_id!r:.100}", see=(Link("captures", shows="all of them"),)
        )
    return progress(deps.catalogue, row).answer()


def already_over(deps: Dependencies, row: CaptureRow) -> NotFound:
    """Return the error of removing a capture that is no longer active."""
    capture_id, state = row["capture_id"], progress(deps.catalogue, row).state
    by = f", removed by {row['removed_by']}" if row["removed_by"] else ""
    return NotFound(
        f"capture {capture_id} is no longer active: it is {state}{by}",
        advice="nothing is left to remove; what it collected stays",
        see=(Link("captures", name=capture_id),),
    )


def states_of(deps: Dependencies, capture_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of captures by id."""
    rows = [deps.catalogue.capture(capture_id) for capture_id in capture_ids]
    return {
        row["capture_id"]: progress(deps.catalogue, row).state for row in rows if row is not None
    }


def default_run(deps: Dependencies) -> tuple[str | None, list[LiveRun]]:
    """Return the run of requests without one, and the other live ones.

    A run that has ended is waited for. None if no run has reported: the coordinator then says what
    a capture may be requested for.
    """
    try:
        target = deps.finder.attempt(None)
    except NotFound:
        return None, []
    return target.run, target.also_live
