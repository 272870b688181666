"""The steps of a run, and the stages, scalars and dumps of one."""

from __future__ import annotations

from collections.abc import Mapping

from stagescope_service.core.completeness import NOT_BEGUN, PARTIAL
from stagescope_service.rules.missing import missing_ranks
from stagescope_service.store.queries.overview import ListedStep
from stagescope_service.store.tables import StageRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import BegunAgain
from stagescope_service.views.pages import Page, cursor
from stagescope_service.views.reading.completeness import (
    ALL_ROWS,
    StepProgress,
    attempts_of,
    begun_again,
    gaps,
    rows_removed,
    step_progress,
    without_gaps,
)
from stagescope_service.views.reading.dependencies import Dependencies, RankQuery
from stagescope_service.views.reading.rows import (
    Lineage,
    absent_row,
    matching,
    scalar_row,
    stage_row,
    step_row,
    unreported_steps,
)
from stagescope_service.views.reading.target import Target
from stagescope_wire.render import counted


class ScalarQuery(RankQuery):
    """The query parameters that select scalars; None: no filter."""

    name: str | None


def _page_of_steps(
    deps: Dependencies, target: Target, page: Page, attempt: int | None, to: int | None
) -> tuple[list[ListedStep], str | None]:
    """Return a page of steps and the cursor of the next: current steps, then superseded ones.

    The cursor holds the last step, how many rows with it were returned, and 1 among the superseded
    ones, so that steps which begin in between move nothing.
    """
    only = None if attempt is None else target.attempt_id
    parts = [None] if only is not None else [False, True]  # superseded: all, none, only these
    start = None if to is None else to + 1
    begun = page.position[2] if len(page.position) > 2 else 0
    shown: list[ListedStep] = []
    for part in range(begun, len(parts)):
        before, skip = start, 0
        if page.position and part == begun:
            before, skip = page.position[0], page.position[1] if len(page.position) > 1 else 0
        room = page.limit - len(shown)
        rows = deps.catalogue.steps(
            only, run=target.run, before=before, superseded=parts[part], limit=room + skip + 1
        )[skip:]
        shown += rows[:room]
        if len(rows) > room:
            last = rows[max(room - 1, 0)]["step"]
            returned = sum(row["step"] == last for row in rows[:room])
            if before is not None and last + 1 == before:
                returned += skip
            return shown, cursor(last + 1, returned, part)
    return shown, None


def _superseded_note(deps: Dependencies, run: str) -> str | None:
    """Return how many steps of which attempts later ones resumed before; None: there are none."""
    texts = [
        f"{counted(each['count'], 'step')} of attempt {each['attempt']} "
        f"({each['first']} to {each['last']})"
        for each in deps.catalogue.superseded_steps(run)
    ]
    if not texts:
        return None
    return (
        f"superseded, listed after the current steps: {', '.join(texts)}; "
        "a later attempt resumed before them"
    )


def progress_of(deps: Dependencies, target: Target) -> tuple[list[StageRow], StepProgress]:
    """Return a step's stages that are not superseded, and how far the step has come."""
    rows = deps.catalogue.stages(target.attempt_id, target.step_number, limit=ALL_ROWS)
    return rows, step_progress(deps.catalogue, target.attempt, target.step_row, rows)


def gap_of(deps: Dependencies, target: Target) -> str | None:
    """Return what the numbers of a step lack; None where they lack nothing.

    Called once they have been read: what was aggregated meanwhile is not in them.
    """
    key = (target.attempt_id, target.step_number)
    steps = deps.catalogue.steps(target.attempt_id, before=target.step_number + 1, limit=1)
    now = next((row for row in steps if row["step"] == target.step_number), target.step_row)
    text = gaps(deps.catalogue, [now]).get(key)
    if text is None and now["summary_wall"] != target.step_row["summary_wall"]:
        return "numbers without what was read last: ask again"
    return text


def begun_again_in(deps: Dependencies, target: Target) -> list[BegunAgain]:
    """Return the ranks that began a step again within its attempt."""
    rows = begun_again(deps.catalogue, [target.attempt_id], [target.step_number])
    return rows.get((target.attempt_id, target.step_number), [])


def steps(
    deps: Dependencies,
    page: Page,
    run: str | None = None,
    attempt: int | None = None,
    to: int | None = None,
) -> JsonObject:
    """List a run's steps, newest first; those that a later attempt repeats come last."""
    target = deps.finder.attempt(run, attempt)
    step_rows, next_cursor = _page_of_steps(deps, target, page, attempt, to)
    attempts = deps.catalogue.attempts(target.run)
    lineage, by_id = Lineage(attempts), {row["attempt_id"]: row for row in attempts}
    gap_texts = gaps(deps.catalogue, step_rows)
    repeated = begun_again(
        deps.catalogue, {row["attempt_id"] for row in step_rows}, {row["step"] for row in step_rows}
    )
    partial = [
        (row["attempt_id"], row["step"]) for row in step_rows if row["completeness"] == PARTIAL
    ]
    missing = missing_ranks(deps.catalogue, attempts_of(deps.catalogue, target.run), partial)
    rows = []
    for row in step_rows:
        own = by_id[row["attempt_id"]]
        progress = None
        if row["closed_wall"] is None:
            begun = deps.catalogue.stages(row["attempt_id"], row["step"], limit=ALL_ROWS)
            progress = step_progress(deps.catalogue, own, row, begun)
        superseded = lineage.superseded_by(row)
        key = (row["attempt_id"], row["step"])
        if key in missing:
            row["completeness"] = without_gaps(PARTIAL, missing[key])
            row["missing"] = missing[key]
        rows.append(step_row(row, superseded, progress, gap_texts.get(key), repeated.get(key, [])))
    notes = [unreported_steps(deps.catalogue, attempts)]
    notes += [_superseded_note(deps, target.run)] if attempt is None and len(attempts) > 1 else []
    note = "; ".join(filter(None, notes)) or None
    heading = {**target.heading(), "attempt": attempt, "note": note}
    return {**heading, "rows": rows, "next": next_cursor}


def stages(
    deps: Dependencies, target: Target, page: Page, ranks: RankQuery, superseded: bool = False
) -> JsonObject:
    """List the stages of a step by rank, and which ranks are missing."""
    now = deps.clock()
    rows, progress = progress_of(deps, target)
    if superseded:
        rows = deps.catalogue.stages(
            target.attempt_id, target.step_number, superseded=None, limit=ALL_ROWS
        )
    listed: list[Mapping[str, object]] = [stage_row(row, now) for row in rows]
    listed += [absent_row(each, now) for each in progress.missing if each["status"] == NOT_BEGUN]
    filtered = matching(listed, f"step {target.step_number}", **ranks)
    return {
        **target.heading(),
        "complete": progress.complete,
        "missing": progress.missing,
        "gap": gap_of(deps, target),
        "begun_again": begun_again_in(deps, target),
        "expected": progress.expected,
        "wall": now,
        **page.cut(filtered),
    }


def scalars(
    deps: Dependencies, target: Target, page: Page, ranks: RankQuery, name: str | None = None
) -> JsonObject:
    """List the numbers that ranks handed over (`loss`, `reward`, ...), by name and rank."""
    filters: ScalarQuery = {**ranks, "name": name}
    rows = deps.catalogue.scalars(
        target.attempt_id, target.step_number, **filters, limit=page.limit + 1, offset=page.offset
    )
    if not rows and not page.offset and any(value is not None for value in filters.values()):
        every = deps.catalogue.scalars(target.attempt_id, target.step_number, limit=ALL_ROWS)
        matching(every, f"step {target.step_number}", **filters)  # raises where a value is wrong
    return {
        **target.heading(),
        "begun_again": begun_again_in(deps, target),
        "gap": rows_removed(target.step_row),
        **page.first_of([scalar_row(row) for row in rows]),
    }
