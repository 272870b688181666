"""The Python stacks that were taken of processes."""

from __future__ import annotations

from typing import TypedDict

from stagescope_service.store.tables import StackRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models import steps as models
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import AttemptQuery, Dependencies
from stagescope_service.views.reading.rows import as_row
from stagescope_service.views.reading.target import Target
from stagescope_wire.schema import Part


class StackQuery(TypedDict):
    """The query parameters that select stacks; None: no filter."""

    role: str | None
    rank: int | None
    source: str | None
    request_id: str | None


def stack_row(row: StackRow) -> models.StackRow:
    """Return a row of the catalogue as the API answers it."""
    return as_row(models.StackRow, row, part=str(Part.of_columns(row)))


def step_stacks(
    deps: Dependencies, target: Target, page: Page, filters: StackQuery, stage: str | None = None
) -> JsonObject:
    """List the stacks that were taken in a step, a row a process, the newest first."""
    rows = deps.catalogue.stacks(
        attempt_id=target.attempt_id,
        step=target.step_number,
        stage=stage,
        **filters,
        limit=page.limit + 1,
        offset=page.offset,
    )
    return {**target.heading(), **page.first_of([stack_row(row) for row in rows])}


def stacks(
    deps: Dependencies, page: Page, attempt: AttemptQuery, filters: StackQuery
) -> JsonObject:
    """List the stacks that were taken in an attempt, of any step, the newest first."""
    target = deps.finder.attempt(*attempt)
    rows = deps.catalogue.stacks(
        attempt_id=target.attempt_id, **filters, limit=page.limit + 1, offset=page.offset
    )
    return {**target.heading(), **page.first_of([stack_row(row) for row in rows])}
