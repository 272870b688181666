"""What the catalogue holds of an attempt, as `engine.stuck` judges it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stagescope.wire.schema import PART_FIELDS, Part
from stagescope_service.api.completeness import ALL_ROWS, began, ended
from stagescope_service.core.hang_detection import (
    GONE,
    LIVE,
    SILENT,
    STEPS_REMEMBERED,
    UNHEARD,
    UNRESPONSIVE_KIND,
    History,
    Limit,
    Place,
    RankPosition,
    Role,
    StageTiming,
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
    processes = _newest(catalogue.processes(attempt_id))
    silent = _silent_rows(catalogue, attempt_id, step, processes, now)
    open_steps = [row["step"] for row in listed if row["closed_wall"] is None]
    if step not in open_steps:
        return silent
    closed = [row for row in listed if row["closed_wall"] is not None][:STEPS_REMEMBERED]
    numbers = [*open_steps, *(row["step"] for row in closed)]
    timings = _paces(catalogue.timings(attempt_id, numbers))
    # A stage that began between the two questions is one that the first did not hear of yet.
    rows = [
        row
        for row in catalogue.stages(attempt_id, open_steps, limit=ALL_ROWS)
        if row["begin_wall"] is None or (row["role"], _place(row)) in timings
    ]
    unheard = {(row["role"], row["rank"]) for row in silent}
    found: list[Row] = []
    for role, ranks in processes.items():
        own = {place: timing for (its, place), timing in timings.items() if its == role}
        its_rows = [row for row in rows if row["role"] == role]
        view = _role(role, ranks, its_rows, own, closed, step, unheard)
        found += [
            stuck_row(role, stuck, len(view.standings), ranks.get(stuck.rank))
            for stuck in judge(view, now, rules)
            if (role, stuck.rank) not in unheard
        ]
    return [*silent, *sorted(found, key=lambda row: (row["step"], row["role"], row["rank"]))]


def _silent_rows(
    catalogue: Catalogue,
    attempt_id: int,
    step: int,
    processes: Mapping[str, Mapping[int, Row]],
    now: float,
) -> list[Row]:
    """Return the ranks whose processes do not answer, as the coordinator found; longest first.

    They hold up the newest step, whichever one they were in.
    """
    if catalogue.steps(attempt_id, before=step + 2, limit=1)[0]["step"] != step:
        return []
    every = [row for ranks in processes.values() for row in ranks.values()]
    if all(row["lapsed_wall"] is not None for row in every):
        return []  # what a lost job left is lost, not stuck
    by_name = {row["incarnation"]: row for row in every}
    found: list[Row] = []
    for noticed in catalogue.findings(attempt_id=attempt_id, kind=UNRESPONSIVE_KIND):
        said = noticed["evidence"] or {}
        process = by_name.get(str(said.get("incarnation")))
        if noticed["over_wall"] is not None or process is None:
            continue
        since = float(said["since_wall"])
        stuck = Stuck(
            process["rank"],
            Place(noticed["step"], noticed["stage"] or "", _part(said.get("part"))),
            str(said["status"]),
            SILENT if process["lapsed_wall"] is None else GONE,
            since,
            max(now - since, 0.0),
            Limit(float(said["limit_seconds"]), None, 0),
            *_members(catalogue, attempt_id, noticed),
            False,
        )
        ranks = max(process["world_size"] or 0, len(processes[process["role"]]))
        found.append(stuck_row(process["role"], stuck, ranks, process))
    return sorted(found, key=lambda row: (row["since_wall"], row["role"], row["rank"]))


def _part(text: str | None) -> Part:
    return Part() if text is None else Part(*map(int, text.split(".")))


def _members(catalogue: Catalogue, attempt_id: int, noticed: Row) -> tuple[int, int]:
    """Return how many ranks began, and ended, the stage that a finding names."""
    place = {name: noticed[name] for name in ("step", "stage", "role")}
    rows = catalogue.stages(attempt_id, **place, limit=ALL_ROWS)
    done = {row["rank"] for row in rows if row["status"] in ("ok", "failed")}
    return len({row["rank"] for row in rows}), len(done)


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


def _paces(rows: Iterable[Row]) -> dict[tuple[str, Place], StageTiming]:
    found: dict[tuple[str, Place], StageTiming] = {}
    for row in rows:
        place = _place(row)
        timing = found.setdefault((row["role"], place), StageTiming(place))
        if row["first"] is not None:
            timing.begun(row["first"])
            timing.begun(row["last"])
        if row["longest"] is not None:
            timing.took(row["longest"])
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
    timings: Mapping[Place, StageTiming],
    closed: list[Row],
    newest: int,
    unheard: Collection[tuple[str, int]],
) -> Role:
    open_steps = {row["step"] for row in rows}
    at_open = {place: timing for place, timing in timings.items() if place.step in open_steps}
    # A step that all but a few have left says as much of how long its stages take.
    left = {place.step for place in timings} - {newest}
    earlier = [
        {place: timing for place, timing in timings.items() if place.step == step} for step in left
    ]
    histories = history(earlier, _participants(role, reversed(closed)))
    own: dict[int, list[Row]] = {}
    members: dict[Place, dict[int, list[str]]] = {}
    for row in rows:
        own.setdefault(row["rank"], []).append(row)
        members.setdefault(_place(row), {}).setdefault(row["rank"], []).append(row["status"])
    size = max((row["world_size"] or 0 for row in processes.values()), default=0)
    standings = dict.fromkeys(range(size), RankPosition(UNHEARD))
    for rank, process in processes.items():
        silent = (role, rank) in unheard
        standings[rank] = _standing(process, own.get(rank, []), at_open, silent)

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


def _standing(
    process: Row, rows: list[Row], timings: Mapping[Place, StageTiming], silent: bool
) -> RankPosition:
    times = [at for row in rows for at in (began(row), ended(row)) if at is not None]
    said = max(times, default=None)
    status = GONE if process["lapsed_wall"] is not None else SILENT if silent else LIVE
    begun = [row for row in rows if row["begin_wall"] is not None]
    begun.sort(key=lambda row: began(row) or 0.0)
    if not begun:
        return RankPosition(status, said)
    latest = begun[-1]
    left = [
        _place(row)
        for row in begun
        if row["status"] in ("open", "unfinished", None) and row["step"] == latest["step"]
    ]
    return RankPosition(status, said, left[-1] if left else None, timings[_place(latest)].first)
