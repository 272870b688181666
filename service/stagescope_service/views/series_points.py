"""The points of a metric or a scalar over the steps of a run, read from the catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from stagescope_service.statistics.step_metrics import VERSION, SliceMetrics
from stagescope_service.store.queries.measurements import ScalarValues, StepNumbers
from stagescope_service.store.tables import StepMarks
from stagescope_service.views.reading.completeness import (
    ROWS_REMOVED,
    aggregation_errors,
    is_behind,
)
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_service.views.reading.rows import Lineage

By = Literal["rank", "round", "staleness"]
Key = tuple[str | None, str | None, int | None]
"""(stage, role, rank or round or staleness) of one series; all None for the step's own number."""
Value = float | str | None
"""A number, or the name of one that is not finite; None: the step has none."""
MAX_VALUES: Final = 500_000
"""Most values of an answer: steps times series."""
OPEN: Final = "the step is still open"
UNMEASURED: Final = "no rank handed over both streams"
BEHIND: Final = "its numbers are being aggregated"
NOT_STORED: Final = "its numbers are not stored for curves: request the step"
ABSENT: Final = "not among the numbers of this step"
NOT_LOGGED: Final = "no rank logged it"


@dataclasses.dataclass
class Point:
    """One step of one attempt, and its values by series."""

    row: StepNumbers
    values: dict[Key, Value]
    reason: str | None = None
    """Why it has no value."""
    low: dict[Key, Value] = dataclasses.field(default_factory=dict)
    high: dict[Key, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SeriesRequest:
    """A request for one number over the steps of some attempts."""

    metric: str
    by: By | None
    stage: str | None
    role: str | None
    rank: int | None
    attempt_ids: Sequence[int]
    window: Window

    def matches(self, role: str | None, rank: int | None) -> bool:
        """Return whether a rank is requested."""
        return self.role in (None, role) and self.rank in (None, rank)

    @property
    def has_scalar_slices(self) -> bool:
        """Whether a scalar fits the request: it has no rounds and no staleness."""
        return self.by in (None, "rank")


class PointPage(NamedTuple):
    """The newest points of a metric or scalar."""

    kind: str
    points: Sequence[Point]
    earlier_to: int | None
    """The last step before them; None: there is none."""
    superseded: Mapping[int, Sequence[int]] = {}
    """Number of an attempt -> its steps, ascending, that no current attempt has."""


def newest_points(
    kind: str, points: Iterable[Point], lineage: Lineage, keep_all: bool, limit: int
) -> PointPage:
    """Return the newest points within the limits.

    Args:
        kind: of the points.
        points: the newest first.
        lineage: tells which steps are superseded.
        keep_all: whether superseded steps are returned too.
        limit: most points.
    """
    newest: list[Point] = []
    keys: set[Key] = set()
    last_step: int | None = None
    omitted: dict[int, int] = {}  # step -> the newest attempt that has it
    earlier_to = None
    for point in points:
        step = point.row["step"]
        is_superseded = step == last_step or lineage.superseded_by(point.row) is not None
        if is_superseded and not keep_all:
            if step != last_step:
                omitted.setdefault(step, lineage.numbers[point.row["attempt_id"]])
            continue
        keys |= point.values.keys()
        if len(newest) >= limit or len(newest) * len(keys) >= MAX_VALUES:
            earlier_to = min(step, newest[-1].row["step"] - 1)
            break
        last_step = step
        newest.append(point)
    found = {point.row["step"] for point in newest}
    superseded: dict[int, list[int]] = {}
    for step, attempt in sorted(omitted.items()):
        if step not in found and (earlier_to is None or step > earlier_to):
            superseded.setdefault(attempt, []).append(step)
    return PointPage(kind, newest, earlier_to, superseded)


# --- metrics --------------------------------------------------------------------------------
_WHOLE_STEP: Final[Key] = (None, None, None)


def metric_points(deps: Dependencies, requested: SeriesRequest) -> Iterator[Point]:
    """Yield every step, newest first, with the metric where it was published."""
    has_rank = requested.rank is not None or requested.role is not None
    by = requested.by or ("rank" if has_rank else None)
    numbers: Literal["metrics", "slices"] = "metrics" if by is None else "slices"
    losses = {
        (row["attempt_id"], row["step"]): f"{row['count']} payloads were lost: {row['reason']:.300}"
        for row in deps.catalogue.lost_payloads(requested.attempt_ids, **requested.window)
    }
    errors = aggregation_errors(deps.catalogue, requested.attempt_ids)
    for row in deps.catalogue.step_metrics(
        requested.attempt_ids, version=VERSION, **requested.window, numbers=numbers
    ):
        stored: Mapping[str, Value] | bytes | None
        stored = row.pop("metrics", None) if numbers == "metrics" else row.pop("slices", None)
        point = Point(row, {})
        key = (row["attempt_id"], row["step"])
        if stored is None and row["has_summary"]:
            point.reason = NOT_STORED
        elif stored is None:
            point.reason = why_unmeasured(row, errors.get(key), losses.get(key))
        elif isinstance(stored, Mapping):
            if requested.metric in stored:
                point.values = {_WHOLE_STEP: stored[requested.metric]}
        elif by is not None:
            slices = SliceMetrics.from_bytes(stored)
            point.values = {
                (None, role if by == "rank" else None, number): value
                for (role, number), value in slices.column(by, requested.metric).items()
                if by != "rank" or requested.matches(role, number)
            }
        if not point.values and point.reason is None:
            point.reason = ABSENT
        yield point


def why_unmeasured(row: StepMarks, error: str | None, loss: str | None) -> str:
    """Return why a step has no numbers.

    Args:
        row: of the step.
        error: of its last aggregation.
        loss: a text about its lost payloads.
    """
    if row["closed_wall"] is None:
        return OPEN
    if row["rows_removed"] is not None:
        return ROWS_REMOVED
    if is_behind(row):
        return BEHIND if error is None else f"its aggregation failed: {error:.300}"
    return loss or UNMEASURED


# --- scalars --------------------------------------------------------------------------------
def scalar_points(deps: Dependencies, requested: SeriesRequest) -> Iterator[Point]:
    """Yield every step, newest first, with the scalar where a rank logged it."""
    if not requested.has_scalar_slices:
        return
    values = deps.catalogue.scalar_values(
        requested.attempt_ids,
        requested.metric,
        by_rank=requested.by == "rank",
        **requested.window,
        stage=requested.stage,
        role=requested.role,
        rank=requested.rank,
    )
    by_step: dict[tuple[int, int], list[ScalarValues]] = {}
    for value in values:
        if value["step"] is not None:
            by_step.setdefault((value["attempt_id"], value["step"]), []).append(value)
    if not by_step:
        return
    for row in deps.catalogue.step_metrics(
        requested.attempt_ids, version=VERSION, **requested.window, numbers=None
    ):
        logged = by_step.get((row["attempt_id"], row["step"]), [])
        removed = row["rows_removed"] is not None
        why = OPEN if not row["closed_wall"] else ROWS_REMOVED if removed else NOT_LOGGED
        point = Point(row, {}, None if logged else why)
        for value in logged:
            key = (value["stage"], value["role"], value.get("rank"))
            point.values[key] = mean_of(value)
            point.low[key], point.high[key] = _low(value), _high(value)
        yield point


def mean_of(row: ScalarValues) -> Value:
    """Return the mean of all values, the non-finite ones included as in a sum."""
    if row["nan"] or (row["posinf"] and row["neginf"]):
        return "nan"
    return "inf" if row["posinf"] else "-inf" if row["neginf"] else row["mean"]


def _low(row: ScalarValues) -> Value:
    if row["nan"] or row["neginf"]:
        return "nan" if row["nan"] else "-inf"
    return "inf" if row["low"] is None else row["low"]


def _high(row: ScalarValues) -> Value:
    if row["nan"] or row["posinf"]:
        return "nan" if row["nan"] else "inf"
    return "-inf" if row["high"] is None else row["high"]
