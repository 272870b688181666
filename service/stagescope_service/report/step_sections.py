"""The sections of a report about one step: ranks, spread, anatomy, samples, operators."""

from __future__ import annotations

from typing import Final

from stagescope_service.figures import (
    anatomy,
    density,
    distribution,
    offenders,
    timeline,
)  # fmt: skip
from stagescope_service.figures import operators as operator_figures
from stagescope_service.report.parts import (
    MAX_ROWS,
    ReportScope,
    ReportSection,
    body_of,
    figure_of,
    missing_text,
    table_of,
)
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.operators import tables as operators
from stagescope_service.views.pages import Page
from stagescope_service.views.samples import listing as samples
from stagescope_service.views.steps import listing as steps


def step_section(scope: ReportScope) -> ReportSection:
    """Describe how far the step has come, and how long its stages took."""
    deps, target = scope.deps, scope.target
    rows, found = steps.progress_of(deps, target)
    missing = found.missing
    gap = steps.gap_of(deps, target)
    text = f"the step is {found.complete}"
    scope.say("step", found.complete, gap or text, bad=found.complete in ("partial", "unknown"))
    superseded = target.superseded_by
    texts = [text] + ([] if superseded is None else [f"attempt {superseded} repeats this step"])
    times: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for row in rows:
        if row["begin_mono"] is not None and row["end_mono"] is not None:
            seconds = max(row["end_mono"] - row["begin_mono"], 0.0)
            times.setdefault((row["stage"], row["role"]), []).append((seconds, row["rank"]))
    table: list[JsonObject] = [
        {
            "stage": stage,
            "role": role,
            "parts": len(each),
            "mean_seconds": sum(seconds for seconds, _ in each) / len(each),
            "slowest_seconds": max(each)[0],
            "slowest_rank": max(each)[1],
        }
        for (stage, role), each in times.items()
    ]
    columns = "stage role parts mean_seconds slowest_seconds slowest_rank"
    gaps = [
        text for text in (gap, f"missing: {missing_text(missing)}" if missing else None) if text
    ]
    return ReportSection(
        texts=texts, table=table_of({"rows": table}, columns), gaps=gaps,
        figures=[figure_of("timeline", timeline.figure, timeline.info(deps, target))],
    )  # fmt: skip


def spread_section(scope: ReportScope) -> ReportSection:
    """Draw how the tokens' ratios and log-probs are distributed."""
    deps, target = scope.deps, scope.measured_step
    ratio = distribution.info(deps, target, of="ratio")
    return ReportSection(
        figures=[
            figure_of("distribution", distribution.figure, ratio),
            figure_of("density", density.figure, density.info(deps, target)),
        ],
    )  # fmt: skip


_PROPERTIES: Final = (
    "place", "end", "position", "probability", "staleness", "engine", "lattice",
)  # fmt: skip
"""The properties of tokens that a report draws the mismatch by, if they are known."""


def anatomy_section(scope: ReportScope) -> ReportSection:
    """Draw the mismatch by each property of the tokens that is known."""
    deps, target = scope.deps, scope.measured_step
    drawn, gaps = [], []
    for by in _PROPERTIES:
        found = anatomy.info(deps, target, by)
        if found.bins:
            drawn.append(figure_of("anatomy", anatomy.figure, found))
        else:
            gaps.append(f"by {by}: {found.note}")
    return ReportSection(figures=drawn, gaps=gaps)


def offenders_section(scope: ReportScope) -> ReportSection:
    """Draw the prompts that differ more than their steps."""
    found = offenders.info(
        scope.deps, scope.run, scope.attempt, {"first": None, "last": scope.step}
    )
    if not found.rows:
        return ReportSection(gaps=[found.note or "no prompt"])
    drawn = figure_of("offenders", offenders.figure, found)
    return ReportSection(figures=[drawn])


def samples_section(scope: ReportScope) -> ReportSection:
    """List the worst samples."""
    answer = body_of(samples.samples(scope.deps, scope.measured_step, Page(MAX_ROWS + 1)))
    columns = "sample_uid group_id role rank rounds tokens mean_abs max_abs nonfinite reward"
    return ReportSection(table=table_of(answer, columns))


def scalars_section(scope: ReportScope) -> ReportSection | None:
    """List the scalars of the step, over ranks and parts."""
    found: dict[tuple[str | None, str, str], list[float]] = {}
    target = scope.target
    rows = scope.deps.catalogue.scalars(target.attempt_id, target.step_number, limit=1_000_000)
    for row in rows:
        found.setdefault((row["stage"], row["role"], row["name"]), []).append(row["value"])
    if not found:
        return None
    table: list[JsonObject] = [
        {"name": name, "stage": stage, "role": role, "ranks_and_parts": len(values),
         "mean": sum(values) / len(values), "min": min(values), "max": max(values)}
        for (stage, role, name), values in found.items()
    ]  # fmt: skip
    table = body_of(table)
    columns = "name stage role ranks_and_parts mean min max"
    return ReportSection(table=table_of({"rows": table}, columns))


def operators_section(scope: ReportScope) -> ReportSection:
    """List the first non-finite result of each dump."""
    deps, target = scope.deps, scope.target
    rows, earliest = operators.first_non_finite(deps, target, {})
    columns = "stage role rank part name index certain"
    texts = ["all results of the captured operators are finite"]
    if unmeasured := sum(row["unmeasured"] or 0 for row in rows):
        texts = [
            "no result of the captured operators is known to be NaN or infinite, but "
            f"{unmeasured} tensors have no recorded Min and Max"
        ]
    if earliest is not None:
        texts = [f"the first operator with a NaN or infinite result: {earliest['name']} of "
                 f"{earliest['role']} {earliest['rank']} in {earliest['stage']}"]  # fmt: skip
    listed = [row for row in rows if row.get("name") is not None]
    found = operator_figures.info(deps, target, {})
    return ReportSection(
        texts=texts, table=table_of({"rows": listed}, columns),
        figures=[figure_of("operators", operator_figures.figure, found)],
    )  # fmt: skip
