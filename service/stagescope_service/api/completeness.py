"""Who was expected in a step and who has not arrived, since when: from the catalogue's rows.

A closed step keeps the verdict of its closing. An open one is judged now, by the same rule. That
verdict is about stages; what of their payloads did not arrive is the step's gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stagescope_service.core.completeness import judge, statuses_of_rows
from stagescope_service.core.entities import Participants
from stagescope_service.core.findings import BEGUN_AGAIN, NOT_AGGREGATED
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


def gaps(catalogue: Catalogue, steps: Iterable[Row]) -> dict[tuple[int, int], str]:
    """Return (attempt_id, step) -> what its numbers lack, in words; see `gap`.

    Args:
        catalogue: where payloads are listed.
        steps: rows of `Catalogue.steps`; those without a gap have no entry.
    """
    closed = {
        (int(row["attempt_id"]), int(row["step"])): row
        for row in steps
        if row["closed_wall"] is not None
    }
    if not closed:
        return {}
    unmeasured = {step for (_, step), row in closed.items() if not row["has_whole"]}
    behind = {place for place, row in closed.items() if is_behind(row)}
    failed: dict[tuple[int, int], str] = {}
    if behind:
        failed = failures(catalogue, {at for at, _ in behind}, {step for _, step in behind})
        failed = {place: why for place, why in failed.items() if place in behind}
    found: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for states in catalogue.payload_states(
        sorted({attempt for attempt, _ in closed}),
        sorted({step for _, step in closed}),
        whole={step for _, step in closed} - unmeasured,
    ):
        found[states["attempt_id"], states["step"]].append(states)
    said = {
        place: gap(row, found[place], failed.get(place))
        for place, row in closed.items()
        if place in found or place in failed
    }
    return {place: text for place, text in said.items() if text is not None}


def failures(
    catalogue: Catalogue, attempt_ids: Iterable[int], steps: Iterable[int] | None = None
) -> dict[tuple[int, int], str]:
    """Return (attempt_id, step) -> why the step's last aggregation failed; steps None: of all."""
    rows = catalogue.findings(
        kind=NOT_AGGREGATED,
        attempt_id=sorted(attempt_ids),
        step=None if steps is None else sorted(steps),
        limit=ALL_ROWS,
    )
    return {(row["attempt_id"], row["step"]): str(row["evidence"]["error"]) for row in rows}


def begun_again(
    catalogue: Catalogue,
    attempt_ids: Iterable[int],
    steps: Iterable[int] | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
) -> dict[tuple[int, int], list[Row]]:
    """Return (attempt_id, step) -> {"role", "ranks", "stages"} of who began the step again.

    Of steps that a process did again within their attempt, as the findings say it: both goes
    count in the step's numbers. Other steps have no entry.

    Args:
        catalogue: where findings are.
        attempt_ids: of these attempts.
        steps: of these steps; None: of all from `first` to `last`, both included.
        first, last: None: no bound.
    """
    found = catalogue.places_of_finding(
        BEGUN_AGAIN,
        sorted(attempt_ids),
        None if steps is None else sorted(steps),
        first=first,
        last=last,
    )
    by_role: dict[tuple[int, int], dict[str, tuple[set[int], set[str]]]] = {}
    for row in found:
        place = by_role.setdefault((row["attempt_id"], row["step"]), {})
        ranks, stages = place.setdefault(row["role"], (set(), set()))
        ranks.add(row["rank"])
        if row["stage"] is not None:
            stages.add(row["stage"])
    return {
        place: [
            {"role": role, "ranks": sorted(ranks), "stages": sorted(stages)}
            for role, (ranks, stages) in roles.items()
        ]
        for place, roles in by_role.items()
    }


def is_behind(step: Row) -> bool:
    """Return whether a closed step's numbers lack what was read since they were aggregated."""
    return step["parts_mark"] is not None and step["parts_mark"] != step["whole_mark"]


def gap(step: Row, states: Sequence[Row], failed: str | None = None) -> str | None:
    """Return what the numbers of a closed step lack and why, None where they lack nothing.

    Args:
        step: a row of `Catalogue.steps`.
        states: its rows of `Catalogue.payload_states`.
        failed: why its last aggregation failed, None where it did not.
    """
    if failed is not None:
        lack = "numbers without what came last" if step["has_whole"] else "no numbers"
        return f"{lack}: the aggregation failed: {failed:.300}"
    missing = missing_payloads(states)
    if step["has_whole"]:
        return f"numbers without {missing}" if missing else None
    if missing:
        return f"no numbers: {missing}"
    if is_behind(step):
        return "no numbers yet: they are being aggregated"
    if states and all(row["replaced"] for row in states):
        count = sum(row["count"] for row in states)
        return f"no numbers: {_payloads(count)} superseded by work that handed nothing over"
    return "no numbers: no rank handed over both streams" if states else None


def missing_payloads(states: Iterable[Row]) -> str:
    """Return which payloads that count were not read, and a reason of each kind; "" for none."""
    counts: dict[str, int] = defaultdict(int)
    reasons: dict[str, str] = {}
    for row in states:
        if not row["replaced"] and row["state"] in _MISSING:
            counts[row["state"]] += row["count"]
            if row["reason"]:
                reasons[row["state"]] = str(row["reason"])
    return ", ".join(
        f"{_payloads(counts[state])} {word}"
        + (f" ({reasons[state]:.300})" if state in reasons else "")
        for state, word in _MISSING.items()
        if counts[state]
    )


_MISSING: Final = {
    "lost": "lost",
    "refused": "refused",
    "dropped": "dropped by their process",
    "announced": "not read yet",
}
"""How a payload that is in no numbers ended -> the word for it."""


def _payloads(count: int) -> str:
    return f"{count} payload{'' if count == 1 else 's'}"


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
