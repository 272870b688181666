"""The ranks that are stuck in a step, and those that they wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from stagescope_service.core.departures import STAGE_LOSS
from stagescope_service.core.entities import FINISHED, StageKey, StageTiming
from stagescope_service.core.hangs import detection as hang_detection
from stagescope_service.core.hangs.detection import (
    GONE,
    LIVE,
    SILENT,
    STEPS_REMEMBERED,
    STUCK_KIND,
    UNHEARD,
    UNRESPONSIVE_KIND,
    Limit,
    RankPosition,
    StageHistory,
    Stuck,
    StuckRules,
    history,
    judge,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import ListedAttempt, ListedStep
from stagescope_service.store.queries.runs import PartTiming
from stagescope_service.store.tables import FindingRow, ProcessColumns, StageRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.steps import StuckRow
from stagescope_service.views.pages import Page, parse_step
from stagescope_service.views.reading.completeness import ALL_ROWS, began, ended
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import finding_rows, matching
from stagescope_service.views.reading.target import Target
from stagescope_wire.collectives.rows import (
    COLLECTIVE_KIND,
    OFF_ADVICE,
    OFF_KIND,
    OFF_MESSAGE,
)
from stagescope_wire.render import counted
from stagescope_wire.schema import Part, RankKey

_OPEN_STEPS: Final = 64
"""Steps before the requested one that are searched for open ones."""

_OVER: Final = frozenset({"ok", "failed"})
"""States of a stage that has ended."""

Timings = Mapping[StageKey, StageTiming]


class _RoleRows(NamedTuple):
    """The rows of a role of an attempt."""

    role: str
    processes: Mapping[int, ProcessColumns]
    """The newest process of each rank."""
    stages: list[StageRow]
    """Stages of the open steps."""
    timings: Timings
    """Timings of the open and the closed steps."""


def stuck_rows(
    catalogue: Catalogue, attempt_id: int, step: int, now: float, rules: StuckRules
) -> list[StuckRow]:
    """Return the ranks that are stuck in a step, or in an open step before it.

    Args:
        catalogue: the store's reading side.
        attempt_id: the attempt's key in the catalogue.
        step: the trainer's step.
        now: Unix seconds.
        rules: decide when a rank is stuck.

    Returns:
        Rows of an answer: first the ranks that do not respond.
    """
    steps = catalogue.steps(attempt_id, before=step + 1, limit=_OPEN_STEPS)
    processes = _newest_processes(catalogue.processes(attempt_id))
    unresponsive = _unresponsive_rows(catalogue, attempt_id, step, processes, now)
    open_steps = [row["step"] for row in steps if row["closed_wall"] is None]
    if step not in open_steps:
        return unresponsive
    closed = [row for row in steps if row["closed_wall"] is not None][:STEPS_REMEMBERED]
    numbers = [*open_steps, *(row["step"] for row in closed)]
    timings = _timings(catalogue.timings(attempt_id, numbers))
    # A stage that began between the two queries has no timing yet.
    stages = [
        row
        for row in catalogue.stages(attempt_id, open_steps, limit=ALL_ROWS)
        if row["begin_wall"] is None or (row["role"], _location(row)) in timings
    ]
    silent = {(row["role"], row["rank"]) for row in unresponsive}
    rows: list[StuckRow] = []
    for name, ranks in processes.items():
        role = _role(
            _RoleRows(
                name,
                ranks,
                [row for row in stages if row["role"] == name],
                {location: timing for (its, location), timing in timings.items() if its == name},
            ),
            closed,
            step,
            silent,
        )
        rows += [
            stuck_row(name, stuck, len(role.positions), ranks.get(stuck.rank))
            for stuck in judge(role, now, rules)
            if (name, stuck.rank) not in silent
        ]
    return [
        *unresponsive,
        *sorted(rows, key=lambda row: (row["step"] or 0, row["role"], row["rank"])),
    ]


def _unresponsive_rows(
    catalogue: Catalogue,
    attempt_id: int,
    step: int,
    processes: Mapping[str, Mapping[int, ProcessColumns]],
    now: float,
) -> list[StuckRow]:
    """Return the ranks whose processes do not respond, from the coordinator's findings.

    They hold up the step that they were in and all later ones; the longest silent are first.
    """
    every = [row for ranks in processes.values() for row in ranks.values()]
    if all(row["lapsed_wall"] is not None for row in every):
        return []  # the job is lost, not stuck
    by_incarnation = {row["incarnation"]: row for row in every}
    rows: list[StuckRow] = []
    for finding in catalogue.findings(attempt_id=attempt_id, kind=UNRESPONSIVE_KIND):
        evidence = finding["evidence"] or {}
        process = by_incarnation.get(str(evidence.get("incarnation")))
        if finding["over_wall"] is not None or process is None:
            continue
        reached = finding["step"]
        if reached is not None and reached > step:
            continue
        since = float(evidence["since_wall"])
        begun, ended = _ranks_in_stage(catalogue, attempt_id, finding)
        stuck = Stuck(
            process["rank"],
            StageKey(finding["step"], finding["stage"] or "", _parse_part(evidence.get("part"))),
            str(evidence["status"]),
            SILENT if process["lapsed_wall"] is None else GONE,
            since,
            max(now - since, 0.0),
            Limit(float(evidence["limit_seconds"]), None, 0),
            begun,
            ended,
            False,
        )
        ranks = max(process["world_size"] or 0, len(processes[process["role"]]))
        rows.append(stuck_row(process["role"], stuck, ranks, process))
    return sorted(rows, key=lambda row: (row["since_wall"], row["role"], row["rank"]))


def _parse_part(text: str | None) -> Part:
    return Part() if text is None else Part(*map(int, text.split(".")))


def _ranks_in_stage(catalogue: Catalogue, attempt_id: int, finding: FindingRow) -> tuple[int, int]:
    """Return how many ranks began, and ended, the stage that a finding names."""
    rows = catalogue.stages(
        attempt_id, finding["step"], stage=finding["stage"], role=finding["role"], limit=ALL_ROWS
    )
    ended = {row["rank"] for row in rows if row["status"] in _OVER}
    return len({row["rank"] for row in rows}), len(ended)


def stuck_row(role: str, stuck: Stuck, ranks: int, process: ProcessColumns | None) -> StuckRow:
    """Return a stuck rank, with the limits that it exceeded and where it ran.

    Args:
        role: of the rank.
        stuck: the verdict.
        ranks: how many the role has.
        process: of the rank; None: it never had one.
    """
    return {
        "step": stuck.key.step,
        "stage": stuck.key.stage,
        "role": role,
        "rank": stuck.rank,
        "part": str(stuck.key.part),
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
        "host": None if process is None else process["host"],
        "pid": None if process is None else process["pid"],
        "node_id": None if process is None else process["node_id"],
    }


def _location(row: StageRow | PartTiming) -> StageKey:
    return StageKey(row["step"], row["stage"] or "", Part.of_columns(row))


def _timings(rows: Iterable[PartTiming]) -> dict[tuple[str, StageKey], StageTiming]:
    """Return the timing of each part of a stage, by role and location."""
    timings: dict[tuple[str, StageKey], StageTiming] = {}
    for row in rows:
        location = _location(row)
        timing = timings.setdefault((row["role"], location), StageTiming(location))
        for begun in (row["first"], row["last"]):
            if begun is not None:
                timing.begun(begun)
        if row["longest"] is not None:
            timing.took(row["longest"])
    return timings


def _newest_processes(processes: Iterable[ProcessColumns]) -> dict[str, dict[int, ProcessColumns]]:
    """Return role -> rank -> its newest process; ranks that finished are left out."""
    newest: dict[str, dict[int, ProcessColumns]] = {}
    for row in processes:  # in the order in which they began
        if row["finished_wall"] is None:
            newest.setdefault(row["role"], {})[row["rank"]] = row
        else:
            newest.setdefault(row["role"], {}).pop(row["rank"], None)
    return {role: ranks for role, ranks in newest.items() if ranks}


def _role(
    rows: _RoleRows, closed: list[ListedStep], newest: int, silent: Collection[RankKey]
) -> hang_detection.Role:
    """Return a role as `hang_detection.judge` accepts it.

    Args:
        rows: of the role.
        closed: steps whose durations make the history.
        newest: the requested step.
        silent: ranks that do not respond.
    """
    open_steps = {row["step"] for row in rows.stages}
    at_open = {
        location: timing for location, timing in rows.timings.items() if location.step in open_steps
    }
    # An open step that most ranks have left tells durations as well as a closed one.
    earlier_steps = {location.step for location in rows.timings} - {newest}
    earlier = [
        {location: timing for location, timing in rows.timings.items() if location.step == step}
        for step in earlier_steps
    ]
    histories = history(earlier, _participants(rows.role, reversed(closed)))
    by_rank: dict[int, list[StageRow]] = {}
    begun: dict[StageKey, set[int]] = {}
    ended: dict[StageKey, set[int]] = {}
    for row in rows.stages:
        by_rank.setdefault(row["rank"], []).append(row)
        begun.setdefault(_location(row), set()).add(row["rank"])
        if row["status"] in _OVER:
            ended.setdefault(_location(row), set()).add(row["rank"])
    size = max((row["world_size"] or 0 for row in rows.processes.values()), default=0)
    positions = dict.fromkeys(range(size), RankPosition(UNHEARD))
    for rank, process in rows.processes.items():
        is_silent = (rows.role, rank) in silent
        positions[rank] = _position(process, by_rank.get(rank, []), at_open, is_silent)
    return hang_detection.Role(
        positions,
        at_open,
        begun=lambda location: begun.get(location, set()),
        ended=lambda location: ended.get(location, set()),
        history=lambda stage: histories.get(stage, StageHistory()),
    )


def _participants(role: str, steps: Iterable[ListedStep]) -> Iterator[dict[str, set[int]]]:
    """Yield stage -> the ranks that began it, for each closed step."""
    for step in steps:
        participants: dict[str, set[int]] = {}
        absent = {
            (item["stage"], item["rank"])
            for item in step["missing"] or []
            if item["role"] == role and item["status"] == "not begun"
        }
        for stage, ranks in ((step["expected"] or {}).get(role) or {}).items():
            participants[stage] = {rank for rank in ranks if (stage, rank) not in absent}
        yield participants


def _position(
    process: ProcessColumns, stages: list[StageRow], timings: Timings, silent: bool
) -> RankPosition:
    """Return where a rank is, after its stages of the open steps."""
    times = [time for row in stages for time in (began(row), ended(row)) if time is not None]
    last_time = max(times, default=None)
    status = GONE if process["lapsed_wall"] is not None else SILENT if silent else LIVE
    begun = [row for row in stages if row["begin_wall"] is not None]
    begun.sort(key=lambda row: began(row) or 0.0)
    if not begun:
        return RankPosition(status, last_time)
    latest = begun[-1]
    inside = [
        _location(row)
        for row in begun
        if row["status"] in ("open", "unfinished", None) and row["step"] == latest["step"]
    ]
    first = timings[_location(latest)].first
    return RankPosition(status, last_time, inside[-1] if inside else None, first)


def _nobody_left(catalogue: Catalogue, attempt: ListedAttempt) -> str | None:
    """Return a note if all processes of an attempt are gone, else None."""
    rows = catalogue.processes(attempt["attempt_id"])
    if not rows or any(row["finished_wall"] is row["lapsed_wall"] is None for row in rows):
        return None
    lost = sum(map(len, _newest_processes(rows).values()))
    if not lost:
        is_finished = attempt["end_reason"] in (None, FINISHED)
        why = "all of them finished" if is_finished else attempt["end_reason"]
        return f"no process is left: {why}"
    ranks = len({(row["role"], row["rank"]) for row in rows})
    note = (
        "no process is left, so no rank is waited for. "
        f"{lost} of {counted(ranks, 'rank')} stopped reporting without a finish"
    )
    if not catalogue.losses(attempt_id=attempt["attempt_id"], kind=STAGE_LOSS, limit=1):
        return note
    return f"{note}. The stages that they left open are unfinished, and listed as lost"


def _not_begun(catalogue: Catalogue, attempt: ListedAttempt, now: float) -> str:
    """Return a note on an attempt without a step: how long ago its last rank connected."""
    number = attempt["number"]
    if not attempt["live"]:
        return f"attempt {number} is not live, and no rank of it began a step"
    connected = {
        (row["role"], row["rank"]): row["first_wall"] + (row["clock_offset"] or 0.0)
        for row in catalogue.processes(attempt["attempt_id"])
        if row["first_wall"] is not None
    }
    text = f"attempt {number} is live, and no rank has begun a step yet"
    if not connected:
        return text
    quiet = max(now - max(connected.values()), 0.0)
    return (
        f"{text}: {counted(len(connected), 'rank')} connected, the last one {quiet:.0f} s ago. "
        "If this is long, see where they are with `stagescope stacks`"
    )


def _collectives(
    catalogue: Catalogue, attempt_id: int, step: int, role: str | None
) -> list[JsonObject]:
    """Return the collectives that cannot finish, of findings that still hold."""
    return [
        row
        for finding in catalogue.findings(attempt_id=attempt_id, kind=COLLECTIVE_KIND)
        if finding["over_wall"] is None and role in (None, finding["role"])
        if finding["step"] is None or finding["step"] <= step
        for row in (finding["evidence"] or {}).get("collectives") or []
    ]


def _not_recorded(
    catalogue: Catalogue, attempt_id: int, step: int, rows: list[StuckRow]
) -> str | None:
    """Return why no collective is named where ranks are stuck, else None."""
    found = catalogue.findings(attempt_id=attempt_id, kind=OFF_KIND) if rows else []
    if not any(row["step"] in (None, step) for row in found):
        return None
    return f"{OFF_MESSAGE}: {OFF_ADVICE}"


def stuck(
    deps: Dependencies,
    target: Target,
    page: Page,
    stage: str | None = None,
    role: str | None = None,
    rank: int | None = None,
) -> JsonObject:
    """List the ranks that hold up the others of their role, and since when."""
    if target.step is None:
        return _without_step(deps, target, page, role, rank)
    settings, now = deps.settings, deps.clock()
    step = target.step_number
    rules = StuckRules(min_seconds=settings.stuck_seconds, factor=settings.stuck_factor)
    every = stuck_rows(deps.catalogue, target.attempt_id, step, now, rules)
    if stage is not None and not any(row["stage"] == stage for row in every):
        begun = deps.catalogue.stages(target.attempt_id, step, limit=ALL_ROWS)
        matching(begun, f"step {step}", stage=stage)  # raises where no rank began such a stage
    if role is not None:
        processes = deps.catalogue.processes(target.attempt_id)
        matching(processes, f"attempt {target.number}", role=role)  # raises where there is none
    rows = [
        row
        for row in every
        if stage in (None, row["stage"]) and role in (None, row["role"])
        if rank in (None, row["rank"])
    ]
    findings = [
        row
        for kind in (STUCK_KIND, COLLECTIVE_KIND)
        for row in deps.catalogue.findings(attempt_id=target.attempt_id, step=step, kind=kind)
    ]
    numbers = {row["attempt_id"]: row["number"] for row in deps.catalogue.attempts(target.run)}
    closed = target.step_row["closed_wall"] is not None
    note = f"step {step} is closed: no rank is waited for in it" if closed and not rows else None
    return {
        **target.heading(),
        "closed": closed,
        "wall": now,
        "note": _nobody_left(deps.catalogue, target.attempt)
        or note
        or _not_recorded(deps.catalogue, target.attempt_id, step, rows),
        "collectives": _collectives(deps.catalogue, target.attempt_id, step, role),
        "findings": finding_rows(findings, numbers),
        **page.cut(rows),
    }


def _without_step(
    deps: Dependencies, target: Target, page: Page, role: str | None, rank: int | None
) -> JsonObject:
    """Return the answer for an attempt that has begun no step: only a silent process is listed."""
    now, attempt_id = deps.clock(), target.attempt_id
    processes = _newest_processes(deps.catalogue.processes(attempt_id))
    rows = [
        row
        for row in _unresponsive_rows(deps.catalogue, attempt_id, 0, processes, now)
        if role in (None, row["role"]) and rank in (None, row["rank"])
    ]
    gone = _nobody_left(deps.catalogue, target.attempt)
    return {
        **target.heading(),
        "step": None,
        "superseded_by": None,
        "closed": False,
        "wall": now,
        "note": gone or _not_begun(deps.catalogue, target.attempt, now),
        "collectives": _collectives(deps.catalogue, attempt_id, 0, role),
        "findings": [],
        **page.cut(rows),
    }


def stuck_target(
    deps: Dependencies,
    step: str,
    run: str | None,
    attempt: int | None,
    attempt_key: str | None = None,
) -> Target:
    """Return the step of a path; `latest` is of the newest attempt, even before its first step."""
    name = parse_step(step)
    if name == "latest" and attempt_key is None:
        newest = deps.finder.attempt(run, attempt)
        if not deps.catalogue.steps(newest.attempt_id, limit=1):
            return newest
        run, attempt = newest.run, newest.number
    return deps.finder.named(run, attempt, name, key=attempt_key)
