"""From the catalogue's rows to the rows of answers: names for people, clocks set right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stagescope.wire.errors import NotFound
from stagescope.wire.schema import LAYOUT_COLUMNS, PART_FIELDS
from stagescope_service.api.completeness import Arrival, began, ended

Row = dict[str, Any]


def run_row(row: Row) -> Row:
    """Return a run, with its newest attempt."""
    return {
        "run": row["run"],
        "live": row["live"],
        "attempt": row["attempt"],
        "attempt_key": row["attempt_key"],
        "attempts": row["attempts"],
        "last_closed_step": row["last_closed_step"],
        "created_wall": row["created_wall"],
        "last_wall": row["last_wall"],
        "settings": row["settings"],
    }


def attempt_row(row: Row) -> Row:
    """Return an attempt with its fingerprint."""
    state = "ended" if row["ended_wall"] is not None else "live" if row["live"] else "silent"
    return {
        "attempt": row["number"],
        "state": state,
        "begun": row["opened_wall"],
        "ended": row["ended_wall"],
        "end_reason": row["end_reason"],
        "attempt_key": row["key"],
        "resumed_from_step": row["resumed_from_step"],
        "first_step": row["first_step"],
        "last_closed_step": row["last_closed_step"],
        "unkeyed": row["unkeyed"],
        "processes": row["processes"],
        "last_wall": row["last_wall"],
        "fingerprint": row["fingerprint"],
    }


def superseded_steps(attempts: Sequence[Row]) -> dict[int, list[Row]]:
    """Return attempt number -> [{"from_step", "by"}]: what later attempts did again."""
    found: dict[int, list[Row]] = {}
    for row in attempts:
        number = row["number"]
        found[number] = [
            {"from_step": later["resumed_from_step"] + 1, "by": later["number"]}
            for later in sorted(attempts, key=lambda item: int(item["number"]))
            if later["number"] > number and later["resumed_from_step"] is not None
        ]
    return found


def step_row(
    row: Row,
    superseded_by: int | None,
    arrival: Arrival | None,
    gap: str | None,
    begun_again: Sequence[Row],
) -> Row:
    """Return a step.

    Args:
        row: of `Catalogue.steps`.
        superseded_by: the attempt that did it again.
        arrival: judges an open step.
        gap: what its numbers lack.
        begun_again: who began it again within its attempt.
    """
    closed = row["closed_wall"] is not None
    if closed or arrival is None:
        complete = (row["completeness"] or "unknown") if closed else "open"
        missing = row["missing"] or []
    else:
        complete, missing = arrival.complete, arrival.missing
    return {
        "step": row["step"],
        "run": row["run"],
        "attempt": row["attempt"],
        "complete": complete,
        "missing": missing,
        "superseded_by": superseded_by,
        "opened_wall": row["opened_wall"],
        "closed_wall": row["closed_wall"],
        "close_reason": row["close_reason"],
        "measured": row["has_whole"],
        "gap": gap,
        "begun_again": begun_again,
        "losses": row["losses"],
        "pinned": bool(row["pinned"]),
    }


def part_text(row: Mapping[str, Any]) -> str:
    """Return occurrence.epoch.minibatch.microbatch."""
    return ".".join(str(row[name] or 0) for name in PART_FIELDS)


def stage_row(row: Row, now: float) -> Row:
    """Return one part of a stage on one rank; `seconds` is monotonic, None while it is open."""
    begin, end = began(row), ended(row)
    seconds = None
    if row["begin_mono"] is not None and row["end_mono"] is not None:
        # Two raw calls are timed as they arrive, which may be in the other order.
        seconds = max(row["end_mono"] - row["begin_mono"], 0.0)
    is_open = (row["status"] or "open") == "open"
    return {
        "stage": row["stage"],
        "role": row["role"],
        "rank": row["rank"],
        "part": part_text(row),
        "status": row["status"] or "open",
        "seconds": seconds,
        "begin_wall": begin,
        "end_wall": end,
        "open_seconds": max(now - begin, 0.0) if is_open and begin is not None else None,
        "device_seconds": row["device_seconds"],
        "clock_error": row["clock_error"],
        "policy_version": row["policy_version"],
        "error_type": row["error_type"],
        "error_message": row["error_message"],
        "incarnation": row["incarnation"],
        "revision": row["revision"],
        "superseded": bool(row["superseded"]),
    }


def absent_row(missing: Row, now: float) -> Row:
    """Return a rank that has not begun a stage, as a row beside those that have."""
    since = missing["since"]
    return {
        "stage": missing["stage"],
        "role": missing["role"],
        "rank": missing["rank"],
        "part": None,
        "status": "not begun",
        "seconds": None,
        "begin_wall": None,
        "end_wall": None,
        "waited_since": since,
        "waited_seconds": None if since is None else max(now - since, 0.0),
    }


def scalar_row(row: Row) -> Row:
    """Return one named number of one rank."""
    return {
        "name": row["name"],
        "value": row["value"],
        "stage": row["stage"],
        "role": row["role"],
        "rank": row["rank"],
        "part": part_text(row),
        "wall": row["wall"],
    }


_DUMP = (
    "stage", "role", "rank", "state", "bytes", "files", "path", "node_id", "capture_id", "task",
    "level", "seconds", "error", "overrides", "estimate", "wall",
)  # fmt: skip


def dump_row(row: Row) -> Row:
    """Return one dump of one rank."""
    return {"part": part_text(row), **{name: row[name] for name in _DUMP}}


def numbered(rows: Iterable[Row], attempts: Mapping[int, int]) -> list[Row]:
    """Return rows with the attempt's number in place of its key in the catalogue."""
    found = []
    for row in rows:
        kept = {name: value for name, value in row.items() if name != "attempt_id"}
        found.append({**kept, "attempt": attempts.get(row["attempt_id"])})
    return found


def layout_of(process: Row) -> Row:
    """Return what is known of where a rank ran; the unknown is left out."""
    names = ("data_rank", "world_size", "node_id", "pid", *LAYOUT_COLUMNS)
    return {name: process[name] for name in names if process.get(name) is not None}


def chosen(rows: Sequence[Row], what: str, **filters: Any) -> list[Row]:
    """Return the rows whose columns equal the filters that are not None.

    Raises:
        NotFound: a filter's value is in none of the rows, with those that are.
    """
    for name, value in filters.items():
        if value is None:
            continue
        values = sorted({row[name] for row in rows if row[name] is not None})
        if rows and value not in values:
            raise no_value(name, value, values, what)
        rows = [row for row in rows if row[name] == value]
    return list(rows)


def no_value(name: str, value: Any, values: Sequence[Any], what: str) -> NotFound:
    """Return the error of a filter that nothing matches."""
    shown = ", ".join(map(str, values[:20])) + (", ..." if len(values) > 20 else "")
    return NotFound(
        f"{what} has no {name} {value!r:.100}", expected=f"one of {shown}" if values else ""
    )


class Lineage:
    """The attempts of a run: their numbers, and which did a step again."""

    def __init__(self, attempts: Sequence[Row]) -> None:
        self.numbers = {int(row["attempt_id"]): int(row["number"]) for row in attempts}
        self._resumed = [
            (int(row["number"]), int(row["resumed_from_step"]))
            for row in attempts
            if row["resumed_from_step"] is not None
        ]

    def superseded_by(self, row: Row) -> int | None:
        """Return the newest attempt that did (or will do) a step again; see `target`."""
        if row["superseded_by"] is not None:
            return int(row["superseded_by"])
        own = self.numbers[row["attempt_id"]]
        later = [n for n, resumed in self._resumed if n > own and resumed < row["step"]]
        return max(later, default=None)
