"""Completeness of a step: expected ranks, missing ones, and what its numbers lack.

A closed step keeps the verdict of its closing; an open one is judged now, by the same rule. The
verdict is about stages. Payloads that did not arrive are described by the step's gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.core.completeness import (
    COMPLETE,
    NOT_BEGUN,
    PARTIAL,
    judge,
    statuses_of_rows,
)
from stagescope_service.core.entities import Participants
from stagescope_service.core.findings import BEGUN_AGAIN, NOT_AGGREGATED
from stagescope_service.rules.missing import StageRanks, missing_ranks, stage_ranks_before
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.measurements import PayloadStates
from stagescope_service.store.queries.overview import ListedAttempt, ListedStep, StepOverview
from stagescope_service.store.tables import ProcessColumns, StageRow, StepMarks, StepState
from stagescope_service.views.models.common import BegunAgain, Missing

Expected = Mapping[str, Mapping[str, list[int]]]
"""role -> stage -> ranks."""
StepKey = tuple[int, int]
"""(attempt_id, step)."""

OPEN: Final = "open"
ROWS_REMOVED: Final = (
    "the rows of its ranks were removed by retention (STAGESCOPE_KEEP_ROW_STEPS); its summary, "
    "rounds and findings remain"
)
ALL_ROWS: Final = 1_000_000
"""A limit above the rows of any step: sums need all of them."""


class StepProgress(NamedTuple):
    """How far a step has come."""

    complete: str
    """'complete', 'partial' or 'unknown' for a closed step, 'open' for another."""
    expected: Expected
    missing: list[Missing]


def step_progress(
    catalogue: Catalogue, attempt: ListedAttempt, step: ListedStep, stages: Iterable[StageRow]
) -> StepProgress:
    """Return how far a step has come, given its stages that are not superseded."""
    stages = list(stages)
    is_closed = step["closed_wall"] is not None
    expected: Expected
    if is_closed:
        verdict, expected = step["completeness"] or "unknown", step["expected"] or {}
        missing = [(each["role"], each["rank"], each["stage"], each["status"])
                   for each in step["missing"] or []]  # fmt: skip
    else:
        sizes = _world_sizes(catalogue.processes(attempt["attempt_id"]))
        verdict, expected, listed = judge(
            statuses_of_rows(stages),
            size_of=sizes.get,
            before=_last_closed(catalogue, attempt, step),
        )
        missing = [*listed]
    if any(status == NOT_BEGUN for *_, status in missing):
        attempts = attempts_of(catalogue, attempt["run"])
        ranks = stage_ranks_before(catalogue, attempts, attempt["attempt_id"], step["step"])
        expected, missing = _without_others(expected, missing, ranks, is_open=not is_closed)
    verdict = without_gaps(verdict, missing) if is_closed else OPEN
    return StepProgress(verdict, expected, _with_since(missing, stages))


def attempts_of(catalogue: Catalogue, run: str) -> list[ListedAttempt]:
    """Return the attempts of a run, ascending."""
    return sorted(catalogue.attempts(run), key=lambda row: row["number"])


def without_gaps(verdict: str, missing: Sequence[object]) -> str:
    """Return the verdict on a closed step, given the ranks that it lacks."""
    return COMPLETE if verdict == PARTIAL and not missing else verdict


def verdicts(catalogue: Catalogue, run: str, steps: Sequence[StepState]) -> list[str]:
    """Return how complete each of a run's steps is, as `StepProgress.complete`; ascending."""
    found = [
        OPEN if row["closed_wall"] is None else row["completeness"] or "unknown" for row in steps
    ]
    partial = {
        at: (steps[at]["attempt_id"], steps[at]["step"])
        for at, verdict in enumerate(found)
        if verdict == PARTIAL
    }
    if partial:
        missing = missing_ranks(catalogue, attempts_of(catalogue, run), partial.values())
        for at, key in partial.items():
            found[at] = without_gaps(PARTIAL, missing[key])
    return found


def _without_others(
    expected: Expected,
    missing: Iterable[tuple[str, int, str, str]],
    ranks: StageRanks,
    *,
    is_open: bool,
) -> tuple[Expected, list[tuple[str, int, str, str]]]:
    """Leave out the ranks that did not begin a stage because they never run it."""
    left, others = [], set()
    for role, rank, stage, status in missing:
        if status != NOT_BEGUN or ranks.lacks(role, rank, stage, is_open=is_open):
            left.append((role, rank, stage, status))
        else:
            others.add((role, stage, rank))
    shown = {
        role: {
            stage: [rank for rank in own if (role, stage, rank) not in others]
            for stage, own in by_stage.items()
        }
        for role, by_stage in expected.items()
    }
    return shown, left


def gaps(catalogue: Catalogue, steps: Iterable[StepOverview]) -> dict[StepKey, str]:
    """Return what the numbers of each step lack, see `gap`; steps without a gap have no entry.

    Args:
        catalogue: lists the payloads.
        steps: the steps.
    """
    closed = {
        (row["attempt_id"], row["step"]): row for row in steps if row["closed_wall"] is not None
    }
    if not closed:
        return {}
    unmeasured = {step for (_, step), row in closed.items() if not row["has_summary"]}
    behind = {key for key, row in closed.items() if is_behind(row)}
    errors: dict[StepKey, str] = {}
    if behind:
        errors = aggregation_errors(
            catalogue, {attempt_id for attempt_id, _ in behind}, {step for _, step in behind}
        )
        errors = {key: error for key, error in errors.items() if key in behind}
    states: dict[StepKey, list[PayloadStates]] = defaultdict(list)
    for row in catalogue.payload_states(
        sorted({attempt for attempt, _ in closed}),
        sorted({step for _, step in closed}),
        measured={step for _, step in closed} - unmeasured,
    ):
        states[row["attempt_id"], row["step"]].append(row)
    texts = {
        key: gap(row, states[key], errors.get(key))
        for key, row in closed.items()
        if key in states or key in behind or row["rows_removed"] is not None
    }
    return {key: text for key, text in texts.items() if text is not None}


def aggregation_errors(
    catalogue: Catalogue, attempt_ids: Iterable[int], steps: Iterable[int] | None = None
) -> dict[StepKey, str]:
    """Return why the last aggregation of each step failed; `steps` None means all steps."""
    rows = catalogue.findings(
        kind=NOT_AGGREGATED,
        attempt_id=sorted(attempt_ids),
        step=None if steps is None else sorted(steps),
        limit=ALL_ROWS,
    )
    return {
        (row["attempt_id"], row["step"]): str((row["evidence"] or {}).get("error"))
        for row in rows
        if row["attempt_id"] is not None and row["step"] is not None
    }


def begun_again(
    catalogue: Catalogue,
    attempt_ids: Iterable[int],
    steps: Iterable[int] | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
) -> dict[StepKey, list[BegunAgain]]:
    """Return the ranks that began each step again within its attempt, according to the findings.

    Both passes count in the numbers of such a step. Other steps have no entry.

    Args:
        catalogue: lists the findings.
        attempt_ids: the attempts to search.
        steps: the steps to search; None: all from `first` to `last`, both included.
        first: None: no lower bound.
        last: None: no upper bound.
    """
    rows = catalogue.places_of_finding(
        BEGUN_AGAIN,
        sorted(attempt_ids),
        None if steps is None else sorted(steps),
        first=first,
        last=last,
    )
    by_step: dict[StepKey, dict[str, tuple[set[int], set[str]]]] = {}
    for row in rows:
        by_role = by_step.setdefault((row["attempt_id"], row["step"]), {})
        ranks, stages = by_role.setdefault(row["role"], (set(), set()))
        ranks.add(row["rank"])
        if row["stage"] is not None:
            stages.add(row["stage"])
    return {
        key: [
            {"role": role, "ranks": sorted(ranks), "stages": sorted(stages)}
            for role, (ranks, stages) in by_role.items()
        ]
        for key, by_role in by_step.items()
    }


def rows_removed(step: StepState) -> str | None:
    """Return why lists of a step lack rows of its ranks; None where retention removed none."""
    return None if step["rows_removed"] is None else ROWS_REMOVED


def is_behind(step: StepMarks) -> bool:
    """Return whether payloads of a closed step were read after its numbers were aggregated."""
    return step["parts_mark"] is not None and step["parts_mark"] != step["summary_mark"]


def gap(
    step: StepOverview, states: Sequence[PayloadStates], error: str | None = None
) -> str | None:
    """Return what the numbers of a closed step lack and why; None where they lack nothing.

    Args:
        step: the step.
        states: its payloads.
        error: why its last aggregation failed; None where it did not.
    """
    if step["rows_removed"] is not None:
        return ROWS_REMOVED if step["has_summary"] else f"no numbers: {ROWS_REMOVED}"
    if error is not None:
        lack = "numbers without what came last" if step["has_summary"] else "no numbers"
        return f"{lack}: the aggregation failed: {error:.300}"
    missing = missing_payloads(states)
    if step["has_summary"]:
        # What was read since the last aggregation is in no number yet, and in no count of tokens.
        late = "what was read last: they are being aggregated again" if is_behind(step) else ""
        lacks = " and ".join(filter(None, (missing, late)))
        return f"numbers without {lacks}" if lacks else None
    if missing:
        return f"no numbers: {missing}"
    # The step was read before its payloads: until these are read, nothing has it aggregated.
    if is_behind(step) or (states and step["parts_mark"] is None):
        return "no numbers yet: they are being aggregated"
    if states and all(row["replaced"] for row in states):
        count = sum(row["count"] for row in states)
        return f"no numbers: {_payloads(count)} superseded by work that handed nothing over"
    return "no numbers: no rank handed over both streams" if states else None


def missing_payloads(states: Iterable[PayloadStates]) -> str:
    """Return how many payloads that count were not read, with a reason a state; "" for none."""
    counts: dict[str, int] = defaultdict(int)
    reasons: dict[str, str] = {}
    for row in states:
        if not row["replaced"] and row["state"] in _MISSING:
            counts[row["state"]] += row["count"]
            if row["reason"]:
                reasons[row["state"]] = str(row["reason"])
    return ", ".join(
        f"{_payloads(counts[state])} {phrase}"
        + (f" ({reasons[state]:.300})" if state in reasons else "")
        for state, phrase in _MISSING.items()
        if counts[state]
    )


_MISSING: Final = {
    "lost": "lost",
    "refused": "refused",
    "dropped": "dropped by their process",
    "announced": "not read yet",
}
"""State of a payload that is in no numbers -> its description."""


def _payloads(count: int) -> str:
    return f"{count} payload{'' if count == 1 else 's'}"


def began(row: StageRow) -> float | None:
    """Return when a stage began, on the service's clock where the offset is known."""
    wall = row["begin_wall"]
    return None if wall is None else wall + (row["clock_offset"] or 0.0)


def ended(row: StageRow) -> float | None:
    """Return when a stage ended, on the clock of `began`."""
    wall = row["end_wall"]
    return None if wall is None else wall + (row["clock_offset"] or 0.0)


def _last_closed(
    catalogue: Catalogue, attempt: ListedAttempt, step: ListedStep
) -> Participants | None:
    """Return the ranks of each stage in the attempt's last closed step before this one."""
    number = attempt["last_closed_step"]
    if number is None or number == step["step"]:
        return None
    rows = catalogue.steps(attempt["attempt_id"], before=number + 1, limit=1)
    expected: Expected = (rows[0]["expected"] or {}) if rows else {}
    return {
        (role, stage): set(ranks) for role, by in expected.items() for stage, ranks in by.items()
    }


def _world_sizes(processes: Iterable[ProcessColumns]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in processes:
        if row["world_size"]:
            sizes[row["role"]] = max(row["world_size"], sizes.get(row["role"], 0))
    return sizes


def _with_since(
    missing: Iterable[tuple[str, int, str, str]], stages: Iterable[StageRow]
) -> list[Missing]:
    """Add the time since when each is missing: its own begin, else the first rank's.

    Args:
        missing: (role, rank, stage, status) each.
        stages: of the step.
    """
    starts: dict[tuple[str, str, int | None], list[float]] = defaultdict(list)
    for row in stages:
        start = began(row)
        if start is None:
            continue
        starts[row["role"], row["stage"], None].append(start)
        if row["status"] not in ("ok", "failed"):
            starts[row["role"], row["stage"], row["rank"]].append(start)
    rows: list[Missing] = []
    for role, rank, stage, status in missing:
        times = starts.get((role, stage, rank)) or starts.get((role, stage, None)) or []
        rows.append(
            {
                "role": role,
                "rank": rank,
                "stage": stage,
                "status": status,
                "since": min(times, default=None),
            }
        )
    return rows
