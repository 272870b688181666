"""What the catalogue holds of an attempt, as `engine.stuck` judges it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stagescope.schema import PART_FIELDS, Part
from stagescope_service.api.completeness import ALL_ROWS, began, ended
from stagescope_service.engine.stuck import (
    GONE,
    LIVE,
    STEPS_REMEMBERED,
    UNHEARD,
    History,
    Pace,
    Place,
    Role,
    Standing,
    Stuck,
    StuckRules,
    history,
    judge,
)
from stagescope_service.store.catalogue import Catalogue

Row = dict[str, Any]

_OPEN_STEPS = 64


def stuck_rows(
    catalogue: Catalogue, attempt_id: int, step: int, now: float, rules: StuckRules
) -> list[Row]:
    """Return who is stuck in a step, or in one before it that is open, as rows of an answer."""
    listed = catalogue.steps(attempt_id, before=step + 1, limit=_OPEN_STEPS)
    open_steps = [row["step"] for row in listed if row["closed_wall"] is None]
    if step not in open_steps:
        return []
    closed = [row for row in listed if row["closed_wall"] is not None][:STEPS_REMEMBERED]
    numbers = [*open_steps, *(row["step"] for row in closed)]
    paces = _paces(catalogue.paces(attempt_id, numbers))
    # A stage that began between the two questions is one that the first did not hear of yet.
    rows = [
        row
        for row in catalogue.stages(attempt_id, open_steps, limit=ALL_ROWS)
        if row["begin_wall"] is None or (row["role"], _place(row)) in paces
    ]
    processes = _newest(catalogue.processes(attempt_id))
    found: list[Row] = []
    for role, ranks in processes.items():
        own = {place: pace for (its, place), pace in paces.items() if its == role}
        its_rows = [row for row in rows if row["role"] == role]
        view = _role(role, ranks, its_rows, own, closed, step)
        found += [
            stuck_row(role, stuck, len(view.standings), ranks.get(stuck.rank))
            for stuck in judge(view, now, rules)
        ]
    return sorted(found, key=lambda row: (row["step"], row["role"], row["rank"]))


def stuck_row(role: str, stuck: Stuck, ranks: int, process: Row | None) -> Row:
    """Return a rank that is stuck, with what it was judged by and where it ran."""
    where = process or {}
    return {
        "step": stuck.place.step,
        "stage": stuck.place.stage,
        "role": role,
        "rank": stuck.rank,
        "part": str(stuck.place.part),
        "status": stuck.status,
        "process": stuck.process,
        "seconds": stuck.seconds,
        "limit_seconds": stuck.limit.seconds,
        "usual_seconds": stuck.limit.usual,
        "history_steps": stuck.limit.steps,
        "ranks": ranks,
        "ranks_begun": stuck.begun,
        "ranks_ended": stuck.ended,
        "whole_role": stuck.whole_role,
        "since_wall": stuck.since,
        "host": where.get("host"),
        "pid": where.get("pid"),
        "node_id": where.get("node_id"),
    }


def _place(row: Mapping[str, Any]) -> Place:
    return Place(row["step"], row["stage"] or "", Part(*(row[name] or 0 for name in PART_FIELDS)))


def _paces(rows: Iterable[Row]) -> dict[tuple[str, Place], Pace]:
    found: dict[tuple[str, Place], Pace] = {}
    for row in rows:
        place = _place(row)
        pace = found.setdefault((row["role"], place), Pace(place))
        if row["first"] is not None:
            pace.begun(row["first"])
            pace.begun(row["last"])
        if row["longest"] is not None:
            pace.took(row["longest"])
    return found


def _newest(processes: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Return role -> rank -> its newest process, those that took leave apart."""
    found: dict[str, dict[int, Row]] = {}
    for row in processes:  # in the order in which they began
        if row["finished_wall"] is None:
            found.setdefault(row["role"], {})[row["rank"]] = row
        else:
            found.setdefault(row["role"], {}).pop(row["rank"], None)
    return {role: ranks for role, ranks in found.items() if ranks}


def _role(
    role: str,
    processes: Mapping[int, Row],
    rows: list[Row],
    paces: Mapping[Place, Pace],
    closed: list[Row],
    newest: int,
) -> Role:
    open_steps = {row["step"] for row in rows}
    at_open = {place: pace for place, pace in paces.items() if place.step in open_steps}
    # A step that all but a few have left says as much of how long its stages take.
    left = {place.step for place in paces} - {newest}
    earlier = [
        {place: pace for place, pace in paces.items() if place.step == step} for step in left
    ]
    histories = history(earlier, _participants(role, reversed(closed)))
    own: dict[int, list[Row]] = {}
    members: dict[Place, dict[int, list[str]]] = {}
    for row in rows:
        own.setdefault(row["rank"], []).append(row)
        members.setdefault(_place(row), {}).setdefault(row["rank"], []).append(row["status"])
    size = max((row["world_size"] or 0 for row in processes.values()), default=0)
    standings = dict.fromkeys(range(size), Standing(UNHEARD))
    for rank, process in processes.items():
        standings[rank] = _standing(process, own.get(rank, []), at_open)

    def ended_by(place: Place) -> Collection[int]:
        found = members.get(place, {})
        return {rank for rank, states in found.items() if {"ok", "failed"} & {*states}}

    return Role(
        standings,
        at_open,
        begun=lambda place: members.get(place, {}).keys(),
        ended=ended_by,
        history=lambda stage: histories.get(stage, History()),
    )


def _participants(role: str, steps: Iterable[Row]) -> dict[str, set[int]]:
    """Return stage -> who began it when it was done last, after the verdicts of closed steps."""
    found: dict[str, set[int]] = {}
    for step in steps:
        absent = {
            (item["stage"], item["rank"])
            for item in step["missing"] or []
            if item["role"] == role and item["status"] == "not begun"
        }
        for stage, ranks in ((step["expected"] or {}).get(role) or {}).items():
            found[stage] = {rank for rank in ranks if (stage, rank) not in absent}
    return found


def _standing(process: Row, rows: list[Row], paces: Mapping[Place, Pace]) -> Standing:
    gone = process["lapsed_wall"] is not None
    times = [at for row in rows for at in (began(row), ended(row)) if at is not None]
    if gone:
        times.append(process["lapsed_wall"])
    said = max(times, default=None)
    status = GONE if gone else LIVE
    begun = [row for row in rows if row["begin_wall"] is not None]
    begun.sort(key=lambda row: began(row) or 0.0)
    if not begun:
        return Standing(status, said)
    latest = begun[-1]
    left = [
        _place(row)
        for row in begun
        if row["status"] in ("open", "unfinished", None) and row["step"] == latest["step"]
    ]
    return Standing(status, said, left[-1] if left else None, paces[_place(latest)].first)
