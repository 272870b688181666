"""One number over the steps of a run: a published metric or a scalar, whole or by slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Query

from stagescope.frames import meant
from stagescope.wire.errors import InvalidInput, NotFound
from stagescope_service.api.completeness import begun_again, failures, is_behind
from stagescope_service.api.dependencies import (
    AttemptNumber,
    Dependencies,
    Deps,
    Rank,
    Role,
    Row,
    Run,
    Stage,
)
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer
from stagescope_service.api.rows import Lineage
from stagescope_service.api.step_summaries import MeasuredStep
from stagescope_service.api.target import Target
from stagescope_service.statistics.step_metrics import VERSION, SliceMetrics
from stagescope_service.triggers.evidence import ranks_text

router = APIRouter(tags=["steps"])

By = Literal["rank", "round", "staleness"]
Key = tuple[str | None, str | None, int | None]
"""(stage, role, rank, round or staleness) of one series; all null for the step's own number."""

MOST_STEPS: Final = 20_000
MOST_VALUES: Final = 500_000
"""Of an answer: steps times series."""
_OLD_STEPS: Final = 200
"""Steps without stored numbers (of an earlier version) that one answer reads anew."""
_NAMED_STEPS: Final = 20
"""Newest steps in which names are looked for, to say what was meant."""

OPEN: Final = "the step is not closed"
UNMEASURED: Final = "no rank handed over both streams"
BEHIND: Final = "its numbers are being aggregated"
OLD: Final = "its numbers are of an earlier version: ask for the step"
ABSENT: Final = "not among the numbers of this step"
NOT_LOGGED: Final = "no rank logged it"

StepBound = Annotated[int | None, Query(gt=-(10**18), lt=10**18)]


@dataclasses.dataclass
class Point:
    """One step of one attempt: what is known of it, and its values by series."""

    row: Row
    values: dict[Key, Any]
    reason: str | None = None
    low: dict[Key, Any] = dataclasses.field(default_factory=dict)
    high: dict[Key, Any] = dataclasses.field(default_factory=dict)


@router.get("/series", response_model=models.Series)
def series(
    deps: Deps,
    metric: Annotated[
        str, Query(max_length=500, description="A published metric, or a scalar's name.")
    ],
    run: Run = None,
    attempt: AttemptNumber = None,
    by: Annotated[By | None, Query(description="A series for each; scalars only by rank.")] = None,
    stage: Annotated[Stage, Query(description="Scalars: only those of this stage.")] = None,
    role: Role = None,
    rank: Rank = None,
    first: Annotated[StepBound, Query(alias="from", description="The first step.")] = None,
    last: Annotated[StepBound, Query(alias="to", description="The last step.")] = None,
    superseded: Annotated[
        bool, Query(description="Also steps that a later attempt did again.")
    ] = False,
    limit: Annotated[int, Query(ge=1, le=MOST_STEPS, description="Most steps, the newest.")] = (
        10_000
    ),
) -> Answer:
    """Answer one number over the steps of a run, as columns: `steps` and, aligned, the others.

    `steps`, `attempts`, `superseded_by`, `complete` (as in `/steps`), `comparable` and `suspects`
    (the verdict on the step's streams, and the checks behind it) and `reasons` (why the step has
    no value; null: it has one) hold one entry a step, ascending; so does `begun_again` (who did it
    again within its attempt: both goes count). Each of `series` has a `name`, its `stage`, `role`,
    `rank`, `round` or `staleness` where it is of one, and `values`: null where there is none, "nan"
    where it is NaN. A scalar's value is the mean over its ranks and parts, with `low` and `high`;
    scalars of several stages or roles are a series each.

    Without `attempt`, the attempts in force: a step that a later one did again is left out, unless
    `superseded` asks for it. `earlier_to`, where not null, is the `to` of the steps before.
    """
    if first is not None and last is not None and first > last:
        raise InvalidInput(f"from is {first} and to is {last}", expected="from at most to")
    target = deps.finder.attempt(run, attempt)
    rows = deps.catalogue.attempts(target.run)
    chosen = [row for row in rows if attempt is None or row["number"] == attempt]
    lineage = Lineage(rows)
    window = {"first": first, "last": last}
    ids = [int(row["attempt_id"]) for row in chosen]
    asked = _Asked(metric, by, stage, role, rank)
    keep_all = superseded or attempt is not None
    found = _Found("metric", [], None)
    newest = _newest_metrics(deps, ids)
    readers = {"metric": _metrics, "scalar": _scalars}
    # What is looked at first is most likely not read for nothing.
    scalars_first = stage is not None or not _is_published(metric, newest)
    for kind in sorted(readers, reverse=scalars_first):
        points = readers[kind](deps, asked, ids, window)
        cut = _Found(kind, *_cut(points, lineage, keep_all, limit))
        found = cut if cut.points else found
        if any(point.values for point in cut.points):
            break
    else:
        if _check_name(deps, asked, target, ids, newest) == "scalar":
            found = _Found("scalar", [_unlogged(point) for point in found.points], found.earlier_to)
    has_values = any(point.values for point in found.points)
    if stage is not None and found.kind == "metric" and (has_values or metric in newest):
        raise InvalidInput(
            f"{metric} is a metric, which a step has of one stage alone: stage {stage!r:.100} "
            "cannot be chosen",
            expected="no stage; of scalars alone there is one of each stage that logged it",
        )
    return Answer(
        {
            **target.heading(),
            "attempt": attempt,
            "metric": metric,
            "kind": found.kind,
            "by": by,
            **_columns(found.points[::-1], lineage, by, found.kind),
            "begun_again": _begun_again(deps, found.points[::-1]),
            "earlier_to": found.earlier_to,
        }
    )


@dataclasses.dataclass(frozen=True)
class _Asked:
    metric: str
    by: By | None
    stage: str | None
    role: str | None
    rank: int | None

    def chooses(self, role: str | None, rank: int | None) -> bool:
        return self.role in (None, role) and self.rank in (None, rank)


class _Found(NamedTuple):
    kind: str
    points: Sequence[Point]
    earlier_to: int | None


def _cut(
    points: Iterable[Point], lineage: Lineage, keep_all: bool, limit: int
) -> tuple[list[Point], int | None]:
    """Return the newest points, and the step before which there are more (None: there are none)."""
    found: list[Point] = []
    keys: set[Key] = set()
    seen: int | None = None
    for point in points:
        step = int(point.row["step"])
        again = step == seen or lineage.superseded_by(point.row) is not None
        if again and not keep_all:
            continue
        keys |= point.values.keys()
        if len(found) >= limit or len(found) * len(keys) >= MOST_VALUES:
            return found, min(step, int(found[-1].row["step"]) - 1)
        seen = step
        found.append(point)
    return found, None


def _metrics(
    deps: Dependencies, asked: _Asked, ids: Sequence[int], window: Mapping[str, Any]
) -> Iterator[Point]:
    """Yield every step, with the metric where it was published."""
    by = asked.by or ("rank" if asked.rank is not None or asked.role is not None else None)
    old = 0
    numbers: Literal["metrics", "slices"] = "metrics" if by is None else "slices"
    lost = {
        (row["attempt_id"], row["step"]): f"{row['count']} payloads were lost: {row['reason']:.300}"
        for row in deps.catalogue.lost_payloads(ids, **window)
    }
    failed = failures(deps.catalogue, ids)
    for row in deps.catalogue.step_metrics(ids, version=VERSION, **window, numbers=numbers):
        stored = row.pop(numbers)
        point = Point(row, {})
        if stored is None and row["has_whole"]:
            old += 1
            if old > _OLD_STEPS:
                point.reason = OLD
                yield point
                continue
            stored = _read_anew(deps, row, by is not None)
        if stored is None:
            point.reason = _gap(row, failed.get((row["attempt_id"], row["step"])))
            if point.reason == UNMEASURED:
                point.reason = lost.get((row["attempt_id"], row["step"]), UNMEASURED)
        elif by is None:
            value = stored.get(asked.metric, _MISSING)
            point.values = {} if value is _MISSING else {_WHOLE: value}
        else:
            slices = stored if isinstance(stored, SliceMetrics) else SliceMetrics.from_bytes(stored)
            point.values = {
                (None, role if by == "rank" else None, number): value
                for (role, number), value in slices.column(by, asked.metric).items()
                if by != "rank" or asked.chooses(role, number)
            }
        if not point.values and point.reason is None:
            point.reason = ABSENT
        yield point


_WHOLE: Final[Key] = (None, None, None)
_MISSING: Final = object()


def _read_anew(deps: Dependencies, row: Row, slices: bool) -> Any:
    """Return the numbers of a step that were stored by an earlier version; None: they are not."""
    measured: MeasuredStep = deps.measures.of(int(row["attempt_id"]), row)
    found = measured.comparability
    row["verdict"], row["stage"] = found.verdict, measured.whole.stage
    row["suspects"] = [check.name for check in found.suspects]
    return SliceMetrics.of(measured.whole) if slices else measured.published


def _gap(row: Row, failed: str | None) -> str:
    if row["closed_wall"] is None:
        return OPEN
    if is_behind(row):
        return BEHIND if failed is None else f"its aggregation failed: {failed:.300}"
    return UNMEASURED


def _scalars(
    deps: Dependencies, asked: _Asked, ids: Sequence[int], window: Mapping[str, Any]
) -> Iterator[Point]:
    """Yield every step, with the scalar where somebody logged it."""
    if asked.by not in (None, "rank"):
        return
    values = deps.catalogue.scalar_values(
        ids, asked.metric, by_rank=asked.by == "rank", **window,
        stage=asked.stage, role=asked.role, rank=asked.rank,
    )  # fmt: skip
    by_step: dict[tuple[int, int], list[Row]] = {}
    for value in values:
        if value["step"] is not None:
            by_step.setdefault((value["attempt_id"], value["step"]), []).append(value)
    if not by_step:
        return
    for row in deps.catalogue.step_metrics(ids, version=VERSION, **window, numbers=None):
        logged = by_step.get((row["attempt_id"], row["step"]), [])
        point = Point(row, {}, None if logged else OPEN if not row["closed_wall"] else NOT_LOGGED)
        for value in logged:
            key = (value["stage"], value["role"], value.get("rank"))
            point.values[key] = _mean(value)
            point.low[key], point.high[key] = _low(value), _high(value)
        yield point


def _mean(row: Row) -> float | str | None:
    """Return the mean of all values: the non-finite ones count as they do in a sum."""
    if row["nan"] or (row["posinf"] and row["neginf"]):
        return "nan"
    return "inf" if row["posinf"] else "-inf" if row["neginf"] else row["mean"]


def _low(row: Row) -> float | str | None:
    return "nan" if row["nan"] else "-inf" if row["neginf"] else _or(row["low"], "inf")


def _high(row: Row) -> float | str | None:
    return "nan" if row["nan"] else "inf" if row["posinf"] else _or(row["high"], "-inf")


def _or(value: float | None, otherwise: str) -> float | str:
    return otherwise if value is None else value


def _columns(points: Sequence[Point], lineage: Lineage, by: By | None, kind: str) -> Row:
    """Return the answer's columns, one entry a step, and its series."""
    keys = sorted({key for point in points for key in point.values}, key=_key_order)
    # Where all are of one stage and role, saying it in each name says nothing.
    same_stage = len({key[0] for key in keys}) <= 1
    same_role = len({key[1] for key in keys}) <= 1
    found = []
    for key in keys:
        stage, role, number = key
        words = [None if same_stage else stage, None if same_role and by != "rank" else role]
        place = {"stage": stage, "role": role, by or "rank": number}
        one: Row = {
            "name": " ".join(str(word) for word in (*words, _numbered(by, number)) if word),
            **{name: value for name, value in place.items() if value is not None},
            "values": [point.values.get(key) for point in points],
        }
        if kind == "scalar":
            one["low"] = [point.low.get(key) for point in points]
            one["high"] = [point.high.get(key) for point in points]
        found.append(one)
    rows = [point.row for point in points]
    return {
        "steps": [row["step"] for row in rows],
        "attempts": [lineage.numbers[row["attempt_id"]] for row in rows],
        "superseded_by": [lineage.superseded_by(row) for row in rows],
        "complete": [
            "open" if row["closed_wall"] is None else row["completeness"] or "unknown"
            for row in rows
        ],
        "comparable": [row["verdict"] for row in rows],
        "suspects": [row["suspects"] or [] for row in rows],
        "reasons": [point.reason for point in points],
        "series": found,
    }


def _begun_again(deps: Dependencies, points: Sequence[Point]) -> list[list[Row]]:
    """Return who began each of the steps again, an entry a step."""
    places = [(int(point.row["attempt_id"]), int(point.row["step"])) for point in points]
    if not places:
        return []
    found = begun_again(
        deps.catalogue,
        {attempt_id for attempt_id, _ in places},
        first=places[0][1],
        last=places[-1][1],
    )
    return [found.get(place, []) for place in places]


def _key_order(key: Key) -> tuple[str, str, int]:
    return (key[0] or "", key[1] or "", -1 if key[2] is None else key[2])


def _numbered(by: By | None, number: int | None) -> str:
    if number is None:
        return ""
    return str(number) if by in (None, "rank") else f"{by} {number}"


def _newest_metrics(deps: Dependencies, ids: Sequence[int]) -> Mapping[str, Any]:
    """Return the published numbers of the newest step that has some."""
    rows = deps.catalogue.step_metrics(ids, version=VERSION)
    return next((row["metrics"] for row in rows if row["metrics"]), {})


def _is_published(metric: str, newest: Mapping[str, Any]) -> bool:
    family = metric.partition("/")[0]
    return not newest or metric in newest or any(name.startswith(f"{family}/") for name in newest)


def _unlogged(point: Point) -> Point:
    reason = NOT_LOGGED if point.row["closed_wall"] else OPEN
    return dataclasses.replace(point, reason=reason)


def _check_rank(asked: _Asked, there: Collection[tuple[str | None, int | None]]) -> None:
    if any(asked.chooses(role, rank) for role, rank in there):
        return
    known = sorted({(str(role), int(rank or 0)) for role, rank in there})
    wanted = asked.role or "any role"
    wanted += "" if asked.rank is None else f", rank {asked.rank}"
    raise NotFound(
        f"there is no {asked.metric} of {wanted}",
        expected=ranks_text(known) if known else "",
    )


def _check_name(
    deps: Dependencies,
    asked: _Asked,
    target: Target,
    ids: Sequence[int],
    metrics: Mapping[str, Any],
) -> Literal["metric", "scalar"]:
    """Say what was meant where there is no such number; return what it is where it may have been.

    Raises:
        NotFound: no metric of the newest steps and no scalar has that name, or none of the last
            steps that have it is of the stage, role or rank that was asked for.
        InvalidInput: a scalar by round or staleness.
    """
    names = deps.catalogue.scalar_names(ids)
    if asked.metric in names:
        if asked.by not in (None, "rank"):
            raise InvalidInput(
                f"{asked.metric} is a scalar, which has no {asked.by}",
                expected="by=rank, or no by",
            )
        if (last := names[asked.metric]) is None:
            return "scalar"  # of no step
        window = {"first": last - _NAMED_STEPS, "last": last}
        own = list(deps.catalogue.scalar_values(ids, asked.metric, by_rank=True, **window))
        stages = {str(row["stage"]) for row in own if row["stage"] is not None}
        if asked.stage is not None and asked.stage not in stages:
            close = meant(asked.stage, sorted(stages))
            raise NotFound(
                f"{asked.metric} is logged in no stage {asked.stage!r:.100}",
                expected=f"one of {', '.join(sorted(stages))}" if stages else "no stage",
                advice=f"did you mean {' or '.join(close)}?" if close else "",
            )
        _check_rank(asked, {(row["role"], row["rank"]) for row in own})
        return "scalar"
    if asked.metric in metrics and (asked.by or asked.role or asked.rank is not None):
        rows = deps.catalogue.step_metrics(ids, version=VERSION, numbers="slices")
        blob = next((row["slices"] for row in rows if row["slices"]), None)
        slices = SliceMetrics.from_bytes(blob) if blob else None
        if slices is not None and asked.metric not in slices.names:
            raise NotFound(
                f"{asked.metric} is a number of the whole step: there is none by "
                f"{asked.by or 'rank'}",
                expected=f"one of {', '.join(slices.names)}",
            )
        if slices is not None:
            _check_rank(asked, slices.column("rank", asked.metric))
    if asked.metric in metrics or not (metrics or names):
        return "metric"
    close = meant(asked.metric, [*metrics, *names])
    raise NotFound(
        f"run {target.run} has no metric and no scalar {asked.metric!r:.100}",
        advice=(f"did you mean {' or '.join(close)}? " if close else "")
        + "see /steps/latest/metrics and /steps/latest/scalars for the names",
    )
