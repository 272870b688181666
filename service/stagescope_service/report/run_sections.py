"""The sections of a report about a whole run: attempts, the course, steps, captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from stagescope_service.figures import (
    heatmaps,
    overview,
)  # fmt: skip
from stagescope_service.figures.run_curves import CurveRequest
from stagescope_service.report.parts import (
    MAX_ROWS,
    NEWEST_STEPS,
    ReportItem,
    ReportScope,
    ReportSection,
    ReportTable,
    body_of,
    figure_of,
    missing_text,
    shortened,
    table_of,
)
from stagescope_service.views import runs, series
from stagescope_service.views.captures import listing as captures
from stagescope_service.views.captures.progress import progress
from stagescope_service.views.comparisons import comparing as comparisons
from stagescope_service.views.encoding import JsonObject, parse_nonfinite
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import ALL_RANKS, ALL_STEPS
from stagescope_service.views.steps import listing as steps
from stagescope_wire.captures import needs_ranks
from stagescope_wire.errors import StagescopeError
from stagescope_wire.render import counted, format_value
from stagescope_wire.sparkline import sparkline

_TREND: Final = 40
"""Bars of a sparkline."""
_SCALARS: Final = ("reward", "loss", "grad_norm", "entropy", "response_length")


def attempts_section(scope: ReportScope) -> ReportSection:
    """List the attempts, what changed at the last restart, and the newest fingerprint."""
    deps = scope.deps
    answer = body_of(runs.attempts(deps, Page(1000), scope.run))
    rows = answer["rows"]
    columns = "attempt state begun ended end_reason resumed_from_step first_step last_closed_step"
    texts, items = [], []
    for row in rows[:MAX_ROWS]:
        texts += [
            f"steps of attempt {row['attempt']} from {part['from_step']} on are repeated by "
            f"attempt {part['by']}"
            for part in row["superseded"]
        ]
    restarts = len(rows) - 1
    newest = rows[0]
    since = newest["resumed_from_step"]
    text = "no restart"
    if restarts:
        resumed = "" if since is None else f"; attempt {newest['attempt']} resumed after {since}"
        text = f"{counted(restarts, 'restart')}{resumed}"
    scope.say("attempts", str(len(rows)), f"{text}; newest: {newest['state']}", bad=None)
    if restarts:
        a, b = (deps.finder.attempt(scope.run, row["attempt"]) for row in rows[1::-1])
        changed = comparisons.attempt_differences(deps, a, b).rows
        lines = [
            f"{row['area']} {row['name']}: {format_value(row['a'])} -> {format_value(row['b'])}"
            for row in changed if row["weight"] == "numbers"
        ]  # fmt: skip
        title = f"what may change numbers, attempt {a.number} against {b.number}"
        items.append(
            ReportItem(title, [shortened(line) for line in lines[:MAX_ROWS]] or ["nothing known"])
        )
    items.append(
        ReportItem("fingerprint of the newest attempt", _fingerprint(newest["fingerprint"]))
    )
    return ReportSection(texts=texts, items=items, table=table_of(answer, columns))


def _fingerprint(found: object) -> list[str]:
    """Return an attempt's fingerprint as lines; long parts as counts."""
    if not isinstance(found, Mapping) or not found:
        return ["none is known"]
    lines = []
    for name, value in found.items():
        if name in ("environment", "config", "code") and isinstance(value, Mapping):
            lines.append(f"{name}: {len(value)} values (stagescope attempts --json)")
        elif isinstance(value, Mapping):
            lines.append(f"{name}: {', '.join(f'{k} {format_value(v)}' for k, v in value.items())}")
        else:
            lines.append(f"{name}: {format_value(value)}")
    return [shortened(line) for line in lines]


def course_section(scope: ReportScope) -> ReportSection:
    """Return the numbers over the steps."""
    deps = scope.deps
    request = CurveRequest((), scope.attempt, ALL_STEPS, superseded=True, smooth=None)
    by_step = heatmaps.steps_info(deps, *scope.query, ALL_STEPS, heatmaps.DEFAULT)
    drawn = [
        figure_of("overview", overview.figure, overview.info(deps, scope.run, request)),
        figure_of("rank-steps", heatmaps.figure, by_step),
    ]
    rows: list[JsonObject] = []
    for metric in (*overview.MISMATCH, *_SCALARS):
        try:
            found = series.series(
                deps, {**ALL_RANKS, "metric": metric, "by": None}, scope.query, ALL_STEPS,
                limit=series.MAX_SERIES_STEPS,
            )  # fmt: skip
        except StagescopeError:  # it is not recorded
            continue
        rows += _trends(metric, body_of(found))
    columns = ("metric", "course", "last", "min", "max", "steps")
    text = (
        "a bar is a step. If there are more steps than bars, two bars show the smallest and the "
        "largest value of several steps. A space is a gap, ! is not finite"
    )
    return ReportSection(texts=[text], table=ReportTable(columns, rows), figures=drawn)


def _trends(metric: str, answer: JsonObject) -> Iterator[JsonObject]:
    several = answer["series"]
    for each in several:
        values = [parse_nonfinite(value) for value in each["values"]]
        known = [value for value in values if value is not None]
        if not known:
            continue
        finite = [value for value in known if abs(value) < float("inf")]
        stage = f" ({each['stage']})" if len(several) > 1 else ""
        yield {
            "metric": f"{metric}{stage}",
            "course": sparkline(values, _TREND, bars="▁▂▃▄▅▆▇█", extremes=True),
            "last": known[-1],
            "min": min(finite, default=None),
            "max": max(finite, default=None),
            "steps": len(known),
        }


def steps_section(scope: ReportScope) -> ReportSection:
    """Count the steps by completeness, and list those that lack something."""
    answer = body_of(steps.steps(scope.deps, Page(NEWEST_STEPS), scope.run, scope.attempt))
    rows = answer["rows"]
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row["complete"])] = counts.get(str(row["complete"]), 0) + 1
    text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none yet"
    bad = [row for row in rows if row["complete"] in ("partial", "unknown") or row["gap"]]
    newest = f"the newest {len(rows)} steps" if answer["next"] else f"{len(rows)} steps"
    partial = counts.get("partial", 0)
    scope.say("steps", f"{partial} partial", f"{newest}: {text}", bad=partial > 0)
    listed: list[JsonObject] = [
        {**row, "missing": missing_text(row["missing"]) or None} for row in bad
    ]
    columns = "step attempt complete missing gap lost superseded_by"
    return ReportSection(texts=[f"{newest}: {text}"], table=table_of({"rows": listed}, columns))


def captures_section(scope: ReportScope) -> ReportSection | None:
    """List the captures of the run, or those of the step."""
    deps, step = scope.deps, scope.step
    answer = body_of(captures.captures(deps, Page(MAX_ROWS), scope.run))
    rows: list[JsonObject] = []
    for row in answer["rows"]:
        stored = deps.catalogue.capture(str(row["capture_id"]))
        if stored is None:
            continue
        found = progress(deps.catalogue, stored)
        of_steps = [each for each in found.steps if step in (None, each["step"])]
        if step is not None and not of_steps:
            continue
        stages = stored["spec"].get("stages") or ()  # a list of names, or "all"
        rows.append(
            {
                "capture_id": row["capture_id"],
                "state": found.state,
                "stages": stages if isinstance(stages, str) else ", ".join(stages),
                "steps": ", ".join(f"{each['step']} {each['state']}" for each in of_steps[:8]),
                "dumps": sum(each["collected"] for each in of_steps)
                if needs_ranks(stored["spec"])
                else 0,
                "created_wall": row["created_wall"],
                "by": row["by"],
            }
        )
    text = [] if rows else ["no capture was requested" + ("" if step is None else " of this step")]
    columns = "capture_id state stages steps dumps created_wall by"
    return ReportSection(texts=text, table=table_of({"rows": rows}, columns))
