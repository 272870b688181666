"""One number over the steps of a run: a published metric or a scalar, or slices."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Final, Literal

from stagescope_service.statistics.step_metrics import VERSION, SliceMetrics
from stagescope_service.store.queries.measurements import StepNumbers
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import BegunAgain
from stagescope_service.views.reading.completeness import begun_again, verdicts
from stagescope_service.views.reading.dependencies import (
    AttemptQuery,
    Dependencies,
    RankQuery,
    Window,
    check_window,
)
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.reading.target import Target
from stagescope_service.views.series_points import (
    NOT_LOGGED,
    OPEN,
    By,
    Key,
    Point,
    PointPage,
    SeriesRequest,
    Value,
    metric_points,
    newest_points,
    scalar_points,
)
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.links import Link
from stagescope_wire.names import similar_names
from stagescope_wire.render import ranges_text, ranks_text

REWARD: Final = ("reward", "critic/score/mean", "critic/rewards/mean", "*reward*/mean", "*reward*")
"""Patterns of the scalar that is a training's reward; the first match counts."""
MAX_SERIES_STEPS: Final = 20_000
"""Most steps of an answer."""
_STEPS_SEARCHED: Final = 20
"""Newest steps that are searched for the ranks and stages of a scalar."""


class SeriesQuery(RankQuery):
    """The query parameters that select series; None: no filter."""

    metric: str
    by: By | None


def _superseded_note(superseded: Mapping[int, Sequence[int]]) -> str | None:
    """Return which steps only superseded attempts have; None: there are none."""
    if not superseded:
        return None
    texts = [
        f"attempt {attempt} has {ranges_text('step', steps)}"
        for attempt, steps in sorted(superseded.items())
    ]
    return (
        f"{', '.join(texts)}, which no current attempt has: a later attempt restarted before them "
        "(ask for that attempt, or for superseded steps)"
    )


def reward_of(scalars: Iterable[str]) -> str | None:
    """Return which of a run's scalars is its reward; None: none is."""
    names = sorted(scalars)
    return next((name for each in REWARD for name in fnmatch.filter(names, each)), None)


# --- the answer -----------------------------------------------------------------------------
def _columns(points: Sequence[Point], lineage: Lineage, by: By | None, kind: str) -> JsonObject:
    """Return the answer's columns, one entry a step, and its series."""
    keys = sorted({key for point in points for key in point.values}, key=_key_order)
    # Names leave out a stage or role that all series share.
    same_stage = len({key[0] for key in keys}) <= 1
    same_role = len({key[1] for key in keys}) <= 1
    columns: list[JsonObject] = []
    for key in keys:
        stage, role, number = key
        name = [
            None if same_stage else stage,
            None if same_role and by != "rank" else role,
            _slice_name(by, number),
        ]
        identity = {"stage": stage, "role": role, by or "rank": number}
        column: JsonObject = {
            "name": " ".join(part for part in name if part),
            **{field: value for field, value in identity.items() if value is not None},
            "values": [point.values.get(key) for point in points],
        }
        if kind == "scalar":
            column["low"] = [point.low.get(key) for point in points]
            column["high"] = [point.high.get(key) for point in points]
        columns.append(column)
    rows = [point.row for point in points]
    return {
        "steps": [row["step"] for row in rows],
        "attempts": [lineage.numbers[row["attempt_id"]] for row in rows],
        "superseded_by": [lineage.superseded_by(row) for row in rows],
        "comparable": [row["verdict"] for row in rows],
        "suspects": [row["suspects"] or [] for row in rows],
        "nonfinite": [_not_finite(row) for row in rows],
        "reasons": [point.reason for point in points],
        "series": columns,
    }


def _not_finite(row: StepNumbers) -> int | None:
    """Return how many tokens of a step are not finite; None: it has no numbers."""
    masked, tokens = row["masked_tokens"], row["tokens"]
    return None if masked is None or tokens is None else masked - tokens


def _begun_again(deps: Dependencies, points: Sequence[Point]) -> list[list[BegunAgain]]:
    """Return the ranks that began each of the steps again, an entry a step."""
    keys = [(int(point.row["attempt_id"]), int(point.row["step"])) for point in points]
    if not keys:
        return []
    repeated = begun_again(
        deps.catalogue, {attempt_id for attempt_id, _ in keys}, first=keys[0][1], last=keys[-1][1]
    )
    return [repeated.get(key, []) for key in keys]


def _key_order(key: Key) -> tuple[str, str, int]:
    return (key[0] or "", key[1] or "", -1 if key[2] is None else key[2])


def _slice_name(by: By | None, number: int | None) -> str:
    if number is None:
        return ""
    return str(number) if by in (None, "rank") else f"{by} {number}"


# --- names that do not exist ----------------------------------------------------------------
def newest_metrics(deps: Dependencies, ids: Sequence[int]) -> Mapping[str, Value]:
    """Return the published numbers of the newest step that has some."""
    return deps.catalogue.newest_numbers(ids, version=VERSION)


def _is_published(metric: str, newest: Mapping[str, Value]) -> bool:
    """Return whether a name looks like a published metric's, given those of the newest step."""
    family = metric.partition("/")[0]
    return not newest or metric in newest or any(name.startswith(f"{family}/") for name in newest)


def _unlogged(point: Point) -> Point:
    reason = NOT_LOGGED if point.row["closed_wall"] else OPEN
    return dataclasses.replace(point, reason=reason)


def _check_rank(
    requested: SeriesRequest, existing: Collection[tuple[str | None, int | None]]
) -> None:
    """Raise NotFound where none of the existing (role, rank) is requested."""
    if any(requested.matches(role, rank) for role, rank in existing):
        return
    ranks = sorted({(str(role), int(rank or 0)) for role, rank in existing})
    owner = requested.role or "any role"
    owner += "" if requested.rank is None else f", rank {requested.rank}"
    raise NotFound(
        f"there is no {requested.metric} of {owner}", expected=ranks_text(ranks) if ranks else ""
    )


def _check_name(
    deps: Dependencies, requested: SeriesRequest, target: Target, metrics: Mapping[str, Value]
) -> Literal["metric", "scalar"]:
    """Return the kind of a name without values; raise where it cannot have any.

    Args:
        deps: the catalogue's holder.
        requested: the name and its slices.
        target: the run.
        metrics: of the newest step.

    Raises:
        NotFound: no metric of the newest steps and no scalar has that name, or the last steps
            that have it lack the requested stage, role or rank.
        InvalidInput: a scalar by round or staleness.
    """
    name, ids = requested.metric, requested.attempt_ids
    scalars = deps.catalogue.scalar_names(ids)
    if name in scalars:
        _check_scalar(deps, requested, scalars[name])
        return "scalar"
    has_slice = requested.by or requested.role or requested.rank is not None
    if name in metrics and has_slice:
        # The error below keeps this frame for a while; its read transaction would stay as long.
        with closing(deps.catalogue.step_metrics(ids, version=VERSION, numbers="slices")) as rows:
            blob = next((each for row in rows if (each := row.get("slices"))), None)
        slices = SliceMetrics.from_bytes(blob) if blob else None
        if slices is not None and name not in slices.names:
            raise NotFound(
                f"{name} is a number of the whole step: there is none by {requested.by or 'rank'}",
                expected=f"one of {', '.join(slices.names)}",
            )
        if slices is not None:
            _check_rank(requested, slices.column("rank", name))
    check_known(target, name, metrics, scalars)
    return "metric"


def check_known(
    target: Target, name: str, metrics: Collection[str], scalars: Collection[str]
) -> None:
    """Check a name against the metrics and scalars of a run; any will do if it has none yet.

    Raises:
        NotFound: there is no such metric and no such scalar.
    """
    if name in metrics or name in scalars or not (metrics or scalars):
        return
    close = similar_names(name, [*metrics, *scalars])
    raise NotFound(
        f"run {target.shown_run} has no metric and no scalar {name!r:.100}",
        advice=f"did you mean {' or '.join(close)}?" if close else "",
        see=(Link("metric_names", run=target.run, shows="the names"),),
    )


def _check_scalar(deps: Dependencies, requested: SeriesRequest, last: int | None) -> None:
    """Raise where a scalar has no such slice, stage, role or rank.

    Args:
        deps: the catalogue's holder.
        requested: the scalar and its slices.
        last: its newest step; None: it is of no step.
    """
    name = requested.metric
    if not requested.has_scalar_slices:
        raise InvalidInput(
            f"{name} is a scalar, which has no {requested.by}", expected="by=rank, or no by"
        )
    if last is None:
        return
    rows = list(
        deps.catalogue.scalar_values(
            requested.attempt_ids, name, by_rank=True, first=last - _STEPS_SEARCHED, last=last
        )
    )
    stages = sorted({str(row["stage"]) for row in rows if row["stage"] is not None})
    if requested.stage is not None and requested.stage not in stages:
        close = similar_names(requested.stage, stages)
        raise NotFound(
            f"{name} is logged in no stage {requested.stage!r:.100}",
            expected=f"one of {', '.join(stages)}" if stages else "no stage",
            advice=f"did you mean {' or '.join(close)}?" if close else "",
        )
    _check_rank(requested, {(row["role"], row.get("rank")) for row in rows})


def series(
    deps: Dependencies,
    query: SeriesQuery,
    chosen: AttemptQuery,
    window: Window,
    superseded: bool = False,
    limit: int = 10000,
) -> JsonObject:
    """Return one number over the steps of a run, as columns: `steps` and, aligned, the others."""
    check_window(window)
    target = deps.finder.attempt(*chosen)
    metric, stage, attempt = query["metric"], query["stage"], chosen.attempt
    attempts = deps.catalogue.attempts(target.run)
    lineage = Lineage(attempts)
    ids = [row["attempt_id"] for row in attempts if attempt in (None, row["number"])]
    requested = SeriesRequest(**query, attempt_ids=ids, window=window)
    keep_all = superseded or attempt is not None
    result = PointPage("metric", [], None)
    newest = newest_metrics(deps, ids)
    readers = {"metric": metric_points, "scalar": scalar_points}
    # The kind that the name suggests is read first: most often the other need not be read.
    scalars_first = stage is not None or not _is_published(metric, newest)
    for kind in sorted(readers, reverse=scalars_first):
        page = newest_points(kind, readers[kind](deps, requested), lineage, keep_all, limit)
        result = page if page.points or page.superseded else result
        if any(point.values for point in page.points):
            break
    else:
        if _check_name(deps, requested, target, newest) == "scalar":
            unlogged = [_unlogged(point) for point in result.points]
            result = result._replace(kind="scalar", points=unlogged)
    has_values = any(point.values for point in result.points)
    if stage is not None and result.kind == "metric" and (has_values or metric in newest):
        raise InvalidInput(
            f"{metric} is a metric, which a step has for one stage only: stage {stage!r:.100} "
            "cannot be chosen",
            expected="no stage; only a scalar has one value for each stage that logged it",
        )
    return {
        **target.heading(),
        "attempt": attempt,
        "metric": metric,
        "kind": result.kind,
        "by": query["by"],
        **_columns(result.points[::-1], lineage, query["by"], result.kind),
        "complete": verdicts(
            deps.catalogue, target.run, [point.row for point in result.points[::-1]]
        ),
        "begun_again": _begun_again(deps, result.points[::-1]),
        "earlier_to": result.earlier_to,
        "note": _superseded_note(result.superseded),
    }
