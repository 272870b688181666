"""Who was expected in a step and who has not arrived, since when: from the catalogue's rows.

A closed step keeps the verdict of its closing. An open one is judged now, by the same rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from stagescope_service.engine.completeness import judge, statuses_of_rows
from stagescope_service.engine.entities import Participants
from stagescope_service.store.catalogue import Catalogue

Row = dict[str, Any]
Expected = Mapping[str, Mapping[str, list[int]]]

OPEN: Final = "open"
ALL_ROWS: Final = 1_000_000
"""More rows than a step has: what must add up is not paged."""


class Arrival(NamedTuple):
    """How far a step has come."""

    complete: str
    """'complete', 'partial' or 'unknown' for a closed step, 'open' for another."""
    expected: Expected
    """role -> stage -> ranks."""
    missing: list[Row]
    """{"role", "rank", "stage", "status", "since"} of who has not ended a stage."""


def arrival(catalogue: Catalogue, attempt: Row, step: Row, stages: Iterable[Row]) -> Arrival:
    """Return who of a step has arrived, after the step's (not superseded) `stages`."""
    stages = list(stages)
    if step["closed_wall"] is not None:
        verdict = step["completeness"] or "unknown"
        return Arrival(verdict, step["expected"] or {}, _since(step["missing"] or [], stages))
    sizes = _world_sizes(catalogue.processes(attempt["attempt_id"]))
    judged = judge(
        statuses_of_rows(stages), size_of=sizes.get, before=_last_closed(catalogue, attempt, step)
    )
    missing = [item._asdict() for item in judged.missing]
    return Arrival(OPEN, judged.expected, _since(missing, stages))


def began(row: Row) -> float | None:
    """Return when a stage began, on the service's clock where the offset is known."""
    wall = row["begin_wall"]
    return None if wall is None else float(wall) + (row["clock_offset"] or 0.0)


def ended(row: Row) -> float | None:
    """Return when a stage ended, as `began`."""
    wall = row["end_wall"]
    return None if wall is None else float(wall) + (row["clock_offset"] or 0.0)


def _last_closed(catalogue: Catalogue, attempt: Row, step: Row) -> Participants | None:
    number = attempt["last_closed_step"]
    if number is None or number == step["step"]:
        return None
    found = catalogue.steps(attempt["attempt_id"], before=number + 1, limit=1)
    expected: Expected = (found[0]["expected"] or {}) if found else {}
    return {
        (role, stage): set(ranks) for role, by in expected.items() for stage, ranks in by.items()
    }


def _world_sizes(processes: Iterable[Row]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in processes:
        if row["world_size"]:
            sizes[row["role"]] = max(row["world_size"], sizes.get(row["role"], 0))
    return sizes


def _since(missing: Iterable[Mapping[str, Any]], stages: Iterable[Row]) -> list[Row]:
    """Add since when each has been missing: since it began, else since the first rank began."""
    own: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in stages:
        start = began(row)
        if start is None:
            continue
        own[row["role"], row["stage"]].append(start)
        if row["status"] not in ("ok", "failed"):
            own[row["role"], row["stage"], row["rank"]].append(start)
    found = []
    for item in missing:
        stage = (item["role"], item["stage"])
        starts = own.get((*stage, item["rank"])) or own.get(stage) or []
        found.append({**item, "since": min(starts, default=None)})
    return found
